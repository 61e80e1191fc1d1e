"""Passes of strategies over so few tokens that the host is the bound: what `ringprof.foresee.host` explains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ringprof.foresee.bench import Bench
from ringprof.foresee.calibration import Calibration
from ringprof.foresee.host import Pass, explained, kinds
from ringprof.foresee.shapes import HEAD_DIM
from ringprof.foresee.tape import tape
from ringprof.json_object import JsonObject
from ringprof.record.measure import Problem
from ringprof.run import Workload
from ringprof.strategies import create

_WARM, _TIMED, _TOKENS = 10, 60, 256
"""Passes that do not count, those that do, and a rank's tokens."""
_Case = tuple[str, JsonObject, JsonObject, str]
_CASES: tuple[_Case, ...] = (
    ("zigzag", {}, {}, "nccl"), ("zigzag", {}, {"backward": False}, "nccl"), ("zigzag", {}, {}, "copy"),
    ("stripe", {}, {}, "nccl"), ("ring", {}, {"causal": False}, "nccl"), ("burst", {}, {}, "nccl"),
    ("double-ring", {}, {}, "nccl"), ("ulysses", {}, {}, "nccl"), ("ulysses", {}, {"backward": False}, "nccl"),
    ("allgather", {"layout": "zigzag"}, {}, "nccl"), ("megatron", {}, {}, "nccl"),
)  # fmt: skip
"""Strategy, parameters, what its workload has beside the usual, and hops."""


def with_host_times(bench: Bench, before: Calibration, kernels: Sequence[str]) -> Calibration:
    """The calibration with the host's times of this host. Raises RuntimeError where no pass could be made."""
    passes = list(_passes(bench, kernels))
    if not passes:
        raise RuntimeError("no strategy ran")
    return explained(before, passes, "ringprof calibrate: passes of strategies")


def _passes(bench: Bench, kernels: Sequence[str]) -> Iterator[Pass]:
    """Ranks go at the slowest one's pace. What cannot run here fails on all ranks alike, and is left out."""
    for kernel in kernels:
        for case in _CASES:
            try:
                counted, us = _pass(bench, kernel, case)
            except (RuntimeError, ValueError):
                continue
            yield Pass(kernel, counted, max(bench.together(us, float)))


def _pass(bench: Bench, kernel: str, case: _Case) -> Any:
    """Its operations by kind, and microseconds between the beginnings of passes, one after another as in a run."""
    strategy, params, others, hops = case
    size, heads = bench.size, 8 * bench.size
    workload = Workload(seq=_TOKENS * size, heads=heads, kv_heads=heads, head_dim=HEAD_DIM, **others)
    made = create(strategy, kernel=kernel, hops=hops, **params)
    problem = Problem.of(made, workload, bench.device)
    marks = []
    for _ in range(_WARM + _TIMED + 1):
        marks.append(time.perf_counter_ns())
        problem.iteration()
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    program = tape(strategy, workload, size, kernel=kernel, hops=hops, params=params, ranks=[bench.rank]).programs[0]
    return kinds(program), median(b - a for a, b in pairwise(marks[_WARM:])) / 1e3
