"""A rank's device, and how long things take on it."""

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

from ringprof.record.dryrun.schedule import AttentionOp
from ringprof.record.process_group import gather_bytes

_SAMPLE_NS, _CALLS = 40e6, (2, 24)
"""Least time that is measured of a shape, and the fewest and the most calls."""
_HOT_NS, _LONG_NS = 300e6, 3e5
"""How long a device computes before it is as slow as in a long run (on an H200 cuDNN is an eighth faster right after an
idle moment, a twentieth after a tenth of a second); and a call that is long enough to heat it."""
_TRANSFERS = 11
_AHEAD_CYCLES = 10_000_000
"""Of the device: some milliseconds."""


@dataclass
class Bench:
    """One rank's device, and what it takes to measure on it."""

    device: torch.device
    rank: int = 0
    size: int = 1
    heater: tuple[Callable[[], object], float] | None = None
    """A long call and its nanoseconds; None: nothing is heated."""

    def times_ns(self, body: Callable[[], object], calls: int, *, heated_by: float = 0.0) -> list[float]:
        """Each of ``calls`` calls, back to back; on a hot device where it is told what a call takes, ``heated_by``."""
        if self.device.type != "cuda":
            marks = [time.perf_counter_ns()]
            for _ in range(calls):
                body()
                marks.append(time.perf_counter_ns())
            return [float(b - a) for a, b in pairwise(marks)]
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]  # type: ignore[no-untyped-call]
        # While the device is at work, or sleeps, the host gets ahead: else small calls would take the host's time.
        if heated_by and self.heater is not None:
            heat, ns = (body, heated_by) if heated_by > _LONG_NS else self.heater
            for _ in range(int(_HOT_NS / ns)):
                heat()
        else:
            torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            body()
            event.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)]

    def typical_ns(self, body: Callable[[], object]) -> tuple[float, float, int]:
        """Median, relative spread and count, of as many calls as fill some time, after some that do not count."""
        # A first call also chooses its algorithm and makes room, which may take a hundred times as long.
        once = min(self.times_ns(body, 1)[0] for _ in range(2))
        calls = min(max(int(_SAMPLE_NS / max(once, 1.0)), _CALLS[0]), _CALLS[1])
        taken = self.times_ns(body, calls, heated_by=once)
        middle = median(taken)
        return middle, pstdev(taken) / middle, calls

    def together_ns(self, body: Callable[[], object]) -> float:
        """Median of a transfer that all ranks make, of as many calls on each."""
        self.times_ns(body, 2)
        return median(self.times_ns(body, _TRANSFERS))

    def together(self, part: Any, kind: Any) -> list[Any]:
        """What every rank found."""
        if self.size == 1:
            return [part]
        return [msgspec.json.decode(one, type=kind) for one in gather_bytes(msgspec.json.encode(part), self.device)]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)


def call_of(kernel: Any, block: AttentionOp, bench: Bench, parts: Any = None) -> Callable[[], object]:
    """A call of the block, or of its ``parts``, on random numbers."""
    q = bench.draw(block.batch, block.q, block.heads, block.head_dim)
    k, v = (bench.draw(block.batch, block.kv, block.kv_heads, block.head_dim) for _ in range(2))
    how = {"scale": block.head_dim**-0.5, "causal": block.causal and parts is None, "parts": parts}
    if block.phase == "forward":
        return lambda: kernel.forward(q, k, v, **how)
    out, lse = kernel.forward(q, k, v, **how)
    dout = bench.draw(*q.shape)
    return lambda: kernel.backward(dout, q, k, v, lse, out=out, **how)
