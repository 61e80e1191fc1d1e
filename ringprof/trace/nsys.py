"""Nsight Systems exports (``nsys export --type sqlite``): their tables to the columns of a `Trace`.

An export holds all processes that were profiled together, so one file gives one trace a process that used a GPU.
Times in it count from the start of the session. Of process groups, peers and bytes of NCCL kernels it says what NCCL
told NVTX (`ringprof.trace.nccl_payloads`).

An export may come from a stranger, and a database can hold programs: only rows of plain tables are read, one table
after the other from its first row to its last, and the work that SQLite may do grows with the size of the file.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringprof.errors import InputError, TraceFormatError
from ringprof.limits import MemoryBudget
from ringprof.trace.checks import LARGEST_NS, overlaps, refuse_unsound
from ringprof.trace.columns import (
    KERNEL,
    MEMCPY,
    MEMSET,
    NONE,
    OPERATOR,
    RANGE,
    RUNTIME_CALL,
    TABLES,
    CommRecord,
    Device,
    Int64,
    Notice,
    Trace,
    among,
    distinct,
    table_of,
)
from ringprof.trace.host_events import rows_in_idle
from ringprof.trace.memory import bytes_of_collectives, bytes_of_text, take_analysis
from ringprof.trace.nccl_payloads import (
    LONGEST_PAYLOAD,
    CommunicatorPlaces,
    Layouts,
    NcclCall,
    add_entries,
    decode,
    nccl_call,
    record_of_call,
)
from ringprof.trace.one_run import rank_in_name

_KERNELS, _COPIES, _SETS = (f"CUPTI_ACTIVITY_KIND_{what}" for what in ("KERNEL", "MEMCPY", "MEMSET"))
_CALLS, _MARKS, _STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
_START, _DEVICES, _SYSTEM = "TARGET_INFO_SESSION_START_TIME", "TARGET_INFO_GPU", "TARGET_INFO_SYSTEM_ENV"
_FIELDS = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
_READ = {_KERNELS, _COPIES, _SETS, _CALLS, _MARKS, _STRINGS, _START, _DEVICES, _SYSTEM, _FIELDS}
# Our columns and Nsight's.
_TIMES = {"start_ns": "start", "end_ns": "end"}
_ACTIVITY = {
    **_TIMES, "device": "deviceId", "stream": "streamId", "correlation": "correlationId", "process": "globalPid",
    "graph_node": "graphNodeId",
}  # fmt: skip
# Of Nsight's ENUM_CUDA_MEMCPY_OPER, in the words that Kineto uses.
_COPY_NAMES = {
    1: "Memcpy HtoD", 2: "Memcpy DtoH", 3: "Memcpy HtoA", 4: "Memcpy AtoH", 5: "Memcpy AtoA", 6: "Memcpy AtoD",
    7: "Memcpy DtoA", 8: "Memcpy DtoD", 9: "Memcpy HtoH", 10: "Memcpy PtoP",
}  # fmt: skip
# The process is all of a thread's number but its last 24 bits.
_THREAD_BITS = 24
# What autograd's emit_nvtx writes: the operator, then its sequence number and identity.
_OPERATOR = re.compile(r"(\w+::\w+)(, (seq|op_id) = .*)?")
# Nsight names the version of a call's interface: cudaLaunchKernel_v7000.
_VERSION = re.compile(r"_v[0-9]+(_ptsz)?$")
# The length of bytes is known without reading them: those of a payload too long for NCCL's are never in memory.
_SHORT = f"""CASE WHEN typeof("{{0}}") = 'blob' AND length("{{0}}") > {LONGEST_PAYLOAD} THEN NULL ELSE "{{0}}" END"""

MOST_PROCESSES = 1 << 10
"""No host runs more on its GPUs at once: each becomes a rank of a report."""
_ROWS_AT_ONCE = 1 << 14
_IN_MEMORY = 6  # of a row that are there at once: as it came, among all, as they are sorted, and as its process's
_LONGEST_VALUE = 1 << 20
_LIMIT_LENGTH = 0  # sqlite3.SQLITE_LIMIT_LENGTH, which Python has from 3.11 on
_STEPS_BETWEEN, _STEPS_FREE, _STEPS_PER_BYTE = 10_000, 10_000_000, 8
"""SQLite may carry out so many steps of its own, and so many more a byte of the file: rows take two or three a byte."""

_Rows = dict[str, Int64]
"""Columns of one table, of equal length."""


def read_nsys(path: str | os.PathLike[str], budget: MemoryBudget | None = None) -> list[Trace]:
    """Read an export: one trace a process, by device.

    Raises `InputError` where the file cannot be opened, `TraceFormatError` where it is no export of Nsight Systems or
    holds no GPU activity.
    """
    name = os.fspath(path)
    file = Path(name)
    if not file.is_file():
        raise InputError(f"{name}: no such file")
    for journal in (Path(f"{name}-wal"), Path(f"{name}-journal")):
        if journal.is_file() and journal.stat().st_size:
            raise InputError(f"{name}: changes to it wait in {journal.name}: let the program that writes it end first")
    try:
        # The file is not written to, not even a journal beside it.
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            export = _Export(name, connection, file.stat().st_size, budget or MemoryBudget())
            return [take_analysis(refuse_unsound(trace), export.budget) for trace in _traces(export)]
    except (sqlite3.Error, OverflowError) as error:
        raise TraceFormatError(f"{name}: damaged SQLite file ({error}): export it again") from None


class _Export:
    """An open export, and the names seen so far."""

    def __init__(self, path: str, connection: sqlite3.Connection, size: int, budget: MemoryBudget) -> None:
        self.path, self.budget = path, budget
        self.names: dict[str, int] = {}
        self.skipped = self.total = self.unnamed = 0
        self._connection = connection
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        # No function of Python's: what a signal raises in one is lost. The iterator's end stops SQLite.
        turns = (_STEPS_FREE + _STEPS_PER_BYTE * size) // _STEPS_BETWEEN
        connection.set_progress_handler(repeat(0, turns).__next__, _STEPS_BETWEEN)
        if hasattr(connection, "setlimit"):  # Python 3.11
            connection.setlimit(_LIMIT_LENGTH, _LONGEST_VALUE)
        # Views and virtual tables have no first page; columns that are computed are not in the list of columns.
        named = connection.execute(
            "SELECT name, rootpage FROM sqlite_master WHERE type IN ('table', 'view')"
        ).fetchall()
        pages = {name: page for name, page in named if name in _READ}
        for name, page in pages.items():
            if not page:
                raise TraceFormatError(f"{path}: {name} is no plain table: export it again with nsys")
        self._present = {name: {row[1] for row in connection.execute(f"PRAGMA table_info({name})")} for name in pages}
        connection.set_authorizer(self._allow)

    def _allow(self, action: int, table: str | None, name: str | None, database: str | None, by: str | None) -> int:
        plain = action == sqlite3.SQLITE_SELECT or (action == sqlite3.SQLITE_READ and table in self._present)
        called = action == sqlite3.SQLITE_FUNCTION and name in ("typeof", "length")
        return sqlite3.SQLITE_OK if (plain or called) and by is None else sqlite3.SQLITE_DENY

    def has(self, table: str) -> bool:
        """Whether there is such a table."""
        return table in self._present

    def select(
        self, table: str, wanted: Iterable[str], term: str = '"{}"', absent: str = "NULL"
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Columns of all rows, in the order of the file and some rows at a time; ``absent`` where there is no column.

        Tables and columns are named by this module, never by the file.
        """
        if table in self._present:
            terms = (term.format(column) if column in self._present[table] else absent for column in wanted)
            cursor = self._connection.execute(f"SELECT {', '.join(terms)} FROM {table} NOT INDEXED")  # nosec B608
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                yield rows

    def whole(self, table: str, wanted: Mapping[str, str]) -> _Rows:
        """Columns of whole numbers, by our names; `NONE` where there is none. Rows without times are left out."""
        term = f"""CASE typeof("{{0}}") WHEN 'integer' THEN "{{0}}" ELSE {NONE} END"""
        chunks = (np.array(rows, np.int64) for rows in self.select(table, wanted.values(), term, str(NONE)))
        return self.timed(self.joined(wanted, chunks))

    def joined(self, names: Iterable[str], chunks: Iterable[Int64]) -> _Rows:
        """Columns of these names, from arrays of a row each; counted before the next is read."""
        found = [np.empty((0, len(tuple(names))), np.int64)]
        for chunk in chunks:
            self.budget.take(_IN_MEMORY * chunk.nbytes, self.path)
            found.append(chunk)
        return dict(zip(names, np.concatenate(found).T, strict=True))

    def timed(self, rows: _Rows) -> _Rows:
        """The rows whose times can be; the others are counted."""
        sound = np.ones(len(rows["start_ns"]), np.bool_)
        for time in (rows["start_ns"], rows["end_ns"]):
            sound &= (time != NONE) & (time > -LARGEST_NS) & (time < LARGEST_NS)
        self.total += len(sound)
        self.skipped += int(np.count_nonzero(~sound))
        return _of(rows, sound)

    def number(self, name: str) -> int:
        """Index of a name."""
        if name not in self.names:
            self.budget.take(bytes_of_text(name), self.path)
            self.names[name] = len(self.names)
        return self.names[name]

    def texts(self, wanted: Int64) -> dict[int, str]:
        """Those of Nsight's strings that have the wanted numbers."""
        numbers = set(wanted.tolist())
        found = {}
        for rows in self.select(_STRINGS, ("id", "value")):
            for key, text in rows:
                if key in numbers and isinstance(text, str):
                    found[key] = text
                    self.budget.take(bytes_of_text(found[key]), self.path)
        return found


