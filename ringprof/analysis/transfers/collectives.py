"""Communication of one rank by kind, process group and size, with the bytes that nccl-tests count as bus traffic.

nccl-tests (doc/PERFORMANCE.md) divide an operation's size by its time and multiply by a factor, so that the result
compares with the rate of the links whatever the number of ranks n: 2(n-1)/n for all-reduce, (n-1)/n for all-gather,
reduce-scatter and all-to-all, 1 for broadcast and send/recv. Sizes are theirs, too: of an all-gather the whole output.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ringprof.analysis.kinds.classify import Calls, Classified
from ringprof.analysis.kinds.groups import name_of_group
from ringprof.analysis.transfers.hops import Split
from ringprof.analysis.transfers.transfers import size_bytes_of
from ringprof.trace.columns import CommRecord


class CollectiveKey(NamedTuple):
    """Kind, group, size and link of operations that are summed up together."""

    kind: str
    group: str
    """Description or name of the process group; empty where it is not recorded."""
    ranks: int | None
    """Number of ranks of the group."""
    size_bytes: int | None
    """Size of one operation as nccl-tests count it; None where it is not known."""
    link: str
    """Slowest link used: ``same_host``, ``other_host`` or ``unknown``."""


class CollectiveTotals(NamedTuple):
    """Operations of one kind, group, size and link; of one rank, or summed over ranks."""

    key: CollectiveKey
    calls: int
    """Number of kernels or copies."""
    time_ns: int
    """Sum of their durations, waiting included."""
    wait_ns: int | None
    """Part of the time until the last rank has begun; None where one's is not known."""
    bus_bytes: float | None
    """Bytes that count as bus traffic; None where the size or the factor is not known."""

    @property
    def wire_ns(self) -> int | None:
        """Time without waiting; None where that is not known."""
        return None if self.wait_ns is None else self.time_ns - self.wait_ns

    @property
    def busbw_gbps(self) -> float | None:
        """Bus bandwidth in GB/s over the whole time, as a rank sees it; None where it is not known."""
        return self.bus_bytes / self.time_ns if self.bus_bytes is not None and self.time_ns else None

    @property
    def wire_busbw_gbps(self) -> float | None:
        """Bus bandwidth in GB/s without waiting, which compares with nccl-tests; None where it is not known."""
        return self.bus_bytes / self.wire_ns if self.bus_bytes is not None and self.wire_ns else None

    def plus(self, other: CollectiveTotals) -> CollectiveTotals:
        """Return the sum with further operations of the same key."""
        waits, traffic = (self.wait_ns, other.wait_ns), (self.bus_bytes, other.bus_bytes)
        return CollectiveTotals(
            self.key,
            self.calls + other.calls,
            self.time_ns + other.time_ns,
            None if None in waits else sum(wait for wait in waits if wait is not None),
            None if None in traffic else sum(count for count in traffic if count is not None),
        )


def sum_collectives(totals: Iterable[CollectiveTotals]) -> tuple[CollectiveTotals, ...]:
    """Add up totals of equal keys, longest time first."""
    sums: dict[CollectiveKey, CollectiveTotals] = {}
    for row in totals:
        sums[row.key] = sums[row.key].plus(row) if row.key in sums else row
    return tuple(sorted(sums.values(), key=lambda row: -row.time_ns))


def collectives_of(classified: Classified, splits: Iterable[Split]) -> tuple[CollectiveTotals, ...]:
    """Sum up one rank's communication by kind, group, size and link."""
    return sum_collectives(_totals_of(classified.calls.get(split.transfer.activity, ()), split) for split in splits)


def _totals_of(calls: Calls, split: Split) -> CollectiveTotals:
    transfer = split.transfer
    size: int | None = transfer.sent_bytes
    bus: float | None
    ranks = next((count for call in calls if (count := call.group_size or len(call.group_ranks or ()))), None)
    if transfer.kind in ("send_recv", "copy_engine"):
        bus = size
    else:
        sizes = [_size_bytes(call, transfer.kind, ranks) for call in calls]
        size = None if not sizes or None in sizes else sum(part for part in sizes if part is not None)
        factor = _factor(transfer.kind, ranks)
        # Of an all-to-all of unequal parts, what a rank keeps is not traffic.
        exact = transfer.kind == "all_to_all" and transfer.sent_bytes is not None
        bus = transfer.sent_bytes if exact else None if size is None or factor is None else size * factor
    key = CollectiveKey(transfer.kind, name_of_group(calls), ranks, size, split.link)
    return CollectiveTotals(key, 1, transfer.duration_ns, split.wait_ns if split.wire_ns is not None else None, bus)


def _size_bytes(call: CommRecord, kind: str, ranks: int | None) -> int | None:
    """Return the size of a collective call as nccl-tests count it."""
    if kind == "all_to_all" and call.name == "recv":
        return 0
    if kind != "all_gather":
        return size_bytes_of(call, call.in_elements)
    own = size_bytes_of(call, call.in_elements)
    return None if own is None or not ranks else own * ranks


def _factor(kind: str, ranks: int | None) -> float | None:
    """Return bus traffic over size; None for kinds without a factor."""
    if kind == "broadcast":
        return 1.0
    if not ranks or kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        return None
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
