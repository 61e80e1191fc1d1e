"""Kernel time model: a roofline form with few parameters, plus a Gaussian process over the samples' residuals.

A flash kernel processes tiles of 128 rows. Each tile costs its length and a fixed part; the multiprocessors take the
tiles in waves. With R the plateau's rate, κ a tile's fixed cost in columns, W the efficiency of the waves and c the
fixed time of a call:

    t = c + FLOPs per pair · heads · (pairs + κ · rows) / (R · W)

Rows are queries in the forward pass and keys in the backward pass, because that is how the kernels proceed. Both
lengths are rounded up to whole tiles. The residual of the logarithm is smooth in the logarithms of the sizes. The
Gaussian process carries it from the samples to their neighbours and says how certain the result is. (Rasmussen and
Williams, Gaussian Processes for Machine Learning, algorithm 2.1.)
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

from ringprof.dryrun.schedule import AttentionOp
from ringprof.errors import UsageError
from ringprof.prediction.calibration import KernelSample

Floats = npt.NDArray[np.float64]

_TILE = 128
SHAPE = ("phase", "batch", "q", "kv", "heads", "kv_heads", "head_dim", "causal", "pairs", "sequences")
"""Fields that a block and a sample share."""
MAX_OCTAVES_ABOVE, MAX_OCTAVES_BELOW = 6.0, 2.0
"""Largest distance in one size, in powers of two, of a block above and below its nearest sample."""
EXTRAPOLATED_SPREAD = 1.2
"""Relative error assumed for mask pieces shorter than any sample, whose time the form alone gives.

