"""One rank of a run: its figures, which are few, and the detail that they come from, which is large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.timeline.breakdown import Breakdown, break_down
from ringprof.analysis.timeline.rows import OnDevice, TimedActivities, timed_activities
from ringprof.analysis.timeline.window import Window
from ringprof.analysis.timeline.work import PartWork
from ringprof.analysis.transfers.hops import HopTotals, Split, TimedHop, hop_totals, total


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

    def rows(self) -> TimedActivities:
        """The activities of the window on the device that is reported; made anew, since they are many."""
        return timed_activities(self.classified, self.window.activities(), self.device, self.window.between_ns)

    def background(self, rows: TimedActivities) -> TimedActivities:
        """What else ran on the device meanwhile."""
        return OnDevice(self.classified, self.device).background(rows)

    @cached_property
    def iterations(self) -> tuple[Breakdown, ...]:
        """The breakdown of each marked iteration alone; one where nothing was marked."""
        if self.cpu_iterations:
            return self.cpu_iterations
        device = OnDevice(self.classified, self.device)
        return tuple(break_down(rows, device.background(rows)) for rows in self.window.by_iteration(self.rows()))


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


def carried_by(splits: Sequence[Split]) -> tuple[Carried, ...]:
    """The kernels by kind and link."""
    groups: dict[tuple[str, str], list[Split]] = {}
    for part in splits:
        groups.setdefault((part.transfer.kind, part.link), []).append(part)
    rows = []
    for (kind, link), parts in groups.items():
        timed = [part for part in parts if part.wire_ns is not None]
        rows.append(
            Carried(
                kind=kind,
                link=link,
                kernels=len(parts),
                timed=len(timed),
                wait_ns=sum(part.wait_ns or 0 for part in timed),
                wire_ns=sum(part.wire_ns or 0 for part in timed),
                sent_bytes=total([part.transfer.sent_bytes for part in timed]),
            )
        )
    return tuple(rows)
