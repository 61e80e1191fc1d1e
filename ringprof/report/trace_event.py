"""Events of the trace-event format (Google, 2016), written so that Perfetto reads every one of them.

Perfetto drops a slice that begins inside another slice of its track and ends after it, so overlapping slices are put on
separate lanes. Perfetto truncates times to whole nanoseconds, so times are written such that truncation loses nothing.
"""

from __future__ import annotations

import math
from typing import Any

from ringprof.common.json_object import JsonObject

TraceEvent = JsonObject


def microseconds(time_ns: int) -> float:
    """Convert a time to the format's unit.

    A reader that multiplies by 1000 and truncates gets ``time_ns`` again.
    """
    time = time_ns / 1e3
    return time if int(time * 1e3) >= time_ns else math.nextafter(time, math.inf)


def slice_event(process: int, track: int, name: str, start_ns: int, end_ns: int, **args: Any) -> TraceEvent:
    """Create a slice from a start time to an end time; ``args`` that are None are left out."""
    known = {key: value for key, value in args.items() if value is not None}
    ts, dur = microseconds(start_ns), microseconds(max(0, end_ns - start_ns))
    return {"ph": "X", "pid": process, "tid": track, "name": name, "ts": ts, "dur": dur, "args": known}


def metadata_event(event_name: str, process: int, track: int, **args: Any) -> TraceEvent:
    """Create the event that sets the name or the position of a process or track."""
    return {"ph": "M", "pid": process, "tid": track, "name": event_name, "args": args}


def counter_event(process: int, name: str, time_ns: int, unit: str, value: float) -> TraceEvent:
    """Create the event that sets a counter's value from a time on."""
    return {"ph": "C", "pid": process, "tid": 0, "name": name, "ts": microseconds(time_ns), "args": {unit: value}}


def arrow_event(phase: str, category: str, number: int, process: int, track: int, time_ns: int) -> TraceEvent:
    """Create the start (``s``) or the end (``f``) of an arrow.

    The arrow attaches to the last slice written on this track, which must be running at that time.
    """
    event = {
        "ph": phase, "id": number, "cat": category, "name": category, "pid": process, "tid": track,
        "ts": microseconds(time_ns),
    }  # fmt: skip
    return event | ({"bp": "e"} if phase == "f" else {})


class Lanes:
    """Assignment of slices, passed in order of their start, to as few lanes as hold them without overlap."""

    def __init__(self, *, nested: bool = False) -> None:
        """Start without lanes; with ``nested``, a slice inside another may share its lane, as nested calls do."""
        self._nested = nested
        self._ends: list[list[int]] = []

    def place(self, start_ns: int, end_ns: int) -> int:
        """Assign a slice to a lane; return the lane's number, from 0."""
        for lane, ends in enumerate(self._ends):
            while ends and ends[-1] <= start_ns:
                ends.pop()
            if not ends or (self._nested and end_ns <= ends[-1]):
                ends.append(end_ns)
                return lane
        self._ends.append([end_ns])
        return len(self._ends) - 1
