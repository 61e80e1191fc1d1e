"""Reader of Nsight Systems exports (``nsys export --type sqlite``): converts their tables to the columns of a `Trace`.

An export holds all processes that were profiled together. One file therefore gives one trace per process that used a
GPU. Times count from the start of the session. Process groups, peers and bytes of NCCL kernels come from the NVTX
payloads of NCCL (`ringprof.trace.nccl_payloads`).

An export is untrusted, and a database can contain code (views, virtual tables). Only rows of plain tables are read, one
table after the other, each from first row to last. The work that SQLite may do is limited in proportion to the file
size.
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

from ringprof.common.limits import MemoryBudget
from ringprof.common.scratch import remove, scratch_folder
from ringprof.errors import InputError, TraceFormatError
from ringprof.trace.checks import LARGEST_NS, overlap_warnings, validate_trace
from ringprof.trace.columns import (
    KERNEL,
    MEMCPY,
    MEMSET,
    NONE,
    OPERATOR,
    PAGE_MIGRATION,
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
from ringprof.trace.kineto.byte_source import ByteSource, is_compressed
from ringprof.trace.memory import bytes_of_collectives, bytes_of_text, take_analysis
from ringprof.trace.nccl_payloads import (
    LONGEST_PAYLOAD,
    Layouts,
    NcclCall,
    add_entries,
    communicator_members,
    decode,
    nccl_call,
    record_of_call,
)
from ringprof.trace.one_run import rank_in_name

_KERNELS, _COPIES, _SETS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
_CALLS, _MARKS, _STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
_START, _DEVICES, _SYSTEM = "TARGET_INFO_SESSION_START_TIME", "TARGET_INFO_GPU", "TARGET_INFO_SYSTEM_ENV"
_FIELDS = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
_TABLES_READ = {_KERNELS, _COPIES, _SETS, _CALLS, _MARKS, _STRINGS, _START, _DEVICES, _SYSTEM, _FIELDS}
# Our column names and those of Nsight Systems.
_TIMES = {"start_ns": "start", "end_ns": "end"}
_ACTIVITY = {
    **_TIMES, "device": "deviceId", "stream": "streamId", "correlation": "correlationId", "process": "globalPid",
    "graph_node": "graphNodeId",
}  # fmt: skip
# ENUM_CUDA_MEMCPY_OPER of Nsight Systems, with the names that Kineto uses.
_COPY_NAMES = {
    1: "Memcpy HtoD", 2: "Memcpy DtoH", 3: "Memcpy HtoA", 4: "Memcpy AtoH", 5: "Memcpy AtoA", 6: "Memcpy AtoD",
    7: "Memcpy DtoA", 8: "Memcpy DtoD", 9: "Memcpy HtoH", 10: "Memcpy PtoP",
    11: f"{PAGE_MIGRATION} to the device", 12: f"{PAGE_MIGRATION} to the host",
}  # fmt: skip
# A globalTid is the process number followed by 24 bits for the thread.
_THREAD_BITS = 24
# Range names of autograd's emit_nvtx: the operator, then its sequence number and id.
_OPERATOR = re.compile(r"(\w+::\w+)(, (seq|op_id) = .*)?")
# Nsight Systems appends the version of the API: cudaLaunchKernel_v7000.
_VERSION = re.compile(r"_v[0-9]+(_ptsz)?$")
# SQLite knows the length of a blob without reading it: payloads too long to be NCCL's are never loaded.
_SHORT = f"""CASE WHEN typeof("{{0}}") = 'blob' AND length("{{0}}") > {LONGEST_PAYLOAD} THEN NULL ELSE "{{0}}" END"""

MOST_PROCESSES = 1 << 10
"""Upper bound on the processes of one host that use a GPU. Each becomes a rank of a report."""
_ROWS_AT_ONCE = 1 << 14
_COPIES_PER_ROW = 6  # in memory at once: as read, joined with all rows, sorted, and split by process
_LONGEST_VALUE = 1 << 20
_STEPS_BETWEEN, _STEPS_FREE, _STEPS_PER_BYTE = 10_000, 10_000_000, 8
"""Limit on SQLite virtual machine steps: steps between two checks, steps allowed in any case, and steps per byte of the
file. Reading rows takes two or three steps per byte."""

_Rows = dict[str, Int64]
"""Columns of one table by name; all have equal length."""


def read_nsys(path: str | os.PathLike[str], budget: MemoryBudget | None = None) -> list[Trace]:
    """Read an export, plain or compressed with gzip or zstd.

    Returns one trace per process, in the order of ranks if the export tells it, else of devices.

    Raises `InputError` if the file cannot be opened, `TraceFormatError` if it is not an export of Nsight Systems or
    holds no GPU activity.
    """
    name = os.fspath(path)
    file = Path(name)
    if not file.is_file():
        raise InputError(f"{name}: no such file")
    for journal in (Path(f"{name}-wal"), Path(f"{name}-journal")):
        if journal.is_file() and journal.stat().st_size:
            raise InputError(f"{name}: changes to it wait in {journal.name}: let the program that writes it end first")
    budget = budget or MemoryBudget()
    with file.open("rb") as stream:
        compressed = is_compressed(stream.read(4))
    folder = scratch_folder("nsys") if compressed else None
    try:
        if folder is not None:
            file = folder / "expanded.sqlite"
            _expand(name, file, budget.limits.expanded_bytes)
        # Open the file read-only, without even a journal next to it.
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            export = _Export(name, connection, file.stat().st_size, budget)
            return [take_analysis(validate_trace(trace), budget) for trace in _traces(export)]
    except (sqlite3.Error, OverflowError) as error:
        raise TraceFormatError(f"{name}: damaged SQLite file ({error}): export it again") from None
    finally:
        if folder is not None:
            remove(folder)


def _expand(name: str, file: Path, limit_bytes: int) -> None:
    """Write the content of the compressed export ``name`` to a file.

    Raises `InputError` beyond the limit and where the disk is full, `TraceFormatError` for damaged data.
    """
    source = ByteSource(name, name, limit_bytes)
    try:
        with file.open("wb") as expanded:
            expanded.writelines(source)
    except OSError as error:
        raise InputError(f"{name}: cannot be expanded in the folder that TMPDIR names: {error.strerror}") from None
    if source.damage:
        raise TraceFormatError(f"{name}: {source.damage}: copy the file again")


class _Export:
    """Open export: reads its tables, counts skipped rows, and collects the names of the trace."""

    def __init__(self, path: str, connection: sqlite3.Connection, size: int, budget: MemoryBudget) -> None:
        self.path, self.budget = path, budget
        self.names: dict[str, int] = {}
        self.skipped = self.total = self.unnamed = 0
        self._connection, self._size, self._text_left = connection, size, size
        connection.text_factory = self._text
        # Use a C iterator, whose end stops SQLite. An exception from a signal in a Python callback is lost.
        checks = (_STEPS_FREE + _STEPS_PER_BYTE * size) // _STEPS_BETWEEN
        connection.set_progress_handler(repeat(0, checks).__next__, _STEPS_BETWEEN)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        # Views and virtual tables have no root page. Computed columns do not appear in `table_info`.
        tables = connection.execute("SELECT name, rootpage FROM sqlite_master WHERE type IN ('table', 'view')")
        pages = {name: page for name, page in tables.fetchall() if name in _TABLES_READ}
        for name, page in pages.items():
            if not page:
                raise TraceFormatError(f"{path}: {name} is no plain table: export it again with nsys")
        self._present = {name: {row[1] for row in connection.execute(f"PRAGMA table_info({name})")} for name in pages}
        connection.set_authorizer(self._allow)

    def _allow(
        self, action: int, table: str | None, name: str | None, database: str | None, trigger_or_view: str | None
    ) -> int:
        reads_table = action == sqlite3.SQLITE_SELECT or (action == sqlite3.SQLITE_READ and table in self._present)
        calls_allowed_function = action == sqlite3.SQLITE_FUNCTION and name in ("typeof", "length")
        allowed = (reads_table or calls_allowed_function) and trigger_or_view is None
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    def _text(self, data: bytes) -> str:
        self._text_left -= len(data)
        if self._text_left < 0:
            raise TraceFormatError(f"{self.path}: damaged SQLite file (rows share their text): export it again")
        return data.decode("utf-8", "replace")

    def has(self, table: str) -> bool:
        """Return whether the export has a table."""
        return table in self._present

    def select(
        self, table: str, wanted: Iterable[str], term: str = '"{}"', absent: str = "NULL"
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the wanted columns of all rows in file order, in chunks of rows; ``absent`` replaces a missing column.

        Table and column names come from this module, never from the file.
        """
        if table in self._present:
            self._text_left = 2 * self._size  # A file has a byte or more for each two of its text in UTF-8.
            terms = (term.format(column) if column in self._present[table] else absent for column in wanted)
            cursor = self._connection.execute(f"SELECT {', '.join(terms)} FROM {table} NOT INDEXED")  # nosec B608
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                yield rows

    def integer_columns(self, table: str, wanted: Mapping[str, str]) -> _Rows:
        """Read integer columns by our names; `NONE` where a value is no integer. Rows without times are dropped."""
        term = f"""CASE typeof("{{0}}") WHEN 'integer' THEN "{{0}}" ELSE {NONE} END"""
        chunks = (np.array(rows, np.int64) for rows in self.select(table, wanted.values(), term, str(NONE)))
        return self.with_valid_times(self.join_chunks(wanted, chunks))

    def join_chunks(self, names: Iterable[str], chunks: Iterable[Int64]) -> _Rows:
        """Join 2-D arrays of rows into named columns. Each chunk is charged to the budget before the next is read."""
        arrays = [np.empty((0, len(tuple(names))), np.int64)]
        for chunk in chunks:
            self.budget.take(_COPIES_PER_ROW * chunk.nbytes, self.path)
            arrays.append(chunk)
        return dict(zip(names, np.concatenate(arrays).T, strict=True))

    def with_valid_times(self, rows: _Rows) -> _Rows:
        """Return the rows with plausible times, and count the others as skipped."""
        valid = np.ones(len(rows["start_ns"]), np.bool_)
        for time in (rows["start_ns"], rows["end_ns"]):
            valid &= (time != NONE) & (time > -LARGEST_NS) & (time < LARGEST_NS)
        self.total += len(valid)
        self.skipped += int(np.count_nonzero(~valid))
        return _select(rows, valid)

    def name_index(self, name: str) -> int:
        """Return the index of a name in the trace's names; add the name if it is new."""
        if name not in self.names:
            self.budget.take(bytes_of_text(name), self.path)
            self.names[name] = len(self.names)
        return self.names[name]

    def texts(self, wanted: Callable[[Any, str], bool]) -> dict[int, str]:
        """Return the entries of the table of strings that are wanted by their id and text."""
        texts = {}
        for rows in self.select(_STRINGS, ("id", "value")):
            for key, text in rows:
                if isinstance(text, str) and wanted(key, text):
                    texts[key] = text
                    self.budget.take(bytes_of_text(text), self.path)
        return texts

    def texts_of(self, ids: Int64) -> dict[int, str]:
        """Return the entries of the table of strings with these ids."""
        wanted_ids = set(ids.tolist())
        return self.texts(lambda key, _: key in wanted_ids)


