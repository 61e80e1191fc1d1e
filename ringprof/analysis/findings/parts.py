"""Parts of a waterfall: one row for each, with its name, evidence, remedy and sentence.

A row names what is said of a part; the functions behind it follow in this module, those of the remedies in
`ringprof.analysis.findings.recommendations`. The times of the parts are `ringprof.analysis.findings.waterfall`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings import recommendations as remedies
from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.findings.idle_text import blocked_idle_sentence, blocked_recommendation, launch_idle_sentence
from ringprof.analysis.findings.recommendations import (
    UNBALANCED,
    known_contiguous,
    late_ranks,
    rises_with_rank,
    slow_between_hosts,
    slow_senders,
)
from ringprof.analysis.findings.step_rates import compute_part_sentence
from ringprof.analysis.findings.summary import KindRow
from ringprof.analysis.findings.waterfall import ATTENTION_PARTS, NO_WORK, Facts, WaterfallPart
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS, KIND, MEMORY, in_a_sentence
from ringprof.analysis.rank import Rank
from ringprof.analysis.transfers.hops import OTHER_HOST, SAME_HOST
from ringprof.analysis.workload_checks import workload_fits
from ringprof.common.formatting import three_digits

Text = str | Callable[[Facts], str]
"""Text about a part: the same for every run, or made from the facts of a run."""
PASSES = {"fwd": "forward", "bwd": "backward"}
"""Names of the passes in sentences, by their names in traces."""
_MOSTLY_WAITING = 0.5
"""Share of a rank's communication time from which on it counts as mostly waiting."""


class PartRow(NamedTuple):
    """One part of a waterfall, and all that is said of it."""

    name: str
    label: str
    """Name in tables and charts."""
    evidence: Text
    """Metrics that the part is computed from, in one line."""
    remedy: Text = ""
    """Recommendation that would shorten the part; empty where none is known."""
    sentence: Callable[[Facts, float], str] = lambda facts, share: ""
    """Line of the verdict where the part is the largest loss, from its share of the time, without a full stop."""
    without_remedy: Text = ""
    """Why there is no recommendation for the part as the largest loss; empty where there is nothing to say."""
    noun: str = ""
    """Name in a sentence; empty: the label."""


def parts_in_words(facts: Facts) -> tuple[WaterfallPart, ...]:
    """Return the parts of a waterfall in order, each with its evidence and remedy."""
    waterfall, ranks = facts.waterfall, facts.attribution.ranks
    # These are shown even if they take no time, since that is worth knowing.
    always_shown = {"merge_and_copies", "launch_gaps", *(() if facts.attribution.recurrent else ATTENTION_PARTS)}
    if len(ranks) > 1 and any(row.timed for rank in ranks for row in rank.link_totals):
        always_shown |= {"imbalance", "exposed_wire", "peer_wait"}
    parts, total_ns = [], 0
    for name, row in PARTS.items():
        time_ns = waterfall.times_ns.get(name)
        if time_ns is None or (not time_ns and name not in always_shown):
            continue
        total_ns += time_ns
        parts.append(
            WaterfallPart(
                part=name,
                time_ns=time_ns,
                share=time_ns / waterfall.wall_ns if waterfall.wall_ns else 0.0,
                tflops=waterfall.flops / total_ns / 1e3 if waterfall.flops and total_ns > 0 else None,
                evidence=in_words(row.evidence, facts),
                remedy=in_words(row.remedy, facts) if time_ns > 0 else "",
            )
        )
    return tuple(parts)


def in_words(text: Text, facts: Facts) -> str:
    """Return a text about a part for one run."""
    return text if isinstance(text, str) else text(facts)


def name_in_sentence(facts: Facts, part: str) -> str:
    """Return the name of a part in a sentence; merges are not named for a program without any."""
    kinds = {row.kind for row in _kinds_of(facts, part)} if part == "merge_and_copies" else set()
    if kinds and "merge" not in kinds:
        return "copies and permutations" if len(kinds) > 1 else KIND[kinds.pop()].label
    if part == "other_compute" and facts.attribution.recurrent:
        return PARTS[part].label
    return PARTS[part].noun or PARTS[part].label


# --- evidence: the metrics that a part is computed from, in one line each -----------------------------


