"""Verdict on a run in at most four lines: missing data, cost of communication, its cause, and the possible gain.

Every line is made of metrics of the report, and claims nothing that they do not show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.idle_text import blocked_idle_sentence, launch_idle_sentence
from ringprof.analysis.findings.recommendations import (
    UNBALANCED,
    known_contiguous,
    late_ranks,
    rate_to_hide,
    rises_with_rank,
    slow_between_hosts,
    slow_senders,
)
from ringprof.analysis.findings.step_rates import (
    attention_rate_clause,
    busy_ns,
    computation_clause,
    compute_part_sentence,
)
from ringprof.analysis.findings.summary import KindRow
from ringprof.analysis.findings.waterfall import (
    ATTENTION_PARTS,
    COMMUNICATION_PARTS,
    IDLE_PARTS,
    WATERFALL_LABELS,
    WORTH_NAMING,
    Waterfall,
    WaterfallPart,
)
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS, KIND, MEMORY, in_a_sentence
from ringprof.analysis.rank import Rank
from ringprof.analysis.transfers.hops import OTHER_HOST, SAME_HOST
from ringprof.common.formatting import milliseconds, percent, three_digits
from ringprof.trace.columns import CUT_OFF

if TYPE_CHECKING:
    from ringprof.analysis.findings.findings import Findings

_MIN_GAIN = 0.0005
"""Smallest gain that is named, as a share of the wall time; smaller ones would round to 0.0 %."""
_MOSTLY_WAITING = 0.5
"""Share of a rank's communication time from which on it counts as mostly waiting."""
_MUCH_UNKNOWN = 0.1
"""Share of the time in kernels of unknown kind from which on it is not known whether a program communicates."""
_LONGEST_KERNEL_NAME = 80
PASSES = {"fwd": "forward", "bwd": "backward"}
"""Names of the passes in sentences, by their names in traces."""


def verdict_of(facts: Findings) -> tuple[str, ...]:
    """Return the verdict: missing data, if any, then at most three lines."""
    missing = missing_sentence(facts.attribution)
    if facts.attribution.lacks_device:
        return (missing,)
    cause = _cause_line if is_attention(facts.attribution) else _computation_line
    lines = (missing, _cost_line(facts), cause(facts), _gain_line(facts))
    return tuple(line for line in lines if line)


def _share_of_time(facts: Findings, time_ns: float) -> float:
    """Return a time as a share of the mean wall time; verdicts and the table of parts call it "of the time"."""
    wall = facts.summary.parts[-1].mean_ns
    return time_ns / wall if wall else 0.0


def _communicates(facts: Findings) -> bool:
    """Return whether any rank communicates."""
    return any(rank.breakdown.comm_ns for rank in facts.attribution.ranks)


# --- cost of communication ----------------------------------------------------------------------------


def _cost_line(facts: Findings) -> str:
    """Say how much of the time is exposed communication, and by which kinds or how much is hidden."""
    attribution, summary = facts.attribution, facts.summary
    if not _communicates(facts):
        ranks = attribution.ranks
        world_size = attribution.run.topology.world_size if attribution.run else ranks[0].world_size
        noun = "process" if attribution.on_cpu else "GPU"
        several_devices = any(warning.code == "several_devices" for warning in attribution.warnings)
        single_device = len(ranks) == 1 and world_size in (None, 1) and not several_devices
        left_out_ns = fmean(rank.left_out_comm_ns for rank in ranks)
        if left_out_ns:
            rest = f"the rest of these traces has {milliseconds(left_out_ns)} of it per {noun}"
            return f"no communication in what is reported; {rest}"
        if single_device:
            return f"one {noun}: nothing is communicated"
        return _unknown_kinds_line(facts) or "no communication in these traces"
    exposed = f"{percent(summary.exposed_mean)} of the time is exposed communication"
    if len(attribution.ranks) > 1:
        exposed += f", {percent(summary.exposed_worst)} at worst (rank {summary.exposed_worst_rank})"
    has_ranges = any(rank.exposed.by_group for rank in attribution.ranks)
    if attribution.on_cpu and not has_ranges:
        return f"{exposed}: time blocked in waiting for a transfer."
    if summary.exposed_mean < WORTH_NAMING and summary.overlap_ratio is not None:
        return f"{exposed}: {percent(summary.overlap_ratio, 0)} of all communication is hidden behind computation."
    shares = "" if is_attention(attribution) and not attribution.on_cpu else exposed_shares(attribution)
    return f"{exposed}: {shares}." if shares else f"{exposed}."


