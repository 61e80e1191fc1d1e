"""How long each communication kernel waited for its peers before its bytes were on the wire.

A send/recv kernel starts when its rank gets there and spins until its peers do. With all ranks on one clock the
moment they were all ready is known: the latest start among the kernel's own peers and, where it carries more than
one message a peer (K and V in one group), their peers in the same hop. What lies before is wait; the rest is wire.
A peer-to-peer copy does not start before its rank's peer is ready: all of it is wire.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis.transfers.clocks import NEED_ALL, UNBUFFERED_BYTES, Clocks
from ringprof.analysis.transfers.hops import OTHER_HOST, SAME_HOST, UNKNOWN_LINK, HostOfRank, Split
from ringprof.analysis.transfers.matching import Matches
from ringprof.analysis.transfers.transfers import Transfer
from ringprof.trace.columns import Int64

LinkClass = tuple[str, str]
"""(kind, link)."""

Best = tuple[int, int]
"""A rate, as bytes and nanoseconds."""

# The device clocks of one host agree to about a microsecond.
_CLOCK_TOLERANCE_NS = 2_000
# A residual below one part in this many of a kernel changes none of its figures that anyone would act on.
_NEGLIGIBLE = 10


class _Moments(msgspec.Struct, frozen=True):
    """Of each transfer, on the common clock."""

    start: Int64
    end: Int64
    peers_ready: Int64
    """The latest start over it and its own partners."""
    all_ready: Int64
    """The latest start over all that it depends on."""
    resolved: npt.NDArray[np.bool_]
    """Whether all that it depends on is matched."""
    clock_error: Int64
    """How far the clocks of those that it depends on may be off its own."""


def better(one: dict[LinkClass, Best], other: dict[LinkClass, Best]) -> dict[LinkClass, Best]:
    """The better of two rates, by (kind, link)."""
    result = dict(one)
    for key, (size, span) in other.items():
        known = result.get(key)
        if known is None or size * known[1] > known[0] * span:
            result[key] = size, span
    return result


class Waiting:
    """Matched transfers on one clock: their best rates, and each with its wait and wire."""

    def __init__(self, matches: Matches, hosts: HostOfRank, clocks: Clocks) -> None:
        self._matches = matches
        self._moments = _moments(matches, clocks)
        self._links = _links(matches.transfers, hosts)

    def best_rates(self) -> dict[LinkClass, Best]:
        """The best rate seen by (kind, link)."""
        return _best(self._matches, self._moments, self._links)

    def clocks_disagree(self) -> bool:
        """Whether a transfer ended on one rank before its partner began on another: no common clock says so.

        Of large ones and of collectives: a small message may sit in a buffer.
        """
        moments, transfers = self._moments, self._matches.transfers
        large = np.array([t.kind in NEED_ALL or (t.sent_bytes or 0) >= UNBUFFERED_BYTES for t in transfers], np.bool_)
        late = moments.peers_ready - moments.end > _CLOCK_TOLERANCE_NS + moments.clock_error
        return bool(np.any(late & large & self._matches.matched()))

    def split(
        self, best: Mapping[LinkClass, Best] | None, ranks: Collection[int]
    ) -> tuple[dict[int, list[Split]], int]:
        """The transfers of ``ranks``, with wait and wire where their partners are known.

        ``best`` are the best rates over the whole run; None for ranks that share no clock: then copies alone, which
        wait for nobody, are split. Returns also how many are left unsplit because the clocks are not known well enough
        to tell their wait.
        """
        result: dict[int, list[Split]] = {rank: [] for rank in ranks}
        inconclusive = 0
        moments = self._moments
        columns = (moments.end, moments.all_ready, moments.resolved, moments.clock_error)
        for transfer, link, end, ready, resolved, error in zip(
            self._matches.transfers, self._links, *(column.tolist() for column in columns), strict=True
        ):
            if transfer.rank not in result:
                continue
            known = resolved and best is not None
            part = _split(transfer, link, end - ready if known else None, (best or {}).get((transfer.kind, link)))
            if error and part.wait_ns is not None and error > max(part.wait_ns, transfer.duration_ns // _NEGLIGIBLE):
                part, inconclusive = Split(transfer, link, None), inconclusive + 1
            result[transfer.rank].append(part)
        return result, inconclusive


def waited_for(matches: Matches, clocks: Clocks, splits: Mapping[int, Sequence[Split]]) -> dict[int, dict[int, int]]:
    """For each rank of ``splits``: peer -> nanoseconds that its kernels waited for that peer.

    The whole wait of a kernel is charged to the rank that began last of all that it depends on.
    """
    last = _last_partner(matches, clocks)
    waits = {(part.transfer.rank, part.transfer.activity): part.wait_ns for parts in splits.values() for part in parts}
    found: dict[int, dict[int, int]] = {rank: {} for rank in splits}
    for transfer, peer in zip(matches.transfers, last.tolist(), strict=True):
        wait = waits.get((transfer.rank, transfer.activity))
        if wait and peer not in (transfer.rank, _NOBODY):
            times = found[transfer.rank]
            times[peer] = times.get(peer, 0) + wait
    return found


_NOBODY = -1


def _last_partner(matches: Matches, clocks: Clocks) -> Int64:
    """Find for each transfer the rank that began last of all that it depends on; -1 where partners are not known."""
    rank = np.array([t.rank for t in matches.transfers], np.int64)
    offset = np.array([clocks.offset_ns[t.rank] for t in matches.transfers], np.int64)
    start = np.array([t.start_ns for t in matches.transfers], np.int64) + offset
    latest, last = start.copy(), np.where(matches.matched(), rank, _NOBODY)
    sender, receiver = matches.sender, matches.receiver
    mine, other = np.concatenate((sender, receiver)), np.concatenate((receiver, sender))
    # Of several assignments to one place the last stands: that of the partner which began last.
    order = np.argsort(start[other], kind="stable")
    mine, other = mine[order], other[order]
    later = start[other] > start[mine]
    last[mine[later]], latest[mine[later]] = rank[other[later]], start[other[later]]
    for meeting in matches.meetings:
        at = start[meeting].argmax(axis=0)
        row = np.take_along_axis(meeting, at[None, :], axis=0)[0]
        last[meeting] = np.where(start[row] > latest[meeting], rank[row], last[meeting])
    for absent in matches.absent_peers:
        later = absent.peers_ready_ns > latest[absent.rows]
        last[absent.rows] = np.where(later, absent.last_rank, last[absent.rows])
    return _with_peers_of_peers(matches, last, latest)


def _with_peers_of_peers(matches: Matches, last: Int64, latest: Int64) -> Int64:
    """Name the peers' last partners instead, where a kernel of several messages waited for these, too."""
    several = _several_messages(matches.transfers)
    result: Int64 = last.copy()
    mine = np.concatenate((matches.sender, matches.receiver))
    other = np.concatenate((matches.receiver, matches.sender))
    later = several[mine] & (last[other] != _NOBODY) & (latest[other] > latest[mine])
    mine, other = mine[later], other[later]
    # Of several assignments to one place the last stands: that of the peer whose own partner began last.
    order = np.argsort(latest[other], kind="stable")
    result[mine[order]] = last[other[order]]
    return result