def _attention_evidence(facts: Facts) -> str:
    """Say why attention is not compared with a peak."""
    attribution = facts.attribution
    if attribution.on_cpu:
        mean_ns = fmean(rank.breakdown.flash_ns for rank in attribution.ranks)
        return Claim("attention operators, mean {mean(flash):ms}", mean_ns)
    reason = "the traces do not tell the work" if facts.waterfall.work == NO_WORK else "no peak is known that fits"
    if attribution.run is not None and not workload_fits(attribution.run):
        reason = "the stated workload does not fit the counted FLOPs"
    return f"union of the attention kernels; {reason}: not compared with a peak"


def _peak_evidence(facts: Facts) -> str:
    """State the needed work and the peak."""
    work, rank_count = facts.waterfall.work, len(facts.attribution.ranks)
    assert work.peak is not None
    values = work.needed / rank_count / 1e12, work.peak.tflops, work.peak.source
    return Claim("{needed_tflop:,.1f} TFLOP per device at {peak_tflops:g} TFLOP/s ({})", *values)


def _matrix_product_evidence(facts: Facts) -> str:
    """State the rate of a matrix product by calibration."""
    kernels = facts.waterfall.work.kernels
    clock = "" if kernels.matmul_clock_mhz is None else Claim(" at {matmul_mhz:,.0f} MHz", kernels.matmul_clock_mhz)
    template = (
        "a plain matrix product reaches {matmul_tflops:,.0f} TFLOP/s{} by calibration {}: a distance that no change "
    )
    return Claim(f"{template}of the program removes", kernels.matmul_tflops, clock, kernels.calibration)


def _kernel_evidence(facts: Facts) -> str:
    """State the rate of the kernel alone or, where it was not measured, in the run."""
    work = facts.waterfall.work
    unknown = f"; {work.kernels.unknown}" if work.kernels.unknown else ""
    if work.solo_tflops and work.peak:
        alone = "the same blocks alone: {solo_tflops:,.1f} TFLOP/s, {solo_tflops/peak_tflops:.0%} of peak{}"
        return Claim(alone, work.solo_tflops, work.solo_tflops / work.peak.tflops, unknown)
    contained = "" if work.done is not None else " repeated work and"
    slower = f"no solo rate:{contained} slow-down beside communication is in it"
    return Claim(f"{{rate_in_run:,.1f}} TFLOP/s in the run; {slower}{{}}", _rate_in_run(facts), unknown)


def _rate_in_run(facts: Facts) -> float:
    """Return the TFLOP/s of the attention kernels in the run."""
    work = facts.waterfall.work
    attention_ns = sum(rank.breakdown.flash_ns for rank in facts.attribution.ranks)
    return (work.done or work.needed) / attention_ns / 1e3 if attention_ns else 0.0


_comparison = attrgetter("waterfall.work.kernels.evidence")
"""Comparison of the kernel with the fastest one known."""


def _computed_evidence(facts: Facts) -> str:
    """State the shortest and the longest computation of any rank."""
    ranks = facts.attribution.ranks
    least = min(ranks, key=lambda rank: rank.breakdown.compute_ns)
    most = max(ranks, key=lambda rank: rank.breakdown.compute_ns)
    if least is most:
        return Claim("each rank computes {max(compute):ms}", least.breakdown.compute_ns)
    return Claim("{}, {}", _computes(least), _computes(most))


def _computes(rank: Rank) -> str:
    """Say how long a rank computes."""
    return Claim("rank {rank} computes {compute:ms}", rank.rank, rank.breakdown.compute_ns)


def _wire_evidence(facts: Facts) -> str:
    """State the rates on the wire of the communication that takes longest."""
    rows = [row for row in facts.summary.communication if row.wire_gbps is not None]
    rates = [Claim("{} {wire_gbps:3} GB/s", row.kind, row.wire_gbps or 0.0) for row in rows[:3]]
    return Claim("on the wire with no computation beside it; {}", Claim(", ").join(rates) or "rates not known")


def _computation_evidence(part: str, facts: Facts) -> str:
    """Give the mean time of each kind that a part consists of."""
    beside = "" if facts.attribution.recurrent else "not beside attention; "
    times = [Claim("{} {kind:ms}", row.kind, row.time_ns) for row in _kinds_of(facts, part)]
    return Claim("{}mean of all: {}", beside, Claim(", ").join(times) or "none")


