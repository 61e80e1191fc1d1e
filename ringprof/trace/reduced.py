"""A reduced trace: one rank's trace as the columns that the analysis reads, a fraction of its size and quick to read.

A line that names the format, then one zlib stream of MessagePack: the fields of `Trace`, columns as little-endian
integers, texts and lists of numbers end to end with their sizes. Nothing is left out that the analysis looks at: what
it says of a reduced trace is what it says of the trace. A file from a stranger can do no harm: it holds numbers and
names, every index is checked, and what it needs of memory is counted before it is there, by the figures that the
trace itself was counted by (`ringprof.trace.memory`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from ringprof.decoding import UNREADABLE, reason
from ringprof.errors import RingprofError, TraceFormatError
from ringprof.files import read_whole
from ringprof.limits import MemoryBudget
from ringprof.trace.checks import refuse_unsound
from ringprof.trace.columns import NONE, TABLES, CommRecord, Device, Int64, Notice, Trace, dtypes_of
from ringprof.trace.kineto import read_trace
from ringprof.trace.kineto.fields import MOST_DEVICES
from ringprof.trace.memory import bytes_of_collectives, bytes_of_list, bytes_of_rows, bytes_of_text, take_analysis

MAGIC = b"ringprof.trace/4\n"
BEFORE = b"ringprof.trace/3\n"
"""Begins files of before host events were kept: read where the trace itself is not there."""
SUFFIX = ".ringprof"

_LEVEL = 4
_MOST_WARNINGS = 1 << 10
_FEW = msgspec.Meta(max_length=16)


class _Ragged(msgspec.Struct, frozen=True):
    """Sequences of unequal length."""

    sizes: memoryview
    data: memoryview


class _Record(msgspec.Struct, frozen=True):
    """A `CommRecord`; its lists by their places among all lists."""

    name: str
    group: str | None
    group_description: str | None
    group_ranks: int | None
    group_size: int | None
    in_elements: int | None
    out_elements: int | None
    dtype: str | None
    source_rank: int | None
    destination_rank: int | None
    in_split: int
    out_split: int
    sequence: int | None
    comms_id: int | None


class _File(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    rank: int | None
    world_size: int | None
    host: str | None
    base_ns: int
    events_total: int
    events_skipped: int
    devices: Annotated[list[Device], msgspec.Meta(max_length=MOST_DEVICES)]
    warnings: Annotated[list[Notice], msgspec.Meta(max_length=_MOST_WARNINGS)]
    names: _Ragged
    lists: _Ragged
    group_names: _Ragged
    group_lists: memoryview
    """Place of each group's ranks among the lists."""
    collectives: list[_Record]
    columns: Annotated[
        dict[str, Annotated[dict[str, memoryview], msgspec.Meta(max_length=16)]], msgspec.Meta(max_length=16)
    ]


_MAY_BE_MISSING = frozenset({"memory", "host_events", "flop_records"})
"""Tables that are there where they have rows: older files have none."""
_COLUMNS_MAY_BE_MISSING = frozenset({"target_device"})
"""Columns that older files do not have: `NONE` stands in them."""
_PLAIN = ("rank", "world_size", "host", "base_ns", "events_total", "events_skipped", "devices")


def reduce_trace(trace: Trace) -> bytes:
    """The file's bytes; ``trace.path`` is kept for messages."""
    lists: dict[tuple[int, ...], int] = {}

    def place(numbers: tuple[int, ...]) -> int:
        return lists.setdefault(numbers, len(lists))

    records = [
        _Record(**{
            **msgspec.structs.asdict(one),
            "group_ranks": None if one.group_ranks is None else place(one.group_ranks),
            "in_split": place(one.in_split),
            "out_split": place(one.out_split),
        })
        for one in trace.collectives
    ]  # fmt: skip
    file = _File(
        **{name: getattr(trace, name) for name in _PLAIN},
        path=trace.path.encode("utf-8", "replace").decode(),
        warnings=trace.warnings[:_MOST_WARNINGS],
        names=_texts_stored(trace.names),
        group_names=_texts_stored(trace.groups),
        group_lists=_stored([place(ranks) for ranks in trace.groups.values()]),
        collectives=records,
        lists=_Ragged(_stored([len(one) for one in lists]), _stored([number for one in lists for number in one])),
        columns={
            table: {
                name: _stored(getattr(getattr(trace, table), name), dtype) for name, dtype in dtypes_of(kind).items()
            }
            for table, kind in TABLES.items()
            if table not in _MAY_BE_MISSING or len(getattr(trace, table).start_ns)
        },
    )
    return MAGIC + zlib.compress(msgspec.msgpack.encode(file), _LEVEL)


def reduce_file(trace: Path, target: Path) -> bool:
    """Write the reduced form of a rank's own trace; False where the trace cannot be read. Raises OSError."""
    try:
        read = read_trace(trace)
    except RingprofError:
        return False
    # Beside it: whoever reads it knows where it lies.
    target.write_bytes(reduce_trace(msgspec.structs.replace(read, path=trace.name)))
    return True