# --- from tables to traces ----------------------------------------------------------------------------


def _traces(export: _Export) -> list[Trace]:
    """Build one trace per process that used a GPU, in rank order."""
    if not export.has(_STRINGS) and not export.has(_KERNELS):
        problem = "an SQLite file, but no export of Nsight Systems: make one with nsys export --type sqlite"
        raise TraceFormatError(f"{export.path}: {problem}")
    activities = _by_process(_activities(export), "process")
    if not activities:
        raise TraceFormatError(f"{export.path}: the export holds no GPU activity: profile with nsys --trace cuda,nvtx")
    if len(activities) > MOST_PROCESSES:
        raise TraceFormatError(
            f"{export.path}: {len(activities):,} processes used a GPU: no export has over {MOST_PROCESSES:,}"
        )
    calls = _by_process(_runtime_calls(export))
    marks = _by_process(_marks(export))
    base, host, devices = _base_ns(export), _host(export), _devices(export)
    rank = rank_in_name(export.path) if len(activities) == 1 else None
    nccl_rows, nccl_calls = _nccl_calls(export)
    nccl_rows_of = _by_process(nccl_rows)
    members = communicator_members(
        (nccl_calls[index], process)
        for process, own_rows in nccl_rows_of.items()
        for index in distinct(own_rows["call"]).tolist()
    )
    order = _rank_order(activities, members)
    rank_of = {process: index if rank is None else rank for index, process in enumerate(order)}
    ranks = {
        communicator: tuple(rank_of[process] for process in processes)
        for communicator, processes in members.items()
        if all(process in rank_of for process in processes)
    }
    records = {
        process: _records(export, nccl_rows_of[process], nccl_calls, ranks) if process in nccl_rows_of else ({}, [])
        for process in order
    }
    traces = [
        Trace(
            path=export.path,
            names=list(export.names),
            **_tables(activities[process], calls.get(process), marks.get(process), records[process][0], base),
            collectives=records[process][1],
            devices=devices,
            rank=rank,
            world_size=len(activities) if len(activities) > 1 else None,
            host=host,
            groups={},
            base_ns=base,
            producer="nsys",
            events_total=export.total,
            events_skipped=export.skipped,
        )
        for process in order
    ]
    for trace in traces:
        trace.warnings.extend(overlap_warnings(trace.activities, rank))
    if export.skipped:
        message = f"{export.skipped} rows without times were left out"
        traces[0].warnings.append(Notice("damaged_events", message, None, export.skipped))
    if export.unnamed:
        message = f"{export.unnamed} kernels have no name in the export: what they do is not known"
        traces[0].warnings.append(Notice("unnamed_kernels", message, None, export.unnamed))
    return traces


