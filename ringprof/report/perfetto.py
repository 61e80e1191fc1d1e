"""The merged trace for Perfetto: all ranks in one file, on one clock.

Each rank is a process, named by host and rank. Its tracks are its streams, ring steps, exposed stretches and idle time
by cause; its counters are the rates that it sends at, per class of link. A transfer contains slices for its wait and
its wire time. An arrow goes from where the sender starts a message to where the receiver ends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.exposure import exposure_of
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.memory import memory_timelines
from ringprof.analysis.rank import Detail, Rank
from ringprof.analysis.steps.blocks import StepKey
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.timeline.rows import timed_activities
from ringprof.analysis.transfers.from_run import fill_from_run
from ringprof.analysis.transfers.hops import Split, gbps
from ringprof.analysis.transfers.matching import match
from ringprof.analysis.transfers.transfers import Transfer, transfers_of
from ringprof.common.json_object import JsonObject
from ringprof.report.terms import LABELS
from ringprof.report.text import clean
from ringprof.report.timeline import Activity, activities_of, idle_groups, origins_of, peers_of, step_name
from ringprof.run import Run
from ringprof.trace.columns import NONE, Ranges, Trace

RUN_TRACK, STEPS, EXPOSED, IDLE, STREAMS, TRACKS_PER_LANE = 0, 1, 2, 3, 100, 1_000_000
"""Track numbers inside a process: the run, ring steps, exposed communication, idle time by cause. A stream's track is
its number plus ``STREAMS``. ``TRACKS_PER_LANE`` is added for each further lane of a track whose slices overlap."""
FIRST_THREAD_TRACK, THREAD_TRACKS_PER_LANE = 10_000_000, 10_000
"""Track number of a rank's first CPU thread, and the amount added for each further lane of a thread."""
ARROW_CATEGORY, LAUNCH_CATEGORY = "message", "launch"
_LINK_NAMES = {"same_host": "same host", "other_host": "other host", "unknown": "unknown link"}


def events_of(findings: Findings, *, launches: bool = False) -> Iterator[TraceEvent]:
    """Generate every event of the merged trace; with ``launches`` also the CPU threads of every rank."""
    attribution = findings.attribution
    origin, shift_ns = origins_of(attribution), 0
    for rank in attribution.ranks if launches else ():
        # Launches may begin before the first activity, and Perfetto drops negative times.
        launch = rank.detail.classified.launch[rank.detail.rows().activity]
        starts_ns = rank.detail.classified.trace.launches.start_ns[launch[launch != NONE]]
        first = min(starts_ns.tolist(), default=None)
        shift_ns = shift_ns if first is None else max(shift_ns, origin[rank.rank] - first)
    origin = {rank: start_ns - shift_ns for rank, start_ns in origin.items()}
    arrows, steps = _arrows(attribution), findings.finder.by_activity
    yield from _run_events(attribution, origin, arrows)
    for rank in attribution.ranks:
        host = f"{clean(rank.host)} " if rank.host else ""
        yield metadata_event("process_name", rank.rank, 0, name=f"{host}rank {rank.rank}")
        yield metadata_event("process_sort_index", rank.rank, 0, sort_index=rank.rank)
        if rank.on_cpu:
            yield from _call_events(rank.rank, _ranges_and_operators(rank.detail), origin[rank.rank])
            continue
        for track, name in ((STEPS, "ring steps"), (EXPOSED, "exposed communication"), (IDLE, "idle by cause")):
            yield metadata_event("thread_name", rank.rank, track, name=name)
        rank_events = _RankEvents(rank, rank.detail, origin[rank.rank], arrows, steps.get(rank.rank, {}))
        yield from rank_events.activities(launches=launches)
        yield from rank_events.exposed()
        yield from rank_events.idle()
        yield from rank_events.rates()
    yield from _step_events(findings.steps, origin)
    for pool in memory_timelines(attribution):
        for time, size in zip(pool.time_ns.tolist(), pool.allocated_bytes.tolist(), strict=True):
            # Changes before the first activity are put at time 0.
            time_ns = max(0, time - origin[pool.rank])
            yield counter_event(pool.rank, f"allocated, {pool.memory}", time_ns, "MiB", size / 2**20)


