"""Match each transfer to the kernels of other ranks that took part in it.

NCCL carries the messages between two ranks of one communicator in the order they were posted. So the n-th message that
a rank sent to another within a group is the n-th that the other received from it there. The n-th collective of a kind
is the same one on every rank of its group. Where the counts or the bytes disagree, nothing is matched: an incomplete
trace is reported, not forced into matches.

Transfers are numbered over all ranks, and their data is held in arrays over these numbers. The cost is that of a few
sorts, however many transfers there are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis.transfers.transfers import Group, Transfer
from ringprof.trace.columns import Int8, Int64

_REASONS = ("", "rank_missing", "counts_differ", "bytes_differ", "no_record")
"""Reasons why a transfer is not matched; index 0 stands for matched transfers."""

_CODE_OF_REASON = {reason: number for number, reason in enumerate(_REASONS)}


class Matches(msgspec.Struct, frozen=True):
    """The transfers of all ranks and their matches. Int64 arrays hold the numbers of transfers."""

    transfers: tuple[Transfer, ...]
    """Transfers by rank, each rank's in its own order; a transfer's number is its index here."""
    reason: Int8
    """Index into `_REASONS` for each transfer."""
    sender: Int64
    receiver: Int64
    """Matched messages, one element each: the sending kernel in ``sender``, the receiving one in ``receiver``."""
    collective_matches: tuple[Int64, ...]
    """Matched collectives: one row per rank of the group, one column per call."""
    absent_peers: tuple[AbsentPeers, ...] = ()
    """Collectives matched with ranks that are not loaded."""

    def matched(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the transfers whose partners are all known; false for copies, which have none."""
        partnered = np.zeros(len(self.transfers), np.bool_)
        for numbers in (
            self.sender,
            self.receiver,
            *self.collective_matches,
            *(peers.rows for peers in self.absent_peers),
        ):
            partnered[numbers.ravel()] = True
        matched: npt.NDArray[np.bool_] = partnered & (self.reason == 0)
        return matched

    def unmatched(self, ranks: Collection[int] | None = None) -> dict[str, int]:
        """Count the unmatched transfers by reason, of all ranks or of ``ranks``."""
        rows = np.flatnonzero(self.reason)
        if ranks is not None:
            rows = rows[[self.transfers[row].rank in ranks for row in rows.tolist()]] if len(rows) else rows
        return dict(Counter(_REASONS[number] for number in self.reason[rows].tolist()))


class AbsentRanks(Protocol):
    """Collectives of ranks that are not loaded, see `ringprof.scale.collective_index`."""

    def mismatch(self, group: Group, kind: str) -> str:
        """Return why the group's calls of this kind are not matched, one of `_REASONS`; empty where they are."""

    def calls_of(self, group: Group, kind: str, rank: int, rows: Int64) -> AbsentPeers:
        """Return what the other ranks did in the calls of ``rank``; ``rows`` are the numbers of these calls."""


class AbsentPeers(msgspec.Struct, frozen=True):
    """Calls of one collective on one rank, with the times of the group's other ranks."""

    rows: Int64
    peers_ready_ns: Int64
    """Latest start over the group, per call, on the common clock."""
    last_rank: Int64
    """Rank with the latest start, per call."""
    clock_error_ns: int
    """Largest possible error between the clocks of the group's hosts and this rank's clock."""


def match(transfers: Mapping[int, Sequence[Transfer]], absent: AbsentRanks | None = None) -> Matches:
    """Match the transfers of all ranks; ``transfers`` holds each rank's, in order.

    With ``absent``, only some ranks are loaded, and ``absent`` knows the collectives of the others.
    """
    all_transfers = tuple(transfer for of_rank in transfers.values() for transfer in of_rank)
    builder = _MatchBuilder(np.zeros(len(all_transfers), np.int8))
    groups, group_of = number_groups(all_transfers)
    _match_messages(all_transfers, group_of, set(transfers), builder)
    _match_collectives(all_transfers, groups, group_of, set(transfers), builder, absent)
    for number, transfer in enumerate(all_transfers):
        if transfer.kind == "send_recv" and not (transfer.sends or transfer.receives):
            builder.reason[number] = _CODE_OF_REASON["no_record"]
    return Matches(
        all_transfers,
        builder.reason,
        np.array(builder.sender, np.int64),
        np.array(builder.receiver, np.int64),
        tuple(builder.collective_matches),
        tuple(builder.absent_peers),
    )


