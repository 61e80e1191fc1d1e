"""Window of the analysis: the activities that the user chose, the marked iterations, or the whole trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.kinds.rules import Rule
from ringprof.analysis.kinds.user_rules import wildcards
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.errors import UsageError
from ringprof.trace.columns import NONE, Int64, Trace, among, distinct
from ringprof.trace.producers import PRODUCERS

_UNITS_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ns|us|µs|ms|s)\s*")


class Focus(msgspec.Struct, frozen=True):
    """The user's choice of activities and their classification; fields left out follow the traces."""

    window: str | None = None
    """Name of the ranges to analyse, with ``*`` and ``?`` as wildcards; ``trace`` for the whole trace."""
    between_ns: tuple[int, int] | None = None
    """Times from the start of the earliest trace; activities are clipped to them."""
    group: str | None = None
    """Process group whose communication counts as the ring's: its name, description or ranks (``0,1,2,3``)."""
    rules: tuple[Rule, ...] = ()
    """Rules of the user, applied before the built-in ones."""
    mixed_runs: bool = False
    """Whether to combine traces even if they have no time in common."""


EVERYTHING = Focus()
"""Default choice: the marked iterations, else the whole trace."""


def parse_between(text: str) -> tuple[int, int]:
    """Parse two times with units, such as ``10ms,20.5ms``, into nanoseconds. Raises `UsageError`."""
    times = [_TIME.fullmatch(term) for term in text.split(",")]
    if len(times) != 2 or times[0] is None or times[1] is None:
        raise UsageError(f"--between {text!r}: write two times with units (ns, us, ms, s), such as 10ms,20ms")
    first, last = (int(Fraction(time[1]) * _UNITS_NS[time[2]]) for time in times if time)
    if last <= first:
        raise UsageError(f"--between {text!r}: the second time must be after the first")
    return first, last


WHOLE_TRACE = "trace"
"""Window name that stands for the whole trace."""

_MOST_LISTED = 8

_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#.+", re.DOTALL)
"""Name of the range that torch.optim opens around each step of an optimizer."""
# ringprof's own mark comes first: the profiler's marks may include a recorded warm-up.
_MARKS = {"ringprof": re.compile(r"ringprof::iteration\b.*"), "profiler": re.compile(r"ProfilerStep#[0-9]+")}


class Window(msgspec.Struct, frozen=True):
    """Activities of one rank that belong to the profiled iterations."""

    source: str
    """``ringprof``, ``profiler``, ``range`` (a name that the user chose) or ``trace`` (no marks: the whole trace)."""
    iterations: tuple[Int64, ...]
    """Indices into ``trace.activities``, one array per iteration, in order; a single array without marks."""
    span_ns: tuple[tuple[int, int], ...]
    """Marked CPU ranges, one per iteration; empty where the window is the whole trace."""
    marked: bool = False
    """Whether the trace marks iterations at all; with source ``trace``, nothing was launched inside the marks."""
    between_ns: tuple[int, int] | None = None
    """Unix times to which the activities are clipped."""
    steps: int | None = None
    """Number of training steps in the marked ranges; None where a range shows none."""

    def activities(self) -> Int64:
        """Return the indices of all activities in the window, ascending."""
        if len(self.iterations) == 1:
            return self.iterations[0]
        inside = np.zeros(
            max((int(iteration.max()) for iteration in self.iterations if len(iteration)), default=-1) + 1, np.bool_
        )
        for iteration in self.iterations:
            inside[iteration] = True
        return np.flatnonzero(inside)

    def by_iteration(self, rows: TimedActivities) -> list[TimedActivities]:
        """Return the rows of each iteration that has any."""
        rows_by_iteration = (rows.among(iteration) for iteration in self.iterations)
        return [iteration for iteration in rows_by_iteration if len(iteration.activity)]


