"""Dynamic context parallelism: an iteration of several steps, each with its own number of ranks per sequence.

Every step has the same number of tokens per rank. With 4 ranks and sizes 4, 2 and 1, the first step has one sequence of
all tokens, the second has two of half the length, each on two neighbours, and the third has four, one per rank. The
strategies of all sizes are created once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.profiler import record_function

from ringprof.iteration.shard import Results, WorkloadShard
from ringprof.workload.workload import Workload

_RESULTS = ("out", "dq", "dk", "dv")


@dataclass(kw_only=True)
class DynamicCpShard(WorkloadShard):
    """One rank's share of all steps of an iteration; the inherited attributes are those of the first step."""

    steps: list[WorkloadShard]
    workloads: list[Workload]
    """Workload of one group of ranks, for each step."""
    timestamps: list[list[Any]] = field(default_factory=list)
    """For each iteration, the start of each step and the end of the last: CUDA events, or nanoseconds on CPU."""

    @classmethod
    def from_dynamic(
        cls, dynamic: Any, workload: Workload, sizes: tuple[int, ...], device: torch.device
    ) -> DynamicCpShard:
        """Create the shards of all steps from ``dynamic``, a `ringprof.strategies.Dynamic`.

        Collective: every rank must call this, because the strategies are created here.
        """
        workloads = [workload.step(dynamic.comm.size // size) for size in sizes]
        strategies = [dynamic.of(size) for size in sizes]
        steps = [
            WorkloadShard.create(strategy, step_workload, device)
            for strategy, step_workload in zip(strategies, workloads, strict=True)
        ]
        first = steps[0]
        return cls(
            first.strategy, first.causal, first.q, first.k, first.v, first.dout, steps=steps, workloads=workloads
        )

    @property
    def strategies(self) -> list[Any]:
        """Strategies of all steps, each once."""
        return list({id(step.strategy): step.strategy for step in self.steps}.values())

    def run_iteration(self) -> Results:
        """Run all steps and return the results of the last one."""
        return self._run_steps()[-1]

    def run_for_verification(self) -> Results:
        """Run all steps and return their results, concatenated along the tokens; see `results_of_step`."""
        step_results = self._run_steps()
        tensors = {name: [getattr(results, name) for results in step_results] for name in _RESULTS}
        return Results(**{name: torch.cat(parts, 1) for name, parts in tensors.items() if parts[0] is not None})

    def _run_steps(self) -> list[Results]:
        results, timestamps = [], [self._timestamp()]
        for step in self.steps:
            with record_function(f"cp_size={step.strategy.comm.size}"):
                results.append(step.run_iteration())
            timestamps.append(self._timestamp())
        self.timestamps.append(timestamps)
        return results

    def results_of_step(self, results: Results, number: int) -> Results:
        """Return the part of ``results`` (those of `run_for_verification`) that belongs to step ``number``."""
        tensors = {name: x for name in _RESULTS if (x := getattr(results, name)) is not None}
        return Results(**{name: x.chunk(len(self.steps), 1)[number] for name, x in tensors.items()})

    def step_times_ns(self, iterations: int) -> list[int]:
        """Return the median time of each step over the last ``iterations``, in nanoseconds.

        The device must have finished.
        """
        on_gpu = self.q.device.type == "cuda"
        times = [
            [round(begin.elapsed_time(end) * 1e6) if on_gpu else end - begin for begin, end in pairwise(timestamps)]
            for timestamps in self.timestamps[-iterations:]
        ]
        return [int(median(times_of_step)) for times_of_step in zip(*times, strict=True)]

    def _timestamp(self) -> Any:
        if self.q.device.type != "cuda":
            return time.perf_counter_ns()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
