"""Rates of attention kernels and of a plain matrix product on a device, as calibration files state them.

The rates are the part of a calibration (schema ``ringprof.calibration/1``) that reports need: what another kernel would
take for the same blocks. `ringprof.prediction.rates` writes them into the file, from the curves of the calibration.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from ringprof.common.decoding import decode_json, read_small
from ringprof.errors import UsageError, nearest
from ringprof.workload.workload import Workload

BUNDLED = ("h200", "h100", "b200", "a800")
"""Names of the calibrations that come with ringprof."""
_MACHINES = Path(__file__).parent / "prediction" / "machines"
_MAX_OCTAVES_OUTSIDE = 1.0
"""Largest distance of a block from the shortest and the longest calibrated one, in powers of two of its length."""
_MAX_GROUP_RATIO = 2.0
"""Largest ratio between the query heads per kv head of a block and of the rate that stands for it."""
_CALIBRATED_TYPE = "bf16"


class KernelRate(msgspec.Struct, frozen=True, kw_only=True):
    """Rate of one kernel for square blocks, on a device that computes all the time."""

    kernel: str
    phase: str
    """``forward`` or ``backward``."""
    head_dim: int
    group: int
    """Query heads per kv head."""
    causal: bool
    tokens: int
    """Queries, and as many keys."""
    tflops: float
    spread: float
    """Standard deviation, as a fraction of the rate."""


class _MatrixProduct(msgspec.Struct, frozen=True):
    value: float


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one device: a part of a calibration file."""

    name: str
    """Name of the calibration."""
    device: str
    """Name of the device, as its driver states it."""
    kernel_rates: tuple[KernelRate, ...] = ()
    matmul_tflops: _MatrixProduct | None = None
    matmul_clock_mhz: float | None = None

    @property
    def matrix_product(self) -> float | None:
        """TFLOP/s of a large matrix product; None if it was not measured."""
        return self.matmul_tflops.value if self.matmul_tflops else None


class BlockTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Calibrated time of one rank's attention blocks by one kernel."""

    kernel: str
    ns: float
    spread: float
    """Standard deviation, as a fraction of the time."""


def machine_file(name_or_path: str | os.PathLike[str]) -> str:
    """Return the path of a calibration: that of a bundled one by its name in any case, or the given path.

    Raises `UsageError` for a name that is neither bundled nor a file.
    """
    name = os.fspath(name_or_path)
    if name.lower() in BUNDLED:
        return str(_MACHINES / f"{name.lower()}.json")
    if not name.endswith(".json") and not os.path.exists(name):
        raise UsageError(
            f"no machine {name!r}{nearest(name, BUNDLED)}; there are: {', '.join(BUNDLED)}, or a file of"
            " `ringprof calibrate`"
        )
    return name


def read_rates(name_or_path: str | os.PathLike[str]) -> DeviceRates:
    """Read the rates of a calibration, by its name or path. Raises `InputError` and `UsageError`."""
    path = machine_file(name_or_path)
    return decode_json(read_small(path, "a calibration"), DeviceRates, path, "a calibration")


@cache
def bundled_rates(device: str) -> DeviceRates | None:
    """Return the rates of the bundled machine with this device; None if there is none."""
    machines = map(read_rates, sorted(BUNDLED))
    return next((machine for machine in machines if machine.device == device), None)


def block_times(
    rates: DeviceRates, workload: Workload, calls: Mapping[str, int], flops: int
) -> dict[str, BlockTimes]:  # fmt: skip
    """Return the time of each kernel that is calibrated for the blocks of one rank, by the kernel's name.

    ``calls`` are the numbers of blocks by phase, ``flops`` the FLOPs of all. Which blocks are causal and which are full
    is not known, so a block counts as the mean of both, with their difference in the spread. The result is empty for
    workloads that rates do not cover: packed documents, windows, a softcap, other data types, decode.
    """
    # A pair costs 4 FLOPs per head dimension forward and 10 backward.
    factors = {"forward": 4, "backward": 10} if workload.backward else {"forward": 4}
    if not _is_covered(workload) or not flops or not all(calls.get(phase) for phase in factors):
        return {}
    flops_per_pair = workload.batch * workload.heads * workload.head_dim * sum(factors.values())
    pairs = flops / flops_per_pair
    times = {}
    for kernel in dict.fromkeys(rate.kernel for rate in rates.kernel_rates):
        total_ns = variance = 0.0
        for phase, factor in factors.items():
            phase_ns = []
            for causal in (True, False) if workload.causal else (False,):
                tokens = math.sqrt(pairs / calls[phase] * (2 if causal else 1))
                rate = _interpolate(rates, kernel, phase, workload, tokens, causal=causal)
                if rate is not None:
                    phase_ns.append((flops * factor / sum(factors.values()) / rate[0] / 1e3, rate[1]))
            if not phase_ns:
                break
            mean_ns = sum(ns for ns, _ in phase_ns) / len(phase_ns)
            half_difference = (max(ns for ns, _ in phase_ns) - min(ns for ns, _ in phase_ns)) / 2
            total_ns += mean_ns
            variance += half_difference**2 + (max(spread for _, spread in phase_ns) * mean_ns) ** 2
        else:
            times[kernel] = BlockTimes(kernel=kernel, ns=total_ns, spread=math.sqrt(variance) / total_ns)
    return times


def _is_covered(workload: Workload) -> bool:
    """Return whether rates of plain square blocks tell the time of a workload's blocks."""
    return (
        workload.phase == "training" and workload.mask().plain and workload.sequences is None
        and workload.softcap is None and workload.v_head_dim is None and workload.dtype == _CALIBRATED_TYPE
    )  # fmt: skip


def _interpolate(
    rates: DeviceRates, kernel: str, phase: str, workload: Workload, tokens: float, *, causal: bool
) -> tuple[float, float] | None:
    """Return TFLOP/s and spread at a length, linear in its logarithm; None too far from the calibrated lengths."""
    group = workload.heads / workload.kv_heads
    rows = [
        rate for rate in rates.kernel_rates
        if (rate.kernel, rate.phase, rate.head_dim, rate.causal) == (kernel, phase, workload.head_dim, causal)
        and 1 / _MAX_GROUP_RATIO <= rate.group / group <= _MAX_GROUP_RATIO
    ]  # fmt: skip
    if not rows:
        return None
    nearest = min((rate.group for rate in rows), key=lambda known: abs(math.log2(known / group)))
    by_length = {rate.tokens: rate for rate in rows if rate.group == nearest}
    outside = max(min(by_length) / tokens, tokens / max(by_length))
    if outside > 2**_MAX_OCTAVES_OUTSIDE:
        return None
    below = max((length for length in by_length if length <= tokens), default=min(by_length))
    above = min((length for length in by_length if length >= tokens), default=max(by_length))
    share = math.log2(tokens / below) / math.log2(above / below) if above > below else 0.0
    low, high = by_length[below], by_length[above]
    return low.tflops + share * (high.tflops - low.tflops), max(low.spread, high.spread)
