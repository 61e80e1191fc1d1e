"""Three plain lines: what communication cost, what the cost came from, and what could be gained. What is missing of the
traces stands before them.

Every line is made of figures of the report, and says nothing that they do not show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.idle_text import blocked_in_words as idle_blocked_in_words
from ringprof.analysis.findings.idle_text import not_launched_in_words
from ringprof.analysis.findings.recommendations import (
    UNBALANCED,
    known_contiguous,
    late_ranks,
    longest_on_wire,
    rate_to_hide,
    rises_with_rank,
    slow_between_hosts,
    slow_senders,
)
from ringprof.analysis.findings.step_rates import attention_rate, beside_attention, computation_in_words
from ringprof.analysis.findings.summary import KindRow, Summary
from ringprof.analysis.findings.verdict_text import blocked_in_words, exposed_in_words, is_attention, missing_in_words
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
from ringprof.analysis.steps.steps import ExposedBySteps
from ringprof.analysis.transfers.hops import SAME_HOST
from ringprof.formatting import milliseconds, percent, three_digits

_LEAST_GAIN = 0.0005
"""The least gain, as a share of the wall, that is not written as nothing."""
_MOST = 0.5
"""Share of a rank's communication time above which most of it is waiting."""
PASSES = {"fwd": "forward", "bwd": "backward"}


class Facts(Protocol):
    """What the lines are made of."""

    @property
    def attribution(self) -> Attribution: ...
    @property
    def summary(self) -> Summary: ...
    @property
    def waterfall(self) -> Waterfall: ...
    @property
    def exposed_by_step(self) -> ExposedBySteps: ...


def verdict_of(found: Facts) -> tuple[str, ...]:
    """What is missing, where something is; then, of what there is, at most three lines."""
    missing = missing_in_words(found.attribution)
    if found.attribution.lacks_device:
        return (missing,)
    cause = _cause if is_attention(found.attribution) else _computation
    lines = (missing, _cost(found), cause(found), _gain(found))
    return tuple(line for line in lines if line)


def _of_time(found: Facts, time_ns: float) -> float:
    """A share of the mean wall, as all that a verdict calls "of the time": the basis of the table of parts."""
    wall = found.summary.parts[-1].mean_ns
    return time_ns / wall if wall else 0.0


def _communicates(found: Facts) -> bool:
    return any(rank.breakdown.comm_ns for rank in found.attribution.ranks)


# --- what it cost -------------------------------------------------------------------------------------


def _cost(found: Facts) -> str:
    attribution, summary = found.attribution, found.summary
    if not _communicates(found):
        ranks = attribution.ranks
        size = attribution.run.topology.world_size if attribution.run else ranks[0].world_size
        device = "process" if attribution.on_cpu else "GPU"
        several = any(warning.code == "several_devices" for warning in attribution.warnings)
        alone = len(ranks) == 1 and size in (None, 1) and not several
        return f"one {device}: nothing is communicated" if alone else "no communication in these traces"
    exposed = f"{percent(summary.exposed_mean)} of the time is exposed communication"
    if len(attribution.ranks) > 1:
        exposed += f", {percent(summary.exposed_worst)} at worst (rank {summary.exposed_worst_rank})"
    ranges = any(rank.exposed.by_group for rank in attribution.ranks)
    if attribution.on_cpu and not ranges:
        return f"{exposed}: time blocked in waiting for a transfer."
    if summary.exposed_mean < WORTH_NAMING and summary.overlap_ratio is not None:
        return f"{exposed}: {percent(summary.overlap_ratio, 0)} of all communication is hidden behind computation."
    parts = "" if is_attention(attribution) and not attribution.on_cpu else exposed_in_words(attribution)
    return f"{exposed}: {parts}." if parts else f"{exposed}."


# --- where it came from -------------------------------------------------------------------------------


