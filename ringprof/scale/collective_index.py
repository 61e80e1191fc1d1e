"""Index of collectives over many ranks, filled rank by rank: group-wide times without all ranks' transfers.

The n-th call of a kind is the same collective on every rank of a group (`ringprof.analysis.transfers.matching`). The
index keeps only three times per call and host, so its size grows with the hosts of a group and not with its ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ringprof.analysis.transfers.clocks import Clocks, CollectiveTimes, Traffic, collect_collectives
from ringprof.analysis.transfers.matching import AbsentRanks, KnownCalls, collective_mismatch, number_groups
from ringprof.analysis.transfers.transfers import Group, Transfer
from ringprof.trace.columns import Int64


class _GroupCalls(msgspec.Struct):
    """Calls of one kind in one group."""

    counts: dict[int, int] = msgspec.field(default_factory=dict)
    """Rank -> number of calls."""
    on_host: dict[int, CollectiveTimes] = msgspec.field(default_factory=dict)
    last_on_host: dict[int, Int64] = msgspec.field(default_factory=dict)
    """Host -> for each call, the host's last rank to begin it."""


class CollectiveIndex:
    """Index of the collectives of all ranks; ``host`` maps each rank to the number of its host."""

    def __init__(self, host: Mapping[int, int]) -> None:
        self._host = host
        self._calls: dict[tuple[Group, str], _GroupCalls] = defaultdict(_GroupCalls)

    def add(self, rank: int, transfers: Sequence[Transfer]) -> None:
        """Add the transfers of one rank, in order."""
        groups, group_of = number_groups(transfers)
        calls_by_collective: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
        for number, transfer in zip(group_of, transfers, strict=True):
            if transfer.kind not in ("send_recv", "copy_engine") and transfer.source != "none":
                calls_by_collective[number, transfer.kind].append(transfer)
        for (number, kind), calls in calls_by_collective.items():
            start = np.array([call.start_ns for call in calls], np.int64)
            end = np.array([call.end_ns for call in calls], np.int64)
            self._merge(self._calls[groups[number], kind], rank, start, end)

    def _merge(self, calls: _GroupCalls, rank: int, start: Int64, end: Int64) -> None:
        """Merge one rank's times into those of its host."""
        calls.counts[rank] = len(end)
        host = self._host[rank]
        if host not in calls.on_host:
            calls.on_host[host] = start, end, end
            calls.last_on_host[host] = np.full(len(end), rank, np.int64)
            return
        last_start, first_end, last_end = calls.on_host[host]
        if len(last_end) == len(end):
            calls.last_on_host[host] = np.where(start > last_start, rank, calls.last_on_host[host])
            calls.on_host[host] = np.maximum(last_start, start), np.minimum(first_end, end), np.maximum(last_end, end)

    def traffic(self, traffic: Traffic) -> None:
        """Add the evidence of matched calls about the hosts' clocks to ``traffic``."""
        for (group, kind), calls in self._calls.items():
            if not self._mismatch(group, calls):
                collect_collectives(calls.on_host, kind, traffic)

    def extract(self, ranks: Sequence[int], clocks: Clocks) -> AbsentRanks:
        """Return the calls of all groups that these ranks belong to."""
        wanted = {key: calls for key, calls in self._calls.items() if any(rank in calls.counts for rank in ranks)}
        known = {key: self._known_calls(key[0], calls, ranks, clocks) for key, calls in wanted.items()}
        return AbsentRanks(known)

    def _mismatch(self, group: Group, calls: _GroupCalls) -> str:
        """Return why a group's calls are not matched; empty where they are."""
        return collective_mismatch(group, self._host.keys(), calls.counts)

    def _known_calls(self, group: Group, calls: _GroupCalls, ranks: Sequence[int], clocks: Clocks) -> KnownCalls | str:
        """Return a group's calls as its ranks among ``ranks`` need them, or why they are not matched."""
        reason = self._mismatch(group, calls)
        if reason:
            return reason
        offset = {self._host[rank]: clocks.offset_ns[rank] for rank in calls.counts}
        starts = np.array([last_start + offset[host] for host, (last_start, *_) in calls.on_host.items()])
        latest_host = starts.argmax(axis=0)[None, :]
        peers_ready = np.take_along_axis(starts, latest_host, axis=0)[0]
        last_on_host = np.array([calls.last_on_host[host] for host in calls.on_host])
        last_rank = np.take_along_axis(last_on_host, latest_host, axis=0)[0]
        local_ranks = [rank for rank in ranks if rank in calls.counts]
        errors_ns = dict.fromkeys(local_ranks, 0)
        if clocks.several:
            clock_errors, host_number = clocks.residuals()
            hosts = sorted({host_number[clocks.host[rank]] for rank in calls.counts})
            errors_ns = {rank: int(clock_errors[host_number[clocks.host[rank]], hosts].max()) for rank in local_ranks}
        return peers_ready, last_rank, errors_ns
