"""Hops, and how long each communication kernel waited for its peers before its bytes were on the wire.

A send/recv kernel starts when its rank gets there and spins until its peers do. With all ranks on one clock the
moment they were all ready is known: the latest start among the kernel's own peers and, where it carries more than
one message a peer (K and V in one group), their peers in the same hop. What lies before is wait; the rest is wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringprof.analysis.matching import Key, Matches
from ringprof.analysis.transfers import Transfer

SAME_HOST, OTHER_HOST, UNKNOWN_LINK = "same_host", "other_host", "unknown"

Hosts = dict[int, str | None]
EMULATED = "/"
"""Between the name of a real host and the number of an emulated one on it."""
"""Host of each rank; None where nothing names it."""

# A message this large cannot sit in NCCL's buffers: its sender cannot end before its receiver began.
_UNBUFFERED_BYTES = 64 << 20
# The device clocks of one host agree to about a microsecond.
_CLOCK_TOLERANCE_NS = 2_000


@dataclass(frozen=True)
class Split:
    """One communication kernel with its wait and wire; ``wait_ns + wire_ns`` is its duration."""

    transfer: Transfer
    link: str
    """The slower of the links that it uses: ``other_host``, ``same_host``, or ``unknown`` where no host is named."""
    ready_ns: int | None
    """When the last rank that it depends on had started; None where that is not known."""
    wait_ns: int | None = None
    wire_ns: int | None = None


@dataclass(frozen=True)
class Hop:
    """One exchange with neighbours: one kernel, or a send and a receive kernel launched one after the other."""

    rank: int
    number: int
    """Place among the rank's hops, by start."""
    parts: tuple[Split, ...]
    exposed_ns: int = 0
    """Time of this hop with no computation beside it."""

    @property
    def start_ns(self) -> int:
        return min(part.transfer.start_ns for part in self.parts)

    @property
    def end_ns(self) -> int:
        return max(part.transfer.end_ns for part in self.parts)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes sent; None where a message's size is not known."""
        return total([part.transfer.sent_bytes for part in self.parts])

    @property
    def wire_ns(self) -> int | None:
        """Time in which one of its kernels was on the wire."""
        if any(part.wire_ns is None for part in self.parts):
            return None
        return _length(_joined([(p.transfer.end_ns - (p.wire_ns or 0), p.transfer.end_ns) for p in self.parts]))

    @property
    def wait_ns(self) -> int | None:
        """The rest of its kernels' time."""
        wire = self.wire_ns
        return None if wire is None else _length(self.busy_ns()) - wire

    def busy_ns(self) -> list[tuple[int, int]]:
        """The spans in which one of its kernels ran: one, or two that do not touch."""
        return _joined([(part.transfer.start_ns, part.transfer.end_ns) for part in self.parts])


@dataclass(frozen=True)
class HopTotals:
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


