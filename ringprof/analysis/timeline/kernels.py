"""Kernels, copies and sets by name: the number of runs, their time, and the exposed part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.kinds import CODE, COMMUNICATION, COMPUTE, KINDS, MEMORY, OTHER_GROUPS
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.trace.columns import Int64, Trace


class RankKernel(NamedTuple):
    """Totals of all activities of one name and kind on one rank, in nanoseconds."""

    name: str
    kind: str
    calls: int
    time_ns: int
    """Sum of durations."""
    exposed_ns: int | None
    """Time not overlapped by computation; for memory operations, not by communication either. None for computation."""


class RunKernel(NamedTuple):
    """Totals of all activities of one name and kind over all ranks, in nanoseconds."""

    name: str
    kind: str
    calls: int
    time_ns: int
    exposed_ns: int | None
    worst_rank: int
    """Rank with the largest time in this kernel."""
    worst_ns: int

    @property
    def mean_ns(self) -> float:
        """Mean time per call."""
        return self.time_ns / self.calls

    @property
    def hidden(self) -> float | None:
        """Share of the kernel's time that is hidden, 0..1; None for computation."""
        if self.exposed_ns is None:
            return None
        return 1.0 - self.exposed_ns / self.time_ns if self.time_ns else 0.0


def rank_kernels(rows: TimedActivities, background: TimedActivities, trace: Trace) -> list[RankKernel]:
    """Return one rank's kernels, unordered. Background activities hide them too."""
    exposed = _exposed(rows, background)
    key = trace.activities.name[rows.activity].astype(np.int64) * len(KINDS) + rows.kind
    keys, inverse, calls = np.unique(key, return_inverse=True, return_counts=True)
    times, uncovered = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    np.add.at(times, inverse, rows.end_ns - rows.start_ns)
    np.add.at(uncovered, inverse, exposed)
    totals = []
    for code, calls_of_kernel, time, exposed_ns in zip(
        *(column.tolist() for column in (keys, calls, times, uncovered)), strict=True
    ):
        name, kind = divmod(code, len(KINDS))
        exposed_or_none = None if KINDS[kind] in COMPUTE else exposed_ns
        totals.append(RankKernel(trace.names[name], KINDS[kind], calls_of_kernel, time, exposed_or_none))
    return totals


def _exposed(rows: TimedActivities, background: TimedActivities) -> Int64:
    """Return how long each activity runs with nothing that hides its kind; 0 for computation."""

    def spans(*kinds: str) -> Spans:
        return intervals.merged(rows.spans(*kinds), background.spans(*kinds))

    compute = spans(*COMPUTE)
    compute_or_comm = intervals.merged(compute, spans(*COMMUNICATION))
    covers = {**dict.fromkeys(COMMUNICATION, compute), OTHER_GROUPS: compute_or_comm}
    covers |= dict.fromkeys(MEMORY, intervals.merged(compute_or_comm, spans(OTHER_GROUPS)))
    exposed = np.zeros(len(rows.kind), np.int64)
    for kind, cover in covers.items():
        rows_of_kind = rows.kind == CODE[kind]
        start, end = rows.start_ns[rows_of_kind], rows.end_ns[rows_of_kind]
        exposed[rows_of_kind] = end - start - intervals.covered_ns(cover, start, end)
    return exposed


class KernelTotals(msgspec.Struct):
    """Sums of kernels over ranks, added rank by rank, so that memory does not grow with the ranks."""

    totals: dict[tuple[str, str], RunKernel] = msgspec.field(default_factory=dict)

    def add(self, rank: int, kernels: Iterable[RankKernel]) -> None:
        """Add the kernels of one rank."""
        for kernel in kernels:
            key = kernel.name, kernel.kind
            total = self.totals.get(key, RunKernel(*key, 0, 0, None if kernel.exposed_ns is None else 0, rank, -1))
            worst = (rank, kernel.time_ns) if kernel.time_ns > total.worst_ns else (total.worst_rank, total.worst_ns)
            exposed = None if total.exposed_ns is None else total.exposed_ns + (kernel.exposed_ns or 0)
            self.totals[key] = RunKernel(
                *key, total.calls + kernel.calls, total.time_ns + kernel.time_ns, exposed, *worst
            )

    def sorted(self) -> tuple[RunKernel, ...]:
        """Return the kernels, longest time first."""
        return tuple(sorted(self.totals.values(), key=lambda kernel: (-kernel.time_ns, kernel.name, kernel.kind)))