def _unknown_kinds_line(facts: Findings) -> str:
    """Say that kernels of unknown kind, which may communicate, take much of the time; empty where they do not."""
    share = _share_of_time(facts, busy_ns(facts.attribution, "other") / len(facts.attribution.ranks))
    if share < _MUCH_UNKNOWN or facts.attribution.on_cpu:
        return ""
    longest = facts.attribution.largest_of_other[0].name[:_LONGEST_KERNEL_NAME]
    return f"no known communication; {percent(share)} of the time is kernels of unknown kind, the longest {longest}"


# --- cause of the largest loss ------------------------------------------------------------------------


def _cause_line(facts: Findings) -> str:
    """Name the cause of the largest loss of an attention job, or the attention kernels if no loss is worth naming."""
    waterfall = facts.waterfall
    largest = waterfall.largest_outside()
    # Waiting includes the time from a rank's end to the slowest rank's, so it is a share of the slowest's wall time.
    is_wait = largest in ("imbalance", "peer_wait", "exposed_unsplit")
    share = (
        waterfall.of(largest) / (waterfall.wall_ns or 1) if is_wait else _share_of_time(facts, waterfall.of(largest))
    )
    if share < WORTH_NAMING:
        return _kernels_line(facts)
    if largest in COMPUTE_PARTS:
        return _beside_line(facts, share, largest)
    return {
        "imbalance": _imbalance_line, "exposed_wire": _wire_line, "peer_wait": _wait_line,
        "exposed_unsplit": _unsplit_line, "launch_gaps": _not_launched_line, "blocked": _blocked_line,
        "other_groups": _other_groups_line,
    }[largest](facts, share)  # fmt: skip


def _computation_line(facts: Findings) -> str:
    """Name the longest computation of a step that is more than attention.

    Idle time or copies come first if they take longer.
    """
    sentence = computation_clause(facts.attribution, facts.summary)
    waterfall = facts.waterfall
    longest_ns = max(map(waterfall.of, (*IDLE_PARTS, *COMPUTE_PARTS, *ATTENTION_PARTS)))
    largest_loss = max((*IDLE_PARTS, "merge_and_copies"), key=waterfall.of)
    share = _share_of_time(facts, waterfall.of(largest_loss))
    if share >= WORTH_NAMING and waterfall.of(largest_loss) == longest_ns:
        line_of_part = {"launch_gaps": _not_launched_line, "blocked": _blocked_line, "merge_and_copies": _copies_line}
        line = line_of_part[largest_loss](facts, share)
        return f"{line.removesuffix('.')}; {sentence}." if sentence else line
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def _kernels_line(facts: Findings) -> str:
    """Say that no loss outside the attention kernels is worth naming, with the rate of these kernels."""
    waterfall = facts.waterfall
    attention_share = percent(_share_of_time(facts, waterfall.of(*ATTENTION_PARTS)))
    text = f"No loss outside the attention kernels reaches {percent(WORTH_NAMING, 0)}: {attention_share} of the time is"
    rate = facts.summary.rates.block_tflops
    if rate is None or rate < 1:
        return f"{text} attention kernels{attention_rate_clause(facts.attribution)}."
    of_peak = f", {percent(rate / waterfall.peak.tflops, 0)} of the device's peak" if waterfall.peak else ""
    return f"{text} attention kernels at {rate:,.0f} TFLOP/s{of_peak}."


