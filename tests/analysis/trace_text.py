"""Writer of synthetic Kineto traces as text, one rank each; times are whole nanoseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BASE_NS = 1_790_857_026_000_000_000
START_NS = 1_000_000
"""Offset of all times in nanoseconds, since readers reject times at or before 0."""
COPY_STREAM = 20


class TraceText:
    """Trace of one rank on one device, whose events are launched on thread 1 unless said otherwise."""

    def __init__(self, rank: int = 0, world_size: int = 1, device: int | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = rank if device is None else device
        self.shift_ns = 0
        """Added to all times: the clock of the rank's host."""
        self.rows: list[dict[str, Any]] = []
        self._correlation = 100

    def event(self, category: str, name: str, start: int, end: int, thread: int = 1, **args: Any) -> None:
        """Write one event, in microseconds with three digits."""
        times = {"ts": round((start + START_NS + self.shift_ns) / 1000, 3), "dur": round((end - start) / 1000, 3)}
        pid = args["device"] if "device" in args else 4000 + self.rank
        self.rows.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread, **times, "args": args})

    def range(self, name: str, start: int, end: int, thread: int = 1) -> None:
        self.event("user_annotation", name, start, end, thread)

    def operator(self, name: str, start: int, end: int, thread: int = 1) -> None:
        self.event("cpu_op", name, start, end, thread)

    def call(self, name: str, start: int, end: int, thread: int = 1, category: str = "cuda_runtime") -> int:
        """Write a CUDA call and return its correlation."""
        self._correlation += 1
        self.event(category, name, start, end, thread, correlation=self._correlation)
        return self._correlation

    def activity(self, category: str, name: str, start: int, end: int, stream: int = 7, **args: Any) -> None:
        self.event(category, name, start, end, stream, **{"device": self.device, "stream": stream, **args})

    def run(
        self, start: int, end: int, launched: tuple[int, int] | None, *, name: str = "gemm", category: str = "kernel",
        stream: int = 7, thread: int = 1,
    ) -> None:  # fmt: skip
        """Write an activity with its launch call, which is not recorded where ``launched`` is None."""
        joins = {} if launched is None else {"correlation": self.call("cudaLaunchKernel", *launched, thread)}
        self.activity(category, name, start, end, stream, **joins)

    def hop(
        self,
        channel: str,
        to_device: int,
        *copies: tuple[int, int, int, int],
        stream: int = COPY_STREAM,
        thread: int = 1,
    ) -> None:
        """Write a hop of copies, each as start and end of its launch call and of itself, in one annotation."""
        for called, returned, start, end in copies:
            joins = self.call("cudaMemcpyAsync", called, returned, thread)
            self.activity(
                "gpu_memcpy", "Memcpy PtoP (Device -> Device)", start, end, stream, correlation=joins, bytes=1 << 20,
                fromDevice=self.device, toDevice=to_device,
            )  # fmt: skip
        self.range(f"ringprof::send/{channel}", copies[0][0] - 1, copies[-1][1], thread)

    def text(self) -> str:
        own = {"backend": "nccl", "rank": self.rank, "world_size": self.world_size}
        head = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "displayTimeUnit": "ms", "distributedInfo": own}
        return json.dumps({**head, "traceEvents": self.rows})

    def write(self, folder: Path) -> None:
        (folder / f"rank{self.rank}.json").write_text(self.text())
