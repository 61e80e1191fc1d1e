"""Recomputation of the TFLOP/s of benchmark rows from their own times and settings.

    forward FLOPs = 4 · batch · seq² · heads · head_dim, half when causal; forward and backward 3.5 times as many
    TFLOP/s per GPU = FLOPs / GPUs / time / 1e12

A printed figure stands for an interval: from half a unit of its last digit below it (if rounded) to a whole unit above
it (if truncated). So a comparison needs no further tolerance. Where it fails, known errors by a constant factor are
tried before a row counts as inconsistent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringprof.printed.benchmarks.rows import Flag, JudgedRow, LogRow, Verdict, flag

BACKWARD_AND_FORWARD = 3.5
HEAD_DIMS = (32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)
"""Head dimensions that attention kernels support; only these are tried when solving for settings."""

_EXACT = 2e-4
"""Relative tolerance in addition to rounding: S² against S(S+1) in the FLOPs of a causal mask."""
_COARSE = 0.005
"""Relative value of a time's last digit above which the time counts as coarsely rounded."""

_VERDICTS_BEST_FIRST: tuple[Verdict, ...] = ("agrees", "rounding", "constant", "inconsistent")


@dataclass(frozen=True)
class Rate:
    """A printed rate with its time, the last-digit values of both, and its pass's FLOPs in units of a forward pass."""

    name: str
    tflops: float
    tflops_step: float
    time_ms: float
    time_step: float
    passes: float

    @property
    def work(self) -> tuple[float, float]:
        """Lower and upper bound of the TFLOP that rate and time imply, over as many GPUs as the rate is for."""
        low = (self.tflops - self.tflops_step / 2) * (self.time_ms - self.time_step / 2)
        high = (self.tflops + self.tflops_step) * (self.time_ms + self.time_step)
        return low / 1e3 * (1 - _EXACT), high / 1e3 * (1 + _EXACT)

    @property
    def coarse(self) -> bool:
        """Whether the time is rounded so coarsely that it says little by itself."""
        return self.time_ms > 0 and self.time_step / self.time_ms > _COARSE


def rates_of(row: LogRow) -> list[Rate]:
    """Return the printed rates of a row that have a printed time, with the row's main rate first."""
    main = ("forward and backward", "tflops", "forward_backward_ms", BACKWARD_AND_FORWARD)
    if row.forward_only:
        main = ("forward", "tflops", "forward_ms", 1.0)
    return [
        Rate(name, tflops, row.steps.get(key, 0.0), time, row.steps.get(time_key, 0.0), passes)
        for name, key, time_key, passes in (main, ("forward", "tflops_forward", "forward_ms", 1.0))
        if (tflops := getattr(row, key)) is not None and (time := getattr(row, time_key))
    ]


def missing_settings(row: LogRow) -> list[str]:
    """Return the names of the settings without which a row's TFLOP/s cannot be computed."""
    return [name for name in ("batch", "seq", "heads", "head_dim", "world_size") if getattr(row, name) is None]


def tflop_per_gpu(row: LogRow, rate: Rate, head_dim: int | None = None, *, causal: bool) -> float:
    """Compute the TFLOP per GPU of a rate's pass, for ``head_dim`` or else the stated head dimension.

    The row's settings must be known. Where the row prints 0 for one of them, the result is 0.
    """
    batch, seq, heads, stated_head_dim = row.batch or 0, row.seq or 0, row.heads or 0, row.head_dim or 0
    work = 4e-12 * batch * seq**2 * heads * stated_head_dim / (2 if causal else 1) * rate.passes
    return (work * head_dim / (stated_head_dim or 1) if head_dim else work) / (row.world_size or 1)


def follows(work: float, rate: Rate) -> bool:
    """Return whether a printed rate and its time are consistent with ``work`` in TFLOP."""
    low, high = rate.work
    return low <= work <= high


# --- one row ----------------------------------------------------------------------------------------


def audit_row(row: LogRow) -> tuple[JudgedRow, list[Flag]]:
    """Audit a single row; return it with its verdict, and its flags.

    The verdict is ``unchecked`` where the row lacks figures or settings.
    """
    rates = rates_of(row)
    if not rates or missing_settings(row):
        return JudgedRow(row, "unchecked", None, row.tflops), []
    audited_rates = [_audit_rate(row, rate) for rate in rates]
    # A block with several rates gets the worst verdict of them.
    worst = max((audited.verdict for audited, _ in audited_rates), key=_VERDICTS_BEST_FIRST.index)
    return replace(audited_rates[0][0], verdict=worst), [rate_flag for _, flags in audited_rates for rate_flag in flags]


