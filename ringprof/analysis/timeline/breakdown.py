"""Breakdown of one rank's time into compute, exposed communication, exposed memory and idle, which sum to the wall."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.kinds import ATTENTION, COMMUNICATION, COMPUTE, COMPUTE_PARTS, KINDS, MEMORY, OTHER_GROUPS
from ringprof.analysis.timeline.rows import NO_ROWS, TimedActivities


class KindTime(msgspec.Struct, frozen=True):
    """Totals of all activities of one kind on one rank."""

    time_ns: int
    """Sum of durations; activities of different kinds may overlap."""
    calls: int
    hidden_ns: int | None
    """Communication kinds: time overlapped by computation. None for other kinds, and on CPU."""
    busy_ns: int
    """Union of the activities' intervals."""


class Breakdown(msgspec.Struct, frozen=True):
    """Breakdown of one device's time over one window, in nanoseconds.

    ``compute + exposed_comm + exposed_memory + idle == wall`` always holds. The sum also contains
    ``exposed_other_groups`` where the user chose one process group, and ``background`` where more ran than the window.
    See docs/metrics.md.
    """

    start_ns: int
    end_ns: int
    compute_ns: int
    comm_ns: int
    overlapped_ns: int | None
    """Communication that computation overlaps; None on CPU, where the ranges of a transfer prove no overlap."""
    exposed_comm_ns: int
    exposed_memory_ns: int
    idle_ns: int
    flash_ns: int
    """Union of the attention kernels' intervals."""
    kinds: dict[str, KindTime]
    """Totals of each kind that occurs, in the order of `KINDS`."""
    exposed_other_groups_ns: int = 0
    """Communication of other groups that neither computation nor the chosen group's communication overlaps. Nonzero
    only where the user chose a process group."""
    background_ns: int = 0
    """Time in which only activities outside the window run. Nonzero only where the window is part of what ran."""
    blocked_on_peer_ns: int = 0
    """Part of exposed communication: time in which the device ran nothing because of a peer's copy-engine hop."""
    beside_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """Compute time outside attention by `COMPUTE_PARTS`; the values sum to all compute time outside attention."""

    def __post_init__(self) -> None:
        parts = self.compute_ns + self.exposed_comm_ns + self.exposed_memory_ns + self.idle_ns
        parts += self.exposed_other_groups_ns + self.background_ns
        assert parts == self.wall_ns, f"parts {parts} ns, wall {self.wall_ns} ns"
        assert min(self.compute_ns, self.exposed_comm_ns, self.exposed_memory_ns, self.idle_ns, self.background_ns) >= 0

    @property
    def wall_ns(self) -> int:
        """Time from the start of the first activity to the end of the last."""
        return self.end_ns - self.start_ns

    def with_blocked(self, blocked: Spans) -> Breakdown:
        """Move idle time that was blocked on a peer to exposed communication; ``blocked`` lies in idle stretches."""
        edges = np.array([self.start_ns]), np.array([self.end_ns])
        moved = int(intervals.covered_ns(blocked, *edges)[0])
        return msgspec.structs.replace(
            self,
            exposed_comm_ns=self.exposed_comm_ns + moved,
            idle_ns=self.idle_ns - moved,
            blocked_on_peer_ns=self.blocked_on_peer_ns + moved,
        )

    @property
    def overlap_ratio(self) -> float | None:
        """Share of communication time that computation overlaps, 0..1; None without communication, and on CPU."""
        if self.overlapped_ns is None or not self.comm_ns:
            return None
        return self.overlapped_ns / self.comm_ns

    @property
    def exposed_comm_share(self) -> float:
        """Exposed communication over wall, 0..1."""
        return self.exposed_comm_ns / self.wall_ns if self.wall_ns else 0.0


def break_down(rows: TimedActivities, background: TimedActivities = NO_ROWS) -> Breakdown:
    """Break down the time of one device's activities, at least one, with what else ran meanwhile as background."""
    compute, comm = rows.spans(*COMPUTE), rows.spans(*COMMUNICATION)
    hidden_by = intervals.merged(compute, background.spans(*COMPUTE))
    exposed = intervals.subtraction(comm, hidden_by)
    all_comm = intervals.merged(comm, background.spans(*COMMUNICATION))
    other_groups = intervals.subtraction(rows.spans(OTHER_GROUPS), intervals.merged(hidden_by, all_comm))
    memory = intervals.subtraction(rows.spans(*MEMORY), intervals.merged(hidden_by, all_comm, other_groups))
    counted = sum(map(intervals.length_ns, (compute, exposed, other_groups, memory)))
    busy = intervals.length_ns(intervals.merged(rows.spans(*KINDS), background.spans(*KINDS)))
    start, end = int(rows.start_ns.min()), int(rows.end_ns.max())
    return Breakdown(
        start_ns=start,
        end_ns=end,
        compute_ns=intervals.length_ns(compute),
        comm_ns=intervals.length_ns(comm),
        overlapped_ns=intervals.length_ns(comm) - intervals.length_ns(exposed),
        exposed_comm_ns=intervals.length_ns(exposed),
        exposed_memory_ns=intervals.length_ns(memory),
        idle_ns=end - start - busy,
        flash_ns=intervals.length_ns(rows.spans(*ATTENTION)),
        kinds=_kind_times(rows, hidden_by),
        exposed_other_groups_ns=intervals.length_ns(other_groups),
        background_ns=busy - counted,
        beside_ns=beside_attention(lambda kinds: rows.spans(*kinds)),
    )


def beside_attention(spans_of: Callable[[tuple[str, ...]], Spans]) -> dict[str, int]:
    """Return the compute time outside attention by `COMPUTE_PARTS`; where parts overlap, the first gets the time."""
    covered, result = spans_of(ATTENTION), {}
    for part, kinds in COMPUTE_PARTS.items():
        with_part = intervals.merged(covered, spans_of(kinds))
        result[part] = intervals.length_ns(with_part) - intervals.length_ns(covered)
        covered = with_part
    return result


def _kind_times(rows: TimedActivities, compute: Spans) -> dict[str, KindTime]:
    """Return the totals of each kind that occurs; ``compute`` is what hides communication."""
    result = {}
    for name in KINDS:
        rows_of_kind = rows.of(name)
        if not rows_of_kind.any():
            continue
        start, end = rows.start_ns[rows_of_kind], rows.end_ns[rows_of_kind]
        hidden = int(np.sum(intervals.covered_ns(compute, start, end))) if name in COMMUNICATION else None
        busy = intervals.length_ns(intervals.union(start, end))
        result[name] = KindTime(int(np.sum(end - start)), len(start), hidden, busy)
    return result
