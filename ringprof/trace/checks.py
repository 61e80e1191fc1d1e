"""Validation of a trace that a reader has built: indices in range, times that can be summed, plausible ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

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
    if not all(_in_range(columns.get(name), NONE, FLOPS_LIMIT + 1) for name in ("batch", "m", "n", "k")):
        return "a shape is out of range"
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


_ID_COLUMNS = {
    "activities": ("correlation", "stream"), "launches": ("correlation",), "annotations": ("external_id",),
    "device_annotations": ("external_id",), "operators": ("external_id",), "comm_records": ("external_id",),
}  # fmt: skip
"""Columns with ids, by table. A row is compared only if it has one: rows without ids may be different events."""

_Table = TypeVar("_Table", bound=msgspec.Struct)


def without_repeats(trace: Trace) -> Trace:
    """Drop rows that equal an earlier row in every column, with a warning that counts them."""
    tables = {name: _unique(getattr(trace, name), keys) for name, keys in _ID_COLUMNS.items()}
    count = sum(repeats for _, repeats in tables.values())
    if not count:
        return trace
    message = (
        f"{count} events are in the trace more than once, with the same times, name, place and launch: each counts once"
    )
    return msgspec.structs.replace(
        trace,
        **{name: table for name, (table, _) in tables.items()},
        warnings=[*trace.warnings, Notice("repeated_events", message, trace.rank, count)],
    )


def _unique(table: _Table, keys: tuple[str, ...]) -> tuple[_Table, int]:
    """Return the table without repeated rows, and the number of rows removed."""
    columns = msgspec.structs.asdict(table)
    repeated = _repeated(columns, np.logical_or.reduce([columns[key] != NONE for key in keys]))
    if not len(repeated):
        return table, 0
    remaining = np.delete(np.arange(len(columns["start_ns"])), repeated)
    return type(table)(**{name: column[remaining] for name, column in columns.items()}), len(repeated)


def _repeated(columns: dict[str, npt.NDArray[Any]], has_id: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return the indices of rows that equal an earlier row. Rows are sorted by start; only those with ids count."""
    start = columns["start_ns"]
    tied = start[1:] == start[:-1]
    if not tied.any():
        return np.empty(0, np.intp)
    candidates = np.flatnonzero((np.append(tied, False) | np.append(False, tied)) & has_id)
    order = candidates[np.lexsort([column[candidates] for column in columns.values()])]
    equal = [column[order[1:]] == column[order[:-1]] for column in columns.values()]
    return order[1:][np.logical_and.reduce(equal)]
