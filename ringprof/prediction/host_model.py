"""The host's own time: what each kind of operation takes it, and how the passes of strategies tell of that.

A pass takes the host the sum over its operations of what one of their kind takes. In a loop of its own a call takes a
third of that, for it finds all it needs in the processor's caches; so the kinds' times are those that explain whole
passes of many strategies, and stay near what they usually are where these do not tell two kinds apart.
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
import numpy.typing as npt

from ringprof.prediction.calibration import Calibration, Host, HostPass, KernelFigures, Value
from ringprof.record.dryrun.schedule import AttentionOp, CommStart, MemoryOp, Op, Program

_POSTS = {"send_recv": "post_us", "copy": "copy_us"}
_OF_KERNELS = ("forward_us", "backward_us")
_HELD = 0.3
"""How strongly the kinds' times are held to the usual proportion: as much as passes that are off by so much."""
_LEAST_PRIOR = 0.3
"""How far a kind's time lies from its usual proportion on another host, where a calibration states less."""
_IN_PROPORTION = "no pass has this operation: in its usual proportion to the others"
_LEAST_SPREAD = 0.05
"""Hosts of one kind, and one host at two times, differ by more than the fit shows."""


def kind_of(op: Op) -> str:
    """The name in `Host` of what an operation takes."""
    if isinstance(op, AttentionOp):
        return f"{op.phase}_us"
    if isinstance(op, CommStart):
        return _POSTS.get(op.operation, "collective_us")
    return "launch_us" if isinstance(op, MemoryOp) else "wait_us"


def kinds(program: Program) -> Counter[str]:
    """How many operations of each kind a pass has."""
    found = Counter(kind_of(op) for op in program.ops)
    found["call_us"] = sum(op.calls for op in program.ops)
    found["autograd_us"] = int(_first_backward(program) is not None)
    return found


def host_ns(calibration: Calibration, kernel: KernelFigures, program: Program) -> list[float]:
    """What the host spends on each operation of a pass, and on the calls into torch before it."""
    us = times_us(calibration, kernel)
    found = [(us[kind_of(op)] + op.calls * us["call_us"]) * 1e3 for op in program.ops]
    first = _first_backward(program)
    if first is not None:
        found[first] += us["autograd_us"] * 1e3
    return found


def times_us(calibration: Calibration, kernel: KernelFigures) -> dict[str, float]:
    """Microseconds by kind; what older files do not know is as what is most like it."""
    host = calibration.host
    like = {"collective_us": host.post_us, "copy_us": host.post_us}
    known = {name: getattr(host, name) or like.get(name) for name in host.__struct_fields__ if name.endswith("_us")}
    known |= {name: getattr(kernel, name) for name in _OF_KERNELS if getattr(kernel, name)}
    return {name: 0.0 if value is None else value.value for name, value in known.items()}


def _first_backward(program: Program) -> int | None:
    """Where the backward pass begins."""
    for place, op in enumerate(program.ops):
        if getattr(op, "label", "").startswith("bwd") or getattr(op, "phase", "") == "backward":
            return place
    return None


def explained(before: Calibration, passes: Sequence[HostPass], source: str) -> Calibration:
    """The calibration with ``passes`` and the host's times that explain them, by least squares of relative errors."""
    kernels = sorted({one.kernel for one in passes})
    usual: dict[str, float] = {}
    for name in kernels:
        for kind, us in times_us(before, _kernel(before, name)).items():
            usual[_column(name, kind)] = us or 1.0
    columns = list(usual)
    rows = np.array([
        [one.kinds.get(_kind(column), 0) if _column(one.kernel, _kind(column)) == column else 0 for column in columns]
        for one in passes
    ], dtype=float)  # fmt: skip
    unlike = before.host.unlike.value
    took = np.array([one.us / slowest_of(one.ranks, unlike) for one in passes])
    prior = np.array([usual[column] for column in columns])
    prior *= float(np.median(took / (rows @ prior)))
    system = np.vstack([rows / took[:, None], _HELD * np.diag(1 / prior)])
    found = np.linalg.lstsq(system, np.concatenate([np.ones(len(took)), np.full(len(prior), _HELD)]), rcond=None)[0]
    found = np.maximum(found, 0.1 * prior)
    off = max(math.sqrt(float(np.mean((rows @ found / took - 1) ** 2))), _LEAST_SPREAD)
    spreads = _spreads(rows / took[:, None], off, np.array([_spread_of(before, column) for column in columns]), prior)
    ran = [bool(column.any()) for column in rows.T]
    hosts = _slowest_spread(max(one.ranks for one in passes), unlike)
    values = {
        column: Value(round(float(us), 2), round(min(math.hypot(spread / us, hosts), 1.0), 3),
                      *(("measured", source) if used else ("assumed", _IN_PROPORTION)))
        for column, us, spread, used in zip(columns, found, spreads, ran, strict=True)
    }  # fmt: skip
    host = msgspec.structs.replace(before.host, pass_spread=round(min(math.hypot(off, hosts), 1.0), 3))
    return _with(msgspec.structs.replace(before, host=host, passes=list(passes)), values, kernels)


def _spreads(
    shares: npt.NDArray[np.float64], off: float, known: npt.NDArray[np.float64], prior: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return each kind's standard deviation in microseconds.

    ``shares`` has a pass's counts by kind over its time, each pass known to within ``off``. Before the passes, a kind
    lies within ``known`` parts of ``prior``.
    """
    precision = shares.T @ shares / off**2 + np.diag(1 / (known * prior) ** 2)
    result: npt.NDArray[np.float64] = np.sqrt(np.diag(np.linalg.inv(precision)))
    return result


def _spread_of(before: Calibration, column: str) -> float:
    """Return how far a kind's time lies from its usual proportion to the others, before any pass is measured."""
    value = getattr(before.host, _kind(column))
    return max(_LEAST_PRIOR, value.spread if value is not None else 0.0)


def slowest_of(ranks: int, unlike: float) -> float:
    """How many times as long as one rank takes the slowest of some, in the mean (Blom 1958)."""
    return 1.0 if ranks == 1 else 1 + unlike * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@cache
def _slowest_spread(ranks: int, unlike: float) -> float:
    """Return the standard deviation of the slowest of some ranks' hosts, as a part of its mean."""
    chance = random.Random(0)
    slowest = [max(chance.gauss(1.0, unlike) for _ in range(ranks)) for _ in range(2000)]
    return pstdev(slowest) / fmean(slowest)


def _with(before: Calibration, values: Mapping[str, Value], kernels: Sequence[str]) -> Calibration:
    shared = {name: values[name] for name in Host.__struct_fields__ if name in values}
    first = {name: values[_column(kernels[0], name)] for name in _OF_KERNELS}
    own = [
        msgspec.structs.replace(kernel, **{name: values[_column(kernel.name, name)] for name in _OF_KERNELS})
        if kernel.name in kernels else kernel
        for kernel in before.kernels
    ]  # fmt: skip
    return msgspec.structs.replace(
        before, host=msgspec.structs.replace(before.host, **shared, **first), kernels=own
    )  # fmt: skip


def _kernel(calibration: Calibration, name: str) -> KernelFigures:
    """The kernel, or one that nothing is known of."""
    nothing = Value(0.0, 0.5, "assumed", "")
    known = (kernel for kernel in calibration.kernels if kernel.name == name)
    return next(known, KernelFigures(name=name, fills_device=False, tail=nothing, lead=nothing, samples=[]))


def _column(kernel: str, kind: str) -> str:
    return f"{kernel}:{kind}" if kind in _OF_KERNELS else kind


def _kind(column: str) -> str:
    return column.rpartition(":")[2]
