"""A reduced trace: one rank's trace as the columns that the analysis reads, a fraction of its size and quick to read.

A line that names the format, then one zlib stream of MessagePack: the fields of `Trace`, columns as little-endian
integers. Nothing is left out that the analysis looks at: what it says of a reduced trace is what it says of the trace.
A file from a stranger can do no harm: it holds numbers and names, every index is checked, its size is bounded, and so
is the number of things in it, which need more memory than they take in a file.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from ringprof.errors import RingprofError, TraceFormatError
from ringprof.files import read_whole
from ringprof.trace.checks import RANKS_LIMIT, refuse_unsound
from ringprof.trace.columns import TABLES, Caveat, Collective, Device, Trace, dtypes_of
from ringprof.trace.kineto import read_trace
from ringprof.trace.kineto.event_list import UNREADABLE

MAGIC = b"ringprof.trace/2\n"
SUFFIX = ".ringprof"
LIMIT_BYTES = 1 << 30
"""How far a reduced trace may expand: that of a JSON trace of about 30 GB."""

_LEVEL = 4


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
    groups: Annotated[dict[str, _Group], _at_most(1 << 16)]
    base_ns: int
    events_total: int
    events_skipped: int
    warnings: Annotated[list[Caveat], _at_most(1 << 10)]


class _File(msgspec.Struct, frozen=True):
    head: _Head
    columns: Annotated[dict[str, Annotated[dict[str, bytes], _at_most(16)]], _at_most(16)]


def reduce_trace(trace: Trace) -> bytes:
    """The file's bytes; ``trace.path`` is kept for messages."""
    known = {name: getattr(trace, name) for name in _Head.__struct_fields__}
    head = _Head(**{**known, "warnings": trace.warnings[: 1 << 10]})
    columns = {part: _stored(kind, getattr(trace, part)) for part, kind in TABLES.items()}
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
        parts = {part: _columns(kind, file.columns[part]) for part, kind in TABLES.items()}
        head = {field: getattr(file.head, field) for field in _Head.__struct_fields__}
        trace = Trace(**{**head, "path": name or file.head.path}, **parts)
    except (*UNREADABLE, msgspec.MsgspecError, zlib.error, KeyError) as error:
        raise TraceFormatError(
            f"{shown}: damaged reduced trace ({error}): remove it, and the trace itself is read"
        ) from None
    return refuse_unsound(trace)


def _expanded(data: bytes, shown: str, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    expanded = inflater.decompress(data[len(MAGIC) :], limit)
    if inflater.unconsumed_tail:
        raise TraceFormatError(f"{shown}: expands beyond {limit:,} bytes: raise the limit with --max-bytes")
    if not inflater.eof:
        raise ValueError("cut off")
    return expanded


# --- columns ----------------------------------------------------------------------------------------


def _stored(kind: type[Any], part: object) -> dict[str, bytes]:
    return {
        name: np.ascontiguousarray(getattr(part, name), np.dtype(dtype).newbyteorder("<")).tobytes()
        for name, dtype in dtypes_of(kind).items()
    }


def _columns(kind: type[Any], stored: dict[str, bytes]) -> Any:
    # As copies: arrays over bytes cannot be written to.
    return kind(
        **{
            name: np.frombuffer(stored[name], np.dtype(dtype).newbyteorder("<")).astype(dtype)
            for name, dtype in dtypes_of(kind).items()
        }
    )
