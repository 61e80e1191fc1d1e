"""Dynamic context parallelism: an iteration of several steps, in each of which other numbers of ranks share a sequence.

Every step has the same tokens a rank: with 4 ranks and sizes 4, 2 and 1, one sequence of all tokens, then two of half
of them, each on two neighbours, then four. The strategies of all sizes are made once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
import torch
from torch.profiler import record_function

from ringprof.record.measure import Measurement, Results, WorkloadShard
from ringprof.record.verify import severity, verify
from ringprof.record.verify_timed import verify_timed
from ringprof.run import TensorError, Verification, Workload

_RESULTS = ("out", "dq", "dk", "dv")


@dataclass(kw_only=True)
class StepsProblem(WorkloadShard):
    """The steps, one after the other; what belongs to one alone is the first's."""

    steps: list[WorkloadShard]
    workloads: list[Workload]
    """Of one group of ranks, by step."""
    stamps: list[list[Any]] = field(default_factory=list)
    """By iteration, when each step began, and when the last ended."""

    @classmethod
    def over(cls, parts: Any, workload: Workload, sizes: tuple[int, ...], device: torch.device) -> StepsProblem:
        """``parts`` is a `ringprof.strategies.Dynamic`; collective, as it makes the strategies."""
        workloads = [workload.step(parts.comm.size // size) for size in sizes]
        strategies = [parts.of(size) for size in sizes]
        steps = [WorkloadShard.of(one, work, device) for one, work in zip(strategies, workloads, strict=True)]
        first = steps[0]
        return cls(
            first.strategy, first.causal, first.q, first.k, first.v, first.dout, steps=steps, workloads=workloads
        )

    @property
    def strategies(self) -> list[Any]:
        return list({id(step.strategy): step.strategy for step in self.steps}.values())

    def iteration(self) -> Results:
        """All steps; returns what the last computes."""
        return self._in_turn()[-1]

    def results(self) -> Results:
        """Those of all steps side by side, as so many more tokens: see `of_step`."""
        found = self._in_turn()
        parts = {name: [getattr(one, name) for one in found] for name in _RESULTS}
        return Results(**{name: torch.cat(some, 1) for name, some in parts.items() if some[0] is not None})

    def _in_turn(self) -> list[Results]:
        found, stamps = [], [self._now()]
        for step in self.steps:
            with record_function(f"cp_size={step.strategy.comm.size}"):
                found.append(step.iteration())
            stamps.append(self._now())
        self.stamps.append(stamps)
        return found

    def of_step(self, results: Results, number: int) -> Results:
        """One step's part of `results`."""
        there = {name: x for name in _RESULTS if (x := getattr(results, name)) is not None}
        return Results(**{name: x.chunk(len(self.steps), 1)[number] for name, x in there.items()})

    def step_times_ns(self, iterations: int) -> list[int]:
        """Each step's median over the last iterations; the device must have finished."""
        times = [[self._between(begin, end) for begin, end in pairwise(stamps)] for stamps in self.stamps[-iterations:]]
        return [int(median(of_step)) for of_step in zip(*times, strict=True)]

    def _now(self) -> Any:
        if self.q.device.type != "cuda":
            return time.perf_counter_ns()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @staticmethod
    def _between(begin: Any, end: Any) -> int:
        return int(end - begin) if isinstance(begin, int) else round(begin.elapsed_time(end) * 1e6)


def verify_steps(parts: Any, workload: Workload, sizes: tuple[int, ...], device: torch.device) -> Verification:
    """As `ringprof.record.verify.verify`, of every size; all groups of ranks at once. Raises `VerificationError`."""
    return _worst(
        [verify(parts.of(size), workload.step(parts.comm.size // size), device) for size in dict.fromkeys(sizes)]
    )


def verify_timed_steps(problem: StepsProblem, measured: Measurement, before: Verification) -> Verification:
    """As `ringprof.record.verify_timed.verify_timed`, of every step. Raises `VerificationError`."""
    assert measured.last is not None
    rows = measured.first_rows.chunk(len(problem.steps), 1)
    return _worst([
        verify_timed(step, rows[number], problem.of_step(measured.last, number), work, before)
        for number, (step, work) in enumerate(zip(problem.steps, problem.workloads, strict=True))
    ])  # fmt: skip


def _worst(found: list[Verification]) -> Verification:
    """Of each tensor the error nearest its bound; lengths and places are those of the longest sequence."""
    longest = max(found, key=lambda one: one.timed.seq if one.timed else one.seq)
    timed = [one.timed for one in found if one.timed is not None]
    merged = msgspec.structs.replace(longest, errors=_nearest([one.errors for one in found]))
    if longest.timed is None:
        return merged
    together = msgspec.structs.replace(
        longest.timed, errors=_nearest([one.errors for one in timed]), took_ns=sum(one.took_ns for one in timed),
        same_output=all(one.same_output for one in timed),
    )  # fmt: skip
    return msgspec.structs.replace(merged, timed=together)


def _nearest(errors: list[dict[str, TensorError]]) -> dict[str, TensorError]:
    return {name: max((one[name] for one in errors), key=severity) for name in errors[0]}
