"""Conversion of the collective metadata of a communication record or a kernel to `CommRecord`."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec

from ringprof.trace.checks import ELEMENTS_LIMIT, NAMED_LIMIT, RANKS_LIMIT
from ringprof.trace.columns import CommRecord
from ringprof.trace.memory import bytes_of_list

JsonScalar = int | str | float | None


class Args(msgspec.Struct, gc=False):
    """Arguments that an event of any table may have."""

    correlation: JsonScalar = None
    external_id: JsonScalar = msgspec.field(default=None, name="External id")
    old_external_id: JsonScalar = msgspec.field(default=None, name="external id")


class MemoryArgs(Args, gc=False):
    """Arguments of an allocation or a release of memory."""

    kind: JsonScalar = msgspec.field(default=None, name="Device Type")
    device: JsonScalar = msgspec.field(default=None, name="Device Id")
    allocated_bytes: JsonScalar = msgspec.field(default=None, name="Total Allocated")
    reserved_bytes: JsonScalar = msgspec.field(default=None, name="Total Reserved")


class CommArgs(Args, gc=False):
    """Arguments of communication records, and of the kernels that carry a record's metadata."""

    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    group_size: Any = msgspec.field(default=None, name="Group size")
    dtype: Any = None
    in_split: Any = msgspec.field(default=None, name="In split size")
    out_split: Any = msgspec.field(default=None, name="Out split size")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    source_rank: Any = msgspec.field(default=None, name="Src Rank")
    destination_rank: Any = msgspec.field(default=None, name="Dst Rank")
    sequence: Any = msgspec.field(default=None, name="Seq")
    comms_id: Any = msgspec.field(default=None, name="Comms Id")
    peer: Any = msgspec.field(default=None, name="Rank")
    rank_start: Any = msgspec.field(default=None, name="Global rank start")
    rank_stride: Any = msgspec.field(default=None, name="Global rank stride")


class DeviceArgs(CommArgs, gc=False):
    """Arguments of kernels, copies and sets."""

    device: JsonScalar = None
    stream: JsonScalar = None
    size_bytes: JsonScalar = msgspec.field(default=None, name="bytes")
    graph_node: JsonScalar = msgspec.field(default=None, name="graph node id")
    target_device: JsonScalar = msgspec.field(default=None, name="toDevice")
    connection: JsonScalar = msgspec.field(default=None, name="connection_id")
    """Number that a CANN task shares with the arrow from its launch."""


COMM_FIELDS = slice(len(Args.__struct_fields__), len(CommArgs.__struct_fields__))
"""Slice of the fields of `CommArgs` that describe the communication."""

_WHOLE = re.compile(r"\s*(?:[A-Za-z]+[ _]?)?(-?[0-9]{1,20})\s*")


def whole_number(value: object) -> int | None:
    """Parse a 64-bit integer from a number, or from text that is or ends in one ("stream 7"); None if there is none."""
    if isinstance(value, str):
        match = _WHOLE.fullmatch(value)
        value = int(match.group(1)) if match else None
    if isinstance(value, float):
        value = int(value) if abs(value) < 2**63 and value == int(value) else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**64 else None


def _number_up_to(value: object, limit: int) -> int | None:
    number = whole_number(value)
    return number if number is not None and 0 <= number <= limit else None