# --- from tables to traces ----------------------------------------------------------------------------


def _traces(export: _Export) -> list[Trace]:
    if not export.has(_STRINGS) and not export.has(_KERNELS):
        what = "an SQLite file, but no export of Nsight Systems: make one with nsys export --type sqlite"
        raise TraceFormatError(f"{export.path}: {what}")
    done = _by_process(_activities(export), "process")
    if not done:
        raise TraceFormatError(f"{export.path}: the export holds no GPU activity: profile with nsys --trace cuda,nvtx")
    if len(done) > MOST_PROCESSES:
        raise TraceFormatError(
            f"{export.path}: {len(done):,} processes used a GPU: no export has over {MOST_PROCESSES:,}"
        )
    calls = _by_process(_runtime_calls(export))
    marks = _by_process(_marks(export))
    base, host, devices = _base_ns(export), _host(export), _devices(export)
    rank = rank_in_name(export.path) if len(done) == 1 else None
    calls_told, told = _nccl_calls(export)
    members = _members(calls_told, told)
    order = _in_order(done, members)
    number = {process: at if rank is None else rank for at, process in enumerate(order)}
    ranks = {
        communicator: tuple(number[process] for process in processes)
        for communicator, processes in members.items()
        if all(process in number for process in processes)
    }
    rows_of = _by_process(calls_told)
    records = {one: _records(export, rows_of[one], told, ranks) if one in rows_of else ({}, []) for one in order}
    traces = [
        Trace(
            path=export.path,
            names=list(export.names),
            **_tables(done[process], calls.get(process), marks.get(process), records[process][0], base),
            collectives=records[process][1],
            devices=devices,
            rank=rank,
            world_size=len(done) if len(done) > 1 else None,
            host=host,
            groups={},
            base_ns=base,
            events_total=export.total,
            events_skipped=export.skipped,
        )
        for process in order
    ]
    for trace in traces:
        trace.warnings.extend(overlaps(trace.activities, rank))
    if export.skipped:
        message = f"{export.skipped} rows without times were left out"
        traces[0].warnings.append(Notice("damaged_events", message, None, export.skipped))
    if export.unnamed:
        message = f"{export.unnamed} kernels have no name in the export: what they do is not known"
        traces[0].warnings.append(Notice("unnamed_kernels", message, None, export.unnamed))
    return traces


