"""Parts of a waterfall: one row for each, with its name, evidence, remedy and sentence.

A row names what is said of a part; the functions behind it follow in this module, those of the remedies in
`ringprof.analysis.findings.recommendations`. The times of the parts are `ringprof.analysis.findings.waterfall`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings import recommendations as remedies
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
from ringprof.common.formatting import milliseconds, percent, three_digits

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
    """Line of the verdict where the part is the largest loss, from its share of the time."""
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
        return f"attention operators, mean {milliseconds(mean_ns)}"
    reason = "the traces do not tell the work" if facts.waterfall.work == NO_WORK else "no peak is known that fits"
    if attribution.run is not None and not workload_fits(attribution.run):
        reason = "the stated workload does not fit the counted FLOPs"
    return f"union of the attention kernels; {reason}: not compared with a peak"


def _peak_evidence(facts: Facts) -> str:
    """State the needed work and the peak."""
    work, rank_count = facts.waterfall.work, len(facts.attribution.ranks)
    assert work.peak is not None
    peak = f"{work.peak.tflops:g} TFLOP/s ({work.peak.source})"
    return f"{work.needed / rank_count / 1e12:,.1f} TFLOP per device at {peak}"


def _vendor_peak_evidence(facts: Facts) -> str:
    """State the rate of a matrix product by calibration."""
    kernels = facts.waterfall.work.kernels
    clock = "" if kernels.matmul_clock_mhz is None else f" at {kernels.matmul_clock_mhz:,.0f} MHz"
    product = f"a plain matrix product reaches {kernels.matmul_tflops:,.0f} TFLOP/s{clock}"
    return f"{product} by calibration {kernels.calibration}: a distance that no change of the program removes"


def _kernel_evidence(facts: Facts) -> str:
    """State the rate of the kernel alone or, where it was not measured, in the run."""
    work = facts.waterfall.work
    unknown = f"; {work.kernels.unknown}" if work.kernels.unknown else ""
    if work.solo_tflops and work.peak:
        share = work.solo_tflops / work.peak.tflops
        return f"the same blocks alone: {work.solo_tflops:,.1f} TFLOP/s, {share:.0%} of peak{unknown}"
    contained = "" if work.done is not None else " repeated work and"
    slower = f"no solo rate:{contained} slow-down beside communication is in it"
    return f"{_rate_in_run(facts):,.1f} TFLOP/s in the run; {slower}{unknown}"


def _rate_in_run(facts: Facts) -> float:
    """Return the TFLOP/s of the attention kernels in the run."""
    work = facts.waterfall.work
    attention_ns = sum(rank.breakdown.flash_ns for rank in facts.attribution.ranks)
    return (work.done or work.needed) / attention_ns / 1e3 if attention_ns else 0.0


def _comparison(facts: Facts) -> str:
    """Compare the kernel with the fastest one known."""
    return facts.waterfall.work.kernels.evidence


def _repeated_evidence(facts: Facts) -> str:
    """Compare the computed blocks with the needed work."""
    work = facts.waterfall.work
    return f"blocks of {(work.done or work.needed) / work.needed:.4f} times the work that the mask needs"


def _slowdown_evidence(facts: Facts) -> str:
    """Compare the rate of the kernel in the run with its rate alone."""
    work = facts.waterfall.work
    return f"{_rate_in_run(facts):,.1f} TFLOP/s in the run against {work.solo_tflops:,.1f} alone"


def _computed_evidence(facts: Facts) -> str:
    """State the shortest and the longest computation of any rank."""
    ranks = facts.attribution.ranks
    least = min(ranks, key=lambda rank: rank.breakdown.compute_ns)
    most = max(ranks, key=lambda rank: rank.breakdown.compute_ns)
    if least is most:
        return f"each rank computes {milliseconds(least.breakdown.compute_ns)}"
    return f"{_computes(least)}, {_computes(most)}"


def _computes(rank: Rank) -> str:
    """Say how long a rank computes."""
    return f"rank {rank.rank} computes {milliseconds(rank.breakdown.compute_ns)}"


def _wire_evidence(facts: Facts) -> str:
    """State the rates on the wire of the communication that takes longest."""
    rows = [row for row in facts.summary.communication if row.wire_gbps is not None]
    rates = [f"{row.kind} {three_digits(row.wire_gbps or 0.0)} GB/s" for row in rows[:3]]
    return f"on the wire with no computation beside it; {', '.join(rates) or 'rates not known'}"


def _unsplit_evidence(facts: Facts) -> str:
    """Say why wire, waiting and imbalance are one part."""
    if facts.attribution.on_cpu:
        return "blocked in wait: on CPU wire, peer wait and imbalance are not told apart"
    return "its kernels have no wait and wire (see warnings): exposed wire, peer wait and imbalance in one"


def _computation_evidence(part: str, facts: Facts) -> str:
    """Give the mean time of each kind that a part consists of."""
    beside = "" if facts.attribution.recurrent else "not beside attention; "
    times = [f"{row.kind} {milliseconds(row.time_ns)}" for row in _kinds_of(facts, part)]
    return f"{beside}mean of all: {', '.join(times) or 'none'}"


def _launch_gaps_evidence(facts: Facts) -> str:
    """Say which idle time counts as host-bound."""
    if facts.attribution.on_cpu:
        return "neither computing nor blocked"
    return "nothing ran on the device before the next activity was launched, and in gaps below 5 us"


# --- sentences: the cause of the largest loss, as a line of the verdict -------------------------------


def _imbalance_line(facts: Facts, share: float) -> str:
    """Say how long the rank with the least computation waits, and for which ranks."""
    least = min(facts.attribution.ranks, key=lambda rank: rank.breakdown.compute_ns)
    waiting, kind = _waiting_share(least)
    if waiting < _MOSTLY_WAITING:
        # The rank ends early, or waits in another kind of communication than its longest.
        most = max(facts.attribution.ranks, key=lambda rank: rank.breakdown.compute_ns)
        return f"Imbalance takes {percent(share)} of the slowest rank's wall: {_computes(least)}, {_computes(most)}."
    text = (
        f"{percent(waiting, 0)} of rank {least.rank}'s {kind} time was waiting for ranks {_work_clause(facts, least)}"
    )
    if known_contiguous(facts.attribution):
        return f"{text}."
    if rises_with_rank(facts.attribution):
        return f"{text}; work rises with the rank, as in contiguous pieces under a causal mask: see zigzag and stripe."
    return f"{text}; imbalance takes {percent(share)} of the slowest rank's wall."


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
            return f"with up to {three_digits(ratio)} times its {causal}work"
    longest = max(other.breakdown.compute_ns for other in facts.attribution.ranks)
    return f"that compute up to {milliseconds(longest)}, where it computes {milliseconds(rank.breakdown.compute_ns)}"


def _wire_line(facts: Facts, share: float) -> str:
    """Say how much time is exposed wire, with the slow links or the worst ring step."""
    slow = _slow_hosts_clause(facts) or _slow_ranks_clause(facts)
    text = f"{percent(share)} of the time is bytes on a wire with nothing to hide them"
    return f"{text}: {slow}." if slow else f"{text}{_worst_step_clause(facts)}."


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
    against = f", {kind_name}{three_digits(rate)} within a host" if within else ""
    return f"{in_a_sentence(between.kind)} between hosts moves {three_digits(between.wire_gbps or 0.0)} GB/s{against}"


def _slow_ranks_clause(facts: Facts) -> str:
    """Name the ranks that send slowly, with their rates and those of the others; empty where none is slow."""
    rates = {rank.rank: rank.hop_totals.wire_gbps for rank in facts.attribution.ranks}
    slow_rates = slow_senders(facts.attribution)
    if not slow_rates:
        return ""
    ranks = [str(rank) for rank in slow_rates]
    listed = ", ".join(ranks[:-1]) + (f" and {ranks[-1]}" if len(ranks) > 1 else ranks[-1])
    return (
        f"rank{'s' if len(slow_rates) > 1 else ''} {listed} send{'s' if len(slow_rates) == 1 else ''} "
        f"at {_range_text([*slow_rates.values()])} "
        f"GB/s, the others at {_range_text([rate for rank, rate in rates.items() if rate and rank not in slow_rates])}"
        f"{_slow_links_clause(facts, set(slow_rates))}"
    )


def _range_text(values: Sequence[float]) -> str:
    """Return the smallest and the largest value as ``LOW to HIGH``, or one number where they look equal."""
    low, high = three_digits(min(values)), three_digits(max(values))
    return low if low == high else f"{low} to {high}"


def _slow_links_clause(facts: Facts, slow: set[int]) -> str:
    """List the links on which one slow rank sends to another; empty where they do not identify the slow links."""
    links = {
        (rank.rank, peer)
        for rank in facts.attribution.ranks
        for peer in rank.hop_peers
        if rank.rank in slow and peer in slow
    }
    # Where all links of a ring join slow ranks, fast links would be named, too.
    if not links or len(links) > len(slow):
        return ""
    return " (" + ", ".join(f"{sender} to {receiver}" for sender, receiver in sorted(links)[:6]) + ")"


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
    return (
        f"; of what ring steps expose, {percent(phase_ns[phase] / total_ns, 0)} is in the {PASSES[phase]} pass, "
        f"most in step {worst} (mean {milliseconds(mean_ns[worst])})"
    )


def _wait_line(facts: Facts, share: float) -> str:
    """Say how much of the slowest rank's wall time is waiting for peers, with the slow links or the late ranks."""
    slow_clause = _slow_hosts_clause(facts) or _slow_ranks_clause(facts)
    waiting = "of the slowest rank's wall is waiting for peers"
    wall_ns, ranks = facts.waterfall.wall_ns, facts.attribution.ranks
    early_ns = fmean(wall_ns - rank.breakdown.wall_ns for rank in ranks)
    ends_early = early_ns > _MIN_EARLY_SHARE * facts.waterfall.of("peer_wait")
    early_clause = ", or for the slowest rank to end" if ends_early else ""
    if slow_clause:
        on_wire = percent(facts.waterfall.of("exposed_wire") / wall_ns)
        return f"{percent(share)} {waiting} whose hops are slow{early_clause}, {on_wire} wire: {slow_clause}."
    late = late_ranks(facts.attribution)
    late_text = ", ".join(f"rank {rank} ({percent(caused, 0)} of all waiting)" for rank, caused in late.items())
    late_clause = f"; most waited for: {late_text}" if late else ""
    comma = "," if early_clause else ""
    sentence = f"{percent(share)} {waiting}{early_clause}{comma} beyond what their computation differs by"
    return f"{sentence}{late_clause}{_worst_step_clause(facts)}."


