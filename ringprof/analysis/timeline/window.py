"""Which activities are looked at: what the user chose, the marked iterations, or the whole trace."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.kinds.rules import Rule
from ringprof.analysis.kinds.user_rules import wildcards
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.errors import UsageError
from ringprof.trace.columns import NONE, Int64, Ranges, Trace, distinct

_UNITS_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ns|us|µs|ms|s)\s*")


class Focus(msgspec.Struct, frozen=True):
    """Which activities count, and as what; every field left out leaves it to the traces."""

    window: str | None = None
    """Name of the ranges that are looked at, with ``*`` and ``?`` as wildcards; ``trace`` for all of the trace."""
    between_ns: tuple[int, int] | None = None
    """Times from the start of the earliest trace; activities are cut at both."""
    group: str | None = None
    """The process group whose communication is the ring's: its name, description or ranks (``0,1,2,3``)."""
    rules: tuple[Rule, ...] = ()
    """Rules of the user's own, asked before the built-in ones."""
    mixed_runs: bool = False
    """Whether traces are taken together though they have no moment in common."""


EVERYTHING = Focus()
"""What is looked at where nobody chose."""


def parse_between(text: str) -> tuple[int, int]:
    """Two times with units, such as ``10ms,20.5ms``, as nanoseconds. Raises `UsageError`."""
    times = [_TIME.fullmatch(part) for part in text.split(",")]
    if len(times) != 2 or times[0] is None or times[1] is None:
        raise UsageError(f"--between {text!r}: write two times with units (ns, us, ms, s), such as 10ms,20ms")
    first, last = (int(Fraction(time[1]) * _UNITS_NS[time[2]]) for time in times if time)
    if last <= first:
        raise UsageError(f"--between {text!r}: the second time must be after the first")
    return first, last


WHOLE_TRACE = "trace"
"""The window's name that stands for all of the trace."""

_MOST_LISTED = 8

# ringprof's own mark wins over the profiler's, which may include a warm-up that was recorded.
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#.+", re.DOTALL)
"""Name of the range that torch.optim opens around each step of an optimizer."""
_MARKS = {"ringprof": re.compile(r"ringprof::iteration\b.*"), "profiler": re.compile(r"ProfilerStep#[0-9]+")}


class Window(msgspec.Struct, frozen=True):
    """The activities of one rank that belong to the profiled iterations."""

    source: str
    """``ringprof``, ``profiler``, ``range`` (a name that the user chose) or ``trace`` (nothing was marked: all)."""
    iterations: tuple[Int64, ...]
    """Indices into ``trace.activities``, one array an iteration, in order; one array where nothing was marked."""
    span_ns: tuple[tuple[int, int], ...]
    """The marked CPU ranges, one an iteration; empty where the window is all of the trace."""
    marked: bool = False
    """Whether the trace marks iterations at all; with source ``trace``, nothing was launched in them."""
    between_ns: tuple[int, int] | None = None
    """Unix times at which the activities are cut."""
    steps: int | None = None
    """Training steps that the marked ranges show (`count_steps`); None where a range shows none."""

    def activities(self) -> Int64:
        """Indices of all activities in the window, ascending."""
        if len(self.iterations) == 1:
            return self.iterations[0]
        inside = np.zeros(max((int(part.max()) for part in self.iterations if len(part)), default=-1) + 1, np.bool_)
        for part in self.iterations:
            inside[part] = True
        return np.flatnonzero(inside)

    def by_iteration(self, rows: TimedActivities) -> list[TimedActivities]:
        """The rows of each iteration that has some."""
        parts = (rows.among(part) for part in self.iterations)
        return [part for part in parts if len(part.activity)]


def find_window(trace: Trace, launch: Int64, name: str | None = None) -> Window:
    """The profiled iterations of a trace, or every range called ``name`` (``*`` and ``?`` are wildcards).

    ``launch`` joins activities to launches (`classify.launches_of`). Raises `UsageError` where nothing was launched
    in a range of that name.
    """
    everything = np.arange(len(launch), dtype=np.int64)
    if name == WHOLE_TRACE:
        return Window("trace", (everything,), ())
    if name is not None:
        return _named_window(trace, launch, name)
    found_marks = False
    for source, pattern in _MARKS.items():
        marked = trace.names_that(pattern.fullmatch)
        rows = np.flatnonzero(marked[trace.annotations.name])
        if not len(rows):
            continue
        found_marks = True
        found = _inside(trace, launch, rows, marked)
        spans = tuple((int(trace.annotations.start_ns[i]), int(trace.annotations.end_ns[i])) for i in rows)
        filled = [i for i, activities in enumerate(found) if len(activities)]
        if filled or not len(launch):
            kept = list(filled or range(len(rows)))
            return _marked_window(trace, source, rows[kept], [found[i] for i in kept], [spans[i] for i in kept])
    return Window("trace", (everything,), (), marked=found_marks)