def _activities(export: _Export) -> _Rows:
    """Kernels, copies and sets of all processes, each with the index of its name."""
    kernels = export.whole(_KERNELS, {**_ACTIVITY, "text": "demangledName", "short": "shortName"})
    copies = export.whole(_COPIES, {**_ACTIVITY, "size_bytes": "bytes", "kind": "copyKind"})
    sets = export.whole(_SETS, {**_ACTIVITY, "size_bytes": "bytes"})
    text = np.where(kernels["text"] != NONE, kernels["text"], kernels["short"])
    texts = export.texts(text)
    export.unnamed = int(np.count_nonzero(~among(text, np.array(list(texts), np.int64))))
    kernels["name"] = _each(text, lambda key: export.number(texts.get(key, "unknown kernel")))
    kernels["size_bytes"] = np.full(len(text), NONE, np.int64)
    copies["name"] = _each(copies["kind"], lambda kind: export.number(_COPY_NAMES.get(kind, "Memcpy")))
    sets["name"] = _each(np.zeros(len(sets["start_ns"]), np.int64), lambda _: export.number("Memset"))
    for table, category in ((kernels, KERNEL), (copies, MEMCPY), (sets, MEMSET)):
        table["category"] = np.full(len(table["start_ns"]), category, np.int64)
    columns = (*_ACTIVITY, "size_bytes", "name", "category")
    joined = {column: np.concatenate([table[column] for table in (kernels, copies, sets)]) for column in columns}
    for narrow in ("device", "stream"):
        joined[narrow][abs(joined[narrow]) >= 1 << 31] = NONE
    return joined


