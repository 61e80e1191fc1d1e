"""Collectives of many ranks, taken in one rank after another: what a group's ranks did, without all their transfers.

The n-th call of a kind is the same collective on every rank of a group (`ringprof.analysis.transfers.matching`). Of
each call only three moments a host are kept, so that what is held grows with the hosts of a group and not with its
ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ringprof.analysis.transfers.clocks import Clocks, CollectiveMatches, Traffic, collect_matches
from ringprof.analysis.transfers.matching import AbsentPeers, number_groups, refusal_of_collective
from ringprof.analysis.transfers.transfers import Group, Transfer
from ringprof.trace.columns import Int64


class _Calls(msgspec.Struct):
    """One group's calls of one kind."""

    counts: dict[int, int] = msgspec.field(default_factory=dict)
    """Rank -> how many."""
    on_host: dict[int, CollectiveMatches] = msgspec.field(default_factory=dict)
    last_on_host: dict[int, Int64] = msgspec.field(default_factory=dict)
    """Host -> for each call the rank of the host that began it last."""


class KnownCalls(msgspec.Struct, frozen=True):
    """Of one group's matched calls of one kind what a rank of it must know; plain data."""

    peers_ready_ns: Int64
    """The latest start over the group, on the common clock."""
    last_rank: Int64
    """The rank of that start."""
    clock_error_ns: dict[int, int]
    """Rank -> how far the clocks of the group's hosts may be off its own."""


class CollectiveExtract(msgspec.Struct, frozen=True):
    """What some ranks must know of the others' collectives, as plain data.

    A `ringprof.analysis.transfers.matching.AbsentRanks`."""

    calls: dict[tuple[Group, str], KnownCalls | str]
    """What is known, or why it is not matched."""

    def refusal(self, group: Group, kind: str) -> str:
        found = self.calls.get((group, kind), "rank_missing")
        return found if isinstance(found, str) else ""

    def calls_of(self, group: Group, kind: str, rank: int, rows: Int64) -> AbsentPeers:
        found = self.calls[group, kind]
        assert isinstance(found, KnownCalls)
        return AbsentPeers(rows, found.peers_ready_ns, found.last_rank, found.clock_error_ns[rank])


class CollectiveIndex:
    """What all ranks did in collectives; ``host`` is the number of every rank's host."""

    def __init__(self, host: Mapping[int, int]) -> None:
        self._host = host
        self._calls: dict[tuple[Group, str], _Calls] = defaultdict(_Calls)

    def add(self, rank: int, transfers: Sequence[Transfer]) -> None:
        """Take in the transfers of one rank, in order."""
        groups, group_of = number_groups(transfers)
        mine: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
        for number, transfer in zip(group_of, transfers, strict=True):
            if transfer.kind not in ("send_recv", "copy_engine") and transfer.source != "none":
                mine[number, transfer.kind].append(transfer)
        for (number, kind), calls in mine.items():
            start = np.array([call.start_ns for call in calls], np.int64)
            end = np.array([call.end_ns for call in calls], np.int64)
            self._take(self._calls[groups[number], kind], rank, CollectiveMatches(start, end, end))

    def _take(self, known: _Calls, rank: int, moments: CollectiveMatches) -> None:
        known.counts[rank] = len(moments.last_end)
        host = self._host[rank]
        others = known.on_host.get(host)
        if others is None:
            known.on_host[host] = moments
            known.last_on_host[host] = np.full(len(moments.last_end), rank, np.int64)
        elif len(others.last_end) == len(moments.last_end):
            later = moments.last_start > others.last_start
            known.last_on_host[host] = np.where(later, rank, known.last_on_host[host])
            known.on_host[host] = CollectiveMatches(
                np.maximum(others.last_start, moments.last_start),
                np.minimum(others.first_end, moments.first_end),
                np.maximum(others.last_end, moments.last_end),
            )

    def traffic(self, found: Traffic) -> None:
        """Add what matched calls say of the hosts' clocks."""
        for (group, kind), calls in self._calls.items():
            if not self._refusal(group, calls):
                collect_matches(calls.on_host, kind, found)

    def extract(self, ranks: Sequence[int], clocks: Clocks) -> CollectiveExtract:
        """What these ranks must know of their own groups."""
        wanted = {key: calls for key, calls in self._calls.items() if any(rank in calls.counts for rank in ranks)}
        return CollectiveExtract({key: self._known(key[0], calls, ranks, clocks) for key, calls in wanted.items()})

    def _refusal(self, group: Group, calls: _Calls) -> str:
        return refusal_of_collective(group, self._host.keys(), calls.counts)

    def _known(self, group: Group, calls: _Calls, ranks: Sequence[int], clocks: Clocks) -> KnownCalls | str:
        reason = self._refusal(group, calls)
        if reason:
            return reason
        offset = {self._host[rank]: clocks.offset_ns[rank] for rank in calls.counts}
        starts = np.array([moments.last_start + offset[host] for host, moments in calls.on_host.items()])
        latest = starts.argmax(axis=0)[None, :]
        ready = np.take_along_axis(starts, latest, axis=0)[0]
        last = np.take_along_axis(np.array([calls.last_on_host[host] for host in calls.on_host]), latest, axis=0)[0]
        here = [rank for rank in ranks if rank in calls.counts]
        if not clocks.several:
            return KnownCalls(ready, last, dict.fromkeys(here, 0))
        between, number = clocks.residuals()
        hosts = sorted({number[clocks.host[rank]] for rank in calls.counts})
        return KnownCalls(ready, last, {rank: int(between[number[clocks.host[rank]], hosts].max()) for rank in here})
