"""How long a block takes on a device: a form with few parameters, and what the samples show beside it.

A flash kernel walks through tiles of 128 rows. Each costs its length and a fixed part; the multiprocessors take them in
waves. With R the plateau's rate, κ a tile's fixed cost in columns, W waves' efficiency and c calls' fixed time:

    t = c + FLOPs a pair · heads · (pairs + κ · rows) / (R · W)

rows are queries forward and keys backward, as the kernels go; both are rounded up to whole tiles. What is left in the
logarithm is smooth in the logarithms of the sizes; a Gaussian process carries it from the samples to their neighbours
and says how sure that is.
(Rasmussen and Williams, Gaussian Processes for Machine Learning, algorithm 2.1.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from ringprof.errors import UsageError
from ringprof.prediction.calibration import KernelSample
from ringprof.record.dryrun.schedule import AttentionOp

Floats = npt.NDArray[np.float64]

_TILE = 128
MOST_LONGER, MOST_SHORTER = 6.0, 2.0
"""How far in one size, as a power of two, a block may lie from the nearest sample."""
SHORT_SPREAD = 1.2
"""Of a shorter part of a mask by the form alone: 61376 queries of 64 keys took 0.39 ms forward and 4.9 backward on an
H200, where it says 0.99 and 1.53."""
_CALLS_NS = (0.0, 2e3, 5e3, 1e4, 2e4, 4e4)
_KAPPAS = (0.0, 64.0, 128.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 1536.0)
_USUAL_KAPPA, _USUAL_CALL_NS = 256.0, 1e4
_FORM_OFF = 0.03
"""How far the form usually is from samples, in the logarithm."""
_AMPLITUDES, _LENGTHS = (0.02, 0.04, 0.08, 0.16, 0.32), (1.0, 2.0, 4.0)
_OF_MASK = 1.5
"""How far causal and full blocks of one size lie apart, in octaves."""


@dataclass(frozen=True)
class Estimate:
    """A time and how sure it is: ``spread`` is a standard deviation, as a part of the time."""

    ns: float
    spread: float
    by_form: bool = False
    """Of a part of a mask that is shorter than all samples."""


class OutsideCalibration(UsageError):
    """Asked for what the calibration does not cover."""


class Curve:
    """The times of one kernel in one phase, with heads of one size, on one device, hot."""

    def __init__(
        self, name: str, samples: Sequence[KernelSample], multiprocessors: int, cooler: Callable[[KernelSample], float]
    ) -> None:
        """``cooler`` is how many times as fast as on a hot device a sample was. Raises `OutsideCalibration` without."""
        if not samples:
            raise OutsideCalibration(f"kernel {name!r}: nothing measured of this phase")
        self.name = name
        self._samples, self._units = list(samples), multiprocessors
        self._blocks = [_block(sample) for sample in samples]
        self._log_ns = np.log([sample.ns * cooler(sample) for sample in samples])
        self._noise = np.array([max(0.01, sample.spread) for sample in samples])
        self._places = np.array([_place(block) for block in self._blocks])

    def at(self, block: AttentionOp) -> Estimate:
        """Raises `OutsideCalibration` where the block is too unlike all samples."""
        place = np.array(_place(block))
        if self._short(block, place):
            return Estimate(float(np.exp(self._form(block))), SHORT_SPREAD, by_form=True)
        amplitude, length, solved, inverse = self._process
        likeness = _likeness(place[None], self._places, amplitude, length)[0]
        with _one_thread():
            left = float(likeness @ solved)
            variance = amplitude**2 - float(likeness @ inverse @ likeness)
            slopes, (known, uncertain_solved, uncertain_inverse) = self._slopes([block])[0], self._uncertain_form
            likeness = likeness + known @ slopes
            uncertain = amplitude**2 + float(slopes @ slopes) - float(likeness @ uncertain_inverse @ likeness)
            apart = float(likeness @ uncertain_solved) - left
        spread = float(np.sqrt(max(variance, uncertain, 0.0) + apart**2 + 0.005**2))
        return Estimate(float(np.exp(self._form(block) + left)), spread)

    def _short(self, block: AttentionOp, place: Floats) -> bool:
        """Whether it is a part of a mask that is too short for all samples. Raises where the form says nothing."""
        beyond = place[:2] - self._places[:, :2]
        # Longer blocks go on at the plateau; shorter ones leave it, nobody knows how soon.
        short = bool((np.maximum(beyond / MOST_LONGER, -beyond / MOST_SHORTER).max(axis=1) > 1).all())
        if short and (block.pairs is None or (beyond.max(axis=1) > MOST_LONGER).all()):
            raise OutsideCalibration(
                f"kernel {self.name!r}: a block of {block.q} x {block.kv} tokens is too unlike those that are"
                f" calibrated, {_extent(self._blocks)}"
            )
        return short

    # --- the form ---------------------------------------------------------------------------------

    def _form(self, block: AttentionOp) -> float:
        """Logarithm of the form's nanoseconds."""
        call_ns, kappa, log_rate = self._parameters
        return float(np.log(call_ns + np.exp(_log_work(block, kappa, self._units) - log_rate)))

    @cached_property
    def _parameters(self) -> tuple[float, float, float]:
        """Of the form: nanoseconds a call, κ, and the logarithm of FLOPs a nanosecond; the likeliest of a grid.

        Few samples, all of them large, leave the first two open: then they are what they usually are.
        """
        best: tuple[float, tuple[float, float, float]] | None = None
        works = {kappa: np.array([_log_work(one, kappa, self._units) for one in self._blocks]) for kappa in _KAPPAS}
        for call_ns, kappa in product(_CALLS_NS, _KAPPAS):
            work = works[kappa]
            beyond = np.log(np.maximum(np.exp(self._log_ns) - call_ns, 0.02 * np.exp(self._log_ns)))
            log_rate = float(np.median(work - beyond))
            off = np.log(call_ns + np.exp(work - log_rate)) - self._log_ns
            usual = ((kappa - _USUAL_KAPPA) / _USUAL_KAPPA) ** 2 + ((call_ns - _USUAL_CALL_NS) / _USUAL_CALL_NS) ** 2
            cost = float(np.mean(off**2)) / _FORM_OFF**2 + usual
            if best is None or cost < best[0]:
                best = cost, (call_ns, kappa, log_rate)
        assert best is not None
        return best[1]

    def _slopes(self, blocks: Sequence[AttentionOp]) -> Floats:
        """Return how far the form's logarithm moves, by block, where a call's fixed time and κ are as far off as usual.

        Samples of long blocks leave both uncertain, and short blocks consist of them.
        """
        call_ns, kappa, _ = self._parameters
        slopes = []
        for block in blocks:
            in_call = float(np.exp(-self._form(block)))
            work = _log_work(block, kappa + 1, self._units) - _log_work(block, kappa, self._units)
            slopes.append((_USUAL_CALL_NS * in_call, _USUAL_KAPPA * (1 - call_ns * in_call) * work))
        return np.array(slopes)

    @cached_property
    def _uncertain_form(self) -> tuple[Floats, Floats, Floats]:
        """Repeat `_process` with the form's parameters uncertain: the samples' slopes, what it solves, the inverse.

        Estimates do not use it: on samples of recorded runs it foresees worse. How far it lies from them counts as
        spread.
        """
        slopes = self._slopes(self._blocks)
        amplitude, length, _, _ = self._process
        left = self._log_ns - np.array([self._form(block) for block in self._blocks])
        covariance = _likeness(self._places, self._places, amplitude, length) + np.diag(self._noise**2)
        with _one_thread():
            inverse = np.linalg.inv(covariance + slopes @ slopes.T).astype(np.float64)
            return slopes, inverse @ left, inverse

    # --- what is left ------------------------------------------------------------------------------

    @cached_property
    def _process(self) -> tuple[float, float, Floats, Floats]:
        """Amplitude, length, the inverse applied to what the form leaves, and the inverse; the likeliest of a grid."""
        left = self._log_ns - np.array([self._form(block) for block in self._blocks])
        best: tuple[float, tuple[float, float, Floats, Floats]] | None = None
        for amplitude, length in product(_AMPLITUDES, _LENGTHS):
            covariance = _likeness(self._places, self._places, amplitude, length) + np.diag(self._noise**2)
            with _one_thread():
                lower = np.linalg.cholesky(covariance)
                half = np.linalg.solve(lower, left)
                likelihood = -0.5 * float(half @ half) - float(np.log(np.diag(lower)).sum())
                if best is None or likelihood > best[0]:
                    inverse = np.linalg.inv(covariance).astype(np.float64)
                    best = likelihood, (amplitude, length, inverse @ left, inverse)
        assert best is not None
        return best[1]