def number_groups(all_transfers: Sequence[Transfer]) -> tuple[list[Group], list[int]]:
    """Return the distinct groups and each transfer's group number: groups of a thousand ranks are slow to compare."""
    numbers: dict[Group, int] = {}
    number_by_id: dict[int, int] = {}
    for transfer in all_transfers:
        if id(transfer.group) not in number_by_id:
            number_by_id[id(transfer.group)] = numbers.setdefault(transfer.group, len(numbers))
    return list(numbers), [number_by_id[id(transfer.group)] for transfer in all_transfers]


class _MatchBuilder(msgspec.Struct):
    """Matches found so far."""

    reason: Int8
    sender: list[int] = msgspec.field(default_factory=list)
    receiver: list[int] = msgspec.field(default_factory=list)
    collective_matches: list[Int64] = msgspec.field(default_factory=list)
    absent_peers: list[AbsentPeers] = msgspec.field(default_factory=list)

    def mark_unmatched(self, numbers: Iterable[int], reason: str) -> None:
        """Record a reason for transfers; an earlier reason stays."""
        for number in numbers:
            if not self.reason[number]:
                self.reason[number] = _CODE_OF_REASON[reason]


# --- point to point -------------------------------------------------------------------------------


class _Channel(msgspec.Struct):
    """Messages from one rank to another within a group, as seen at both ends: numbers of transfers, and bytes."""

    sent: list[int] = msgspec.field(default_factory=list)
    sent_bytes: list[int | None] = msgspec.field(default_factory=list)
    received: list[int] = msgspec.field(default_factory=list)
    received_bytes: list[int | None] = msgspec.field(default_factory=list)


def _match_messages(
    all_transfers: Sequence[Transfer], group_of: Sequence[int], ranks: set[int], builder: _MatchBuilder
) -> None:
    """Match the sends and receives of each channel in order, where counts and bytes agree."""
    channels: dict[tuple[int, int, int], _Channel] = defaultdict(_Channel)
    for number, (transfer, group) in enumerate(zip(all_transfers, group_of, strict=True)):
        for message in transfer.sends:
            channel = channels[group, transfer.rank, message.peer]
            channel.sent.append(number)
            channel.sent_bytes.append(message.size_bytes)
        for message in transfer.receives:
            channel = channels[group, message.peer, transfer.rank]
            channel.received.append(number)
            channel.received_bytes.append(message.size_bytes)
    for (_, sender, receiver), channel in channels.items():
        reason = _channel_mismatch(channel, both_loaded=sender in ranks and receiver in ranks)
        if reason:
            builder.mark_unmatched((*channel.sent, *channel.received), reason)
        else:
            builder.sender += channel.sent
            builder.receiver += channel.received


def _channel_mismatch(channel: _Channel, *, both_loaded: bool) -> str:
    """Return why the messages of a channel are not matched; empty where they are."""
    if not both_loaded:
        return "rank_missing"
    if len(channel.sent) != len(channel.received):
        return "counts_differ"
    return "" if channel.sent_bytes == channel.received_bytes else "bytes_differ"


# --- collectives ----------------------------------------------------------------------------------


def _match_collectives(
    all_transfers: Sequence[Transfer],
    groups: Sequence[Group],
    group_of: Sequence[int],
    ranks: set[int],
    builder: _MatchBuilder,
    absent: AbsentRanks | None,
) -> None:
    """Match the n-th calls of each kind over the ranks of each group."""
    calls: dict[tuple[int, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, transfer in enumerate(all_transfers):
        if transfer.kind in ("send_recv", "copy_engine"):
            continue
        if transfer.source == "none":
            builder.mark_unmatched((number,), "no_record")
        else:
            calls[group_of[number], transfer.kind][transfer.rank].append(number)
    for (group_number, kind), by_rank in calls.items():
        group = groups[group_number]
        if absent is not None:
            reason = absent.mismatch(group, kind)
        else:
            reason = collective_mismatch(group, ranks, {rank: len(numbers) for rank, numbers in by_rank.items()})
        if reason:
            builder.mark_unmatched((number for numbers in by_rank.values() for number in numbers), reason)
        elif absent is not None:
            for rank, numbers in by_rank.items():
                builder.absent_peers.append(absent.calls_of(group, kind, rank, np.array(numbers, np.int64)))
        else:
            builder.collective_matches.append(np.array(list(by_rank.values()), np.int64))


def collective_mismatch(group: Group, ranks: Collection[int], counts: Mapping[int, int]) -> str:
    """Return why a group's calls of one kind are not matched, or ""; ``counts`` has the number of calls by rank."""
    members = set(group[1])
    if not members or members - set(counts):
        return "counts_differ" if members and not members - set(ranks) else "rank_missing"
    return "counts_differ" if len(set(counts.values())) > 1 else ""
