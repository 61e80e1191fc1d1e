"""A machine for `ringprof.prediction.simulator.simulate`: a calibration, a cluster and one random draw of the
uncertainties."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Literal

import msgspec

from ringprof.dryrun.schedule import AttentionOp, ComputeOp, MemoryOp, Program
from ringprof.kernel_rates import KernelRate
from ringprof.prediction.calibration import Calibration, KernelFigures, Value
from ringprof.prediction.host_model import host_ns
from ringprof.prediction.kernel_model import SHAPE, Curve, Estimate, OutsideCalibration, block_of
from ringprof.prediction.network import Links
from ringprof.prediction.recurrence_curves import RecurrenceCurves, cached
from ringprof.prediction.simulator import BlockTime

GATHER_RATE, SCATTER_RATE, FILL_RATE = 0.86, 0.35, 0.75
"""Rates of torch's ``gather`` and ``scatter_`` of whole rows and of ``zeros``, relative to a copy's.

Measured on two H200 of two hosts by dev/benchmarks/packed_calls.py, bf16 rows of 8 and 64 heads, 67 MB and more: 3,490
to 3,730, 1,400 to 1,470 and 3,120 to 3,310 of 4,176 GB/s. Tensors of 17 MB are slower, copies (2,910 to 3,040) too."""
VARLEN_FORWARD = 1.045
"""Time of flash-attn 3's forward call with ``cu_seqlens`` of one sequence, relative to the call without them.

The mean of twelve pairs on an H200, 64/8 heads of 4096 and 8192 tokens and 8/1 heads of 65536; backward it is 1.00.
Six pairs on another H200 have 0.99 to 1.07, 1.04 in the mean; backward 0.97 to 1.02, 1.00 in the mean."""
CACHE_ROWS = 64
"""Number of query rows below which reading keys and values bounds a call: a kernel computes a tile of as many rows in
less time."""
_MASKED_SOURCE = "32 forward and 31 backward calls of documents and windows: flash-attn on H200, flash-attn 3 on H100"
MASKED_OVER_PLAIN = {
    "forward": Value(1.24, 0.15, "assumed", _MASKED_SOURCE), "backward": Value(1.05, 0.15, "assumed", _MASKED_SOURCE)
}  # fmt: skip
"""Time of a call of documents or of a window, divided by that of a plain call with as many keys per query by the same
kernel; for kernels of which no such call was measured."""
JITTER = 0.01
"""Relative standard deviation of a block's time from one call to the next."""


_shape_of = attrgetter(*SHAPE)


class Curves:
    """Fitted curves of one kernel on one machine, with a cache of their estimates; see `Curve` for ``pieces``."""

    def __init__(self, calibration: Calibration, kernel: str, pieces: bool = False) -> None:  # noqa: FBT001, FBT002
        self.kernel: KernelFigures = calibration.kernel(kernel)
        self._calibration, self._pieces = calibration, pieces
        self._curves: dict[tuple[str, int], Curve] = {}
        self._estimates: dict[tuple[object, ...], Estimate] = {}

    def estimate(self, block: AttentionOp) -> Estimate:
        """Estimate a block's time on a hot device. Raises `OutsideCalibration`."""
        key = _shape_of(block)
        if key not in self._estimates:
            rate = self.kernel.cache_gb_s
            if rate is not None and reads_cache(block):
                # Reading its keys and values bounds the call.
                call = self._calibration.memory_op_us
                ns, call_ns = cache_bytes(block) / rate.value, 1e3 * call.value
                spread = math.hypot(ns * rate.spread, call_ns * call.spread) / (ns + call_ns)
                self._estimates[key] = Estimate(ns + call_ns, spread)
            elif block.pairs is not None and not self.has_masked(block.phase):
                plain = self._curve(block.phase, block.head_dim, masked=False).estimate(block)
                ratio = MASKED_OVER_PLAIN[block.phase]
                self._estimates[key] = replace(
                    plain, ns=plain.ns * ratio.value, spread=math.hypot(plain.spread, ratio.spread)
                )
            else:
                curve = self._curve(block.phase, block.head_dim, masked=block.pairs is not None)
                self._estimates[key] = curve.estimate(block)
        return self._estimates[key]

    def has_masked(self, phase: str) -> bool:
        """Return whether calls of documents and windows were measured."""
        return any(sample.phase == phase and sample.pairs is not None for sample in self.kernel.samples)

    def _curve(self, phase: str, head_dim: int, *, masked: bool) -> Curve:
        """Return the curve of a phase and head size; fit it on first use."""
        name = f"{self.kernel.name} {phase}{' of documents and windows' if masked else ''}"
        if (name, head_dim) not in self._curves:
            samples = [
                sample for sample in self.kernel.samples if (sample.phase, sample.pairs is not None) == (phase, masked)
            ]
            head_dims = sorted({sample.head_dim for sample in samples})
            if samples and head_dim not in head_dims:
                raise OutsideCalibration(f"kernel {name!r} is calibrated for head_dim {head_dims}, not {head_dim}")
            samples = [sample for sample in samples if sample.head_dim == head_dim]
            slowdown, kernel = self._calibration.slowdown, self.kernel
            self._curves[name, head_dim] = Curve(
                name, samples, self._calibration.multiprocessors,
                lambda sample: slowdown(kernel, 1.0, None) / slowdown(kernel, sample.utilisation, sample.busy_s),
                pieces=self._pieces,
            )  # fmt: skip
        return self._curves[name, head_dim]


