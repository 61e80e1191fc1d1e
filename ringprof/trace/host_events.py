"""Selection of the host events that explain idle time of a device.

These events run on the thread of the next launch, before that launch returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ringprof.trace.columns import NONE, Int64, distinct, launch_rows

Columns = Mapping[str, npt.NDArray[Any]]


def idle_gaps(start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64, Int64]:
    """Find the gaps in which none of the intervals runs, between the first start and the last end.

    ``start_ns`` is ascending. Returns the start and the end of each gap, and the index of the interval that ends it
    (the first of several that start together).
    """
    if len(start_ns) < 2:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    busy_until = np.maximum.accumulate(end_ns)[:-1]
    gap = np.flatnonzero(start_ns[1:] > busy_until)
    return busy_until[gap], start_ns[gap + 1], (gap + 1).astype(np.int64)


def rows_in_idle(events: Columns, activities: Columns, launches: Columns) -> npt.NDArray[np.bool_]:
    """Select the host events that overlap an idle gap of a device before its next activity is launched.

    A gap selects events on the thread that launches the activity after it, until that launch call returns.
    All columns are those of `ringprof.trace.columns`, sorted by start.
    """
    selected = np.zeros(len(events["start_ns"]), np.bool_)
    launch = launch_rows(activities["correlation"], launches["correlation"])
    starts, ends, threads = _gaps_before_launch(activities, launches, launch)
    for thread in distinct(threads):
        own_gaps = threads == thread
        order = np.argsort(starts[own_gaps], kind="stable")
        # Gaps of several devices may overlap; running maxima keep both edges ascending.
        first, last = starts[own_gaps][order], np.maximum.accumulate(ends[own_gaps][order])
        rows = np.flatnonzero(events["thread"] == thread)
        next_gap = np.searchsorted(last, events["start_ns"][rows], side="right")
        gap = np.minimum(next_gap, len(first) - 1)
        selected[rows] = (next_gap < len(first)) & (first[gap] < events["end_ns"][rows])
    return selected


def _gaps_before_launch(activities: Columns, launches: Columns, launch: Int64) -> tuple[Int64, Int64, Int64]:
    """Return start, end and launching thread of each idle gap, cut where the launch of the next activity returns."""
    gaps = []
    for device in distinct(activities["device"]):
        rows = np.flatnonzero(activities["device"] == device)
        start, end, next_row = idle_gaps(activities["start_ns"][rows], activities["end_ns"][rows])
        call = launch[rows[next_row]]
        known = call != NONE
        start, end, call = start[known], end[known], call[known]
        end = np.minimum(end, launches["end_ns"][call])
        positive = end > start
        gaps.append((start[positive], end[positive], launches["thread"][call[positive]]))
    if not gaps:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    columns = tuple(np.concatenate(column) for column in zip(*gaps, strict=True))
    return columns[0], columns[1], columns[2]