class NumberLists:
    """Cache of the groups and split sizes of one trace. Equal lists share one tuple: a record of 30 bytes may stand for
    a million ranks."""

    def __init__(self, take: Callable[[int], None]) -> None:
        self._take = take
        self._from_range: dict[range, tuple[int, ...]] = {}
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._left = NAMED_LIMIT

    def from_range(self, numbers: range) -> tuple[int, ...] | None:
        """Return the tuple of a range; None once the ranges of the trace exceed `NAMED_LIMIT` numbers in total."""
        self._left -= len(numbers)
        if self._left < 0:
            return None
        known = self._from_range.get(numbers)
        if known is None:
            self._take(bytes_of_list(len(numbers)))
            known = self._from_range[numbers] = self.shared(tuple(numbers))
        return known

    def shared(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shared tuple that equals ``numbers``."""
        known = self._shared.get(numbers)
        if known is None:
            self._take(bytes_of_list(len(numbers)))
            known = self._shared[numbers] = numbers
        return known


def collective_of(args: CommArgs, lists: NumberLists) -> CommRecord | None:
    """Build the communication record from ``args``; None if they describe no collective."""
    if not isinstance(args.collective, str) or not args.collective:
        return None
    size = _number_up_to(args.group_size, RANKS_LIMIT)
    ranks = group_ranks(args, size, lists)
    name = args.collective.lower()
    return CommRecord(
        name=name, group=None if args.group is None else str(args.group),
        group_description=None if args.group_description is None else str(args.group_description), group_ranks=ranks,
        group_size=size if size is not None else len(ranks) if ranks else None,
        in_elements=_number_up_to(args.in_elements, ELEMENTS_LIMIT),
        out_elements=_number_up_to(args.out_elements, ELEMENTS_LIMIT),
        dtype=None if args.dtype is None else str(args.dtype),
        source_rank=_peer(args, args.source_rank, ranks, applies=name == "recv"),
        destination_rank=_peer(args, args.destination_rank, ranks, applies=name == "send"),
        in_split=lists.shared(_numbers(args.in_split, ELEMENTS_LIMIT) or ()),
        out_split=lists.shared(_numbers(args.out_split, ELEMENTS_LIMIT) or ()), sequence=whole_number(args.sequence),
        comms_id=whole_number(args.comms_id),
    )  # fmt: skip


def with_group(collective: CommRecord, groups: dict[str, tuple[int, ...]]) -> CommRecord:
    """Return the record with the ranks of its group filled in from ``groups`` if it lacks them."""
    if collective.group_ranks is not None or collective.group not in groups:
        return collective
    ranks = groups[collective.group]
    return msgspec.structs.replace(collective, group_ranks=ranks, group_size=collective.group_size or len(ranks))


def _peer(args: CommArgs, stated_rank: object, ranks: tuple[int, ...] | None, *, applies: bool) -> int | None:
    """Return the global rank of the peer; older traces give only its rank within the group, as "Rank"."""
    rank = _number_up_to(stated_rank, RANKS_LIMIT - 1)
    if rank is not None or not applies:
        return rank
    rank_in_group = whole_number(args.peer)
    return ranks[rank_in_group] if ranks and rank_in_group is not None and 0 <= rank_in_group < len(ranks) else None


def group_ranks(args: CommArgs, size: int | None, lists: NumberLists) -> tuple[int, ...] | None:
    """Return the global ranks of the group; None if they cannot be determined.

    PyTorch shortens lists of more than 30 ranks to "0, 1, ... , 28, ..., 63". Such a list is rebuilt if the remaining
    ranks have a constant stride and the group size agrees.
    """
    listed = args.group_ranks
    if isinstance(listed, str) and "..." in listed:
        kept = _numbers(listed, RANKS_LIMIT - 1)
        return _with_stride(kept, size, lists) if kept else None
    ranks = _numbers(listed, RANKS_LIMIT - 1)
    if ranks and (size is None or len(ranks) == size):
        return lists.shared(ranks)
    start, stride = _number_up_to(args.rank_start, RANKS_LIMIT), _number_up_to(args.rank_stride, RANKS_LIMIT)
    if start is None or not stride or not size or start + stride * size > RANKS_LIMIT:
        return None
    return lists.from_range(range(start, start + stride * size, stride))


def _with_stride(kept: tuple[int, ...], size: int | None, lists: NumberLists) -> tuple[int, ...] | None:
    """Rebuild a shortened list from the ranks ``kept`` in it; None if they have no constant stride."""
    if len(kept) < 3:
        return None
    stride, last = kept[1] - kept[0], kept[-1]
    if stride <= 0 or any(b - a != stride for a, b in pairwise(kept[:-1])):
        return None
    count, remainder = divmod(last - kept[0], stride)
    if remainder or count <= 0 or (size is not None and count + 1 != size):
        return None
    return lists.from_range(range(kept[0], last + 1, stride))


def _numbers(value: object, limit: int) -> tuple[int, ...] | None:
    """Return the integers of a list or of text such as "[0, 1, 2]"; None unless all are between 0 and ``limit``."""
    if isinstance(value, str):
        value = [part for part in value.strip("[]() ").split(",") if part.strip() not in ("", "...")]
    if not isinstance(value, list):
        return None
    numbers = [_number_up_to(item, limit) for item in value]
    return tuple(n for n in numbers if n is not None) if None not in numbers else None
