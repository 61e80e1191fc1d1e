"""Sampling of a user's own training loop: which steps to profile, and how much a sample may cost. Loads torch."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd.profiler import KinetoStepTracker
from torch.profiler import record_function
from torch.profiler.profiler import PROFILER_STEP_NAME

from ringprof.common.scratch import remove, scratch_folder
from ringprof.iteration.shard import ITERATION, profiler, profiler_is_busy
from ringprof.ranks.process_group import GroupRanks, gather_tensor
from ringprof.training.steps import StepCounter, interval_for

MAX_BYTES = 64 << 20
"""Most bytes of all ranks' reduced traces together; larger traces are dropped, and the sample is empty."""

_log = logging.getLogger("ringprof.monitor")

_Reduce = Callable[[Path], bytes]
"""Function that returns the reduced form of a trace file; empty if the trace cannot be read."""
_Report = Callable[[int, list[bytes], dict[str, float]], None]
"""Function that the first rank calls with the step, every rank's reduced trace, and ``step_ms`` and ``interval``."""


class Monitor(StepCounter):
    """Monitor that profiles single steps of a training loop at intervals; created by `ringprof.monitor`."""

    def __init__(self, every: int, ranks: GroupRanks, reduce: _Reduce, report: _Report) -> None:
        """Start to count steps."""
        super().__init__()
        self.interval = every
        """Steps from one sample to the next."""
        self.spent_ns = 0
        """Time that sampling has cost this rank so far, in nanoseconds."""
        self._every, self._next, self._ranks, self._reduce, self._report = every, every, ranks, reduce, report
        self._profiling: ExitStack | None = None
        self._profiler: Any = None
        self._annotation: ExitStack | None = None
        self._unprofiled_ns: deque[int] = deque(maxlen=32)
        self._last_step_ns = time.perf_counter_ns()
        self._cost = 0

    def close(self) -> None:
        """Stop sampling; drop a sample that has begun."""
        self._hook.remove()
        if self._annotation is not None:
            self._annotation.close()
        if self._profiling is not None:
            self._profiling.close()
        self._profiling = self._annotation = None

    def _advance(self) -> None:
        """Count one step, account for its cost, and begin the next phase of a sample if it is due."""
        self.steps += 1
        now = time.perf_counter_ns()
        took_ns = now - self._last_step_ns
        if self._profiling is None:
            self._unprofiled_ns.append(took_ns)
            if self.steps >= self._next:
                self._start_profiler()
        else:
            # The cost includes the slowdown of the step by the profiler.
            self._cost += max(0, took_ns - round(median(self._unprofiled_ns)))
            if self._annotation is None:
                self._start_sample()
            else:
                self._finish_sample()
        self._last_step_ns = time.perf_counter_ns()
        self._cost += self._last_step_ns - now

    def _start_profiler(self) -> None:
        """Start the profiler, which warms up in the next step, unless the program has a profiler of its own."""
        self._profiling, self._cost = ExitStack(), 0
        # A second profiler may end the process, also while the first one is between its steps.
        if not (profiler_is_busy() or PROFILER_STEP_NAME in getattr(KinetoStepTracker, "_step_dict", ())):
            self._profiler = self._profiling.enter_context(profiler())

    def _start_sample(self) -> None:
        """Wait for the device's earlier work, then start the profiler, which records until the next step ends."""
        self._ranks.finish()
        self._annotation = ExitStack()
        if self._profiler is not None:
            self._profiler.step()
            self._annotation.enter_context(record_function(ITERATION))

    def _finish_sample(self) -> None:
        """End the profiled step: reduce its trace, gather the ranks' traces, and schedule the next sample."""
        began = time.perf_counter_ns()
        assert self._profiling is not None and self._annotation is not None
        self._annotation.close()
        self._ranks.finish()
        traces = self._ranks.gather_bytes(self._trace())
        self._profiling = self._annotation = self._profiler = None
        if self._ranks.rank == 0:
            step_ns = median(self._unprofiled_ns)
            try:
                self._report(self.steps, traces, {"step_ms": step_ns / 1e6, "interval": self.interval})
            except Exception as error:  # a sample that fails must not end the training
                _log.warning("step %d: the sample failed: %s", self.steps, error)
        self._schedule_next(self._cost + time.perf_counter_ns() - began)

    def _trace(self) -> bytes:
        """Return this rank's reduced trace, empty if there is none; the trace itself is removed."""
        assert self._profiling is not None
        if self._profiler is None:
            _log.warning("step %d: rank %d has a torch.profiler of its own: no sample", self.steps, self._ranks.number)
            return b""
        try:
            self._profiler.step()
            with self._profiling, ExitStack() as after:
                folder = scratch_folder("sample")
                after.callback(remove, folder)
                self._profiler.export_chrome_trace(str(folder / "trace.json"))
                data = self._reduce(folder / "trace.json")
        except Exception as error:  # must not end the training; the other ranks wait for this rank's bytes
            _log.warning("step %d: rank %d has no trace: %s", self.steps, self._ranks.number, error)
            return b""
        return data if len(data) * self._ranks.size <= MAX_BYTES else b""

    def _schedule_next(self, cost_ns: int) -> None:
        """Delay the next sample by the largest interval that any rank needs: all ranks must sample the same steps."""
        self.spent_ns += cost_ns
        ranks, step_ns = self._ranks, max(1, round(median(self._unprofiled_ns)))
        own_interval = torch.tensor([interval_for(cost_ns, step_ns, self._every)], device=ranks.device)
        intervals: Sequence[Any] = gather_tensor(own_interval, ranks.group) if ranks.size > 1 else [own_interval]
        self.interval = max(int(interval.item()) for interval in intervals)
        self._next = self.steps + self.interval
