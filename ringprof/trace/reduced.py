"""Reduced traces: files with the columns of one rank's trace, smaller than the trace itself and faster to read.

A file is a line that names the format, then one zlib stream of MessagePack. The stream holds the fields of `Trace`:
columns as little-endian integers, texts and lists of numbers concatenated, with their sizes. It has everything that
the analysis reads, so a reduced trace gives the same results as the trace.

Untrusted files are safe to read. They hold only numbers and names, and every index is checked. Memory is charged
before it is allocated, by the same estimates as for the trace itself (`ringprof.trace.memory`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from ringprof.common.decoding import UNREADABLE, reason
from ringprof.common.files import read_whole
from ringprof.common.limits import MemoryBudget
from ringprof.errors import RingprofError, TraceFormatError
from ringprof.trace.checks import validate_trace
from ringprof.trace.columns import TABLES, CommRecord, Device, Int64, Notice, Trace, dtypes_of
from ringprof.trace.kineto import read_trace
from ringprof.trace.kineto.fields import MOST_DEVICES
from ringprof.trace.memory import bytes_of_collectives, bytes_of_list, bytes_of_rows, bytes_of_text, take_analysis

MAGIC = b"ringprof.trace/4\n"
SUFFIX = ".ringprof"

_LEVEL = 4
_MOST_WARNINGS = 1 << 10
_FEW = msgspec.Meta(max_length=16)


class _Ragged(msgspec.Struct, frozen=True):
    """Concatenated sequences of unequal length: their sizes, and their data end to end."""

    sizes: memoryview
    data: memoryview


_Record = msgspec.defstruct(
    "_Record",
    [
        (field.name, {"group_ranks": int | None, "in_split": int, "out_split": int}.get(field.name, field.type))
        for field in msgspec.structs.fields(CommRecord)
    ],
)
"""Stored form of a `CommRecord`; its lists are given by their index among all lists of the file."""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a reduced trace, as stored in MessagePack."""

    path: str
    rank: int | None
    world_size: int | None
    host: str | None
    base_ns: int
    events_total: int
    events_skipped: int
    producer: str = "torch"
    devices: Annotated[list[Device], msgspec.Meta(max_length=MOST_DEVICES)]
    warnings: Annotated[list[Notice], msgspec.Meta(max_length=_MOST_WARNINGS)]
    names: _Ragged
    lists: _Ragged
    group_names: _Ragged
    group_lists: memoryview
    """Index of each group's ranks among the lists."""
    collectives: list[_Record]  # type: ignore[valid-type]
    columns: Annotated[dict[str, Annotated[dict[str, memoryview], _FEW]], _FEW]


_MAY_BE_MISSING = frozenset({"memory", "host_events", "flop_records", "modules", "backward_calls"})
"""Tables that are stored only if they have rows."""
_METADATA = ("rank", "world_size", "host", "base_ns", "events_total", "events_skipped", "devices",
             "producer")  # fmt: skip


def reduce_trace(trace: Trace) -> bytes:
    """Return the bytes of the reduced file. ``trace.path`` is stored for messages."""
    lists: dict[tuple[int, ...], int] = {}

    def list_index(numbers: tuple[int, ...]) -> int:
        return lists.setdefault(numbers, len(lists))

    records = [
        _Record(**{
            **msgspec.structs.asdict(record),
            "group_ranks": None if record.group_ranks is None else list_index(record.group_ranks),
            "in_split": list_index(record.in_split),
            "out_split": list_index(record.out_split),
        })
        for record in trace.collectives
    ]  # fmt: skip
    tables = {name: getattr(trace, name) for name in TABLES}
    file = _File(
        **{name: getattr(trace, name) for name in _METADATA},
        path=trace.path.encode("utf-8", "replace").decode(),
        warnings=trace.warnings[:_MOST_WARNINGS],
        names=_texts_stored(trace.names),
        group_names=_texts_stored(trace.groups),
        group_lists=_stored([list_index(ranks) for ranks in trace.groups.values()]),
        collectives=records,
        lists=_Ragged(_stored([*map(len, lists)]), _stored([number for numbers in lists for number in numbers])),
        columns={
            name: {column: _stored(getattr(table, column), dtype) for column, dtype in dtypes_of(type(table)).items()}
            for name, table in tables.items()
            if name not in _MAY_BE_MISSING or len(table.start_ns)
        },
    )
    return MAGIC + zlib.compress(msgspec.msgpack.encode(file), _LEVEL)


def reduce_file(trace: Path, target: Path) -> bool:
    """Write the reduced form of one trace file to ``target``; return False for an unreadable trace.

    Raises OSError where ``target`` cannot be written.
    """
    try:
        full_trace = read_trace(trace)
    except RingprofError:
        return False
    # Keep the name only: the reduced file lies next to its trace, wherever both are moved.
    target.write_bytes(reduce_trace(msgspec.structs.replace(full_trace, path=trace.name)))
    return True


def read_reduced(path: str | os.PathLike[str], budget: MemoryBudget | None = None) -> Trace:
    """Read a reduced trace; its ``path`` is set to this file. Raises `InputError`, `TraceFormatError`."""
    name = os.fspath(path)
    budget = budget or MemoryBudget()
    return parse_reduced(read_whole(name, budget.limits), name, budget)