def _activities(export: _Export) -> _Rows:
    """Read the kernels, copies and sets of all processes, each with the index of its name."""
    kernels = export.integer_columns(_KERNELS, {**_ACTIVITY, "text": "demangledName", "short": "shortName"})
    copies = export.integer_columns(_COPIES, {**_ACTIVITY, "size_bytes": "bytes", "kind": "copyKind"})
    sets = export.integer_columns(_SETS, {**_ACTIVITY, "size_bytes": "bytes"})
    text = np.where(kernels["text"] != NONE, kernels["text"], kernels["short"])
    texts = export.texts_of(text)
    export.unnamed = int(np.count_nonzero(~among(text, np.array(list(texts), np.int64))))
    kernels["name"] = _map_distinct(text, lambda key: export.name_index(texts.get(key, "unknown kernel")))
    kernels["size_bytes"] = np.full(len(text), NONE, np.int64)
    copies["name"] = _map_distinct(copies["kind"], lambda kind: export.name_index(_COPY_NAMES.get(kind, "Memcpy")))
    sets["name"] = _map_distinct(np.zeros(len(sets["start_ns"]), np.int64), lambda _: export.name_index("Memset"))
    for table, category in ((kernels, KERNEL), (copies, MEMCPY), (sets, MEMSET)):
        table["category"] = np.full(len(table["start_ns"]), category, np.int64)
    columns = (*_ACTIVITY, "size_bytes", "name", "category")
    joined = {column: np.concatenate([table[column] for table in (kernels, copies, sets)]) for column in columns}
    for narrow in ("device", "stream"):
        joined[narrow][abs(joined[narrow]) >= 1 << 31] = NONE
    return joined


