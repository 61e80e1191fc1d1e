"""Estimates of the memory that a trace needs while it is read and analysed.

The figures are bytes, measured and rounded up (300,000 kernels, hops, gathers, copies, operators, names). All readers
use them, so that a trace which one reader accepts is accepted by the others, also as a reduced trace.
"""

from __future__ import annotations

import re

import numpy as np

from ringprof.common.limits import MemoryBudget
from ringprof.trace.columns import NONE, TABLES, Trace, dtypes_of

_COPIES = 3
"""Largest number of copies of a column in memory: as read, while sorted, and while validated."""
_ROW = {
    table: _COPIES * sum(np.dtype(dtype).itemsize for dtype in dtypes_of(kind).values())
    for table, kind in TABLES.items()
}
_NAME, _LIST, _NUMBER, _COLLECTIVE = 200, 100, 40, 1000
# Bytes that the analysis adds per activity, per communicating activity (it becomes several objects), and per range.
_ANALYSED_ACTIVITY, _ANALYSED_HOP, _ANALYSED_RANGE = 100, 900, 150

_COMMUNICATES = re.compile(
    r"nccl|rccl|hccl|nvshmem|gloo|PtoP|userbuffers|symm_mem|all_?reduce|all_?gather", re.IGNORECASE
)


def bytes_of_rows(table: str, count: int) -> int:
    """Return the bytes of ``count`` rows of a table of `Trace`."""
    return _ROW[table] * count


def bytes_of_text(text: str) -> int:
    """Return the bytes of a text.

    One character of four bytes makes Python store all others with four bytes, and the text exists in UTF-8 as well.
    """
    return _NAME + 4 * (len(text) if text.isascii() else len(text.encode("utf-8", "replace")))


def bytes_of_list(count: int) -> int:
    """Return the bytes of a list of ``count`` ranks or sizes."""
    return _LIST + _NUMBER * count


def bytes_of_collectives(count: int) -> int:
    """Return the bytes of ``count`` communication records, without their lists."""
    return _COLLECTIVE * count


def take_trace(trace: Trace, budget: MemoryBudget) -> None:
    """Charge a trace that another process has read to the budget. Raises `MemoryLimitError`."""
    rows = sum(bytes_of_rows(table, len(getattr(trace, table).start_ns)) for table in TABLES)
    texts = sum(bytes_of_text(name) for name in trace.names)
    lists = {id(record.group_ranks): len(record.group_ranks or ()) for record in trace.collectives}
    budget.take(
        rows + texts + bytes_of_collectives(len(trace.collectives)) + sum(map(bytes_of_list, lists.values())),
        trace.path,
    )
    take_analysis(trace, budget)


def take_analysis(trace: Trace, budget: MemoryBudget) -> Trace:
    """Charge the memory for analysing a trace to the budget, and return the trace. Raises `MemoryLimitError`."""
    rows = trace.activities
    communicates = np.array([_COMMUNICATES.search(name[:1000]) is not None for name in trace.names], np.bool_)
    hops = int(np.count_nonzero(communicates[rows.name] | (rows.collective != NONE)))
    tables = (trace.annotations, trace.operators, trace.flop_records, trace.modules, trace.backward_calls)
    ranges = sum(len(table.start_ns) for table in tables)
    size = _ANALYSED_ACTIVITY * len(rows.start_ns) + _ANALYSED_HOP * hops + _ANALYSED_RANGE * ranges
    budget.take(size, trace.path)
    return trace