def find_window(trace: Trace, launch: Int64, name: str | None = None) -> Window:
    """Find the profiled iterations of a trace, or every range called ``name`` (``*`` and ``?`` are wildcards).

    ``launch`` joins activities to launches (`classify.launches_of`). Raises `UsageError` where nothing was launched
    in a range of that name.
    """
    everything = np.arange(len(launch), dtype=np.int64)
    if name == WHOLE_TRACE:
        return Window("trace", (everything,), ())
    if name is not None:
        marked = trace.names_that(re.compile(wildcards(name), re.DOTALL).fullmatch)
        # Ranges that the user named count as iterations where their names mark iterations.
        found_names = {trace.names[index] for index in distinct(trace.annotations.name).tolist() if marked[index]}
        if not found_names:
            name_counts = Counter(trace.names[index] for index in trace.annotations.name.tolist())
            steps = PRODUCERS.get(trace.producer, PRODUCERS["torch"]).steps
            names = ", ".join(repr(text) for text, _ in name_counts.most_common(_MOST_LISTED))
            listed = names or f"none (to mark steps: {steps})"
            raise UsageError(f"--window {name!r}: {trace.path} has no such range; it has {listed}")
        iteration_sources = (source for source, mark in _MARKS.items() if all(map(mark.fullmatch, found_names)))
        window = _marked_window(trace, launch, next(iteration_sources, "range"), marked)
        if window is None:
            raise UsageError(f"--window {name!r}: nothing was launched in that range in {trace.path}")
        return window
    has_marks = False
    for source, pattern in _MARKS.items():
        marked = trace.names_that(pattern.fullmatch)
        if marked[trace.annotations.name].any():
            has_marks = True
            if window := _marked_window(trace, launch, source, marked):
                return window
    return Window("trace", (everything,), (), marked=has_marks)


def _marked_window(trace: Trace, launch: Int64, source: str, marked: npt.NDArray[np.bool_]) -> Window | None:
    """Return the window of the ranges with ``marked`` names in which activities were launched; None without any.

    On CPU, where nothing is launched, all of these ranges count.
    """
    rows = np.flatnonzero(marked[trace.annotations.name])
    pairs = [
        (row, activities)
        for row, activities in zip(rows.tolist(), _inside(trace, launch, rows, marked), strict=True)
        if len(activities) or not len(launch)
    ]
    if not pairs:
        return None
    # Each ProfilerStep#n is one step. Ranges that the user named, other than marks, show no steps.
    steps: int | None = len(pairs)
    if source != "profiler":
        counts = _steps_inside(trace, [row for row, _ in pairs]) if source == "ringprof" else []
        steps = sum(counts) if counts and all(counts) else None
    ranges = trace.annotations
    spans = tuple((int(ranges.start_ns[row]), int(ranges.end_ns[row])) for row, _ in pairs)
    return Window(source, tuple(activities for _, activities in pairs), spans, marked=True, steps=steps)


# --- training steps inside a marked range -------------------------------------------------------------


def _steps_inside(trace: Trace, rows: Sequence[int]) -> list[int]:
    """Count the training steps inside each marked range: its ``ProfilerStep#n`` ranges, or else its optimizer steps.

    0 for a range that shows none. Optimizers that step directly one after another share a training step.
    """
    ranges, operators = trace.annotations, trace.operators
    patterns = (_MARKS["profiler"], _OPTIMIZER_STEP)
    profiler_steps, optimizer_steps = (
        np.flatnonzero(trace.names_that(pattern.fullmatch)[ranges.name]) for pattern in patterns
    )
    work = (
        np.sort(np.concatenate((operators.start_ns, trace.launches.start_ns)))
        if len(optimizer_steps)
        else np.empty(0, np.int64)
    )
    spans_of: dict[int, intervals.Spans] = {}
    counts = []
    for row in rows:
        if len(inside := _inside_of_range(trace, profiler_steps, row)):
            counts.append(len(inside))
            continue
        steps = _inside_of_range(trace, optimizer_steps, row)
        if len(steps) and (thread := int(ranges.thread[row])) not in spans_of:
            own = operators.thread == thread
            spans_of[thread] = intervals.union(operators.start_ns[own], operators.end_ns[own])
        if len(steps):
            steps = steps[~intervals.contains(spans_of[thread], ranges.start_ns[steps])]
        # A step counts if an operator or a launch lies between the previous step's end and its start.
        begins, ends = ranges.start_ns[steps], np.maximum.accumulate(ranges.end_ns[steps])
        has_work_before = np.searchsorted(work, begins[1:]) > np.searchsorted(work, ends[:-1], side="right")
        counts.append(min(1, len(steps)) + int(np.count_nonzero(has_work_before)))
    return counts


def _inside_of_range(trace: Trace, steps: npt.NDArray[np.intp], row: int) -> npt.NDArray[np.intp]:
    """Return those of ``steps``, rows of annotations by start, that start inside another annotation of their thread.

    Hooks that step the optimizer in the backward pass run on another thread, or inside an operator of this thread.
    """
    ranges = trace.annotations
    first = np.searchsorted(ranges.start_ns[steps], ranges.start_ns[row], side="right")
    last = np.searchsorted(ranges.start_ns[steps], ranges.end_ns[row])
    steps = steps[first:last]
    inside: npt.NDArray[np.intp] = steps[ranges.thread[steps] == ranges.thread[row]]
    return inside


