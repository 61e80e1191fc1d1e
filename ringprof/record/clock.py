"""Timing one iteration after another, without the profiler: all ranks start together, and the start is not counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class CpuClock:
    """Runs bodies behind a barrier and keeps how long each took on this rank, by the host's monotonic clock."""

    def __init__(self) -> None:
        self._times: list[int] = []

    def run(self, body: Callable[[], object]) -> None:
        """Wait for all ranks, then run ``body``."""
        dist.barrier()
        start = time.perf_counter_ns()
        body()
        self._times.append(time.perf_counter_ns() - start)

    def times_ns(self) -> list[int]:
        """The time of every body so far, in nanoseconds; waits for the device."""
        return list(self._times)


class CudaClock:
    """As `CpuClock`, by CUDA events on the current stream, around the body and behind a barrier on the device.

    The barrier is a tiny all-reduce: the start event is recorded when it is over, so its cost and the ranks' skew are
    excluded. The host stays one body ahead of the device, as it does in training, and no more.
    """

    def __init__(self, device: torch.device) -> None:
        self._token = torch.zeros(1, device=device)
        self._events: list[tuple[Any, Any]] = []

    def run(self, body: Callable[[], object]) -> None:
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        dist.all_reduce(self._token)
        start.record()
        body()
        end.record()
        if self._events:
            self._events[-1][1].synchronize()
        self._events.append((start, end))

    def times_ns(self) -> list[int]:
        torch.cuda.synchronize()
        return [round(start.elapsed_time(end) * 1e6) for start, end in self._events]


def clock_for(device: torch.device) -> CpuClock | CudaClock:
    """A fresh clock for the device that the ranks compute on."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