def _cause(found: Facts) -> str:
    parts = found.waterfall
    largest = parts.largest_loss()
    # What ranks wait holds the time from their own end to the slowest rank's: that is a share of the slowest's wall.
    waits = largest in ("imbalance", "peer_wait", "exposed_unsplit")
    share = parts.of(largest) / (parts.wall_ns or 1) if waits else _of_time(found, parts.of(largest))
    if share < WORTH_NAMING:
        return _kernels(found)
    if largest in COMPUTE_PARTS:
        return _beside(found, share, largest)
    return {
        "imbalance": _imbalance, "exposed_wire": _wire, "peer_wait": _wait, "exposed_unsplit": _unsplit,
        "launch_gaps": _not_launched, "blocked": _blocked, "other_groups": _other_groups,
    }[largest](found, share)  # fmt: skip


def _computation(found: Facts) -> str:
    """Name what computes longest in a step that is more than attention, after idle time or copies that take longer."""
    said = computation_in_words(found.attribution, found.summary)
    parts = found.waterfall
    longest = max(map(parts.of, (*IDLE_PARTS, *COMPUTE_PARTS, *ATTENTION_PARTS)))
    lost = max((*IDLE_PARTS, "merge_and_copies"), key=parts.of)
    share = _of_time(found, parts.of(lost))
    if share >= WORTH_NAMING and parts.of(lost) == longest:
        named = {"launch_gaps": _not_launched, "blocked": _blocked, "merge_and_copies": _copies}
        why = named[lost](found, share)
        return f"{why.removesuffix('.')}; {said}." if said else why
    return f"{said[:1].upper()}{said[1:]}." if said else ""


def _kernels(found: Facts) -> str:
    parts = found.waterfall
    spent = percent(_of_time(found, parts.of(*ATTENTION_PARTS)))
    text = f"No loss outside the attention kernels reaches {percent(WORTH_NAMING, 0)}: {spent} of the time is"
    rate = found.summary.rates.block_tflops
    if rate is None or rate < 1:
        return f"{text} attention kernels{attention_rate(found.attribution)}."
    of_peak = f", {percent(rate / parts.peak.tflops, 0)} of the device's peak" if parts.peak else ""
    return f"{text} attention kernels at {rate:,.0f} TFLOP/s{of_peak}."


def _imbalance(found: Facts, share: float) -> str:
    rank = min(found.attribution.ranks, key=lambda one: one.breakdown.compute_ns)
    wait, kind = _waited(rank)
    if wait < _MOST:
        # It is done early, or waits in another kind than the one that takes it longest.
        most = max(found.attribution.ranks, key=lambda one: one.breakdown.compute_ns)
        computes = [f"rank {one.rank} computes {milliseconds(one.breakdown.compute_ns)}" for one in (rank, most)]
        return f"Imbalance takes {percent(share)} of the slowest rank's wall: {', '.join(computes)}."
    text = f"{percent(wait, 0)} of rank {rank.rank}'s {kind} time was waiting for ranks {_more_work(found, rank)}"
    if known_contiguous(found.attribution):
        return f"{text}."
    if rises_with_rank(found.attribution):
        return f"{text}; work rises with the rank, as in contiguous pieces under a causal mask: see zigzag and stripe."
    return f"{text}; imbalance takes {percent(share)} of the slowest rank's wall."


def _waited(rank: Rank) -> tuple[float, str]:
    """The share of waiting in its longest kind of communication, and what that is called."""
    times: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rank.link_totals:
        if row.timed:
            times[row.kind][0] += row.wait_ns
            times[row.kind][1] += row.wait_ns + row.wire_ns
    if not times:
        return 0.0, "communication"
    kind = max(times, key=lambda name: times[name][1])
    wait, whole = times[kind]
    return (wait / whole if whole else 0.0), in_a_sentence(kind)


def _more_work(found: Facts, rank: Rank) -> str:
    run = found.attribution.run
    flops = run.block_flops() if run else None
    if run and flops and flops.get(rank.rank):
        ratio = max(flops.values()) / flops[rank.rank]
        if ratio >= UNBALANCED:
            causal = "causal " if run.workload and run.workload.causal else ""
            return f"with up to {three_digits(ratio)} times its {causal}work"
    most = max(other.breakdown.compute_ns for other in found.attribution.ranks)
    return f"that compute up to {milliseconds(most)}, where it computes {milliseconds(rank.breakdown.compute_ns)}"


