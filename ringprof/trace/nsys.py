"""Nsight Systems exports (``nsys export --type sqlite``): their tables to the columns of a `Trace`.

An export holds all processes that were profiled together, so one file gives one trace a process that used a GPU.
Times in it count from the start of the session. It says nothing of process groups, peers or bytes of NCCL kernels.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ringprof.errors import InputError, TraceFormatError
from ringprof.trace.columns import (
    KERNEL,
    MEMCPY,
    MEMSET,
    NONE,
    Activities,
    Caveat,
    CommRecords,
    Device,
    Int64,
    Launches,
    Ranges,
    Trace,
)
from ringprof.trace.metadata import rank_in_name
from ringprof.trace.times import refuse_overflow

SQLITE_MAGIC = b"SQLite format 3\0"

_KERNELS, _COPIES, _SETS = (f"CUPTI_ACTIVITY_KIND_{what}" for what in ("KERNEL", "MEMCPY", "MEMSET"))
_CALLS, _MARKS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
# Of Nsight's ENUM_CUDA_MEMCPY_OPER, in the words that Kineto uses.
_COPY_NAMES = {
    1: "Memcpy HtoD", 2: "Memcpy DtoH", 3: "Memcpy HtoA", 4: "Memcpy AtoH", 5: "Memcpy AtoA", 6: "Memcpy AtoD",
    7: "Memcpy DtoA", 8: "Memcpy DtoD", 9: "Memcpy HtoH", 10: "Memcpy PtoP",
}  # fmt: skip
# The process is all of a thread's number but its last 24 bits.
_THREAD_BITS = 24
# What autograd's emit_nvtx writes: the operator, then its sequence number and identity.
_OPERATOR = re.compile(r"(\w+::\w+)(, (seq|op_id) = .*)?")

Rows = dict[str, Int64]
"""Columns of one table, of equal length."""


def read_nsys(path: str | os.PathLike[str]) -> list[Trace]:
    """Read an export: one trace a process, by device.

    Raises `InputError` where the file cannot be opened, `TraceFormatError` where it is no export of Nsight Systems or
    holds no GPU activity.
    """
    name = os.fspath(path)
    if not Path(name).is_file():
        raise InputError(f"{name}: no such file")
    try:
        # The file is not written to, not even a journal beside it.
        with closing(sqlite3.connect(f"{Path(name).resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            return [refuse_overflow(trace) for trace in _traces(_Export(name, connection))]
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise TraceFormatError(f"{name}: damaged SQLite file ({error}): export it again") from None


@dataclass
class _Export:
    """An open export, and the names seen so far."""

    path: str
    connection: sqlite3.Connection
    names: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    total: int = 0

    def columns(self, table: str) -> set[str]:
        """What the table has; empty where there is no such table."""
        return {row[1] for row in self.connection.execute(f"PRAGMA table_info({table})")}

    def read(self, table: str, wanted: tuple[str, ...]) -> Rows:
        """Whole-number columns of a table, by start; `NONE` where a value is missing or the table has no such one."""
        present = self.columns(table)
        if not {"start", "end"} <= present:
            return {name: np.empty(0, np.int64) for name in wanted}
        # Column and table names come from this module, never from the file; "end" is a word of SQL's own.
        query = ", ".join(
            f"""CASE typeof("{c}") WHEN 'integer' THEN "{c}" ELSE {NONE} END""" if c in present else str(NONE)
            for c in wanted
        )
        timed = """typeof("start")='integer' AND typeof("end")='integer'"""
        rows = self.connection.execute(f"SELECT {query} FROM {table} WHERE {timed} ORDER BY start").fetchall()
        count = self.connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        self.total, self.skipped = self.total + count, self.skipped + count - len(rows)
        found = np.array(rows, np.int64).reshape(-1, len(wanted))
        return {column: found[:, place].copy() for place, column in enumerate(wanted)}

    def number(self, name: str) -> int:
        """Index of a name."""
        return self.names.setdefault(name, len(self.names))

    def texts(self) -> dict[int, str]:
        """Nsight's table of strings."""
        if not self.columns("StringIds"):
            return {}
        return {key: str(value) for key, value in self.connection.execute("SELECT id, value FROM StringIds")}


