"""FLOPs, rates and MFU of a training step whose trace holds shapes, and the verdict's sentences about computation.

Sentences name the longest part first, so that matrix products are never named alone where attention takes longer.
"""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.kinds import COMPUTE, KIND
from ringprof.analysis.rank import Rank
from ringprof.analysis.timeline.work import RATED_PARTS, PartWork
from ringprof.workload.devices import peak_of

MAX_NAMED = 2
"""Largest number of parts that a sentence always names, longest first."""
MIN_COVERAGE = 0.99
"""Share of the time of attention and matrix products whose FLOPs must be known for an MFU."""


class PartRate(msgspec.Struct, frozen=True):
    """FLOPs and rate of one part of the step over all ranks."""

    part: str
    """``attention`` or ``matrix_products``."""
    time_ns: float
    """Time with any kernel of the part running, on CPU any operator; mean over ranks."""
    share: float
    """``time_ns`` as a share of the mean wall time."""
    flops: int
    """FLOPs per device, mean over ranks."""
    tflops: float | None
    """TFLOP/s over the time of the kernels whose FLOPs are known; None where no FLOPs are known."""
    coverage: float
    """Share of the time whose FLOPs are known, 0..1."""
    mask_unknown: float
    """Share of the FLOPs that are counted dense because the attention mask is not recorded, 0..1."""


class StepRates(msgspec.Struct, frozen=True):
    """FLOPs and rates of a step by the recorded shapes; all profiled iterations together."""

    flops: int
    """FLOPs of attention and matrix products per device, mean over ranks. Recomputed work counts."""
    mfu: float | None
    """FLOPs over the slowest rank's wall time and the device's peak, 0..1.

    None where the peak, the shapes of over 1 % of the time, or the masks of over 1 % of the FLOPs are not known.
    """
    peak_tflops: float | None
    """Peak TFLOP/s of the device in the data type with most FLOPs; None where it is not known."""
    peak_dtype: str | None
    """Data type with most FLOPs."""
    peak_source: str | None
    """Source of the peak."""
    other_dtypes: dict[str, float]
    """Share of the FLOPs in each data type other than ``peak_dtype``."""
    coverage: float
    """Share of the time of all parts whose FLOPs are known, 0..1."""
    parts: tuple[PartRate, ...]
    """Parts that take time, longest first."""

    def part(self, name: str) -> PartRate | None:
        """Return a part by name; None where it takes no time."""
        return next((row for row in self.parts if row.part == name), None)


def step_rates_of(attribution: Attribution) -> StepRates | None:
    """Compute the rates of a step; None where no trace holds shapes, or the window is a part of an iteration."""
    ranks = attribution.ranks
    if attribution.partial_window or attribution.lacks_device or not any(rank.part_work for rank in ranks):
        return None
    rows = [_part_rate(name, ranks) for name in RATED_PARTS]
    parts = tuple(sorted((row for row in rows if row.time_ns), key=lambda row: -row.time_ns))
    spent = sum(row.time_ns for row in parts)
    coverage = sum(row.time_ns * row.coverage for row in parts) / spent if spent else 0.0
    rates = StepRates(sum(row.flops for row in parts), None, None, None, None, {}, coverage, parts)
    return _with_peak(rates, ranks)


def _part_rate(name: str, ranks: tuple[Rank, ...]) -> PartRate:
    """Combine a part of all ranks."""
    works = [_work_of(rank, name) for rank in ranks]
    time_ns, covered_ns = (sum(getattr(work, field) for work in works) for field in ("time_ns", "covered_ns"))
    flops, wall_ns = sum(work.flops for work in works), sum(rank.breakdown.wall_ns for rank in ranks)
    return PartRate(
        part=name,
        time_ns=time_ns / len(ranks),
        share=time_ns / wall_ns if wall_ns else 0.0,
        flops=round(flops / len(ranks)) if len(ranks) > 1 else flops,
        tflops=flops / covered_ns / 1e3 if flops and covered_ns else None,
        coverage=covered_ns / time_ns if time_ns else 0.0,
        mask_unknown=sum(work.dense_flops for work in works) / flops if flops else 0.0,
    )


