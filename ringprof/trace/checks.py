"""Validation of a trace that a reader has built: indices in range, times that can be summed, plausible ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from ringprof.errors import TraceFormatError
from ringprof.trace.columns import FLOP_DTYPES, FLOPS_LIMIT, NONE, TABLES, Activities, Notice, Trace

RANKS_LIMIT = 1 << 20
"""Upper bound on the ranks of a run or a group. A larger number in a file is damage, and would only fill memory."""

ELEMENTS_LIMIT = 1 << 48
"""Upper bound on the elements of one message. Sums of bytes then stay far within 64 bits."""

NAMED_LIMIT = 1 << 25
"""Upper bound on the ranks and split sizes that all records of a trace name, and on the ranks that its groups name.

The analysis visits each of them, once per record or group. A file needs only few bytes to repeat a list of a million.
"""

LARGEST_NS = 2**61
"""Upper bound on times in nanoseconds (73 years). A base time can be added to it without overflow."""


_FOLLOWING = 8
"""Distance, in rows of one stream, at which two kernels must not overlap. Adjacent ones may: one drains while the next
begins."""


def validate_trace(trace: Trace) -> Trace:
    """Return the trace unchanged if the analysis can process it. Raises `TraceFormatError` if it cannot."""
    for name in TABLES:
        problem = _find_problem(getattr(trace, name), trace)
        if problem:
            raise TraceFormatError(f"{trace.path}: damaged trace: of its {name.replace('_', ' ')} {problem}")
    for owner, count in (("records", _count_ranks_and_sizes(trace)), ("groups", sum(map(len, trace.groups.values())))):
        if count > NAMED_LIMIT:
            raise TraceFormatError(f"{trace.path}: damaged trace: its {owner} name over {NAMED_LIMIT:,} ranks in all")
    if not _all_below(_ranks_in(trace), RANKS_LIMIT) or not _all_below(_counts_in(trace), ELEMENTS_LIMIT + 1):
        raise TraceFormatError(f"{trace.path}: damaged trace: a rank or a count is out of range")
    return trace


def overlap_warnings(rows: Activities, rank: int | None) -> list[Notice]:
    """Return a warning if kernels or copies overlap many others of their stream, which runs one after another."""
    order = np.lexsort((rows.start_ns, rows.stream, rows.device))
    order = order[rows.stream[order] != NONE]
    earlier, later = order[:-_FOLLOWING], order[_FOLLOWING:]
    same_stream = (rows.device[earlier] == rows.device[later]) & (rows.stream[earlier] == rows.stream[later])
    excess_ns = (rows.end_ns[earlier] - rows.start_ns[later])[
        same_stream & (rows.end_ns[earlier] > rows.start_ns[later])
    ]
    count = len(excess_ns)
    if not count:
        return []
    until, excess = f"until {_FOLLOWING} others of their stream have begun", f"{excess_ns.sum() / 1e6:,.3f} ms longer"
    message = (
        f"{count} kernels or copies last {until}, and {excess}: their times, which count in the results, may be damaged"
    )
    return [Notice("overlapping_kernels", message, rank, count)]


def _find_problem(table: Any, trace: Trace) -> str | None:
    columns = msgspec.structs.asdict(table)
    start, end = table.start_ns, table.end_ns
    if any(len(column) != len(start) for column in columns.values()):
        return "the columns are of unequal length"
    if not len(start):
        return None
    if np.any(start[1:] < start[:-1]):
        return "the times are out of order"
    if np.any(end < start):
        return "one ends before it begins"
    # Floats do not overflow, where integers would wrap around.
    length = float((end.astype(np.float64) - start).sum())
    if max(length, -float(start.min()), float(end.max())) > LARGEST_NS:
        return "the times are those of over 73 years"
    if not _in_range(columns.get("name"), 0, len(trace.names)):
        return "a name's index is out of range"
    if not _in_range(columns.get("collective"), NONE, len(trace.collectives)):
        return "a collective's index is out of range"
    if not _in_range(columns.get("category"), 0, 3):
        return "one is of an unknown category"
    if not _in_range(columns.get("flops"), 0, FLOPS_LIMIT + 1):
        return "a number of FLOPs is out of range"
    if not _in_range(columns.get("dtype"), NONE, len(FLOP_DTYPES)) or not _in_range(columns.get("causal"), NONE, 2):
        return "a data type or a mask is unknown"
    return None


def _in_range(values: Any, least: int, size: int) -> bool:
    return values is None or bool(values.min() >= least and values.max() < size)


def _all_below(lists: Iterable[Iterable[int | None]], limit: int) -> bool:
    # Check each list once: records share the lists of their groups, which may have a million ranks.
    unique_lists = {id(numbers): numbers for numbers in lists}
    return all(0 <= number < limit for numbers in unique_lists.values() for number in numbers if number is not None)


def _count_ranks_and_sizes(trace: Trace) -> int:
    sizes = {name: len(ranks) for name, ranks in trace.groups.items()}
    rank_counts = (
        sizes.get(record.group or "", 0) if record.group_ranks is None else len(record.group_ranks)
        for record in trace.collectives
    )
    return sum(rank_counts) + sum(len(record.in_split) + len(record.out_split) for record in trace.collectives)


def _ranks_in(trace: Trace) -> list[tuple[int | None, ...]]:
    records = trace.collectives
    rank_lists = [*trace.groups.values(), *(record.group_ranks for record in records if record.group_ranks is not None)]
    rank_fields = tuple(
        rank
        for record in records
        for rank in (record.source_rank, record.destination_rank, _last_rank(record.group_size))
    )
    return [*rank_lists, rank_fields, (trace.rank, _last_rank(trace.world_size))]


def _last_rank(size: int | None) -> int | None:
    return size - 1 if size else None


def _counts_in(trace: Trace) -> list[tuple[int | None, ...]]:
    records = trace.collectives
    counts = tuple(count for record in records for count in (record.in_elements, record.out_elements))
    return [*(split for record in records for split in (record.in_split, record.out_split)), counts]
