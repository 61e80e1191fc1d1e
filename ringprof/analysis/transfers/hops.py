"""Hops: the exchanges of a rank with its neighbours, each with what of it was waiting and what was wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from ringprof.analysis.intervals import Spans, union
from ringprof.analysis.transfers.transfers import Transfer

SAME_HOST, OTHER_HOST, UNKNOWN_LINK = "same_host", "other_host", "unknown"

EMULATED = "/"
"""Stands between the name of a real host and the number of a host that was emulated on it."""

HostOfRank = Mapping[int, str | None]
"""Host of each rank; None where nothing names it."""


class Split(msgspec.Struct, frozen=True, gc=False):
    """One communication activity with its wait and wire; ``wait_ns + wire_ns`` is its duration."""

    transfer: Transfer
    link: str
    """The slower of the links that it uses: ``other_host``, ``same_host``, or ``unknown`` where no host is named."""
    ready_ns: int | None
    """When the last rank that it depends on had started, by its own rank's clock; None where that is not known."""
    wait_ns: int | None = None
    wire_ns: int | None = None


class PeerBlock(msgspec.Struct, frozen=True, gc=False):
    """A time in which a device ran nothing because of a peer's copy-engine hop; times by the rank's own clock."""

    start_ns: int
    end_ns: int
    part: str
    """``wait``, ``wire``, or ``unsplit`` where the peer's trace is not there."""
    peer: int | None
    """The rank that is waited for, or that is at the other end of the wire."""
    hop: int
    """Index into the trace's activities of the first copy of the rank's own hop that it belongs to."""

    @property
    def time_ns(self) -> int:
        """How long it lasts."""
        return self.end_ns - self.start_ns


def spans_of(blocks: Iterable[PeerBlock], *parts: str) -> Spans:
    """Unite the times of the blocks of some parts (``wait``, ``wire``, ``unsplit``), or of all."""
    chosen = [block for block in blocks if not parts or block.part in parts]
    start, end = ([getattr(block, name) for block in chosen] for name in ("start_ns", "end_ns"))
    return union(np.array(start, np.int64), np.array(end, np.int64))


class Exchange(msgspec.Struct, frozen=True, gc=False):
    """What goes on at once: a hop, or one gather or scatter."""

    parts: tuple[Split, ...]

    @property
    def start_ns(self) -> int:
        return min([part.transfer.start_ns for part in self.parts])

    @property
    def end_ns(self) -> int:
        return max([part.transfer.end_ns for part in self.parts])

    @property
    def waits_ns(self) -> list[int | None]:
        """Every wait of it: of its kernels, and of the device while nothing ran; None for one that is not known."""
        return [part.wait_ns for part in self.parts]