61376 queries of 64 keys took 0.39 ms forward and 4.9 ms backward on an H200; the form says 0.99 ms and 1.53 ms.
"""
_CALL_NS_GRID = (0.0, 2e3, 5e3, 1e4, 2e4, 4e4)
_KAPPA_GRID = (0.0, 64.0, 128.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 1536.0)
_TYPICAL_KAPPA, _TYPICAL_CALL_NS = 256.0, 1e4
_FORM_ERROR = 0.03
"""Typical distance of the form from samples, in the logarithm."""
_AMPLITUDE_GRID, _LENGTH_SCALE_GRID = (0.02, 0.04, 0.08, 0.16, 0.32), (1.0, 2.0, 4.0)
_MASK_DISTANCE = 1.5
"""Distance between causal and full blocks of one size, in octaves."""


@dataclass(frozen=True)
class Estimate:
    """A predicted time; ``spread`` is its standard deviation as a fraction of the time."""

    ns: float
    spread: float
    extrapolated: bool = False
    """Whether the block is a piece of a mask shorter than all samples, so that the form alone gives the time."""


def block_of(
    phase: str, q: int, kv: int, heads: int, kv_heads: int, head_dim: int = 128, *, causal: bool
) -> AttentionOp:  # fmt: skip
    """Return a block of one batch entry."""
    return AttentionOp(
        label="", phase=phase, batch=1, q=q, kv=kv, heads=heads, kv_heads=kv_heads, head_dim=head_dim, causal=causal  # type: ignore[arg-type]
    )  # fmt: skip


class OutsideCalibration(UsageError):
    """The calibration does not cover the requested block."""


class Curve:
    """Times of one kernel in one phase with heads of one size, on one device at its operating temperature."""

    def __init__(
        self,
        name: str,
        samples: Sequence[KernelSample],
        multiprocessors: int,
        cool_speedup: Callable[[KernelSample], float],
        *,
        pieces: bool = False,
    ) -> None:
        """Fit the samples; ``cool_speedup`` is how much faster than on a hot device a sample ran.

        With ``pieces``, blocks may be pieces of a mask, of which short ones are extrapolated instead of refused.

        Raises `OutsideCalibration` without samples.
        """
        if not samples:
            raise OutsideCalibration(f"kernel {name!r}: nothing measured of this phase")
        self.name, self._pieces = name, pieces
        self._samples, self._multiprocessors = list(samples), multiprocessors
        self._blocks = [AttentionOp(label="", **{name: getattr(sample, name) for name in SHAPE}) for sample in samples]
        self._log_ns = np.log([sample.ns * cool_speedup(sample) for sample in samples])
        self._noise = np.array([max(0.01, sample.spread) for sample in samples])
        self._coordinates = np.array([_coordinates(block) for block in self._blocks])

    def estimate(self, block: AttentionOp) -> Estimate:
        """Estimate the time of a block. Raises `OutsideCalibration` if it is too far from all samples."""
        point = np.array(_coordinates(block))
        if self._is_extrapolated(block, point):
            return Estimate(float(np.exp(self._form(block))), EXTRAPOLATED_SPREAD, extrapolated=True)
        amplitude, length_scale, weights, inverse = self._process
        covariances = _covariance(point[None], self._coordinates, amplitude, length_scale)[0]
        # Longer blocks stay at the plateau of the longest samples, whose distance from the form they keep.
        on_plateau = np.minimum(point, [*self._coordinates[:, :2].max(axis=0), *point[2:]])
        with _one_thread():
            residual = float(_covariance(on_plateau[None], self._coordinates, amplitude, length_scale)[0] @ weights)
            variance = amplitude**2 - float(covariances @ inverse @ covariances)
            # The same estimate with uncertain parameters of the form: see `_uncertain_form_process`.
            sensitivity = self._form_sensitivities([block])[0]
            sample_sensitivities, uncertain_weights, uncertain_inverse = self._uncertain_form_process
            covariances = covariances + sample_sensitivities @ sensitivity
            uncertain_variance = (
                amplitude**2 + float(sensitivity @ sensitivity) - float(covariances @ uncertain_inverse @ covariances)
            )
            difference = float(covariances @ uncertain_weights) - residual
        spread = float(np.sqrt(max(variance, uncertain_variance, 0.0) + difference**2 + 0.005**2))
        return Estimate(float(np.exp(self._form(block) + residual)), spread)

    def _is_extrapolated(self, block: AttentionOp, point: Floats) -> bool:
        """Return whether a piece of a mask is shorter than the samples cover.

        Raises `OutsideCalibration` where the form does not apply either.
        """
        distance = point[:2] - self._coordinates[:, :2]
        # Longer blocks stay at the plateau. Shorter ones leave it at an unknown length.
        too_short = bool(
            (np.maximum(distance / MAX_OCTAVES_ABOVE, -distance / MAX_OCTAVES_BELOW).max(axis=1) > 1).all()
        )
        if too_short and (
            (block.pairs is None and not self._pieces) or (distance.max(axis=1) > MAX_OCTAVES_ABOVE).all()
        ):
            q, kv = [sample.q for sample in self._blocks], [sample.kv for sample in self._blocks]
            raise OutsideCalibration(
                f"kernel {self.name!r}: a block of {block.q} x {block.kv} tokens is too unlike those that are"
                f" calibrated, {min(q)} to {max(q)} queries by {min(kv)} to {max(kv)} keys"
            )
        return too_short

    # --- the form ---------------------------------------------------------------------------------

    def _form(self, block: AttentionOp) -> float:
        """Return the logarithm of the form's nanoseconds."""
        call_ns, kappa, log_rate = self._parameters
        return float(np.log(call_ns + np.exp(_log_work(block, kappa, self._multiprocessors) - log_rate)))

    @cached_property
    def _parameters(self) -> tuple[float, float, float]:
        """Fit the roofline form by grid search: (nanoseconds per call, κ, log of FLOPs per nanosecond).

        Few samples that are all large leave the first two undetermined; a prior then holds them to their typical
        values.
        """
        best: tuple[float, tuple[float, float, float]] | None = None
        log_work_by_kappa = {
            kappa: np.array([_log_work(block, kappa, self._multiprocessors) for block in self._blocks])
            for kappa in _KAPPA_GRID
        }
        for call_ns, kappa in product(_CALL_NS_GRID, _KAPPA_GRID):
            log_work = log_work_by_kappa[kappa]
            log_scaled_ns = np.log(np.maximum(np.exp(self._log_ns) - call_ns, 0.02 * np.exp(self._log_ns)))
            log_rate = float(np.median(log_work - log_scaled_ns))
            errors = np.log(call_ns + np.exp(log_work - log_rate)) - self._log_ns
            prior = ((kappa - _TYPICAL_KAPPA) / _TYPICAL_KAPPA) ** 2 + (
                (call_ns - _TYPICAL_CALL_NS) / _TYPICAL_CALL_NS
            ) ** 2
            cost = float(np.mean(errors**2)) / _FORM_ERROR**2 + prior
            if best is None or cost < best[0]:
                best = cost, (call_ns, kappa, log_rate)
        assert best is not None
        return best[1]

    def _form_sensitivities(self, blocks: Sequence[AttentionOp]) -> Floats:
        """Return the change of the form's logarithm for typical errors of its parameters, shape (blocks, 2).

        The columns are for the fixed time of a call and for κ. Samples of long blocks leave both uncertain, and they
        make up the time of short blocks.
        """
        call_ns, kappa, _ = self._parameters
        sensitivities = []
        for block in blocks:
            per_ns = float(np.exp(-self._form(block)))
            log_work_per_column = _log_work(block, kappa + 1, self._multiprocessors) - _log_work(
                block, kappa, self._multiprocessors
            )
            sensitivities.append(
                (_TYPICAL_CALL_NS * per_ns, _TYPICAL_KAPPA * (1 - call_ns * per_ns) * log_work_per_column)
            )
        return np.array(sensitivities)

    @cached_property
    def _uncertain_form_process(self) -> tuple[Floats, Floats, Floats]:
        """Fit the process of `_process` with uncertain parameters of the form.

        Returns the samples' sensitivities, the inverse times the residuals, and the inverse. Estimated times do not use
        this process, because it predicts the samples of recorded runs less well. Its distance from an estimated time
        counts as spread.
        """
        sensitivities = self._form_sensitivities(self._blocks)
        amplitude, length_scale, _, _ = self._process
        residuals = self._log_ns - np.array([self._form(block) for block in self._blocks])
        covariance = self._sample_covariance(amplitude, length_scale)
        with _one_thread():
            inverse = np.linalg.inv(covariance + sensitivities @ sensitivities.T).astype(np.float64)
            return sensitivities, inverse @ residuals, inverse

    # --- residuals ------------------------------------------------------------------------------

    def _sample_covariance(self, amplitude: float, length_scale: float) -> Floats:
        return _covariance(self._coordinates, self._coordinates, amplitude, length_scale) + np.diag(self._noise**2)

    @cached_property
    def _process(self) -> tuple[float, float, Floats, Floats]:
        """Fit the Gaussian process by grid search: (amplitude, length scale, inverse times residuals, inverse)."""
        residuals = self._log_ns - np.array([self._form(block) for block in self._blocks])
        best: tuple[float, tuple[float, float, Floats, Floats]] | None = None
        for amplitude, length_scale in product(_AMPLITUDE_GRID, _LENGTH_SCALE_GRID):
            covariance = self._sample_covariance(amplitude, length_scale)
            with _one_thread():
                lower = np.linalg.cholesky(covariance)
                whitened = np.linalg.solve(lower, residuals)
                likelihood = -0.5 * float(whitened @ whitened) - float(np.log(np.diag(lower)).sum())
                if best is None or likelihood > best[0]:
                    inverse = np.linalg.inv(covariance).astype(np.float64)
                    best = likelihood, (amplitude, length_scale, inverse @ residuals, inverse)
        assert best is not None
        return best[1]


