"""Launches of activities: the delay from launch call to start, and launch calls longer than their kernels."""

from __future__ import annotations

import msgspec
import numpy as np

from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.trace.columns import NONE


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
