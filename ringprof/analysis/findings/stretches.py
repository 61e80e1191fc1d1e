"""Longest stretches of exposed communication and of idle time, in which a rank computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.exposure import exposure_of
from ringprof.analysis.intervals import Spans
from ringprof.analysis.rank import Rank
from ringprof.analysis.timeline.idle import cause_text
from ringprof.trace.columns import Int64

EXPOSED, IDLE = "exposed_comm", "idle"
"""Values of `Stretch.what`: the parts of a rank's time that stretches belong to."""


class Stretch(NamedTuple):
    """A longest possible span of one rank in which only communication runs, or nothing; times by the rank's clock."""

    rank: int
    what: str
    """`EXPOSED` or `IDLE`."""
    start_ns: int
    end_ns: int
    wait_ns: int = 0
    """Part of an exposed stretch that waits for a peer."""
    wire_ns: int = 0
    """Part of an exposed stretch with bytes on the wire; waiting and wire are both 0 where they are not known."""
    cause: str = ""
    """Cause of most of an idle stretch: ``host, launch call: cudaLaunchKernel``."""

    @property
    def time_ns(self) -> int:
        """Length of the stretch."""
        return self.end_ns - self.start_ns


def stretches_of(ranks: Iterable[Rank], most: int) -> list[Stretch]:
    """Return the ``most`` longest stretches of each rank, longest first; none for ranks on CPU.

    All stretches of a rank sum to its exposed communication and its idle time.
    """
    stretches = [stretch for rank in ranks if not rank.on_cpu for stretch in _longest_of(rank, most)]
    return sorted(stretches, key=lambda stretch: (-stretch.time_ns, stretch.rank, stretch.start_ns))


def _longest_of(rank: Rank, most: int) -> Sequence[Stretch]:
    detail = rank.detail
    exposure, idle = exposure_of(detail, detail.rows()), detail.idle_parts()
    exposed = exposure.everything
    wait_ns, wire_ns = (
        intervals.covered_ns(part, exposed.start_ns, exposed.end_ns) for part in (exposure.wait, exposure.wire)
    )
    rows = [
        Stretch(rank.rank, EXPOSED, start, end, wait, wire)
        for start, end, wait, wire in _longest(exposed, most, wait_ns, wire_ns)
    ]
    names = detail.classified.trace.names
    for start, end in _longest(intervals.union(idle.start_ns, idle.end_ns), most):
        parts = range(*np.searchsorted(idle.start_ns, (start, end)).tolist())
        rows.append(Stretch(rank.rank, IDLE, start, end, cause=cause_text(*idle.main_label(parts, names))))
    rows.sort(key=lambda stretch: -stretch.time_ns)
    return rows[:most]


def _longest(spans: Spans, most: int, *columns: Int64) -> list[tuple[int, ...]]:
    """Return start, end and further columns of the longest spans."""
    order = np.argsort(spans.start_ns - spans.end_ns, kind="stable")[:most]
    return list(zip(*(column[order].tolist() for column in (spans.start_ns, spans.end_ns, *columns)), strict=True))