def _runtime_calls(export: _Export) -> _Rows:
    """Calls of the CUDA runtime and driver, each with the index of its name without the version that ends it."""
    wanted = {**_TIMES, "thread": "globalTid", "correlation": "correlationId", "text": "nameId"}
    rows = export.whole(_CALLS, wanted)
    texts = export.texts(distinct(rows["text"]))
    rows["name"] = _each(rows["text"], lambda key: export.number(_VERSION.sub("", texts.get(key, "CUDA call"))))
    return rows


def _each(keys: Int64, answer: Callable[[int], int]) -> Int64:
    """``answer`` of each key, asked once for every distinct one."""
    distinct, place = np.unique(keys, return_inverse=True)
    return np.array([answer(key) for key in distinct.tolist()], np.int64)[place.ravel()]


def _marks(export: _Export) -> _Rows:
    """NVTX ranges; ``operator`` is 1 for those that stand for a PyTorch operator."""

    def named(rows: list[tuple[Any, ...]]) -> Int64:
        # Marks without an end are moments, not ranges.
        ranges = (row for row in rows if all(isinstance(number, int) for number in row[:3]))
        return np.array(
            [
                (*times, key if isinstance(key, int) else NONE, NONE if own is None else _mark(export, str(own)))
                for *times, key, own in ranges
            ],
            np.int64,
        ).reshape(-1, 5)

    chunks = map(named, export.select(_MARKS, ("start", "end", "globalTid", "textId", "text")))
    rows = export.joined(("start_ns", "end_ns", "thread", "text", "mark"), chunks)
    unnamed = rows["mark"] == NONE
    marks = {key: _mark(export, text) for key, text in export.texts(rows["text"][unnamed]).items()}
    rows["mark"][unnamed] = _each(rows["text"][unnamed], lambda key: marks.get(key, NONE))
    rows = export.timed(_of(rows, rows["mark"] != NONE))
    return {**rows, "name": rows["mark"] >> 1, "operator": rows["mark"] & 1}


def _mark(export: _Export, text: str) -> int:
    """The number of a range's name, doubled; one more where it is the name of a PyTorch operator."""
    match = _OPERATOR.fullmatch(text)
    operator = match is not None and not text.startswith("ringprof::")
    return 2 * export.number(match[1] if match is not None and operator else text) + operator


def _nccl_calls(export: _Export) -> tuple[_Rows, list[NcclCall]]:
    """NCCL's calls that tell their communicator; ``call`` is an index into the different ones."""
    layouts: Layouts = {}
    for entries in export.select(_FIELDS, ("schemaId", "name", "type", "offset")):
        before = len(layouts)
        add_entries(layouts, entries)
        export.budget.take(bytes_of_collectives(len(layouts) - before), export.path)
    names = _nccl_names(export) if layouts else {}
    calls: dict[NcclCall, int] = {}

    def told(rows: list[tuple[Any, ...]]) -> Int64:
        before, found = len(calls), []
        for *times, key, own, data in rows:
            fields = decode(data, layouts)
            call = nccl_call(own if isinstance(own, str) else names.get(key, ""), fields) if fields else None
            if call is not None and all(isinstance(time, int) for time in times):
                found.append((*times, calls.setdefault(call, len(calls))))
        export.budget.take(bytes_of_collectives(len(calls) - before), export.path)
        return np.array(found, np.int64).reshape(-1, 4)

    chunks = export.select(_MARKS, ("start", "end", "globalTid", "textId", "text", "binaryData"), _SHORT)
    rows = export.joined(("start_ns", "end_ns", "thread", "call"), map(told, chunks if layouts else ()))
    # Rows without times have been counted as ranges.
    sound = (abs(rows["start_ns"]) < LARGEST_NS) & (abs(rows["end_ns"]) < LARGEST_NS)
    return _of(rows, sound), list(calls)


def _nccl_names(export: _Export) -> dict[int, str]:
    names = {}
    for rows in export.select(_STRINGS, ("id", "value")):
        for key, text in rows:
            if isinstance(text, str) and text.startswith("nccl"):
                names[key] = text
                export.budget.take(bytes_of_text(text), export.path)
    return names


def _members(rows: _Rows, calls: list[NcclCall]) -> dict[int, tuple[int, ...]]:
    """The processes of each communicator, by place."""
    communicators = CommunicatorPlaces()
    for process, mine in _by_process(rows).items():
        for number in distinct(mine["call"]).tolist():
            communicators.add(calls[number], process)
    return communicators.members()


