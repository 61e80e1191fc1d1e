"""User annotations (``attn(F)``, ``ProfilerStep``, NVTX ranges): the work launched in them, and its hidden share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE
from ringprof.analysis.rank import Detail, Rank
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.trace.columns import NONE, Int64, Ranges, Trace

MOST_NAMES = 500
"""Largest number of range names per rank that are analysed, longest in total first; a loop may number its ranges."""

_NOT_USER_RANGES = re.compile(r"ringprof::|nccl:|gloo:|c10d::|mpi:|record_param_comms|## ")
_NUMBERED = re.compile(r"(ProfilerStep)#[0-9]+")


class Annotation(NamedTuple):
    """All ranges of one name, in nanoseconds: of one rank, or summed over all ranks."""

    name: str
    calls: int
    """Number of ranges in which something was launched."""
    busy_ns: int
    """Time in which anything runs that was launched in the ranges."""
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    """Communication without any computation at the same time, wherever that computation was launched."""

    @property
    def hidden(self) -> float | None:
        """Share of the communication that is hidden, 0..1; None without communication."""
        return 1.0 - self.exposed_ns / self.communication_ns if self.communication_ns else None


def annotations_of(ranks: Iterable[Rank]) -> tuple[Annotation, ...]:
    """Sum the user annotations over ranks, by name, longest first."""
    totals: dict[str, Annotation] = {}
    for rank in ranks:
        for annotation in _annotations_of_rank(rank.detail):
            earlier = totals.get(annotation.name, Annotation(annotation.name, 0, 0, 0, 0, 0))
            totals[annotation.name] = Annotation(
                annotation.name, *(a + b for a, b in zip(earlier[1:], annotation[1:], strict=True))
            )
    return tuple(sorted(totals.values(), key=lambda annotation: (-annotation.busy_ns, annotation.name)))


def _annotations_of_rank(detail: Detail) -> Iterator[Annotation]:
    """Yield the annotations of one rank in which anything was launched."""
    trace, rows = detail.classified.trace, detail.rows()
    compute = intervals.merged(rows.spans(*COMPUTE), detail.background(rows).spans(*COMPUTE))
    launched = _LaunchedRows(detail, rows)
    for name, name_indices in _user_names(trace):
        row_indices, calls = launched.rows_in_ranges(name_indices)
        if len(row_indices):
            yield _annotation(name, calls, rows.take(row_indices), compute)


def _annotation(name: str, calls: int, rows: TimedActivities, compute: Spans) -> Annotation:
    """Measure the activities launched in the ranges of one name; ``compute``: all computation on the device."""
    communication = rows.spans(*COMMUNICATION)
    return Annotation(
        name=name,
        calls=calls,
        busy_ns=intervals.length_ns(intervals.union(rows.start_ns, rows.end_ns)),
        compute_ns=intervals.length_ns(rows.spans(*COMPUTE)),
        communication_ns=intervals.length_ns(communication),
        exposed_ns=intervals.length_ns(intervals.subtraction(communication, compute)),
    )


def _user_names(trace: Trace) -> list[tuple[str, list[int]]]:
    """Return the names of the user's ranges, longest in total first, each with its indices into ``trace.names``."""
    time_of_name = np.zeros(max(len(trace.names), 1), np.float64)
    for ranges in (trace.annotations, trace.device_annotations):
        np.add.at(time_of_name, ranges.name, 1.0 + ranges.end_ns - ranges.start_ns)
    indices_of_name: dict[str, list[int]] = {}
    for index in np.argsort(-time_of_name, kind="stable")[: int(np.count_nonzero(time_of_name))].tolist():
        text = trace.names[index]
        if not _NOT_USER_RANGES.match(text):
            numbered = _NUMBERED.fullmatch(text)
            name = numbered[1] if numbered else text
            if name in indices_of_name or len(indices_of_name) < MOST_NAMES:
                indices_of_name.setdefault(name, []).append(index)
    return list(indices_of_name.items())


class _LaunchedRows:
    """Lookup of a rank's activities by launch time, or by device ranges where no launch is recorded."""

    def __init__(self, detail: Detail, rows: TimedActivities) -> None:
        trace = detail.classified.trace
        launch = detail.classified.launch[rows.activity]
        with_launch = np.flatnonzero(launch != NONE)
        launched_ns = trace.launches.start_ns[launch[with_launch]]
        order = np.argsort(launched_ns, kind="stable")
        self._launched_rows, self._launched_ns = with_launch[order], launched_ns[order]
        self._rows_without_launch = np.flatnonzero(launch == NONE)
        self._start_without_launch_ns = rows.start_ns[self._rows_without_launch]
        self._on_cpu, self._on_device = _RangesByName(trace.annotations), _RangesByName(trace.device_annotations)

    def rows_in_ranges(self, names: Sequence[int]) -> tuple[npt.NDArray[np.intp], int]:
        """Return the indices of the rows launched in ranges of these names, on any thread, and the number of ranges.

        ``names`` are indices into ``trace.names``. Ranges without a launch do not count.
        """
        start, end = self._on_cpu.times_of(names)
        calls = int(np.count_nonzero(self._launched_before(end) > self._launched_before(start)))
        spans = intervals.union(start, end)
        row_indices = [self._launched_rows[intervals.contains(spans, self._launched_ns)]]
        if len(self._rows_without_launch):
            start, end = self._on_device.times_of(names)
            row_indices.append(
                self._rows_without_launch[
                    intervals.contains(intervals.union(start, end), self._start_without_launch_ns)
                ]
            )
            calls = calls or len(start)
        return np.sort(np.concatenate(row_indices)), calls

    def _launched_before(self, times_ns: Int64) -> npt.NDArray[np.intp]:
        """Count the launches before each of the times."""
        return np.searchsorted(self._launched_ns, times_ns)


class _RangesByName:
    """Ranges sorted by name, so that the ranges of one name are found by binary search."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._order = np.argsort(ranges.name, kind="stable")
        self._name = ranges.name[self._order]

    def times_of(self, names: Sequence[int]) -> tuple[Int64, Int64]:
        """Return the start and end of all ranges with one of these names."""
        rows = np.concatenate([self._order[slice(*np.searchsorted(self._name, (name, name + 1)))] for name in names])
        return self._ranges.start_ns[rows], self._ranges.end_ns[rows]
