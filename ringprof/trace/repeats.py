"""Rows that a file holds more than once, as where the same events were merged or appended twice."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.trace.columns import NONE, Notice, Trace

_TOLD_APART_BY = {
    "activities": ("correlation", "stream"),
    "launches": ("correlation",),
    "annotations": ("external_id",),
    "device_annotations": ("external_id",),
    "operators": ("external_id",),
    "comm_records": ("external_id",),
}
"""The columns of which a row must have one: rows without any may be different events that look alike."""

_Table = TypeVar("_Table", bound=msgspec.Struct)


def without_repeats(trace: Trace) -> Trace:
    """Drop rows that equal an earlier row in every column, with a warning that counts them."""
    tables = {name: _unique(getattr(trace, name), keys) for name, keys in _TOLD_APART_BY.items()}
    count = sum(dropped for _, dropped in tables.values())
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
    """Return the table without repeated rows, and how many those are."""
    columns = msgspec.structs.asdict(table)
    repeated = _repeated(columns, np.logical_or.reduce([columns[key] != NONE for key in keys]))
    if not len(repeated):
        return table, 0
    kept = np.delete(np.arange(len(columns["start_ns"])), repeated)
    return type(table)(**{name: column[kept] for name, column in columns.items()}), len(repeated)


def _repeated(columns: dict[str, npt.NDArray[Any]], known: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return the places of rows that equal an earlier one; the rows are sorted by start."""
    start = columns["start_ns"]
    tied = start[1:] == start[:-1]
    if not tied.any():
        return np.empty(0, np.intp)
    places = np.flatnonzero((np.append(tied, False) | np.append(False, tied)) & known)
    order = places[np.lexsort([column[places] for column in columns.values()])]
    equal = [column[order[1:]] == column[order[:-1]] for column in columns.values()]
    return order[1:][np.logical_and.reduce(equal)]
