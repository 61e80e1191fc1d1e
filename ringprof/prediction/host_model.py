"""Host time per kind of operation, fitted to the measured passes of strategies.

A pass takes the host the sum of the times of its operations. In a loop of its own a call takes only a third of that,
because all it needs is in the processor's caches. So the times are fitted to whole passes of many strategies, and stay
near their usual values where the passes do not separate two kinds.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import NormalDist, fmean, pstdev

import msgspec
import numpy as np

from ringprof.dryrun.schedule import CommStart, ComputeOp, MemoryOp, Op, Program, RecurrenceOp
from ringprof.prediction.calibration import Calibration, Host, HostPass, KernelFigures, Value, unmeasured_kernel
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
    """Return microseconds per kind; a field that older files lack falls back to the most similar one."""
    host = calibration.host
    fallbacks = {"collective_us": host.post_us, "copy_us": host.post_us}
    values = {
        name: getattr(host, name) or fallbacks.get(name) for name in host.__struct_fields__ if name.endswith("_us")
    }
    values |= {name: getattr(kernel, name) for name in _KERNEL_KINDS if getattr(kernel, name)}
    return {name: 0.0 if value is None else value.value for name, value in values.items()}


def _first_backward(program: Program) -> int | None:
    """Return the index of the first operation of the backward pass."""
    for op_index, op in enumerate(program.ops):
        if getattr(op, "label", "").startswith("bwd") or getattr(op, "phase", "") == "backward":
            return op_index
    return None


def fit_host_times(base: Calibration, passes: Sequence[HostPass], source: str) -> Calibration:
    """Fit host time per operation to measured passes and store both; least squares of relative errors."""
    kernels = sorted({host_pass.kernel for host_pass in passes})
    usual: dict[str, float] = {}
    for name in kernels:
        for kind, us in times_us(base, _kernel(base, name)).items():
            usual[_column(name, kind)] = us or 1.0
    columns = list(usual)
    rows = np.array([
        [
            host_pass.kinds.get(_kind(column), 0) if _column(host_pass.kernel, _kind(column)) == column else 0
            for column in columns
        ]
        for host_pass in passes
    ], dtype=float)  # fmt: skip
    variation = base.host.host_variation.value
    measured = np.array([host_pass.us / slowest_ratio(host_pass.ranks, variation) for host_pass in passes])
    prior = np.array([usual[column] for column in columns])
    prior *= float(np.median(measured / (rows @ prior)))
    system = np.vstack([rows / measured[:, None], _PRIOR_WEIGHT * np.diag(1 / prior)])
    fitted = np.linalg.lstsq(
        system, np.concatenate([np.ones(len(measured)), np.full(len(prior), _PRIOR_WEIGHT)]), rcond=None
    )[0]
    fitted = np.maximum(fitted, 0.1 * prior)
    error = max(math.sqrt(float(np.mean((rows @ fitted / measured - 1) ** 2))), _MIN_SPREAD)
    # Each kind's standard deviation after the fit: the passes, and the relative error of its usual proportion before.
    usual_values = (getattr(base.host, _kind(column)) for column in columns)
    spreads = np.array([max(_MIN_PRIOR_SPREAD, 0.0 if value is None else value.spread) for value in usual_values])
    counts_per_us = rows / measured[:, None]
    precision = counts_per_us.T @ counts_per_us / error**2 + np.diag(1 / (spreads * prior) ** 2)
    stds_us = np.sqrt(np.diag(np.linalg.inv(precision)))
    has_passes = [bool(counts.any()) for counts in rows.T]
    slowest_spread = _slowest_spread(max(host_pass.ranks for host_pass in passes), variation)
    values = {
        column: Value(round(float(fitted_us), 2), round(min(math.hypot(std_us / fitted_us, slowest_spread), 1.0), 3),
                      *(("measured", source) if is_measured else ("assumed", _UNMEASURED_SOURCE)))
        for column, fitted_us, std_us, is_measured in zip(columns, fitted, stds_us, has_passes, strict=True)
    }  # fmt: skip
    host = msgspec.structs.replace(base.host, pass_spread=round(min(math.hypot(error, slowest_spread), 1.0), 3))
    return _with_values(msgspec.structs.replace(base, host=host, passes=list(passes)), values, kernels)


def slowest_ratio(ranks: int, variation: float) -> float:
    """Return the expected time of the slowest of ``ranks`` ranks, relative to one rank (Blom 1958)."""
    return 1.0 if ranks == 1 else 1 + variation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@cache
def _slowest_spread(ranks: int, variation: float) -> float:
    """Return the relative standard deviation of the slowest host's time among ``ranks`` ranks."""
    generator = random.Random(0)
    slowest = [max(generator.gauss(1.0, variation) for _ in range(ranks)) for _ in range(2000)]
    return pstdev(slowest) / fmean(slowest)


def _with_values(base: Calibration, values: Mapping[str, Value], kernels: Sequence[str]) -> Calibration:
    """Return ``base`` with the fitted values in its host and its kernels."""
    shared = {name: values[name] for name in Host.__struct_fields__ if name in values}
    first = {name: values[_column(kernels[0], name)] for name in _KERNEL_KINDS}
    kernel_figures = [
        msgspec.structs.replace(kernel, **{name: values[_column(kernel.name, name)] for name in _KERNEL_KINDS})
        if kernel.name in kernels else kernel
        for kernel in base.kernels
    ]  # fmt: skip
    return msgspec.structs.replace(
        base, host=msgspec.structs.replace(base.host, **shared, **first), kernels=kernel_figures
    )  # fmt: skip


def _kernel(calibration: Calibration, name: str) -> KernelFigures:
    """Return the named kernel, or a placeholder if the calibration has none."""
    return next((kernel for kernel in calibration.kernels if kernel.name == name), unmeasured_kernel(name))


def _column(kernel: str, kind: str) -> str:
    """Return the name of a column of the fit; times of kernels have one column per kernel."""
    return f"{kernel}:{kind}" if kind in _KERNEL_KINDS else kind


def _kind(column: str) -> str:
    return column.rpartition(":")[2]
