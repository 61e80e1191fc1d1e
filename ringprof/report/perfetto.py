"""All ranks in one trace for Perfetto, on one clock.

A process a rank, named by host and rank, with its streams, ring steps, exposed stretches and idle time by cause as
tracks, and what it sends per link as counters. A transfer holds its wait and its wire as slices of their own, and an
arrow goes from where its sender starts it to where its receiver ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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
from ringprof.json_object import JsonObject
from ringprof.report import perfetto_calls
from ringprof.report.idle_bars import idle_bars
from ringprof.report.terms import LABELS
from ringprof.report.text import clean
from ringprof.report.timeline import Activity, activities_of, origins_of, peers_of, step_name
from ringprof.report.trace_event import Lanes, TraceEvent, arrow_end, counter, named, slice_of
from ringprof.run import Run

RUN, STEPS, EXPOSED, IDLE, STREAMS, LANES = 0, 1, 2, 3, 100, 1_000_000
"""Track numbers inside a process: the run, ring steps, exposed communication, idle time by cause, a stream's number
plus this, and what is added for each further lane of a track whose slices overlap."""
MESSAGE = "message"
_LINKS = {"same_host": "same host", "other_host": "other host", "unknown": "unknown link"}


def events_of(found: Findings, *, launches: bool = False) -> Iterator[TraceEvent]:
    """Every event of the merged trace; with ``launches`` also every rank's CPU threads."""
    attribution = found.attribution
    origin, arrows = _origins(attribution, launches=launches), _arrows(attribution)
    steps = found.finder.by_activity
    yield from _run(attribution, origin, arrows)
    for rank in attribution.ranks:
        yield from _names(rank)
        if rank.on_cpu:
            calls = perfetto_calls.ranges_and_operators(rank.detail)
            yield from perfetto_calls.drawn(rank.rank, calls, origin[rank.rank])
            continue
        mine = _RankEvents(rank, rank.detail, origin[rank.rank], arrows, steps.get(rank.rank, {}))
        yield from mine.activities(launches=launches)
        yield from mine.exposed()
        yield from mine.idle()
        yield from mine.rates()
    yield from _steps(found.steps, origin)
    yield from _memory(attribution, origin)


def _origins(attribution: Attribution, *, launches: bool) -> dict[int, int]:
    """By rank what to take from its times, so that none is below 0: Perfetto would drop it."""
    origin, early = origins_of(attribution), 0
    for rank in attribution.ranks if launches else ():
        first = perfetto_calls.first_launch_ns(rank.detail)
        early = early if first is None else max(early, origin[rank.rank] - first)
    return {rank: at - early for rank, at in origin.items()}


def run_metadata(found: Findings) -> JsonObject:
    """What was run and where, as the file's ``otherData``."""
    attribution, run = found.attribution, found.attribution.run
    clocks = attribution.clocks
    known: JsonObject = {
        "ranks": len(attribution.ranks),
        "world size": attribution.world_size or None,
        "devices": ", ".join(dict.fromkeys(clean(rank.device) for rank in attribution.ranks if rank.device)) or None,
        "clocks of hosts may be off by us": clocks.residual_ns / 1e3 if clocks.several else None,
    }
    if run is not None:
        known |= _of_run(run)
    return {key: value for key, value in known.items() if value is not None}


def _of_run(run: Run) -> JsonObject:
    work, strategy = run.workload, run.strategy
    known: JsonObject = {"run": run.name, "created": run.created, "kernel": run.kernel}
    if strategy:
        known |= {"strategy": strategy.name, "hops": strategy.hops, **strategy.params}
    if work:
        known |= {"tokens": work.seq, "heads": work.heads, "kv heads": work.kv_heads, "head dim": work.head_dim,
                  "batch": work.batch, "dtype": work.dtype, "causal": work.causal}  # fmt: skip
    known |= run.environment.versions | {"driver": run.environment.driver}
    return {clean(key): clean(value) if isinstance(value, str) else value for key, value in known.items()}


# --- arrows -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Arrows:
    """Which transfers an arrow starts or ends at, as (rank, activity) -> the arrows' numbers."""

    begin: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    end: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    backward: int = 0
    """Left out: the clocks of two hosts are so far off that the message would end before it begins."""


def _arrows(attribution: Attribution) -> _Arrows:
    """One arrow from each transfer to each that receives of it, where both are drawn."""
    found = match({rank.rank: _transfers(rank, attribution.run) for rank in attribution.ranks})
    windows = {rank.rank: rank.window.between_ns for rank in attribution.ranks}
    pairs = dict.fromkeys(zip(found.sender.tolist(), found.receiver.tolist(), strict=True))
    arrows, backward = _Arrows(), 0
    for number, pair in enumerate(pairs):
        sender, receiver = (found.transfers[place] for place in pair)
        begun, ended = _within(sender, windows[sender.rank]), _within(receiver, windows[receiver.rank])
        if begun is None or ended is None:
            continue
        offset = attribution.clocks.offset_ns
        if ended[1] + offset[receiver.rank] <= begun[0] + offset[sender.rank]:
            backward += 1
            continue
        arrows.begin.setdefault((sender.rank, sender.activity), []).append(number)
        arrows.end.setdefault((receiver.rank, receiver.activity), []).append(number)
    return _Arrows(arrows.begin, arrows.end, backward)


