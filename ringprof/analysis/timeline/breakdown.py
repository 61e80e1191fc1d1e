"""Where one rank's time went: compute, exposed communication, exposed memory and idle, which sum to the wall."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.rules import CODE, COMMUNICATION, COMPUTE, KINDS, MEMORY, OTHER_GROUPS
from ringprof.trace.columns import Int64


@dataclass(frozen=True)
class KindTime:
    """All activities of one kind on one rank."""

    time_ns: int
    """Sum of their durations; kinds may overlap."""
    calls: int
    hidden_ns: int | None
    """Of a communication kind: how much of that time computation ran beside it. None for other kinds, and on CPU."""


@dataclass(frozen=True)
class Breakdown:
    """One device over one window, in nanoseconds.

    Always ``compute + exposed_comm + exposed_memory + idle == wall``, with ``exposed_other_groups`` on the left where
    one process group was asked for; see docs/definitions.md.
    """

    start_ns: int
    end_ns: int
    compute_ns: int
    comm_ns: int
    overlapped_ns: int | None
    """Communication with computation beside it; None on CPU, where the ranges of a transfer prove no overlap."""
    exposed_comm_ns: int
    exposed_memory_ns: int
    idle_ns: int
    flash_ns: int
    """Union of the attention kernels' intervals."""
    kinds: dict[str, KindTime]
    """Kinds that occur, in the order of `KINDS`."""
    exposed_other_groups_ns: int = 0
    """Where one process group was asked for: communication of others with neither computation nor the group's own
    communication beside it."""

    def __post_init__(self) -> None:
        parts = self.compute_ns + self.exposed_comm_ns + self.exposed_memory_ns + self.idle_ns
        parts += self.exposed_other_groups_ns
        assert parts == self.wall_ns, f"parts {parts} ns, wall {self.wall_ns} ns"
        assert min(self.compute_ns, self.exposed_comm_ns, self.exposed_memory_ns, self.idle_ns) >= 0

    @property
    def wall_ns(self) -> int:
        """From the start of the first activity to the end of the last."""
        return self.end_ns - self.start_ns

    @property
    def overlap_ratio(self) -> float | None:
        """Share of communication time that computation covers, 0..1; None without communication, and on CPU."""
        if self.overlapped_ns is None or not self.comm_ns:
            return None
        return self.overlapped_ns / self.comm_ns

    @property
    def exposed_comm_share(self) -> float:
        """Exposed communication over wall, 0..1."""
        return self.exposed_comm_ns / self.wall_ns if self.wall_ns else 0.0


def break_down(classified: Classified, activities: Int64, between_ns: tuple[int, int] | None = None) -> Breakdown:
    """The breakdown of one device's activities (indices into the trace's, not empty), cut at two times where given."""
    start, end = _times(classified, activities, between_ns)
    kind = classified.kind[activities]
    compute = _spans(start, end, kind, COMPUTE)
    comm = _spans(start, end, kind, COMMUNICATION)
    others = _spans(start, end, kind, (OTHER_GROUPS,))
    memory = _spans(start, end, kind, MEMORY)
    computing_or_sending = intervals.merged(compute, comm)
    before_memory = intervals.merged(computing_or_sending, others)
    first, last = int(start.min()), int(end.max())
    busy = intervals.length_ns(intervals.merged(before_memory, memory))
    comm_ns, compute_ns = intervals.length_ns(comm), intervals.length_ns(compute)
    exposed_ns = intervals.length_ns(computing_or_sending) - compute_ns
    return Breakdown(
        start_ns=first,
        end_ns=last,
        compute_ns=compute_ns,
        comm_ns=comm_ns,
        overlapped_ns=comm_ns - exposed_ns,
        exposed_comm_ns=exposed_ns,
        # Each union holds the one before it, so their differences are what each part adds.
        exposed_memory_ns=busy - intervals.length_ns(before_memory),
        idle_ns=last - first - busy,
        flash_ns=intervals.length_ns(_spans(start, end, kind, ("flash_fwd", "flash_bwd"))),
        kinds=_kind_times(start, end, kind, compute),
        exposed_other_groups_ns=intervals.length_ns(before_memory) - intervals.length_ns(computing_or_sending),
    )


def wall_of(classified: Classified, activities: Int64, between_ns: tuple[int, int] | None = None) -> int:
    """The wall alone of that breakdown, in nanoseconds."""
    start, end = _times(classified, activities, between_ns)
    return int(end.max()) - int(start.min())


def _times(classified: Classified, activities: Int64, between_ns: tuple[int, int] | None) -> tuple[Int64, Int64]:
    start = classified.trace.activities.start_ns[activities]
    end = np.maximum(classified.trace.activities.end_ns[activities], start)
    if between_ns:
        start, end = np.clip(start, *between_ns), np.clip(end, *between_ns)
    return start, end


def _spans(start: Int64, end: Int64, kind: np.ndarray, kinds: tuple[str, ...]) -> Spans:
    rows = np.isin(kind, [CODE[name] for name in kinds])
    return intervals.union(start[rows], end[rows])


def _kind_times(start: Int64, end: Int64, kind: np.ndarray, compute: Spans) -> dict[str, KindTime]:
    result = {}
    for name in KINDS:
        rows = kind == CODE[name]
        if not rows.any():
            continue
        hidden = None
        if name in COMMUNICATION:
            hidden = int(np.sum(intervals.covered_ns(compute, start[rows], end[rows])))
        result[name] = KindTime(int(np.sum(end[rows] - start[rows])), int(np.count_nonzero(rows)), hidden)
    return result
