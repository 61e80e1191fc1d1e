"""Split of one rank's exposed communication into wire time, waiting and unknown time.

An exposed instant is wire time where any of the rank's communication is on the wire. Otherwise it is unknown where wait
and wire of some running communication are not known, and else it is waiting. Where the device idles because of a peer's
copy-engine hop, the split of `ringprof.analysis.copy_waits` applies.
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
    """Exposed communication of one rank in three disjoint parts, which sum to all of it."""

    wire: Spans
    """Exposed time with bytes on the wire."""
    wait: Spans
    """Exposed time spent waiting for a peer."""
    unknown: Spans
    """Exposed time whose wait and wire cannot be separated."""
    wire_ns: int
    """All time with bytes on the wire in nanoseconds, hidden or exposed."""
    by_group: dict[tuple[str, str], int]
    """Exposed nanoseconds by (kind, process group). Groups may overlap in time."""

    @property
    def everything(self) -> Spans:
        """All exposed communication."""
        return intervals.merged(self.wire, self.wait, self.unknown)


def exposure_of(detail: Detail, rows: TimedActivities) -> Exposure:
    """Split a rank's exposed communication. Not for CPU ranks, where only its amount is known."""
    window = detail.window
    compute = intervals.merged(rows.spans(*COMPUTE), detail.background(rows).spans(*COMPUTE))
    timed = [part.transfer for part in detail.splits if part.wire_ns is not None]
    wire_ns = [part.wire_ns for part in detail.splits if part.wire_ns is not None]
    end = np.array([transfer.end_ns for transfer in timed], np.int64)
    start = end - np.array(wire_ns, np.int64)
    if window.between_ns:
        start, end = np.clip(start, *window.between_ns), np.clip(end, *window.between_ns)
    on_wire = intervals.union(start, end)
    communication = rows.of(*COMMUNICATION)
    untimed = communication & ~np.isin(rows.activity, [transfer.activity for transfer in timed])
    exposed = intervals.subtraction(rows.spans(*COMMUNICATION), compute)
    wire = intervals.intersection(exposed, on_wire)
    rest = intervals.subtraction(exposed, wire)
    unknown = intervals.intersection(rest, intervals.union(rows.start_ns[untimed], rows.end_ns[untimed]))
    rows_of_group: dict[tuple[str, str], list[int]] = {}
    for row in np.flatnonzero(communication).tolist():
        collectives = detail.classified.calls.get(int(rows.activity[row]), ())
        rows_of_group.setdefault((KINDS[rows.kind[row]], name_of_group(collectives)), []).append(row)
    by_group = {}
    for key, group_rows in rows_of_group.items():
        spans = intervals.union(rows.start_ns[group_rows], rows.end_ns[group_rows])
        by_group[key] = intervals.length_ns(intervals.subtraction(spans, compute))
    waiting = intervals.subtraction(rest, unknown)
    peer_blocks = [spans_of(detail.blocks, part) for part in ("wire", "wait", "unsplit")]
    wire, waiting, unknown = map(intervals.merged, (wire, waiting, unknown), peer_blocks)
    blocked_ns = sum(map(intervals.length_ns, peer_blocks))
    if blocked_ns:
        by_group["copy_engine", ""] = by_group.get(("copy_engine", ""), 0) + blocked_ns
    return Exposure(wire, waiting, unknown, intervals.length_ns(intervals.merged(on_wire, peer_blocks[0])), by_group)