def _imbalance_line(facts: Findings, share: float) -> str:
    """Say how long the rank with the least computation waits, and for which ranks."""
    least = min(facts.attribution.ranks, key=lambda rank: rank.breakdown.compute_ns)
    waiting, kind = _waiting_share(least)
    if waiting < _MOSTLY_WAITING:
        # The rank ends early, or waits in another kind of communication than its longest.
        most = max(facts.attribution.ranks, key=lambda rank: rank.breakdown.compute_ns)
        computes = [f"rank {rank.rank} computes {milliseconds(rank.breakdown.compute_ns)}" for rank in (least, most)]
        return f"Imbalance takes {percent(share)} of the slowest rank's wall: {', '.join(computes)}."
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


def _work_clause(facts: Findings, rank: Rank) -> str:
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


def _wire_line(facts: Findings, share: float) -> str:
    """Say how much time is exposed wire, with the slow links or the worst ring step."""
    slow = _slow_hosts_clause(facts) or _slow_ranks_clause(facts)
    text = f"{percent(share)} of the time is bytes on a wire with nothing to hide them"
    return f"{text}: {slow}." if slow else f"{text}{_worst_step_clause(facts)}."


def _other_groups_line(facts: Findings, share: float) -> str:
    """Say how much time is exposed communication of groups other than the chosen one."""
    return f"{percent(share)} of the time is exposed communication of other groups."


def _slow_hosts_clause(facts: Findings) -> str:
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


def _slow_ranks_clause(facts: Findings) -> str:
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


def _slow_links_clause(facts: Findings, slow: set[int]) -> str:
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


def _worst_step_clause(facts: Findings) -> str:
    """Name the ring step that exposes most communication; empty where there are fewer than two."""
    exposed_by_step = facts.exposed_by_step
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


def _wait_line(facts: Findings, share: float) -> str:
    """Say how much of the slowest rank's wall time is waiting for peers, with the slow links or the late ranks."""
    slow_clause = _slow_hosts_clause(facts) or _slow_ranks_clause(facts)
    waiting = "of the slowest rank's wall is waiting for peers"
    early_clause = ", or for the slowest rank to end" if _ends_early(facts) else ""
    if slow_clause:
        on_wire = percent(facts.waterfall.of("exposed_wire") / facts.waterfall.wall_ns)
        return f"{percent(share)} {waiting} whose hops are slow{early_clause}, {on_wire} wire: {slow_clause}."
    late = late_ranks(facts.attribution)
    late_text = ", ".join(f"rank {rank} ({percent(caused, 0)} of all waiting)" for rank, caused in late.items())
    late_clause = f"; most waited for: {late_text}" if late else ""
    comma = "," if early_clause else ""
    sentence = f"{percent(share)} {waiting}{early_clause}{comma} beyond what their computation differs by"
    return f"{sentence}{late_clause}{_worst_step_clause(facts)}."


def _ends_early(facts: Findings) -> bool:
    """Return whether enough of the waiting lies between the ranks' own ends and the slowest rank's end to be named."""
    wall_ns = facts.waterfall.wall_ns
    early_ns = sum(wall_ns - rank.breakdown.wall_ns for rank in facts.attribution.ranks) / len(facts.attribution.ranks)
    return early_ns > _MIN_EARLY_SHARE * facts.waterfall.of("peer_wait")


_MIN_EARLY_SHARE = 0.1
"""Share of the waiting above which the time after a rank's own end is named."""


def _unsplit_line(facts: Findings, share: float) -> str:
    """Say that transfer and waiting cannot be separated; on CPU, say instead how long ranks are blocked.

    ``share`` is that of the slowest rank's time.
    """
    if facts.attribution.on_cpu:
        # The share includes the time from a rank's own end to the slowest rank's.
        blocked = f"ranks are blocked or done on average for {percent(share)} of the slowest rank's time"
        return cpu_blocked_sentence(facts.attribution) or f"On CPU {blocked}: waiting and transfer cannot be separated."
    return f"How much of it is waiting and how much wire is not known (see warnings){_worst_step_clause(facts)}."