def _audit_rate(row: LogRow, rate: Rate) -> tuple[JudgedRow, list[Flag]]:
    """Audit one printed rate of a row; return the row with the verdict on that rate, and its flags."""
    # Where no mask is stated, both are tried, causal first, since the figures show which one was used.
    for causal in (True, False) if row.causal is None else (row.causal,):
        work = tflop_per_gpu(row, rate, causal=causal)
        if follows(work, rate):
            computed = work / rate.time_ms * 1e3
            if not rate.coarse:
                return JudgedRow(row, "agrees", computed, rate.tflops), []
            time = work / rate.tflops * 1e3
            message = (
                f"{rate.name}: the time is rounded to {rate.time_ms:g} ms (+-{rate.time_step / 2:g}); "
                f"{work:.4f} TFLOP per GPU / {rate.tflops:g} TFLOP/s = {time:.2f} ms"
            )
            rounded_time = flag(row, "rounded_time", "note", message, rate.time_ms, round(time, 4))
            return JudgedRow(row, "rounding", computed, rate.tflops), [rounded_time]
    work = tflop_per_gpu(row, rate, causal=row.causal is not False)
    computed = work / rate.time_ms * 1e3
    flop = flop_in_words(row, rate, row.head_dim, "" if row.causal is False else " / 2 (causal)")
    arithmetic = f"{rate.name}: {flop} / {row.world_size} GPUs / {rate.time_ms:g} ms = {computed:.2f} TFLOP/s"
    arithmetic += f"; printed {rate.tflops:g}"
    for factor, explanation in _constant_errors(row, rate):
        if factor != 1 and follows(work * factor, rate):
            message = f"{arithmetic}, {factor:g} times that: {explanation}"
            constant_flag = flag(row, "tflops_constant", "warning", message, rate.tflops, round(computed, 4))
            return JudgedRow(row, "constant", computed, rate.tflops / factor), [constant_flag]
    # A rate of 0, or one computed as 0 from a very long time, follows from no number of heads.
    if computed and rate.tflops:
        heads, time = (row.heads or 0) * rate.tflops / computed, work / rate.tflops * 1e3
        arithmetic += f": that needs {heads:.2f} heads, or {time:.2f} ms"
    inconsistent = flag(row, "tflops_inconsistent", "error", arithmetic, rate.tflops, round(computed, 4))
    return JudgedRow(row, "inconsistent", computed, None), [inconsistent]


def _constant_errors(row: LogRow, rate: Rate) -> list[tuple[float, str]]:
    """List the known errors that multiply a rate by a constant, as (factor, explanation), most likely first."""
    world = float(row.world_size or 1)
    halving = 2.0 if row.causal is not False else 0.5
    mask = "without the causal halving" if halving == 2 else "halved as if causal"
    slips = [(world, f"a total over {world:g} GPUs, not per GPU"), (halving, mask)]
    if rate.passes != 1:
        slips.append((1 / rate.passes, "counts the forward pass only"))
        slips.append((3 / rate.passes, "counts backward as 2 forward passes instead of 2.5"))
    slips += [(1e3, "the time is in ms though labelled s"), (1e-3, "the time is in s though labelled ms")]
    pairs = [(a * b, f"{x}, and {y}") for i, (a, x) in enumerate(slips[:3]) for b, y in slips[i + 1 : 3]]
    return slips + pairs


def flop_in_words(row: LogRow, rate: Rate, head_dim: int | None, halved: str) -> str:
    """Format the arithmetic of a rate's pass over all GPUs: ``4 x 1 x 8192^2 x 32 x 128 / 2 x 3.5 FLOP``."""
    times = f" x {rate.passes:g}" if rate.passes != 1 else ""
    return f"4 x {row.batch} x {row.seq}^2 x {row.heads} x {head_dim}{halved}{times} FLOP"


# --- settings that a whole log gets wrong ------------------------------------------------------------


@dataclass(frozen=True)
class SolvedSettings:
    """Settings with which every rate of a group of rows follows from its time."""

    head_dim: int
    causal: bool
    total: bool
    """Whether the printed rates are totals over all GPUs."""

    def tflop(self, row: LogRow, rate: Rate) -> float:
        """Compute the TFLOP of the rate's pass, over as many GPUs as the printed rate is for."""
        return tflop_per_gpu(row, rate, self.head_dim, causal=self.causal) * (row.world_size or 1 if self.total else 1)


def solve(rows: Sequence[LogRow]) -> list[SolvedSettings]:
    """Return the combinations of head dimension, mask and meaning of the rates that fit every row, simplest first."""
    checked = [(row, rate) for row in rows for rate in rates_of(row)[:1]]
    if len(checked) < 2 or any(missing_settings(row) for row, _ in checked):
        return []
    masks = (True, False) if rows[0].causal is None else (rows[0].causal,)
    candidates = [SolvedSettings(dim, mask, total) for mask in masks for total in (False, True) for dim in HEAD_DIMS]
    return [option for option in candidates if all(follows(option.tflop(row, rate), rate) for row, rate in checked)]