# --- from tables to traces ----------------------------------------------------------------------------


def _traces(export: _Export) -> list[Trace]:
    if not export.columns("StringIds") and not export.columns(_KERNELS):
        what = "an SQLite file, but no export of Nsight Systems: make one with nsys export --type sqlite"
        raise TraceFormatError(f"{export.path}: {what}")
    texts = export.texts()
    done = _activities(export, texts)
    if not len(done["start"]):
        raise TraceFormatError(f"{export.path}: the export holds no GPU activity: profile with nsys --trace cuda,nvtx")
    calls = export.read(_CALLS, ("start", "end", "globalTid", "correlationId"))
    marks = _marks(export, texts)
    processes = sorted(
        np.unique(done["globalPid"]).tolist(), key=lambda pid: (int(done["deviceId"][done["globalPid"] == pid][0]), pid)
    )
    base, names = _base_ns(export), list(export.names)
    skipped = [Caveat("damaged_events", f"{export.skipped} rows without times were left out", None, export.skipped)]
    return [
        Trace(
            path=export.path,
            names=names,
            activities=_columns(_of(done, done["globalPid"] == pid), base),
            launches=_launches(_of(calls, _process(calls) == pid), _of(done, done["globalPid"] == pid), base),
            annotations=_ranges(_of(marks, (_process(marks) == pid) & (marks["operator"] == 0)), base),
            device_annotations=_ranges(_of(marks, np.zeros(len(marks["start"]), np.bool_)), base),
            operators=_ranges(_of(marks, (_process(marks) == pid) & (marks["operator"] == 1)), base),
            comm_records=_no_records(),
            collectives=[],
            devices=_devices(export),
            rank=rank_in_name(export.path) if len(processes) == 1 else None,
            world_size=len(processes) if len(processes) > 1 else None,
            host=_host(export),
            backend=None,
            groups={},
            base_ns=base,
            events_total=export.total,
            events_skipped=export.skipped,
            warnings=list(skipped) if export.skipped and number == 0 else [],
        )
        for number, pid in enumerate(processes)
    ]


def _activities(export: _Export, texts: dict[int, str]) -> Rows:
    """Kernels, copies and sets of all processes, by start, each with the index of its name."""
    common = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId")
    kernels = export.read(_KERNELS, (*common, "demangledName", "shortName"))
    text = np.where(kernels["demangledName"] != NONE, kernels.pop("demangledName"), kernels.pop("shortName"))
    kernels["name"] = _each(text, lambda key: export.number(texts.get(key, "unknown kernel")))
    copies = export.read(_COPIES, (*common, "bytes", "copyKind"))
    copies["name"] = _each(copies.pop("copyKind"), lambda kind: export.number(_COPY_NAMES.get(kind, "Memcpy")))
    sets = export.read(_SETS, (*common, "bytes"))
    sets["name"] = np.full(len(sets["start"]), export.number("Memset"), np.int64)
    kernels["bytes"] = np.full(len(kernels["start"]), NONE, np.int64)
    tables = (kernels, copies, sets)
    for table, category in zip(tables, (KERNEL, MEMCPY, MEMSET), strict=True):
        table["category"] = np.full(len(table["start"]), category, np.int64)
    joined = {column: np.concatenate([table[column] for table in tables]) for column in kernels}
    return _of(joined, np.argsort(joined["start"], kind="stable"))


def _each(keys: Int64, answer: Callable[[int], int]) -> Int64:
    """``answer`` of each key, asked once for every distinct one."""
    distinct, place = np.unique(keys, return_inverse=True)
    return np.array([answer(key) for key in distinct.tolist()] or [0], np.int64)[place.ravel()]