class TimedHop(Exchange, frozen=True, gc=False):
    """One exchange with neighbours: one kernel, a send and a receive kernel launched one after the other, or the
    peer-to-peer copies launched one after the other."""

    rank: int
    number: int
    """Place among the rank's hops, by start."""
    exposed_ns: int = 0
    """Time of this hop with no computation beside it, and of the device idling for its sake."""
    blocks: tuple[PeerBlock, ...] = ()
    """Times in which the device ran nothing because of the peers of this hop."""

    @property
    def waits_ns(self) -> list[int | None]:
        """Every wait of it: of its kernels, and of the device while nothing ran; None for one that is not known."""
        blocked = [{"wait": block.time_ns, "wire": 0}.get(block.part) for block in self.blocks]
        return [*(part.wait_ns for part in self.parts), *blocked]

    @property
    def sent_to(self) -> tuple[int, ...]:
        """The ranks that it sends to."""
        return tuple(dict.fromkeys([message.peer for part in self.parts for message in part.transfer.sends]))

    @property
    def received_from(self) -> tuple[int, ...]:
        """The ranks that it receives from."""
        return tuple(dict.fromkeys([message.peer for part in self.parts for message in part.transfer.receives]))

    @property
    def sent_bytes(self) -> int | None:
        """Bytes sent; None where a message's size is not known."""
        if len(self.parts) == 1:
            return self.parts[0].transfer.sent_bytes
        return total([part.transfer.sent_bytes for part in self.parts])

    @property
    def wire_ns(self) -> int | None:
        """Time in which one of its kernels was on the wire."""
        if len(self.parts) == 1:
            return self.parts[0].wire_ns
        if any(part.wire_ns is None for part in self.parts):
            return None
        return _length(_joined([(p.transfer.end_ns - (p.wire_ns or 0), p.transfer.end_ns) for p in self.parts]))

    @property
    def wait_ns(self) -> int | None:
        """The rest of its kernels' time, and the time in which the device waited for its peers without a kernel."""
        blocked = total(self.waits_ns[len(self.parts) :])
        if len(self.parts) == 1:
            own = self.parts[0].wait_ns
        else:
            wire = self.wire_ns
            own = None if wire is None else _length(self.busy_ns()) - wire
        return None if own is None or blocked is None else own + blocked

    @property
    def wire_gbps(self) -> float | None:
        """Its rate while it is on the wire."""
        return gbps(self.sent_bytes, self.wire_ns)

    def busy_ns(self) -> list[tuple[int, int]]:
        """The spans in which one of its kernels ran: one, or several that do not touch."""
        return _joined([(part.transfer.start_ns, part.transfer.end_ns) for part in self.parts])


class HopTotals(msgspec.Struct, frozen=True):
    """All hops of one rank, or of several."""

    count: int
    sent_bytes: int
    """Of those whose size is known."""
    wait_ns: int | None
    wire_ns: int | None
    wire_gbps: float | None
    """All bytes over all wire time; None where either is not known of every hop."""
    wait_share: float | None
    """Waiting over waiting and wire."""


def hop_totals(hops: Sequence[TimedHop]) -> HopTotals:
    """What the hops come to."""
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


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of a few spans: too few for arrays to pay."""
    if len(spans) == 1:
        return spans
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _length(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def gbps(size_bytes: int | None, time_ns: int | None) -> float | None:
    """A rate in GB/s; None where size or time is not known, or no time passed."""
    return size_bytes / time_ns if size_bytes is not None and time_ns else None


def total(values: list[int | None]) -> int | None:
    """The sum, or None if one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def mean(values: list[int | None]) -> float | None:
    """The mean; None where one is not known."""
    whole = total(values)
    return None if whole is None else whole / len(values)


def group_into_hops(splits: Sequence[Split], rank: int) -> list[TimedHop]:
    """The hops of one rank, by start.

    A send/recv kernel is one; so are a lone send and the lone receive beside it, and peer-to-peer copies that were
    launched with nothing between them: K's and V's, that one kernel would have carried together.
    """
    sent = (part for part in splits if part.transfer.kind in ("send_recv", "copy_engine"))
    mine = sorted(sent, key=lambda part: (part.transfer.launched, part.transfer.start_ns))
    exchanges: list[list[Split]] = []
    last: Split | None = None
    for part in mine:
        if last is not None and _one_exchange(exchanges[-1], last.transfer, part.transfer):
            exchanges[-1].append(part)
        else:
            exchanges.append([part])
        last = part
    exchanges.sort(key=lambda parts: min([part.transfer.start_ns for part in parts]))
    return [TimedHop(tuple(parts), rank, number) for number, parts in enumerate(exchanges)]


def _one_exchange(begun: Sequence[Split], last: Transfer, next_one: Transfer) -> bool:
    """Whether a transfer belongs to the hop that the ones before it have begun."""
    if last.launched < 0 or next_one.launched != last.launched + 1 or last.kind != next_one.kind:
        return False
    if last.kind == "copy_engine":
        return True
    if len(begun) != 1 or last.group != next_one.group:
        return False
    lone = (bool(last.sends), bool(last.receives)), (bool(next_one.sends), bool(next_one.receives))
    return set(lone) == {(True, False), (False, True)}
