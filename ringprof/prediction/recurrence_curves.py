"""Times of a recurrence's kernel on one machine, between its samples.

Between measured tokens and heads the logarithm of the time is linear in theirs. Beyond the longest sample, and for more
heads than measured, time grows with the tokens and heads; below the shortest it stays, because fixed costs decide
there.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import msgspec

from ringprof.dryrun.schedule import RecurrenceOp
from ringprof.errors import UsageError
from ringprof.prediction.calibration import Calibration, RecurrenceCurve, RecurrencePoint, unmeasured_kernel
from ringprof.prediction.kernel_model import Estimate, OutsideCalibration

_MAX_OCTAVES = 2.0
"""Largest distance of tokens or heads from the samples, in powers of two."""
_HOST_OCTAVES = 3.0
RECURRENCE_PASS_US = 450.0
"""Host time of a forward or a backward pass beside its parts and torch's calls: the parts are measured in a loop, whose
code stays in the processor's caches. Fitted to nine timed shapes of 12,288 tokens on H200 that the host decides."""
_SPREAD, _SPREAD_PER_OCTAVE = 0.08, 0.1
"""Relative error between samples, by timed shapes on 2 H200, and what every power of two beyond the samples adds."""
_ByHeads = Mapping[int, RecurrenceCurve]
"""Curves of one part by its heads."""


class RecurrenceCurves:
    """Curves of one kernel of linear recurrences, by operator, part, head sizes, and states that enter and leave."""

    def __init__(self, calibration: Calibration, kernel: str) -> None:
        """Sort the curves. Raises `UsageError` if the machine has none of this kernel."""
        curves = [curve for curve in calibration.recurrences if curve.kernel == kernel]
        if not curves:
            known = sorted({curve.kernel for curve in calibration.recurrences})
            raise UsageError(
                f"machine {calibration.name!r} has no curves of recurrences with kernel {kernel!r}: it has"
                f" {', '.join(known) or 'none'} (ringprof calibrate --parts recurrences)"
            )
        figures = unmeasured_kernel(kernel)
        self.kernel = msgspec.structs.replace(figures, throttling=figures.tail)
        """Figures that the simulator reads: blocks neither fill the device nor heat it beyond the samples."""
        self._machine = calibration.name
        self._curves: dict[tuple[object, ...], dict[int, RecurrenceCurve]] = defaultdict(dict)
        for curve in curves:
            self._curves[_key(curve)][curve.heads] = curve

    def estimate(self, op: RecurrenceOp) -> Estimate:
        """Estimate the nanoseconds of one part on the device, and their relative spread.

        Raises `OutsideCalibration` for a shape that is too far from all samples.
        """
        by_heads, heads = self._by_heads(op), op.batch * op.heads
        points = _points(by_heads)
        tokens = [point.tokens for point in points]
        beyond = _octaves_outside(op.tokens, tokens) + _octaves_outside(heads, list(by_heads))
        if beyond > _MAX_OCTAVES:
            raise OutsideCalibration(
                f"{op.tokens} tokens of {heads} heads on a rank are too far from what machine {self._machine!r} was"
                f" measured with: {min(tokens)} to {max(tokens)} tokens, {min(by_heads)} to {max(by_heads)} heads"
            )
        noise = max(point.spread for point in points)
        spread = math.hypot(_SPREAD, min(noise, _SPREAD_PER_OCTAVE)) + _SPREAD_PER_OCTAVE * beyond
        times_ns = {
            count: _interpolate(op.tokens, {point.tokens: point.ns for point in curve.points})
            for count, curve in by_heads.items()
        }
        return Estimate(_interpolate(heads, times_ns), spread)

    def host_us(self, op: RecurrenceOp) -> float:
        """Return the host's microseconds until the calls of a part return. Raises like `estimate`.

        This is the median of all samples within `_HOST_OCTAVES` octaves of the tokens: host times hardly depend on
        tokens and heads, and differ by half from one measurement to the next.
        """
        every = _points(self._by_heads(op))
        near = [point for point in every if abs(math.log2(point.tokens / op.tokens)) <= _HOST_OCTAVES]
        return median(point.host_us for point in near or every)

    def curves(self, phase: str, operator: str) -> list[RecurrenceCurve]:
        """Return the curves of a phase of one operator."""
        every = (curve for by_heads in self._curves.values() for curve in by_heads.values())
        return [curve for curve in every if (curve.phase, curve.operator) == (phase, operator)]

    def _by_heads(self, op: RecurrenceOp) -> _ByHeads:
        by_heads = self._curves.get(_key(op))
        if by_heads is None:
            operators = sorted({str(key[0]) for key in self._curves})
            sizes = sorted({f"{key[3]} and {key[4]}" for key in self._curves if key[0] == op.operator})
            known = f"heads of {', '.join(sizes)}" if sizes else f"curves of {', '.join(operators)} alone"
            raise OutsideCalibration(
                f"machine {self._machine!r} has no curve of {op.operator} with keys of {op.head_dim} and values of"
                f" {op.v_head_dim}: it has {known} (ringprof calibrate --parts recurrences)"
            )
        return by_heads


def _points(by_heads: _ByHeads) -> list[RecurrencePoint]:
    return [point for curve in by_heads.values() for point in curve.points]


def _key(shape: RecurrenceOp | RecurrenceCurve) -> tuple[object, ...]:
    return (
        shape.operator, shape.phase, shape.part, shape.head_dim, shape.v_head_dim, shape.receives, shape.sends
    )  # fmt: skip


def _interpolate(size: int, values: Mapping[int, float]) -> float:
    """Interpolate ``values`` by size, between logarithms. Below all sizes the value stays, above it grows."""
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


_Curves = TypeVar("_Curves")
_CACHE: deque[tuple[object, Calibration, object, Any]] = deque(maxlen=8)


def cached(create: Callable[..., _Curves], calibration: Calibration, *options: object) -> _Curves:
    """Return ``create(calibration, *options)``, kept for later queries: fitting curves takes a tenth of a second."""
    for creator, machine, known, curves in _CACHE:
        if machine is calibration and (creator, known) == (create, options):
            return curves  # type: ignore[no-any-return]
    curves = create(calibration, *options)
    _CACHE.append((create, calibration, options, curves))
    return curves


def recurrence_curves_of(calibration: Calibration, kernel: str) -> RecurrenceCurves:
    """Return the curves of a kernel of recurrences, cached for later queries. Raises `UsageError` if there are none."""
    return cached(RecurrenceCurves, calibration, kernel)
