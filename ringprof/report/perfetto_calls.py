"""CPU threads of a rank in the merged trace: named ranges, launches of device work, and a CPU rank's operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ringprof.analysis.rank import Detail
from ringprof.report.text import clean
from ringprof.report.trace_event import Lanes, TraceEvent, arrow_event, metadata_event, slice_event
from ringprof.trace.columns import NONE, Int64, Ranges, Trace

FIRST_THREAD_TRACK, TRACKS_PER_LANE = 10_000_000, 10_000
"""Track number of a rank's first thread, and the amount added for each further lane of a thread."""
LAUNCH = "launch"


class _Call(NamedTuple):
    """A call or range on a CPU thread; times are in nanoseconds of the rank's own clock."""

    start_ns: int
    end_ns: int
    thread: int
    name: str
    launched: tuple[int, ...] = ()
    """Activities to draw an arrow to; those that seem to start before their launch are left out."""


def ranges_and_operators(detail: Detail) -> list[_Call]:
    """List the named ranges and operators within the window of a rank that runs on CPU."""
    trace, iterations = detail.classified.trace, detail.cpu_iterations
    first, last = min(iteration.start_ns for iteration in iterations), max(iteration.end_ns for iteration in iterations)
    return [
        *_clipped_ranges(trace, trace.annotations, first, last),
        *_clipped_ranges(trace, trace.operators, first, last),
    ]


def ranges_and_launches(detail: Detail) -> list[_Call]:
    """List the launches of the activities in a rank's window, and the named ranges during that time."""
    trace, launches = detail.classified.trace, detail.classified.trace.launches
    activities = detail.rows().activity
    launch = detail.classified.launch[activities]
    activities, launch = activities[launch != NONE], launch[launch != NONE]
    if not len(launch):
        return []
    first, last = int(launches.start_ns[launch].min()), int(launches.end_ns[launch].max())
    return [*_clipped_ranges(trace, trace.annotations, first, last), *_launch_calls(trace, activities, launch)]


def first_launch_ns(detail: Detail) -> int | None:
    """Return when the first activity of a rank's window was launched; None where no launch is known."""
    launch = detail.classified.launch[detail.rows().activity]
    return min(detail.classified.trace.launches.start_ns[launch[launch != NONE]].tolist(), default=None)


def _clipped_ranges(trace: Trace, ranges: Ranges, first: int, last: int) -> Iterator[_Call]:
    rows = np.flatnonzero((ranges.start_ns < last) & (ranges.end_ns > first))
    columns = (ranges.start_ns, ranges.end_ns, ranges.thread, ranges.name)
    for start, end, thread, name in zip(*(column[rows].tolist() for column in columns), strict=True):
        yield _Call(max(start, first), min(end, last), thread, trace.names[name])


def _launch_calls(trace: Trace, activities: Int64, launch: Int64) -> Iterator[_Call]:
    """Generate one call per launch of ``activities``; ``launch`` holds the launch of each activity."""
    activities_of_launch: dict[int, list[int]] = {}
    for activity, index in zip(activities.tolist(), launch.tolist(), strict=True):
        activities_of_launch.setdefault(index, []).append(activity)
    columns, launches = trace.activities, trace.launches
    for index, launched in activities_of_launch.items():
        start, first = int(launches.start_ns[index]), trace.names[columns.name[launched[0]]]
        name = f"launch of {first}" + (f" and {len(launched) - 1} more" if len(launched) > 1 else "")
        later = tuple(activity for activity in launched if columns.start_ns[activity] >= start)
        yield _Call(start, int(launches.end_ns[index]), int(launches.thread[index]), name, later)


def call_events(rank: int, calls: Iterable[_Call], origin: int) -> Iterator[TraceEvent]:
    """Generate the events of one rank's calls, one track per thread.

    Each call is followed by the starts of the arrows to the activities that it launched.
    """
    threads: dict[int, tuple[int, Lanes]] = {}
    named_tracks: set[int] = set()
    for call in sorted(calls, key=lambda call: (call.start_ns, -call.end_ns)):
        number, lanes = threads.setdefault(call.thread, (len(threads), Lanes(nested=True)))
        track = FIRST_THREAD_TRACK + number + TRACKS_PER_LANE * lanes.place(call.start_ns, call.end_ns)
        if track not in named_tracks:
            named_tracks.add(track)
            yield metadata_event("thread_name", rank, track, name=f"CPU thread {call.thread}")
        start = call.start_ns - origin
        yield slice_event(rank, track, clean(call.name), start, call.end_ns - origin)
        for activity in call.launched:
            yield arrow_event("s", LAUNCH, arrow_number(rank, activity), rank, track, start)


def arrow_number(rank: int, activity: int) -> int:
    """Return the number of the arrow from an activity's launch, unique per rank and activity."""
    return (rank << 32) + activity