# --- sentences: the cause of the largest loss, as a line of the verdict -------------------------------


def _imbalance_line(facts: Facts, share: float) -> str:
    """Say how long the rank with the least computation waits, and for which ranks."""
    least = min(facts.attribution.ranks, key=lambda rank: rank.breakdown.compute_ns)
    waiting, kind = _waiting_share(least)
    if waiting < _MOSTLY_WAITING:
        # The rank ends early, or waits in another kind of communication than its longest.
        most = max(facts.attribution.ranks, key=lambda rank: rank.breakdown.compute_ns)
        takes = Claim("Imbalance takes {imbalance/wall:%} of the slowest rank's wall", share)
        return Claim("{}: {}, {}", takes, _computes(least), _computes(most))
    text = Claim(
        "{waiting_of_kind:0%} of rank {rank}'s {} time was waiting for ranks {}",
        waiting, least.rank, kind, _work_clause(facts, least),
    )  # fmt: skip
    if known_contiguous(facts.attribution):
        return text
    if rises_with_rank(facts.attribution):
        rises = "work rises with the rank, as in contiguous pieces under a causal mask: see zigzag and stripe"
        return Claim("{}; {}", text, rises)
    return Claim("{}; imbalance takes {imbalance/wall:%} of the slowest rank's wall", text, share)


def _waiting_share(rank: Rank) -> tuple[float, str]:
    """Return the share of waiting in the rank's longest kind of communication, and the name of that kind."""
    times_of_kind: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rank.link_totals:
        if row.timed:
            times_of_kind[row.kind][0] += row.wait_ns
            times_of_kind[row.kind][1] += row.wait_ns + row.wire_ns
    if not times_of_kind:
        return 0.0, "communication"
    kind = max(times_of_kind, key=lambda name: times_of_kind[name][1])
    wait_ns, total_ns = times_of_kind[kind]
    return (wait_ns / total_ns if total_ns else 0.0), in_a_sentence(kind)


def _work_clause(facts: Facts, rank: Rank) -> str:
    """Say how much more the other ranks compute than this one: by FLOPs if they are known, else by time."""
    run = facts.attribution.run
    flops = run.block_flops() if run else None
    if run and flops and flops.get(rank.rank):
        ratio = max(flops.values()) / flops[rank.rank]
        if ratio >= UNBALANCED:
            causal = "causal " if run.workload and run.workload.causal else ""
            return Claim("with up to {work_ratio:3} times its {}work", ratio, causal)
    longest = max(other.breakdown.compute_ns for other in facts.attribution.ranks)
    times = longest, rank.breakdown.compute_ns
    return Claim("that compute up to {max(compute):ms}, where it computes {min(compute):ms}", *times)


def _wire_line(facts: Facts, share: float) -> str:
    """Say how much time is exposed wire, with the slow links or the worst ring step."""
    slow = _slow_hosts_clause(facts) or _slow_ranks_clause(facts)
    where = Claim(": {}", slow) if slow else _worst_step_clause(facts)
    return Claim("{exposed_wire/time:%} of the time is bytes on a wire with nothing to hide them{}", share, where)


def _slow_hosts_clause(facts: Facts) -> str:
    """Compare the rate between hosts with that within a host; empty where links between hosts are not slow."""
    between = slow_between_hosts(facts.summary)
    if between is None:
        return ""
    within = [
        (row.wire_gbps, row.kind) for row in facts.summary.communication if row.wire_gbps and row.link == SAME_HOST
    ]
    rate, kind = max(within, default=(0.0, ""))
    kind_name = f"{in_a_sentence(kind)} " if within and kind != between.kind else ""
    against = Claim(", {}{within_host_gbps:3} within a host", kind_name, rate) if within else ""
    template = "{} between hosts moves {between_hosts_gbps:3} GB/s{}"
    return Claim(template, in_a_sentence(between.kind), between.wire_gbps or 0.0, against)


