"""Communication of a run on CPU processes: the ranges of gloo and similar backends, and time marked as blocked.

The range of a collective (``gloo:all_reduce``) lasts from when a worker takes it up to its end, on the worker's own
thread. The range of a send or receive lasts from posting to the return of ``wait()``. ``c10d::allreduce_`` is the call
that posts a collective, and counts where there is no range. Where ``ringprof::wait`` marks the time that the rank was
blocked, the mark replaces the ranges that end inside it.
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
    """Communication of one CPU rank within given times."""

    blocked: Spans
    """Time marked as blocked in communication."""
    marks: int
    """Number of marks in the whole trace."""
    start_ns: Int64
    """Starts of the ranges that no mark replaces."""
    end_ns: Int64
    kind: Int8
    """Index into `KINDS`."""

    @property
    def ranges(self) -> Spans:
        """Union of the ranges that no mark replaces."""
        return intervals.union(self.start_ns, self.end_ns)

    def of(self, kind: str) -> Spans:
        """Return the union of these ranges of one kind."""
        rows = self.kind == CODE[kind]
        return intervals.union(self.start_ns[rows], self.end_ns[rows])


def find_communication(trace: Trace, start_ns: int, end_ns: int) -> CpuCommunication:
    """Return the communication between two times."""
    waits = marked_waits(trace)
    blocked = intervals.union(np.clip(waits.start_ns, start_ns, end_ns), np.clip(waits.end_ns, start_ns, end_ns))
    tables = [_ranges_of(trace, trace.annotations, _RANGE), _ranges_of(trace, trace.operators, _RANGE)]
    if not len(waits) and not any(len(start) for start, _, _ in tables):
        tables.append(_ranges_of(trace, trace.operators, _POSTING))
    start, end, kind = (np.concatenate(columns) for columns in zip(*tables, strict=True))
    # A span contains its start but not its end.
    ends_in_mark = intervals.contains(waits, end - 1)
    start, end = np.clip(start, start_ns, end_ns), np.clip(end, start_ns, end_ns)
    counted = ~ends_in_mark & (end > start)
    return CpuCommunication(blocked, len(waits), start[counted], end[counted], kind[counted].astype(np.int8))


def communication_bounds(trace: Trace) -> tuple[Int64, Int64]:
    """Return starts and ends of all communication and waiting ranges in a trace."""
    waits = marked_waits(trace)
    start, end, _ = _ranges_of(trace, trace.annotations, _RANGE)
    return np.append(start, waits.start_ns), np.append(end, waits.end_ns)


def marked_waits(trace: Trace) -> Spans:
    """Return the time that the trace marks as blocked in communication."""
    rows = trace.names_that(WAIT.fullmatch)[trace.annotations.name]
    return intervals.union(trace.annotations.start_ns[rows], trace.annotations.end_ns[rows])


def _ranges_of(trace: Trace, ranges: Ranges, pattern: re.Pattern[str]) -> tuple[Int64, Int64, Int64]:
    """Return start, end and kind of the ranges whose names match ``pattern`` and a communication call."""
    code = np.full(max(len(trace.names), 1), -1, np.int64)
    # In the trace of a GPU process without device activities, these calls only launch the communication.
    for index in distinct(ranges.name).tolist() if not trace.lacks_device else ():
        match = pattern.match(trace.names[index])
        if match and (kind := kind_of_collective(match[1])):
            code[index] = CODE[kind]
    kind_of_range = code[ranges.name]
    rows = np.flatnonzero(kind_of_range >= 0)
    return ranges.start_ns[rows], ranges.end_ns[rows], kind_of_range[rows]
