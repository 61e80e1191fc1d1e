"""Collective metadata, as a communication record or a kernel carries it, to `Collective`."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec

from ringprof.trace.columns import Collective

Number = int | str | float | None


class Args(msgspec.Struct, gc=False):
    """Arguments that every kept event may have."""

    correlation: Number = None
    external_id: Number = msgspec.field(default=None, name="External id")
    old_external_id: Number = msgspec.field(default=None, name="external id")


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

    device: Number = None
    stream: Number = None
    bytes: Number = None
    graph_node: Number = msgspec.field(default=None, name="graph node id")


COMM_FIELDS = slice(len(Args.__struct_fields__), len(CommArgs.__struct_fields__))
"""Which of the fields, in order, describe the communication."""

_DIGITS = re.compile(r"-?\d{1,20}")

RANKS_LIMIT = 1 << 20
"""No group is larger; a longer one in a file is damage, and would only fill memory."""


LARGEST_RANK = 1 << 31

ELEMENTS_LIMIT = 1 << 48
"""No message has more: sums of bytes stay far within 64 bits."""


def whole_number(value: object) -> int | None:
    """An integer of 64 bits from a number or from text with digits in it ("stream 7"), else None."""
    if isinstance(value, str):
        found = _DIGITS.search(value)
        value = int(found.group()) if found else None
    if isinstance(value, float):
        value = int(value) if abs(value) < 2**63 and value == int(value) else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**64 else None


def _elements(value: object) -> int | None:
    number = whole_number(value)
    return number if number is not None and 0 <= number <= ELEMENTS_LIMIT else None


def collective_of(args: CommArgs) -> Collective | None:
    """The record in ``args``, or None where it holds none."""
    if not isinstance(args.collective, str) or not args.collective:
        return None
    size = whole_number(args.group_size)
    ranks = group_ranks(args, size)
    name = args.collective.lower()
    return Collective(
        name=name,
        group=None if args.group is None else str(args.group),
        group_description=None if args.group_description is None else str(args.group_description),
        group_ranks=ranks,
        group_size=size if size is not None else len(ranks) if ranks else None,
        in_elements=_elements(args.in_elements),
        out_elements=_elements(args.out_elements),
        dtype=None if args.dtype is None else str(args.dtype),
        source_rank=_peer(args, args.source_rank, ranks, name == "recv"),
        destination_rank=_peer(args, args.destination_rank, ranks, name == "send"),
        in_split=_numbers(args.in_split) or (),
        out_split=_numbers(args.out_split) or (),
        sequence=whole_number(args.sequence),
        comms_id=whole_number(args.comms_id),
    )


def with_group(collective: Collective, groups: dict[str, tuple[int, ...]]) -> Collective:
    """The record with the ranks of its group filled in from ``groups`` where it lacks them."""
    if collective.group_ranks is not None or collective.group not in groups:
        return collective
    ranks = groups[collective.group]
    return replace(collective, group_ranks=ranks, group_size=collective.group_size or len(ranks))


def _peer(args: CommArgs, given: object, ranks: tuple[int, ...] | None, applies: bool) -> int | None:
    """The global rank at the other end; older traces give only its place in the group, as "Rank"."""
    rank = whole_number(given)
    if rank is not None or not applies:
        return rank
    place = whole_number(args.peer)
    return ranks[place] if ranks and place is not None and 0 <= place < len(ranks) else None


def group_ranks(args: CommArgs, size: int | None) -> tuple[int, ...] | None:
    """Global ranks of the group, None where they cannot be told.

    PyTorch shortens lists of more than 30 to "0, 1, ... , 28, ..., 63": such a list is rebuilt where what is
    left of it has one stride and the group's size agrees.
    """
    listed = args.group_ranks
    if isinstance(listed, str) and "..." in listed:
        kept = _numbers(listed)
        return _with_stride(kept, size) if kept else None
    ranks = _numbers(listed)
    if ranks and (size is None or len(ranks) == size) and 0 <= min(ranks) and max(ranks) < LARGEST_RANK:
        return ranks
    start, stride = whole_number(args.rank_start), whole_number(args.rank_stride)
    if start is None or not stride or size is None or not 0 < size <= RANKS_LIMIT or start < 0:
        return None
    if not 0 < stride <= LARGEST_RANK or start + stride * size > LARGEST_RANK:
        return None
    return tuple(range(start, start + stride * size, stride))


def _with_stride(kept: tuple[int, ...], size: int | None) -> tuple[int, ...] | None:
    if len(kept) < 3:
        return None
    stride, last = kept[1] - kept[0], kept[-1]
    if stride <= 0 or any(b - a != stride for a, b in pairwise(kept[:-1])):
        return None
    count, left = divmod(last - kept[0], stride)
    if left or not 0 < count < RANKS_LIMIT or (size is not None and count + 1 != size):
        return None
    if kept[0] < 0 or last >= LARGEST_RANK:
        return None
    return tuple(range(kept[0], last + 1, stride))


def _numbers(value: object) -> tuple[int, ...] | None:
    """Integers of a list, or of text such as "[0, 1, 2]"."""
    if isinstance(value, str):
        return tuple(int(digits) for digits in _DIGITS.findall(value))
    if isinstance(value, list):
        numbers = [whole_number(item) for item in value]
        return tuple(n for n in numbers if n is not None) if None not in numbers else None
    return None