def _slow_ranks_clause(facts: Facts) -> str:
    """Name the ranks that send slowly, with their rates and those of the others; empty where none is slow."""
    rates = {rank.rank: rank.hop_totals.wire_gbps for rank in facts.attribution.ranks}
    slow_rates = slow_senders(facts.attribution)
    if not slow_rates:
        return ""
    *ranks, last = [Claim("{rank}", rank) for rank in slow_rates]
    send = Claim("ranks {} and {} send", Claim(", ").join(ranks), last) if ranks else Claim("rank {} sends", last)
    other_rates = [rate for rank, rate in rates.items() if rate and rank not in slow_rates]
    links = sorted(
        (rank.rank, peer) for rank in facts.attribution.ranks for peer in rank.hop_peers
        if rank.rank in slow_rates and peer in slow_rates
    )  # fmt: skip
    # Where all links of a ring join slow ranks, fast links would be named, too.
    named = [Claim("{rank} to {rank}", *link) for link in links[:6]] if len(links) <= len(slow_rates) else []
    return Claim(
        "{} at {} GB/s, the others at {}{}", send, _range_text("slow", [*slow_rates.values()]),
        _range_text("others", other_rates), Claim(" ({})", Claim(", ").join(named)) if named else "",
    )  # fmt: skip


def _range_text(whose: str, values: Sequence[float]) -> str:
    """Return the lowest and the highest rate as ``LOW to HIGH``, or one number where they look equal."""
    low, high = min(values), max(values)
    to_high = "" if three_digits(low) == three_digits(high) else Claim(f" to {{max({whose}_gbps):3}}", high)
    return Claim(f"{{min({whose}_gbps):3}}{{}}", low, to_high)


def _worst_step_clause(facts: Facts) -> str:
    """Name the ring step that exposes most communication; empty where there are fewer than two."""
    exposed_by_step = facts.finder.exposed_by_step
    if len(exposed_by_step) < 2:
        return ""
    phase_ns = {
        phase: sum(time for key, (time, _) in exposed_by_step.items() if key[0] == phase)
        for phase in dict.fromkeys(key[0] for key in exposed_by_step)
    }
    total_ns = sum(phase_ns.values())
    if not total_ns:
        return ""
    phase = max(phase_ns, key=lambda name: phase_ns[name])
    mean_ns = {key[1]: time / count for key, (time, count) in exposed_by_step.items() if key[0] == phase}
    worst = max(mean_ns, key=lambda step: mean_ns[step])
    return Claim(
        "; of what ring steps expose, {exposed_in_pass:0%} is in the {} pass, most in step {step} "
        "(mean {max(step):ms})",
        phase_ns[phase] / total_ns, PASSES[phase], worst, mean_ns[worst],
    )  # fmt: skip


def _wait_line(facts: Facts, share: float) -> str:
    """Say how much of the slowest rank's wall time is waiting for peers, with the slow links or the late ranks."""
    slow_clause = _slow_hosts_clause(facts) or _slow_ranks_clause(facts)
    waiting = Claim("{peer_wait/wall:%} of the slowest rank's wall is waiting for peers", share)
    wall_ns, ranks = facts.waterfall.wall_ns, facts.attribution.ranks
    early_ns = fmean(wall_ns - rank.breakdown.wall_ns for rank in ranks)
    ends_early = early_ns > _MIN_EARLY_SHARE * facts.waterfall.of("peer_wait")
    early_clause = ", or for the slowest rank to end" if ends_early else ""
    if slow_clause:
        template = f"{{}} whose hops are slow{early_clause}, {{exposed_wire/wall:%}} wire: {{}}"
        return Claim(template, waiting, facts.waterfall.of("exposed_wire") / wall_ns, slow_clause)
    late = late_ranks(facts.attribution).items()
    late_text = Claim(", ").join(Claim("rank {rank} ({waited_for:0%} of all waiting)", *item) for item in late)
    late_clause = Claim("; most waited for: {}", late_text) if late else ""
    beyond = f"{early_clause}{',' if early_clause else ''} beyond what their computation differs by"
    return Claim("{}{}{}{}", waiting, beyond, late_clause, _worst_step_clause(facts))


_MIN_EARLY_SHARE = 0.1
"""Share of the waiting above which the time after a rank's own end is named."""


