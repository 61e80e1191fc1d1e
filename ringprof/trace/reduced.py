"""A reduced trace: one rank's trace as the columns that the analysis reads, a fraction of its size and quick to read.

A line that names the format, then one zlib stream of MessagePack: the fields of `Trace`, columns as little-endian
integers. Nothing is left out that the analysis looks at: what it says of a reduced trace is what it says of the trace.
A file from a stranger can do no harm: it holds numbers and names, every index is checked, its size is bounded, and so
is the number of things in it, which need more memory than they take in a file.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from ringprof.errors import RingprofError, TraceFormatError
from ringprof.files import read_whole
from ringprof.trace.collectives import RANKS_LIMIT, sound
from ringprof.trace.columns import (
    NONE,
    Activities,
    Caveat,
    Collective,
    CommRecords,
    Device,
    Launches,
    Ranges,
    Trace,
)
from ringprof.trace.events import UNREADABLE
from ringprof.trace.kineto import read_trace
from ringprof.trace.times import refuse_overflow

MAGIC = b"ringprof.trace/2\n"
SUFFIX = ".ringprof"
LIMIT_BYTES = 1 << 30
"""How far a reduced trace may expand: that of a JSON trace of about 30 GB."""

_LEVEL = 4
_PARTS: dict[str, type[Any]] = {
    "activities": Activities,
    "launches": Launches,
    "annotations": Ranges,
    "device_annotations": Ranges,
    "operators": Ranges,
    "comm_records": CommRecords,
}
# Narrower than the int64 of all others; the same for every part.
_NARROW = {"name": "<i4", "collective": "<i4", "device": "<i4", "stream": "<i4", "category": "<i1"}


def _at_most(count: int) -> msgspec.Meta:
    return msgspec.Meta(max_length=count)


_Group = Annotated[tuple[int, ...], _at_most(RANKS_LIMIT)]


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Everything but the columns."""

    path: str
    names: Annotated[list[str], _at_most(1 << 20)]
    collectives: Annotated[list[Collective], _at_most(1 << 20)]
    devices: Annotated[list[Device], _at_most(1 << 12)]
    rank: int | None
    world_size: int | None
    host: str | None
    backend: str | None
    groups: Annotated[dict[str, _Group], _at_most(1 << 16)]
    base_ns: int
    trace_id: str | None
    metadata: Annotated[dict[str, Annotated[str, _at_most(1 << 13)]], _at_most(1 << 8)]
    """Each value as JSON."""
    events_total: int
    events_skipped: int
    warnings: Annotated[list[Caveat], _at_most(1 << 10)]


class _File(msgspec.Struct, frozen=True):
    head: _Head
    columns: Annotated[dict[str, Annotated[dict[str, bytes], _at_most(16)]], _at_most(16)]


def reduce_trace(trace: Trace) -> bytes:
    """The file's bytes; ``trace.path`` is kept for messages."""
    known = {name: getattr(trace, name) for name in _Head.__struct_fields__}
    metadata = {key: json.dumps(value) for key, value in list(trace.metadata.items())[: 1 << 8]}
    head = _Head(**{**known, "metadata": metadata, "warnings": trace.warnings[: 1 << 10]})
    columns = {
        part: {field.name: _stored(field.name, getattr(trace, part)) for field in fields(kind)}
        for part, kind in _PARTS.items()
    }
    packed = msgspec.msgpack.encode(_File(head, columns))
    return MAGIC + zlib.compress(packed, _LEVEL)


def reduce_file(trace: Path, target: Path) -> bool:
    """Write the reduced form of a rank's own trace; False where the trace cannot be read. Raises OSError."""
    try:
        read = read_trace(trace)
    except RingprofError:
        return False
    # Beside it: whoever reads it knows where it lies.
    target.write_bytes(reduce_trace(replace(read, path=trace.name)))
    return True