_MIN_EARLY_SHARE = 0.1
"""Share of the waiting above which the time after a rank's own end is named."""


def _unsplit_line(facts: Facts, share: float) -> str:
    """Say that transfer and waiting cannot be separated; on CPU, say instead how long ranks are blocked.

    ``share`` is that of the slowest rank's time.
    """
    if facts.attribution.on_cpu:
        # The share includes the time from a rank's own end to the slowest rank's.
        blocked = f"ranks are blocked or done on average for {percent(share)} of the slowest rank's time"
        return cpu_blocked_sentence(facts.attribution) or f"On CPU {blocked}: waiting and transfer cannot be separated."
    return f"How much of it is waiting and how much wire is not known (see warnings){_worst_step_clause(facts)}."


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
        text = f"{percent(share)} of the time nothing computes"
        unmarked = any(warning.code == "cpu_no_wait_marks" for warning in facts.attribution.warnings)
        return f"{text}; waiting is not recorded." if unmarked else f"{text} and nothing waits."
    return launch_idle_sentence(facts.attribution, percent(share))


# --- blocked time on CPU ------------------------------------------------------------------------------


class BlockedByLink(msgspec.Struct, frozen=True):
    """Blocked time of CPU ranks by class of link: means over ranks, over all marked iterations."""

    between_hosts_ns: float
    """Time blocked in channels that cross hosts."""
    within_host_ns: float
    """Time blocked in the other channels."""
    channels: tuple[str, ...]
    """Channels that cross hosts, longest blocked first."""
    leaving_bytes: float
    """Bytes that one host sends to others in one iteration, or in a captured block; mean over hosts."""


