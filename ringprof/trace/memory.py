"""How much memory a trace needs: while it is read, and for what the analysis makes of it.

The figures are bytes, measured and rounded up (300,000 kernels, hops, gathers, copies, operators, names). All readers
count by them, so that what one of them lets through the others do too, a reduced trace among them.
"""

from __future__ import annotations

import re

import numpy as np

from ringprof.limits import MemoryBudget
from ringprof.trace.columns import NONE, TABLES, Trace, dtypes_of

_COPIES = 3
"""How often a column is in memory at most: as it came, as it is sorted, and as it is checked."""
_ROW = {
    table: _COPIES * sum(np.dtype(one).itemsize for one in dtypes_of(kind).values()) for table, kind in TABLES.items()
}
_NAME, _LIST, _NUMBER, _COLLECTIVE = 200, 100, 40, 1000
# What the analysis adds for a row: of an activity, of one that communicates, which becomes some objects, of another.
_ANALYSED_ACTIVITY, _ANALYSED_HOP, _ANALYSED_RANGE = 100, 900, 150

_COMMUNICATES = re.compile(
    r"nccl|rccl|hccl|nvshmem|gloo|PtoP|userbuffers|symm_mem|all_?reduce|all_?gather", re.IGNORECASE
)


def bytes_of_rows(table: str, count: int) -> int:
    """So many rows of a table of `Trace`."""
    return _ROW[table] * count


def bytes_of_text(text: str) -> int:
    """A text: beside a character of four bytes all others take as many, and it is there in UTF-8 too."""
    return _NAME + 4 * (len(text) if text.isascii() else len(text.encode("utf-8", "replace")))


def bytes_of_list(count: int) -> int:
    """A list of so many ranks or sizes."""
    return _LIST + _NUMBER * count


def bytes_of_collectives(count: int) -> int:
    """So many communication records, without their lists."""
    return _COLLECTIVE * count


def take_trace(trace: Trace, budget: MemoryBudget) -> None:
    """Count a trace that another process has read. Raises `MemoryLimitError`."""
    rows = sum(bytes_of_rows(table, len(getattr(trace, table).start_ns)) for table in TABLES)
    texts = sum(bytes_of_text(name) for name in trace.names)
    lists = {id(one.group_ranks): len(one.group_ranks or ()) for one in trace.collectives}
    budget.take(
        rows + texts + bytes_of_collectives(len(trace.collectives)) + sum(map(bytes_of_list, lists.values())),
        trace.path,
    )
    take_analysis(trace, budget)


def take_analysis(trace: Trace, budget: MemoryBudget) -> Trace:
    """The trace, once what analysing it takes is counted too. Raises `MemoryLimitError`."""
    rows = trace.activities
    communicates = np.array([_COMMUNICATES.search(name[:1000]) is not None for name in trace.names], np.bool_)
    hops = int(np.count_nonzero(communicates[rows.name] | (rows.collective != NONE)))
    ranges = sum(len(table.start_ns) for table in (trace.annotations, trace.operators, trace.flop_records))
    size = _ANALYSED_ACTIVITY * len(rows.start_ns) + _ANALYSED_HOP * hops + _ANALYSED_RANGE * ranges
    budget.take(size, trace.path)
    return trace