def _within(transfer: Transfer, between_ns: tuple[int, int] | None) -> tuple[int, int] | None:
    """What is drawn of it; None where nothing is."""
    start, end = transfer.start_ns, transfer.end_ns
    if between_ns is not None:
        start, end = max(start, between_ns[0]), min(end, between_ns[1])
    return (start, end) if between_ns is None or start < end else None


def _transfers(rank: Rank, run: Run | None) -> list[Transfer]:
    """Those of the whole window: cut at times, ranks would count different ones, and the wrong two be joined."""
    detail = rank.detail
    if detail.window.between_ns is None:
        return [part.transfer for part in detail.splits]
    whole = timed_activities(detail.classified, detail.window.activities(), detail.device, None)
    return fill_from_run(transfers_of(detail.classified, whole.activity, rank.rank), run, rank.rank)


# --- the run, and names -------------------------------------------------------------------------------


def _run(attribution: Attribution, origin: dict[int, int], arrows: _Arrows) -> Iterator[TraceEvent]:
    """One slice over all, which holds what was run: the viewer does not show what else the file says of it."""
    place = max(rank.rank for rank in attribution.ranks) + 1
    run = attribution.run
    name = clean(run.name) if run else "run"
    yield named("process_name", place, 0, name=f"ringprof: {name}")
    yield named("process_sort_index", place, 0, sort_index=-1)
    yield named("thread_name", place, RUN, name="run")
    about = (_of_run(run) if run else {}) | {"arrows left out, as clocks are off": arrows.backward or None}
    end = max(rank.breakdown.end_ns - origin[rank.rank] for rank in attribution.ranks)
    yield slice_of(place, RUN, name, 0, end, **about)


def _names(rank: Rank) -> Iterator[TraceEvent]:
    host = f"{clean(rank.host)} " if rank.host else ""
    yield named("process_name", rank.rank, 0, name=f"{host}rank {rank.rank}")
    yield named("process_sort_index", rank.rank, 0, sort_index=rank.rank)
    for track, name in ((STEPS, "ring steps"), (EXPOSED, "exposed communication"), (IDLE, "idle by cause")):
        if not rank.on_cpu:
            yield named("thread_name", rank.rank, track, name=name)


def _steps(steps: Iterable[Step], origin: dict[int, int]) -> Iterator[TraceEvent]:
    lanes: dict[int, Lanes] = {}
    for step in steps:
        start, end = step.start_ns - origin[step.rank], step.end_ns - origin[step.rank]
        track = STEPS + LANES * lanes.setdefault(step.rank, Lanes()).place(start, end)
        name = step_name(StepKey(step.iteration, step.phase, step.call, step.step))
        figures = {
            "bound": step.bound or "not known", "hops": step.hops, "bytes": step.bytes,
            "exposed ms": step.exposed_ns / 1e6, "wait ms": _ms(step.wait_ns), "wire ms": _ms(step.wire_ns),
        }  # fmt: skip
        yield slice_of(step.rank, track, name, start, end, **figures)


def _memory(attribution: Attribution, origin: dict[int, int]) -> Iterator[TraceEvent]:
    """What each rank's allocators hold, as counters; what was before the first activity is there from 0 on."""
    for one in memory_timelines(attribution):
        for time, size in zip(one.time_ns.tolist(), one.allocated_bytes.tolist(), strict=True):
            yield counter(one.rank, f"allocated, {one.memory}", max(0, time - origin[one.rank]), "MiB", size / 2**20)


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e6


# --- one rank -----------------------------------------------------------------------------------------