def _inside(
    trace: Trace, launch: Int64, rows: npt.NDArray[np.intp], marked: npt.NDArray[np.bool_]
) -> tuple[Int64, ...]:
    """Return for each marked CPU range the activities launched inside it, on any thread: backward has its own."""
    with_launch = np.flatnonzero(launch != NONE)
    with_launch = with_launch[np.argsort(trace.launches.start_ns[launch[with_launch]], kind="stable")]
    launched = trace.launches.start_ns[launch[with_launch]]
    # Activities without a launch record are inside if they start in the range's own device annotation.
    bare, ranges = np.flatnonzero(launch == NONE), trace.device_annotations
    device_rows: dict[tuple[int, int], list[int]] = {}
    for row in np.flatnonzero(marked[ranges.name]).tolist() if len(bare) else ():
        for external in {int(ranges.external_id[row]), NONE}:
            device_rows.setdefault((int(ranges.name[row]), external), []).append(row)
    bare_inside: dict[tuple[int, int], Int64] = {}
    result = []
    for row in rows:
        first_index = np.searchsorted(launched, trace.annotations.start_ns[row], side="left")
        last_index = np.searchsorted(launched, trace.annotations.end_ns[row], side="right")
        inside = np.sort(with_launch[first_index:last_index])
        key = int(trace.annotations.name[row]), int(trace.annotations.external_id[row])
        key = key if key in device_rows else (key[0], NONE)
        if key in device_rows:
            if key not in bare_inside:
                spans = intervals.union(ranges.start_ns[device_rows[key]], ranges.end_ns[device_rows[key]])
                bounds = (
                    np.searchsorted(trace.activities.start_ns[bare], times) for times in (spans.start_ns, spans.end_ns)
                )
                parts = [bare[first:last] for first, last in zip(*bounds, strict=True)]
                bare_inside[key] = np.concatenate(parts)
            inside = distinct(np.concatenate((inside, bare_inside[key])))
        result.append(inside)
    if any(map(len, result)):
        _add_by_time(trace, launch, rows, result)
    return tuple(result)


def _add_by_time(trace: Trace, launch: Int64, rows: npt.NDArray[np.intp], inside: list[Int64]) -> None:
    """Add to the activities of each range those that name no launch and start in the range's time on the device.

    This time lasts from its first launched activity to the end of its last. Where times of ranges that follow one
    another overlap, the earliest range counts. Between them, an activity belongs with the launched one before it.
    """
    columns = trace.activities
    unnamed = np.flatnonzero((launch == NONE) & ((columns.correlation == NONE) | (columns.correlation == 0)))
    unnamed = unnamed[~among(unnamed, np.concatenate(inside))]
    if not len(unnamed):
        return
    start, with_launch = columns.start_ns[unnamed], np.flatnonzero(launch != NONE)
    preceding = np.append(with_launch, NONE)[np.searchsorted(columns.start_ns[with_launch], start, side="right") - 1]
    # End of the range on the CPU to which an activity belongs: a range that begins later does not have it, too.
    owned_until = np.full(len(unnamed), np.iinfo(np.int64).max)
    owned = []
    for row, activities in zip(rows, inside, strict=True):
        own = activities[launch[activities] != NONE]
        begin, end = (columns.start_ns[own].min(), columns.end_ns[own].max()) if len(own) else (0, 0)
        candidates = np.arange(*np.searchsorted(start, (begin, end)))
        candidates = candidates[owned_until[candidates] > trace.annotations.start_ns[row]]
        owned_until[candidates] = np.minimum(owned_until[candidates], trace.annotations.end_ns[row])
        owned.append(candidates)
    between = np.flatnonzero(owned_until == np.iinfo(np.int64).max)
    between = between[np.argsort(preceding[between], kind="stable")]
    followed_by = preceding[between]
    for index, candidates in enumerate(owned):
        first, last = (np.searchsorted(followed_by, inside[index], side=side) for side in ("left", "right"))
        followed = np.flatnonzero(last > first)
        following = [between[first[row] : last[row]] for row in followed.tolist()]
        inside[index] = np.sort(np.concatenate((inside[index], unnamed[candidates], *(unnamed[x] for x in following))))