def link_of(transfer: Transfer, hosts: HostOfRank) -> str:
    """The slowest link class that a transfer uses."""
    if transfer.kind == "copy_engine":
        # One process reaches the memory of another by copies only within a host.
        return SAME_HOST
    partners = {message.peer for message in (*transfer.sends, *transfer.receives)}
    if transfer.kind != "send_recv":
        partners = set(transfer.group[1])
    here = hosts.get(transfer.rank)
    there = [hosts.get(peer) for peer in partners]
    if here is None or None in there or not there:
        return UNKNOWN_LINK
    return SAME_HOST if all(host == here for host in there) else OTHER_HOST


# --- when all were ready ------------------------------------------------------------------------------


def _moments(matches: Matches, clocks: Clocks) -> _Moments:
    transfers, sender, receiver = matches.transfers, matches.sender, matches.receiver
    offset = np.array([clocks.offset_ns[t.rank] for t in transfers], np.int64)
    start = np.array([t.start_ns for t in transfers], np.int64) + offset
    end = np.array([t.end_ns for t in transfers], np.int64) + offset
    peers_ready, matched = start.copy(), matches.matched()
    np.maximum.at(peers_ready, sender, start[receiver])
    np.maximum.at(peers_ready, receiver, start[sender])
    for meeting in matches.meetings:
        peers_ready[meeting] = start[meeting].max(axis=0)
    for absent in matches.absent_peers:
        peers_ready[absent.rows] = absent.peers_ready_ns
    own_error = _clock_error(matches, clocks)
    all_ready, resolved, clock_error = peers_ready.copy(), matched.copy(), own_error.copy()
    several = _several_messages(transfers)
    # Peers' peers, and no further: `ringprof.scale.pipeline.NEIGHBOURHOOD` counts on it.
    for mine, other in ((sender, receiver), (receiver, sender)):
        rows = several[mine]
        np.maximum.at(all_ready, mine[rows], peers_ready[other[rows]])
        np.maximum.at(clock_error, mine[rows], own_error[other[rows]])
        # A peer's own peers are unknown, so is what may have held it up.
        np.logical_and.at(resolved, mine[rows], matched[other[rows]])
    return _Moments(start, end, peers_ready, all_ready, resolved, clock_error)