class _RankEvents:
    """The events of one rank whose trace holds the activities of a device."""

    def __init__(self, rank: Rank, detail: Detail, origin: int, arrows: _Arrows, steps: dict[int, StepKey]) -> None:
        self._rank, self._detail, self._origin, self._arrows, self._steps = rank.rank, detail, origin, arrows, steps
        self._split = {part.transfer.activity: part for part in detail.splits}

    def activities(self, *, launches: bool) -> Iterator[TraceEvent]:
        calls = perfetto_calls.ranges_and_launches(self._detail) if launches else []
        yield from perfetto_calls.drawn(self._rank, calls, self._origin)
        launched = {activity for call in calls for activity in call.launched}
        lanes: dict[int, Lanes] = {}
        known: set[int] = set()
        for one in activities_of(self._detail):
            start, end = one.start_ns - self._origin, one.end_ns - self._origin
            lane = lanes.setdefault(one.stream, Lanes()).place(start, end)
            track = STREAMS + one.stream + LANES * lane
            if track not in known:
                known.add(track)
                name = f"stream {one.stream}" + (f", beside ({lane + 1})" if lane else "")
                yield named("thread_name", self._rank, track, name=name)
            yield from self._activity(one, track, start, end)
            if one.row in launched:
                number = perfetto_calls.arrow_number(self._rank, one.row)
                yield arrow_end("f", perfetto_calls.LAUNCH, number, self._rank, track, start)
            yield from self._of_transfer(one, track, start, end)

    def _activity(self, one: Activity, track: int, start: int, end: int) -> Iterator[TraceEvent]:
        key = self._steps.get(one.row)
        figures = {"kind": LABELS[one.kind], "step": key and step_name(key)}
        part = self._split.get(one.row)
        yield slice_of(self._rank, track, clean(one.name), start, end, **figures, **(_figures(part) if part else {}))

    def _of_transfer(self, one: Activity, track: int, start: int, end: int) -> Iterator[TraceEvent]:
        """Its messages as moments with their arrows, and its wait and wire."""
        part, place = self._split.get(one.row), (self._rank, one.row)
        sent, received = self._arrows.begin.get(place, ()), self._arrows.end.get(place, ())
        if sent:
            to = peers_of(part.transfer.sends) if part else None
            yield slice_of(self._rank, track, f"send to {to}" if to else "send", start, start)
            yield from (arrow_end("s", MESSAGE, number, self._rank, track, start) for number in sent)
        if part is not None and part.wire_ns is not None:
            ready = min(max(part.transfer.end_ns - part.wire_ns - self._origin, start), end)
            if ready > start:
                yield slice_of(self._rank, track, "wait", start, ready)
            if end > ready:
                yield slice_of(self._rank, track, "wire", ready, end, **{"GB/s": _rate(part)})
        if received:
            # Perfetto closes a slice at its end: what belongs to it begins before.
            last, of = max(start, end - 1), peers_of(part.transfer.receives) if part else None
            yield slice_of(self._rank, track, f"received from {of}" if of else "received", last, last)
            yield from (arrow_end("f", MESSAGE, number, self._rank, track, last) for number in received)

    def exposed(self) -> Iterator[TraceEvent]:
        found = exposure_of(self._detail, self._detail.rows())
        parts = (("exposed wire", found.wire), ("exposed wait", found.wait), ("exposed, not split", found.unknown))
        for name, spans in parts:
            for start, end in zip(spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True):
                yield slice_of(self._rank, EXPOSED, name, start - self._origin, end - self._origin)
        for block in self._detail.blocks:
            name = "blocked on a peer" if block.peer is None else f"blocked on rank {block.peer}"
            start, end = block.start_ns - self._origin, block.end_ns - self._origin
            yield slice_of(self._rank, EXPOSED, name, start, end, peer=block.peer, part=block.part)

    def idle(self) -> Iterator[TraceEvent]:
        """Every part of the idle time, named by what the host did or what the device waited for."""
        for part in idle_bars(self._detail.idle_parts(), self._detail.classified.trace.names):
            start, end = part.start_ns - self._origin, part.end_ns - self._origin
            figures = {"cause": part.cause, "class": part.event_class}
            yield slice_of(self._rank, IDLE, clean(part.name) or part.event_class, start, end, **figures)

    def rates(self) -> Iterator[TraceEvent]:
        """What leaves the rank over each class of link, as long as it is on the wire."""
        links: dict[str, list[tuple[int, int, float]]] = {}
        for part in self._split.values():
            rate = _rate(part)
            if rate is not None and part.wire_ns:
                end = part.transfer.end_ns
                links.setdefault(part.link, []).append((end - part.wire_ns, end, rate))
        for link, spans in links.items():
            for time, value in _summed(spans, self._detail.window.between_ns):
                yield counter(self._rank, f"sent, {_LINKS[link]}", time - self._origin, "GB/s", value)


def _figures(part: Split) -> JsonObject:
    transfer = part.transfer
    return {
        "bytes": transfer.sent_bytes, "send to": peers_of(transfer.sends), "receive from": peers_of(transfer.receives),
        "link": _LINKS[part.link], "group": clean(transfer.group[0]) if transfer.group[0] else None,
        "wait ms": _ms(part.wait_ns), "wire ms": _ms(part.wire_ns), "GB/s": _rate(part),
    }  # fmt: skip


def _rate(part: Split) -> float | None:
    rate = gbps(part.transfer.sent_bytes, part.wire_ns)
    return None if rate is None else round(rate, 3)


def _summed(spans: list[tuple[int, int, float]], between_ns: tuple[int, int] | None) -> Iterator[tuple[int, float]]:
    """The sum of the rates of what is on the wire, at each time that it changes."""
    begun, ended, rate = (np.array(column) for column in zip(*spans, strict=True))
    if between_ns is not None:
        begun, ended = np.clip(begun, *between_ns), np.clip(ended, *between_ns)
    times, place = np.unique(np.concatenate((begun, ended)), return_inverse=True)
    change = np.zeros(len(times))
    np.add.at(change, place, np.concatenate((rate, -rate)))
    yield from zip(times.tolist(), np.abs(np.round(np.cumsum(change), 3)).tolist(), strict=True)
