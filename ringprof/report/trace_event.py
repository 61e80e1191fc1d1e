"""Events of the trace-event format (Google, 2016), such that Perfetto reads every one of them.

Perfetto drops a slice that begins inside another of its track and ends after it, so slices that overlap are put on
lanes of their own. It cuts off what is below a nanosecond, so times are written such that nothing is lost by that.
"""

from __future__ import annotations

import math
from typing import Any

from ringprof.json_object import JsonObject

TraceEvent = JsonObject


def microseconds(time_ns: int) -> float:
    """The format's unit, as a number that is ``time_ns`` again when a reader multiplies by 1000 and cuts off."""
    time = time_ns / 1e3
    return time if int(time * 1e3) >= time_ns else math.nextafter(time, math.inf)


def slice_of(process: int, track: int, name: str, start_ns: int, end_ns: int, **args: Any) -> TraceEvent:
    """Something that ran from one time to another; what is None of ``args`` is left out."""
    known = {key: value for key, value in args.items() if value is not None}
    ts, dur = microseconds(start_ns), microseconds(max(0, end_ns - start_ns))
    return {"ph": "X", "pid": process, "tid": track, "name": name, "ts": ts, "dur": dur, "args": known}


def named(what: str, process: int, track: int, **args: Any) -> TraceEvent:
    """The name or place of a process or track."""
    return {"ph": "M", "pid": process, "tid": track, "name": what, "args": args}


def counter(process: int, name: str, time_ns: int, unit: str, value: float) -> TraceEvent:
    """What a figure is from a time on."""
    return {"ph": "C", "pid": process, "tid": 0, "name": name, "ts": microseconds(time_ns), "args": {unit: value}}


def arrow_end(phase: str, category: str, number: int, process: int, track: int, time_ns: int) -> TraceEvent:
    """The start (``s``) or end (``f``) of an arrow: at the slice written last on this track, which is running then."""
    event = {
        "ph": phase, "id": number, "cat": category, "name": category, "pid": process, "tid": track,
        "ts": microseconds(time_ns),
    }  # fmt: skip
    return event | ({"bp": "e"} if phase == "f" else {})


class Lanes:
    """Spreads slices, given by start, over as few lanes as hold them without an overlap."""

    def __init__(self, *, nested: bool = False) -> None:
        """``nested``: one within another may share its lane, as calls do."""
        self._nested = nested
        self._ends: list[list[int]] = []

    def place(self, start_ns: int, end_ns: int) -> int:
        """Number of the slice's lane, from 0."""
        for lane, ends in enumerate(self._ends):
            while ends and ends[-1] <= start_ns:
                ends.pop()
            if not ends or (self._nested and end_ns <= ends[-1]):
                ends.append(end_ns)
                return lane
        self._ends.append([end_ns])
        return len(self._ends) - 1
