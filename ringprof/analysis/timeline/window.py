"""Window of the analysis: the activities that the user chose, the marked iterations, or the whole trace."""

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
    """Number of training steps in the marked ranges (`count_steps`); None where a range shows none."""

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
        return _named_window(trace, launch, name)
    has_marks = False
    for source, pattern in _MARKS.items():
        marked = trace.names_that(pattern.fullmatch)
        rows = np.flatnonzero(marked[trace.annotations.name])
        if not len(rows):
            continue
        has_marks = True
        launched_in = _inside(trace, launch, rows, marked)
        spans = tuple((int(trace.annotations.start_ns[index]), int(trace.annotations.end_ns[index])) for index in rows)
        nonempty = [index for index, activities in enumerate(launched_in) if len(activities)]
        if nonempty or not len(launch):
            kept = list(nonempty or range(len(rows)))
            return _marked_window(
                trace, source, rows[kept], [launched_in[index] for index in kept], [spans[index] for index in kept]
            )
    return Window("trace", (everything,), (), marked=has_marks)


def _named_window(trace: Trace, launch: Int64, name: str) -> Window:
    """Return the window of all ranges called ``name``. Raises `UsageError` without such ranges or launches."""
    marked = trace.names_that(re.compile(wildcards(name), re.DOTALL).fullmatch)
    rows = np.flatnonzero(marked[trace.annotations.name])
    if not len(rows):
        name_counts = Counter(trace.names[index] for index in trace.annotations.name.tolist())
        listed = ", ".join(repr(text) for text, _ in name_counts.most_common(_MOST_LISTED)) or "none"
        raise UsageError(f"--window {name!r}: {trace.path} has no such range; it has {listed}")
    launched_in = _inside(trace, launch, rows, marked)
    kept = [number for number, activities in enumerate(launched_in) if len(activities) or not len(launch)]
    if not kept:
        raise UsageError(f"--window {name!r}: nothing was launched in that range in {trace.path}")
    spans = [(int(trace.annotations.start_ns[row]), int(trace.annotations.end_ns[row])) for row in rows]
    # Ranges that the user named count as iterations where their names mark iterations.
    found_names = {trace.names[index] for index in trace.annotations.name[rows].tolist()}
    iteration_sources = (source for source, mark in _MARKS.items() if all(map(mark.fullmatch, found_names)))
    source = next(iteration_sources, "range")
    return _marked_window(
        trace, source, rows[kept], [launched_in[index] for index in kept], [spans[index] for index in kept]
    )


def _marked_window(
    trace: Trace, source: str, rows: npt.NDArray[np.intp], launched_in: list[Int64], spans: list[tuple[int, int]]
) -> Window:
    """Build a window from marked ranges, which are ``rows`` of the annotations."""
    steps = count_steps(trace, rows, source)
    return Window(source, tuple(launched_in), tuple(spans), marked=True, steps=steps)


# --- training steps inside a marked range -------------------------------------------------------------


def count_steps(trace: Trace, rows: npt.NDArray[np.intp], source: str) -> int | None:
    """Count the training steps in marked ranges, which are ``rows`` of the annotations.

    Each ``ProfilerStep#n`` is one step. A ringprof range has as many steps as ``ProfilerStep#n`` ranges inside, or else
    optimizer steps. Returns None where a range has neither, and for ranges of other names.
    """
    if source == "profiler":
        return len(rows)
    counts = [_steps_inside(trace, int(row)) for row in rows] if source == "ringprof" else []
    return sum(counts) if counts and all(counts) else None


def _steps_inside(trace: Trace, row: int) -> int:
    """Count the training steps inside one marked range; 0 where the range shows none."""
    ranges = trace.annotations
    inside = (ranges.start_ns > ranges.start_ns[row]) & (ranges.start_ns < ranges.end_ns[row])
    # Hooks that step the optimizer in the backward pass run on another thread, or inside an operator of this thread.
    inside &= ranges.thread == ranges.thread[row]
    profiler_steps = inside & trace.names_that(_MARKS["profiler"].fullmatch)[ranges.name]
    if profiler_steps.any():
        return int(np.count_nonzero(profiler_steps))
    steps = np.flatnonzero(inside & trace.names_that(_OPTIMIZER_STEP.fullmatch)[ranges.name])
    if not len(steps):
        return 0
    steps = steps[~_inside_operators(trace, steps)]
    return int(np.count_nonzero(_work_before(trace, steps)))


def _inside_operators(trace: Trace, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Return a mask of the annotations that begin inside an operator of their own thread."""
    operators, starts = trace.operators, trace.annotations.start_ns[rows]
    same_thread = operators.thread == trace.annotations.thread[rows[0]]
    spans = intervals.union(operators.start_ns[same_thread], operators.end_ns[same_thread])
    return intervals.contains(spans, starts)


def _work_before(trace: Trace, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Return a mask of the ranges with an operator or launch between the previous range's end and their start.

    ``rows`` are in order. Optimizers that step directly one after another share a training step.
    """
    starts = np.sort(np.concatenate((trace.operators.start_ns, trace.launches.start_ns)))
    begins, ends = trace.annotations.start_ns[rows], np.maximum.accumulate(trace.annotations.end_ns[rows])
    between = np.searchsorted(starts, begins[1:]) > np.searchsorted(starts, ends[:-1], side="right")
    return np.concatenate((np.ones(min(1, len(rows)), np.bool_), between))


def _inside(
    trace: Trace, launch: Int64, rows: npt.NDArray[np.intp], marked: npt.NDArray[np.bool_]
) -> tuple[Int64, ...]:
    """Return for each marked CPU range the activities launched inside it, on any thread: backward has its own."""
    with_launch = np.flatnonzero(launch != NONE)
    with_launch = with_launch[np.argsort(trace.launches.start_ns[launch[with_launch]], kind="stable")]
    launched = trace.launches.start_ns[launch[with_launch]]
    device_rows = np.flatnonzero(marked[trace.device_annotations.name])
    result = []
    for row in rows:
        first_index = np.searchsorted(launched, trace.annotations.start_ns[row], side="left")
        last_index = np.searchsorted(launched, trace.annotations.end_ns[row], side="right")
        inside = np.sort(with_launch[first_index:last_index])
        if len(with_launch) < len(launch):
            on_device = _inside_on_device(trace, device_rows, int(trace.annotations.name[row]), int(row))
            inside = distinct(np.concatenate((inside, np.flatnonzero(on_device & (launch == NONE)))))
        result.append(inside)
    return tuple(result)


def _inside_on_device(trace: Trace, device_rows: npt.NDArray[np.intp], name: int, row: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the activities without a launch record that start in the range's own device annotation."""
    ranges: Ranges = trace.device_annotations
    matching_rows = device_rows[ranges.name[device_rows] == name]
    external = trace.annotations.external_id[row]
    if external != NONE and (ranges.external_id[matching_rows] == external).any():
        matching_rows = matching_rows[ranges.external_id[matching_rows] == external]
    spans = intervals.union(ranges.start_ns[matching_rows], ranges.end_ns[matching_rows])
    return intervals.contains(spans, trace.activities.start_ns)