def _beside_line(facts: Findings, share: float, part: str) -> str:
    """Say how much time a part of the computation other than attention takes, and most of what kind it is."""
    rows = _kinds_of(facts, part)
    has_main_kind = len(rows) > 1 and rows[0].time_ns > sum(row.time_ns for row in rows) / 2
    kind_clause = f", most of it {KIND[rows[0].kind].label}" if has_main_kind else ""
    return compute_part_sentence(facts.attribution, part, share, f"{_part_name(facts, part)}{kind_clause}")


def _copies_line(facts: Findings, share: float) -> str:
    """Say how much time merges and copies take."""
    return _beside_line(facts, share, "merge_and_copies")


def _kinds_of(facts: Findings, part: str) -> list[KindRow]:
    """Return the kinds that a part of the computation consists of in this run, longest first."""
    kinds = COMPUTE_PARTS[part] if part != "merge_and_copies" else (*COMPUTE_PARTS[part], *MEMORY)
    return [row for row in facts.summary.kinds if row.kind in kinds]


def _part_name(facts: Findings, part: str) -> str:
    """Return the name of a part in a sentence; merges are not named for a program without any."""
    kinds = {row.kind for row in _kinds_of(facts, part)} if part == "merge_and_copies" else set()
    if kinds and "merge" not in kinds:
        return "copies and permutations" if len(kinds) > 1 else KIND[kinds.pop()].label
    if part == "other_compute" and facts.attribution.recurrent:
        return WATERFALL_LABELS[part]
    return _COMPUTE_NAMES.get(part, WATERFALL_LABELS[part])


_COMPUTE_NAMES = {
    "recurrence": "linear recurrences",
    "matrix_products": "matrix products",
    "optimizer": "the optimizer",
    "other_compute": "computation other than attention",
    "merge_and_copies": "merges and copies",
}


def _not_launched_line(facts: Findings, share: float) -> str:
    """Say how much of the time nothing runs because the next work is not launched yet."""
    if facts.attribution.on_cpu:
        text = f"{percent(share)} of the time nothing computes"
        unmarked = any(warning.code == "cpu_no_wait_marks" for warning in facts.attribution.warnings)
        return f"{text}; waiting is not recorded." if unmarked else f"{text} and nothing waits."
    return launch_idle_sentence(facts.attribution, percent(share))


def _blocked_line(facts: Findings, share: float) -> str:
    """Say how much of the time nothing runs although the next work is launched."""
    return blocked_idle_sentence(facts.attribution, percent(share))


# --- possible gain ------------------------------------------------------------------------------------


def _gain_line(facts: Findings) -> str:
    """Give the wall time with free communication, perfect balance and perfect overlap; empty where none gains."""
    if not _communicates(facts) or len(facts.attribution.ranks) < 2 or not facts.waterfall.wall_ns:
        return ""
    wall_ns, bounds = facts.waterfall.wall_ns, facts.waterfall.bounds
    bound_texts = [(bounds.free_ns, "with free communication")]
    if facts.waterfall.of("imbalance"):
        bound_texts.append((bounds.balanced_ns, "with perfect balance"))
    if not facts.attribution.on_cpu and not facts.waterfall.of("exposed_unsplit"):
        # Wire time beyond the computation cannot be hidden, so this bound needs known wire times.
        bound_texts.append((bounds.hidden_ns, "with perfect balance and overlap"))
    gains = [(time, words) for time, words in bound_texts if 1 - time / wall_ns >= _MIN_GAIN]
    if not gains:
        return ""
    texts = [f"{milliseconds(time)} ({percent(1 - time / wall_ns)}{'' if index else ' less'}) {words}"
             for index, (time, words) in enumerate(gains)]  # fmt: skip
    return f"{milliseconds(wall_ns)} could be " + ", ".join(texts) + "."


# --- recommendation -----------------------------------------------------------------------------------


