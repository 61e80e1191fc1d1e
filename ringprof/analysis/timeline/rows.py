"""The activities that a rank's figures are made of: of one device, over one window, cut where the window is cut.

Those of the window are *selected*. What else ran on the device meanwhile is the *background*: it is not counted, but it
hides communication, and is not idle.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.kinds import are
from ringprof.trace.columns import Int8, Int64


class TimedActivities(msgspec.Struct, frozen=True):
    """Activities with their times and kinds; arrays of one length."""

    activity: Int64
    """Indices into ``trace.activities``, ascending."""
    start_ns: Int64
    end_ns: Int64
    """Never before the start; both cut where the window is."""
    kind: Int8
    """Index into `KINDS`."""

    def of(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Whether each is one of these kinds."""
        return are(self.kind, *kinds)

    def spans(self, *kinds: str) -> Spans:
        """The time in which any activity of these kinds runs."""
        rows = self.of(*kinds)
        return intervals.union(self.start_ns[rows], self.end_ns[rows])

    def at(self, places: npt.NDArray[np.intp]) -> TimedActivities:
        """Those at some places."""
        return TimedActivities(self.activity[places], self.start_ns[places], self.end_ns[places], self.kind[places])

    def among(self, activities: Int64) -> TimedActivities:
        """Those of them that are among ``activities`` (ascending)."""
        place = np.searchsorted(self.activity, activities)
        place = place[place < len(self.activity)]
        return self.at(place[self.activity[place] == activities[: len(place)]])


_NONE = np.empty(0, np.int64)
NO_ROWS = TimedActivities(_NONE, _NONE, _NONE, np.empty(0, np.int8))


def timed_activities(
    classified: Classified, activities: Int64, device: int | None, between_ns: tuple[int, int] | None
) -> TimedActivities:
    """The ``activities`` of one device (of every one where None) that reach into the chosen times, cut at both."""
    columns = classified.trace.activities
    if device is not None:
        activities = activities[columns.device[activities] == device]
    start = columns.start_ns[activities]
    end = np.maximum(columns.end_ns[activities], start)
    if between_ns is not None:
        first, last = between_ns
        inside = (start < last) & (end > first)
        activities, start, end = activities[inside], np.maximum(start[inside], first), np.minimum(end[inside], last)
    return TimedActivities(activities, start, end, classified.kind[activities])


class OnDevice:
    """All that one device did, to find what of it ran beside a window."""

    def __init__(self, classified: Classified, device: int | None) -> None:
        columns = classified.trace.activities
        self._classified = classified
        self._activity = np.flatnonzero(columns.device == device)
        self._start: Int64 = columns.start_ns[self._activity]
        self._latest_end: Int64 = np.maximum.accumulate(columns.end_ns[self._activity])

    def background(self, selected: TimedActivities) -> TimedActivities:
        """What ran from the first start to the last end of ``selected`` and is not among them, cut at both."""
        first, last = int(selected.start_ns.min()), int(selected.end_ns.max())
        # Activities are sorted by start, and no activity before the first of these ends after the window's start.
        begin = np.searchsorted(self._latest_end, first, side="right")
        end = np.searchsorted(self._start, last, side="left")
        near = self._activity[begin:end]
        other = near[~np.isin(near, selected.activity, assume_unique=True)] if len(near) else near
        return timed_activities(self._classified, other, None, (first, last))
