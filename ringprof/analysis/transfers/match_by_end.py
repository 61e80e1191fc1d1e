"""Collectives without a record of their group, matched by when they end.

Older PyTorch, Nsight Systems and RCCL leave kernels that say what they are and not among whom. A communicator's kernels
run on one stream of each of its ranks, in one order, and none ends before all ranks have begun it; so all end within
microseconds. Where the kernels of a stream do so with those of a stream on other ranks, one by one, they are the same
communicator's, and the n-th is the same collective on all.

Over PCIe the ends lie further apart: one rank still passes its last chunk on. Such ends match only where no two
communicators can be mistaken for one: in a world of at most three ranks, each with one such stream.
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
"""How far apart the ends of one collective may be; seen: 7 us on eight V100, 18 on two B200 of a busy host."""
SHARE = 1 / 8
"""How far apart they may be in a small world, of the shorter kernel, which waits least; seen: 73 to 388 us, and up to
10.3 %, on two RTX 4090 over PCIe."""
SMALL_WORLD = 3
"""Ranks among which two communicators of at least two ranks each share one."""
LEAST_ACROSS_CLOCKS = 3
"""Kernels that must agree where ranks have clocks of their own, whose offset agrees with one kernel always."""
SOURCE = "ends"
"""Of such a transfer, see `Transfer.source`."""


class StreamCalls(msgspec.Struct, frozen=True):
    """The collectives without a record on one stream of one rank, in order; plain data."""

    rank: int
    kinds: tuple[str, ...]
    start_ns: Int64
    end_ns: Int64
    places: tuple[int, ...]
    """Among the rank's transfers."""


class Communicators(msgspec.Struct, frozen=True):
    """What the ends tell."""

    group_of: dict[int, dict[int, Group]]
    """Rank -> place among its transfers -> group."""
    spread_ns: int
    """How far apart the ends of one collective are at most."""

    def warning(self) -> list[Notice]:
        """By which evidence they are matched."""
        count = sum(len(groups) for groups in self.group_of.values())
        if not count:
            return []
        message = (
            "communication kernels have no record of their group: matched as the n-th of a stream on every rank, which "
            f"all end within {self.spread_ns / 1e3:.1f} us of one another"
        )
        return [Notice("matched_by_ends", message, count=count)]


def is_unrecorded(transfer: Transfer) -> bool:
    """Whether it is a collective without a record."""
    return transfer.source == "none" and transfer.kind not in POINT_TO_POINT


def unrecorded_calls(rank: int, transfers: Sequence[Transfer]) -> list[StreamCalls]:
    """The collectives without a record of one rank, by stream."""
    places: dict[int, list[int]] = {}
    for place, transfer in enumerate(transfers):
        if is_unrecorded(transfer):
            places.setdefault(transfer.stream, []).append(place)
    return [
        StreamCalls(
            rank,
            tuple(transfers[place].kind for place in mine),
            np.array([transfers[place].start_ns for place in mine], np.int64),
            np.array([transfers[place].end_ns for place in mine], np.int64),
            tuple(mine),
        )
        for mine in places.values()
    ]


def find_communicators(calls: Iterable[StreamCalls], clock: Mapping[int, object]) -> Communicators:
    """Find which ranks' streams carry the same collectives; ``clock`` names the clock of each rank of the world."""
    found: list[list[StreamCalls]] = []
    for one in calls:
        for members in found:
            taken = {member.rank for member in members}
            if one.rank not in taken and _agree(members[0], one, one_clock=clock[one.rank] == clock[members[0].rank]):
                members.append(one)
                break
        else:
            found.append([one])
    if len(clock) <= SMALL_WORLD and len(set(clock.values())) == 1:
        found = _joined(found, set(clock))
    group_of: dict[int, dict[int, Group]] = {}
    spread = 0
    for number, members in enumerate(found):
        if len(members) < 2:
            continue
        group = f"~{number}", tuple(sorted(member.rank for member in members))
        for member in members:
            group_of.setdefault(member.rank, {}).update(dict.fromkeys(member.places, group))
            if clock[member.rank] == clock[members[0].rank]:
                spread = max(spread, int(np.abs(member.end_ns - members[0].end_ns).max()))
    return Communicators(group_of, spread)


def _joined(found: Sequence[list[StreamCalls]], world: set[int]) -> list[list[StreamCalls]]:
    """Join streams that match no other, where every rank has one with these collectives and all end near each other."""
    left: dict[tuple[str, ...], list[StreamCalls]] = {}
    for members in found:
        if len(members) == 1:
            left.setdefault(members[0].kinds, []).append(members[0])
    joined = [
        streams
        for streams in left.values()
        if sorted(stream.rank for stream in streams) == sorted(world)
        and all(_nearly_agree(one, other) for one, other in combinations(streams, 2))
    ]
    places = {id(stream) for streams in joined for stream in streams}
    return [*(members for members in found if id(members[0]) not in places), *joined]


def _nearly_agree(one: StreamCalls, other: StreamCalls) -> bool:
    """Return whether kernels end within a share of their time, one by one, and none before the other has begun."""
    shorter = np.minimum(one.end_ns - one.start_ns, other.end_ns - other.start_ns)
    near = np.abs(one.end_ns - other.end_ns) <= np.maximum(TOLERANCE_NS, SHARE * shorter)
    late = np.maximum(one.start_ns, other.start_ns) - np.minimum(one.end_ns, other.end_ns)
    return bool(near.all() and late.max() <= TOLERANCE_NS)


def _agree(one: StreamCalls, other: StreamCalls, *, one_clock: bool) -> bool:
    """Whether two ranks' kernels end together, one by one, and none before the other has begun."""
    if one.kinds != other.kinds:
        return False
    apart = one.end_ns - other.end_ns
    offset = 0 if one_clock else int(np.median(apart))
    if not one_clock and len(apart) < LEAST_ACROSS_CLOCKS:
        return False
    late = np.maximum(one.start_ns, other.start_ns + offset) - np.minimum(one.end_ns, other.end_ns + offset)
    return bool(np.abs(apart - offset).max() <= TOLERANCE_NS and late.max() <= TOLERANCE_NS)
