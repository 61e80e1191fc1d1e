"""One rank of a run: its figures, which are few, and the detail that they come from, which is large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.timeline.breakdown import Breakdown, break_down
from ringprof.analysis.timeline.idle import IdleCauses, IdleParts, idle_parts
from ringprof.analysis.timeline.launches import LaunchStatistics
from ringprof.analysis.timeline.rows import DeviceActivities, TimedActivities, timed_activities
from ringprof.analysis.timeline.window import Window
from ringprof.analysis.timeline.work import PartWork
from ringprof.analysis.transfers.hops import HopTotals, PeerBlock, Split, TimedHop, hop_totals, spans_of, total


class Detail(msgspec.Struct, frozen=True, dict=True):
    """What a rank's figures come from: as large as its trace."""

    classified: Classified
    window: Window
    device: int | None = None
    """The device that is reported; None on CPU."""
    cpu_iterations: tuple[Breakdown, ...] = ()
    """On CPU: the breakdown of each iteration."""
    splits: tuple[Split, ...] = ()
    """Its communication kernels, by start, with wait and wire."""
    hops: tuple[TimedHop, ...] = ()
    blocks: tuple[PeerBlock, ...] = ()
    """Times in which the device ran nothing because of a peer's copy-engine hop, by start."""

    def rows(self) -> TimedActivities:
        """The activities of the window on the device that is reported; made anew, since they are many."""
        return timed_activities(self.classified, self.window.activities(), self.device, self.window.between_ns)

    def background(self, rows: TimedActivities) -> TimedActivities:
        """What else ran on the device meanwhile."""
        return DeviceActivities(self.classified, self.device).background(rows)

    @cached_property
    def iterations(self) -> tuple[Breakdown, ...]:
        """The breakdown of each marked iteration alone; one where nothing was marked."""
        if self.cpu_iterations:
            return self.cpu_iterations
        device, blocked = DeviceActivities(self.classified, self.device), spans_of(self.blocks)
        parts = (break_down(rows, device.background(rows)) for rows in self.window.by_iteration(self.rows()))
        return tuple(part.with_blocked(blocked) for part in parts)

    def idle_parts(self) -> IdleParts:
        """Split the idle time of the window by cause; not for CPU."""
        rows = self.rows()
        return idle_parts(self.classified, rows, self.background(rows), spans_of(self.blocks))


class Carried(msgspec.Struct, frozen=True):
    """One rank's communication kernels of one kind over one class of link."""

    kind: str
    link: str
    """``same_host``, ``other_host`` or ``unknown``."""
    kernels: int
    timed: int
    """Those of them that have wait and wire; the figures below are of these."""
    wait_ns: int
    wire_ns: int
    sent_bytes: int | None
    """None where one's is not known."""


class ExposedTime(msgspec.Struct, frozen=True):
    """What the exposed communication of one rank consists of, and what its wire is busy, in nanoseconds."""

    wire_ns: int = 0
    wait_ns: int = 0
    on_wire_ns: int = 0
    """All time with something on the wire, hidden or not."""
    by_group: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """Exposed communication by kind and process group (empty where none is recorded); parts may run at once."""
    waited_for: dict[int, int] = msgspec.field(default_factory=dict)
    """Peer -> time that this rank's communication waited for it, hidden or not: for the last partner to begin."""


class Moved(msgspec.Struct, frozen=True):
    """Bytes that one rank's device moved in the window; None where the size of a message or copy is not recorded."""

    sent_bytes: int | None = None
    """That left the rank in communication."""
    from_host_bytes: int | None = None
    """Copied from the host's memory to the device."""


@dataclass(frozen=True)
class Rank:
    """One rank over all profiled iterations."""

    rank: int
    host: str | None
    device: str | None
    """What the trace calls the device."""
    on_cpu: bool
    path: str
    """Of its trace."""
    world_size: int | None
    """That the trace names."""
    attention: tuple[str, ...]
    """Families of its attention kernels, most frequent first."""
    partial_window: bool
    """Whether the window is a chosen range or cut at times, and not of whole iterations."""
    breakdown: Breakdown
    iteration_ns: tuple[int, ...]
    """Wall of each marked iteration alone; one where nothing was marked."""
    window_source: str = "trace"
    """What its window is made of: `ringprof.analysis.timeline.window.Window.source`."""
    steps: int | None = None
    """Training steps that the window shows, as `ringprof.analysis.timeline.window.Window.steps`."""
    blocked_ns: dict[str, int] = field(default_factory=dict)
    """On CPU: time blocked in waiting, by the channel that was waited for."""
    part_work: tuple[PartWork, ...] = ()
    """FLOPs and time of attention and matrix products; empty where the trace holds no shapes."""
    hop_totals: HopTotals = field(default_factory=lambda: hop_totals(()))
    carried: tuple[Carried, ...] = ()
    """By kind and link, in the order of their first kernel."""
    exposed: ExposedTime = field(default_factory=ExposedTime)
    hop_peers: frozenset[int] = frozenset()
    """Ranks that its hops send to."""
    idle: IdleCauses | None = None
    """What its idle time comes from; None on CPU."""
    launches: LaunchStatistics | None = None
    """How its activities were launched; None on CPU, and where no launch is recorded."""
    moved: Moved = field(default_factory=Moved)
    read_detail: Callable[[int], Detail] | None = field(default=None, repr=False, compare=False)
    """Finds the detail of a rank again: kept where there is room for all ranks', else made anew."""

    @property
    def detail(self) -> Detail:
        assert self.read_detail is not None
        return self.read_detail(self.rank)

    @property
    def classified(self) -> Classified:
        return self.detail.classified

    @property
    def window(self) -> Window:
        return self.detail.window

    @property
    def iterations(self) -> tuple[Breakdown, ...]:
        return self.detail.iterations

    @property
    def splits(self) -> tuple[Split, ...]:
        return self.detail.splits

    @property
    def hops(self) -> tuple[TimedHop, ...]:
        return self.detail.hops


def kept(detail: Detail) -> Callable[[int], Detail]:
    """For `Rank.read_detail`: a detail that stays in memory."""
    return lambda rank: detail


def carried_by(splits: Sequence[Split], blocks: Sequence[PeerBlock] = ()) -> tuple[Carried, ...]:
    """Sum up communication kernels and copies by kind and link; ``blocks`` add what copies waited without a kernel."""
    waited = sum(block.time_ns for block in blocks if block.part == "wait")
    unknown = any(block.part == "unsplit" for block in blocks)
    groups: dict[tuple[str, str], list[Split]] = {}
    for part in splits:
        groups.setdefault((part.transfer.kind, part.link), []).append(part)
    rows = []
    for (kind, link), parts in groups.items():
        copied = kind == "copy_engine"
        timed = [part for part in parts if part.wire_ns is not None and not (copied and unknown)]
        rows.append(
            Carried(
                kind=kind,
                link=link,
                kernels=len(parts),
                timed=len(timed),
                # All copies are within a host: there is one row of them.
                wait_ns=sum(part.wait_ns or 0 for part in timed) + (waited if copied and timed else 0),
                wire_ns=sum(part.wire_ns or 0 for part in timed),
                sent_bytes=total([part.transfer.sent_bytes for part in timed]),
            )
        )
    return tuple(rows)
