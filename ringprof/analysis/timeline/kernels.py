"""Kernels, copies and sets by name: how often each ran, how long, and how much of it was hidden."""

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
    """All activities of one name and kind on one rank, in nanoseconds."""

    name: str
    kind: str
    calls: int
    time_ns: int
    """Sum of their durations."""
    exposed_ns: int | None
    """Of communication: with no computation beside it. Of memory operations: with neither computation nor
    communication. None of computation."""


class RunKernel(NamedTuple):
    """The same over all ranks."""

    name: str
    kind: str
    calls: int
    time_ns: int
    exposed_ns: int | None
    worst_rank: int
    """The rank that spends most time in it."""
    worst_ns: int

    @property
    def mean_ns(self) -> float:
        return self.time_ns / self.calls

    @property
    def hidden(self) -> float | None:
        """Share of its time that is hidden, 0..1; None of computation."""
        if self.exposed_ns is None:
            return None
        return 1.0 - self.exposed_ns / self.time_ns if self.time_ns else 0.0


def rank_kernels(rows: TimedActivities, background: TimedActivities, trace: Trace) -> list[RankKernel]:
    """One rank's, in no order; what else ran meanwhile hides them, too."""
    exposed = _exposed(rows, background)
    key = trace.activities.name[rows.activity].astype(np.int64) * len(KINDS) + rows.kind
    keys, inverse, calls = np.unique(key, return_inverse=True, return_counts=True)
    times, uncovered = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    np.add.at(times, inverse, rows.end_ns - rows.start_ns)
    np.add.at(uncovered, inverse, exposed)
    found = []
    for number, count, time, alone in zip(
        *(column.tolist() for column in (keys, calls, times, uncovered)), strict=True
    ):
        name, kind = divmod(number, len(KINDS))
        known = None if KINDS[kind] in COMPUTE else alone
        found.append(RankKernel(trace.names[name], KINDS[kind], count, time, known))
    return found


def _exposed(rows: TimedActivities, background: TimedActivities) -> Int64:
    """How long each activity runs beside nothing that hides its kind; 0 of computation."""

    def spans(*kinds: str) -> Spans:
        return intervals.merged(rows.spans(*kinds), background.spans(*kinds))

    compute = spans(*COMPUTE)
    sent = intervals.merged(compute, spans(*COMMUNICATION))
    covers = {**dict.fromkeys(COMMUNICATION, compute), OTHER_GROUPS: sent}
    covers |= dict.fromkeys(MEMORY, intervals.merged(sent, spans(OTHER_GROUPS)))
    exposed = np.zeros(len(rows.kind), np.int64)
    for kind, cover in covers.items():
        mine = rows.kind == CODE[kind]
        start, end = rows.start_ns[mine], rows.end_ns[mine]
        exposed[mine] = end - start - intervals.covered_ns(cover, start, end)
    return exposed


class KernelTotals(msgspec.Struct):
    """Adds up the kernels of one rank after another, so that ranks do not add to memory."""

    found: dict[tuple[str, str], RunKernel] = msgspec.field(default_factory=dict)

    def add(self, rank: int, kernels: Iterable[RankKernel]) -> None:
        for one in kernels:
            key = one.name, one.kind
            known = self.found.get(key, RunKernel(*key, 0, 0, None if one.exposed_ns is None else 0, rank, -1))
            worst = (rank, one.time_ns) if one.time_ns > known.worst_ns else (known.worst_rank, known.worst_ns)
            exposed = None if known.exposed_ns is None else known.exposed_ns + (one.exposed_ns or 0)
            self.found[key] = RunKernel(*key, known.calls + one.calls, known.time_ns + one.time_ns, exposed, *worst)

    def sorted(self) -> tuple[RunKernel, ...]:
        """Longest first."""
        return tuple(sorted(self.found.values(), key=lambda one: (-one.time_ns, one.name, one.kind)))
