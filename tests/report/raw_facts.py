"""Facts counted from raw trace events, in plain integers: the truth that a report's sentences are checked against.

Nothing here uses the analysis. Committed traces are read as JSON, synthetic ones from the rows of their `Builder`.
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
"""Limits from docs/metrics.md: of a gap, of a long host event, and of an arrival that lets work start."""
_CATEGORIES = {"kernel": 0, "gpu_memcpy": 1, "gpu_memset": 2}
_HOST = {"cpu_op": 0, "user_annotation": RANGE, "cuda_runtime": RUNTIME_CALL, "cuda_driver": RUNTIME_CALL}
_WINDOWS = (re.compile(r"ringprof::iteration"), re.compile(r"ProfilerStep#\d+"))
_MARK = re.compile(r"ProfilerStep#\d+|ringprof::iteration\b.*|PyTorch Profiler.*|record_param_comms")
_ATTENTION = re.compile(r"flash|sdpa|fmha|dot_do_o|convert_dq", re.IGNORECASE)
_BLOCKED = (re.compile(r"ringprof::wait(-for-all)?(/.*)?"), re.compile(r"gloo:.*"))


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
        """Class of the activity: communication is NCCL's kernels and copies from one GPU to another."""
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
    outside: list[Activity] = field(default_factory=list)
    """Activities that are not of the window."""

    @cached_property
    def swept(self) -> dict[str, int]:
        """Compute, communication, its exposed part, memory operations, idle and wall, in nanoseconds."""
        return sweep((activity.start, activity.end, activity.kind) for activity in self.activities)

    @cached_property
    def attention_ns(self) -> int:
        """Time with an attention kernel running."""
        return union_ns((a.start, a.end) for a in self.activities if a.category == 0 and _ATTENTION.search(a.name))

    def exposed_ns(self, name: re.Pattern[str]) -> int:
        """Measure the time in which communication whose name matches runs and nothing computes."""
        chosen = [(a.start, a.end, "comm") for a in self.activities if a.kind == "comm" and name.search(a.name)]
        return sweep([*chosen, *((a.start, a.end, "compute") for a in self.activities if a.kind == "compute")])[
            "exposed_comm"
        ]

    @cached_property
    def stretches(self) -> list[tuple[int, int, Activity]]:
        """Idle stretches as (start, launched, following activity); without a recorded launch, launched is the start."""
        stretches, busy_until = [], self.activities[0].end if self.activities else 0
        for following in self.activities[1:]:
            if following.start > busy_until:
                call = self.launches.get(following.correlation)
                stretches.append(
                    (busy_until, min(max(call.end if call else busy_until, busy_until), following.start), following)
                )
            busy_until = max(busy_until, following.end)
        return stretches

    @property
    def idle_by_cause(self) -> dict[str, int]:
        """Idle time by cause: ``host``, ``gap``, ``blocked``; time blocked on peers is not subtracted."""
        times = {"host": 0, "gap": 0, "blocked": 0}
        for start, launched, following in self.stretches:
            times["host"] += launched - start
            after_launch_ns = following.start - launched
            times["gap" if after_launch_ns < GAP_NS else "blocked"] += after_launch_ns
        return times

    @cached_property
    def host_pieces(self) -> list[tuple[int, str]]:
        """Pieces of idle time before a launch: (time, innermost event on the launching thread, or "")."""
        by_thread = defaultdict(list)
        for event in self.host:
            if not _MARK.fullmatch(event.name):
                by_thread[event.thread].append(event)
        pieces = []
        for start, launched, following in self.stretches:
            if launched > start:
                open_events = [
                    event
                    for event in by_thread[self.launches[following.correlation].thread]
                    if event.start < launched and event.end > start
                ]
                pieces += _innermost(open_events, start, launched)
        return pieces

    @cached_property
    def waits_for_copies_ns(self) -> dict[int | None, int]:
        """Time in which a launched peer copy holds the device up, by receiver; None where no range names it."""
        waits: dict[int | None, int] = defaultdict(int)
        for _, launched, following in self.stretches:
            if following.name.startswith("Memcpy PtoP") and following.start > launched:
                call = self.launches[following.correlation]
                ranges = [e.name for e in self.host if e.start <= call.start < e.end and "ringprof::send" in e.name]
                receiver = re.search(r"/to=(\d+)", " ".join(ranges))
                waits[int(receiver[1]) if receiver else None] += following.start - launched
        return waits

    @property
    def blocked_ns(self) -> int:
        """Time on CPU inside the marked iterations in ranges of waiting or, without these, of gloo."""
        spans_by_pattern = [[(e.start, e.end) for e in self.host if pattern.fullmatch(e.name)] for pattern in _BLOCKED]
        waits = spans_by_pattern[0] or spans_by_pattern[1]
        inside = [(max(a, start), min(b, end)) for a, b in waits for start, end in self.marked or [(0, 2**62)]]
        return union_ns(span for span in inside if span[0] < span[1])


