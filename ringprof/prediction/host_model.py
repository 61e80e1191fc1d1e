"""Host time per kind of operation, fitted to the measured passes of strategies.

A pass takes the host the sum of the times of its operations. In a loop of its own a call takes only a third of that,
because all it needs is in the processor's caches. So the times are fitted to whole passes of many strategies, and stay
near their usual values where the passes do not separate two kinds.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, fmean, pstdev

import msgspec
import numpy as np

from ringprof.dryrun.schedule import CommStart, ComputeOp, MemoryOp, Op, Program, RecurrenceOp
from ringprof.prediction.calibration import Calibration, HostPass, KernelFigures, Value, unmeasured_kernel
from ringprof.prediction.recurrence_curves import RECURRENCE_PASS_US, recurrence_curves_of

_START_KINDS = {"send_recv": "post_us", "chain": "post_us", "copy": "copy_us"}
_KERNEL_KINDS = ("forward_us", "backward_us")
_PRIOR_WEIGHT = 0.3
"""Weight that holds the kinds to their usual proportions, in units of relative errors of passes."""
_MIN_PRIOR_SPREAD = 0.3
"""Smallest relative error assumed for the usual proportion of a kind on another host."""
_UNMEASURED_SOURCE = "no pass has this operation: in its usual proportion to the others"
"""Source of a kind's time that the fit takes from the usual proportions alone."""
_MIN_SPREAD = 0.05
"""Smallest spread of a fitted time: hosts of one kind, and one host at two times, differ by more than the fit shows."""


def op_kind(op: Op) -> str:
    """Return the field name of `Host` with the time of an operation."""
    if isinstance(op, ComputeOp):
        return f"{op.phase}_us"
    if isinstance(op, CommStart):
        return _START_KINDS.get(op.operation, "collective_us")
    return "launch_us" if isinstance(op, MemoryOp) else "wait_us"


def count_kinds(program: Program) -> Counter[str]:
    """Count the operations of each kind in a pass."""
    counts = Counter(op_kind(op) for op in program.ops)
    counts["call_us"] = sum(op.calls for op in program.ops)
    counts["autograd_us"] = int(_first_backward(program) is not None)
    return counts


def host_ns(calibration: Calibration, kernel: KernelFigures, program: Program) -> list[float]:
    """Return the host time of each operation of a pass, including the calls into torch before it."""
    us_by_kind = times_us(calibration, kernel)

    def own_us(op: Op) -> float:
        if isinstance(op, RecurrenceOp):
            return recurrence_curves_of(calibration, kernel.name).host_us(op)
        return us_by_kind[op_kind(op)]

    times_ns = [(own_us(op) + op.calls * us_by_kind["call_us"]) * 1e3 for op in program.ops]
    for phase in ("forward", "backward"):
        first_part = next(
            (i for i, op in enumerate(program.ops) if isinstance(op, RecurrenceOp) and op.phase == phase), None
        )
        if first_part is not None:
            times_ns[first_part] += RECURRENCE_PASS_US * 1e3
    first = _first_backward(program)
    if first is not None:
        times_ns[first] += us_by_kind["autograd_us"] * 1e3
    return times_ns


def times_us(calibration: Calibration, kernel: KernelFigures) -> dict[str, float]:
    """Return microseconds per kind; a kernel's own times come before those of the machine."""
    kinds = [name for name in calibration.host.__struct_fields__ if name.endswith("_us")]
    own = {name: value for name in _KERNEL_KINDS if (value := getattr(kernel, name))}
    return {name: (own.get(name) or getattr(calibration.host, name)).value for name in kinds}


def _first_backward(program: Program) -> int | None:
    """Return the index of the first operation of the backward pass."""
    for op_index, op in enumerate(program.ops):
        if getattr(op, "label", "").startswith("bwd") or getattr(op, "phase", "") == "backward":
            return op_index
    return None


def fit_host_times(base: Calibration, passes: Sequence[HostPass], source: str) -> Calibration:
    """Fit host time per operation to measured passes and store both; least squares of relative errors."""
    kernels = sorted({host_pass.kernel for host_pass in passes})
    # A column per kind; times of kernels have one per kernel.
    usual: dict[tuple[str, str], float] = {}
    for name in kernels:
        figures = next((kernel for kernel in base.kernels if kernel.name == name), unmeasured_kernel(name))
        for kind, us in times_us(base, figures).items():
            usual[name if kind in _KERNEL_KINDS else "", kind] = us or 1.0
    rows = np.array([
        [host_pass.kinds.get(kind, 0) if kernel in ("", host_pass.kernel) else 0 for kernel, kind in usual]
        for host_pass in passes
    ], dtype=float)  # fmt: skip
    variation = base.host.host_variation.value
    measured = np.array([host_pass.us / slowest_ratio(host_pass.ranks, variation) for host_pass in passes])
    prior = np.array(list(usual.values()))
    prior *= float(np.median(measured / (rows @ prior)))
    system = np.vstack([rows / measured[:, None], _PRIOR_WEIGHT * np.diag(1 / prior)])
    fitted = np.linalg.lstsq(
        system, np.concatenate([np.ones(len(measured)), np.full(len(prior), _PRIOR_WEIGHT)]), rcond=None
    )[0]
    fitted = np.maximum(fitted, 0.1 * prior)
    error = max(math.sqrt(float(np.mean((rows @ fitted / measured - 1) ** 2))), _MIN_SPREAD)
    # Each kind's standard deviation after the fit: the passes, and the relative error of its usual proportion before.
    spreads = np.array([max(_MIN_PRIOR_SPREAD, getattr(base.host, kind).spread) for _, kind in usual])
    counts_per_us = rows / measured[:, None]
    precision = counts_per_us.T @ counts_per_us / error**2 + np.diag(1 / (spreads * prior) ** 2)
    stds_us = np.sqrt(np.diag(np.linalg.inv(precision)))
    has_passes = [bool(counts.any()) for counts in rows.T]
    slowest_spread = _slowest_spread(max(host_pass.ranks for host_pass in passes), variation)
    values = {
        column: Value(round(float(fitted_us), 2), round(min(math.hypot(std_us / fitted_us, slowest_spread), 1.0), 3),
                      *(("measured", source) if is_measured else ("assumed", _UNMEASURED_SOURCE)))
        for column, fitted_us, std_us, is_measured in zip(usual, fitted, stds_us, has_passes, strict=True)
    }  # fmt: skip
    host = msgspec.structs.replace(base.host, pass_spread=round(min(math.hypot(error, slowest_spread), 1.0), 3))
    of_kernel = {
        name: {kind: values[name, kind] for kind in _KERNEL_KINDS} for name in kernels
    }  # fmt: skip
    host = msgspec.structs.replace(
        host, **{kind: value for (kernel, kind), value in values.items() if not kernel}, **of_kernel[kernels[0]]
    )
    kernel_figures = [msgspec.structs.replace(kernel, **of_kernel.get(kernel.name, {})) for kernel in base.kernels]
    return msgspec.structs.replace(base, host=host, passes=list(passes), kernels=kernel_figures)


def slowest_ratio(ranks: int, variation: float) -> float:
    """Return the expected time of the slowest of ``ranks`` ranks, relative to one rank (Blom 1958)."""
    return 1.0 if ranks == 1 else 1 + variation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@cache
def _slowest_spread(ranks: int, variation: float) -> float:
    """Return the relative standard deviation of the slowest host's time among ``ranks`` ranks."""
    generator = random.Random(0)
    slowest = [max(generator.gauss(1.0, variation) for _ in range(ranks)) for _ in range(2000)]
    return pstdev(slowest) / fmean(slowest)
