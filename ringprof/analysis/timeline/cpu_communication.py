"""What a run on CPU processes communicates: the ranges of gloo and its like, and the time marked as blocked.

A collective's range (``gloo:all_reduce``) lasts from when a worker takes it up to its end, on the worker's own thread;
a send's or receive's from posting to the return of ``wait()``. ``c10d::allreduce_`` is the call that posts one, and
counts where there is no range. Where ``ringprof::wait`` marks the time that the rank was blocked, the ranges that end
in a mark are told by it.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.kinds import CODE
from ringprof.analysis.kinds.operators import kind_of_collective
from ringprof.trace.columns import Int8, Int64, Ranges, Trace, distinct

WAIT = re.compile(r"ringprof::wait\b.*")
_RANGE = re.compile(r"(?:gloo|mpi|ucc|xccl|nccl):(\w+)")
_POSTING = re.compile(r"c10d::(\w+)")


class CpuCommunication(msgspec.Struct, frozen=True):
    """Within some bounds."""

    blocked: Spans
    """Marked as blocked."""
    marks: int
    start_ns: Int64
    """Of the ranges that no mark tells."""
    end_ns: Int64
    kind: Int8
    """Index into `KINDS`."""

    @property
    def ranges(self) -> Spans:
        return intervals.union(self.start_ns, self.end_ns)

    def of(self, kind: str) -> Spans:
        rows = self.kind == CODE[kind]
        return intervals.union(self.start_ns[rows], self.end_ns[rows])


def find_communication(trace: Trace, first: int, last: int) -> CpuCommunication:
    """What is communicated between two times."""
    waits = marked_waits(trace)
    blocked = intervals.union(np.clip(waits.start_ns, first, last), np.clip(waits.end_ns, first, last))
    parts = [_ranges_of(trace, trace.annotations, _RANGE), _ranges_of(trace, trace.operators, _RANGE)]
    if not len(waits) and not any(len(start) for start, _, _ in parts):
        parts.append(_ranges_of(trace, trace.operators, _POSTING))
    start, end, kind = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    # Spans hold their beginnings and not their ends.
    own = intervals.contains(waits, end - 1)
    start, end = np.clip(start, first, last), np.clip(end, first, last)
    kept = ~own & (end > start)
    return CpuCommunication(blocked, len(waits), start[kept], end[kept], kind[kept].astype(np.int8))


def communication_bounds(trace: Trace) -> tuple[Int64, Int64]:
    """Return starts and ends of all ranges of communication and of waiting in a trace."""
    waits = marked_waits(trace)
    start, end, _ = _ranges_of(trace, trace.annotations, _RANGE)
    return np.append(start, waits.start_ns), np.append(end, waits.end_ns)


def marked_waits(trace: Trace) -> Spans:
    """The time that the trace marks as blocked in communication."""
    rows = trace.names_that(WAIT.fullmatch)[trace.annotations.name]
    return intervals.union(trace.annotations.start_ns[rows], trace.annotations.end_ns[rows])


def _ranges_of(trace: Trace, ranges: Ranges, pattern: re.Pattern[str]) -> tuple[Int64, Int64, Int64]:
    """Start, end and kind of the ranges whose names fit."""
    code = np.full(max(len(trace.names), 1), -1, np.int64)
    # On a GPU whose activities are not in the trace, these calls only launch what communicates.
    for index in distinct(ranges.name).tolist() if not trace.lacks_device else ():
        match = pattern.match(trace.names[index])
        if match and (kind := kind_of_collective(match[1])):
            code[index] = CODE[kind]
    found = code[ranges.name]
    rows = np.flatnonzero(found >= 0)
    return ranges.start_ns[rows], ranges.end_ns[rows], found[rows]
