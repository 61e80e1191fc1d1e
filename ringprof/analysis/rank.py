"""One rank of a run: its metrics, which are small, and the detail that they are computed from, which is large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.timeline.breakdown import Breakdown, break_down
from ringprof.analysis.timeline.idle import IdleCauses, IdleParts, idle_parts
from ringprof.analysis.timeline.kernels import LaunchStatistics, OneByOne
from ringprof.analysis.timeline.layers import LayerTime
from ringprof.analysis.timeline.products import Product
from ringprof.analysis.timeline.recurrence import RecurrencePart
from ringprof.analysis.timeline.rows import DeviceActivities, TimedActivities, timed_activities
from ringprof.analysis.timeline.window import Window
from ringprof.analysis.timeline.work import PartWork
from ringprof.analysis.transfers.collectives import CollectiveTotals
from ringprof.analysis.transfers.hops import HopTotals, PeerBlock, Split, TimedHop, hop_totals, spans_of, total


class Detail(msgspec.Struct, frozen=True, dict=True):
    """Data that a rank's metrics are computed from; about as large as its trace."""

    classified: Classified
    window: Window
    device: int | None = None
    """Index of the device that is reported; None on CPU."""
    cpu_iterations: tuple[Breakdown, ...] = ()
    """Breakdown of each iteration on CPU; empty for a rank on a GPU."""
    splits: tuple[Split, ...] = ()
    """Communication kernels and copies of the rank in order of start, with wait and wire."""
    hops: tuple[TimedHop, ...] = ()
    """Hops of the rank in the window, in order of start."""
    blocks: tuple[PeerBlock, ...] = ()
    """Times in which the device idled because of a peer's copy-engine hop, in order of start."""

    def rows(self) -> TimedActivities:
        """Return the activities of the window on the reported device; computed at every call to save memory."""
        return timed_activities(self.classified, self.window.activities(), self.device, self.window.between_ns)

    def background(self, rows: TimedActivities) -> TimedActivities:
        """Return the activities outside the window that ran on the device at the same time."""
        return DeviceActivities(self.classified, self.device).background(rows)

    @cached_property
    def iterations(self) -> tuple[Breakdown, ...]:
        """Breakdown of each marked iteration; a single one where nothing is marked."""
        if self.cpu_iterations:
            return self.cpu_iterations
        device, blocked = DeviceActivities(self.classified, self.device), spans_of(self.blocks)
        parts = (break_down(rows, device.background(rows)) for rows in self.window.by_iteration(self.rows()))
        return tuple(part.with_blocked(blocked) for part in parts)

    def idle_parts(self) -> IdleParts:
        """Split the idle time of the window by cause; not for CPU ranks."""
        rows = self.rows()
        return idle_parts(self.classified, rows, self.background(rows), spans_of(self.blocks))


class LinkTotals(msgspec.Struct, frozen=True):
    """Totals of one rank's communication kernels and copies of one kind over one class of link."""

    kind: str
    link: str
    """``same_host``, ``other_host`` or ``unknown``."""
    kernels: int
    """Number of kernels and copies."""
    timed: int
    """Number of kernels and copies that have wait and wire; the fields below cover only these."""
    wait_ns: int
    wire_ns: int
    sent_bytes: int | None
    """Bytes sent; None where the size of one kernel or copy is not known."""


class ExposedTime(msgspec.Struct, frozen=True):
    """Exposed communication of one rank by cause, and the time its wire is busy, in nanoseconds."""

    wire_ns: int = 0
    wait_ns: int = 0
    on_wire_ns: int = 0
    """All time with bytes on the wire, hidden or exposed."""
    by_group: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """Exposed communication by (kind, process group); the group is empty where none is recorded. Groups may overlap."""
    waited_for: dict[int, int] = msgspec.field(default_factory=dict)
    """Peer -> time that this rank's communication waited for it, hidden or exposed: until the last partner begins."""


