"""Where one rank's time went: compute, exposed communication, exposed memory and idle, which sum to the wall."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.kinds import ATTENTION, COMMUNICATION, COMPUTE, COMPUTE_PARTS, KINDS, MEMORY, OTHER_GROUPS
from ringprof.analysis.timeline.rows import NO_ROWS, TimedActivities


class KindTime(msgspec.Struct, frozen=True):
    """All activities of one kind on one rank."""

    time_ns: int
    """Sum of their durations; kinds may overlap."""
    calls: int
    hidden_ns: int | None
    """Of a communication kind: how much of that time computation ran beside it. None for other kinds, and on CPU."""
    busy_ns: int
    """Time in which at least one of them runs: the union of their intervals."""


class Breakdown(msgspec.Struct, frozen=True):
    """One device over one window, in nanoseconds.

    Always ``compute + exposed_comm + exposed_memory + idle == wall``, with ``exposed_other_groups`` on the left where
    one process group was asked for, and ``background`` where more ran than the window; see docs/metrics.md.
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
    background_ns: int = 0
    """Where the window is a part of what ran: time in which the rest runs and nothing of the window counts."""
    blocked_on_peer_ns: int = 0
    """Of exposed communication: time in which nothing ran on the device because of a peer's copy-engine hop."""
    beside_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """What is computed beside attention, by `COMPUTE_PARTS`, whose sum is the compute that is not attention."""

    def __post_init__(self) -> None:
        parts = self.compute_ns + self.exposed_comm_ns + self.exposed_memory_ns + self.idle_ns
        parts += self.exposed_other_groups_ns + self.background_ns
        assert parts == self.wall_ns, f"parts {parts} ns, wall {self.wall_ns} ns"
        assert min(self.compute_ns, self.exposed_comm_ns, self.exposed_memory_ns, self.idle_ns, self.background_ns) >= 0

    @property
    def wall_ns(self) -> int:
        """From the start of the first activity to the end of the last."""
        return self.end_ns - self.start_ns

    def with_blocked(self, blocked: Spans) -> Breakdown:
        """Count idle time that was blocked on a peer as exposed communication; ``blocked`` lies in idle stretches."""
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
        """Share of communication time that computation covers, 0..1; None without communication, and on CPU."""
        if self.overlapped_ns is None or not self.comm_ns:
            return None
        return self.overlapped_ns / self.comm_ns

    @property
    def exposed_comm_share(self) -> float:
        """Exposed communication over wall, 0..1."""
        return self.exposed_comm_ns / self.wall_ns if self.wall_ns else 0.0


def break_down(rows: TimedActivities, background: TimedActivities = NO_ROWS) -> Breakdown:
    """The breakdown of one device's activities, of which there is one at least, beside what else ran meanwhile."""
    compute, comm = rows.spans(*COMPUTE), rows.spans(*COMMUNICATION)
    hidden_by = intervals.merged(compute, background.spans(*COMPUTE))
    exposed = intervals.subtraction(comm, hidden_by)
    any_comm = intervals.merged(comm, background.spans(*COMMUNICATION))
    others = intervals.subtraction(rows.spans(OTHER_GROUPS), intervals.merged(hidden_by, any_comm))
    memory = intervals.subtraction(rows.spans(*MEMORY), intervals.merged(hidden_by, any_comm, others))
    counted = sum(map(intervals.length_ns, (compute, exposed, others, memory)))
    busy = intervals.length_ns(intervals.merged(rows.spans(*KINDS), background.spans(*KINDS)))
    first, last = int(rows.start_ns.min()), int(rows.end_ns.max())
    return Breakdown(
        start_ns=first,
        end_ns=last,
        compute_ns=intervals.length_ns(compute),
        comm_ns=intervals.length_ns(comm),
        overlapped_ns=intervals.length_ns(comm) - intervals.length_ns(exposed),
        exposed_comm_ns=intervals.length_ns(exposed),
        exposed_memory_ns=intervals.length_ns(memory),
        idle_ns=last - first - busy,
        flash_ns=intervals.length_ns(rows.spans(*ATTENTION)),
        kinds=_kind_times(rows, hidden_by),
        exposed_other_groups_ns=intervals.length_ns(others),
        background_ns=busy - counted,
        beside_ns=beside_attention(lambda kinds: rows.spans(*kinds)),
    )


def beside_attention(spans_of: Callable[[tuple[str, ...]], Spans]) -> dict[str, int]:
    """Each instant of computation without attention as one of `COMPUTE_PARTS`, the first that runs in it."""
    covered, result = spans_of(ATTENTION), {}
    for part, kinds in COMPUTE_PARTS.items():
        wider = intervals.merged(covered, spans_of(kinds))
        result[part] = intervals.length_ns(wider) - intervals.length_ns(covered)
        covered = wider
    return result


def _kind_times(rows: TimedActivities, compute: Spans) -> dict[str, KindTime]:
    result = {}
    for name in KINDS:
        mine = rows.of(name)
        if not mine.any():
            continue
        start, end = rows.start_ns[mine], rows.end_ns[mine]
        hidden = int(np.sum(intervals.covered_ns(compute, start, end))) if name in COMMUNICATION else None
        busy = intervals.length_ns(intervals.union(start, end))
        result[name] = KindTime(int(np.sum(end - start)), len(start), hidden, busy)
    return result