def hop_totals(hops: Sequence[Hop]) -> HopTotals:
    """What the hops come to."""
    wait, wire = total([hop.wait_ns for hop in hops]), total([hop.wire_ns for hop in hops])
    size = total([hop.sent_bytes for hop in hops])
    return HopTotals(
        count=len(hops),
        sent_bytes=sum(hop.sent_bytes or 0 for hop in hops),
        wait_ns=wait,
        wire_ns=wire,
        wire_gbps=size / wire if size is not None and wire else None,
        wait_share=wait / (wait + wire) if wait is not None and wire is not None and wait + wire else None,
    )


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of one or two spans: too few for arrays to pay."""
    if len(spans) == 1:
        return spans
    first, second = sorted(spans)
    return [(first[0], max(first[1], second[1]))] if second[0] <= first[1] else [first, second]


def _length(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def total(values: list[int | None]) -> int | None:
    """The sum, or None if one is not known."""
    return None if any(value is None for value in values) else sum(value for value in values if value is not None)


def split(
    transfers: dict[int, list[Transfer]], matches: Matches, hosts: Hosts
) -> tuple[dict[int, list[Split]], dict[tuple[str, str], float]]:
    """Every transfer with wait and wire where its partners are known, and the best GB/s by (kind, link)."""
    ready = {
        (rank, position): _ready(transfers, matches, (rank, position))
        for rank, mine in transfers.items()
        for position in range(len(mine))
    }
    links = {
        (rank, position): link_of(transfer, hosts)
        for rank, mine in transfers.items()
        for position, transfer in enumerate(mine)
    }
    best = _best(transfers, matches, links)
    splits = {
        rank: [
            _split(transfer, links[rank, position], ready[rank, position], best)
            for position, transfer in enumerate(mine)
        ]
        for rank, mine in transfers.items()
    }
    return splits, {key: size / span for key, (size, span) in best.items()}


def clocks_disagree(transfers: dict[int, list[Transfer]], matches: Matches) -> bool:
    """Whether a large transfer ended on one rank before its partner began on another: no common clock says so."""
    for (rank, position), partners in matches.peers.items():
        mine = transfers[rank][position]
        if (mine.sent_bytes or 0) < _UNBUFFERED_BYTES:
            continue
        latest = max(transfers[other][at].start_ns for other, at in partners)
        if latest > mine.end_ns + _CLOCK_TOLERANCE_NS:
            return True
    return False


def link_of(transfer: Transfer, hosts: Hosts) -> str:
    """The slowest link class that a transfer uses."""
    partners = {message.peer for message in (*transfer.sends, *transfer.receives)}
    if transfer.kind != "send_recv":
        partners = set(transfer.group[1])
    here = hosts.get(transfer.rank)
    there = [hosts.get(peer) for peer in partners]
    if here is None or None in there or not there:
        return UNKNOWN_LINK
    return SAME_HOST if all(host == here for host in there) else OTHER_HOST


def _ready(transfers: dict[int, list[Transfer]], matches: Matches, key: Key) -> int | None:
    direct = matches.peers.get(key)
    if direct is None:
        return None
    involved = {key, *direct}
    if _several_messages(transfers[key[0]][key[1]]):
        for peer in direct:
            further = matches.peers.get(peer)
            if further is None:
                # A peer's own peers are unknown, so is what may have held it up.
                return None
            involved |= further
    return max(transfers[rank][position].start_ns for rank, position in involved)


def _several_messages(transfer: Transfer) -> bool:
    """Whether some peer gets or gives more than one message in this kernel."""
    to = [message.peer for message in transfer.sends]
    source = [message.peer for message in transfer.receives]
    return len(to) > len(set(to)) or len(source) > len(set(source))


def _best(
    transfers: dict[int, list[Transfer]], matches: Matches, links: dict[Key, str]
) -> dict[tuple[str, str], tuple[int, int]]:
    """The best rate seen by (kind, link), as bytes and nanoseconds.

    Only a kernel's own peers count here: ready is then never too late, so no rate is better than was possible.
    """
    best: dict[tuple[str, str], tuple[int, int]] = {}
    for (rank, position), partners in matches.peers.items():
        transfer = transfers[rank][position]
        begun = max(transfer.start_ns, *(transfers[other][at].start_ns for other, at in partners))
        span, size = transfer.end_ns - begun, transfer.sent_bytes
        if span <= 0 or not size:
            continue
        key = transfer.kind, links[rank, position]
        if key not in best or size * best[key][1] > best[key][0] * span:
            best[key] = size, span
    return best


def _split(transfer: Transfer, link: str, ready_ns: int | None, best: dict[tuple[str, str], tuple[int, int]]) -> Split:
    if ready_ns is None:
        return Split(transfer, link, None)
    floor = 0
    if transfer.sent_bytes and (transfer.kind, link) in best:
        size, span = best[transfer.kind, link]
        floor = span * transfer.sent_bytes // size
    wire = min(max(transfer.end_ns - ready_ns, floor), transfer.duration_ns)
    return Split(transfer, link, ready_ns, transfer.duration_ns - wire, wire)


def without_times(splits: dict[int, list[Split]]) -> dict[int, list[Split]]:
    """The same, wait and wire not known: for ranks that share no clock."""
    return {
        rank: [replace(part, ready_ns=None, wait_ns=None, wire_ns=None) for part in mine]
        for rank, mine in splits.items()
    }


def group_into_hops(splits: list[Split], rank: int) -> list[Hop]:
    """The hops of one rank, by start: send/recv kernels, a lone send and the lone receive beside it as one."""
    mine = sorted((part for part in splits if part.transfer.kind == "send_recv"), key=_order)
    exchanges: list[tuple[Split, ...]] = []
    for part in mine:
        if exchanges and len(exchanges[-1]) == 1 and _one_exchange(exchanges[-1][0].transfer, part.transfer):
            exchanges[-1] = (*exchanges[-1], part)
        else:
            exchanges.append((part,))
    exchanges.sort(key=lambda parts: min(part.transfer.start_ns for part in parts))
    return [Hop(rank, number, parts) for number, parts in enumerate(exchanges)]


def _order(part: Split) -> tuple[int, int]:
    return part.transfer.launched, part.transfer.start_ns


def _one_exchange(first: Transfer, second: Transfer) -> bool:
    """A lone send and a lone receive, one launched right after the other: what an unbatched exchange looks like."""
    if first.group != second.group or first.launched < 0 or second.launched != first.launched + 1:
        return False
    lone = (bool(first.sends), bool(first.receives)), (bool(second.sends), bool(second.receives))
    return set(lone) == {(True, False), (False, True)}