def run_metadata(findings: Findings) -> JsonObject:
    """Describe the run and its devices for the file's ``otherData``."""
    attribution, run = findings.attribution, findings.attribution.run
    clocks = attribution.clocks
    metadata: JsonObject = {
        "ranks": len(attribution.ranks),
        "world size": attribution.world_size or None,
        "devices": ", ".join(dict.fromkeys(clean(rank.device) for rank in attribution.ranks if rank.device)) or None,
        "clocks of hosts may be off by us": clocks.residual_ns / 1e3 if clocks.several else None,
    }
    if run is not None:
        metadata |= _run_settings(run)
    return {key: value for key, value in metadata.items() if value is not None}


def _run_settings(run: Run) -> JsonObject:
    work, strategy = run.workload, run.strategy
    settings: JsonObject = {"run": run.name, "created": run.created, "kernel": run.kernel}
    if strategy:
        settings |= {"strategy": strategy.name, "hops": strategy.hops, **strategy.params}
    if work:
        settings |= {"tokens": work.seq, "heads": work.heads, "kv heads": work.kv_heads, "head dim": work.head_dim,
                  "batch": work.batch, "dtype": work.dtype, "causal": work.causal,
                  "operator": work.operator}  # fmt: skip
    settings |= run.environment.versions | {"driver": run.environment.driver}
    return {clean(key): clean(value) if isinstance(value, str) else value for key, value in settings.items()}


# --- arrows -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Arrows:
    """Arrows that start or end at a transfer: (rank, activity) -> numbers of the arrows."""

    begin: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    end: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    backward: int = 0
    """Number of arrows left out because two hosts' clocks are so far off that a message would end before it starts."""


def _arrows(attribution: Attribution) -> _Arrows:
    """Match each transfer to those that receive from it, with one arrow per pair where both are drawn."""
    transfers: dict[int, list[Transfer]] = {}
    for rank in attribution.ranks:
        detail = rank.detail
        if detail.window.between_ns is None:
            transfers[rank.rank] = [part.transfer for part in detail.splits]
            continue
        # If each rank listed only what lies between the cut times, ranks would count different transfers, and wrong
        # pairs would match.
        activities = timed_activities(detail.classified, detail.window.activities(), detail.device, None)
        whole_window = transfers_of(detail.classified, activities.activity, rank.rank)
        transfers[rank.rank] = fill_from_run(whole_window, attribution.run, rank.rank)
    matches = match(transfers)
    windows = {rank.rank: rank.window.between_ns for rank in attribution.ranks}
    pairs = dict.fromkeys(zip(matches.sender.tolist(), matches.receiver.tolist(), strict=True))
    arrows, backward = _Arrows(), 0
    for number, pair in enumerate(pairs):
        sender, receiver = (matches.transfers[index] for index in pair)
        send_span = _drawn_span(sender, windows[sender.rank])
        receive_span = _drawn_span(receiver, windows[receiver.rank])
        if send_span is None or receive_span is None:
            continue
        offset_ns = attribution.clocks.offset_ns
        if receive_span[1] + offset_ns[receiver.rank] <= send_span[0] + offset_ns[sender.rank]:
            backward += 1
            continue
        arrows.begin.setdefault((sender.rank, sender.activity), []).append(number)
        arrows.end.setdefault((receiver.rank, receiver.activity), []).append(number)
    return _Arrows(arrows.begin, arrows.end, backward)


def _drawn_span(transfer: Transfer, between_ns: tuple[int, int] | None) -> tuple[int, int] | None:
    """Clip a transfer to the window; None where nothing of it is drawn."""
    start, end = transfer.start_ns, transfer.end_ns
    if between_ns is not None:
        start, end = max(start, between_ns[0]), min(end, between_ns[1])
    return (start, end) if between_ns is None or start < end else None


# --- the run, and names -------------------------------------------------------------------------------


