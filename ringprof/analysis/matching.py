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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ringprof.analysis.transfers import Group, Transfer
from ringprof.trace.columns import Int8, Int64

REASONS = ("", "rank_missing", "counts_differ", "bytes_differ", "no_record")
"""Why a transfer is not matched; index 0 for those that are."""

_NUMBERS = {reason: number for number, reason in enumerate(REASONS)}


@dataclass(frozen=True)
class Matches:
    """The transfers of all ranks, and which belong together. Int64 arrays hold transfers' numbers."""

    transfers: tuple[Transfer, ...]
    """By rank, each rank's in its own order; a transfer's number is its place in here."""
    reason: Int8
    """For each transfer, an index into `REASONS`."""
    sender: Int64
    receiver: Int64
    """One element a matched message: the kernel that sent it and the one that received it."""
    meetings: tuple[Int64, ...]
    """Matched collectives: a row for each rank of the group, a column for each call."""

    def matched(self) -> npt.NDArray[np.bool_]:
        """Whether each transfer's partners are all known; false for copies, which have none."""
        partnered = np.zeros(len(self.transfers), np.bool_)
        for numbers in (self.sender, self.receiver, *self.meetings):
            partnered[numbers.ravel()] = True
        matched: npt.NDArray[np.bool_] = partnered & (self.reason == 0)
        return matched

    def unmatched(self) -> dict[str, int]:
        """How many transfers are not matched, by reason."""
        return dict(Counter(REASONS[number] for number in self.reason[self.reason > 0].tolist()))


def match(transfers: Mapping[int, Sequence[Transfer]]) -> Matches:
    """Match the transfers of all ranks; ``transfers`` holds each rank's, in order."""
    everything = tuple(transfer for mine in transfers.values() for transfer in mine)
    work = _Work(np.zeros(len(everything), np.int8))
    _match_messages(everything, set(transfers), work)
    _match_collectives(everything, set(transfers), work)
    for number, transfer in enumerate(everything):
        if transfer.kind == "send_recv" and not (transfer.sends or transfer.receives):
            work.reason[number] = _NUMBERS["no_record"]
    return Matches(
        everything,
        work.reason,
        np.array(work.sender, np.int64),
        np.array(work.receiver, np.int64),
        tuple(work.meetings),
    )


@dataclass
class _Work:
    """What has been found so far."""

    reason: Int8
    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    meetings: list[Int64] = field(default_factory=list)

    def refuse(self, numbers: Iterable[int], reason: str) -> None:
        """The first reason stays."""
        for number in numbers:
            if not self.reason[number]:
                self.reason[number] = _NUMBERS[reason]


# --- point to point -------------------------------------------------------------------------------


@dataclass
class _Channel:
    """The messages from one rank to another within a group, as its two ends saw them: transfers and bytes."""

    sent: list[int] = field(default_factory=list)
    sent_bytes: list[int | None] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    received_bytes: list[int | None] = field(default_factory=list)


def _match_messages(everything: Sequence[Transfer], ranks: set[int], work: _Work) -> None:
    channels: dict[tuple[Group, int, int], _Channel] = defaultdict(_Channel)
    for number, transfer in enumerate(everything):
        for message in transfer.sends:
            channel = channels[transfer.group, transfer.rank, message.peer]
            channel.sent.append(number)
            channel.sent_bytes.append(message.size_bytes)
        for message in transfer.receives:
            channel = channels[transfer.group, message.peer, transfer.rank]
            channel.received.append(number)
            channel.received_bytes.append(message.size_bytes)
    for (_, source, destination), channel in channels.items():
        reason = _refusal(channel, source in ranks and destination in ranks)
        if reason:
            work.refuse((*channel.sent, *channel.received), reason)
        else:
            work.sender += channel.sent
            work.receiver += channel.received


def _refusal(channel: _Channel, both_here: bool) -> str:
    if not both_here:
        return "rank_missing"
    if len(channel.sent) != len(channel.received):
        return "counts_differ"
    return "" if channel.sent_bytes == channel.received_bytes else "bytes_differ"


# --- collectives ----------------------------------------------------------------------------------


def _match_collectives(everything: Sequence[Transfer], ranks: set[int], work: _Work) -> None:
    calls: dict[tuple[Group, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, transfer in enumerate(everything):
        if transfer.kind in ("send_recv", "copy_engine"):
            continue
        if transfer.source == "none":
            work.refuse((number,), "no_record")
        else:
            calls[transfer.group, transfer.kind][transfer.rank].append(number)
    for (group, _), by_rank in calls.items():
        members = set(group[1])
        if not members or members - set(by_rank):
            reason = "counts_differ" if members and not members - ranks else "rank_missing"
        else:
            reason = "counts_differ" if len({len(numbers) for numbers in by_rank.values()}) > 1 else ""
        if reason:
            work.refuse((number for numbers in by_rank.values() for number in numbers), reason)
        else:
            work.meetings.append(np.array(list(by_rank.values()), np.int64))