def _work_of(rank: Rank, name: str) -> PartWork:
    """Return a rank's FLOPs and time of a part; only the time where the rank's trace holds no shapes."""
    work = next((work for work in rank.part_work if work.part == name), None)
    time_ns = rank.breakdown.flash_ns if name == "attention" else rank.breakdown.beside_ns.get(name, 0)
    return work or PartWork(name, time_ns, 0, 0, 0, {})


def _with_peak(rates: StepRates, ranks: tuple[Rank, ...]) -> StepRates:
    """Return the rates with the peak of the data type with most FLOPs, and the MFU."""
    dtypes = Counter[str]()
    for rank in ranks:
        for work in rank.part_work:
            dtypes.update(work.flops_by_dtype)
    total, devices = sum(dtypes.values()), {rank.device for rank in ranks}
    if not total or len(devices) > 1:
        return rates
    [(main_dtype, _), *others] = dtypes.most_common()
    peak = peak_of(next(iter(devices)), main_dtype)
    if peak is None:
        return rates
    dense_flops = sum(row.flops * row.mask_unknown for row in rates.parts)
    is_known = rates.coverage >= MIN_COVERAGE and dense_flops <= (1 - MIN_COVERAGE) * rates.flops
    wall_ns = max(rank.breakdown.wall_ns for rank in ranks)
    mfu = rates.flops / wall_ns / 1e3 / peak.tflops if is_known and wall_ns else None
    # No device exceeds its peak: an MFU above 1 means that the trace names another device or data type than was used.
    return msgspec.structs.replace(
        rates,
        mfu=mfu if mfu is None or mfu <= 1 else None,
        peak_tflops=peak.tflops,
        peak_dtype=main_dtype,
        peak_source=peak.source,
        other_dtypes={dtype: flops / total for dtype, flops in others},
    )


# --- in words -----------------------------------------------------------------------------------------


def computation_clause(attribution: Attribution, summary: Summary, first: str = "what") -> str:
    """Name the longest parts of the computation as shares of the mean wall time, with their rates.

    Further parts follow if their rate is known. ``first``: the first word. Empty where nothing computes.
    """
    rates, rows = step_rates_of(attribution), _longest_parts(attribution, summary)
    if not rows:
        return ""
    named = [(Claim(f"{{}} {{busy({part})/time:%}}{{}}", label, share, _rate_clause(rates, part)), part)
             for part, label, share in rows]  # fmt: skip
    longest = Claim(", then ").join(clause for clause, _ in named[:MAX_NAMED])
    others = Claim("").join(Claim("; {}", clause) for clause, part in named[MAX_NAMED:] if _rate_clause(rates, part))
    return Claim("{} computes longest is {} of the time{}{}", first, longest, others, _mfu_clause(rates))


def computes_longest(attribution: Attribution, summary: Summary) -> str:
    """Return the label of the part or kind that `computation_clause` names first; empty where nothing computes."""
    return next((label for _, label, _ in _longest_parts(attribution, summary)), "")


def compute_part_sentence(attribution: Attribution, part: str, share: float, part_name: str) -> str:
    """Say how much time a part other than attention takes, after attention if that takes longer.

    ``share``: share of the mean wall time. ``part_name``: name of the part in the sentence.
    """
    rates, attention_share = step_rates_of(attribution), _share_of_wall(attribution, "attention")
    attention, of_the_time, first = "", " of the time", "{busy(attention)/time:%} of the time is attention{}, "
    if attention_share >= share:
        attention, of_the_time = Claim(first, attention_share, _rate_clause(rates, "attention")), ""
    tail = _rate_clause(rates, part), _mfu_clause(rates)
    return Claim(f"{{}}{{{part}/time:%}}{of_the_time} is {{}}{{}}{{}}", attention, share, part_name, *tail)


