"""Builders of small traces as text, for tests of the reader."""

from __future__ import annotations

import json
from typing import Any

from tests.paths import DATA

REAL = (
    DATA / "h200x8-zigzag-131072" / "rank0.json.gz",
    DATA / "h200x8-zigzag-131072-two-hosts" / "rank1.json.gz",
)


def kernel(number: int, **changes: Any) -> dict[str, Any]:
    """Return event ``number`` of a series of kernels that are 100 µs apart and 50.25 µs long."""
    return {
        "ph": "X",
        "cat": "kernel",
        "name": f"k{number}",
        "pid": 0,
        "tid": 7,
        "ts": 1000.5 + 100 * number,
        "dur": 50.25,
        "args": {"device": 0, "stream": 7, "correlation": number},
        **changes,
    }


def document(events: list[dict[str, Any]], **fields: Any) -> bytes:
    """Return a trace of rank 3 of 8 with these events."""
    head = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}}
    return json.dumps({**head, **fields, "traceEvents": events}, indent=1).encode()


TEN = document([kernel(number) for number in range(10)])
"""Trace of ten kernels, k0 to k9; the fifth is k4."""
