"""What raw trace events say, counted in plain integers: the truth that the sentences of a report are held against.

Nothing here uses the analysis. Committed traces are read as JSON, made-up ones from the rows of their `Builder`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ringprof.trace.columns import NONE, RANGE, RUNTIME_CALL
from tests.analysis.build import Builder
from tests.analysis.sweep import sweep

GAP_NS, LONG_NS, SOON_NS = 5_000, 100_000, 20_000
"""The limits that docs/metrics.md names: of a gap, of a long host event, of an arrival that lets work start."""
_CATEGORIES = {"kernel": 0, "gpu_memcpy": 1, "gpu_memset": 2}
_HOST = {"cpu_op": 0, "user_annotation": RANGE, "cuda_runtime": RUNTIME_CALL, "cuda_driver": RUNTIME_CALL}
_WINDOWS = (re.compile(r"ringprof::iteration"), re.compile(r"ProfilerStep#\d+"))
_MARK = re.compile(r"ProfilerStep#\d+|ringprof::iteration\b.*|PyTorch Profiler.*|record_param_comms")
_ATTENTION = re.compile(r"flash|sdpa|fmha|dot_do_o|convert_dq", re.IGNORECASE)
_BLOCKED = (re.compile(r"ringprof::wait(/.*)?"), re.compile(r"gloo:.*"))


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or set on the device."""

    start: int
    end: int
    name: str
    category: int
    stream: int
    correlation: int
    device: int = 0

    @property
    def kind(self) -> str:
        """Its class: communication is NCCL's kernels and copies from one GPU to another."""
        if self.name.startswith(("nccl", "Memcpy PtoP")):
            return "comm"
        return "memory" if self.category else "compute"


@dataclass(frozen=True)
class HostEvent:
    """A CPU operator, range or CUDA call."""

    start: int
    end: int
    name: str
    thread: int
    category: int


@dataclass
class RawRank:
    """The events of one rank's trace; ``activities`` are those of its window, by start."""

    activities: list[Activity]
    host: list[HostEvent]
    launches: dict[int, HostEvent]
    marked: list[tuple[int, int]] = field(default_factory=list)

    @cached_property
    def swept(self) -> dict[str, int]:
        """Compute, communication, what of it is exposed, memory, idle and wall, in nanoseconds."""
        return sweep((one.start, one.end, one.kind) for one in self.activities)

    @cached_property
    def attention_ns(self) -> int:
        """Time with an attention kernel running."""
        return union_ns((a.start, a.end) for a in self.activities if a.category == 0 and _ATTENTION.search(a.name))

    def exposed_ns(self, name: re.Pattern[str]) -> int:
        """Time in which communication of such a name runs and nothing computes."""
        chosen = [(a.start, a.end, "comm") for a in self.activities if a.kind == "comm" and name.search(a.name)]
        return sweep([*chosen, *((a.start, a.end, "compute") for a in self.activities if a.kind == "compute")])[
            "exposed_comm"
        ]

    @cached_property
    def stretches(self) -> list[tuple[int, int, Activity]]:
        """(start, launched, activity that follows) of each stretch without activity; without a launch: at its start."""
        found, until = [], self.activities[0].end if self.activities else 0
        for after in self.activities[1:]:
            if after.start > until:
                call = self.launches.get(after.correlation)
                found.append((until, min(max(call.end if call else until, until), after.start), after))
            until = max(until, after.end)
        return found

    @property
    def idle_by_cause(self) -> dict[str, int]:
        """Idle time by cause: ``host``, ``gap``, ``blocked``; time blocked on peers is not taken out."""
        times = {"host": 0, "gap": 0, "blocked": 0}
        for start, launched, after in self.stretches:
            times["host"] += launched - start
            rest = after.start - launched
            times["gap" if rest < GAP_NS else "blocked"] += rest
        return times

    @cached_property
    def host_pieces(self) -> list[tuple[int, str]]:
        """(time, innermost event on the launching thread, or "") of each piece of idle time before a launch."""
        by_thread = defaultdict(list)
        for event in self.host:
            if not _MARK.fullmatch(event.name):
                by_thread[event.thread].append(event)
        found = []
        for start, launched, after in self.stretches:
            if launched > start:
                open_here = [
                    event
                    for event in by_thread[self.launches[after.correlation].thread]
                    if event.start < launched and event.end > start
                ]
                found += _innermost(open_here, start, launched)
        return found

    @cached_property
    def waits_for_copies_ns(self) -> dict[int | None, int]:
        """Receiver -> time in which a launched peer copy to it holds the device up; None where no range names it."""
        found: dict[int | None, int] = defaultdict(int)
        for _, launched, after in self.stretches:
            if after.name.startswith("Memcpy PtoP") and after.start > launched:
                call = self.launches[after.correlation]
                around = [e.name for e in self.host if e.start <= call.start < e.end and "ringprof::send" in e.name]
                to = re.search(r"/to=(\d+)", " ".join(around))
                found[int(to[1]) if to else None] += after.start - launched
        return found

    @property
    def blocked_ns(self) -> int:
        """On CPU: time inside the marked iterations in ranges of waiting or, without these, of gloo."""
        found = [[(e.start, e.end) for e in self.host if pattern.fullmatch(e.name)] for pattern in _BLOCKED]
        waits = found[0] or found[1]
        inside = [(max(a, start), min(b, end)) for a, b in waits for start, end in self.marked or [(0, 2**62)]]
        return union_ns(span for span in inside if span[0] < span[1])