def attention_rate_clause(attribution: Attribution) -> str:
    """Return the rate of the attention kernels and the MFU, to follow "attention kernels"; empty without shapes."""
    rates = step_rates_of(attribution)
    return Claim("{}{}", _rate_clause(rates, "attention"), _mfu_clause(rates))


def _longest_parts(attribution: Attribution, summary: Summary) -> list[tuple[str, str, float]]:
    """Return (part or kind, label, share of the mean wall time) of everything that computes, longest first."""
    merged = {kind for kinds in RATED_PARTS.values() for kind in kinds}
    rows = [(part, label_of(part, summary), _share_of_wall(attribution, part)) for part in RATED_PARTS]
    wall = sum(rank.breakdown.wall_ns for rank in attribution.ranks)
    for kind in (row.kind for row in summary.kinds if row.kind in COMPUTE and row.kind not in merged and wall):
        label = KIND[kind].label + _longest_of_other(attribution, kind)
        rows.append((kind, label, busy_ns(attribution, kind) / wall))
    return sorted((row for row in rows if row[2]), key=lambda row: -row[2])


def _longest_of_other(attribution: Attribution, kind: str) -> str:
    """Name the kernel that takes most of the time of kind ``other``, in parentheses; empty for other kinds."""
    rows = [kernel for kernel in attribution.kernels if kernel.kind == kind == "other"]
    if not rows or 2 * rows[0].time_ns <= sum(kernel.time_ns for kernel in rows):
        return ""
    name = re.split("[(<]", rows[0].name.removeprefix("void "))[0].strip()
    return f" (most of it {name[:_LONGEST_NAME] or 'without a name'})"


_LONGEST_NAME = 60


def busy_ns(attribution: Attribution, kind: str) -> int:
    """Sum over ranks the time in which any activity of a kind runs."""
    kinds_by_rank = [rank.breakdown.kinds for rank in attribution.ranks]
    return sum(times[kind].busy_ns for times in kinds_by_rank if kind in times)


def label_of(part: str, summary: Summary) -> str:
    """Return the name of a part in a sentence, from the kinds that occur in it."""
    kinds = {row.kind for row in summary.kinds}
    named = {"gemm": "matrix products", "convolution": "convolutions"}
    return part if part == "attention" else " and ".join(label for kind, label in named.items() if kind in kinds)


def _share_of_wall(attribution: Attribution, name: str) -> float:
    """Return the time of a part as a share of the mean wall time."""
    wall = sum(rank.breakdown.wall_ns for rank in attribution.ranks)
    return sum(_work_of(rank, name).time_ns for rank in attribution.ranks) / wall if wall else 0.0


def _rate_clause(rates: StepRates | None, part: str) -> str:
    """Return a part's rate in parentheses; empty where it is not known."""
    row = rates.part(part) if rates else None
    if row is None or row.tflops is None or row.coverage < MIN_RATED:
        return ""
    return Claim(f" ({{{part}_tflops:flops}}{{}})", row.tflops, MASKS_UNKNOWN if row.mask_unknown else "")


MIN_RATED = 0.1
"""Smallest share of a part's time with known shapes from which on its rate is told in a sentence."""
MASKS_UNKNOWN = " at most: attention masks are not recorded"


def _mfu_clause(rates: StepRates | None) -> str:
    """Return the MFU, or else of how much of the time the rates are; empty where there is nothing to say."""
    if rates is None:
        return ""
    if rates.mfu is not None and rates.peak_tflops is not None:
        rate = rates.mfu, rates.peak_tflops, rates.peak_dtype
        return Claim("; MFU {mfu:%} of {step_peak_tflops:g} TFLOP/s ({})", *rate)
    partly_known = [
        Claim(f"{{{row.part}_coverage:%}} of the {_TIMES[row.part]} time", row.coverage)
        for row in rates.parts
        if row.tflops is not None and MIN_RATED <= row.coverage < MIN_COVERAGE
    ]
    named = Claim(" and ").join(partly_known)
    return Claim("; shapes are recorded for {}, and rates are of that time", named) if partly_known else ""


_TIMES = {"attention": "attention", "matrix_products": "matrix-product"}
