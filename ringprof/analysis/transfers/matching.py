"""Which kernels of other ranks took part in the same transfer.

NCCL carries the messages between two ranks of one communicator in the order they were posted. So the n-th message
that a rank sent to another within a group is the n-th that the other received from it there, and the n-th
collective of a kind is the same one on every rank of its group. Where the counts or the bytes disagree, nothing
is matched: a cut trace is reported, not forced.

Transfers are numbered over all ranks, and what is known of them is held in arrays over these numbers, so that the
cost is that of a few sorts however many there are.
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
"""Why a transfer is not matched; index 0 for those that are."""

_NUMBERS = {reason: number for number, reason in enumerate(_REASONS)}


class Matches(msgspec.Struct, frozen=True):
    """The transfers of all ranks, and which belong together. Int64 arrays hold transfers' numbers."""

    transfers: tuple[Transfer, ...]
    """By rank, each rank's in its own order; a transfer's number is its place in here."""
    reason: Int8
    """For each transfer, an index into `_REASONS`."""
    sender: Int64
    receiver: Int64
    """One element a matched message: the kernel that sent it and the one that received it."""
    meetings: tuple[Int64, ...]
    """Matched collectives: a row for each rank of the group, a column for each call."""
    absent_peers: tuple[AbsentPeers, ...] = ()
    """Collectives whose other ranks are not among these, but are known to be matched."""

    def matched(self) -> npt.NDArray[np.bool_]:
        """Whether each transfer's partners are all known; false for copies, which have none."""
        partnered = np.zeros(len(self.transfers), np.bool_)
        for numbers in (self.sender, self.receiver, *self.meetings, *(one.rows for one in self.absent_peers)):
            partnered[numbers.ravel()] = True
        matched: npt.NDArray[np.bool_] = partnered & (self.reason == 0)
        return matched

    def unmatched(self, ranks: Collection[int] | None = None) -> dict[str, int]:
        """How many transfers are not matched, by reason; of all ranks or of these."""
        rows = np.flatnonzero(self.reason)
        if ranks is not None:
            rows = rows[[self.transfers[row].rank in ranks for row in rows.tolist()]] if len(rows) else rows
        return dict(Counter(_REASONS[number] for number in self.reason[rows].tolist()))


class AbsentRanks(Protocol):
    """Summary of collectives for ranks that are not loaded, see `ringprof.scale.collective_index`."""

    def refusal(self, group: Group, kind: str) -> str:
        """Why the group's calls of this kind are not matched: one of `_REASONS`."""

    def calls_of(self, group: Group, kind: str, rank: int, rows: Int64) -> AbsentPeers:
        """What is known of the calls of ``rank``, whose numbers are ``rows``."""


class AbsentPeers(msgspec.Struct, frozen=True):
    """The calls of one collective on one rank, and what the group's other ranks did."""

    rows: Int64
    peers_ready_ns: Int64
    """The latest start over the group, on the common clock."""
    last_rank: Int64
    """The rank of that start."""
    clock_error_ns: int
    """How far the clocks of the group's hosts may be off this rank's."""


def match(transfers: Mapping[int, Sequence[Transfer]], absent: AbsentRanks | None = None) -> Matches:
    """Match the transfers of all ranks; ``transfers`` holds each rank's, in order.

    With ``absent`` the ranks are only some, and it tells what the others did in collectives.
    """
    everything = tuple(transfer for mine in transfers.values() for transfer in mine)
    work = _Work(np.zeros(len(everything), np.int8))
    groups, group_of = number_groups(everything)
    _match_messages(everything, group_of, set(transfers), work)
    _match_collectives(everything, groups, group_of, set(transfers), work, absent)
    for number, transfer in enumerate(everything):
        if transfer.kind == "send_recv" and not (transfer.sends or transfer.receives):
            work.reason[number] = _NUMBERS["no_record"]
    return Matches(
        everything,
        work.reason,
        np.array(work.sender, np.int64),
        np.array(work.receiver, np.int64),
        tuple(work.meetings),
        tuple(work.absent_peers),
    )


