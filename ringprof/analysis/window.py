"""Which activities are looked at: those launched inside the marked iterations, or the whole trace."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.trace.columns import NONE, Int64, Ranges, Trace

# ringprof's own mark wins over the profiler's, which may include a warm-up that was recorded.
_MARKS = (re.compile(r"ringprof::iteration\b.*"), re.compile(r"ProfilerStep#\d+"))


@dataclass(frozen=True)
class Window:
    """The activities of one rank that belong to the profiled iterations."""

    source: str
    """``ringprof``, ``profiler`` or ``trace`` (nothing was marked: all of it)."""
    iterations: tuple[Int64, ...]
    """Indices into ``trace.activities``, one array an iteration, in order; one array where nothing was marked."""
    span_ns: tuple[tuple[int, int], ...]
    """The marked CPU ranges, one an iteration; empty where the window is all of the trace."""
    marked: bool = False
    """Whether the trace marks iterations at all; with source ``trace``, nothing was launched in them."""

    def activities(self) -> Int64:
        """Indices of all activities in the window, ascending."""
        return np.unique(np.concatenate(self.iterations))


def find_window(trace: Trace, launch: Int64) -> Window:
    """The profiled iterations of a trace; ``launch`` joins activities to launches (`classify.launches_of`)."""
    everything = np.arange(len(launch), dtype=np.int64)
    found_marks = False
    for source, pattern in zip(("ringprof", "profiler"), _MARKS, strict=True):
        marked = np.array([pattern.fullmatch(name) is not None for name in trace.names] or [False], np.bool_)
        rows = np.flatnonzero(marked[trace.annotations.name])
        if not len(rows):
            continue
        found_marks = True
        found = tuple(np.flatnonzero(inside) for inside in _inside(trace, launch, rows, marked))
        spans = tuple((int(trace.annotations.start_ns[i]), int(trace.annotations.end_ns[i])) for i in rows)
        filled = [i for i, activities in enumerate(found) if len(activities)]
        if filled or not len(launch):
            kept = filled or range(len(rows))
            return Window(source, tuple(found[i] for i in kept), tuple(spans[i] for i in kept), marked=True)
    return Window("trace", (everything,), (), marked=found_marks)


def _inside(
    trace: Trace, launch: Int64, rows: npt.NDArray[np.intp], marked: npt.NDArray[np.bool_]
) -> list[npt.NDArray[np.bool_]]:
    """For each marked CPU range, which activities were launched in it (on any thread: backward has its own)."""
    joined = launch != NONE
    launched = trace.launches.start_ns[launch[joined]]
    device_rows = np.flatnonzero(marked[trace.device_annotations.name])
    result = []
    for row in rows:
        inside = np.zeros(len(launch), np.bool_)
        start, end = trace.annotations.start_ns[row], trace.annotations.end_ns[row]
        inside[joined] = (launched >= start) & (launched <= end)
        if not joined.all():
            inside |= ~joined & _inside_on_device(trace, device_rows, int(trace.annotations.name[row]), int(row))
        result.append(inside)
    return result


def _inside_on_device(trace: Trace, device_rows: npt.NDArray[np.intp], name: int, row: int) -> npt.NDArray[np.bool_]:
    """Activities without a launch record that start within the range's own device annotation."""
    ranges: Ranges = trace.device_annotations
    same = device_rows[ranges.name[device_rows] == name]
    external = trace.annotations.external_id[row]
    if external != NONE and (ranges.external_id[same] == external).any():
        same = same[ranges.external_id[same] == external]
    spans = intervals.union(ranges.start_ns[same], ranges.end_ns[same])
    return intervals.contains(spans, trace.activities.start_ns)