def _wire(found: Facts, share: float) -> str:
    slow = _slow_hosts(found) or _slow_ranks(found)
    text = f"{percent(share)} of the time is bytes on a wire with nothing to hide them"
    return f"{text}: {slow}." if slow else f"{text}{_worst_step(found)}."


def _other_groups(found: Facts, share: float) -> str:
    return f"{percent(share)} of the time is exposed communication of other groups."


def _slow_hosts(found: Facts) -> str:
    row = slow_between_hosts(found.summary)
    if row is None:
        return ""
    within = [
        (one.wire_gbps, one.kind) for one in found.summary.communication if one.wire_gbps and one.link == SAME_HOST
    ]
    rate, kind = max(within, default=(0.0, ""))
    named = f"{in_a_sentence(kind)} " if within and kind != row.kind else ""
    against = f", {named}{three_digits(rate)} within a host" if within else ""
    return f"{in_a_sentence(row.kind)} between hosts moves {three_digits(row.wire_gbps or 0.0)} GB/s{against}"


def _slow_ranks(found: Facts) -> str:
    rates = {rank.rank: rank.hop_totals.wire_gbps for rank in found.attribution.ranks}
    slow = slow_senders(found.attribution)
    if not slow:
        return ""
    ranks = [str(rank) for rank in slow]
    ends = ", ".join(ranks[:-1]) + (f" and {ranks[-1]}" if len(ranks) > 1 else ranks[-1])
    return (
        f"rank{'s' if len(slow) > 1 else ''} {ends} send{'s' if len(slow) == 1 else ''} at {_span([*slow.values()])} "
        f"GB/s, the others at {_span([rate for rank, rate in rates.items() if rate and rank not in slow])}"
        f"{_links(found, set(slow))}"
    )


def _span(values: Sequence[float]) -> str:
    low, high = three_digits(min(values)), three_digits(max(values))
    return low if low == high else f"{low} to {high}"


def _links(found: Facts, slow: set[int]) -> str:
    """The directions in which one slow rank sends to another."""
    pairs = {
        (rank.rank, peer)
        for rank in found.attribution.ranks
        for peer in rank.hop_peers
        if rank.rank in slow and peer in slow
    }
    # Neighbours that are slow for their other side's sake would be named, too, where all of a ring is.
    if not pairs or len(pairs) > len(slow):
        return ""
    return " (" + ", ".join(f"{a} to {b}" for a, b in sorted(pairs)[:6]) + ")"


def _worst_step(found: Facts) -> str:
    """The ring step that exposes most, where there are several."""
    exposed = found.exposed_by_step
    if len(exposed) < 2:
        return ""
    phases = {
        phase: sum(time for key, (time, _) in exposed.items() if key[0] == phase)
        for phase in dict.fromkeys(key[0] for key in exposed)
    }
    everything = sum(phases.values())
    if not everything:
        return ""
    phase = max(phases, key=lambda name: phases[name])
    means = {key[1]: time / count for key, (time, count) in exposed.items() if key[0] == phase}
    worst = max(means, key=lambda step: means[step])
    return (
        f"; of what ring steps expose, {percent(phases[phase] / everything, 0)} is in the {PASSES[phase]} pass, "
        f"most in step {worst} (mean {milliseconds(means[worst])})"
    )


def _wait(found: Facts, share: float) -> str:
    slow = _slow_hosts(found) or _slow_ranks(found)
    waiting = "of the slowest rank's wall is waiting for peers"
    early = ", or for the slowest rank to end" if _early(found) else ""
    if slow:
        on_wire = percent(found.waterfall.of("exposed_wire") / found.waterfall.wall_ns)
        return f"{percent(share)} {waiting} whose hops are slow{early}, {on_wire} wire: {slow}."
    late = late_ranks(found.attribution)
    named = ", ".join(f"rank {rank} ({percent(part, 0)} of all waiting)" for rank, part in late.items())
    for_whom = f"; most waited for: {named}" if late else ""
    waited = f"{percent(share)} {waiting}{early}{',' if early else ''} beyond what their computation differs by"
    return f"{waited}{for_whom}{_worst_step(found)}."


