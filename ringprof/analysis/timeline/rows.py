"""Activities with their times and kinds: of one device, over one window, clipped to the window.

Activities of the window are *selected*. What else ran on the device meanwhile is the *background*: it is not counted,
but it hides communication, and the device is not idle while it runs.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.kinds import is_kind
from ringprof.trace.columns import Int8, Int64


class TimedActivities(msgspec.Struct, frozen=True):
    """Activities with their times and kinds; arrays of one length."""

    activity: Int64
    """Indices into ``trace.activities``, ascending."""
    start_ns: Int64
    end_ns: Int64
    """Never before the start; both are clipped to the window."""
    kind: Int8
    """Index into `KINDS`."""

    def of(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Return a mask of the activities that are one of these kinds."""
        return is_kind(self.kind, *kinds)

    def spans(self, *kinds: str) -> Spans:
        """Return the union of the intervals in which activities of these kinds run."""
        rows = self.of(*kinds)
        return intervals.union(self.start_ns[rows], self.end_ns[rows])

    def take(self, indices: npt.NDArray[np.intp]) -> TimedActivities:
        """Return the activities at the given indices."""
        return TimedActivities(self.activity[indices], self.start_ns[indices], self.end_ns[indices], self.kind[indices])

    def among(self, activities: Int64) -> TimedActivities:
        """Return the activities that are among ``activities`` (ascending)."""
        index = np.searchsorted(self.activity, activities)
        index = index[index < len(self.activity)]
        return self.take(index[self.activity[index] == activities[: len(index)]])


_NONE = np.empty(0, np.int64)
NO_ROWS = TimedActivities(_NONE, _NONE, _NONE, np.empty(0, np.int8))


def timed_activities(
    classified: Classified, activities: Int64, device: int | None, between_ns: tuple[int, int] | None
) -> TimedActivities:
    """Return the ``activities`` of one device (None: of all) that overlap ``between_ns``, clipped to it."""
    columns = classified.trace.activities
    if device is not None:
        activities = activities[columns.device[activities] == device]
    start = columns.start_ns[activities]
    end = np.maximum(columns.end_ns[activities], start)
    if between_ns is not None:
        window_start, window_end = between_ns
        inside = (start < window_end) & (end > window_start)
        activities, start, end = (
            activities[inside],
            np.maximum(start[inside], window_start),
            np.minimum(end[inside], window_end),
        )
    return TimedActivities(activities, start, end, classified.kind[activities])


class DeviceActivities:
    """All activities of one device, to find those that ran beside a window."""

    def __init__(self, classified: Classified, device: int | None) -> None:
        columns = classified.trace.activities
        self._classified = classified
        self._activity = np.flatnonzero(columns.device == device)
        self._start: Int64 = columns.start_ns[self._activity]
        self._latest_end: Int64 = np.maximum.accumulate(columns.end_ns[self._activity])

    def background(self, selected: TimedActivities) -> TimedActivities:
        """Return what ran between the first start and last end of ``selected`` besides it, clipped to these times."""
        window_start, window_end = int(selected.start_ns.min()), int(selected.end_ns.max())
        # Activities are sorted by start, and none before ``begin`` ends after the window's start.
        begin = np.searchsorted(self._latest_end, window_start, side="right")
        end = np.searchsorted(self._start, window_end, side="left")
        candidates = self._activity[begin:end]
        other = (
            candidates[~np.isin(candidates, selected.activity, assume_unique=True)] if len(candidates) else candidates
        )
        return timed_activities(self._classified, other, None, (window_start, window_end))