def _in_order(done: Mapping[int, _Rows], members: Mapping[int, tuple[int, ...]]) -> list[int]:
    """The processes by their place in a communicator of them all, else by device."""
    whole = next((processes for processes in members.values() if set(processes) == set(done)), None)
    return list(whole) if whole else sorted(done, key=lambda process: (int(done[process]["device"][0]), process))


def _records(
    export: _Export, rows: _Rows, calls: list[NcclCall], ranks: Mapping[int, tuple[int, ...]]
) -> tuple[_Rows, list[CommRecord]]:
    """One process's communication records, of the communicators whose ranks are known."""
    records: dict[CommRecord, int] = {}
    index = np.full(len(calls), NONE, np.int64)
    for number in distinct(rows["call"]).tolist():
        call = calls[number]
        record = record_of_call(call, ranks[call.communicator]) if call.communicator in ranks else None
        if record is not None:
            index[number] = records.setdefault(record, len(records))
    export.budget.take(bytes_of_collectives(len(records)), export.path)
    rows = {**rows, "collective": index[rows["call"]]}
    return _of(rows, rows["collective"] != NONE), list(records)


def _of(rows: _Rows, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> _Rows:
    return {name: column[chosen] for name, column in rows.items()}


def _by_process(rows: _Rows, column: str = "thread") -> dict[int, _Rows]:
    """The rows of each process, by start."""
    process = (rows[column] >> _THREAD_BITS) << _THREAD_BITS if column == "thread" else rows[column]
    order = np.lexsort((rows["start_ns"], process))
    processes, begin = np.unique(process[order], return_index=True)
    parts = np.split(order, begin[1:]) if len(processes) else []
    return {number: _of(rows, part) for number, part in zip(processes.tolist(), parts, strict=True)}


def _tables(done: _Rows, calls: _Rows | None, marks: _Rows | None, records: _Rows, base: int) -> dict[str, Any]:
    """The tables of one process's trace."""
    parts: dict[str, _Rows] = {"activities": done}
    if records:
        parts["comm_records"] = records
    if calls:
        parts["launches"] = _of(calls, among(calls["correlation"], done["correlation"]))
    if marks:
        parts["annotations"] = _of(marks, marks["operator"] == 0)
        parts["operators"] = _of(marks, marks["operator"] == 1)
    for rows in parts.values():
        rows["start_ns"] = rows["start_ns"] + base
        rows["end_ns"] = np.maximum(rows["end_ns"] + base, rows["start_ns"])
    parts["host_events"] = _host_events(calls, marks, parts, base)
    return {table: table_of(kind, parts.get(table, {})) for table, kind in TABLES.items()}


def _host_events(calls: _Rows | None, marks: _Rows | None, parts: Mapping[str, _Rows], base: int) -> _Rows:
    """CUDA calls and ranges of one process that explain idle time, sorted by start; ``parts`` have ``base`` added."""
    if not calls:
        return {}
    category = np.full(len(calls["start_ns"]), RUNTIME_CALL, np.int64)
    tables = [{**calls, "category": category}]
    if marks:
        tables.append({**marks, "category": np.where(marks["operator"] == 1, OPERATOR, RANGE)})
    columns = ("start_ns", "end_ns", "name", "thread", "category")
    rows = {column: np.concatenate([table[column] for table in tables]) for column in columns}
    rows["start_ns"], rows["end_ns"] = rows["start_ns"] + base, rows["end_ns"] + base
    rows = _of(rows, np.argsort(rows["start_ns"], kind="stable"))
    return _of(rows, rows_in_idle(rows, parts["activities"], parts["launches"]) & (rows["end_ns"] > rows["start_ns"]))


# --- what the export says of the machine ----------------------------------------------------------------


def _base_ns(export: _Export) -> int:
    """Unix time of the session's start, 0 where the export does not give it."""
    given = [value for rows in export.select(_START, ("utcEpochNs",)) for (value,) in rows]
    return given[0] if given and isinstance(given[0], int) and 0 <= given[0] < LARGEST_NS else 0


def _devices(export: _Export) -> list[Device]:
    rows = [row for rows in export.select(_DEVICES, ("id", "name")) for row in rows]
    return [Device(index, str(name)) for index, name in rows if isinstance(index, int)]


def _host(export: _Export) -> str | None:
    rows = [row for rows in export.select(_SYSTEM, ("name", "value")) for row in rows]
    return next((str(value) for name, value in rows if str(name).lower() == "hostname" and value), None)