def parse_reduced(data: bytes, name: str | None = None, budget: MemoryBudget | None = None) -> Trace:
    """Parse the bytes of a reduced trace. Without ``name``, the trace keeps the path of its original.

    Raises `TraceFormatError`, `MemoryLimitError`.
    """
    shown_name, budget = name or "reduced trace", budget or MemoryBudget()
    if not data.startswith(MAGIC):
        raise TraceFormatError(
            f"{shown_name}: not a reduced trace of this version: remove it, and the trace itself is read"
        )
    try:
        file = msgspec.msgpack.decode(_decompress(data, shown_name, budget), type=_File)
        trace = _trace(file, name or file.path, lambda size: budget.take(size, shown_name))
    except (*UNREADABLE, zlib.error, LookupError, OverflowError) as error:
        raise TraceFormatError(
            f"{shown_name}: damaged reduced trace ({reason(error)}): remove it, and the trace itself is read"
        ) from None
    return take_analysis(validate_trace(trace), budget)


def _decompress(data: bytes, name: str, budget: MemoryBudget) -> bytes:
    """Decompress the MessagePack.

    The result is limited to a third of the memory left: decoding it takes about three times its size.
    """
    limit = min(budget.limits.expanded_bytes, budget.left // 3)
    inflater = zlib.decompressobj()
    expanded = inflater.decompress(memoryview(data)[len(MAGIC) :], limit + 1)
    if len(expanded) > budget.limits.expanded_bytes:
        raise TraceFormatError(f"{name}: expands beyond {limit:,} bytes: raise the limit with --max-bytes")
    if len(expanded) > limit:
        budget.take(3 * len(expanded), name)
    if not inflater.eof:
        raise ValueError("cut off")
    return expanded


def _trace(file: _File, path: str, take: Callable[[int], None]) -> Trace:
    """Build the trace from a decoded file; ``take`` charges bytes to the memory budget before they are allocated."""
    for table, columns in file.columns.items():
        take(bytes_of_rows(table, len(columns["start_ns"]) // 8))
    take(bytes_of_collectives(len(file.collectives)))
    lists = list(_lists(file.lists, take))
    groups = zip(_texts(file.group_names, take), _numbers(file.group_lists).tolist(), strict=True)
    return Trace(
        **{name: getattr(file, name) for name in _METADATA},
        path=path,
        warnings=file.warnings,
        names=list(_texts(file.names, take)),
        groups={name: _list_at(lists, index) for name, index in groups},
        collectives=[
            CommRecord(**{
                **stored,
                "group_ranks": None if stored["group_ranks"] is None else _list_at(lists, stored["group_ranks"]),
                "in_split": _list_at(lists, stored["in_split"]),
                "out_split": _list_at(lists, stored["out_split"]),
            })
            for stored in map(msgspec.structs.asdict, file.collectives)
        ],
        **{
            table: kind(**{name: _column(file.columns[table][name], dtype) for name, dtype in dtypes_of(kind).items()})
            for table, kind in TABLES.items()
            if table not in _MAY_BE_MISSING or table in file.columns
        },
    )  # fmt: skip


# --- columns, texts and lists -------------------------------------------------------------------------


def _stored(values: Any, dtype: type[Any] = np.int64) -> memoryview:
    return memoryview(np.ascontiguousarray(values, np.dtype(dtype).newbyteorder("<")).tobytes())


def _column(stored: memoryview, dtype: type[Any] = np.int64) -> Any:
    # `astype` copies: an array over bytes would be read-only.
    return np.frombuffer(stored, np.dtype(dtype).newbyteorder("<")).astype(dtype)


def _numbers(stored: memoryview) -> Int64:
    numbers: Int64 = _column(stored)
    return numbers


def _texts_stored(texts: Iterable[str]) -> _Ragged:
    # Replace lone surrogates, which UTF-8 cannot encode.
    encoded = [text.encode("utf-8", "replace") for text in texts]
    return _Ragged(_stored([len(text) for text in encoded]), memoryview(b"".join(encoded)))


def _texts(ragged: _Ragged, take: Callable[[int], None]) -> Iterator[str]:
    for start, end in _bounds(ragged, len(ragged.data)):
        text = str(ragged.data[start:end], "utf-8")
        take(bytes_of_text(text))
        yield text


def _lists(ragged: _Ragged, take: Callable[[int], None]) -> Iterator[tuple[int, ...]]:
    numbers = _numbers(ragged.data)
    for start, end in _bounds(ragged, len(numbers)):
        take(bytes_of_list(end - start))
        yield tuple(numbers[start:end].tolist())


def _bounds(ragged: _Ragged, count: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each sequence; raise ValueError if they do not cover ``count`` items exactly."""
    sizes = _numbers(ragged.sizes)
    if len(sizes) and not (0 <= sizes.min() and sizes.max() <= count and sizes.sum() == count):
        raise ValueError("invalid sizes")
    ends = np.cumsum(sizes)
    yield from zip((ends - sizes).tolist(), ends.tolist(), strict=True)


def _list_at(lists: Sequence[tuple[int, ...]], index: int) -> tuple[int, ...]:
    if index < 0:
        raise ValueError("an index out of range")
    return lists[index]