def blocked_by_link(attribution: Attribution) -> BlockedByLink | None:
    """Split the blocked time of CPU ranks by class of link.

    None where all ranks are on one host, or the run does not state its channels and links.
    """
    run, ranks = attribution.run, attribution.ranks
    hosts = {rank.host for rank in ranks}
    if run is None or run.work is None or not attribution.on_cpu or len(hosts) < 2:
        return None
    sends = [entry for work in run.work for entry in work.sent or ()]
    # Every rank of a ring that crosses hosts is delayed by the crossing, wherever its own neighbours are.
    crossing = {entry.channel for entry in sends if entry.link == OTHER_HOST}
    blocked_ns: dict[str, int] = {}
    for rank in ranks:
        for channel, time_ns in rank.blocked_ns.items():
            blocked_ns[channel] = blocked_ns.get(channel, 0) + time_ns
    between_hosts = {channel: time_ns for channel, time_ns in blocked_ns.items() if channel in crossing}
    if not between_hosts:
        return None
    return BlockedByLink(
        between_hosts_ns=sum(between_hosts.values()) / len(ranks),
        within_host_ns=(sum(blocked_ns.values()) - sum(between_hosts.values())) / len(ranks),
        channels=tuple(sorted(between_hosts, key=lambda channel: -between_hosts[channel])),
        leaving_bytes=sum(entry.sent_bytes for entry in sends if entry.link == OTHER_HOST) / len(hosts),
    )