class NextStep(msgspec.Struct, frozen=True):
    """Largest loss, to be reduced first, with a recommendation."""

    part: str
    """Name of the part of the waterfall."""
    time_ns: int
    """Time of the part, at most the wall time less the bound of `Bounds` that belongs to the part.

    A change can gain more: waiting of other ranks that the part causes, and slower kernels beside it, are counted in
    other parts.
    """
    share: float
    """``time_ns`` as a share of the slowest rank's wall time."""
    text: str
    """Loss and recommendation in one sentence."""


def next_step_of(facts: Findings) -> NextStep | None:
    """Return the largest loss with a recommendation; None without a loss, or where nothing can be said about it."""
    waterfall, attribution = facts.waterfall, facts.attribution
    name = waterfall.largest_loss()
    min_ns = WORTH_NAMING * waterfall.wall_ns
    is_small = waterfall.of(name) < min_ns
    if is_small and is_attention(attribution) and waterfall.of(*waterfall.needed_work()) < min_ns:
        name = waterfall.attention_loss()
    part = next((candidate for candidate in waterfall.parts if candidate.part == name), None)
    if attribution.lacks_device or part is None or (is_small and name not in ATTENTION_PARTS):
        return None
    recommendation = part.remedy or _why_no_recommendation(facts, name)
    if not recommendation:
        return None
    gain_ns = waterfall.gain_ns(name)
    share = gain_ns / waterfall.wall_ns if waterfall.wall_ns else 0.0
    return NextStep(part=name, time_ns=gain_ns, share=share, text=_next_step_text(facts, part, gain_ns, recommendation))


def _why_no_recommendation(facts: Findings, part: str) -> str:
    """Explain why there is no recommendation for a part; empty where there is nothing to say."""
    if part == "kernel_limit":
        return facts.waterfall.kernels.evidence
    if part == "blocked":
        return "what most of it waits for is not recorded"
    if part == "exposed_unsplit" and facts.attribution.on_cpu:
        return "which of these it is cannot be told on CPU"
    return "why these cannot be told apart is among the warnings" if part == "exposed_unsplit" else ""


def _next_step_text(facts: Findings, part: WaterfallPart, gain_ns: int, recommendation: str) -> str:
    """Write the sentence of `NextStep.text`."""
    waterfall = facts.waterfall
    loss, wall = milliseconds(part.time_ns), milliseconds(waterfall.wall_ns)
    if part.part == "slower_kernel":
        name, evidence = WATERFALL_LABELS[part.part], waterfall.kernels.evidence
        scope = _scope(waterfall, part.time_ns)
        return f"Largest loss{scope}: {name}, {loss} of {wall}: {evidence}. To try: {recommendation}."
    if part.part in ("kernel", "kernel_limit"):
        # The distance to a peak is no loss that a change is known to remove.
        reason = waterfall.kernels.evidence or waterfall.kernels.unknown
        advice = f". To try: {recommendation}" if part.remedy else ""
        return f"In the attention kernels: {reason}{advice}."
    if part.part in ATTENTION_PARTS:
        tenth = milliseconds(waterfall.of(*ATTENTION_PARTS) / 10)
        scope = _scope(waterfall, part.time_ns)
        text = f"Largest loss{scope}: {WATERFALL_LABELS[part.part]}, {loss} of {wall}. To try: {recommendation}"
        return f"{text}; 10 % faster attention saves {tenth}."
    hides = rate_to_hide(facts.attribution, facts.summary) if part.part == "exposed_wire" else ""
    named_parts = _parts_named_with(waterfall, part.part)
    scope = _scope(waterfall, waterfall.of(*named_parts), attention_ns=waterfall.of(*ATTENTION_PARTS))
    name = f"{_part_name(facts, part.part)}, {loss} of {wall}"
    if len(named_parts) > 1:
        together_text, part_name = milliseconds(waterfall.of(*named_parts)), _part_name(facts, part.part)
        name = f"imbalance and exposed communication, {together_text} of {wall}, its largest part {part_name} ({loss})"
    bound = f", of which free communication would gain {milliseconds(gain_ns)}" if gain_ns < part.time_ns else ""
    advice = f". To try: {recommendation}{hides}" if part.remedy else f": {recommendation}"
    return f"Largest loss{scope}: {name}{bound}{advice}."


