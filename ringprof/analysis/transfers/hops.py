"""Hops: a rank's exchanges with its neighbours, each split into wait and wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from ringprof.analysis.intervals import Spans, union
from ringprof.analysis.transfers.transfers import Transfer

SAME_HOST, OTHER_HOST, UNKNOWN_LINK = "same_host", "other_host", "unknown"

EMULATED = "/"
"""Separator between the name of a real host and the number of a host emulated on it."""

HostOfRank = Mapping[int, str | None]
"""Rank -> host; None where no source names the host."""


class Split(msgspec.Struct, frozen=True, gc=False):
    """One communication activity split into wait and wire; ``wait_ns + wire_ns`` is its duration."""

    transfer: Transfer
    link: str
    """Slowest link that the activity uses: ``other_host``, ``same_host``, or ``unknown`` where a host has no name."""
    ready_ns: int | None
    """Start of the last rank that the activity depends on, by the clock of the activity's rank; None where unknown."""
    wait_ns: int | None = None
    wire_ns: int | None = None


class PeerBlock(msgspec.Struct, frozen=True, gc=False):
    """Interval in which a device ran nothing because of a peer's copy-engine hop; times by the rank's own clock."""

    start_ns: int
    end_ns: int
    part: str
    """``wait``, ``wire``, or ``unsplit`` where the peer's trace is missing."""
    peer: int | None
    """Rank that the device waited for, or the rank at the other end of the wire."""
    hop: int
    """Index into the trace's activities: the first copy of the rank's own hop that the interval belongs to."""

    @property
    def time_ns(self) -> int:
        """Length of the interval."""
        return self.end_ns - self.start_ns


def spans_of(blocks: Iterable[PeerBlock], *parts: str) -> Spans:
    """Return the union of the blocks' intervals, of all blocks or of some parts (``wait``, ``wire``, ``unsplit``)."""
    chosen = [block for block in blocks if not parts or block.part in parts]
    start, end = ([getattr(block, name) for block in chosen] for name in ("start_ns", "end_ns"))
    return union(np.array(start, np.int64), np.array(end, np.int64))


class Exchange(msgspec.Struct, frozen=True, gc=False):
    """Communication activities that run together: a hop, or one gather or scatter."""

    parts: tuple[Split, ...]

    @property
    def start_ns(self) -> int:
        """Start of the first activity."""
        return min([part.transfer.start_ns for part in self.parts])

    @property
    def end_ns(self) -> int:
        """End of the last activity."""
        return max([part.transfer.end_ns for part in self.parts])

    @property
    def waits_ns(self) -> list[int | None]:
        """Wait of each activity; None for an unknown wait."""
        return [part.wait_ns for part in self.parts]


class TimedHop(Exchange, frozen=True, gc=False):
    """One exchange with neighbours: one kernel, a send and a receive kernel launched in a row, or the peer-to-peer
    copies launched in a row."""

    rank: int
    number: int
    """Index among the rank's hops, by start."""
    exposed_ns: int = 0
    """Time of the hop that no computation overlaps, including the time in which the device idled because of it."""
    blocks: tuple[PeerBlock, ...] = ()
    """Intervals in which the device ran nothing because of the hop's peers."""

    @property
    def waits_ns(self) -> list[int | None]:
        """Wait of each activity, and of the device while it ran nothing; None for an unknown wait."""
        blocked = [{"wait": block.time_ns, "wire": 0}.get(block.part) for block in self.blocks]
        return [*(part.wait_ns for part in self.parts), *blocked]

    @property
    def sent_to(self) -> tuple[int, ...]:
        """Ranks that the hop sends to."""
        return tuple(dict.fromkeys([message.peer for part in self.parts for message in part.transfer.sends]))

    @property
    def received_from(self) -> tuple[int, ...]:
        """Ranks that the hop receives from."""
        return tuple(dict.fromkeys([message.peer for part in self.parts for message in part.transfer.receives]))

    @property
    def sent_bytes(self) -> int | None:
        """Bytes sent; None where a message's size is unknown."""
        if len(self.parts) == 1:
            return self.parts[0].transfer.sent_bytes
        return total([part.transfer.sent_bytes for part in self.parts])

    @property
    def wire_ns(self) -> int | None:
        """Time in which at least one of the hop's kernels was on the wire."""
        if len(self.parts) == 1:
            return self.parts[0].wire_ns
        if any(part.wire_ns is None for part in self.parts):
            return None
        return _total_length(
            _merged_spans([(part.transfer.end_ns - (part.wire_ns or 0), part.transfer.end_ns) for part in self.parts])
        )

    @property
    def wait_ns(self) -> int | None:
        """Kernel time without wire time, plus the time in which the device waited for peers without a kernel."""
        blocked = total(self.waits_ns[len(self.parts) :])
        if len(self.parts) == 1:
            own = self.parts[0].wait_ns
        else:
            wire = self.wire_ns
            own = None if wire is None else _total_length(self.busy_ns()) - wire
        return None if own is None or blocked is None else own + blocked

    @property
    def wire_gbps(self) -> float | None:
        """Bytes sent over wire time, in GB/s."""
        return gbps(self.sent_bytes, self.wire_ns)

    def busy_ns(self) -> list[tuple[int, int]]:
        """Return the disjoint intervals in which at least one of the hop's kernels ran."""
        return _merged_spans([(part.transfer.start_ns, part.transfer.end_ns) for part in self.parts])