def _one_thread() -> AbstractContextManager[object]:
    """Matrices this small gain nothing from a thread a CPU, and lose a hundredfold where other processes are busy."""
    limit: AbstractContextManager[object] = _libraries().limit(limits=1, user_api="blas")
    return limit


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def _likeness(a: Floats, b: Floats, amplitude: float, length: float) -> Floats:
    squares = ((a[:, None] - b[None]) ** 2).sum(-1)
    result: Floats = amplitude**2 * np.exp(-0.5 * squares / length**2)
    return result


def _place(block: AttentionOp) -> tuple[float, ...]:
    """Where a block lies among others: octaves of its sizes. Heads count less than lengths.

    Under a mask of documents or windows the keys that a query sees, in the mean, stand for those that there are.
    """
    if block.pairs is not None:
        return (
            float(np.log2(block.q)),
            float(np.log2(block.pairs / block.q)),
            0.5 * float(np.log2(block.heads)),
            0.5 * float(np.log2(block.heads / block.kv_heads)),
            0.5 * float(np.log2(block.sequences)),
        )
    return (
        float(np.log2(block.q)),
        float(np.log2(block.kv)),
        0.5 * float(np.log2(block.heads * block.batch)),
        0.5 * float(np.log2(block.heads / block.kv_heads)),
        _OF_MASK * block.causal,
    )


