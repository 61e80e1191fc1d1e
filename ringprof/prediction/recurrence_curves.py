"""Times of a recurrence's kernel on one machine, between its samples.

Between measured tokens and heads the logarithm of the time is linear in theirs. Beyond the longest sample, and for more
heads than measured, time grows with the tokens and heads; below the shortest it stays, because fixed costs decide
there.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median

from ringprof.errors import UsageError
from ringprof.prediction.calibration import Calibration, KernelFigures, RecurrenceSample, Value
from ringprof.prediction.kernel_model import Estimate, OutsideCalibration
from ringprof.record.dryrun.schedule import RecurrenceOp

_MAX_OCTAVES = 2.0
"""Largest distance of tokens or heads from the samples, in powers of two."""
_HOST_OCTAVES = 3.0
_SPREAD, _SPREAD_PER_OCTAVE = 0.03, 0.1
"""Relative error assumed between samples, and what every power of two beyond them adds."""
_Curve = Mapping[int, Sequence[RecurrenceSample]]
"""Samples of one part by its heads, each list in the order of tokens."""


class RecurrenceCurves:
    """Samples of one kernel of linear recurrences, by operator, part, head sizes, and states that enter and leave."""

    def __init__(self, calibration: Calibration, kernel: str) -> None:
        """Sort the samples. Raises `UsageError` if the machine has none of this kernel."""
        samples = [sample for sample in calibration.recurrences if sample.kernel == kernel]
        if not samples:
            known = sorted({sample.kernel for sample in calibration.recurrences})
            raise UsageError(
                f"machine {calibration.name!r} has no curves of recurrences with kernel {kernel!r}: it has"
                f" {', '.join(known) or 'none'} (ringprof calibrate --parts recurrences)"
            )
        unknown = Value(0.0, 0.5, "assumed", "a kernel of many short blocks")
        self.kernel = KernelFigures(
            name=kernel, fills_device=False, tail=unknown, lead=unknown, samples=[], throttling=unknown
        )
        """Figures that the simulator reads: blocks neither fill the device nor heat it beyond the samples."""
        self._machine = calibration.name
        self._curves: dict[tuple[object, ...], dict[int, list[RecurrenceSample]]] = defaultdict(dict)
        for sample in sorted(samples, key=lambda sample: sample.tokens):
            self._curves[_key(sample)].setdefault(sample.batch * sample.heads, []).append(sample)

    def estimate(self, op: RecurrenceOp) -> Estimate:
        """Estimate the device's time of one part. Raises `OutsideCalibration` if it is too far from all samples."""
        curve = self._curve(op)
        beyond = _octaves_outside(op.tokens, [sample.tokens for row in curve.values() for sample in row])
        beyond += _octaves_outside(op.batch * op.heads, list(curve))
        if beyond > _MAX_OCTAVES:
            heads = " and ".join(str(count) for count in sorted(curve))
            tokens = sorted({sample.tokens for row in curve.values() for sample in row})
            raise OutsideCalibration(
                f"{op.tokens} tokens of {op.batch * op.heads} heads on a rank are too far from what machine"
                f" {self._machine!r} was measured with: {tokens[0]} to {tokens[-1]} tokens, {heads} heads"
            )
        noise = max(sample.spread for row in curve.values() for sample in row)
        spread = math.hypot(_SPREAD, min(noise, _SPREAD_PER_OCTAVE)) + _SPREAD_PER_OCTAVE * beyond
        by_heads = {
            heads: _interpolate(op.tokens, {sample.tokens: sample.ns for sample in row}) for heads, row in curve.items()
        }
        return Estimate(_interpolate(op.batch * op.heads, by_heads), spread)

    def host_us(self, op: RecurrenceOp) -> float:
        """Return the microseconds until the calls of a part return. Raises like `estimate`.

        They hardly depend on tokens and heads, and differ by half from one measurement to the next: the median of all
        samples of up to `_HOST_OCTAVES` more or fewer tokens.
        """
        every = [sample for row in self._curve(op).values() for sample in row]
        near = [sample for sample in every if abs(math.log2(sample.tokens / op.tokens)) <= _HOST_OCTAVES]
        return median(sample.host_us for sample in near or every)

    def samples(self, phase: str, operator: str) -> list[RecurrenceSample]:
        """Return the samples of a phase of one operator."""
        rows = (row for curve in self._curves.values() for row in curve.values())
        return [sample for row in rows for sample in row if (sample.phase, sample.operator) == (phase, operator)]

    def _curve(self, op: RecurrenceOp) -> _Curve:
        curve = self._curves.get(_key(op))
        if curve is None:
            operators = sorted({str(key[0]) for key in self._curves})
            sizes = sorted({f"{key[3]} and {key[4]}" for key in self._curves if key[0] == op.operator})
            known = f"heads of {', '.join(sizes)}" if sizes else f"curves of {', '.join(operators)} alone"
            raise OutsideCalibration(
                f"machine {self._machine!r} has no curve of {op.operator} with keys of {op.head_dim} and values of"
                f" {op.v_head_dim}: it has {known} (ringprof calibrate --parts recurrences)"
            )
        return curve


def _key(shape: RecurrenceOp | RecurrenceSample) -> tuple[object, ...]:
    return (
        shape.operator, shape.phase, shape.part, shape.head_dim, shape.v_head_dim, shape.receives, shape.sends
    )  # fmt: skip


def _interpolate(size: int, values: Mapping[int, float]) -> float:
    """Interpolate between logarithms. Below all sizes the value stays, above it grows with the size."""
    sizes = sorted(values)
    if size <= sizes[0]:
        return values[sizes[0]]
    if size >= sizes[-1]:
        return values[sizes[-1]] * size / sizes[-1]
    above = next(known for known in sizes if known >= size)
    below = max(known for known in sizes if known < size)
    weight = math.log(size / below) / math.log(above / below)
    return math.exp((1 - weight) * math.log(values[below]) + weight * math.log(values[above]))


def _octaves_outside(size: int, known: Sequence[int]) -> float:
    return max(0.0, math.log2(min(known) / size), math.log2(size / max(known)))


_CACHE: deque[tuple[Calibration, str, RecurrenceCurves]] = deque(maxlen=4)


def recurrence_curves_of(calibration: Calibration, kernel: str) -> RecurrenceCurves:
    """Return the curves of a kernel of recurrences, cached for later queries. Raises `UsageError` if there are none."""
    for machine, name, curves in _CACHE:
        if machine is calibration and name == kernel:
            return curves
    curves = RecurrenceCurves(calibration, kernel)
    _CACHE.append((calibration, kernel, curves))
    return curves