def _innermost(events: list[HostEvent], start: int, end: int) -> list[tuple[int, str]]:
    edges = sorted({start, end, *(t for e in events for t in (e.start, e.end) if start < t < end)})
    found = []
    for here, there in pairwise(edges):
        around = [event for event in events if event.start <= here and event.end >= there]
        inner = max(around, key=lambda event: (event.start, -event.end), default=None)
        found.append((there - here, inner.name if inner else ""))
    return found


def union_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Length of what the spans cover."""
    covered, until = 0, None
    for start, end in sorted(spans):
        if until is None or end > until:
            covered += end - (start if until is None else max(start, until))
            until = end
    return covered


@lru_cache(maxsize=256)
def of_file(path: Path, *, whole: bool = False) -> RawRank:
    """Read a Kineto trace; ``whole`` leaves the marks of iterations alone. Times leave the file's base time out."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    listed = json.loads(text, parse_float=str, parse_int=str, strict=False)
    return of_events(listed if isinstance(listed, list) else listed["traceEvents"], whole=whole)


def of_events(listed: Iterable[dict[str, Any]], *, whole: bool = False) -> RawRank:
    """Take Kineto's events; times in microseconds, as text or exact numbers."""
    events = [event for event in listed if event.get("cat") and "ts" in event]
    activities, host, launches = [], [], {}
    for event in events:
        start, arguments = _ns(event["ts"]), event.get("args") or {}
        end = start + _ns(event.get("dur", "0"))
        joined = int(arguments.get("correlation", NONE))
        if event["cat"] in _CATEGORIES:
            row = (start, end, str(event.get("name", "")), _CATEGORIES[event["cat"]])
            activities.append(Activity(*row, _number(arguments, "stream"), joined, _number(arguments, "device")))
        elif event["cat"] in _HOST:
            host.append(HostEvent(start, end, str(event["name"]), hash(str(event["tid"])), _HOST[event["cat"]]))
            if "correlation" in arguments and event["cat"].startswith("cuda"):
                launches[joined] = host[-1]
    return _in_window(activities, host, launches, whole=whole)


def of_builder(builder: Builder) -> RawRank:
    """Take the rows of a made-up trace."""
    names = builder.names
    launches = {joins: HostEvent(a, b, "", thread, RUNTIME_CALL) for a, b, thread, joins in builder.launches}
    host = [HostEvent(a, b, names[name], thread, category) for a, b, name, thread, category in builder.host_events]
    host += [HostEvent(row[0], row[1], names[row[2]], row[3], RANGE) for row in builder.annotations]
    activities = [Activity(r[0], r[1], names[r[2]], r[3], r[5], r[6], r[4]) for r in builder.activities]
    return _in_window(activities, host, launches)


def _in_window(
    activities: list[Activity], host: list[HostEvent], launches: dict[int, HostEvent], *, whole: bool = False
) -> RawRank:
    marked: list[tuple[int, int]] = []
    for pattern in () if whole else _WINDOWS:
        marks = [(e.start, e.end) for e in host if e.category == RANGE and pattern.fullmatch(e.name)]
        marked = marked or marks
    inside = [
        a
        for a in activities
        if a.correlation in launches and any(s <= launches[a.correlation].start < e for s, e in marked)
    ]
    chosen = sorted(inside or activities, key=lambda a: (a.start, a.end))
    return RawRank(chosen, host, launches, marked)


def _ns(microseconds: Any) -> int:
    return int(Decimal(str(microseconds)) * 1000)


def _number(arguments: dict[str, Any], name: str) -> int:
    value = str(arguments.get(name, ""))
    return int(value) if value.lstrip("-").isdigit() else NONE


def is_copy_with_host(name: str) -> bool:
    """Whether a memory copy is from or to the host."""
    return bool(re.search("HtoD|DtoH|Host", name))
