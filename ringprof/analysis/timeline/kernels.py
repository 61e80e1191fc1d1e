"""Kernels, copies and sets by name: the number of runs, their time, and the exposed part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.kinds import CODE, COMMUNICATION, COMPUTE, KINDS, MEMORY, OTHER_GROUPS
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.trace.columns import KERNEL, NONE, Trace, enclosing_rows


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

    def spans(*kinds: str) -> Spans:
        return intervals.merged(rows.spans(*kinds), background.spans(*kinds))

    compute = spans(*COMPUTE)
    compute_or_comm = intervals.merged(compute, spans(*COMMUNICATION))
    covers = {**dict.fromkeys(COMMUNICATION, compute), OTHER_GROUPS: compute_or_comm}
    covers |= dict.fromkeys(MEMORY, intervals.merged(compute_or_comm, spans(OTHER_GROUPS)))
    # How long each activity runs with nothing that hides its kind; 0 for computation.
    exposed = np.zeros(len(rows.kind), np.int64)
    for kind, cover in covers.items():
        rows_of_kind = rows.kind == CODE[kind]
        start, end = rows.start_ns[rows_of_kind], rows.end_ns[rows_of_kind]
        exposed[rows_of_kind] = end - start - intervals.covered_ns(cover, start, end)
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


class LaunchStatistics(msgspec.Struct, frozen=True):
    """Statistics of the launches of one rank's activities; times in nanoseconds."""

    count: int
    """Number of activities whose launch is recorded."""
    median_delay_ns: int
    """Median time from the start of the launch call to the start of the activity (the lower of two middle values)."""
    longest_delay_ns: int
    shorter_than_launch: int
    """Number of activities that ran for less time than their launch call took."""
    launch_ns: int
    """Sum of the launch calls' durations, each counted once however many activities it launched."""


def launch_statistics(classified: Classified, rows: TimedActivities) -> LaunchStatistics | None:
    """Compute launch statistics of a window's activities; None where no launch is recorded."""
    launch = classified.launch[rows.activity]
    has_launch = launch != NONE
    if not has_launch.any():
        return None
    launch, calls = launch[has_launch], classified.trace.launches
    columns = classified.trace.activities
    start, end = columns.start_ns[rows.activity[has_launch]], columns.end_ns[rows.activity[has_launch]]
    call_ns = calls.end_ns[launch] - calls.start_ns[launch]
    delay = np.sort(np.maximum(start - calls.start_ns[launch], 0))
    first_of_call = np.unique(launch, return_index=True)[1]
    return LaunchStatistics(
        count=len(launch),
        median_delay_ns=int(delay[(len(delay) - 1) // 2]),
        longest_delay_ns=int(delay[-1]),
        shorter_than_launch=int(np.count_nonzero(end - start < call_ns)),
        launch_ns=int(call_ns[first_of_call].sum()),
    )


class OneByOne(msgspec.Struct, frozen=True):
    """Kernels of a rank that are launched one by one beside graphs, which launch many at once."""

    single: int
    kernels: int
    """Number of all kernels."""
    operators: dict[str, int]
    """Number of these kernels by the innermost operator that launches them, as far as operators are kept."""


_LEAST_IN_GRAPH = 8
"""Least number of kernels of one launch call that shows a graph."""


def launched_one_by_one(classified: Classified, rows: TimedActivities) -> OneByOne | None:
    """Count the kernels of a window that no graph launches; None where no graph launches any."""
    trace = classified.trace
    kernels = rows.activity[trace.activities.category[rows.activity] == KERNEL]
    launch = classified.launch[kernels]
    of_call = np.bincount(launch + 1, minlength=1)[launch + 1]
    in_graph = (trace.activities.graph_node[kernels] != NONE) | ((launch != NONE) & (of_call >= _LEAST_IN_GRAPH))
    if not in_graph.any():
        return None
    calls = launch[~in_graph & (launch != NONE)]
    operators = trace.operators
    enclosing = enclosing_rows(
        (operators.start_ns, operators.end_ns, operators.thread),
        trace.launches.start_ns[calls], trace.launches.thread[calls],
    )  # fmt: skip
    names, counts = np.unique(operators.name[enclosing[enclosing != NONE]], return_counts=True)
    by_name = {trace.names[name]: count for name, count in zip(names.tolist(), counts.tolist(), strict=True)}
    return OneByOne(int(np.count_nonzero(~in_graph)), len(kernels), by_name)
