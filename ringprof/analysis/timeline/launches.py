"""How activities were launched: how long after its launch call each began, and which calls outlast their kernels."""

from __future__ import annotations

import msgspec
import numpy as np

from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.trace.columns import NONE


class LaunchStatistics(msgspec.Struct, frozen=True):
    """The launches of one rank's activities; times in nanoseconds."""

    count: int
    """Activities whose launch is recorded."""
    median_delay_ns: int
    """From the beginning of the launch call to the beginning of the activity: the lower of two middle ones."""
    longest_delay_ns: int
    shorter_than_launch: int
    """Activities that ran for less time than their launch call took."""
    launch_ns: int
    """Sum of the launch calls, each counted once however many activities it launched."""


def launch_statistics(classified: Classified, rows: TimedActivities) -> LaunchStatistics | None:
    """Sum up how the activities of a window were launched; None where no launch is recorded."""
    launch = classified.launch[rows.activity]
    known = launch != NONE
    if not known.any():
        return None
    launch, calls = launch[known], classified.trace.launches
    columns = classified.trace.activities
    start, end = columns.start_ns[rows.activity[known]], columns.end_ns[rows.activity[known]]
    called = calls.end_ns[launch] - calls.start_ns[launch]
    delay = np.sort(np.maximum(start - calls.start_ns[launch], 0))
    once = np.unique(launch, return_index=True)[1]
    return LaunchStatistics(
        count=len(launch),
        median_delay_ns=int(delay[(len(delay) - 1) // 2]),
        longest_delay_ns=int(delay[-1]),
        shorter_than_launch=int(np.count_nonzero(end - start < called)),
        launch_ns=int(called[once].sum()),
    )