def _marks(export: _Export, texts: dict[int, str]) -> Rows:
    """NVTX ranges; ``operator`` is 1 for those that stand for a PyTorch operator."""
    found: list[tuple[int, int, int, int, int]] = []
    for start, end, text, thread in _raw_marks(export, texts):
        match = _OPERATOR.fullmatch(text)
        is_operator = match is not None and not text.startswith("ringprof::")
        name = match[1] if match is not None and is_operator else text
        found.append((start, end, export.number(name), thread, int(is_operator)))
    columns = np.array(found, np.int64).reshape(-1, 5).T
    return dict(zip(("start", "end", "name", "globalTid", "operator"), columns, strict=True))


def _raw_marks(export: _Export, texts: dict[int, str]) -> Iterator[tuple[int, int, str, int]]:
    present = export.columns(_MARKS)
    if not {"start", "end", "globalTid"} <= present:
        return
    text, text_id = ("text" if "text" in present else "NULL"), ("textId" if "textId" in present else "NULL")
    # Marks without an end are moments, not ranges.
    query = f'SELECT start, "end", {text}, {text_id}, globalTid FROM {_MARKS} WHERE typeof("end")=? ORDER BY start'
    for start, end, own, key, thread in export.connection.execute(query, ("integer",)):
        shown = own if own is not None else texts.get(key)
        if isinstance(start, int) and isinstance(thread, int) and shown is not None:
            yield start, end, str(shown), thread


def _of(rows: Rows, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Rows:
    return {name: column[chosen] for name, column in rows.items()}


def _process(rows: Rows) -> Int64:
    """The process of each row that names a thread, as activities give it."""
    process: Int64 = (rows["globalTid"] >> _THREAD_BITS) << _THREAD_BITS
    return process


def _columns(rows: Rows, base: int) -> Activities:
    start = rows["start"] + base
    none = np.full(len(start), NONE, np.int64)
    return Activities(
        start_ns=start,
        end_ns=np.maximum(rows["end"] + base, start),
        name=rows["name"].astype(np.int32),
        category=rows["category"].astype(np.int8),
        device=rows["deviceId"].astype(np.int32),
        stream=rows["streamId"].astype(np.int32),
        correlation=rows["correlationId"],
        external_id=none,
        size_bytes=rows["bytes"],
        collective=none.astype(np.int32),
        graph_node=rows["graphNodeId"],
    )


def _no_records() -> CommRecords:
    nothing = np.empty(0, np.int64)
    return CommRecords(nothing, nothing, nothing, nothing, nothing.astype(np.int32))


def _launches(calls: Rows, done: Rows, base: int) -> Launches:
    """The calls that led to an activity."""
    used = _of(calls, np.isin(calls["correlationId"], done["correlationId"]))
    return Launches(used["start"] + base, used["end"] + base, used["globalTid"], used["correlationId"])


def _ranges(marks: Rows, base: int) -> Ranges:
    count = len(marks["start"])
    return Ranges(
        start_ns=marks["start"] + base,
        end_ns=marks["end"] + base,
        name=marks["name"].astype(np.int32),
        thread=marks["globalTid"],
        device=np.full(count, NONE, np.int32),
        external_id=np.full(count, NONE, np.int64),
    )


# --- what the export says of the machine ----------------------------------------------------------------


def _base_ns(export: _Export) -> int:
    """Unix time of the session's start, 0 where the export does not give it."""
    if "utcEpochNs" not in export.columns("TARGET_INFO_SESSION_START_TIME"):
        return 0
    row = export.connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    return row[0] if row and isinstance(row[0], int) and 0 <= row[0] < 1 << 62 else 0


def _devices(export: _Export) -> list[Device]:
    present = export.columns("TARGET_INFO_GPU")
    if not {"id", "name"} <= present:
        return []
    memory, units = (column if column in present else "NULL" for column in ("totalMemory", "smCount"))
    rows = export.connection.execute(f"SELECT id, name, {memory}, {units} FROM TARGET_INFO_GPU")
    return [Device(int(index), str(name), size, count) for index, name, size, count in rows if index is not None]


def _host(export: _Export) -> str | None:
    if not {"name", "value"} <= export.columns("TARGET_INFO_SYSTEM_ENV"):
        return None
    query = "SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE lower(name)='hostname'"
    row = export.connection.execute(query).fetchone()
    return str(row[0]) if row and row[0] else None