def _clock_error(matches: Matches, clocks: Clocks) -> Int64:
    """How far the clocks of a transfer's own partners may be off its own."""
    error = np.zeros(len(matches.transfers), np.int64)
    if not clocks.several:
        return error
    between, number = clocks.residuals()
    place = np.array([number[clocks.host[t.rank]] for t in matches.transfers], np.int64)
    for mine, other in ((matches.sender, matches.receiver), (matches.receiver, matches.sender)):
        np.maximum.at(error, mine, between[place[mine], place[other]])
    for meeting in matches.meetings:
        where = place[meeting[:, 0]]
        error[meeting] = between[np.ix_(where, where)].max(axis=1)[:, None]
    for absent in matches.absent_peers:
        error[absent.rows] = absent.clock_error_ns
    return error


def _several_messages(transfers: tuple[Transfer, ...]) -> npt.NDArray[np.bool_]:
    """Whether some peer gets or gives more than one message in a kernel."""
    answers: dict[tuple[int, int], bool] = {}
    result = np.zeros(len(transfers), np.bool_)
    for number, transfer in enumerate(transfers):
        # Kernels that carry the same share their messages.
        key = id(transfer.sends), id(transfer.receives)
        if key not in answers:
            to = [message.peer for message in transfer.sends]
            source = [message.peer for message in transfer.receives]
            answers[key] = len(to) > len(set(to)) or len(source) > len(set(source))
        result[number] = answers[key]
    return result


# --- links and rates ----------------------------------------------------------------------------------


def _links(transfers: tuple[Transfer, ...], hosts: HostOfRank) -> list[str]:
    answers: dict[tuple[int, str, int, int, int], str] = {}
    result = []
    for transfer in transfers:
        key = transfer.rank, transfer.kind, id(transfer.sends), id(transfer.receives), id(transfer.group)
        if key not in answers:
            answers[key] = link_of(transfer, hosts)
        result.append(answers[key])
    return result


def _best(matches: Matches, moments: _Moments, links: list[str]) -> dict[LinkClass, Best]:
    """The best rate seen by (kind, link), as bytes and nanoseconds.

    Only a kernel's own peers count here: ready is then never too late, so no rate is better than was possible.
    """
    size = np.array([t.sent_bytes or 0 for t in matches.transfers], np.int64)
    copies = np.array([t.kind == "copy_engine" for t in matches.transfers], np.bool_)
    span = moments.end - moments.peers_ready
    usable = (matches.matched() | copies) & (span > 0) & (size > 0)
    rate = np.where(usable, size / np.maximum(span, 1), 0.0)
    classes: dict[LinkClass, int] = {}
    code = np.array(
        [classes.setdefault((t.kind, link), len(classes)) for t, link in zip(matches.transfers, links, strict=True)],
        np.int64,
    )
    best = {}
    for key, number in classes.items():
        rows = np.flatnonzero(usable & (code == number))
        if len(rows):
            at = rows[np.argmax(rate[rows])]
            best[key] = int(size[at]), int(span[at])
    return best


def _split(transfer: Transfer, link: str, after_ready: int | None, best: Best | None) -> Split:
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
