"""Of one rank's window: its activities as spans, and each exposed instant as wire, as waiting, or as not known.

An instant of exposed communication is wire where any of the rank's communication is on the wire, else not known where
some of it has no wait and wire, else waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.rules import CODE, COMMUNICATION, COMPUTE
from ringprof.analysis.rank import Detail
from ringprof.trace.columns import Int64


@dataclass(frozen=True)
class Rows:
    """The activities that a rank's breakdown is of."""

    activity: Int64
    """Indices into ``trace.activities``, ascending."""
    start_ns: Int64
    end_ns: Int64
    """Cut where the window is."""
    kind: npt.NDArray[np.int8]
    """Index into `KINDS`."""

    def of(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Whether each is one of these kinds."""
        return np.isin(self.kind, [CODE[kind] for kind in kinds])

    def spans(self, *kinds: str) -> Spans:
        """The time in which any activity of these kinds runs."""
        rows = self.of(*kinds)
        return intervals.union(self.start_ns[rows], self.end_ns[rows])


@dataclass(frozen=True)
class Exposure:
    """The parts of one rank's exposed communication: disjoint, and together all of it."""

    wire: Spans
    wait: Spans
    unknown: Spans
    wire_ns: int
    """All time with something on the wire, hidden or not."""

    @property
    def everything(self) -> Spans:
        return intervals.merged(self.wire, self.wait, self.unknown)


def rows_of(detail: Detail) -> Rows:
    """The activities of a rank's window on the device that is reported; none on CPU."""
    columns, window = detail.classified.trace.activities, detail.window
    activity = window.activities()
    start, end = columns.start_ns[activity], columns.end_ns[activity]
    if window.between_ns:
        first, last = window.between_ns
        inside = (start < last) & (end > first)
        activity, start, end = activity[inside], np.maximum(start[inside], first), np.minimum(end[inside], last)
    devices, counts = np.unique(columns.device[activity], return_counts=True)
    if len(devices) > 1:
        mine = columns.device[activity] == devices[np.argmax(counts)]
        activity, start, end = activity[mine], start[mine], end[mine]
    return Rows(activity, start, np.maximum(end, start), detail.classified.kind[activity])


def exposure_of(detail: Detail, rows: Rows) -> Exposure:
    """Split a rank's exposed communication; not for CPU, where only its amount is known."""
    window = detail.window
    compute = rows.spans(*COMPUTE)
    timed = [part.transfer for part in detail.splits if part.wire_ns is not None]
    size = [part.wire_ns for part in detail.splits if part.wire_ns is not None]
    end = np.array([transfer.end_ns for transfer in timed], np.int64)
    start = end - np.array(size, np.int64)
    if window.between_ns:
        start, end = np.clip(start, *window.between_ns), np.clip(end, *window.between_ns)
    on_wire = intervals.union(start, end)
    communication = rows.of(*COMMUNICATION)
    untimed = communication & ~np.isin(rows.activity, [transfer.activity for transfer in timed])
    everything = intervals.subtraction(rows.spans(*COMMUNICATION), compute)
    wire = intervals.intersection(everything, on_wire)
    rest = intervals.subtraction(everything, wire)
    unknown = intervals.intersection(rest, intervals.union(rows.start_ns[untimed], rows.end_ns[untimed]))
    return Exposure(wire, intervals.subtraction(rest, unknown), unknown, intervals.length_ns(on_wire))
