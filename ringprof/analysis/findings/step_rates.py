"""FLOPs, rates and MFU of a training step whose trace holds shapes, and the sentences of the verdict about computation.

A sentence names the largest part first, so that matrix products never stand alone where attention takes longer.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.kinds import COMPUTE, KIND
from ringprof.analysis.rank import Rank
from ringprof.analysis.timeline.work import RATED_PARTS, PartWork
from ringprof.devices import peak_of
from ringprof.formatting import percent, three_digits

MOST_NAMED = 2
"""Parts that a sentence names, largest first."""
ENOUGH_COVERED = 0.99
"""Share of the time of attention and matrix products whose FLOPs must be known for an MFU."""


class PartRate(msgspec.Struct, frozen=True):
    """One part of the step over all ranks."""

    part: str
    """``attention`` or ``matrix_products``."""
    time_ns: float
    """Union of its kernels, on CPU of its operators; mean over ranks."""
    share: float
    """Of the mean wall."""
    flops: int
    """Per device, mean over ranks."""
    tflops: float | None
    """FLOPs over the time of the kernels whose FLOPs are known; None where there are none."""
    coverage: float
    """Share of the time whose FLOPs are known, 0..1."""
    mask_unknown: float
    """Share of the FLOPs that are counted dense because the attention mask is not recorded, 0..1."""


class StepRates(msgspec.Struct, frozen=True):
    """FLOPs and rates of a step by the recorded shapes; all profiled iterations together."""

    flops: int
    """Of attention and matrix products, per device, mean over ranks. Recomputed work counts."""
    mfu: float | None
    """FLOPs over the slowest rank's wall and the device's peak, 0..1; None where the peak, the shapes of over 1 % of
    the time, or the masks of over 1 % of the FLOPs are not known."""
    peak_tflops: float | None
    """Of the data type that most FLOPs are of; None where it is not known."""
    peak_dtype: str | None
    peak_source: str | None
    other_dtypes: dict[str, float]
    """Share of the FLOPs by data type, of other data types than the peak's."""
    coverage: float
    """Share of the time of all parts whose FLOPs are known, 0..1."""
    parts: tuple[PartRate, ...]
    """Longest first."""

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
    """Return a rank's part; its time alone where its trace holds no shapes."""
    work = next((work for work in rank.part_work if work.part == name), None)
    return work or PartWork(name, _time_without_shapes(rank, name), 0, 0, 0, {})


def _time_without_shapes(rank: Rank, name: str) -> int:
    return rank.breakdown.flash_ns if name == "attention" else rank.breakdown.beside_ns.get(name, 0)


def _with_peak(rates: StepRates, ranks: tuple[Rank, ...]) -> StepRates:
    """Add the peak of the data type that most FLOPs are of, and the MFU."""
    dtypes = Counter[str]()
    for rank in ranks:
        for work in rank.part_work:
            dtypes.update(work.flops_by_dtype)
    total, devices = sum(dtypes.values()), {rank.device for rank in ranks}
    if not total or len(devices) > 1:
        return rates
    [(main, _), *others] = dtypes.most_common()
    peak = peak_of(next(iter(devices)), main)
    if peak is None:
        return rates
    dense = sum(row.flops * row.mask_unknown for row in rates.parts)
    known = rates.coverage >= ENOUGH_COVERED and dense <= (1 - ENOUGH_COVERED) * rates.flops
    wall_ns = max(rank.breakdown.wall_ns for rank in ranks)
    mfu = rates.flops / wall_ns / 1e3 / peak.tflops if known and wall_ns else None
    # A device does not exceed its peak: the trace names another device or data type than the one that computed.
    return msgspec.structs.replace(
        rates,
        mfu=mfu if mfu is None or mfu <= 1 else None,
        peak_tflops=peak.tflops,
        peak_dtype=main,
        peak_source=peak.source,
        other_dtypes={dtype: flops / total for dtype, flops in others},
    )


# --- in words -----------------------------------------------------------------------------------------


def computation_in_words(attribution: Attribution, summary: Summary) -> str:
    """Name the parts that compute longest, as shares of the mean wall, with their rates; empty where none computes."""
    rates, rows = step_rates_of(attribution), _longest(attribution, summary)
    if not rows:
        return ""
    named = [f"{label} {percent(share)}{_rate(rates, part)}" for part, label, share in rows[:MOST_NAMED]]
    others = [
        f"; {label} {percent(share)}{_rate(rates, part)}"
        for part, label, share in rows[MOST_NAMED:]
        if _rate(rates, part)
    ]
    return f"what computes longest is {', then '.join(named)} of the time{''.join(others)}{_mfu(rates)}"