def cache_bytes(block: AttentionOp) -> int:
    """Return the bytes of a call's keys and values, in a type of two bytes."""
    return 4 * block.batch * block.kv * block.kv_heads * block.head_dim


def reads_cache(block: AttentionOp) -> bool:
    """Return whether a call has so few queries that reading its keys and values bounds it."""
    return block.phase == "forward" and block.pairs is None and block.q < CACHE_ROWS


AnyCurves = Curves | RecurrenceCurves
"""Curves of an attention kernel, or of a recurrence's."""


def estimate(curves: AnyCurves, op: ComputeOp) -> Estimate:
    """Estimate the time of an operation of the kernel that the curves are of. Raises `OutsideCalibration`."""
    return curves.estimate(op)  # type: ignore[arg-type]


def curves_of(calibration: Calibration, kernel: str, *, pieces: bool = False) -> Curves:
    """Return the fitted curves of a kernel, cached for later queries. Raises `UsageError` if the file has none."""
    return cached(Curves, calibration, kernel, pieces)


class CalibratedMachine:
    """Times by a calibration. A rank with low utilisation stays cooler, so its blocks are faster
    (`Calibration.throttling`)."""

    def __init__(
        self, calibration: Calibration, links: Links, curves: AnyCurves,
        utilisation: Mapping[int, float] | None = None, busy_s: float | None = None, *, seed: int = 0,
        host_factor: float = 1.0, hops_first: bool = False, repacks: bool = False,
    ) -> None:  # fmt: skip
        """Set up a random draw of one possible machine, by default the most likely one; hosts take ``host_factor`` as
        long. ``busy_s`` is how long the devices have computed, None means a long time.

        ``hops_first`` says that a hop always starts before a block that became ready at the same time, ``repacks`` that
        calls have copies around them, as `Query.repacks` says.
        """
        self._calibration, self._curves, self._seed, self._host_factor = calibration, curves, seed, host_factor
        self.transfer, self.collective_ns = links.transfer, links.collective_ns
        self.device_share, self.capacity = links.device_share, links.capacity
        self.handover_ns = calibration.handover_us.value * 1e3
        self._utilisation, self._busy_s = utilisation or {}, busy_s
        self._cool_factors: dict[int, float] = {}
        self._hop_first = 1.0 if hops_first else calibration.hop_first.value
        self._repacks = repacks
        self._random = random.Random(seed)
        self._jitter: dict[tuple[int, int], float] = defaultdict(lambda: self._random.gauss(1.0, JITTER))
        self._device_factors: dict[int, float] = defaultdict(
            lambda: self._random.gauss(1.0, calibration.device_variation.value)
        )
        hosts = random.Random(seed)
        self._host_factors: dict[int, float] = defaultdict(
            lambda: hosts.gauss(1.0, calibration.host.host_variation.value)
        )

    def compute_time(self, rank: int, op_index: int, block: ComputeOp) -> BlockTime:
        kernel = self._curves.kernel
        if rank not in self._cool_factors:
            slowdown, utilisation = self._calibration.slowdown, self._utilisation.get(rank, 1.0)
            self._cool_factors[rank] = slowdown(kernel, utilisation, self._busy_s) / slowdown(kernel, 1.0, None)
        # The memory's clock is not throttled.
        cool_factor = 1.0 if isinstance(block, AttentionOp) and reads_cache(block) else self._cool_factors[rank]
        random_factor = self._jitter[rank, op_index] * self._device_factors[rank] if self._seed else 1.0
        total_ns = estimate(self._curves, block).ns * cool_factor * random_factor
        lead_ns = kernel.lead.value * total_ns if block.phase == "backward" else 0.0
        before_ns = after_ns = 0.0
        if self._repacks and isinstance(block, AttentionOp):
            before_ns, after_ns = self._repacking_ns(block)
            total_ns *= VARLEN_FORWARD if block.phase == "forward" else 1.0
        return BlockTime(
            before_ns + total_ns + after_ns, before_ns + lead_ns, kernel.tail.value * total_ns + after_ns,
            kernel.fills(block.phase),
        )  # fmt: skip

    def _repacking_ns(self, block: AttentionOp) -> tuple[float, float]:
        """Return the nanoseconds of the gathers before a call, and of the fills and scatters after it.

        A forward call gathers q, k and v and scatters its output. A backward call gathers q, the output, its gradient,
        k and v, and scatters dq, dk and dv.
        """
        row_bytes = 2 * block.batch * block.head_dim
        q_bytes, kv_bytes = row_bytes * block.q * block.heads, 2 * row_bytes * block.kv * block.kv_heads
        forward, rate = block.phase == "forward", self._calibration.memory_gb_s.value
        gathered, scattered = (q_bytes + kv_bytes, q_bytes) if forward else (3 * q_bytes + kv_bytes, q_bytes + kv_bytes)
        return 2 * gathered / (rate * GATHER_RATE), scattered / rate * (2 / SCATTER_RATE + 1 / FILL_RATE)

    def memory_op_ns(self, rank: int, op_index: int, op: MemoryOp) -> float:
        calibration = self._calibration
        rate = calibration.reorder_gb_s.value if op.strided else calibration.memory_gb_s.value
        return calibration.memory_op_us.value * 1e3 + op.bytes / rate

    def hop_starts_first(self, rank: int, op_index: int) -> bool:
        return self._random.random() < self._hop_first

    def host_ns_per_op(self, program: Program) -> list[float]:
        factor = self._host_factor * (self._host_factors[program.rank] if self._seed else 1.0)
        return [ns * factor for ns in host_ns(self._calibration, self._curves.kernel, program)]