def _early(found: Facts) -> bool:
    """Whether a part of the waiting worth naming is after a rank's own end, until that of the slowest rank."""
    wall = found.waterfall.wall_ns
    early = sum(wall - rank.breakdown.wall_ns for rank in found.attribution.ranks) / len(found.attribution.ranks)
    return early > _SHORT * found.waterfall.of("peer_wait")


_SHORT = 0.1
"""Share of the waiting below which what lies after a rank's own end is not named."""


def _unsplit(found: Facts, share: float) -> str:
    if found.attribution.on_cpu:
        # Beyond what is blocked this holds the time from a rank's end to the slowest rank's.
        blocked = f"{percent(share)} of the slowest rank's time others are blocked, or done before it"
        return blocked_in_words(found.attribution) or f"{blocked}; what of it is waiting is not recorded on CPU."
    return f"How much of it is waiting and how much wire is not known (see warnings){_worst_step(found)}."


def _beside(found: Facts, share: float, part: str) -> str:
    rows = _kinds_of(found, part)
    mostly = len(rows) > 1 and rows[0].time_ns > sum(row.time_ns for row in rows) / 2
    most = f", most of it {KIND[rows[0].kind].label}" if mostly else ""
    return beside_attention(found.attribution, part, share, f"{_called(found, part)}{most}")


def _copies(found: Facts, share: float) -> str:
    return _beside(found, share, "merge_and_copies")


def _kinds_of(found: Facts, part: str) -> list[KindRow]:
    """The kinds that a part of the computation holds here, longest first."""
    kinds = COMPUTE_PARTS[part] if part != "merge_and_copies" else (*COMPUTE_PARTS[part], *MEMORY)
    return [row for row in found.summary.kinds if row.kind in kinds]


def _called(found: Facts, part: str) -> str:
    """Return the name of a part in a sentence; a program without merges is not told of any."""
    kinds = {row.kind for row in _kinds_of(found, part)} if part == "merge_and_copies" else set()
    if kinds and "merge" not in kinds:
        return "copies and permutations" if len(kinds) > 1 else KIND[kinds.pop()].label
    return _BESIDE.get(part, WATERFALL_LABELS[part])


_BESIDE = {
    "matrix_products": "matrix products",
    "optimizer": "the optimizer",
    "other_compute": "computation other than attention",
    "merge_and_copies": "merges and copies",
}


def _not_launched(found: Facts, share: float) -> str:
    if found.attribution.on_cpu:
        text = f"{percent(share)} of the time nothing computes"
        unmarked = any(warning.code == "cpu_no_wait_marks" for warning in found.attribution.warnings)
        return f"{text}; waiting is not recorded." if unmarked else f"{text} and nothing waits."
    return not_launched_in_words(found.attribution, percent(share))


def _blocked(found: Facts, share: float) -> str:
    return idle_blocked_in_words(found.attribution, percent(share))


# --- what could be gained -----------------------------------------------------------------------------


def _gain(found: Facts) -> str:
    if not _communicates(found) or len(found.attribution.ranks) < 2 or not found.waterfall.wall_ns:
        return ""
    wall, bounds = found.waterfall.wall_ns, found.waterfall.bounds
    named = [(bounds.free_ns, "with free communication")]
    if found.waterfall.of("imbalance"):
        named.append((bounds.balanced_ns, "with perfect balance"))
    if not found.attribution.on_cpu and not found.waterfall.of("exposed_unsplit"):
        # What is on the wire longer than ranks compute cannot be hidden: it must be known.
        named.append((bounds.hidden_ns, "with perfect balance and overlap"))
    less = [(time, words) for time, words in named if 1 - time / wall >= _LEAST_GAIN]
    if not less:
        return ""
    parts = [f"{milliseconds(time)} ({percent(1 - time / wall)}{'' if at else ' less'}) {words}"
             for at, (time, words) in enumerate(less)]  # fmt: skip
    return f"{milliseconds(wall)} could be " + ", ".join(parts) + "."


