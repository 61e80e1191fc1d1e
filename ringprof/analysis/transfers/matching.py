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


class AbsentPeers(msgspec.Struct, frozen=True):
    """Calls of one collective on one rank, with the times of the group's other ranks."""

    rows: Int64
    peers_ready_ns: Int64
    """Latest start over the group, per call, on the common clock."""
    last_rank: Int64
    """Rank with the latest start, per call."""
    clock_error_ns: int
    """Largest possible error between the clocks of the group's hosts and this rank's clock."""


KnownCalls = tuple[Int64, Int64, dict[int, int]]
"""Matched calls of one kind in one group, as its ranks need them. Per call: the latest start over the group on the
common clock, and its rank. By rank: the largest possible error between its clock and those of the group's hosts."""


class AbsentRanks(msgspec.Struct, frozen=True):
    """Collectives of ranks that are not loaded, from `ringprof.scale.collective_index`; plain data."""

    calls: dict[tuple[Group, str], KnownCalls | str]
    """(Group, kind) -> its calls, or the reason why they are not matched, one of `_REASONS`."""


def match(transfers: Mapping[int, Sequence[Transfer]], absent: AbsentRanks | None = None) -> Matches:
    """Match the transfers of all ranks; ``transfers`` holds each rank's, in order.

    With ``absent``, only some ranks are loaded, and ``absent`` knows the collectives of the others.
    """
    all_transfers = tuple(transfer for of_rank in transfers.values() for transfer in of_rank)
    reasons = np.zeros(len(all_transfers), np.int8)
    groups, group_of = number_groups(all_transfers)
    sender, receiver = _match_messages(all_transfers, group_of, set(transfers), reasons)
    collectives, absent_peers = _match_collectives(all_transfers, groups, group_of, set(transfers), reasons, absent)
    for number, transfer in enumerate(all_transfers):
        if transfer.kind == "send_recv" and not (transfer.sends or transfer.receives):
            reasons[number] = _CODE_OF_REASON["no_record"]
    return Matches(
        all_transfers,
        reasons,
        np.array(sender, np.int64),
        np.array(receiver, np.int64),
        tuple(collectives),
        tuple(absent_peers),
    )


def number_groups(all_transfers: Sequence[Transfer]) -> tuple[list[Group], list[int]]:
    """Return the distinct groups and each transfer's group number: groups of a thousand ranks are slow to compare."""
    numbers: dict[Group, int] = {}
    number_by_id: dict[int, int] = {}
    for transfer in all_transfers:
        if id(transfer.group) not in number_by_id:
            number_by_id[id(transfer.group)] = numbers.setdefault(transfer.group, len(numbers))
    return list(numbers), [number_by_id[id(transfer.group)] for transfer in all_transfers]


def _mark_unmatched(reasons: Int8, numbers: Iterable[int], reason: str) -> None:
    """Record a reason for transfers; an earlier reason stays."""
    for number in numbers:
        if not reasons[number]:
            reasons[number] = _CODE_OF_REASON[reason]


# --- point to point -------------------------------------------------------------------------------


class _Channel(msgspec.Struct):
    """Messages from one rank to another within a group, as seen at both ends: numbers of transfers, and bytes."""

    sent: list[int] = msgspec.field(default_factory=list)
    sent_bytes: list[int | None] = msgspec.field(default_factory=list)
    received: list[int] = msgspec.field(default_factory=list)
    received_bytes: list[int | None] = msgspec.field(default_factory=list)


def _match_messages(
    all_transfers: Sequence[Transfer], group_of: Sequence[int], ranks: set[int], reasons: Int8
) -> tuple[list[int], list[int]]:
    """Match the sends and receives of each channel in order, where counts and bytes agree; return both ends."""
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
    matched_sends: list[int] = []
    matched_receives: list[int] = []
    for (_, sender, receiver), channel in channels.items():
        if sender not in ranks or receiver not in ranks:
            reason = "rank_missing"
        elif len(channel.sent) != len(channel.received):
            reason = "counts_differ"
        elif channel.sent_bytes != channel.received_bytes:
            reason = "bytes_differ"
        else:
            matched_sends += channel.sent
            matched_receives += channel.received
            continue
        _mark_unmatched(reasons, (*channel.sent, *channel.received), reason)
    return matched_sends, matched_receives


# --- collectives ----------------------------------------------------------------------------------


def _match_collectives(
    all_transfers: Sequence[Transfer],
    groups: Sequence[Group],
    group_of: Sequence[int],
    ranks: set[int],
    reasons: Int8,
    absent: AbsentRanks | None,
) -> tuple[list[Int64], list[AbsentPeers]]:
    """Match the n-th calls of each kind over the ranks of each group; with ``absent``, with those of its ranks."""
    matched: list[Int64] = []
    absent_peers: list[AbsentPeers] = []
    calls: dict[tuple[int, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, transfer in enumerate(all_transfers):
        if transfer.kind in ("send_recv", "copy_engine"):
            continue
        if transfer.source == "none":
            _mark_unmatched(reasons, (number,), "no_record")
        else:
            calls[group_of[number], transfer.kind][transfer.rank].append(number)
    for (group_number, kind), by_rank in calls.items():
        group = groups[group_number]
        calls_or_reason: KnownCalls | str
        if absent is not None:
            calls_or_reason = absent.calls.get((group, kind), "rank_missing")
        else:
            counts = {rank: len(numbers) for rank, numbers in by_rank.items()}
            calls_or_reason = collective_mismatch(group, ranks, counts)
        if not isinstance(calls_or_reason, str):
            ready_ns, last_rank, error_ns = calls_or_reason
            for rank, numbers in by_rank.items():
                absent_peers.append(AbsentPeers(np.array(numbers, np.int64), ready_ns, last_rank, error_ns[rank]))
        elif calls_or_reason:
            _mark_unmatched(reasons, (number for numbers in by_rank.values() for number in numbers), calls_or_reason)
        else:
            matched.append(np.array(list(by_rank.values()), np.int64))
    return matched, absent_peers


def collective_mismatch(group: Group, ranks: Collection[int], counts: Mapping[int, int]) -> str:
    """Return why a group's calls of one kind are not matched, or ""; ``counts`` has the number of calls by rank."""
    members = set(group[1])
    if not members or members - set(counts):
        return "counts_differ" if members and not members - set(ranks) else "rank_missing"
    return "counts_differ" if len(set(counts.values())) > 1 else ""
