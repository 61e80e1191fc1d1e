"""What a rank's CPU threads did, for the merged trace: named ranges, launches of device work, on CPU its operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ringprof.analysis.rank import Detail
from ringprof.report.text import clean
from ringprof.report.trace_event import Lanes, TraceEvent, arrow_end, named, slice_of
from ringprof.trace.columns import NONE, Int64, Ranges, Trace

THREADS, LANES = 10_000_000, 10_000
"""Track numbers: of a rank's first thread, and what is added for each further lane of a thread."""
LAUNCH = "launch"


class _Call(NamedTuple):
    """Something on a CPU thread; times by the rank's own clock."""

    start_ns: int
    end_ns: int
    thread: int
    name: str
    launched: tuple[int, ...] = ()
    """Activities to draw an arrow to: not those that seem to begin before they are launched."""


def ranges_and_operators(detail: Detail) -> list[_Call]:
    """What ran on a rank whose device is the CPU, within its window."""
    trace, window = detail.classified.trace, detail.cpu_iterations
    first, last = min(part.start_ns for part in window), max(part.end_ns for part in window)
    return [*_ranges(trace, trace.annotations, first, last), *_ranges(trace, trace.operators, first, last)]


def ranges_and_launches(detail: Detail) -> list[_Call]:
    """What launched the activities of a rank's window, and the named ranges at that time."""
    trace, launches = detail.classified.trace, detail.classified.trace.launches
    activities = detail.rows().activity
    launch = detail.classified.launch[activities]
    activities, launch = activities[launch != NONE], launch[launch != NONE]
    if not len(launch):
        return []
    first, last = int(launches.start_ns[launch].min()), int(launches.end_ns[launch].max())
    return [*_ranges(trace, trace.annotations, first, last), *_launches(trace, activities, launch)]


def first_launch_ns(detail: Detail) -> int | None:
    """When the first activity of a rank's window was launched; None where no launch is known."""
    launch = detail.classified.launch[detail.rows().activity]
    return min(detail.classified.trace.launches.start_ns[launch[launch != NONE]].tolist(), default=None)


def _ranges(trace: Trace, ranges: Ranges, first: int, last: int) -> Iterator[_Call]:
    inside = np.flatnonzero((ranges.start_ns < last) & (ranges.end_ns > first))
    columns = (ranges.start_ns, ranges.end_ns, ranges.thread, ranges.name)
    for start, end, thread, name in zip(*(column[inside].tolist() for column in columns), strict=True):
        yield _Call(max(start, first), min(end, last), thread, trace.names[name])


def _launches(trace: Trace, activities: Int64, launch: Int64) -> Iterator[_Call]:
    """``activities`` and the ``launch`` of each."""
    made: dict[int, list[int]] = {}
    for activity, at in zip(activities.tolist(), launch.tolist(), strict=True):
        made.setdefault(at, []).append(activity)
    columns, launches = trace.activities, trace.launches
    for at, mine in made.items():
        start, first = int(launches.start_ns[at]), trace.names[columns.name[mine[0]]]
        name = f"launch of {first}" + (f" and {len(mine) - 1} more" if len(mine) > 1 else "")
        later = tuple(activity for activity in mine if columns.start_ns[activity] >= start)
        yield _Call(start, int(launches.end_ns[at]), int(launches.thread[at]), name, later)


def drawn(rank: int, calls: Iterable[_Call], origin: int) -> Iterator[TraceEvent]:
    """The calls of one rank, a track a thread, each with the start of the arrows to what it launched."""
    threads: dict[int, tuple[int, Lanes]] = {}
    known: set[int] = set()
    for call in sorted(calls, key=lambda call: (call.start_ns, -call.end_ns)):
        number, lanes = threads.setdefault(call.thread, (len(threads), Lanes(nested=True)))
        track = THREADS + number + LANES * lanes.place(call.start_ns, call.end_ns)
        if track not in known:
            known.add(track)
            yield named("thread_name", rank, track, name=f"CPU thread {call.thread}")
        start = call.start_ns - origin
        yield slice_of(rank, track, clean(call.name), start, call.end_ns - origin)
        for activity in call.launched:
            yield arrow_end("s", LAUNCH, arrow_number(rank, activity), rank, track, start)


def arrow_number(rank: int, activity: int) -> int:
    """Of the arrow from an activity's launch: another for each activity of each rank."""
    return (rank << 32) + activity
