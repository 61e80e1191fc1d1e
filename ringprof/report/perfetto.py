"""The merged trace for Perfetto: all ranks in one file, on one clock.

Each rank is a process, named by host and rank. Its tracks are its streams, ring steps, exposed stretches and idle time
by cause; its counters are the rates that it sends at, per class of link. A transfer contains slices for its wait and
its wire time. An arrow goes from where the sender starts a message to where the receiver ends it.
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
from ringprof.common.json_object import JsonObject
from ringprof.report import perfetto_calls
from ringprof.report.idle_bars import idle_bars
from ringprof.report.terms import LABELS
from ringprof.report.text import clean
from ringprof.report.timeline import Activity, activities_of, origins_of, peers_of, step_name
from ringprof.report.trace_event import Lanes, TraceEvent, arrow_event, counter_event, metadata_event, slice_event
from ringprof.run import Run

RUN_TRACK, STEPS, EXPOSED, IDLE, STREAMS, TRACKS_PER_LANE = 0, 1, 2, 3, 100, 1_000_000
"""Track numbers inside a process: the run, ring steps, exposed communication, idle time by cause. A stream's track is
its number plus ``STREAMS``. ``TRACKS_PER_LANE`` is added for each further lane of a track whose slices overlap."""
ARROW_CATEGORY = "message"
_LINK_NAMES = {"same_host": "same host", "other_host": "other host", "unknown": "unknown link"}


def events_of(findings: Findings, *, launches: bool = False) -> Iterator[TraceEvent]:
    """Generate every event of the merged trace; with ``launches`` also the CPU threads of every rank."""
    attribution = findings.attribution
    origin, arrows = _origins(attribution, launches=launches), _arrows(attribution)
    steps = findings.finder.by_activity
    yield from _run_events(attribution, origin, arrows)
    for rank in attribution.ranks:
        yield from _track_names(rank)
        if rank.on_cpu:
            calls = perfetto_calls.ranges_and_operators(rank.detail)
            yield from perfetto_calls.call_events(rank.rank, calls, origin[rank.rank])
            continue
        rank_events = _RankEvents(rank, rank.detail, origin[rank.rank], arrows, steps.get(rank.rank, {}))
        yield from rank_events.activities(launches=launches)
        yield from rank_events.exposed()
        yield from rank_events.idle()
        yield from rank_events.rates()
    yield from _step_events(findings.steps, origin)
    yield from _memory_events(attribution, origin)


def _origins(attribution: Attribution, *, launches: bool) -> dict[int, int]:
    """Return for each rank the time to subtract, so that no time is negative: Perfetto drops negative times."""
    origin, shift_ns = origins_of(attribution), 0
    for rank in attribution.ranks if launches else ():
        first = perfetto_calls.first_launch_ns(rank.detail)
        shift_ns = shift_ns if first is None else max(shift_ns, origin[rank.rank] - first)
    return {rank: start_ns - shift_ns for rank, start_ns in origin.items()}


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
                  "batch": work.batch, "dtype": work.dtype, "causal": work.causal}  # fmt: skip
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
    matches = match({rank.rank: _all_transfers(rank, attribution.run) for rank in attribution.ranks})
    windows = {rank.rank: rank.window.between_ns for rank in attribution.ranks}
    pairs = dict.fromkeys(zip(matches.sender.tolist(), matches.receiver.tolist(), strict=True))
    arrows, backward = _Arrows(), 0
    for number, pair in enumerate(pairs):
        sender, receiver = (matches.transfers[index] for index in pair)
        send_span, receive_span = (
            _drawn_span(sender, windows[sender.rank]),
            _drawn_span(receiver, windows[receiver.rank]),
        )
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


def _all_transfers(rank: Rank, run: Run | None) -> list[Transfer]:
    """List a rank's transfers of the whole window, even where it is cut at times.

    If each rank listed only what lies between the cut times, ranks would count different transfers, and wrong pairs
    would match.
    """
    detail = rank.detail
    if detail.window.between_ns is None:
        return [part.transfer for part in detail.splits]
    activities = timed_activities(detail.classified, detail.window.activities(), detail.device, None)
    return fill_from_run(transfers_of(detail.classified, activities.activity, rank.rank), run, rank.rank)


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


def _track_names(rank: Rank) -> Iterator[TraceEvent]:
    host = f"{clean(rank.host)} " if rank.host else ""
    yield metadata_event("process_name", rank.rank, 0, name=f"{host}rank {rank.rank}")
    yield metadata_event("process_sort_index", rank.rank, 0, sort_index=rank.rank)
    for track, name in ((STEPS, "ring steps"), (EXPOSED, "exposed communication"), (IDLE, "idle by cause")):
        if not rank.on_cpu:
            yield metadata_event("thread_name", rank.rank, track, name=name)


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


def _memory_events(attribution: Attribution, origin: dict[int, int]) -> Iterator[TraceEvent]:
    """Generate a counter of what each allocator holds; changes before the first activity are put at time 0."""
    for pool in memory_timelines(attribution):
        for time, size in zip(pool.time_ns.tolist(), pool.allocated_bytes.tolist(), strict=True):
            yield counter_event(
                pool.rank, f"allocated, {pool.memory}", max(0, time - origin[pool.rank]), "MiB", size / 2**20
            )


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
        calls = perfetto_calls.ranges_and_launches(self._detail) if launches else []
        yield from perfetto_calls.call_events(self._rank, calls, self._origin)
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
            yield from self._activity_slice(activity, track, start, end)
            if activity.row in launched:
                number = perfetto_calls.arrow_number(self._rank, activity.row)
                yield arrow_event("f", perfetto_calls.LAUNCH, number, self._rank, track, start)
            yield from self._transfer_events(activity, track, start, end)

    def _activity_slice(self, activity: Activity, track: int, start: int, end: int) -> Iterator[TraceEvent]:
        key = self._steps.get(activity.row)
        figures = {"kind": LABELS[activity.kind], "step": key and step_name(key)}
        part = self._split.get(activity.row)
        yield slice_event(
            self._rank, track, clean(activity.name), start, end, **figures, **(_transfer_figures(part) if part else {})
        )

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
        for bar in idle_bars(self._detail.idle_parts(), self._detail.classified.trace.names):
            start, end = bar.start_ns - self._origin, bar.end_ns - self._origin
            figures = {"cause": bar.cause, "class": bar.event_class}
            yield slice_event(self._rank, IDLE, clean(bar.name) or bar.event_class, start, end, **figures)

    def rates(self) -> Iterator[TraceEvent]:
        """Generate counters of the rate that leaves the rank on each class of link, while a transfer is on the wire."""
        links: dict[str, list[tuple[int, int, float]]] = {}
        for split in self._split.values():
            rate = _rate_gbps(split)
            if rate is not None and split.wire_ns:
                end = split.transfer.end_ns
                links.setdefault(split.link, []).append((end - split.wire_ns, end, rate))
        for link, spans in links.items():
            for time, value in _total_rates(spans, self._detail.window.between_ns):
                yield counter_event(self._rank, f"sent, {_LINK_NAMES[link]}", time - self._origin, "GB/s", value)


def _transfer_figures(part: Split) -> JsonObject:
    transfer = part.transfer
    return {
        "bytes": transfer.sent_bytes, "send to": peers_of(transfer.sends), "receive from": peers_of(transfer.receives),
        "link": _LINK_NAMES[part.link], "group": clean(transfer.group[0]) if transfer.group[0] else None,
        "wait ms": _ms(part.wait_ns), "wire ms": _ms(part.wire_ns), "GB/s": _rate_gbps(part),
    }  # fmt: skip


def _rate_gbps(part: Split) -> float | None:
    rate = gbps(part.transfer.sent_bytes, part.wire_ns)
    return None if rate is None else round(rate, 3)


def _total_rates(
    spans: list[tuple[int, int, float]], between_ns: tuple[int, int] | None
) -> Iterator[tuple[int, float]]:
    """Sum the rates of all transfers on the wire, at each time that the sum changes."""
    starts, ends, rate = (np.array(column) for column in zip(*spans, strict=True))
    if between_ns is not None:
        starts, ends = np.clip(starts, *between_ns), np.clip(ends, *between_ns)
    times, index = np.unique(np.concatenate((starts, ends)), return_inverse=True)
    change = np.zeros(len(times))
    np.add.at(change, index, np.concatenate((rate, -rate)))
    yield from zip(times.tolist(), np.abs(np.round(np.cumsum(change), 3)).tolist(), strict=True)