@dataclass(frozen=True)
class Rank:
    """Metrics of one rank over all profiled iterations."""

    rank: int
    host: str | None
    """Name of the host; None where it is not known."""
    device: str | None
    """Name of the device in the trace."""
    on_cpu: bool
    path: str
    """Path of the trace."""
    world_size: int | None
    """World size that the trace states."""
    attention: tuple[str, ...]
    """Families of the attention kernels, most frequent first."""
    partial_window: bool
    """Whether the window is a chosen range or cut at times, instead of whole iterations."""
    breakdown: Breakdown
    iteration_ns: tuple[int, ...]
    """Wall time of each marked iteration; a single one where nothing is marked."""
    window_source: str = "trace"
    """Origin of the window: `ringprof.analysis.timeline.window.Window.source`."""
    steps: int | None = None
    """Training steps that the window shows, as `ringprof.analysis.timeline.window.Window.steps`."""
    blocked_ns: dict[str, int] = field(default_factory=dict)
    """Channel -> time blocked in waiting for it; CPU ranks only."""
    part_work: tuple[PartWork, ...] = ()
    """FLOPs and time of attention and matrix products; empty where the trace holds no shapes."""
    products: tuple[Product, ...] = ()
    """Matrix products by shape; empty where the trace holds no shapes."""
    collectives: tuple[CollectiveTotals, ...] = ()
    """Communication by kind, group and size; empty on CPU."""
    layers: tuple[LayerTime, ...] = ()
    """Times by layer of the model; empty where the trace does not name layers."""
    recurrence: tuple[RecurrencePart, ...] = ()
    """Parts of a recurrence over ranks; empty where the trace marks none."""
    hop_totals: HopTotals = field(default_factory=lambda: hop_totals(()))
    link_totals: tuple[LinkTotals, ...] = ()
    """Communication totals by kind and link, in the order of their first kernel."""
    exposed: ExposedTime = field(default_factory=ExposedTime)
    hop_peers: frozenset[int] = frozenset()
    """Ranks that the rank's hops send to."""
    idle: IdleCauses | None = None
    """Causes of the idle time; None on CPU."""
    launches: LaunchStatistics | None = None
    """Statistics of how activities were launched; None on CPU, and where no launch is recorded."""
    producer: str = "torch"
    """Program that wrote the trace: `ringprof.trace.columns.Trace.producer`."""
    one_by_one: OneByOne | None = None
    """Kernels that no graph launches; None where no graph launches any."""
    left_out_comm_ns: int = 0
    """Time of the communication in the trace that is not counted: outside of the window, on another device, or of
    other groups."""
    sent_bytes: int | None = None
    """Bytes that the rank sent in communication in the window; None where the size of a message is not recorded."""
    from_host_bytes: int | None = None
    """Bytes copied from host memory to the device in the window; None where the size of a copy is not recorded."""
    read_detail: Callable[[int], Detail] | None = field(default=None, repr=False, compare=False)
    """Function that returns the detail of a rank: from memory if all ranks' details fit, else computed again."""

    @property
    def detail(self) -> Detail:
        """Data that the metrics come from; may be read and computed again at every access."""
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


def in_memory_reader(detail: Detail) -> Callable[[int], Detail]:
    """Return a `Rank.read_detail` for a detail that stays in memory."""
    return lambda rank: detail


def sum_by_link(splits: Sequence[Split], blocks: Sequence[PeerBlock] = ()) -> tuple[LinkTotals, ...]:
    """Sum up communication kernels and copies by kind and link.

    ``blocks`` add the time that copies waited without a kernel.
    """
    copy_wait_ns = sum(block.time_ns for block in blocks if block.part == "wait")
    copy_wait_unknown = any(block.part == "unsplit" for block in blocks)
    groups: dict[tuple[str, str], list[Split]] = {}
    for split in splits:
        groups.setdefault((split.transfer.kind, split.link), []).append(split)
    rows = []
    for (kind, link), group in groups.items():
        is_copy = kind == "copy_engine"
        timed = [split for split in group if split.wire_ns is not None and not (is_copy and copy_wait_unknown)]
        rows.append(
            LinkTotals(
                kind=kind,
                link=link,
                kernels=len(group),
                timed=len(timed),
                # All copies stay within a host, so they have a single row, which takes all of their waiting.
                wait_ns=sum(split.wait_ns or 0 for split in timed) + (copy_wait_ns if is_copy and timed else 0),
                wire_ns=sum(split.wire_ns or 0 for split in timed),
                sent_bytes=total([split.transfer.sent_bytes for split in timed]),
            )
        )
    return tuple(rows)
