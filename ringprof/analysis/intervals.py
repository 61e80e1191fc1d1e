"""Sets of time as disjoint spans: union, intersection, subtraction and length, exact in int64 nanoseconds.

Spans are half-open, [start, end). Touching spans merge, and empty ones vanish.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ringprof.trace.columns import Int64


class Spans(msgspec.Struct, frozen=True):
    """Disjoint, non-empty, non-touching spans in ascending order: two int64 arrays of equal length."""

    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.start_ns)


NOTHING = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start_ns: Int64, end_ns: Int64) -> Spans:
    """Return the time covered by any of the intervals [start, end), which may overlap and be in any order.

    An interval that ends before it starts covers nothing.
    """
    nonempty = end_ns > start_ns
    start, end = start_ns[nonempty], end_ns[nonempty]
    if not len(start):
        return NOTHING
    order = np.argsort(start, kind="stable")
    start, latest_end = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate(([True], start[1:] > latest_end[:-1])))
    last = np.concatenate((first[1:], [len(start)])) - 1
    return Spans(start[first], latest_end[last])


def merged(*sets: Spans) -> Spans:
    """Return the time in any of the sets."""
    return union(np.concatenate([s.start_ns for s in sets]), np.concatenate([s.end_ns for s in sets]))


def intersection(a: Spans, b: Spans) -> Spans:
    """Return the time that is both in ``a`` and in ``b``."""
    return _pieces_in(a, b, wanted_in_b=True)


def subtraction(a: Spans, b: Spans) -> Spans:
    """Return the time in ``a`` and not in ``b``."""
    return _pieces_in(a, b, wanted_in_b=False)


def length_ns(spans: Spans) -> int:
    """Return the total time of the spans."""
    return int(np.sum(spans.end_ns - spans.start_ns))


def contains(spans: Spans, points_ns: Int64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return for each point whether it lies in one of the spans; shape as ``points_ns``."""
    if not len(spans):
        return np.zeros(len(points_ns), np.bool_)
    index = np.searchsorted(spans.start_ns, points_ns, side="right") - 1
    return (index >= 0) & (points_ns < spans.end_ns[index])


def covered_ns(spans: Spans, start_ns: Int64, end_ns: Int64) -> Int64:
    """Return how much of each interval [start, end) the spans cover, in nanoseconds."""
    result: Int64 = np.maximum(_covered_before(spans, end_ns) - _covered_before(spans, start_ns), 0)
    return result


def _covered_before(spans: Spans, points_ns: Int64) -> Int64:
    """Return how much time before each point the spans cover."""
    if not len(spans):
        return np.zeros(len(points_ns), np.int64)
    lengths = spans.end_ns - spans.start_ns
    covered_until = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    started = np.searchsorted(spans.start_ns, points_ns, side="right")
    last = np.maximum(started - 1, 0)
    beyond_point = np.where(started > 0, np.maximum(spans.end_ns[last] - points_ns, 0), 0)
    result: Int64 = covered_until[started] - beyond_point
    return result


def _pieces_in(a: Spans, b: Spans, *, wanted_in_b: bool) -> Spans:
    """Return the time in ``a`` that is in ``b``, or that is not in ``b``.

    Membership changes only at the edges of the spans, so each piece between two neighbouring edges is tested at its
    start.
    """
    # An edge of both sets makes a piece of no length, which the union drops.
    edges = np.sort(np.concatenate((a.start_ns, a.end_ns, b.start_ns, b.end_ns)))
    start, end = edges[:-1], edges[1:]
    keep = contains(a, start) & (contains(b, start) == wanted_in_b)
    return union(start[keep], end[keep])
