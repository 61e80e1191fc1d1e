"""Idle time as bars of a timeline: the stretches that are long enough to be visible, with their causes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.timeline.idle import HOST, IdleParts


class IdleBar(NamedTuple):
    """A part of an idle stretch; times are in nanoseconds of the rank's own clock."""

    start_ns: int
    end_ns: int
    cause: str
    """Cause of most of the bar's time; `event_class` and `name` belong to the same cause."""
    event_class: str
    name: str
    parts: int
    """Number of idle parts, each with a cause of its own, that the bar joins."""

    @property
    def label(self) -> str:
        """Cause, class and name as text: ``host, launch call: cudaLaunchKernel``."""
        label = f"{self.cause}, {self.event_class}" if self.cause == HOST else self.cause
        return f"{label}: {self.name}" if self.name else label


def idle_bars(parts: IdleParts, names: Sequence[str], shortest_ns: int = 0) -> Iterator[IdleBar]:
    """Generate bars for the idle stretches of at least ``shortest_ns``; ``names`` are the names in the trace.

    Touching parts with the same cause, class and name form one bar. Touching parts that are each shorter than
    ``shortest_ns`` also form one bar, with the cause that takes most of its time.
    """
    stretches = intervals.union(parts.start_ns, parts.end_ns)
    is_long = stretches.end_ns - stretches.start_ns >= shortest_ns
    visible = intervals.Spans(stretches.start_ns[is_long], stretches.end_ns[is_long])
    rows = np.flatnonzero(intervals.contains(visible, parts.start_ns))
    group: list[int] = []
    for row in rows.tolist():
        if group and not _can_join(parts, group[-1], row, shortest_ns):
            yield _bar(parts, names, group)
            group = []
        group.append(row)
    if group:
        yield _bar(parts, names, group)


def _can_join(parts: IdleParts, previous: int, row: int, shortest_ns: int) -> bool:
    """Return whether a part starts where the previous one ends and has the same cause, or both are short."""
    if parts.start_ns[row] != parts.end_ns[previous]:
        return False
    same_cause = all(column[row] == column[previous] for column in (parts.cause, parts.event_class, parts.name))
    both_short = all(parts.end_ns[index] - parts.start_ns[index] < shortest_ns for index in (previous, row))
    return same_cause or both_short


def _bar(parts: IdleParts, names: Sequence[str], group: Sequence[int]) -> IdleBar:
    """Draw consecutive rows of ``parts`` as one bar, labelled by the label with the largest total time."""
    times: dict[tuple[str, str, str], int] = {}
    for row in group:
        label = parts.label(row, names)
        times[label] = times.get(label, 0) + int(parts.end_ns[row] - parts.start_ns[row])
    cause, event_class, name = max(times, key=lambda label: times[label])
    return IdleBar(int(parts.start_ns[group[0]]), int(parts.end_ns[group[-1]]), cause, event_class, name, len(group))
