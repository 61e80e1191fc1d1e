"""Removal of rows that a file holds more than once, for example after the same events were merged twice."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.trace.columns import NONE, Notice, Trace

_ID_COLUMNS = {
    "activities": ("correlation", "stream"),
    "launches": ("correlation",),
    "annotations": ("external_id",),
    "device_annotations": ("external_id",),
    "operators": ("external_id",),
    "comm_records": ("external_id",),
}
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