def _unsplit_line(facts: Facts, share: float) -> str:
    """Say that transfer and waiting cannot be separated; on CPU, say instead how long ranks are blocked.

    ``share`` is that of the slowest rank's time.
    """
    if not facts.attribution.on_cpu:
        unknown = "How much of it is waiting and how much wire is not known (see warnings)"
        return Claim("{}{}", unknown, _worst_step_clause(facts))
    # The share includes the time from a rank's own end to the slowest rank's.
    blocked = "ranks are blocked or done on average for {exposed_unsplit/wall:%} of the slowest rank's time"
    unknown = Claim(f"On CPU {blocked}: waiting and transfer cannot be separated", share)
    return cpu_blocked_clause(facts.attribution) or unknown


def cpu_blocked_clause(attribution: Attribution) -> str:
    """Say how long CPU ranks of several hosts are blocked in channels between and within hosts.

    Empty where all ranks are on one host, or the run does not state its channels and links.
    """
    run, ranks, host_count = attribution.run, attribution.ranks, len({rank.host for rank in attribution.ranks})
    if run is None or run.work is None or not attribution.on_cpu or host_count < 2:
        return ""
    leaving = [entry for work in run.work for entry in work.sent or () if entry.link == OTHER_HOST]
    blocked_ns: dict[str, int] = defaultdict(int)
    for rank in ranks:
        for channel, time_ns in rank.blocked_ns.items():
            blocked_ns[channel] += time_ns
    # Every rank of a ring that crosses hosts is delayed by the crossing, wherever its own neighbours are.
    crossing = {entry.channel for entry in leaving}
    between = {channel: time_ns for channel, time_ns in blocked_ns.items() if channel in crossing}
    if not between:
        return ""
    wall_ns, between_ns = sum(rank.breakdown.wall_ns for rank in ranks), sum(between.values())
    sent_mb = sum(entry.sent_bytes for entry in leaving) / host_count / 1e6
    period_s = wall_ns / sum(len(rank.iteration_ns) or 1 for rank in ranks) / 1e9
    return Claim(
        "{blocked_between_hosts/time:%} of the time ranks are blocked in channels that cross hosts ({}), "
        "{blocked_within_hosts/time:%} in channels within a host; {leaving_mb:3} MB leave each host {}, "
        "{leaving_mbps:3} MB/s",
        between_ns / wall_ns, ", ".join(sorted(between, key=lambda channel: -between[channel])),
        (sum(blocked_ns.values()) - between_ns) / wall_ns, sent_mb,
        "in the captured block" if run.captured else "per iteration", sent_mb / period_s,
    )  # fmt: skip


def _computation_line(part: str, facts: Facts, share: float) -> str:
    """Say how much time a part of the computation other than attention takes, and most of what kind it is."""
    rows = _kinds_of(facts, part)
    has_main_kind = len(rows) > 1 and rows[0].time_ns > sum(row.time_ns for row in rows) / 2
    kind_clause = f", most of it {KIND[rows[0].kind].label}" if has_main_kind else ""
    return compute_part_sentence(facts.attribution, part, share, f"{name_in_sentence(facts, part)}{kind_clause}")


def _kinds_of(facts: Facts, part: str) -> list[KindRow]:
    """Return the kinds that a part of the computation consists of in this run, longest first."""
    kinds = COMPUTE_PARTS[part] if part != "merge_and_copies" else (*COMPUTE_PARTS[part], *MEMORY)
    return [row for row in facts.summary.kinds if row.kind in kinds]


def _not_launched_line(facts: Facts, share: float) -> str:
    """Say how much of the time nothing runs because the next work is not launched yet."""
    if facts.attribution.on_cpu:
        unmarked = any(warning.code == "cpu_no_wait_marks" for warning in facts.attribution.warnings)
        waits = "; waiting is not recorded" if unmarked else " and nothing waits"
        return Claim(f"{{launch_gaps/time:%}} of the time nothing computes{waits}", share)
    return launch_idle_sentence(facts.attribution, share)


# --- the table ----------------------------------------------------------------------------------------


def _computation(name: str, label: str, noun: str = "", remedy: Text = "") -> PartRow:
    """Return the row of a part of the computation outside attention, which is of the kinds of `COMPUTE_PARTS`."""
    evidence, sentence = partial(_computation_evidence, name), partial(_computation_line, name)
    return PartRow(name, label, evidence, remedy, sentence, noun=noun)


