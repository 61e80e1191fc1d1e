"""Clocks for iterations without the profiler: all ranks start together, and the barrier is not counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class CpuClock:
    """Host clock that runs functions behind a barrier and keeps how long each took on this rank (monotonic clock)."""

    def __init__(self) -> None:
        self._times: list[int] = []

    def run(self, body: Callable[[], object]) -> None:
        """Wait for all ranks, then run ``body``."""
        dist.barrier()
        start = time.perf_counter_ns()
        body()
        self._times.append(time.perf_counter_ns() - start)

    def times_ns(self) -> list[int]:
        """Return the duration of every function that has run, in nanoseconds, in the order of the calls."""
        return list(self._times)


class CudaClock:
    """GPU clock that times functions with CUDA events on the current stream, behind a barrier on the device.

    The barrier is a tiny all-reduce. The start event is recorded after it, so that its cost and the skew between the
    ranks are excluded. The host stays one function ahead of the device, as it does in training, and no more.
    """

    def __init__(self, device: torch.device) -> None:
        self._barrier_tensor = torch.zeros(1, device=device)
        self._events: list[tuple[Any, Any]] = []

    def run(self, body: Callable[[], object]) -> None:
        """Launch ``body`` behind the barrier; wait for the function before it."""
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        dist.all_reduce(self._barrier_tensor)
        start.record()
        body()
        end.record()
        if self._events:
            self._events[-1][1].synchronize()
        self._events.append((start, end))

    def times_ns(self) -> list[int]:
        """Wait for the device and return the time of every function that has run, in nanoseconds."""
        torch.cuda.synchronize()
        return [round(start.elapsed_time(end) * 1e6) for start, end in self._events]


def clock_for(device: torch.device) -> CpuClock | CudaClock:
    """Create a clock for the device that the ranks compute on."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
