"""Slow, simple reference for a breakdown: a sweep over the edges of all events, with the open events between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

CLASSES = ("compute", "comm", "memory")


def sweep(events: Iterable[tuple[int, int, str]]) -> dict[str, int]:
    """Figures of a breakdown from (start, end, class) in whole nanoseconds."""
    events = list(events)
    edges = sorted({edge for start, end, _ in events for edge in (start, end)})
    opening: Counter[tuple[int, str]] = Counter()
    closing: Counter[tuple[int, str]] = Counter()
    for start, end, name in events:
        opening[start, name] += 1
        closing[end, name] += 1
    open_now = dict.fromkeys(CLASSES, 0)
    result = dict.fromkeys(("compute", "comm", "overlapped", "exposed_comm", "exposed_memory", "idle"), 0)
    for here, following in pairwise(edges):
        for name in CLASSES:
            open_now[name] += opening[here, name] - closing[here, name]
        span = following - here
        compute, comm, memory = (open_now[name] > 0 for name in CLASSES)
        result["compute"] += span * compute
        result["comm"] += span * comm
        result["overlapped"] += span * (compute and comm)
        result["exposed_comm"] += span * (comm and not compute)
        result["exposed_memory"] += span * (memory and not compute and not comm)
        result["idle"] += span * (not compute and not comm and not memory)
    result["wall"] = edges[-1] - edges[0]
    return result