# --- what to do about it ------------------------------------------------------------------------------


class NextStep(msgspec.Struct, frozen=True):
    """The loss to go for first."""

    part: str
    """Of the waterfall."""
    time_ns: int
    """What the part takes, never more than the wall less the bound of `Bounds` that belongs to it. A remedy can gain
    more: what other ranks wait because of the part, and slower kernels beside it, are counted in other parts."""
    share: float
    """Of the slowest rank's wall."""
    text: str
    """The whole of it in words."""


def next_step_of(found: Facts) -> NextStep | None:
    """Name the largest loss with what would shorten it; None where there is none, or nothing to say of it."""
    parts, attribution = found.waterfall, found.attribution
    largest, kernels = parts.largest_loss(), ("attention", "kernel", "repeated", "slowdown")
    small = parts.of(largest) < WORTH_NAMING * parts.wall_ns
    if small and is_attention(attribution):
        largest = max(kernels, key=parts.of)
    part = next((one for one in parts.parts if one.part == largest), None)
    if attribution.lacks_device or part is None or (small and largest not in kernels):
        return None
    remedy = part.remedy or _cannot_be_told(found, largest)
    if not remedy:
        return None
    gain = parts.gain_ns(largest)
    share = gain / parts.wall_ns if parts.wall_ns else 0.0
    return NextStep(part=largest, time_ns=gain, share=share, text=_in_words(found, part, gain, remedy))


def _cannot_be_told(found: Facts, part: str) -> str:
    """Why there is no remedy for a part; empty where there is nothing to say."""
    if part == "blocked":
        return "what most of it waits for is not recorded"
    if part == "exposed_unsplit" and found.attribution.on_cpu:
        return "which of these it is cannot be told on CPU"
    return "why these cannot be told apart is among the warnings" if part == "exposed_unsplit" else ""


def _in_words(found: Facts, part: WaterfallPart, gain_ns: int, remedy: str) -> str:
    parts = found.waterfall
    loss, wall = milliseconds(part.time_ns), milliseconds(parts.wall_ns)
    if part.part in ATTENTION_PARTS:
        tenth = milliseconds(parts.of(*ATTENTION_PARTS) / 10)
        text = f"Largest loss: {WATERFALL_LABELS[part.part]}, {loss} of {wall}. To try: {remedy}"
        return f"{text}; 10 % faster attention saves {tenth}."
    hides = rate_to_hide(found.attribution, longest_on_wire(found.summary)) if part.part == "exposed_wire" else ""
    together = _together(parts, part.part)
    where = " outside attention" if parts.of(*ATTENTION_PARTS) > parts.of(*together) else ""
    name = f"{_called(found, part.part)}, {loss} of {wall}"
    if len(together) > 1:
        whole, largest = milliseconds(parts.of(*together)), _called(found, part.part)
        name = f"imbalance and exposed communication, {whole} of {wall}, its largest part {largest} ({loss})"
    bound = f", of which free communication would gain {milliseconds(gain_ns)}" if gain_ns < part.time_ns else ""
    what = f". To try: {remedy}{hides}" if part.remedy else f": {remedy}"
    return f"Largest loss{where}: {name}{bound}{what}."


def _together(parts: Waterfall, part: str) -> tuple[str, ...]:
    """Return the parts that a loss is named with: all of communication where no part of it alone is the largest."""
    others = (*COMPUTE_PARTS, *IDLE_PARTS, "other_groups")
    alone = part not in COMMUNICATION_PARTS or parts.of(part) >= max(map(parts.of, others))
    return (part,) if alone else COMMUNICATION_PARTS