def _innermost(events: list[HostEvent], start: int, end: int) -> list[tuple[int, str]]:
    edges = sorted({start, end, *(t for e in events for t in (e.start, e.end) if start < t < end)})
    pieces = []
    for piece_start, piece_end in pairwise(edges):
        open_events = [event for event in events if event.start <= piece_start and event.end >= piece_end]
        inner = max(open_events, key=lambda event: (event.start, -event.end), default=None)
        pieces.append((piece_end - piece_start, inner.name if inner else ""))
    return pieces


def union_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of the spans."""
    covered, until = 0, None
    for start, end in sorted(spans):
        if until is None or end > until:
            covered += end - (start if until is None else max(start, until))
            until = end
    return covered


@lru_cache(maxsize=256)
def of_file(path: Path, *, whole: bool = False) -> RawRank:
    """Read a Kineto trace; ``whole`` ignores the marks of iterations. Times exclude the file's base time."""
    data = path.read_bytes()
    content = gzip.decompress(data) if path.suffix == ".gz" else data
    parsed = json.loads(content, parse_float=str, parse_int=str, strict=False)
    return of_events(parsed if isinstance(parsed, list) else parsed["traceEvents"], whole=whole)


def of_events(raw_events: Iterable[dict[str, Any]], *, whole: bool = False) -> RawRank:
    """Read Kineto events; times are in microseconds, as text or exact numbers."""
    events = [event for event in raw_events if event.get("cat") and "ts" in event]
    activities, host, launches = [], [], {}
    for event in events:
        start, arguments = _ns(event["ts"]), event.get("args") or {}
        end = start + _ns(event.get("dur", "0"))
        correlation = int(arguments.get("correlation", NONE))
        if event["cat"] in _CATEGORIES:
            row = (start, end, str(event.get("name", "")), _CATEGORIES[event["cat"]])
            activities.append(Activity(*row, _number(arguments, "stream"), correlation, _number(arguments, "device")))
        elif event["cat"] in _HOST:
            host.append(HostEvent(start, end, str(event["name"]), hash(str(event["tid"])), _HOST[event["cat"]]))
            if "correlation" in arguments and event["cat"].startswith("cuda"):
                launches[correlation] = host[-1]
    return _in_window(activities, host, launches, whole=whole)


def of_builder(builder: Builder) -> RawRank:
    """Read the rows of a synthetic trace."""
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
    return RawRank(chosen, host, launches, marked, [a for a in activities if inside and a not in inside])


def _ns(microseconds: Any) -> int:
    return int(Decimal(str(microseconds)) * 1000)


def _number(arguments: dict[str, Any], name: str) -> int:
    value = str(arguments.get(name, ""))
    return int(value) if value.lstrip("-").isdigit() else NONE


def is_copy_with_host(name: str) -> bool:
    """Return whether a memory copy is from or to the host."""
    return bool(re.search("HtoD|DtoH|Host", name))
