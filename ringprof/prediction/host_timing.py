"""Passes of strategies over so few tokens that the host is the bound: what `ringprof.prediction.host_model`
explains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, pstdev

import msgspec

from ringprof.errors import UnsupportedWorkloadError
from ringprof.json_object import JsonObject
from ringprof.prediction.calibration import HostPass
from ringprof.prediction.host_model import kinds
from ringprof.prediction.microbenchmark import Bench
from ringprof.prediction.schedules import schedule
from ringprof.prediction.shapes import HEAD_DIM
from ringprof.record.clock import clock_for
from ringprof.record.measure import WorkloadShard
from ringprof.run import Workload
from ringprof.strategies import create
from ringprof.strategies.registry import SPECS

_WARM, _TURN, _UNCOUNTED, _TURNS = 5, 14, 4, 3
"""Passes before any is timed; those of a turn, and of them the first, which find other strategies' code in the
processor's caches; turns that there are at least."""
_TOKENS, _HEADS = 256, 8
"""Of a rank, and times the ranks."""
_PARAMS: dict[str, JsonObject] = {"allgather": {"layout": "zigzag"}}


@dataclass
class _Timed:
    """A strategy's pass, and what its turns took on this rank."""

    about: HostPass
    problem: WorkloadShard
    turns_us: list[list[float]] = field(default_factory=list)
    """By turn, of each pass, by the recorder's clock."""
    issued_us: list[float] = field(default_factory=list)
    """By turn, the median from the call of a pass to its return."""

    def turn(self, bench: Bench) -> None:
        """Some passes one after another, as a recording makes them."""
        issued = []

        def body() -> None:
            before = time.perf_counter_ns()
            self.problem.run_iteration()
            issued.append((time.perf_counter_ns() - before) / 1e3)

        if bench.size == 1:
            for _ in range(_TURN):
                body()
            times = issued
        else:
            clock = clock_for(bench.device)
            for _ in range(_TURN):
                clock.run(body)
            times = [ns / 1e3 for ns in clock.times_ns()]
        self.turns_us.append(times[_UNCOUNTED:])
        self.issued_us.append(median(issued[_UNCOUNTED:]))


def measured_passes(bench: Bench, kernels: Sequence[str], until: float) -> list[HostPass]:
    """Passes of all strategies, in turns until the time ``until``. Raises RuntimeError where none can be made."""
    timed = [one for about, workload in _wanted(bench, kernels) if (one := _made(bench, about, workload)) is not None]
    if not timed:
        raise RuntimeError("no strategy ran")
    turns = 0
    while not any(bench.together(turns >= _TURNS and time.monotonic() > until, bool)):
        for one in timed:
            one.turn(bench)
        turns += 1
    return [_found(bench, one) for one in timed]


def _wanted(bench: Bench, kernels: Sequence[str]) -> Iterator[tuple[HostPass, Workload]]:
    """Every strategy with every kernel, forward alone and with its backward pass, by NCCL's hops and by copied ones."""
    heads = _HEADS * bench.size
    for kernel in kernels:
        for name in SPECS:
            for hops in ("nccl", "copy") if bench.device.type == "cuda" and bench.size > 1 else ("nccl",):
                for backward in (False, True):
                    workload = Workload(
                        seq=_TOKENS * bench.size, heads=heads, kv_heads=heads, head_dim=HEAD_DIM, causal=name != "ring",
                        backward=backward,
                    )  # fmt: skip
                    counted = _counted(bench, name, kernel, hops, workload)
                    if counted and (hops == "nccl" or "copy_us" in counted):
                        yield HostPass(strategy=name, kernel=kernel, hops=hops, ranks=bench.size, backward=backward,
                                       kinds=counted, us=1.0, source="ringprof calibrate"), workload  # fmt: skip


def _counted(bench: Bench, name: str, kernel: str, hops: str, workload: Workload) -> dict[str, int] | None:
    try:
        found = schedule(
            name, workload, bench.size, kernel=kernel, hops=hops, params=dict(_PARAMS.get(name, {})), ranks=[0]
        )  # fmt: skip
    except UnsupportedWorkloadError:
        return None
    return dict(kinds(found.programs[0]))


def _made(bench: Bench, about: HostPass, workload: Workload) -> _Timed | None:
    """What cannot run here fails on all ranks alike, and is left out."""
    try:
        strategy = create(about.strategy, kernel=about.kernel, hops=about.hops, **_PARAMS.get(about.strategy, {}))
        problem = WorkloadShard.create(strategy, workload, bench.device)
        for _ in range(_WARM):
            problem.run_iteration()
    except (RuntimeError, ValueError):
        return None
    return _Timed(about, problem)


def _found(bench: Bench, one: _Timed) -> HostPass:
    """A pass takes as long as on the slowest rank, in every iteration."""
    everyone = bench.together(one.turns_us, list[list[float]])
    turns = [median(max(passes) for passes in zip(*turn, strict=True)) for turn in zip(*everyone, strict=True)]
    us = median(turns)
    issued = [median(ranks) for ranks in bench.together(one.issued_us, list[float])]
    spread = min(1.0, pstdev(turns) / us)
    return msgspec.structs.replace(one.about, us=us, spread=spread, turns=len(turns), ranks_us=issued)
