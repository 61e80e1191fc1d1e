"""Which host events explain why a device idled: those on the thread of the next launch, before that launch returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ringprof.trace.columns import NONE, Int64, distinct, launch_rows

Columns = Mapping[str, npt.NDArray[Any]]


def idle_gaps(start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64, Int64]:
    """Find the stretches in which none of the intervals runs, between the first start and the last end.

    ``start_ns`` is ascending. Returns the start and the end of each stretch, and the index of the interval that ends it
    (the first of several that start together).
    """
    if len(start_ns) < 2:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    busy_until = np.maximum.accumulate(end_ns)[:-1]
    before = np.flatnonzero(start_ns[1:] > busy_until)
    return busy_until[before], start_ns[before + 1], (before + 1).astype(np.int64)


def rows_in_idle(events: Columns, activities: Columns, launches: Columns) -> npt.NDArray[np.bool_]:
    """Select the host events that overlap a stretch in which a device idles and its next activity is not launched yet.

    Each stretch asks for events on the thread that launches the activity which ends it, until that launch call returns.
    All columns are those of `ringprof.trace.columns`, sorted by start.
    """
    chosen = np.zeros(len(events["start_ns"]), np.bool_)
    launch = launch_rows(activities["correlation"], launches["correlation"])
    starts, ends, threads = _unlaunched(activities, launches, launch)
    for thread in distinct(threads):
        mine = threads == thread
        order = np.argsort(starts[mine], kind="stable")
        # Stretches of several devices may overlap; running maxima keep both edges ascending.
        first, last = starts[mine][order], np.maximum.accumulate(ends[mine][order])
        rows = np.flatnonzero(events["thread"] == thread)
        place = np.searchsorted(last, events["start_ns"][rows], side="right")
        near = np.minimum(place, len(first) - 1)
        chosen[rows] = (place < len(first)) & (first[near] < events["end_ns"][rows])
    return chosen


def _unlaunched(activities: Columns, launches: Columns, launch: Int64) -> tuple[Int64, Int64, Int64]:
    """Start, end and launching thread of each part of an idle stretch before the next activity's launch returns."""
    parts = []
    for device in distinct(activities["device"]):
        rows = np.flatnonzero(activities["device"] == device)
        start, end, ender = idle_gaps(activities["start_ns"][rows], activities["end_ns"][rows])
        call = launch[rows[ender]]
        known = call != NONE
        start, end, call = start[known], end[known], call[known]
        end = np.minimum(end, launches["end_ns"][call])
        real = end > start
        parts.append((start[real], end[real], launches["thread"][call[real]]))
    if not parts:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    columns = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    return columns[0], columns[1], columns[2]