def read_reduced(path: str | os.PathLike[str], budget: MemoryBudget | None = None) -> Trace:
    """Read a reduced trace; its ``path`` becomes this file's. Raises `InputError`, `TraceFormatError`."""
    name = os.fspath(path)
    budget = budget or MemoryBudget()
    return parse_reduced(read_whole(name, budget.limits), name, budget)


def parse_reduced(data: bytes, name: str | None = None, budget: MemoryBudget | None = None) -> Trace:
    """As `read_reduced`, from a file's bytes; without ``name`` the trace keeps the path that it was reduced from."""
    shown, budget = name or "reduced trace", budget or MemoryBudget()
    if not data.startswith((MAGIC, BEFORE)):
        raise TraceFormatError(f"{shown}: not a reduced trace of this version: remove it, and the trace itself is read")
    try:
        file = msgspec.msgpack.decode(_expanded(data, shown, budget), type=_File)
        trace = _trace(file, name or file.path, lambda size: budget.take(size, shown))
    except (*UNREADABLE, zlib.error, LookupError, OverflowError) as error:
        raise TraceFormatError(
            f"{shown}: damaged reduced trace ({reason(error)}): remove it, and the trace itself is read"
        ) from None
    if data.startswith(BEFORE):
        trace = msgspec.structs.replace(trace, warnings=[*trace.warnings, Notice("host_events_not_kept", _NOT_KEPT)])
    return take_analysis(refuse_unsound(trace), budget)


_NOT_KEPT = (
    "a reduced trace of an older version does not hold what the host did while the GPU was idle: put the trace itself "
    "beside it to see that"
)


def _expanded(data: bytes, shown: str, budget: MemoryBudget) -> bytes:
    """The MessagePack; what it holds is counted as three times as much, so a third of the limit is enough for it."""
    most = min(budget.limits.expanded_bytes, budget.left // 3)
    inflater = zlib.decompressobj()
    expanded = inflater.decompress(memoryview(data)[len(MAGIC) :], most + 1)
    if len(expanded) > budget.limits.expanded_bytes:
        raise TraceFormatError(f"{shown}: expands beyond {most:,} bytes: raise the limit with --max-bytes")
    if len(expanded) > most:
        budget.take(3 * len(expanded), shown)
    if not inflater.eof:
        raise ValueError("cut off")
    return expanded


def _trace(file: _File, path: str, take: Callable[[int], None]) -> Trace:
    for table, columns in file.columns.items():
        take(bytes_of_rows(table, len(columns["start_ns"]) // 8))
    take(bytes_of_collectives(len(file.collectives)))
    lists = list(_lists(file.lists, take))
    groups = zip(_texts(file.group_names, take), _numbers(file.group_lists).tolist(), strict=True)
    return Trace(
        **{name: getattr(file, name) for name in _PLAIN},
        path=path,
        warnings=file.warnings,
        names=list(_texts(file.names, take)),
        groups={name: _at(lists, place) for name, place in groups},
        collectives=[
            CommRecord(**{
                **msgspec.structs.asdict(one),
                "group_ranks": None if one.group_ranks is None else _at(lists, one.group_ranks),
                "in_split": _at(lists, one.in_split),
                "out_split": _at(lists, one.out_split),
            })
            for one in file.collectives
        ],
        **{
            table: _table(kind, file.columns[table])
            for table, kind in TABLES.items()
            if table not in _MAY_BE_MISSING or table in file.columns
        },
    )  # fmt: skip


def _table(kind: type[Any], columns: Mapping[str, memoryview]) -> Any:
    """One table of a `Trace` from its stored columns. Raises KeyError where a column is not there that must be."""
    count = len(columns["start_ns"]) // 8
    return kind(
        **{
            name: np.full(count, NONE, dtype)
            if name in _COLUMNS_MAY_BE_MISSING and name not in columns
            else _column(columns[name], dtype)
            for name, dtype in dtypes_of(kind).items()
        }
    )


# --- columns, texts and lists -------------------------------------------------------------------------


def _stored(values: Any, dtype: type[Any] = np.int64) -> memoryview:
    return memoryview(np.ascontiguousarray(values, np.dtype(dtype).newbyteorder("<")).tobytes())


def _column(stored: memoryview, dtype: type[Any] = np.int64) -> Any:
    # As a copy: arrays over bytes cannot be written to.
    return np.frombuffer(stored, np.dtype(dtype).newbyteorder("<")).astype(dtype)


def _numbers(stored: memoryview) -> Int64:
    numbers: Int64 = _column(stored)
    return numbers


def _texts_stored(texts: Iterable[str]) -> _Ragged:
    # Lone surrogates, which no UTF-8 file can hold, are replaced.
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
    """Where each sequence begins and ends among so many items."""
    sizes = _numbers(ragged.sizes)
    if len(sizes) and not (0 <= sizes.min() and sizes.max() <= count and sizes.sum() == count):
        raise ValueError("sizes that cannot be")
    ends = np.cumsum(sizes)
    yield from zip((ends - sizes).tolist(), ends.tolist(), strict=True)


def _at(lists: Sequence[tuple[int, ...]], place: int) -> tuple[int, ...]:
    if place < 0:
        raise ValueError("an index out of range")
    return lists[place]
