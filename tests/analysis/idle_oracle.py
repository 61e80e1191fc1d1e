"""Slow, simple reference for idle time by cause and for time blocked on a peer's copies.

Follows the definitions one stretch at a time, from rows that it reads itself. Times are whole nanoseconds.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from ringprof.results.analysis import Analysis
from tests.analysis.raw_trace import Activity, Event, RankTrace, read_trace, window_activities

GAP_NS = 5_000
SOON_NS = 20_000
SEND = re.compile(r"ringprof::send/([^/]+)(?:/to=(\d+))?")


@dataclass(frozen=True)
class Stretch:
    """Time without activity on the device: ``before`` end as it starts, ``ending`` starts as it ends."""

    start: int
    end: int
    before: tuple[Activity, ...]
    ending: Activity

    @property
    def host_end(self) -> int:
        """Return the moment at which the launch call of the ending activity has returned."""
        launch = self.ending.launch
        return self.start if launch is None else min(max(launch.end, self.start), self.end)


@dataclass(frozen=True)
class Block:
    """Part of a stretch that a rank is blocked on a peer: wait, wire or unsplit."""

    start: int
    end: int
    part: str
    peer: int | None


@dataclass(frozen=True)
class Hop:
    """Peer copies launched in one annotation of a channel, by launch."""

    copies: tuple[Activity, ...]
    receiver: int | None
    """Rank that the annotation names; None where it names none."""

    @property
    def launch(self) -> Event:
        """Return the launch call of the first copy."""
        assert self.copies[0].launch is not None
        return self.copies[0].launch


Hops = dict[tuple[str, int], Hop]
"""Hops of a rank, by channel and number in the window."""


def find_stretches(
    trace: RankTrace, device: int, name: str | None = None, between: tuple[int, int] | None = None
) -> list[Stretch]:
    """Walk along the activities of a device and return each stretch of the window without any."""
    low, high = between or (0, 1 << 62)
    chosen = [activity for activity in window_activities(trace, name) if activity.device == device]
    chosen = [activity for activity in chosen if activity.start < high and activity.end > low]
    if not chosen:
        return []
    now = max(low, min(activity.start for activity in chosen))
    last = min(high, max(activity.end for activity in chosen))
    stretches = []
    running = [activity for activity in trace.activities if activity.device == device and activity.end >= now]
    for activity in running:
        if now < activity.start <= last:
            before = tuple(other for other in running if other.end == now and other.start <= now)
            stretches.append(Stretch(now, activity.start, before, activity))
        now = max(now, activity.end)
    return stretches


# --- blocked on a peer --------------------------------------------------------------------------------------------


def find_hops(trace: RankTrace, device: int, name: str | None = None) -> Hops:
    """Number the hops of each channel in the window."""
    hops: Hops = {}
    count: Counter[str] = Counter()
    copies = [activity for activity in window_activities(trace, name) if activity.is_peer_copy]
    copies = [copy for copy in copies if copy.device == device and copy.launch]
    copies.sort(key=lambda copy: copy.launch.start if copy.launch else 0)
    for event in sorted(trace.annotations, key=lambda event: event.start):
        inside = tuple(copy for copy in copies if copy.launch and _lies_in(copy.launch, event))
        if inside and (match := SEND.fullmatch(event.name)):
            channel, to = match[1], match[2]
            hops[channel, count[channel]] = Hop(inside, None if to is None else int(to))
            count[channel] += 1
    return hops


def _lies_in(launch: Event, event: Event) -> bool:
    return launch.thread == event.thread and event.start <= launch.start <= event.end


def posted(trace: RankTrace, hop: Hop) -> int:
    """Return the moment at which a rank is ready for a hop of its own, from all of its trace."""
    launched = [(act.launch.start, act.start, act) for act in trace.activities if act.launch]
    earlier = [entry for entry in launched if entry[2].device == hop.copies[0].device and entry[0] < hop.launch.start]
    others = [entry for entry in earlier if not entry[2].is_peer_copy]
    streams = {hop.copies[0].stream} | ({max(others, key=lambda entry: entry[:2])[2].stream} if others else set())
    return max([hop.launch.end, *(act.end for _, _, act in earlier if act.stream in streams)])


@dataclass
class RunTraces:
    """Traces of a run, with what the definitions take as known of each rank."""

    traces: Mapping[int, RankTrace]
    devices: Mapping[int, int]
    """Device that each rank reports."""
    run: Mapping[str, Any] | None = None
    """Content of run.json."""
    offsets: Mapping[int, int] = field(default_factory=dict)
    """Nanoseconds to add to the times of each rank for one clock."""
    world_size: int = 0
    window: str | None = None
    between: Mapping[int, tuple[int, int] | None] = field(default_factory=dict)
    """Unix times at which the activities of each rank are cut."""

    def __post_init__(self) -> None:
        self.hops = {rank: find_hops(trace, self.devices[rank], self.window) for rank, trace in self.traces.items()}

    def stretches(self, rank: int) -> list[Stretch]:
        return find_stretches(self.traces[rank], self.devices[rank], self.window, self.between.get(rank))

    def blocks(self, rank: int) -> list[Block]:
        """Return all times at which a rank is blocked on a peer."""
        return [block for stretch in self.stretches(rank) for block in self.blocked(rank, stretch)]

    def blocked(self, rank: int, stretch: Stretch) -> list[Block]:
        """Return the parts of a stretch that are blocked on a peer."""
        ending = stretch.ending
        if ending.is_peer_copy:
            return self._departure(rank, stretch)
        return (
            [] if ending.category == "memset" or ending.launch is None else self._arrival(rank, stretch, ending.launch)
        )

    def names_copy_hops(self) -> bool:
        """Return whether run.json names copy engines as what carries hops."""
        return ((self.run or {}).get("strategy") or {}).get("hops") == "copy"

    def receiver(self, rank: int, channel: str, hop: Hop) -> int | None:
        """Return the rank that a hop goes to: by its annotation, run.json, the world size, or the target device."""
        if hop.receiver is not None:
            return hop.receiver
        hosts: Mapping[int, str | None] = dict.fromkeys(self.devices)
        world: Sequence[int] = range(max(self.world_size, *self.devices))
        if self.run is not None:
            topology = self.run["topology"]
            world = topology.get("ranks") or range(topology["world_size"])
            hosts = dict(zip(world, topology["hosts"], strict=True))
            sent = dict(zip(world, self.run["work"], strict=True))[rank]["sent"] or []
            to = {item.get("to") for item in sent if item["channel"] == channel and item["operation"] == "copy"}
            if len(to) == 1 and to != {None}:
                return int(to.pop())
        if len(world) == 2:
            return next(other for other in world if other != rank)
        near = {other: device for other, device in self.devices.items() if hosts[other] == hosts[rank]}
        near = {other: device for other, device in near.items() if self.hops[other]}
        on_target = [other for other, device in near.items() if device == hop.copies[0].target and other != rank]
        return on_target[0] if on_target and len(set(near.values())) == len(near) else None

    def _on_clock_of(self, rank: int, peer: int, time: int) -> int:
        return time + self.offsets.get(peer, 0) - self.offsets.get(rank, 0)

    def _alike(self, rank: int, peer: int, channel: str) -> bool:
        """Return whether two ranks have equally many hops of a channel; else none of them is matched."""
        counts = [Counter(name for name, _ in self.hops.get(each, {}))[channel] for each in (rank, peer)]
        return counts[0] == counts[1]

    def _departure(self, rank: int, stretch: Stretch) -> list[Block]:
        for (channel, number), hop in self.hops[rank].items():
            if hop.copies[0] is not stretch.ending:
                continue
            peer = self.receiver(rank, channel, hop)
            if peer is None or not self._alike(rank, peer, channel):
                return _parts(stretch, (stretch.end, "unsplit", peer)) if self.names_copy_hops() else []
            post = self._on_clock_of(rank, peer, posted(self.traces[peer], self.hops[peer][channel, number]))
            return _parts(stretch, (post, "wait", peer), (stretch.end, "wire", peer))
        return []

    def _arrival(self, rank: int, stretch: Stretch, launch: Event) -> list[Block]:
        arrivals = []
        for peer, (key, hop) in [(peer, item) for peer, hops in self.hops.items() for item in hops.items()]:
            if peer == rank or self.receiver(peer, key[0], hop) != rank or not self._alike(rank, peer, key[0]):
                continue
            start = self._on_clock_of(rank, peer, min(copy.start for copy in hop.copies))
            end = self._on_clock_of(rank, peer, max(copy.end for copy in hop.copies))
            if self.hops[rank][key].launch.start < launch.start and 0 <= stretch.end - end <= SOON_NS:
                arrivals.append((end, start, peer))
        if not arrivals:
            return []
        end, start, peer = max(arrivals)
        return _parts(stretch, (start, "wait", peer), (end, "wire", peer))


def _parts(stretch: Stretch, *parts: tuple[int, str, int | None]) -> list[Block]:
    """Cut the time after the host part at the end of each part; no part ends after the stretch."""
    blocks, now = [], stretch.host_end
    for end, part, peer in parts:
        end = min(end, stretch.end)
        if end > now:
            blocks.append(Block(now, end, part, peer))
            now = end
    return blocks


# --- idle by cause ------------------------------------------------------------------------------------------------


class ThreadTimeline:
    """Which host event is the innermost at each moment on one thread, and its class."""

    def __init__(self, events: Sequence[Event]) -> None:
        edges = sorted({edge for event in events for edge in (event.start, event.end)})
        starting = sorted(events, key=lambda event: event.start, reverse=True)
        self.edges, self.named, active = edges, [], []
        for edge in edges:
            while starting and starting[-1].start <= edge:
                active.append(starting.pop())
            active = [event for event in active if event.end > edge]
            self.named.append(_innermost(active))

    def add(self, totals: Counter[tuple[str, str]], start: int, end: int) -> None:
        """Add the time from ``start`` to ``end`` to the totals by class and name."""
        index = bisect_right(self.edges, start) - 1
        while start < end:
            until = min(end, self.edges[index + 1] if index + 1 < len(self.edges) else end)
            totals[self.named[index] if index >= 0 else NOTHING] += until - start
            start, index = until, index + 1


NOTHING = ("nothing recorded", "")


def _innermost(active: Sequence[Event]) -> tuple[str, str]:
    """Return class and name: of the open events, the one with the latest start, of equal starts the shortest."""
    inward = sorted(active, key=lambda event: (-event.start, event.end))
    classes = [event.event_class() for event in inward]
    return (next(filter(None, classes), "operator"), inward[0].name) if inward else NOTHING


def idle_by_cause(run: RunTraces, rank: int) -> dict[tuple[str, str], int]:
    """Sum the idle time of a rank, less what is blocked on a peer, by class and name."""
    totals: Counter[tuple[str, str]] = Counter()
    host = run.traces[rank].host
    timelines: dict[Any, ThreadTimeline] = {}
    for stretch in run.stretches(rank):
        if (launch := stretch.ending.launch) is not None and stretch.host_end > stretch.start:
            if launch.thread not in timelines:
                events = [event for event in host if event.thread == launch.thread]
                timelines[launch.thread] = ThreadTimeline(events)
            timelines[launch.thread].add(totals, stretch.start, stretch.host_end)
        rest = max([stretch.host_end, *(block.end for block in run.blocked(rank, stretch))])
        if rest < stretch.end:
            totals[_cause_of_rest(stretch, rest)] += stretch.end - rest
    return dict(totals)


def _cause_of_rest(stretch: Stretch, start: int) -> tuple[str, str]:
    if stretch.end - start < GAP_NS:
        return "gap", ""
    if stretch.ending.launch is None:
        return "blocked", "no launch record"
    if stretch.ending.category == "memcpy" and "Pageable" in stretch.ending.name:
        return "blocked", "host-side copy"
    same_stream = any(activity.stream == stretch.ending.stream for activity in stretch.before)
    if not same_stream and stretch.end - stretch.start <= SOON_NS:
        return "blocked", "another stream"
    return "blocked", "unknown"


# --- beside an analysis -------------------------------------------------------------------------------------------


def run_traces_of(analysis: Analysis, folder: Path | None = None, window: str | None = None) -> RunTraces:
    """Read the files of an analysis again; ``folder`` holds its run.json, if there is one.

    Takes from the analysis what other tests check: the device of each rank, clock offsets, and the times of --between.
    """
    ranks = analysis.attribution.ranks
    path = None if folder is None else folder / "run.json"
    return RunTraces(
        traces={rank.rank: read_trace(Path(rank.path)) for rank in ranks},
        devices={rank.rank: rank.detail.device or 0 for rank in ranks},
        run=json.loads(path.read_text()) if path is not None and path.exists() else None,
        offsets=analysis.attribution.clocks.offset_ns,
        world_size=max(rank.world_size or 0 for rank in ranks),
        window=window,
        between={rank.rank: rank.window.between_ns for rank in ranks},
    )


def assert_same_idle(analysis: Analysis, truth: RunTraces) -> None:
    """Compare idle time by cause and time blocked on peers of every rank, to the nanosecond."""
    for rank in analysis.attribution.ranks:
        assert rank.idle is not None
        idle = {(event.event_class, event.name): event.time_ns for event in rank.idle.events}
        assert idle == idle_by_cause(truth, rank.rank)
        blocks = [(block.start_ns, block.end_ns, block.part, block.peer) for block in rank.detail.blocks]
        assert blocks == [astuple(block) for block in truth.blocks(rank.rank)]
        assert rank.breakdown.idle_ns == sum(idle.values())
        assert rank.breakdown.blocked_on_peer_ns == sum(end - start for start, end, *_ in blocks)
