"""Streams: activities of one stream run one after another, and streams are distinguished."""

from __future__ import annotations

import json
from typing import Any

from ringprof.trace.columns import Trace
from ringprof.trace.kineto import parse_trace


def row(name: str, start_us: int, us: int, stream: int, category: str = "kernel") -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "correlation": start_us}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start_us, "dur": us, "args": args}


def parsed(*rows: dict[str, Any]) -> Trace:
    return parse_trace(json.dumps({"traceEvents": rows}).encode())


def test_pointer_stream_ids_are_distinguished():
    """Keep streams apart that are pointers, as ROCm writes them."""
    pointers = [94_023_481_122_816, 94_023_481_125_120, 94_023_481_122_816, 7, 0]
    streams = parsed(
        *(row("k", 10 * index, 5, pointer) for index, pointer in enumerate(pointers))
    ).activities.stream.tolist()
    assert streams[0] == streams[2] >= 0
    assert len(set(streams)) == 4
    assert streams[3:] == [7, 0]


def test_copy_overlapping_its_own_stream_is_a_warning():
    """Warn about a wrong duration: the copy lasts 3 s, but its stream continues after 5 us."""
    kernels = [row("gemm", 10 * index, 9, 7) for index in range(1, 21)]
    (warning,) = parsed(row("Memcpy DtoH", 0, 3_000_000, 7, "gpu_memcpy"), *kernels).warnings
    assert (warning.code, warning.count) == ("overlapping_kernels", 1)
    # The eighth kernel starts at 80 us.
    assert "2,999.920 ms longer" in warning.message


def test_work_of_other_streams_may_overlap():
    kernels = [row("gemm", 10 * index, 9, 7) for index in range(1, 21)]
    assert not parsed(row("Memcpy DtoH", 0, 3_000_000, 8, "gpu_memcpy"), *kernels).warnings
