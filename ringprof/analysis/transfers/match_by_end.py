"""Match collectives without a record of their group by the time at which they end.

Older PyTorch, Nsight Systems and RCCL record a kernel's collective but not its group. A communicator's kernels run on
one stream of each of its ranks, in one order. None ends before all ranks have begun it, so all end within microseconds.
Streams of different ranks whose kernels end together, one by one, belong to the same communicator; their n-th kernels
are the same collective.

Over PCIe the ends lie further apart, because one rank still passes on its last chunk. Such ends match only where two
communicators cannot be confused: in a world of at most three ranks, each with one such stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import msgspec
import numpy as np

from ringprof.analysis.kinds.kinds import POINT_TO_POINT
from ringprof.analysis.transfers.transfers import Group, Transfer
from ringprof.trace.columns import Int64, Notice

TOLERANCE_NS = 50_000
"""Largest difference between the ends of one collective. Measured: 7 us on eight V100, 18 us on two B200 of a busy
host."""
MAX_SHARE_APART = 1 / 8
"""Largest difference in a small world, as a share of the shorter kernel, which waits least. Measured: 73 to 388 us, and
up to 10.3 %, on two RTX 4090 over PCIe."""
SMALL_WORLD = 3
"""Largest world in which any two communicators of at least two ranks share a rank."""
MIN_CALLS_ACROSS_CLOCKS = 3
"""Number of kernels that must agree where ranks have separate clocks: one kernel agrees with any clock offset."""
ENDS_SOURCE = "ends"
"""Value of `Transfer.source` for transfers matched by their ends."""


class StreamCalls(msgspec.Struct, frozen=True):
    """Collectives without a record on one stream of one rank, in order; plain data."""

    rank: int
    kinds: tuple[str, ...]
    start_ns: Int64
    end_ns: Int64
    indices: tuple[int, ...]
    """Indices into the rank's transfers."""


def is_unrecorded(transfer: Transfer) -> bool:
    """Return whether a transfer is a collective without a record."""
    return transfer.source == "none" and transfer.kind not in POINT_TO_POINT


def unrecorded_calls(rank: int, transfers: Sequence[Transfer]) -> list[StreamCalls]:
    """Return one rank's collectives without a record, by stream."""
    by_stream: dict[int, list[int]] = {}
    for index, transfer in enumerate(transfers):
        if is_unrecorded(transfer):
            by_stream.setdefault(transfer.stream, []).append(index)
    return [
        StreamCalls(
            rank,
            tuple(transfers[index].kind for index in indices),
            np.array([transfers[index].start_ns for index in indices], np.int64),
            np.array([transfers[index].end_ns for index in indices], np.int64),
            tuple(indices),
        )
        for indices in by_stream.values()
    ]


def find_communicators(
    calls: Iterable[StreamCalls], clock: Mapping[int, object]
) -> tuple[dict[int, dict[int, Group]], list[Notice]]:
    """Find the ranks' streams that carry the same collectives; ``clock`` names the clock of each rank of the world.

    Return the group of each transfer, by rank and index into its transfers, and a notice that states the evidence.
    """
    groups: list[list[StreamCalls]] = []
    for stream in calls:
        for members in groups:
            ranks = {member.rank for member in members}
            one_clock = clock[stream.rank] == clock[members[0].rank]
            if stream.rank not in ranks and _ends_match(members[0], stream, one_clock=one_clock):
                members.append(stream)
                break
        else:
            groups.append([stream])
    if len(clock) <= SMALL_WORLD and len(set(clock.values())) == 1:
        groups = _join_remaining(groups, set(clock))
    group_of: dict[int, dict[int, Group]] = {}
    spread = 0
    for group_number, members in enumerate(groups):
        if len(members) < 2:
            continue
        group = f"~{group_number}", tuple(sorted(member.rank for member in members))
        for member in members:
            group_of.setdefault(member.rank, {}).update(dict.fromkeys(member.indices, group))
            if clock[member.rank] == clock[members[0].rank]:
                spread = max(spread, int(np.abs(member.end_ns - members[0].end_ns).max()))
    count = sum(len(indices) for indices in group_of.values())
    message = (
        "communication kernels have no record of their group: matched as the n-th of a stream on every rank, which "
        f"all end within {spread / 1e3:.1f} us of one another"
    )
    return group_of, [Notice("matched_by_ends", message, count=count)] if count else []


def _join_remaining(groups: Sequence[list[StreamCalls]], world: set[int]) -> list[list[StreamCalls]]:
    """Join the streams that match no other, where every rank has one with these collectives and all end close by."""
    unmatched_streams: dict[tuple[str, ...], list[StreamCalls]] = {}
    for members in groups:
        if len(members) == 1:
            unmatched_streams.setdefault(members[0].kinds, []).append(members[0])
    joined = [
        streams
        for streams in unmatched_streams.values()
        if sorted(stream.rank for stream in streams) == sorted(world)
        and all(_ends_nearly_match(first, second) for first, second in combinations(streams, 2))
    ]
    joined_ids = {id(stream) for streams in joined for stream in streams}
    return [*(members for members in groups if id(members[0]) not in joined_ids), *joined]


def _ends_nearly_match(first: StreamCalls, second: StreamCalls) -> bool:
    """Return whether all kernels end within a share of their time, and none before the other stream's has begun."""
    shorter = np.minimum(first.end_ns - first.start_ns, second.end_ns - second.start_ns)
    near = np.abs(first.end_ns - second.end_ns) <= np.maximum(TOLERANCE_NS, MAX_SHARE_APART * shorter)
    late = np.maximum(first.start_ns, second.start_ns) - np.minimum(first.end_ns, second.end_ns)
    return bool(near.all() and late.max() <= TOLERANCE_NS)


def _ends_match(first: StreamCalls, second: StreamCalls, *, one_clock: bool) -> bool:
    """Return whether two ranks' kernels end together, one by one, and none before the other has begun."""
    if first.kinds != second.kinds:
        return False
    difference = first.end_ns - second.end_ns
    offset = 0 if one_clock else int(np.median(difference))
    if not one_clock and len(difference) < MIN_CALLS_ACROSS_CLOCKS:
        return False
    late = np.maximum(first.start_ns, second.start_ns + offset) - np.minimum(first.end_ns, second.end_ns + offset)
    return bool(np.abs(difference - offset).max() <= TOLERANCE_NS and late.max() <= TOLERANCE_NS)
