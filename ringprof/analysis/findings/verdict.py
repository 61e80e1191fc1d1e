"""Verdict on a run in at most four lines: missing data, cost of communication, its cause, and the possible gain.

Every line is made of metrics of the report, and claims nothing that they do not show.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.findings.parts import PARTS, in_words, name_in_sentence
from ringprof.analysis.findings.recommendations import rate_to_hide
from ringprof.analysis.findings.step_rates import attention_rate_clause, busy_ns, computation_clause, computes_longest
from ringprof.analysis.findings.waterfall import (
    ATTENTION_PARTS,
    COMMUNICATION_PARTS,
    IDLE_PARTS,
    NEEDED_WORK,
    WORTH_NAMING,
    Facts,
    Waterfall,
)
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS, KIND
from ringprof.common.formatting import percent
from ringprof.trace.columns import CUT_OFF

_MIN_GAIN = 0.0005
"""Smallest gain that is named, as a share of the wall time; smaller ones would round to 0.0 %."""
_MUCH_UNKNOWN = 0.1
"""Share of the time in kernels of unknown kind from which on it is not known whether a program communicates."""
_LONGEST_KERNEL_NAME = 80


def verdict_of(facts: Facts) -> tuple[str, ...]:
    """Return the verdict: missing data, if any, then at most three lines."""
    missing = missing_sentence(facts.attribution)
    if facts.attribution.lacks_device:
        return (missing,)
    cause = _cause_line if is_attention(facts.attribution) else _computation_line
    lines = (missing, _cost_line(facts), cause(facts), _gain_line(facts))
    return tuple(line for line in lines if line)


def _communicates(facts: Facts) -> bool:
    """Return whether any rank communicates."""
    return any(rank.breakdown.comm_ns for rank in facts.attribution.ranks)


# --- cost of communication ----------------------------------------------------------------------------


def _cost_line(facts: Facts) -> str:
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
            rest = f"the rest of these traces has {{mean(left_out):ms}} of it per {noun}"
            return Claim(f"no communication in what is reported; {rest}", left_out_ns)
        if single_device:
            return f"one {noun}: nothing is communicated"
        return _unknown_kinds_line(facts) or "no communication in these traces"
    worst: str = ""
    if len(attribution.ranks) > 1:
        values = summary.exposed_worst, summary.exposed_worst_rank
        worst = Claim(", {max(exposed_comm):%} at worst (rank {rank})", *values)
    exposed = Claim("{exposed_comm/time:%} of the time is exposed communication{}", summary.exposed_mean, worst)
    has_ranges = any(rank.exposed.by_group for rank in attribution.ranks)
    if attribution.on_cpu and not has_ranges:
        return Claim("{}: time blocked in waiting for a transfer.", exposed)
    if summary.exposed_mean < WORTH_NAMING and summary.overlap_ratio is not None:
        hidden = "{overlap_ratio:0%} of all communication is hidden behind computation"
        return Claim(f"{{}}: {hidden}.", exposed, summary.overlap_ratio)
    shares = "" if is_attention(attribution) and not attribution.on_cpu else exposed_shares(attribution)
    return Claim("{}: {}.", exposed, shares) if shares else Claim("{}.", exposed)


def _unknown_kinds_line(facts: Facts) -> str:
    """Say that kernels of unknown kind, which may communicate, take much of the time; empty where they do not."""
    share = facts.share_of_time(busy_ns(facts.attribution, "other") / len(facts.attribution.ranks))
    if share < _MUCH_UNKNOWN or facts.attribution.on_cpu:
        return ""
    longest = facts.attribution.largest_of_other[0].name[:_LONGEST_KERNEL_NAME]
    unknown = "{unknown_kinds/time:%} of the time is kernels of unknown kind, the longest {}"
    return Claim(f"no known communication; {unknown}", share, longest)


# --- cause of the largest loss ------------------------------------------------------------------------


def _cause_line(facts: Facts) -> str:
    """Name the cause of the largest loss of an attention job, or the attention kernels if no loss is worth naming."""
    waterfall = facts.waterfall
    largest = waterfall.largest_outside()
    # Waiting includes the time from a rank's end to the slowest rank's, so it is a share of the slowest's wall time.
    is_wait = largest in ("imbalance", "peer_wait", "exposed_unsplit")
    share = waterfall.of(largest) / (waterfall.wall_ns or 1) if is_wait else facts.share_of_time(waterfall.of(largest))
    if share < WORTH_NAMING:
        return _kernels_line(facts)
    return Claim("{}.", PARTS[largest].sentence(facts, share))


def _computation_line(facts: Facts) -> str:
    """Name the longest computation of a step that is more than attention.

    Idle time or copies come first if they take longer.
    """
    waterfall = facts.waterfall
    longest_ns = max(map(waterfall.of, (*IDLE_PARTS, *COMPUTE_PARTS, *ATTENTION_PARTS)))
    largest_loss = max((*IDLE_PARTS, "merge_and_copies"), key=waterfall.of)
    share = facts.share_of_time(waterfall.of(largest_loss))
    # A part of one kind that also computes longest is named once, by the time in which it runs.
    is_named = computes_longest(facts.attribution, facts.summary) == name_in_sentence(facts, largest_loss)
    if share >= WORTH_NAMING and waterfall.of(largest_loss) == longest_ns and not is_named:
        clauses = PARTS[largest_loss].sentence(facts, share), computation_clause(facts.attribution, facts.summary)
        return Claim("{}.", Claim("; ").join(filter(None, clauses)))
    longest = computation_clause(facts.attribution, facts.summary, "What")
    return Claim("{}.", longest) if longest else ""


def _kernels_line(facts: Facts) -> str:
    """Say that no loss outside the attention kernels is worth naming, with the rate of these kernels."""
    waterfall = facts.waterfall
    rate, peak = facts.summary.rates.block_tflops, waterfall.work.peak
    if rate is None or rate < 1:
        rate_clause = attention_rate_clause(facts.attribution)
    else:
        share = rate / peak.tflops if peak else 0.0
        of_peak = Claim(", {block_tflops/peak_tflops:0%} of the device's peak", share) if peak else ""
        rate_clause = Claim(" at {block_tflops:,.0f} TFLOP/s{}", rate, of_peak)
    return Claim(
        f"No loss outside the attention kernels reaches {percent(WORTH_NAMING, 0)}: "
        "{attention_parts/time:%} of the time is attention kernels{}.",
        facts.share_of_time(waterfall.of(*ATTENTION_PARTS)), rate_clause,
    )  # fmt: skip


# --- possible gain ------------------------------------------------------------------------------------


def _gain_line(facts: Facts) -> str:
    """Give the wall time with free communication, perfect balance and perfect overlap; empty where none gains."""
    if not _communicates(facts) or len(facts.attribution.ranks) < 2 or not facts.waterfall.wall_ns:
        return ""
    wall_ns, bounds = facts.waterfall.wall_ns, facts.waterfall.bounds
    bound_texts = [(bounds.free_ns, "free_communication", "with free communication")]
    if facts.waterfall.of("imbalance"):
        bound_texts.append((bounds.balanced_ns, "balanced", "with perfect balance"))
    if not facts.attribution.on_cpu and not facts.waterfall.of("exposed_unsplit"):
        # Wire time beyond the computation cannot be hidden, so this bound needs known wire times.
        bound_texts.append((bounds.hidden_ns, "all_hidden", "with perfect balance and overlap"))
    gains = [row for row in bound_texts if 1 - row[0] / wall_ns >= _MIN_GAIN]
    texts = [Claim(f"{{{name}:ms}} ({{gain({name}):%}}{'' if index else ' less'}) {words}", time, 1 - time / wall_ns)
             for index, (time, name, words) in enumerate(gains)]  # fmt: skip
    return Claim("{wall:ms} could be {}.", wall_ns, Claim(", ").join(texts)) if texts else ""


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


def next_step_of(facts: Facts) -> NextStep | None:
    """Return the largest loss with a recommendation; None without a loss, or where nothing can be said about it."""
    waterfall, attribution = facts.waterfall, facts.attribution
    name = waterfall.largest_loss()
    min_ns = WORTH_NAMING * waterfall.wall_ns
    is_small = waterfall.of(name) < min_ns
    if is_small and is_attention(attribution) and waterfall.of(*NEEDED_WORK) < min_ns:
        name = waterfall.attention_loss()
    if attribution.lacks_device or name not in waterfall.times_ns or (is_small and name not in ATTENTION_PARTS):
        return None
    time_ns = waterfall.of(name)
    remedy = in_words(PARTS[name].remedy, facts) if time_ns > 0 else ""
    recommendation = remedy or in_words(PARTS[name].without_remedy, facts)
    if not recommendation:
        return None
    gain_ns = waterfall.gain_ns(name)
    share = gain_ns / waterfall.wall_ns if waterfall.wall_ns else 0.0
    advice = Claim(". To try: {}" if remedy else ": {}", recommendation)
    return NextStep(part=name, time_ns=gain_ns, share=share, text=_next_step_text(facts, name, gain_ns, advice))


def _next_step_text(facts: Facts, part: str, gain_ns: int, advice: str) -> str:
    """Write the sentence of `NextStep.text`; ``advice``: the recommendation, or why there is none."""
    waterfall, kernels, label = facts.waterfall, facts.waterfall.work.kernels, PARTS[part].label
    time_ns = waterfall.of(part)
    wall_ns, template = waterfall.wall_ns, "{}, {loss:ms} of {wall:ms}"
    if part in ("kernel", "kernel_limit"):
        # The distance to a peak is no loss that a change is known to remove.
        advice = advice if advice.startswith(". To try") else ""
        return Claim("In the attention kernels: {}{}.", kernels.evidence or kernels.unknown, advice)
    if part in ATTENTION_PARTS:
        text = Claim(f"Largest loss{{}}: {template}", _scope(waterfall, time_ns), label, time_ns, wall_ns)
        if part == "slower_kernel":
            return Claim("{}: {}{}.", text, kernels.evidence, advice)
        tenth_ns = waterfall.of(*ATTENTION_PARTS) / 10
        return Claim("{}{}; 10 % faster attention saves {attention_parts/10:ms}.", text, advice, tenth_ns)
    hides = rate_to_hide(facts.attribution, facts.summary) if part == "exposed_wire" else ""
    named_parts = _parts_named_with(waterfall, part)
    scope = _scope(waterfall, waterfall.of(*named_parts), attention_ns=waterfall.of(*ATTENTION_PARTS))
    name = Claim(template, name_in_sentence(facts, part), time_ns, wall_ns)
    if len(named_parts) > 1:
        largest = Claim("its largest part {} ({loss:ms})", name_in_sentence(facts, part), time_ns)
        together = "imbalance and exposed communication, {communication:ms} of {wall:ms}"
        name = Claim(f"{together}, {{}}", waterfall.of(*named_parts), wall_ns, largest)
    bound = Claim(", of which free communication would gain {gain:ms}", gain_ns) if gain_ns < time_ns else ""
    return Claim("Largest loss{}: {}{}{}{}.", scope, name, bound, advice, hides)


def _scope(waterfall: Waterfall, loss_ns: int, *, attention_ns: int = 0) -> str:
    """Return `` outside A and B``: the computation that takes longer than the loss but is none; empty if none does."""
    longer = [PARTS[part].label for part in NEEDED_WORK if waterfall.of(part) > loss_ns]
    names = [*(["attention"] if attention_ns > loss_ns else []), *longer]
    return f" outside {' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))}" if names else ""


def _parts_named_with(waterfall: Waterfall, part: str) -> tuple[str, ...]:
    """Return the parts that are named as one loss.

    These are all parts of communication, where they are the largest loss together but not one of them alone.
    """
    others = {"merge_and_copies", *IDLE_PARTS, "other_groups"}
    is_alone = part not in COMMUNICATION_PARTS or waterfall.of(part) >= max(map(waterfall.of, others))
    return (part,) if is_alone else COMMUNICATION_PARTS


# --- missing data, and kinds of exposed communication -------------------------------------------------

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
    texts = [Claim("{exposed_kind/time:%} {}", time / wall, label) for label, time in named]
    total = sum(rank.breakdown.exposed_comm_ns for rank in attribution.ranks)
    at_once = ", partly at the same time" if len(named) > 1 and sum(time for _, time in named) > total else ""
    return Claim("{}{}", Claim(", ").join(texts), at_once) if texts else ""


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