def cpu_blocked_sentence(attribution: Attribution) -> str:
    """Say how long CPU ranks of several hosts are blocked between and within hosts; empty where it is not known."""
    links = blocked_by_link(attribution)
    if links is None:
        return ""
    walls = [rank.breakdown.wall_ns for rank in attribution.ranks]
    iterations = fmean(len(rank.iteration_ns) or 1 for rank in attribution.ranks)
    period = "in the captured block" if attribution.run and attribution.run.captured else "per iteration"
    between_share, within_share = links.between_hosts_ns / fmean(walls), links.within_host_ns / fmean(walls)
    sent_mb, period_s = links.leaving_bytes / 1e6, fmean(walls) / iterations / 1e9
    return (
        f"{percent(between_share)} of the time ranks are blocked in channels that cross hosts"
        f" ({', '.join(links.channels)}), {percent(within_share)} in channels within a host;"
        f" {three_digits(sent_mb)} MB leave each host {period},"
        f" {three_digits(sent_mb / period_s)} MB/s."
    )


# --- the table ----------------------------------------------------------------------------------------


def _computation(name: str, label: str, noun: str = "", remedy: Text = "") -> PartRow:
    """Return the row of a part of the computation outside attention, which is of the kinds of `COMPUTE_PARTS`."""
    evidence, sentence = partial(_computation_evidence, name), partial(_computation_line, name)
    return PartRow(name, label, evidence, remedy, sentence, noun=noun)


PARTS = {
    row.name: row
    for row in (
        PartRow("peak", "needed work at peak", _peak_evidence),
        PartRow("vendor_peak", "matrix product below peak", _vendor_peak_evidence),
        PartRow(
            "kernel_limit", "attention below a matrix product", _kernel_evidence, remedies.kernel_limit,
            without_remedy=_comparison,
        ),
        PartRow(
            "slower_kernel", "kernel slower than the fastest known", _comparison,
            lambda facts: f"--kernel {facts.waterfall.work.kernels.fastest} (ringprof kernels)",
        ),
        PartRow("kernel", "attention kernel below peak", _kernel_evidence, remedies.another_kernel),
        PartRow("repeated", "repeated work", _repeated_evidence, remedies.repeated),
        PartRow("slowdown", "slow-down beside communication", _slowdown_evidence, remedies.slowdown),
        PartRow("attention", "attention kernels", _attention_evidence, remedies.attention),
        PartRow("imbalance", "imbalance between ranks", _computed_evidence, remedies.imbalance, _imbalance_line),
        PartRow("exposed_wire", "exposed wire", _wire_evidence, remedies.exposed_wire, _wire_line),
        PartRow(
            "peer_wait", "peer wait", "waiting beyond what the ranks' computation differs by",
            remedies.peer_wait, _wait_line,
        ),
        PartRow(
            "exposed_unsplit", "exposed wire, wait and imbalance", _unsplit_evidence, remedies.exposed_unsplit,
            _unsplit_line,
            without_remedy=lambda facts: "which of these it is cannot be told on CPU" if facts.attribution.on_cpu
            else "why these cannot be told apart is among the warnings",
        ),
        PartRow(
            "other_groups", "other groups' communication",
            "communication of groups that were not asked for, with nothing beside it",
            "other groups' communication beside computation",
            lambda facts, share: f"{percent(share)} of the time is exposed communication of other groups.",
        ),
        _computation("recurrence", "linear recurrences"),
        _computation("matrix_products", "matrix products"),
        _computation("optimizer", "optimizer", "the optimizer"),
        _computation("other_compute", "other computation"),
        _computation("merge_and_copies", "merges and copies", remedy=remedies.merge_and_copies),
        PartRow("background", "background only", "other work of the device runs, launched outside the window"),
        PartRow("launch_gaps", "host-bound idle", _launch_gaps_evidence, remedies.launch_gaps, _not_launched_line),
        PartRow(
            "blocked", "blocked idle",
            "nothing ran on the device, although the next activity had been launched, or no launch is recorded",
            lambda facts: blocked_recommendation(facts.attribution),
            lambda facts, share: blocked_idle_sentence(facts.attribution, percent(share)),
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
