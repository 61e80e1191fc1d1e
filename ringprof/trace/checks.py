"""What every reader makes sure of: indices that lead somewhere, times that can be summed, ranks within reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from ringprof.errors import TraceFormatError
from ringprof.trace.columns import FLOP_DTYPES, FLOPS_LIMIT, NONE, TABLES, Activities, Notice, Trace

RANKS_LIMIT = 1 << 20
"""No run and no group has more ranks: a larger number in a file is damage, and would only fill memory."""

ELEMENTS_LIMIT = 1 << 48
"""No message has more: sums of bytes stay far within 64 bits."""

NAMED_LIMIT = 1 << 25
"""Most ranks and sizes that the records of a trace may name in all, and most ranks that its groups may.

The analysis visits every one, once per record or group, and a file needs few bytes to name a list of a million again.
"""

LARGEST_NS = 2**61
"""No time is beyond this (73 years), so that a base time can be added without overflow."""


_FOLLOWING = 8
"""A kernel may begin while the one before it on its stream drains, never while so many do."""


def refuse_unsound(trace: Trace) -> Trace:
    """The trace, which holds only what the analysis can take. Raises `TraceFormatError` where it does not."""
    for name in TABLES:
        problem = _problem_of(getattr(trace, name), trace)
        if problem:
            raise TraceFormatError(f"{trace.path}: damaged trace: of its {name.replace('_', ' ')} {problem}")
    for what, count in (("records", _named(trace)), ("groups", sum(map(len, trace.groups.values())))):
        if count > NAMED_LIMIT:
            raise TraceFormatError(f"{trace.path}: damaged trace: its {what} name over {NAMED_LIMIT:,} ranks in all")
    if not _within(_ranks_in(trace), RANKS_LIMIT) or not _within(_counts_in(trace), ELEMENTS_LIMIT + 1):
        raise TraceFormatError(f"{trace.path}: damaged trace: a rank or a count is out of range")
    return trace


def overlaps(rows: Activities, rank: int | None) -> list[Notice]:
    """A warning where kernels or copies lie over many others of their stream, which carries out one after another."""
    order = np.lexsort((rows.start_ns, rows.stream, rows.device))
    order = order[rows.stream[order] != NONE]
    early, late = order[:-_FOLLOWING], order[_FOLLOWING:]
    over = (rows.device[early] == rows.device[late]) & (rows.stream[early] == rows.stream[late])
    beyond = (rows.end_ns[early] - rows.start_ns[late])[over & (rows.end_ns[early] > rows.start_ns[late])]
    count = len(beyond)
    if not count:
        return []
    where, longer = f"until {_FOLLOWING} others of their stream have begun", f"{beyond.sum() / 1e6:,.3f} ms longer"
    message = f"{count} kernels or copies last {where}, and {longer}: their times, which figures hold, may be damaged"
    return [Notice("overlapping_kernels", message, rank, count)]


def _problem_of(part: Any, trace: Trace) -> str | None:
    columns = msgspec.structs.asdict(part)
    start, end = part.start_ns, part.end_ns
    if any(len(column) != len(start) for column in columns.values()):
        return "the columns are of unequal length"
    if not len(start):
        return None
    if np.any(start[1:] < start[:-1]):
        return "the times are out of order"
    if np.any(end < start):
        return "one ends before it begins"
    # In floats, which grow and do not wrap.
    length = float((end.astype(np.float64) - start).sum())
    if max(length, -float(start.min()), float(end.max())) > LARGEST_NS:
        return "the times are those of over 73 years"
    if not _lead(columns.get("name"), 0, len(trace.names)):
        return "a name's index is out of range"
    if not _lead(columns.get("collective"), NONE, len(trace.collectives)):
        return "a collective's index is out of range"
    if not _lead(columns.get("category"), 0, 3):
        return "one is of an unknown category"
    if not _lead(columns.get("flops"), 0, FLOPS_LIMIT + 1):
        return "a number of FLOPs is out of range"
    if not _lead(columns.get("dtype"), NONE, len(FLOP_DTYPES)) or not _lead(columns.get("causal"), NONE, 2):
        return "a data type or a mask is unknown"
    return None


def _lead(values: Any, least: int, size: int) -> bool:
    return values is None or bool(values.min() >= least and values.max() < size)


def _within(lists: Iterable[Iterable[int | None]], limit: int) -> bool:
    # Each list once: records share those of their groups, which may have a million ranks.
    different = {id(numbers): numbers for numbers in lists}
    return all(0 <= number < limit for numbers in different.values() for number in numbers if number is not None)


def _named(trace: Trace) -> int:
    sizes = {name: len(ranks) for name, ranks in trace.groups.items()}
    groups = (
        sizes.get(one.group or "", 0) if one.group_ranks is None else len(one.group_ranks) for one in trace.collectives
    )
    return sum(groups) + sum(len(one.in_split) + len(one.out_split) for one in trace.collectives)


def _ranks_in(trace: Trace) -> list[tuple[int | None, ...]]:
    records = trace.collectives
    listed = [*trace.groups.values(), *(one.group_ranks for one in records if one.group_ranks is not None)]
    named = tuple(rank for one in records for rank in (one.source_rank, one.destination_rank, _last(one.group_size)))
    return [*listed, named, (trace.rank, _last(trace.world_size))]


def _last(size: int | None) -> int | None:
    return size - 1 if size else None


def _counts_in(trace: Trace) -> list[tuple[int | None, ...]]:
    records = trace.collectives
    counts = tuple(count for one in records for count in (one.in_elements, one.out_elements))
    return [*(split for one in records for split in (one.in_split, one.out_split)), counts]