def number_groups(everything: Sequence[Transfer]) -> tuple[list[Group], list[int]]:
    """The groups, and the number of each transfer's; a group of a thousand ranks takes long to compare."""
    numbers: dict[Group, int] = {}
    known: dict[int, int] = {}
    for transfer in everything:
        if id(transfer.group) not in known:
            known[id(transfer.group)] = numbers.setdefault(transfer.group, len(numbers))
    return list(numbers), [known[id(transfer.group)] for transfer in everything]


class _Work(msgspec.Struct):
    """What has been found so far."""

    reason: Int8
    sender: list[int] = msgspec.field(default_factory=list)
    receiver: list[int] = msgspec.field(default_factory=list)
    meetings: list[Int64] = msgspec.field(default_factory=list)
    absent_peers: list[AbsentPeers] = msgspec.field(default_factory=list)

    def refuse(self, numbers: Iterable[int], reason: str) -> None:
        """The first reason stays."""
        for number in numbers:
            if not self.reason[number]:
                self.reason[number] = _NUMBERS[reason]


# --- point to point -------------------------------------------------------------------------------


class _Channel(msgspec.Struct):
    """The messages from one rank to another within a group, as its two ends saw them: transfers and bytes."""

    sent: list[int] = msgspec.field(default_factory=list)
    sent_bytes: list[int | None] = msgspec.field(default_factory=list)
    received: list[int] = msgspec.field(default_factory=list)
    received_bytes: list[int | None] = msgspec.field(default_factory=list)


def _match_messages(everything: Sequence[Transfer], group_of: Sequence[int], ranks: set[int], work: _Work) -> None:
    channels: dict[tuple[int, int, int], _Channel] = defaultdict(_Channel)
    for number, (transfer, group) in enumerate(zip(everything, group_of, strict=True)):
        for message in transfer.sends:
            channel = channels[group, transfer.rank, message.peer]
            channel.sent.append(number)
            channel.sent_bytes.append(message.size_bytes)
        for message in transfer.receives:
            channel = channels[group, message.peer, transfer.rank]
            channel.received.append(number)
            channel.received_bytes.append(message.size_bytes)
    for (_, source, destination), channel in channels.items():
        reason = _refusal(channel, both_here=source in ranks and destination in ranks)
        if reason:
            work.refuse((*channel.sent, *channel.received), reason)
        else:
            work.sender += channel.sent
            work.receiver += channel.received


def _refusal(channel: _Channel, *, both_here: bool) -> str:
    if not both_here:
        return "rank_missing"
    if len(channel.sent) != len(channel.received):
        return "counts_differ"
    return "" if channel.sent_bytes == channel.received_bytes else "bytes_differ"


# --- collectives ----------------------------------------------------------------------------------


def _match_collectives(
    everything: Sequence[Transfer],
    groups: Sequence[Group],
    group_of: Sequence[int],
    ranks: set[int],
    work: _Work,
    absent: AbsentRanks | None,
) -> None:
    calls: dict[tuple[int, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, transfer in enumerate(everything):
        if transfer.kind in ("send_recv", "copy_engine"):
            continue
        if transfer.source == "none":
            work.refuse((number,), "no_record")
        else:
            calls[group_of[number], transfer.kind][transfer.rank].append(number)
    for (group_number, kind), by_rank in calls.items():
        group = groups[group_number]
        if absent is not None:
            reason = absent.refusal(group, kind)
        else:
            reason = refusal_of_collective(group, ranks, {rank: len(numbers) for rank, numbers in by_rank.items()})
        if reason:
            work.refuse((number for numbers in by_rank.values() for number in numbers), reason)
        elif absent is not None:
            for rank, numbers in by_rank.items():
                work.absent_peers.append(absent.calls_of(group, kind, rank, np.array(numbers, np.int64)))
        else:
            work.meetings.append(np.array(list(by_rank.values()), np.int64))


def refusal_of_collective(group: Group, ranks: Collection[int], counts: Mapping[int, int]) -> str:
    """Why a group's calls of one kind are not matched, empty where they are; ``counts`` are the calls by rank."""
    members = set(group[1])
    if not members or members - set(counts):
        return "counts_differ" if members and not members - set(ranks) else "rank_missing"
    return "counts_differ" if len(set(counts.values())) > 1 else ""
