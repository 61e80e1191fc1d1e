"""Kineto traces of tests as plain rows, read from their text with exact decimals; times are whole nanoseconds.

Shares no code with the package, so that what follows from these rows can be held against it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

MARKS = re.compile(r"ProfilerStep#\d+|ringprof::iteration\b.*|PyTorch Profiler \(0\)|record_param_comms", re.DOTALL)
CLASSES = (
    (
        "launch call",
        r"(cuda|hip|cu)(ExtModule|Module|ExtLaunch|Graph)?(Launch|OccupancyMaxActiveBlocks|Mem(cpy|set)).*",
    ),
    ("allocation or free", r"(cuda|hip|cu)(Mem)?(Malloc|Free|HostMalloc|HostAlloc|HostFree|Alloc).*"),
    ("synchronisation", r"(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize"),
    ("data loader", r"enumerate\(DataLoader\)#.*"),
    (
        "compile or graph capture",
        r"TorchDynamo.*|(cuda|hip|cu)(StreamBeginCapture|StreamEndCapture|GraphInstantiate).*",
    ),
)
"""Patterns of the names of each class of host event; an annotation of no class is a user range."""


@dataclass(frozen=True)
class Event:
    """Host event, with its thread."""

    name: str
    start: int
    end: int
    thread: Any
    annotation: bool = False

    def event_class(self) -> str | None:
        """Return the class of the event, None for an operator."""
        for event_class, pattern in CLASSES:
            if re.fullmatch(pattern, self.name, re.DOTALL):
                return event_class
        return "user range" if self.annotation else None


@dataclass(frozen=True)
class Activity:
    """Device activity, with the host call that launched it."""

    name: str
    start: int
    end: int
    category: str
    device: int
    stream: int
    launch: Event | None
    target: int | None
    names_launch: bool = True
    """Whether the trace gives the id of a launch, recorded or not."""

    @property
    def is_peer_copy(self) -> bool:
        return self.category == "memcpy" and "PtoP" in self.name


@dataclass
class RankTrace:
    """Trace of one rank."""

    activities: list[Activity] = field(default_factory=list)
    host: list[Event] = field(default_factory=list)
    annotations: list[Event] = field(default_factory=list)
    device_annotations: list[Event] = field(default_factory=list)


# --- reading ------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> RankTrace:
    """Read a Kineto trace, plain or compressed."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    document = json.loads(text, parse_float=Decimal)
    base = int(document.get("baseTimeNanoseconds", 0))
    rows = [row for row in document["traceEvents"] if row.get("ph") == "X" and "dur" in row]
    trace = RankTrace()
    launches: dict[Any, Event] = {}
    for row in rows:
        category, event = str(row.get("cat", "")).lower(), _event(row, base)
        if category.endswith(("runtime", "driver")) and "correlation" in row.get("args", {}):
            launches.setdefault(row["args"]["correlation"], event)
        if category in ("user_annotation", "gpu_user_annotation"):
            (trace.annotations if category[0] == "u" else trace.device_annotations).append(event)
        counts = category in ("cpu_op", "operator", "user_annotation") or category.endswith(("runtime", "driver"))
        if counts and event.end > event.start and not MARKS.fullmatch(event.name):
            trace.host.append(event)
    for row in rows:
        category = str(row.get("cat", "")).lower().removeprefix("gpu_")
        if category in ("kernel", "memcpy", "memset"):
            trace.activities.append(_activity(row, base, category, launches))
    trace.activities.sort(key=lambda activity: activity.start)
    return trace


def _event(row: Mapping[str, Any], base: int) -> Event:
    start = Decimal(str(row["ts"])) * 1000
    end = start + Decimal(str(row["dur"])) * 1000
    annotation = str(row.get("cat")) in ("user_annotation", "gpu_user_annotation")
    return Event(str(row["name"]), base + int(start), base + int(end), row.get("tid"), annotation)


def _activity(row: Mapping[str, Any], base: int, category: str, launches: Mapping[Any, Event]) -> Activity:
    event, args = _event(row, base), row.get("args", {})
    device, stream = args.get("device", row["pid"]), args.get("stream", row["tid"])
    number = args.get("correlation", 0)
    launch, names_launch = launches.get(number) if number else None, number != 0
    end = max(event.start, event.end)
    return Activity(event.name, event.start, end, category, device, stream, launch, args.get("toDevice"), names_launch)


# --- the window ---------------------------------------------------------------------------------------------------


def window_activities(trace: RankTrace, name: str | None = None) -> list[Activity]:
    """Return the activities of the named ranges, of the marked iterations, or all."""
    inside = [activity for activities in window_parts(trace, name) for activity in activities]
    return [activity for activity in trace.activities if activity in inside] if inside else trace.activities


def window_parts(trace: RankTrace, name: str | None = None) -> list[list[Activity]]:
    """Return the activities of each named range or marked iteration that has any; empty where there is none."""
    patterns = [re.escape(name).replace(r"\*", ".*").replace(r"\?", ".")] if name else []
    for pattern in patterns or [r"ringprof::iteration\b.*", r"ProfilerStep#\d+"]:
        ranges = [event for event in trace.annotations if re.fullmatch(pattern, event.name, re.DOTALL)]
        owned = [(activity, _owners(activity, trace, ranges)) for activity in trace.activities]
        parts = [[activity for activity, owners in owned if number in owners] for number in range(len(ranges))]
        if any(parts) and name != "trace":
            return [part for part in parts if part]
    return []


def _owners(activity: Activity, trace: RankTrace, ranges: list[Event]) -> list[int]:
    """Return the positions of the ranges that an activity belongs to."""
    if activity.launch is not None:
        return _enclosing(activity.launch, ranges)
    on_device = {row.name for row in trace.device_annotations if row.start <= activity.start < row.end}
    if activity.names_launch or any(event.name in on_device for event in ranges):
        return [number for number, event in enumerate(ranges) if event.name in on_device]
    owners: list[int] = []
    for number in sorted(range(len(ranges)), key=lambda number: ranges[number].start):
        own = [other for other in trace.activities if other.launch and number in _enclosing(other.launch, ranges)]
        during = own and min(a.start for a in own) <= activity.start < max(a.end for a in own)
        if during and all(ranges[owner].end > ranges[number].start for owner in owners):
            owners.append(number)
    launched_before = [other for other in trace.activities if other.launch and other.start <= activity.start]
    if owners or not launched_before:
        return owners
    last = max(launched_before, key=lambda other: other.start).launch
    return _enclosing(last, ranges) if last else []


def _enclosing(call: Event, ranges: list[Event]) -> list[int]:
    return [number for number, event in enumerate(ranges) if event.start <= call.start <= event.end]
