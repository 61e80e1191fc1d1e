"""What every reader makes sure of: indices that lead somewhere, times that can be summed, ranks within reason."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringprof.errors import TraceFormatError
from ringprof.trace.columns import NONE, TABLES, Collective, Trace

RANKS_LIMIT = 1 << 20
"""No run and no group has more ranks: a larger number in a file is damage, and would only fill memory."""

ELEMENTS_LIMIT = 1 << 48
"""No message has more: sums of bytes stay far within 64 bits."""

LARGEST_NS = 2**61
"""No time is beyond this (73 years), so that a base time can be added without overflow."""


def refuse_unsound(trace: Trace) -> Trace:
    """The trace, which holds only what the analysis can take. Raises `TraceFormatError` where it does not."""
    for name in TABLES:
        problem = _problem_of(getattr(trace, name), trace)
        if problem:
            raise TraceFormatError(f"{trace.path}: damaged trace: of its {name.replace('_', ' ')} {problem}")
    ranks = [trace.rank or 0, (trace.world_size or 1) - 1]
    ranks += [rank for group in trace.groups.values() for rank in group]
    if any(not 0 <= rank < RANKS_LIMIT for rank in ranks) or not all(map(_is_sound, trace.collectives)):
        raise TraceFormatError(f"{trace.path}: damaged trace: a rank or a count is out of range")
    return trace


def _problem_of(part: Any, trace: Trace) -> str | None:
    columns = vars(part)
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
    return None


def _lead(values: Any, least: int, size: int) -> bool:
    return values is None or bool(values.min() >= least and values.max() < size)


def _is_sound(record: Collective) -> bool:
    counts = (record.in_elements, record.out_elements, *record.in_split, *record.out_split)
    ranks = record.group_ranks or (0,)
    peers = (record.source_rank, record.destination_rank)
    return (
        all(0 <= count <= ELEMENTS_LIMIT for count in counts if count is not None)
        and all(0 <= peer < RANKS_LIMIT for peer in peers if peer is not None)
        and min(ranks) >= 0
        and max(ranks) < RANKS_LIMIT
        and 0 <= (record.group_size or 0) <= RANKS_LIMIT
    )