def read_reduced(path: str | os.PathLike[str], *, limit_bytes: int | None = None) -> Trace:
    """Read a reduced trace; its ``path`` becomes this file's. Raises `InputError`, `TraceFormatError`."""
    name = os.fspath(path)
    return parse_reduced(read_whole(name, limit_bytes or LIMIT_BYTES), name, limit_bytes=limit_bytes)


def parse_reduced(data: bytes, name: str | None = None, *, limit_bytes: int | None = None) -> Trace:
    """As `read_reduced`, from a file's bytes; without ``name`` the trace keeps the path that it was reduced from."""
    shown = name or "reduced trace"
    if not data.startswith(MAGIC):
        raise TraceFormatError(f"{shown}: not a reduced trace of this version: remove it, and the trace itself is read")
    try:
        file = msgspec.msgpack.decode(_expanded(data, shown, limit_bytes or LIMIT_BYTES), type=_File)
        parts = {part: _columns(kind, file.columns[part]) for part, kind in _PARTS.items()}
        head = {field: getattr(file.head, field) for field in _Head.__struct_fields__}
        metadata = {key: json.loads(value) for key, value in file.head.metadata.items()}
        trace = Trace(**{**head, "path": name or file.head.path, "metadata": metadata}, **parts)
        _check(trace)
    except (*UNREADABLE, msgspec.MsgspecError, zlib.error, KeyError) as error:
        raise TraceFormatError(
            f"{shown}: damaged reduced trace ({error}): remove it, and the trace itself is read"
        ) from None
    return refuse_overflow(trace)


def _expanded(data: bytes, shown: str, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    expanded = inflater.decompress(data[len(MAGIC) :], limit)
    if inflater.unconsumed_tail:
        raise TraceFormatError(f"{shown}: expands beyond {limit:,} bytes: raise the limit with --max-bytes")
    if not inflater.eof:
        raise ValueError("cut off")
    return expanded


# --- columns ----------------------------------------------------------------------------------------


def _dtype(column: str) -> np.dtype[Any]:
    return np.dtype(_NARROW.get(column, "<i8"))


def _stored(column: str, part: object) -> bytes:
    values: bytes = np.ascontiguousarray(getattr(part, column), _dtype(column)).tobytes()
    return values


_Part = TypeVar("_Part")


def _columns(kind: type[_Part], stored: dict[str, bytes]) -> _Part:
    assert is_dataclass(kind)
    columns = {}
    for field in fields(kind):
        # A copy: arrays over bytes cannot be written to.
        values = np.frombuffer(stored[field.name], _dtype(field.name)).copy()
        columns[field.name] = values.astype(values.dtype.newbyteorder("="), copy=False)
    if len({len(values) for values in columns.values()}) > 1:
        raise ValueError("columns of unequal length")
    made: _Part = kind(**columns)
    return made


def _check(trace: Trace) -> None:
    """Refuse what no reader makes: indices that lead nowhere, times that are not in order or overflow."""
    for part in (getattr(trace, name) for name in _PARTS):
        start, end = part.start_ns, part.end_ns
        if np.any(start[1:] < start[:-1]):
            raise ValueError("times out of order")
        if np.any(end < start):
            raise ValueError("something ends before it begins")
        for column, size in (("name", len(trace.names)), ("collective", len(trace.collectives))):
            _check_indices(getattr(part, column, None), size, may_be_none=column == "collective")
    if np.any((trace.activities.category < 0) | (trace.activities.category > 2)):
        raise ValueError("unknown category")
    ranks = [trace.rank or 0, (trace.world_size or 1) - 1]
    ranks += [rank for group in trace.groups.values() for rank in group]
    if any(not 0 <= rank < RANKS_LIMIT for rank in ranks) or not all(sound(one) for one in trace.collectives):
        raise ValueError("a rank or a count out of range")


def _check_indices(values: Any, size: int, *, may_be_none: bool) -> None:
    if values is None or not len(values):
        return
    if values.min() < (NONE if may_be_none else 0) or values.max() >= size:
        raise ValueError("an index out of range")
