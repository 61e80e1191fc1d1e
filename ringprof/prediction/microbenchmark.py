"""One rank's device, with timing functions for calls and transfers on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, pstdev
from typing import Any

import msgspec
import torch
from torch import Tensor

from ringprof.dryrun.schedule import AttentionOp
from ringprof.ranks.process_group import gather_bytes

_SAMPLE_NS, _CALL_LIMITS = 40e6, (2, 24)
"""Minimum time measured per shape, and the minimum and maximum number of calls."""
_HEATING_NS, _LONG_CALL_NS = 300e6, 3e5
"""Heating time before a measurement, and the minimum length of a call that can heat the device.

The device must be as slow as in a long run. On an H200, cuDNN is an eighth faster right after an idle moment, and a
twentieth faster after a tenth of a second.
"""
_TRANSFER_CALLS = 11
_AHEAD_CYCLES = 10_000_000
"""Device cycles, some milliseconds, in which the host gets ahead."""


@dataclass
class Bench:
    """One rank's device and the means to measure on it."""

    device: torch.device
    rank: int = 0
    size: int = 1
    heater: tuple[Callable[[], object], float] | None = None
    """A long call and its nanoseconds; None means that nothing is heated."""

    def times_ns(self, body: Callable[[], object], calls: int, *, call_ns: float = 0.0) -> list[float]:
        """Time each of ``calls`` back-to-back calls; heat the device first if ``call_ns``, the time of a call, is
        given."""
        if self.device.type != "cuda":
            marks = [time.perf_counter_ns()]
            for _ in range(calls):
                body()
                marks.append(time.perf_counter_ns())
            return [float(b - a) for a, b in pairwise(marks)]
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]  # type: ignore[no-untyped-call]
        # While the device computes or sleeps, the host gets ahead. Otherwise small calls would measure the host.
        if call_ns and self.heater is not None:
            heating_call, heating_ns = (body, call_ns) if call_ns > _LONG_CALL_NS else self.heater
            for _ in range(int(_HEATING_NS / heating_ns)):
                heating_call()
        else:
            torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            body()
            event.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)]

    def typical_ns(self, body: Callable[[], object]) -> tuple[float, float, int]:
        """Return median, relative spread and count of the calls that fill the minimum time, after warm-up calls."""
        # The first call also chooses its algorithm and allocates memory, which may take a hundred times as long.
        first_ns = min(self.times_ns(body, 1)[0] for _ in range(2))
        calls = min(max(int(_SAMPLE_NS / max(first_ns, 1.0)), _CALL_LIMITS[0]), _CALL_LIMITS[1])
        times = self.times_ns(body, calls, call_ns=first_ns)
        typical = median(times)
        return typical, pstdev(times) / typical, calls

    def collective_ns(self, body: Callable[[], object]) -> float:
        """Return the median time of a transfer that all ranks make; the number of calls is the same on all."""
        self.times_ns(body, 2)
        return median(self.times_ns(body, _TRANSFER_CALLS))

    def gather(self, value: Any, type_: Any) -> list[Any]:
        """Return every rank's value."""
        if self.size == 1:
            return [value]
        return [
            msgspec.json.decode(encoded, type=type_)
            for encoded in gather_bytes(msgspec.json.encode(value), self.device)
        ]

    def random_tensor(self, *shape: int) -> Tensor:
        """Return a normally distributed bfloat16 tensor on the device."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)


def call_of(kernel: Any, block: AttentionOp, bench: Bench, blocks: Any = None) -> Callable[[], object]:
    """Return a call of the attention block, or of the ``blocks`` of a mask, on random inputs."""
    q = bench.random_tensor(block.batch, block.q, block.heads, block.head_dim)
    k, v = (bench.random_tensor(block.batch, block.kv, block.kv_heads, block.head_dim) for _ in range(2))
    options = {"scale": block.head_dim**-0.5, "causal": block.causal and blocks is None, "parts": blocks}
    if block.phase == "forward":
        return lambda: kernel.forward(q, k, v, **options)
    out, lse = kernel.forward(q, k, v, **options)
    dout = bench.random_tensor(*q.shape)
    return lambda: kernel.backward(dout, q, k, v, lse, out=out, **options)
