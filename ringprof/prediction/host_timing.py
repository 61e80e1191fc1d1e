"""Measured passes of strategies over so few tokens that the host is the bound; input of
`ringprof.prediction.host_model`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, pstdev

import msgspec

from ringprof.common.json_object import JsonObject
from ringprof.errors import UnsupportedWorkloadError
from ringprof.prediction.calibration import HostPass
from ringprof.prediction.host_model import count_kinds
from ringprof.prediction.microbenchmark import Bench
from ringprof.prediction.schedules import schedule
from ringprof.prediction.shapes import HEAD_DIM
from ringprof.record.clock import clock_for
from ringprof.record.measure import WorkloadShard
from ringprof.run import Workload
from ringprof.strategies import create
from ringprof.strategies.catalog import SPECS

_WARM_UP_PASSES, _PASSES_PER_TURN, _SKIPPED_PASSES, _MIN_TURNS = 5, 14, 4, 3
"""Passes before the first timed one; passes per turn; skipped first passes of a turn; and the minimum number of turns.

The first passes of a turn are skipped because the processor's caches still hold another strategy's code.
"""
_TOKENS, _HEADS = 256, 8
"""Tokens per rank, and heads per rank."""
_PARAMS: dict[str, JsonObject] = {"allgather": {"layout": "zigzag"}}


@dataclass
class _TimedPass:
    """A strategy's pass with the times of its turns on this rank."""

    host_pass: HostPass
    shard: WorkloadShard
    turns_us: list[list[float]] = field(default_factory=list)
    """Microseconds per turn and pass, by the recorder's clock."""
    issued_us: list[float] = field(default_factory=list)
    """Median microseconds per turn from the call of a pass to its return."""

    def run_turn(self, bench: Bench) -> None:
        """Run several passes one after another, as a recording does."""
        host_us = []

        def run_pass() -> None:
            start_ns = time.perf_counter_ns()
            self.shard.run_iteration()
            host_us.append((time.perf_counter_ns() - start_ns) / 1e3)

        if bench.size == 1:
            for _ in range(_PASSES_PER_TURN):
                run_pass()
            times_us = host_us
        else:
            clock = clock_for(bench.device)
            for _ in range(_PASSES_PER_TURN):
                clock.run(run_pass)
            times_us = [ns / 1e3 for ns in clock.times_ns()]
        self.turns_us.append(times_us[_SKIPPED_PASSES:])
        self.issued_us.append(median(host_us[_SKIPPED_PASSES:]))


def measure_passes(bench: Bench, kernels: Sequence[str], deadline: float) -> list[HostPass]:
    """Measure passes of all strategies in turns until the deadline. Raises RuntimeError if no strategy runs."""
    timed_passes = [
        timed_pass
        for host_pass, workload in _passes_to_measure(bench, kernels)
        if (timed_pass := _prepare(bench, host_pass, workload)) is not None
    ]
    if not timed_passes:
        raise RuntimeError("no strategy ran")
    turns = 0
    while not any(bench.gather(turns >= _MIN_TURNS and time.monotonic() > deadline, bool)):
        for timed_pass in timed_passes:
            timed_pass.run_turn(bench)
        turns += 1
    return [_with_times(bench, timed_pass) for timed_pass in timed_passes]


def _passes_to_measure(bench: Bench, kernels: Sequence[str]) -> Iterator[tuple[HostPass, Workload]]:
    """Yield every strategy with every kernel, without and with backward pass, with NCCL and with copied hops."""
    heads = _HEADS * bench.size
    for kernel in kernels:
        for name in SPECS:
            for hops in ("nccl", "copy") if bench.device.type == "cuda" and bench.size > 1 else ("nccl",):
                for backward in (False, True):
                    workload = Workload(
                        seq=_TOKENS * bench.size, heads=heads, kv_heads=heads, head_dim=HEAD_DIM, causal=name != "ring",
                        backward=backward,
                    )  # fmt: skip
                    try:
                        params = dict(_PARAMS.get(name, {}))
                        dry_run = schedule(
                            name, workload, bench.size, kernel=kernel, hops=hops, params=params, ranks=[0]
                        )
                    except UnsupportedWorkloadError:
                        continue
                    counts = dict(count_kinds(dry_run.programs[0]))
                    if counts and (hops == "nccl" or "copy_us" in counts):
                        yield HostPass(strategy=name, kernel=kernel, hops=hops, ranks=bench.size, backward=backward,
                                       kinds=counts, us=1.0, source="ringprof calibrate"), workload  # fmt: skip


def _prepare(bench: Bench, host_pass: HostPass, workload: Workload) -> _TimedPass | None:
    """Create and warm up a pass; return None if it cannot run, which is the same on all ranks."""
    try:
        strategy = create(
            host_pass.strategy, kernel=host_pass.kernel, hops=host_pass.hops, **_PARAMS.get(host_pass.strategy, {})
        )
        shard = WorkloadShard.create(strategy, workload, bench.device)
        for _ in range(_WARM_UP_PASSES):
            shard.run_iteration()
    except (RuntimeError, ValueError):
        return None
    return _TimedPass(host_pass, shard)


def _with_times(bench: Bench, timed_pass: _TimedPass) -> HostPass:
    """Return the pass with its measured times; an iteration takes as long as on the slowest rank."""
    all_turns_us = bench.gather(timed_pass.turns_us, list[list[float]])
    medians = [
        median(max(rank_times) for rank_times in zip(*rank_turns, strict=True))
        for rank_turns in zip(*all_turns_us, strict=True)
    ]
    us = median(medians)
    host_us = [median(rank_host_us) for rank_host_us in bench.gather(timed_pass.issued_us, list[float])]
    spread = min(1.0, pstdev(medians) / us)
    return msgspec.structs.replace(timed_pass.host_pass, us=us, spread=spread, turns=len(medians), ranks_us=host_us)