class HopTotals(msgspec.Struct, frozen=True):
    """Totals of all hops of one rank, or of several."""

    count: int
    sent_bytes: int
    """Sum over the hops whose size is known."""
    wait_ns: int | None
    wire_ns: int | None
    wire_gbps: float | None
    """All bytes over all wire time; None where either is unknown for a hop."""
    wait_share: float | None
    """Wait over the sum of wait and wire."""


def hop_totals(hops: Sequence[TimedHop]) -> HopTotals:
    """Sum up the hops."""
    wait, wire = total([hop.wait_ns for hop in hops]), total([hop.wire_ns for hop in hops])
    size = total([hop.sent_bytes for hop in hops])
    return HopTotals(
        count=len(hops),
        sent_bytes=sum(hop.sent_bytes or 0 for hop in hops),
        wait_ns=wait,
        wire_ns=wire,
        wire_gbps=gbps(size, wire),
        wait_share=wait / (wait + wire) if wait is not None and wire is not None and wait + wire else None,
    )


def _merged_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of a few spans; arrays would be slower for so few."""
    if len(spans) == 1:
        return spans
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _total_length(spans: list[tuple[int, int]]) -> int:
    """Return the sum of the spans' lengths."""
    return sum(end - start for start, end in spans)


def gbps(size_bytes: int | None, time_ns: int | None) -> float | None:
    """Return a rate in GB/s; None where size or time is unknown, or no time passed."""
    return size_bytes / time_ns if size_bytes is not None and time_ns else None


def total(values: list[int | None]) -> int | None:
    """Return the sum; None where a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def mean(values: list[int | None]) -> float | None:
    """Return the mean; None where a value is unknown."""
    sum_of_values = total(values)
    return None if sum_of_values is None else sum_of_values / len(values)


def group_into_hops(splits: Sequence[Split], rank: int) -> list[TimedHop]:
    """Group one rank's transfers into hops, by start.

    A send/recv kernel is one hop. So are a lone send and the lone receive beside it, and peer-to-peer copies launched
    in a row: K's and V's copies, which one kernel would have carried together.
    """
    candidates = (part for part in splits if part.transfer.kind in ("send_recv", "copy_engine"))
    by_launch = sorted(candidates, key=lambda part: (part.transfer.launched, part.transfer.start_ns))
    exchanges: list[list[Split]] = []
    last: Split | None = None
    for part in by_launch:
        if last is not None and _same_hop(exchanges[-1], last.transfer, part.transfer):
            exchanges[-1].append(part)
        else:
            exchanges.append([part])
        last = part
    exchanges.sort(key=lambda parts: min([part.transfer.start_ns for part in parts]))
    return [TimedHop(tuple(parts), rank, number) for number, parts in enumerate(exchanges)]


def _same_hop(hop_parts: Sequence[Split], previous: Transfer, transfer: Transfer) -> bool:
    """Return whether a transfer belongs to the same hop as the transfers launched before it."""
    if previous.launched < 0 or transfer.launched != previous.launched + 1 or previous.kind != transfer.kind:
        return False
    if previous.kind == "copy_engine":
        return True
    if len(hop_parts) != 1 or previous.group != transfer.group:
        return False
    directions = (bool(previous.sends), bool(previous.receives)), (bool(transfer.sends), bool(transfer.receives))
    return set(directions) == {(True, False), (False, True)}