def _runtime_calls(export: _Export) -> _Rows:
    """Read the calls of the CUDA runtime and driver, each with the index of its name without the API version."""
    wanted = {**_TIMES, "thread": "globalTid", "correlation": "correlationId", "text": "nameId"}
    rows = export.integer_columns(_CALLS, wanted)
    texts = export.texts_of(distinct(rows["text"]))
    rows["name"] = _map_distinct(
        rows["text"], lambda key: export.name_index(_VERSION.sub("", texts.get(key, "CUDA call")))
    )
    return rows


def _map_distinct(keys: Int64, function: Callable[[int], int]) -> Int64:
    """Apply ``function`` to each key, calling it once per distinct key."""
    unique, inverse = np.unique(keys, return_inverse=True)
    return np.array([function(key) for key in unique.tolist()], np.int64)[inverse.ravel()]


def _marks(export: _Export) -> _Rows:
    """Read the NVTX ranges; the column ``operator`` is 1 for ranges of a PyTorch operator."""

    def name_ranges(rows: list[tuple[Any, ...]]) -> Int64:
        # Marks without an end are instants, not ranges.
        ranges = (row for row in rows if all(isinstance(number, int) for number in row[:3]))
        codes = [
            (*times, key if isinstance(key, int) else NONE, NONE if text is None else _mark_code(export, str(text)))
            for *times, key, text in ranges
        ]
        return np.array(codes, np.int64).reshape(-1, 5)

    chunks = map(name_ranges, export.select(_MARKS, ("start", "end", "globalTid", "textId", "text")))
    rows = export.join_chunks(("start_ns", "end_ns", "thread", "text", "mark"), chunks)
    unnamed = rows["mark"] == NONE
    marks = {key: _mark_code(export, text) for key, text in export.texts_of(rows["text"][unnamed]).items()}
    rows["mark"][unnamed] = _map_distinct(rows["text"][unnamed], lambda key: marks.get(key, NONE))
    rows = export.with_valid_times(_select(rows, rows["mark"] != NONE))
    return {**rows, "name": rows["mark"] >> 1, "operator": rows["mark"] & 1}


