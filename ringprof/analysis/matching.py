"""Which kernels of other ranks took part in the same transfer.

NCCL carries the messages between two ranks of one communicator in the order they were posted. So the n-th message
that a rank sent to another within a group is the n-th that the other received from it there, and the n-th
collective of a kind is the same one on every rank of its group. Where the counts or the bytes disagree, nothing
is matched: a cut trace is reported, not forced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ringprof.analysis.transfers import Group, Transfer

Key = tuple[int, int]
"""(rank, position in that rank's list of transfers)."""


@dataclass(frozen=True)
class Matches:
    """For every transfer that could be matched completely: its partners."""

    peers: dict[Key, frozenset[Key]]
    """The kernels at the other end of its messages, or the whole group of a collective without itself."""
    unmatched: dict[Key, str]
    """Why a transfer was not matched: ``rank_missing``, ``counts_differ``, ``bytes_differ`` or ``no_record``."""


def match(transfers: dict[int, list[Transfer]]) -> Matches:
    """Match the transfers of all ranks; ``transfers`` holds each rank's, in order."""
    peers: dict[Key, set[Key]] = defaultdict(set)
    unmatched: dict[Key, str] = {}
    for ends in _channels(transfers).values():
        _match_channel(ends, transfers, peers, unmatched)
    _match_collectives(transfers, peers, unmatched)
    for rank, mine in transfers.items():
        for position, transfer in enumerate(mine):
            if transfer.kind == "send_recv" and not (transfer.sends or transfer.receives):
                unmatched[rank, position] = "no_record"
    complete = {key: frozenset(found) for key, found in peers.items() if key not in unmatched}
    return Matches(complete, unmatched)


# --- point to point -------------------------------------------------------------------------------

Channel = tuple[Group, int, int]
"""(group, sending rank, receiving rank)."""


@dataclass
class _Ends:
    """The messages of one channel as its two ends saw them: (transfer, bytes)."""

    source: int
    destination: int
    sent: list[tuple[Key, int | None]]
    received: list[tuple[Key, int | None]]


def _channels(transfers: dict[int, list[Transfer]]) -> dict[Channel, _Ends]:
    channels: dict[Channel, _Ends] = {}

    def ends(group: Group, source: int, destination: int) -> _Ends:
        return channels.setdefault((group, source, destination), _Ends(source, destination, [], []))

    for rank, mine in transfers.items():
        for position, transfer in enumerate(mine):
            for message in transfer.sends:
                ends(transfer.group, rank, message.peer).sent.append(((rank, position), message.size_bytes))
            for message in transfer.receives:
                ends(transfer.group, message.peer, rank).received.append(((rank, position), message.size_bytes))
    return channels


def _match_channel(
    ends: _Ends,
    transfers: dict[int, list[Transfer]],
    peers: dict[Key, set[Key]],
    unmatched: dict[Key, str],
) -> None:
    everyone = [key for key, _ in (*ends.sent, *ends.received)]
    if ends.source not in transfers or ends.destination not in transfers:
        _refuse(everyone, "rank_missing", unmatched)
    elif len(ends.sent) != len(ends.received):
        _refuse(everyone, "counts_differ", unmatched)
    elif any(out != into for (_, out), (_, into) in zip(ends.sent, ends.received, strict=True)):
        _refuse(everyone, "bytes_differ", unmatched)
    else:
        for (sender, _), (receiver, _) in zip(ends.sent, ends.received, strict=True):
            peers[sender].add(receiver)
            peers[receiver].add(sender)


def _refuse(keys: Iterable[Key], reason: str, unmatched: dict[Key, str]) -> None:
    for key in keys:
        unmatched.setdefault(key, reason)


# --- collectives ----------------------------------------------------------------------------------


def _match_collectives(
    transfers: dict[int, list[Transfer]], peers: dict[Key, set[Key]], unmatched: dict[Key, str]
) -> None:
    by_group: dict[tuple[Group, str], dict[int, list[Key]]] = defaultdict(lambda: defaultdict(list))
    for rank, mine in transfers.items():
        for position, transfer in enumerate(mine):
            if transfer.kind == "send_recv":
                continue
            if transfer.source == "none":
                unmatched[rank, position] = "no_record"
            else:
                by_group[transfer.group, transfer.kind][rank].append((rank, position))
    for (group, _), calls in by_group.items():
        everyone = [key for keys in calls.values() for key in keys]
        if not group[1] or set(group[1]) - set(calls):
            present = group[1] and not set(group[1]) - set(transfers)
            _refuse(everyone, "counts_differ" if present else "rank_missing", unmatched)
        elif len({len(keys) for keys in calls.values()}) > 1:
            _refuse(everyone, "counts_differ", unmatched)
        else:
            _join(list(calls.values()), peers)


def _join(calls: Sequence[list[Key]], peers: dict[Key, set[Key]]) -> None:
    for together in zip(*calls, strict=True):
        for key in together:
            peers[key].update(other for other in together if other != key)