def _run_events(attribution: Attribution, origin: dict[int, int], arrows: _Arrows) -> Iterator[TraceEvent]:
    """Generate one slice over the whole run that holds its settings: the viewer does not show the file's metadata."""
    process = max(rank.rank for rank in attribution.ranks) + 1
    run = attribution.run
    name = clean(run.name) if run else "run"
    yield metadata_event("process_name", process, 0, name=f"ringprof: {name}")
    yield metadata_event("process_sort_index", process, 0, sort_index=-1)
    yield metadata_event("thread_name", process, RUN_TRACK, name="run")
    details = (_run_settings(run) if run else {}) | {"arrows left out, as clocks are off": arrows.backward or None}
    end = max(rank.breakdown.end_ns - origin[rank.rank] for rank in attribution.ranks)
    yield slice_event(process, RUN_TRACK, name, 0, end, **details)


def _step_events(steps: Iterable[Step], origin: dict[int, int]) -> Iterator[TraceEvent]:
    lanes: dict[int, Lanes] = {}
    for step in steps:
        start, end = step.start_ns - origin[step.rank], step.end_ns - origin[step.rank]
        track = STEPS + TRACKS_PER_LANE * lanes.setdefault(step.rank, Lanes()).place(start, end)
        name = step_name(StepKey(step.iteration, step.phase, step.call, step.step))
        figures = {
            "bound": step.bound or "not known", "hops": step.hops, "bytes": step.bytes,
            "exposed ms": step.exposed_ns / 1e6, "wait ms": _ms(step.wait_ns), "wire ms": _ms(step.wire_ns),
        }  # fmt: skip
        yield slice_event(step.rank, track, name, start, end, **figures)


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e6


# --- one rank -----------------------------------------------------------------------------------------