def _log_work(block: AttentionOp, kappa: float, units: int) -> float:
    """Logarithm of FLOPs, a tile's fixed cost and what waves leave empty included."""
    block = _in_whole_tiles(block)
    rows = block.q if block.phase == "forward" else block.kv
    per_pair = (4 if block.phase == "forward" else 10) * block.batch * block.heads * block.head_dim
    # Of every sequence of a pack the last tile is half full, in the mean.
    tiles = block.batch * block.heads * (-(-rows // _TILE) + block.sequences // 2)
    # Causal tiles are of all lengths: the long ones first, they fill up with half a tile to spare.
    uneven = block.causal or block.pairs is not None
    waves = tiles / (tiles + 0.5 * units) if uneven else tiles / (units * -(-tiles // units))
    return float(np.log((block.flops() + per_pair * kappa * rows) / waves))


def _in_whole_tiles(block: AttentionOp) -> AttentionOp:
    """Round queries and keys up to whole tiles: a kernel computes a partial tile in full.

    Leave a mask's parts as they are: ``pairs`` counts them, and `_log_work` adds their partial tiles.
    """
    if block.pairs is not None:
        return block
    return msgspec.structs.replace(block, q=-(-block.q // _TILE) * _TILE, kv=-(-block.kv // _TILE) * _TILE)


def _extent(blocks: Sequence[AttentionOp]) -> str:
    q, kv = sorted(block.q for block in blocks), sorted(block.kv for block in blocks)
    return f"{q[0]} to {q[-1]} queries by {kv[0]} to {kv[-1]} keys"


def _block(sample: KernelSample) -> AttentionOp:
    return AttentionOp(
        label="", phase=sample.phase, batch=sample.batch, q=sample.q, kv=sample.kv, heads=sample.heads,
        kv_heads=sample.kv_heads, head_dim=sample.head_dim, causal=sample.causal, pairs=sample.pairs,
        sequences=sample.sequences,
    )  # fmt: skip