# --- kernel rates of a calibration, by its curves: what `ringprof.kernel_rates` reads ---

_TOKENS = tuple(2**octave for octave in range(10, 19))
_GROUPS = (1, 4, 8)
_HEADS = 32
_PHASES: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def with_rates(calibration: Calibration) -> Calibration:
    """Return the calibration with the rates of its kernels at square blocks of 1024 to 262,144 tokens.

    Lengths and numbers of heads per kv head that no sample of the kernel is near to are left out.
    """
    rates = []
    for kernel in calibration.kernels:
        curves = Curves(calibration, kernel.name)
        plain = [sample for sample in kernel.samples if sample.pairs is None]
        for head_dim in sorted({sample.head_dim for sample in plain}):
            lengths = [min(sample.q, sample.kv) for sample in plain if sample.head_dim == head_dim]
            groups = {sample.heads / sample.kv_heads for sample in plain if sample.head_dim == head_dim}
            near_groups = [group for group in _GROUPS if any(group / 2 <= known <= 2 * group for known in groups)]
            for phase, group, causal, tokens in product(_PHASES, near_groups, (True, False), _TOKENS):
                if not min(lengths) <= tokens <= 2 * max(lengths):
                    continue
                block = block_of(phase, tokens, tokens, _HEADS, _HEADS // group, head_dim, causal=causal)
                try:
                    estimate = curves.estimate(block)
                except OutsideCalibration:
                    continue
                rates.append(
                    KernelRate(
                        kernel=kernel.name, phase=phase, head_dim=head_dim, group=group, causal=causal, tokens=tokens,
                        tflops=round(block.flops() / estimate.ns / 1e3, 1), spread=round(estimate.spread, 4),
                    )
                )  # fmt: skip
    return msgspec.structs.replace(calibration, kernel_rates=rates)