class _RankEvents:
    """Events of one rank whose trace holds device activities."""

    def __init__(self, rank: Rank, detail: Detail, origin: int, arrows: _Arrows, steps: dict[int, StepKey]) -> None:
        self._rank, self._detail, self._origin, self._arrows, self._steps = rank.rank, detail, origin, arrows, steps
        self._split = {part.transfer.activity: part for part in detail.splits}

    def activities(self, *, launches: bool) -> Iterator[TraceEvent]:
        """Generate every activity on its stream, with its transfer; with ``launches`` also the CPU threads."""
        calls = _ranges_and_launches(self._detail) if launches else []
        yield from _call_events(self._rank, calls, self._origin)
        launched = {row for call in calls for row in call.launched}
        lanes: dict[int, Lanes] = {}
        named_tracks: set[int] = set()
        for activity in activities_of(self._detail):
            start, end = activity.start_ns - self._origin, activity.end_ns - self._origin
            lane = lanes.setdefault(activity.stream, Lanes()).place(start, end)
            track = STREAMS + activity.stream + TRACKS_PER_LANE * lane
            if track not in named_tracks:
                named_tracks.add(track)
                name = f"stream {activity.stream}" + (f", beside ({lane + 1})" if lane else "")
                yield metadata_event("thread_name", self._rank, track, name=name)
            key, part = self._steps.get(activity.row), self._split.get(activity.row)
            figures: JsonObject = {"kind": LABELS[activity.kind], "step": key and step_name(key)}
            if part is not None:
                transfer, group = part.transfer, part.transfer.group[0]
                figures |= {
                    "bytes": transfer.sent_bytes,
                    "send to": peers_of(transfer.sends),
                    "receive from": peers_of(transfer.receives),
                    "link": _LINK_NAMES[part.link],
                    "group": clean(group) if group else None,
                    "wait ms": _ms(part.wait_ns),
                    "wire ms": _ms(part.wire_ns),
                    "GB/s": _rate_gbps(part),
                }
            yield slice_event(self._rank, track, clean(activity.name), start, end, **figures)
            if activity.row in launched:
                number = _arrow_number(self._rank, activity.row)
                yield arrow_event("f", LAUNCH_CATEGORY, number, self._rank, track, start)
            yield from self._transfer_events(activity, track, start, end)

    def _transfer_events(self, activity: Activity, track: int, start: int, end: int) -> Iterator[TraceEvent]:
        """Generate a transfer's messages as instants with their arrows, and its wait and wire slices."""
        part, key = self._split.get(activity.row), (self._rank, activity.row)
        sent, received = self._arrows.begin.get(key, ()), self._arrows.end.get(key, ())
        if sent:
            receivers = peers_of(part.transfer.sends) if part else None
            yield slice_event(self._rank, track, f"send to {receivers}" if receivers else "send", start, start)
            yield from (arrow_event("s", ARROW_CATEGORY, number, self._rank, track, start) for number in sent)
        if part is not None and part.wire_ns is not None:
            ready = min(max(part.transfer.end_ns - part.wire_ns - self._origin, start), end)
            if ready > start:
                yield slice_event(self._rank, track, "wait", start, ready)
            if end > ready:
                yield slice_event(self._rank, track, "wire", ready, end, **{"GB/s": _rate_gbps(part)})
        if received:
            # Perfetto closes a slice at its end, so an event inside it must begin earlier.
            last, senders = max(start, end - 1), peers_of(part.transfer.receives) if part else None
            yield slice_event(self._rank, track, f"received from {senders}" if senders else "received", last, last)
            yield from (arrow_event("f", ARROW_CATEGORY, number, self._rank, track, last) for number in received)

    def exposed(self) -> Iterator[TraceEvent]:
        """Generate slices for exposed communication, split into wire and wait, and for time blocked on a peer."""
        exposure = exposure_of(self._detail, self._detail.rows())
        parts = (
            ("exposed wire", exposure.wire),
            ("exposed wait", exposure.wait),
            ("exposed, not split", exposure.unknown),
        )
        for name, spans in parts:
            for start, end in zip(spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True):
                yield slice_event(self._rank, EXPOSED, name, start - self._origin, end - self._origin)
        for block in self._detail.blocks:
            name = "blocked on a peer" if block.peer is None else f"blocked on rank {block.peer}"
            start, end = block.start_ns - self._origin, block.end_ns - self._origin
            yield slice_event(self._rank, EXPOSED, name, start, end, peer=block.peer, part=block.part)

    def idle(self) -> Iterator[TraceEvent]:
        """Generate a slice per part of the idle time, named after what the host did or what the device waited for."""
        parts = self._detail.idle_parts()
        for group in idle_groups(parts):
            start, end = (int(time) - self._origin for time in (parts.start_ns[group[0]], parts.end_ns[group[-1]]))
            cause, event_class, name = parts.main_label(group, self._detail.classified.trace.names)
            figures = {"cause": cause, "class": event_class}
            yield slice_event(self._rank, IDLE, clean(name) or event_class, start, end, **figures)

    def rates(self) -> Iterator[TraceEvent]:
        """Generate counters of the rate that leaves the rank on each class of link, while a transfer is on the wire."""
        links: dict[str, list[tuple[int, int, float]]] = {}
        for split in self._split.values():
            rate = _rate_gbps(split)
            if rate is not None and split.wire_ns:
                end = split.transfer.end_ns
                links.setdefault(split.link, []).append((end - split.wire_ns, end, rate))
        between_ns = self._detail.window.between_ns
        for link, spans in links.items():
            # The sum of the rates of all transfers on the wire, at each time that it changes.
            starts, ends, rates = (np.array(column) for column in zip(*spans, strict=True))
            if between_ns is not None:
                starts, ends = np.clip(starts, *between_ns), np.clip(ends, *between_ns)
            times, index = np.unique(np.concatenate((starts, ends)), return_inverse=True)
            change = np.zeros(len(times))
            np.add.at(change, index, np.concatenate((rates, -rates)))
            values = np.abs(np.round(np.cumsum(change), 3))
            for time, value in zip(times.tolist(), values.tolist(), strict=True):
                yield counter_event(self._rank, f"sent, {_LINK_NAMES[link]}", time - self._origin, "GB/s", value)