def _mark_code(export: _Export, text: str) -> int:
    """Return twice the name index of a range, plus 1 if the range stands for a PyTorch operator."""
    match = _OPERATOR.fullmatch(text)
    operator = match is not None and not text.startswith("ringprof::")
    return 2 * export.name_index(match[1] if match is not None and operator else text) + operator


def _nccl_calls(export: _Export) -> tuple[_Rows, list[NcclCall]]:
    """Read the NCCL calls whose communicator is known; the column ``call`` is an index into the distinct calls."""
    layouts: Layouts = {}
    for entries in export.select(_FIELDS, ("schemaId", "name", "type", "offset")):
        count_before = len(layouts)
        add_entries(layouts, entries)
        export.budget.take(bytes_of_collectives(len(layouts) - count_before), export.path)
    names = export.texts(lambda _, text: text.startswith("nccl")) if layouts else {}
    calls: dict[NcclCall, int] = {}

    def decode_rows(rows: list[tuple[Any, ...]]) -> Int64:
        count_before, decoded = len(calls), []
        for *times, key, text, data in rows:
            fields = decode(data, layouts)
            call = nccl_call(text if isinstance(text, str) else names.get(key, ""), fields) if fields else None
            if call is not None and all(isinstance(time, int) for time in times):
                decoded.append((*times, calls.setdefault(call, len(calls))))
        export.budget.take(bytes_of_collectives(len(calls) - count_before), export.path)
        return np.array(decoded, np.int64).reshape(-1, 4)

    chunks = export.select(_MARKS, ("start", "end", "globalTid", "textId", "text", "binaryData"), _SHORT)
    rows = export.join_chunks(("start_ns", "end_ns", "thread", "call"), map(decode_rows, chunks if layouts else ()))
    # Rows without times are already counted as skipped, among the ranges.
    valid = (abs(rows["start_ns"]) < LARGEST_NS) & (abs(rows["end_ns"]) < LARGEST_NS)
    return _select(rows, valid), list(calls)


def _rank_order(activities: Mapping[int, _Rows], members: Mapping[int, tuple[int, ...]]) -> list[int]:
    """Return the processes in the rank order of a communicator that has all of them, else ordered by device."""
    all_processes = next((processes for processes in members.values() if set(processes) == set(activities)), None)
    return list(all_processes or sorted(activities, key=lambda key: (int(activities[key]["device"][0]), key)))


