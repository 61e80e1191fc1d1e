"""The user's own ranges (``attn(F)``, ``ProfilerStep``, NVTX): what was launched in them, and what of it was hidden."""

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
"""Of a rank's ranges those names are looked at whose ranges are longest together: a loop may number its own."""

_NOT_THE_USERS = re.compile(r"ringprof::|nccl:|gloo:|c10d::|mpi:|record_param_comms|## ")
_NUMBERED = re.compile(r"(ProfilerStep)#[0-9]+")


class Annotation(NamedTuple):
    """The ranges of one name, in nanoseconds; of a rank, or the sums over all."""

    name: str
    calls: int
    """Ranges in which something was launched."""
    busy_ns: int
    """The time in which anything runs that was launched in them."""
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    """Of the communication: with no computation beside it, whoever launched that."""

    @property
    def hidden(self) -> float | None:
        """Share of the communication that is hidden, 0..1; None where there is none."""
        return 1.0 - self.exposed_ns / self.communication_ns if self.communication_ns else None


def annotations_of(ranks: Iterable[Rank]) -> tuple[Annotation, ...]:
    """Those of several ranks, by name, longest first."""
    found: dict[str, Annotation] = {}
    for rank in ranks:
        for one in _of_rank(rank.detail):
            known = found.get(one.name, Annotation(one.name, 0, 0, 0, 0, 0))
            found[one.name] = Annotation(one.name, *(a + b for a, b in zip(known[1:], one[1:], strict=True)))
    return tuple(sorted(found.values(), key=lambda one: (-one.busy_ns, one.name)))


def _of_rank(detail: Detail) -> Iterator[Annotation]:
    trace, rows = detail.classified.trace, detail.rows()
    compute = intervals.merged(rows.spans(*COMPUTE), detail.background(rows).spans(*COMPUTE))
    launched = _Launched(detail, rows)
    for name, indices in _names(trace):
        places, calls = launched.inside(indices)
        if len(places):
            yield _measured(name, calls, rows.take(places), compute)


def _measured(name: str, calls: int, rows: TimedActivities, compute: Spans) -> Annotation:
    communication = rows.spans(*COMMUNICATION)
    return Annotation(
        name=name,
        calls=calls,
        busy_ns=intervals.length_ns(intervals.union(rows.start_ns, rows.end_ns)),
        compute_ns=intervals.length_ns(rows.spans(*COMPUTE)),
        communication_ns=intervals.length_ns(communication),
        exposed_ns=intervals.length_ns(intervals.subtraction(communication, compute)),
    )


def _names(trace: Trace) -> list[tuple[str, list[int]]]:
    """The names of the user's ranges, those of the longest first, each with its indices into ``trace.names``."""
    spent = np.zeros(max(len(trace.names), 1), np.float64)
    for ranges in (trace.annotations, trace.device_annotations):
        np.add.at(spent, ranges.name, 1.0 + ranges.end_ns - ranges.start_ns)
    found: dict[str, list[int]] = {}
    for index in np.argsort(-spent, kind="stable")[: int(np.count_nonzero(spent))].tolist():
        text = trace.names[index]
        if not _NOT_THE_USERS.match(text):
            numbered = _NUMBERED.fullmatch(text)
            name = numbered[1] if numbered else text
            if name in found or len(found) < MOST_NAMES:
                found.setdefault(name, []).append(index)
    return list(found.items())


class _Launched:
    """A rank's activities by when they were launched; those without a launch record by the device's own ranges."""

    def __init__(self, detail: Detail, rows: TimedActivities) -> None:
        trace = detail.classified.trace
        launch = detail.classified.launch[rows.activity]
        joined = np.flatnonzero(launch != NONE)
        moment = trace.launches.start_ns[launch[joined]]
        order = np.argsort(moment, kind="stable")
        self._place, self._moment = joined[order], moment[order]
        self._rest = np.flatnonzero(launch == NONE)
        self._rest_start = rows.start_ns[self._rest]
        self._on_cpu, self._on_device = _ByName(trace.annotations), _ByName(trace.device_annotations)

    def inside(self, names: Sequence[int]) -> tuple[npt.NDArray[np.intp], int]:
        """Places among the rows of what was launched in ranges of these names, on any thread; and how many ranges."""
        start, end = self._on_cpu.of(names)
        calls = int(np.count_nonzero(self._first(end) > self._first(start)))
        spans = intervals.union(start, end)
        parts = [self._place[intervals.contains(spans, self._moment)]]
        if len(self._rest):
            start, end = self._on_device.of(names)
            parts.append(self._rest[intervals.contains(intervals.union(start, end), self._rest_start)])
            calls = calls or len(start)
        return np.sort(np.concatenate(parts)), calls

    def _first(self, moment: Int64) -> npt.NDArray[np.intp]:
        return np.searchsorted(self._moment, moment)


class _ByName:
    """Ranges in order of their names, so that those of one are found without looking at all."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._order = np.argsort(ranges.name, kind="stable")
        self._name = ranges.name[self._order]

    def of(self, names: Sequence[int]) -> tuple[Int64, Int64]:
        """Start and end of those of any of these names."""
        rows = np.concatenate([self._order[slice(*np.searchsorted(self._name, (one, one + 1)))] for one in names])
        return self._ranges.start_ns[rows], self._ranges.end_ns[rows]