def _rate_gbps(part: Split) -> float | None:
    rate = gbps(part.transfer.sent_bytes, part.wire_ns)
    return None if rate is None else round(rate, 3)


# --- CPU threads: named ranges, launches of device work, and a CPU rank's operators -------------------


class _Call(NamedTuple):
    """A call or range on a CPU thread; times are in nanoseconds of the rank's own clock."""

    start_ns: int
    end_ns: int
    thread: int
    name: str
    launched: tuple[int, ...] = ()
    """Activities to draw an arrow to; those that seem to start before their launch are left out."""


def _ranges_and_operators(detail: Detail) -> list[_Call]:
    """List the named ranges and operators within the window of a rank that runs on CPU."""
    trace, iterations = detail.classified.trace, detail.cpu_iterations
    first, last = min(iteration.start_ns for iteration in iterations), max(iteration.end_ns for iteration in iterations)
    return [
        *_clipped_ranges(trace, trace.annotations, first, last),
        *_clipped_ranges(trace, trace.operators, first, last),
    ]


def _ranges_and_launches(detail: Detail) -> list[_Call]:
    """List the launches of the activities in a rank's window, and the named ranges during that time."""
    trace, launches = detail.classified.trace, detail.classified.trace.launches
    activities = detail.rows().activity
    launch = detail.classified.launch[activities]
    activities, launch = activities[launch != NONE], launch[launch != NONE]
    if not len(launch):
        return []
    first, last = int(launches.start_ns[launch].min()), int(launches.end_ns[launch].max())
    activities_of_launch: dict[int, list[int]] = {}
    for activity, index in zip(activities.tolist(), launch.tolist(), strict=True):
        activities_of_launch.setdefault(index, []).append(activity)
    calls, columns = list(_clipped_ranges(trace, trace.annotations, first, last)), trace.activities
    for index, launched in activities_of_launch.items():
        start = int(launches.start_ns[index])
        name = f"launch of {trace.names[columns.name[launched[0]]]}"
        name += f" and {len(launched) - 1} more" if len(launched) > 1 else ""
        later = tuple(activity for activity in launched if columns.start_ns[activity] >= start)
        calls.append(_Call(start, int(launches.end_ns[index]), int(launches.thread[index]), name, later))
    return calls


def _clipped_ranges(trace: Trace, ranges: Ranges, first: int, last: int) -> Iterator[_Call]:
    rows = np.flatnonzero((ranges.start_ns < last) & (ranges.end_ns > first))
    columns = (ranges.start_ns, ranges.end_ns, ranges.thread, ranges.name)
    for start, end, thread, name in zip(*(column[rows].tolist() for column in columns), strict=True):
        yield _Call(max(start, first), min(end, last), thread, trace.names[name])


def _call_events(rank: int, calls: Iterable[_Call], origin: int) -> Iterator[TraceEvent]:
    """Generate the events of one rank's calls, one track per thread.

    Each call is followed by the starts of the arrows to the activities that it launched.
    """
    threads: dict[int, tuple[int, Lanes]] = {}
    named_tracks: set[int] = set()
    for call in sorted(calls, key=lambda call: (call.start_ns, -call.end_ns)):
        number, lanes = threads.setdefault(call.thread, (len(threads), Lanes(nested=True)))
        track = FIRST_THREAD_TRACK + number + THREAD_TRACKS_PER_LANE * lanes.place(call.start_ns, call.end_ns)
        if track not in named_tracks:
            named_tracks.add(track)
            yield metadata_event("thread_name", rank, track, name=f"CPU thread {call.thread}")
        start = call.start_ns - origin
        yield slice_event(rank, track, clean(call.name), start, call.end_ns - origin)
        for activity in call.launched:
            yield arrow_event("s", LAUNCH_CATEGORY, _arrow_number(rank, activity), rank, track, start)


def _arrow_number(rank: int, activity: int) -> int:
    """Return the number of the arrow from an activity's launch, unique per rank and activity."""
    return (rank << 32) + activity


# --- events of the trace-event format (Google, 2016), written so that Perfetto reads every one of them ---

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
