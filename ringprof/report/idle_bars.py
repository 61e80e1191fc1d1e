"""Idle time as a timeline draws it: the stretches that are long enough to be seen, with their causes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.timeline.idle import HOST, IdleParts


class IdleBar(NamedTuple):
    """A part of an idle stretch; times in nanoseconds by the rank's own clock."""

    start_ns: int
    end_ns: int
    cause: str
    """Of most of its time, as the class and the name."""
    event_class: str
    name: str
    parts: int
    """Moments with causes of their own that it joins."""

    @property
    def label(self) -> str:
        """Cause, class and name as text: ``host, launch call: cudaLaunchKernel``."""
        label = f"{self.cause}, {self.event_class}" if self.cause == HOST else self.cause
        return f"{label}: {self.name}" if self.name else label


def idle_bars(parts: IdleParts, names: Sequence[str], shortest_ns: int = 0) -> Iterator[IdleBar]:
    """Draw the stretches of at least ``shortest_ns``; ``names`` are the trace's.

    Touching parts with the same cause, class and name are one bar. So are touching parts that are each shorter than
    ``shortest_ns``: such a bar has the cause that takes most of its time.
    """
    stretches = intervals.union(parts.start_ns, parts.end_ns)
    long = stretches.end_ns - stretches.start_ns >= shortest_ns
    seen = intervals.Spans(stretches.start_ns[long], stretches.end_ns[long])
    rows = np.flatnonzero(intervals.contains(seen, parts.start_ns))
    group: list[int] = []
    for row in rows.tolist():
        if group and not _joins(parts, group[-1], row, shortest_ns):
            yield _bar(parts, names, group)
            group = []
        group.append(row)
    if group:
        yield _bar(parts, names, group)


def _joins(parts: IdleParts, before: int, row: int, shortest_ns: int) -> bool:
    """Whether a part begins where the one before ends, and has the same cause or is as short."""
    if parts.start_ns[row] != parts.end_ns[before]:
        return False
    alike = all(column[row] == column[before] for column in (parts.cause, parts.event_class, parts.name))
    short = all(parts.end_ns[one] - parts.start_ns[one] < shortest_ns for one in (before, row))
    return alike or short


def _bar(parts: IdleParts, names: Sequence[str], group: Sequence[int]) -> IdleBar:
    times: dict[tuple[str, str, str], int] = {}
    for row in group:
        label = parts.label(row, names)
        times[label] = times.get(label, 0) + int(parts.end_ns[row] - parts.start_ns[row])
    cause, event_class, name = max(times, key=lambda label: times[label])
    return IdleBar(int(parts.start_ns[group[0]]), int(parts.end_ns[group[-1]]), cause, event_class, name, len(group))
