"""Each exposed instant of one rank's window as wire, as waiting, or as not known.

An instant of exposed communication is wire where any of the rank's communication is on the wire, else not known where
some of it has no wait and wire, else waiting. Where nothing runs on the device because of a peer's copy-engine hop, the
split of `ringprof.analysis.copy_waits` holds.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.groups import name_of_group
from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE, KINDS
from ringprof.analysis.rank import Detail
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.transfers.hops import spans_of


class Exposure(msgspec.Struct, frozen=True):
    """The parts of one rank's exposed communication: disjoint, and together all of it."""

    wire: Spans
    wait: Spans
    unknown: Spans
    wire_ns: int
    """All time with something on the wire, hidden or not."""
    by_group: dict[tuple[str, str], int]
    """Length of what is exposed of each kind and process group."""

    @property
    def everything(self) -> Spans:
        return intervals.merged(self.wire, self.wait, self.unknown)


def exposure_of(detail: Detail, rows: TimedActivities) -> Exposure:
    """Split a rank's exposed communication; not for CPU, where only its amount is known."""
    window = detail.window
    compute = intervals.merged(rows.spans(*COMPUTE), detail.background(rows).spans(*COMPUTE))
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
    waiting, by_group = intervals.subtraction(rest, unknown), _by_group(detail, rows, compute)
    blocked = [spans_of(detail.blocks, part) for part in ("wire", "wait", "unsplit")]
    wire, waiting, unknown = map(intervals.merged, (wire, waiting, unknown), blocked)
    idle_ns = sum(map(intervals.length_ns, blocked))
    if idle_ns:
        by_group["copy_engine", ""] = by_group.get(("copy_engine", ""), 0) + idle_ns
    return Exposure(wire, waiting, unknown, intervals.length_ns(intervals.merged(on_wire, blocked[0])), by_group)


def _by_group(detail: Detail, rows: TimedActivities, compute: Spans) -> dict[tuple[str, str], int]:
    """Exposed communication by kind and process group."""
    places: dict[tuple[str, str], list[int]] = {}
    calls = detail.classified.calls
    for place in np.flatnonzero(rows.of(*COMMUNICATION)).tolist():
        called = calls.get(int(rows.activity[place]), ())
        places.setdefault((KINDS[rows.kind[place]], name_of_group(called)), []).append(place)
    result = {}
    for key, mine in places.items():
        spans = intervals.union(rows.start_ns[mine], rows.end_ns[mine])
        result[key] = intervals.length_ns(intervals.subtraction(spans, compute))
    return result