def _records(
    export: _Export, rows: _Rows, calls: list[NcclCall], ranks: Mapping[int, tuple[int, ...]]
) -> tuple[_Rows, list[CommRecord]]:
    """Build the communication records of one process, for the communicators whose ranks are known."""
    records: dict[CommRecord, int] = {}
    index = np.full(len(calls), NONE, np.int64)
    for call_index in distinct(rows["call"]).tolist():
        call = calls[call_index]
        record = record_of_call(call, ranks[call.communicator]) if call.communicator in ranks else None
        if record is not None:
            index[call_index] = records.setdefault(record, len(records))
    export.budget.take(bytes_of_collectives(len(records)), export.path)
    rows = {**rows, "collective": index[rows["call"]]}
    return _select(rows, rows["collective"] != NONE), list(records)


def _select(rows: _Rows, selection: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> _Rows:
    return {name: column[selection] for name, column in rows.items()}


def _by_process(rows: _Rows, column: str = "thread") -> dict[int, _Rows]:
    """Split rows by process; each part is sorted by start."""
    process = (rows[column] >> _THREAD_BITS) << _THREAD_BITS if column == "thread" else rows[column]
    order = np.lexsort((rows["start_ns"], process))
    processes, first = np.unique(process[order], return_index=True)
    parts = np.split(order, first[1:]) if len(processes) else []
    return {number: _select(rows, part) for number, part in zip(processes.tolist(), parts, strict=True)}


def _tables(activities: _Rows, calls: _Rows | None, marks: _Rows | None, records: _Rows, base: int) -> dict[str, Any]:
    """Build the tables of one process's trace, with ``base`` nanoseconds added to all times."""
    tables: dict[str, _Rows] = {"activities": activities}
    if records:
        tables["comm_records"] = records
    if calls:
        tables["launches"] = _select(calls, among(calls["correlation"], activities["correlation"]))
    if marks:
        tables["annotations"] = _select(marks, marks["operator"] == 0)
        tables["operators"] = _select(marks, marks["operator"] == 1)
    for rows in tables.values():
        rows["start_ns"] = rows["start_ns"] + base
        rows["end_ns"] = np.maximum(rows["end_ns"] + base, rows["start_ns"])
    tables["host_events"] = _host_events(calls, marks, tables, base)
    return {table: table_of(kind, tables.get(table, {})) for table, kind in TABLES.items()}


def _host_events(calls: _Rows | None, marks: _Rows | None, parts: Mapping[str, _Rows], base: int) -> _Rows:
    """Select the CUDA calls and ranges of one process that explain idle time, sorted by start.

    ``base`` is already added to the times of ``parts``, but not to those of ``calls`` and ``marks``.
    """
    if not calls:
        return {}
    category = np.full(len(calls["start_ns"]), RUNTIME_CALL, np.int64)
    tables = [{**calls, "category": category}]
    if marks:
        tables.append({**marks, "category": np.where(marks["operator"] == 1, OPERATOR, RANGE)})
    columns = ("start_ns", "end_ns", "name", "thread", "category")
    rows = {column: np.concatenate([table[column] for table in tables]) for column in columns}
    rows["start_ns"], rows["end_ns"] = rows["start_ns"] + base, rows["end_ns"] + base
    rows = _select(rows, np.argsort(rows["start_ns"], kind="stable"))
    explains_idle = rows_in_idle(rows, parts["activities"], parts["launches"])
    return _select(rows, explains_idle & (rows["end_ns"] > rows["start_ns"]))


# --- facts about the machine ----------------------------------------------------------------------------


def _base_ns(export: _Export) -> int:
    """Return the Unix time of the session's start in nanoseconds; 0 if the export does not give it."""
    values = [value for rows in export.select(_START, ("utcEpochNs",)) for (value,) in rows]
    return values[0] if values and isinstance(values[0], int) and 0 <= values[0] < LARGEST_NS else 0


def _devices(export: _Export) -> list[Device]:
    rows = [row for rows in export.select(_DEVICES, ("id", "name")) for row in rows]
    return [Device(index, str(name)) for index, name in rows if isinstance(index, int)]


def _host(export: _Export) -> str | None:
    rows = [row for rows in export.select(_SYSTEM, ("name", "value")) for row in rows]
    return next((str(value) for name, value in rows if str(name).lower() == "hostname" and value), None)