def beside_attention(attribution: Attribution, part: str, share: float, words: str) -> str:
    """Name a part beside attention, after attention where that takes longer; ``share`` is of the mean wall."""
    rates, attention = step_rates_of(attribution), _share(attribution, "attention")
    sentence = f"{percent(share)} of the time is {words}{_rate(rates, part)}"
    if attention >= share:
        shown = f"{percent(attention)} of the time is attention{_rate(rates, 'attention')}"
        sentence = f"{shown}, {percent(share)} is {words}{_rate(rates, part)}"
    return f"{sentence}{_mfu(rates)}."


def attention_rate(attribution: Attribution) -> str:
    """Return the rate of the attention kernels and the MFU, to follow "attention kernels"; empty without shapes."""
    rates = step_rates_of(attribution)
    return f"{_rate(rates, 'attention')}{_mfu(rates)}"


def _longest(attribution: Attribution, summary: Summary) -> list[tuple[str, str, float]]:
    """Return (part or kind, label, share of the mean wall) of everything that computes, longest first."""
    merged = {kind for kinds in RATED_PARTS.values() for kind in kinds}
    rows = [(part, label_of(part, summary), _share(attribution, part)) for part in RATED_PARTS]
    wall = sum(rank.breakdown.wall_ns for rank in attribution.ranks)
    rows += [
        (row.kind, KIND[row.kind].label, _busy_ns(attribution, row.kind) / wall)
        for row in summary.kinds if row.kind in COMPUTE and row.kind not in merged and wall
    ]  # fmt: skip
    return sorted((row for row in rows if row[2]), key=lambda row: -row[2])


def _busy_ns(attribution: Attribution, kind: str) -> int:
    """Sum over ranks the time in which activities of a kind run; several at once count once."""
    kinds = [rank.breakdown.kinds for rank in attribution.ranks]
    return sum(times[kind].busy_ns for times in kinds if kind in times)


def label_of(part: str, summary: Summary) -> str:
    """Return what a part is called in a sentence, by the kinds that occur in it."""
    kinds = {row.kind for row in summary.kinds}
    named = {"gemm": "matrix products", "convolution": "convolutions"}
    return part if part == "attention" else " and ".join(label for kind, label in named.items() if kind in kinds)


def _share(attribution: Attribution, name: str) -> float:
    wall = sum(rank.breakdown.wall_ns for rank in attribution.ranks)
    return sum(_work_of(rank, name).time_ns for rank in attribution.ranks) / wall if wall else 0.0


def _rate(rates: StepRates | None, part: str) -> str:
    """Return a part's rate in parentheses; empty where it is not known."""
    row = rates.part(part) if rates else None
    if row is None or row.tflops is None:
        return ""
    return f" ({flops_in_words(row.tflops, '/s')}{MASKS_UNKNOWN if row.mask_unknown else ''})"


def flops_in_words(tera: float, per: str = "") -> str:
    """Return FLOPs with a unit that fits: ``523 TFLOP/s``, ``41.2 GFLOP/s``."""
    unit, prefix = next(((unit, prefix) for unit, prefix in ((1e3, "P"), (1, "T")) if tera >= unit), (1e-3, "G"))
    return f"{three_digits(tera / unit)} {prefix}FLOP{per}"


MASKS_UNKNOWN = " at most: attention masks are not recorded"


def _mfu(rates: StepRates | None) -> str:
    """Return the MFU, or of how much time the shapes are known where that is not all; empty where neither is known."""
    if rates is None:
        return ""
    if rates.mfu is not None and rates.peak_tflops is not None:
        return f"; MFU {percent(rates.mfu)} of {rates.peak_tflops:g} TFLOP/s ({rates.peak_dtype})"
    missing = covered_in_words(rates)
    return f"; {missing}" if missing else ""


def covered_in_words(rates: StepRates) -> str:
    """Name the parts of which shapes are missing; empty where they are recorded for at least 99 % of each."""
    missing = [
        f"{percent(row.coverage)} of the {_TIMES[row.part]} time"
        for row in rates.parts
        if row.coverage < ENOUGH_COVERED
    ]
    rated = ", and rates are of that time" if rates.flops else ""
    return f"shapes are recorded for {' and '.join(missing)}{rated}" if missing else ""


_TIMES = {"attention": "attention", "matrix_products": "matrix-product"}
