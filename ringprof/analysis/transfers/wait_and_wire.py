"""Split each communication kernel's time into wait for its peers and wire.

A send/recv kernel starts when its rank reaches it and spins until its peers do. With all ranks on one clock, the time
at which all were ready is known: the latest start among the kernel's own peers. Where the kernel carries several
messages per peer (K and V in one group), the peers' own peers in that hop count too. The time before is wait; the
rest is wire. A peer-to-peer copy does not start before the peer is ready: all of it is wire.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ringprof.analysis.transfers.clocks import SYNCHRONISING, UNBUFFERED_BYTES, Clocks
from ringprof.analysis.transfers.hops import OTHER_HOST, SAME_HOST, UNKNOWN_LINK, HostOfRank, Split
from ringprof.analysis.transfers.matching import Matches
from ringprof.analysis.transfers.transfers import Transfer
from ringprof.trace.columns import Int64

LinkClass = tuple[str, str]
"""(kind, link)"""

Rate = tuple[int, int]
"""A rate as (bytes, nanoseconds)."""

# The device clocks of one host agree within about a microsecond.
_CLOCK_TOLERANCE_NS = 2_000
# A clock error below one part in this many of a kernel's duration does not change its figures noticeably.
_NEGLIGIBLE = 10


def better_rates(first: dict[LinkClass, Rate], second: dict[LinkClass, Rate]) -> dict[LinkClass, Rate]:
    """Merge two tables of rates, keeping the higher rate of each (kind, link)."""
    result = dict(first)
    for key, (size, span) in second.items():
        rate = result.get(key)
        if rate is None or size * rate[1] > rate[0] * span:
            result[key] = size, span
    return result


class WaitSplitter:
    """Splits matched transfers into wait and wire on one clock, and measures the best rates."""

    def __init__(self, matches: Matches, hosts: HostOfRank, clocks: Clocks) -> None:
        transfers, sender, receiver = matches.transfers, matches.sender, matches.receiver
        self._matches, self._links = matches, _links(transfers, hosts)
        # Times on the common clock and masks, with one element per transfer.
        offset = np.array([clocks.offset_ns[transfer.rank] for transfer in transfers], np.int64)
        start = np.array([transfer.start_ns for transfer in transfers], np.int64) + offset
        self._end: Int64 = np.array([transfer.end_ns for transfer in transfers], np.int64) + offset
        self._peers_ready: Int64 = start.copy()
        """Latest start over the transfer and its own partners."""
        np.maximum.at(self._peers_ready, sender, start[receiver])
        np.maximum.at(self._peers_ready, receiver, start[sender])
        for calls in matches.collective_matches:
            self._peers_ready[calls] = start[calls].max(axis=0)
        for absent in matches.absent_peers:
            self._peers_ready[absent.rows] = absent.peers_ready_ns
        own_error, matched = _clock_error(matches, clocks), matches.matched()
        self._all_ready, self._resolved, self._clock_error = self._peers_ready.copy(), matched.copy(), own_error.copy()
        """Latest start over everything that the transfer depends on; whether all of that is matched; and the largest
        clock error between the transfer and it."""
        has_repeated_peer = _has_repeated_peer(transfers)
        # Peers of peers, but no further: `ringprof.scale.pipeline.NEIGHBOURHOOD` relies on this limit.
        for transfer_index, partner in ((sender, receiver), (receiver, sender)):
            rows = has_repeated_peer[transfer_index]
            np.maximum.at(self._all_ready, transfer_index[rows], self._peers_ready[partner[rows]])
            np.maximum.at(self._clock_error, transfer_index[rows], own_error[partner[rows]])
            # Where a peer's own peers are unknown, so is what may have delayed it.
            np.logical_and.at(self._resolved, transfer_index[rows], matched[partner[rows]])

    def best_rates(self) -> dict[LinkClass, Rate]:
        """Return the best measured rate of each (kind, link), as (bytes, nanoseconds).

        Only a kernel's own peers count here. The ready time is then never too late, so no rate exceeds what was
        possible.
        """
        size = np.array([transfer.sent_bytes or 0 for transfer in self._matches.transfers], np.int64)
        copies = np.array([transfer.kind == "copy_engine" for transfer in self._matches.transfers], np.bool_)
        span = self._end - self._peers_ready
        usable = (self._matches.matched() | copies) & (span > 0) & (size > 0)
        rate = np.where(usable, size / np.maximum(span, 1), 0.0)
        classes: dict[LinkClass, int] = {}
        code = np.array(
            [
                classes.setdefault((transfer.kind, link), len(classes))
                for transfer, link in zip(self._matches.transfers, self._links, strict=True)
            ],
            np.int64,
        )
        best = {}
        for key, number in classes.items():
            rows = np.flatnonzero(usable & (code == number))
            if len(rows):
                fastest = rows[np.argmax(rate[rows])]
                best[key] = int(size[fastest]), int(span[fastest])
        return best

    def clocks_disagree(self) -> bool:
        """Return whether a transfer ended on one rank before its partner began on another: the clocks then disagree.

        Only large transfers and collectives count: a small message may sit in a buffer.
        """
        large = np.array(
            [
                transfer.kind in SYNCHRONISING or (transfer.sent_bytes or 0) >= UNBUFFERED_BYTES
                for transfer in self._matches.transfers
            ],
            np.bool_,
        )
        late = self._peers_ready - self._end > _CLOCK_TOLERANCE_NS + self._clock_error
        return bool(np.any(late & large & self._matches.matched()))

    def split(
        self, best: Mapping[LinkClass, Rate] | None, ranks: Collection[int]
    ) -> tuple[dict[int, list[Split]], int]:
        """Split the transfers of ``ranks`` into wait and wire, where their partners are known.

        ``best`` holds the best rates of the whole run. None means that the ranks share no clock: then only copies are
        split, which wait for nobody. Returns the splits by rank, and the number of transfers left unsplit because of
        uncertain clocks.
        """
        result: dict[int, list[Split]] = {rank: [] for rank in ranks}
        inconclusive = 0
        columns = (self._end, self._all_ready, self._resolved, self._clock_error)
        for transfer, link, end, ready, resolved, error in zip(
            self._matches.transfers, self._links, *(column.tolist() for column in columns), strict=True
        ):
            if transfer.rank not in result:
                continue
            can_split = resolved and best is not None
            split = _split(transfer, link, end - ready if can_split else None, (best or {}).get((transfer.kind, link)))
            if error and split.wait_ns is not None and error > max(split.wait_ns, transfer.duration_ns // _NEGLIGIBLE):
                split, inconclusive = Split(transfer, link, None), inconclusive + 1
            result[transfer.rank].append(split)
        return result, inconclusive


def waits_by_peer(matches: Matches, clocks: Clocks, splits: Mapping[int, Sequence[Split]]) -> dict[int, dict[int, int]]:
    """Return for each rank of ``splits``: peer -> nanoseconds that the rank's kernels waited for that peer.

    The whole wait of a kernel counts for the last rank to begin, among those that the kernel depends on.
    """
    last_partner = _last_partner(matches, clocks)
    wait_of = {
        (split.transfer.rank, split.transfer.activity): split.wait_ns
        for rank_splits in splits.values()
        for split in rank_splits
    }
    waits: dict[int, dict[int, int]] = {rank: {} for rank in splits}
    for transfer, peer in zip(matches.transfers, last_partner.tolist(), strict=True):
        wait = wait_of.get((transfer.rank, transfer.activity))
        if wait and peer not in (transfer.rank, _NO_RANK):
            rank_waits = waits[transfer.rank]
            rank_waits[peer] = rank_waits.get(peer, 0) + wait
    return waits


_NO_RANK = -1


def _last_partner(matches: Matches, clocks: Clocks) -> Int64:
    """Return for each transfer the last rank to begin among those it depends on; -1 where partners are unknown."""
    rank = np.array([transfer.rank for transfer in matches.transfers], np.int64)
    offset = np.array([clocks.offset_ns[transfer.rank] for transfer in matches.transfers], np.int64)
    start = np.array([transfer.start_ns for transfer in matches.transfers], np.int64) + offset
    latest, last = start.copy(), np.where(matches.matched(), rank, _NO_RANK)
    sender, receiver = matches.sender, matches.receiver
    transfer_index, partner = np.concatenate((sender, receiver)), np.concatenate((receiver, sender))
    # NumPy keeps the last of several assignments to one index: that of the partner which began last.
    order = np.argsort(start[partner], kind="stable")
    transfer_index, partner = transfer_index[order], partner[order]
    later = start[partner] > start[transfer_index]
    last[transfer_index[later]], latest[transfer_index[later]] = rank[partner[later]], start[partner[later]]
    for calls in matches.collective_matches:
        latest_row = start[calls].argmax(axis=0)
        latest_call = np.take_along_axis(calls, latest_row[None, :], axis=0)[0]
        last[calls] = np.where(start[latest_call] > latest[calls], rank[latest_call], last[calls])
    for absent in matches.absent_peers:
        later = absent.peers_ready_ns > latest[absent.rows]
        last[absent.rows] = np.where(later, absent.last_rank, last[absent.rows])
    # A kernel of several messages may have waited for the last partners of its peers.
    has_repeated_peer = _has_repeated_peer(matches.transfers)
    result: Int64 = last.copy()
    transfer_index = np.concatenate((matches.sender, matches.receiver))
    partner = np.concatenate((matches.receiver, matches.sender))
    later = has_repeated_peer[transfer_index] & (last[partner] != _NO_RANK) & (latest[partner] > latest[transfer_index])
    transfer_index, partner = transfer_index[later], partner[later]
    # NumPy keeps the last of several assignments to one index: that of the peer whose own partner began last.
    order = np.argsort(latest[partner], kind="stable")
    result[transfer_index[order]] = last[partner[order]]
    return result


def link_of(transfer: Transfer, hosts: HostOfRank) -> str:
    """Return the slowest link class that a transfer uses."""
    if transfer.kind == "copy_engine":
        # One process can copy into another's memory only within a host.
        return SAME_HOST
    partners = {message.peer for message in (*transfer.sends, *transfer.receives)}
    if transfer.kind != "send_recv":
        partners = set(transfer.group[1])
    own_host = hosts.get(transfer.rank)
    peer_hosts = [hosts.get(peer) for peer in partners]
    if own_host is None or None in peer_hosts or not peer_hosts:
        return UNKNOWN_LINK
    return SAME_HOST if all(host == own_host for host in peer_hosts) else OTHER_HOST


def _clock_error(matches: Matches, clocks: Clocks) -> Int64:
    """Return, per transfer, the largest error in ns of its rank's clock against the clocks of its partners' ranks."""
    error = np.zeros(len(matches.transfers), np.int64)
    if not clocks.several:
        return error
    between, number = clocks.residuals()
    host_of_transfer = np.array([number[clocks.host[transfer.rank]] for transfer in matches.transfers], np.int64)
    for transfer_index, partner in ((matches.sender, matches.receiver), (matches.receiver, matches.sender)):
        np.maximum.at(error, transfer_index, between[host_of_transfer[transfer_index], host_of_transfer[partner]])
    for calls in matches.collective_matches:
        host_of_row = host_of_transfer[calls[:, 0]]
        error[calls] = between[np.ix_(host_of_row, host_of_row)].max(axis=1)[:, None]
    for absent in matches.absent_peers:
        error[absent.rows] = absent.clock_error_ns
    return error


def _has_repeated_peer(transfers: tuple[Transfer, ...]) -> npt.NDArray[np.bool_]:
    """Return for each transfer whether a peer sends or receives more than one of the kernel's messages."""
    repeated: dict[tuple[int, int], bool] = {}
    result = np.zeros(len(transfers), np.bool_)
    for number, transfer in enumerate(transfers):
        # Kernels with the same messages share these tuples.
        key = id(transfer.sends), id(transfer.receives)
        if key not in repeated:
            receivers = [message.peer for message in transfer.sends]
            senders = [message.peer for message in transfer.receives]
            repeated[key] = len(receivers) > len(set(receivers)) or len(senders) > len(set(senders))
        result[number] = repeated[key]
    return result


def _links(transfers: tuple[Transfer, ...], hosts: HostOfRank) -> list[str]:
    """Return the slowest link class of each transfer."""
    link_by_contents: dict[tuple[int, str, int, int, int], str] = {}
    result = []
    for transfer in transfers:
        key = transfer.rank, transfer.kind, id(transfer.sends), id(transfer.receives), id(transfer.group)
        if key not in link_by_contents:
            link_by_contents[key] = link_of(transfer, hosts)
        result.append(link_by_contents[key])
    return result


def _split(transfer: Transfer, link: str, after_ready: int | None, best: Rate | None) -> Split:
    """Split one transfer into wait and wire; wire takes at least as long as at the best rate."""
    duration = transfer.end_ns - transfer.start_ns
    if transfer.kind == "copy_engine":
        return Split(transfer, link, transfer.start_ns, 0, duration)
    if after_ready is None:
        return Split(transfer, link, None)
    floor = 0
    if best is not None and transfer.sent_bytes:
        size, span = best
        floor = span * transfer.sent_bytes // size
    wire = min(max(after_ready, floor), duration)
    return Split(transfer, link, transfer.end_ns - after_ready, duration - wire, wire)