def _one_thread() -> AbstractContextManager[object]:
    """Limit BLAS to one thread: small matrices gain nothing from more, and lose a hundredfold on busy CPUs."""
    limit: AbstractContextManager[object] = _libraries().limit(limits=1, user_api="blas")
    return limit


_libraries = cache(ThreadpoolController)


def _covariance(a: Floats, b: Floats, amplitude: float, length_scale: float) -> Floats:
    """Return the covariance matrix of two sets of points under a squared-exponential kernel."""
    squared_distances = ((a[:, None] - b[None]) ** 2).sum(-1)
    result: Floats = amplitude**2 * np.exp(-0.5 * squared_distances / length_scale**2)
    return result


def _coordinates(block: AttentionOp) -> tuple[float, ...]:
    """Return a block's point in sample space: octaves of its sizes. Heads count less than lengths.

    Under a mask of documents or windows, the mean number of keys that a query sees replaces the number of keys.
    """
    masked = block.pairs is not None
    return (
        float(np.log2(block.q)),
        float(np.log2(block.kv if block.pairs is None else block.pairs / block.q)),
        0.5 * float(np.log2(block.heads * (1 if masked else block.batch))),
        0.5 * float(np.log2(block.heads / block.kv_heads)),
        0.5 * float(np.log2(block.sequences)) if masked else _MASK_DISTANCE * block.causal,
    )


def _log_work(block: AttentionOp, kappa: float, multiprocessors: int) -> float:
    """Return the logarithm of FLOPs, including the tiles' fixed cost and the idle part of waves."""
    # A kernel computes a partial tile in full. A mask's pieces keep their sizes: `pairs` counts them.
    if block.pairs is None:
        block = msgspec.structs.replace(block, q=-(-block.q // _TILE) * _TILE, kv=-(-block.kv // _TILE) * _TILE)
    rows = block.q if block.phase == "forward" else block.kv
    per_pair = (4 if block.phase == "forward" else 10) * block.batch * block.heads * block.head_dim
    # On average the last tile of every packed sequence is half full.
    tiles = block.batch * block.heads * (-(-rows // _TILE) + block.sequences // 2)
    # Causal tiles have all lengths. Longest first, they fill the multiprocessors up to half a tile.
    if block.causal or block.pairs is not None:
        waves = tiles / (tiles + 0.5 * multiprocessors)
    else:
        waves = tiles / (multiprocessors * -(-tiles // multiprocessors))
    return float(np.log((block.flops() + per_pair * kappa * rows) / waves))