def _scope(waterfall: Waterfall, loss_ns: int, *, attention_ns: int = 0) -> str:
    """Return `` outside A and B``: the computation that takes longer than the loss but is none; empty if none does."""
    longer = [WATERFALL_LABELS[part] for part in waterfall.needed_work() if waterfall.of(part) > loss_ns]
    names = [*(["attention"] if attention_ns > loss_ns else []), *longer]
    return f" outside {' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))}" if names else ""


def _parts_named_with(waterfall: Waterfall, part: str) -> tuple[str, ...]:
    """Return the parts that are named as one loss.

    These are all parts of communication, where they are the largest loss together but not one of them alone.
    """
    others = {*COMPUTE_PARTS, *IDLE_PARTS, "other_groups"}.difference(waterfall.needed_work())
    is_alone = part not in COMMUNICATION_PARTS or waterfall.of(part) >= max(map(waterfall.of, others))
    return (part,) if is_alone else COMMUNICATION_PARTS


# --- sentences of the verdict about missing data, exposed communication and blocked CPU ranks ---

MAX_NAMED = 2
"""Largest number of kinds that a sentence names, largest first."""
MIN_SHARE = 0.001
"""Smallest share of the wall time that is named."""


def is_attention(attribution: Attribution) -> bool:
    """Return whether the job is attention: a recorded strategy, or attention for at least half of the computation."""
    run = attribution.run
    if attribution.recurrent:
        return False
    if run is not None and run.strategy is not None and (run.workload is None or run.workload.layer is None):
        return True
    flash = sum(rank.breakdown.flash_ns for rank in attribution.ranks)
    return 0 < flash >= sum(rank.breakdown.compute_ns for rank in attribution.ranks) / 2


def exposed_shares(attribution: Attribution) -> str:
    """List the largest exposed communication by kind and process group, as shares of the mean wall time.

    Empty where nothing reaches `MIN_SHARE`. Kinds and groups may overlap in time; the text says so where it shows.
    """
    exposed: dict[str, int] = defaultdict(int)
    for rank in attribution.ranks:
        for (kind, group), time in rank.exposed.by_group.items():
            exposed[KIND[kind].label + (f" of group {group}" if group else "")] += time
        exposed["blocked in waiting for a transfer"] += sum(rank.blocked_ns.values())
    wall = sum(rank.breakdown.wall_ns for rank in attribution.ranks)
    largest = sorted(exposed.items(), key=lambda item: -item[1])[:MAX_NAMED]
    named = [(label, time) for label, time in largest if wall and time >= MIN_SHARE * wall]
    texts = [f"{100 * time / wall:.1f} % {label}" for label, time in named]
    total = sum(rank.breakdown.exposed_comm_ns for rank in attribution.ranks)
    at_once = ", partly at the same time" if len(named) > 1 and sum(time for _, time in named) > total else ""
    return ", ".join(texts) + at_once if texts else ""


def missing_sentence(attribution: Attribution) -> str:
    """Say in one line which data the traces lack; empty where they are complete."""
    if attribution.lacks_device:
        return (
            "Missing: all that ran on the GPU. The times are the CPU's, which launches it and waits for it "
            "(no_device_activities)."
        )
    codes = {warning.code for warning in attribution.warnings}
    ranks = {rank.rank for rank in attribution.ranks}
    cut_off = [warning for warning in attribution.warnings if warning.code in CUT_OFF]
    missing = []
    if any(warning.rank is None or warning.rank in ranks for warning in cut_off):
        missing.append("the end of what is cut off, so that all figures are of what comes before")
    missing += [text for code, text in _MISSING.items() if code in codes]
    return f"Missing: {'; '.join(missing)} (see warnings)." if missing else ""


_MISSING = {
    "left_out": "traces that are left out",
    "mixed_runs": "a moment that all traces have in common",
    "window_empty": "anything launched in the marked iterations; the whole trace is shown",
}


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