PARTS = {
    row.name: row
    for row in (
        PartRow("peak", "needed work at peak", _peak_evidence),
        PartRow("vendor_peak", "matrix product below peak", _matrix_product_evidence),
        PartRow(
            "kernel_limit", "attention below a matrix product", _kernel_evidence, remedies.kernel_limit,
            without_remedy=_comparison,
        ),
        PartRow(
            "slower_kernel", "kernel slower than the fastest known", _comparison,
            lambda facts: f"--kernel {facts.waterfall.work.kernels.fastest} (ringprof kernels)",
        ),
        PartRow("kernel", "attention kernel below peak", _kernel_evidence, remedies.another_kernel),
        PartRow(
            "repeated", "repeated work",
            lambda facts: Claim("blocks of {done/needed:.4f} times the work that the mask needs",
                                (facts.waterfall.work.done or 0) / facts.waterfall.work.needed),
            remedies.repeated,
        ),
        PartRow(
            "slowdown", "slow-down beside communication",
            lambda facts: Claim("{rate_in_run:,.1f} TFLOP/s in the run against {solo_tflops:,.1f} alone",
                                _rate_in_run(facts), facts.waterfall.work.solo_tflops),
            remedies.slowdown,
        ),
        PartRow("attention", "attention kernels", _attention_evidence, remedies.attention),
        PartRow("imbalance", "imbalance between ranks", _computed_evidence, remedies.imbalance, _imbalance_line),
        PartRow("exposed_wire", "exposed wire", _wire_evidence, remedies.exposed_wire, _wire_line),
        PartRow(
            "peer_wait", "peer wait", "waiting beyond what the ranks' computation differs by",
            remedies.peer_wait, _wait_line,
        ),
        PartRow(
            "exposed_unsplit", "exposed wire, wait and imbalance",
            lambda facts: "blocked in wait: on CPU wire, peer wait and imbalance are not told apart"
            if facts.attribution.on_cpu
            else "its kernels have no wait and wire (see warnings): exposed wire, peer wait and imbalance in one",
            remedies.exposed_unsplit, _unsplit_line,
            without_remedy=lambda facts: "which of these it is cannot be told on CPU" if facts.attribution.on_cpu
            else "why these cannot be told apart is among the warnings",
        ),
        PartRow(
            "other_groups", "other groups' communication",
            "communication of groups that were not asked for, with nothing beside it",
            "other groups' communication beside computation",
            lambda facts, share: Claim(
                "{other_groups/time:%} of the time is exposed communication of other groups", share
            ),
        ),
        _computation("recurrence", "linear recurrences"),
        _computation("matrix_products", "matrix products"),
        _computation("optimizer", "optimizer", "the optimizer"),
        _computation("other_compute", "other computation"),
        _computation("merge_and_copies", "merges and copies", remedy=remedies.merge_and_copies),
        PartRow("background", "background only", "other work of the device runs, launched outside the window"),
        PartRow(
            "launch_gaps", "host-bound idle",
            lambda facts: "neither computing nor blocked" if facts.attribution.on_cpu
            else "nothing ran on the device before the next activity was launched, and in gaps below 5 us",
            remedies.launch_gaps, _not_launched_line,
        ),
        PartRow(
            "blocked", "blocked idle",
            "nothing ran on the device, although the next activity had been launched, or no launch is recorded",
            lambda facts: blocked_recommendation(facts.attribution),
            lambda facts, share: blocked_idle_sentence(facts.attribution, share),
            "what most of it waits for is not recorded",
        ),
    )
}  # fmt: skip
"""All parts that a waterfall may have, by name, in order.

``vendor_peak`` and ``kernel_limit`` replace ``kernel`` where the rate of a matrix product on the device is known;
``slower_kernel`` is absent where no other kernel is known for the blocks. ``kernel``, or else
``kernel_limit``, contains ``slowdown`` where there is no solo rate. ``attention`` replaces all of these where the
needed work or the peak is not known. ``exposed_unsplit`` is exposed communication whose wait and wire are not known.
``other_groups`` is exposed communication of process groups other than the chosen one. ``background`` is time of
activities outside the window, where the window is a part of the run.
"""
WATERFALL_LABELS = {name: row.label for name, row in PARTS.items()}
"""Labels of the parts, by name."""