def _named_window(trace: Trace, launch: Int64, name: str) -> Window:
    marked = trace.names_that(re.compile(wildcards(name), re.DOTALL).fullmatch)
    rows = np.flatnonzero(marked[trace.annotations.name])
    if not len(rows):
        known = Counter(trace.names[index] for index in trace.annotations.name.tolist())
        listed = ", ".join(repr(text) for text, _ in known.most_common(_MOST_LISTED)) or "none"
        raise UsageError(f"--window {name!r}: {trace.path} has no such range; it has {listed}")
    found = _inside(trace, launch, rows, marked)
    kept = [number for number, activities in enumerate(found) if len(activities) or not len(launch)]
    if not kept:
        raise UsageError(f"--window {name!r}: nothing was launched in that range in {trace.path}")
    spans = [(int(trace.annotations.start_ns[row]), int(trace.annotations.end_ns[row])) for row in rows]
    # Iterations by name are iterations still.
    found_names = {trace.names[index] for index in trace.annotations.name[rows].tolist()}
    whole = (source for source, mark in _MARKS.items() if all(map(mark.fullmatch, found_names)))
    source = next(whole, "range")
    return _marked_window(trace, source, rows[kept], [found[i] for i in kept], [spans[i] for i in kept])


def _marked_window(
    trace: Trace, source: str, rows: npt.NDArray[np.intp], found: list[Int64], spans: list[tuple[int, int]]
) -> Window:
    steps = count_steps(trace, rows, source)
    return Window(source, tuple(found), tuple(spans), marked=True, steps=steps)


# --- training steps inside a marked range -------------------------------------------------------------


def count_steps(trace: Trace, rows: npt.NDArray[np.intp], source: str) -> int | None:
    """Count the training steps in marked ranges, which are ``rows`` of the annotations.

    A ``ProfilerStep#n`` is one step. A range of ringprof's own holds as many as it has ``ProfilerStep#n`` or else
    optimizer steps inside; None where one has neither, and for ranges of other names.
    """
    if source == "profiler":
        return len(rows)
    counts = [_steps_inside(trace, int(row)) for row in rows] if source == "ringprof" else []
    return sum(counts) if counts and all(counts) else None


def _steps_inside(trace: Trace, mark: int) -> int:
    ranges = trace.annotations
    inside = (ranges.start_ns > ranges.start_ns[mark]) & (ranges.start_ns < ranges.end_ns[mark])
    # Hooks that step the optimizer in the backward pass run on another thread, or inside one of its operators.
    inside &= ranges.thread == ranges.thread[mark]
    profiler_steps = inside & trace.names_that(_MARKS["profiler"].fullmatch)[ranges.name]
    if profiler_steps.any():
        return int(np.count_nonzero(profiler_steps))
    steps = np.flatnonzero(inside & trace.names_that(_OPTIMIZER_STEP.fullmatch)[ranges.name])
    if not len(steps):
        return 0
    steps = steps[~_inside_operators(trace, steps)]
    return int(np.count_nonzero(_work_before(trace, steps)))


def _inside_operators(trace: Trace, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Which annotations begin inside an operator of their own thread."""
    operators, starts = trace.operators, trace.annotations.start_ns[rows]
    same = operators.thread == trace.annotations.thread[rows[0]]
    spans = intervals.union(operators.start_ns[same], operators.end_ns[same])
    return intervals.contains(spans, starts)


def _work_before(trace: Trace, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Which of these ranges, in order, have an operator or a launch between the end of the one before and their start.

    Optimizers that step directly one after another share a training step.
    """
    starts = np.sort(np.concatenate((trace.operators.start_ns, trace.launches.start_ns)))
    begins, ends = trace.annotations.start_ns[rows], np.maximum.accumulate(trace.annotations.end_ns[rows])
    between = np.searchsorted(starts, begins[1:]) > np.searchsorted(starts, ends[:-1], side="right")
    return np.concatenate((np.ones(min(1, len(rows)), np.bool_), between))


def _inside(
    trace: Trace, launch: Int64, rows: npt.NDArray[np.intp], marked: npt.NDArray[np.bool_]
) -> tuple[Int64, ...]:
    """For each marked CPU range, which activities were launched in it (on any thread: backward has its own)."""
    joined = np.flatnonzero(launch != NONE)
    joined = joined[np.argsort(trace.launches.start_ns[launch[joined]], kind="stable")]
    launched = trace.launches.start_ns[launch[joined]]
    device_rows = np.flatnonzero(marked[trace.device_annotations.name])
    result = []
    for row in rows:
        first = np.searchsorted(launched, trace.annotations.start_ns[row], side="left")
        last = np.searchsorted(launched, trace.annotations.end_ns[row], side="right")
        inside = np.sort(joined[first:last])
        if len(joined) < len(launch):
            on_device = _inside_on_device(trace, device_rows, int(trace.annotations.name[row]), int(row))
            inside = distinct(np.concatenate((inside, np.flatnonzero(on_device & (launch == NONE)))))
        result.append(inside)
    return tuple(result)


def _inside_on_device(trace: Trace, device_rows: npt.NDArray[np.intp], name: int, row: int) -> npt.NDArray[np.bool_]:
    """Activities without a launch record that start within the range's own device annotation."""
    ranges: Ranges = trace.device_annotations
    same = device_rows[ranges.name[device_rows] == name]
    external = trace.annotations.external_id[row]
    if external != NONE and (ranges.external_id[same] == external).any():
        same = same[ranges.external_id[same] == external]
    spans = intervals.union(ranges.start_ns[same], ranges.end_ns[same])
    return intervals.contains(spans, trace.activities.start_ns)
