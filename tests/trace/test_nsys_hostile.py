"""Untrusted exports: a database must not run code, must not hang the reader, and its values are validated."""

from __future__ import annotations

import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from ringprof.errors import InputError, TraceFormatError
from ringprof.trace.nsys import read_nsys
from tests.paths import ROOT
from tests.trace.test_nsys import FLASH, export

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"


def changed(path: Path, script: str) -> Path:
    with closing(sqlite3.connect(export(path, 41))) as connection:
        connection.executescript(script)
    return path


@pytest.mark.parametrize(
    ("script", "table"),
    [
        (
            f"DROP TABLE StringIds; CREATE VIEW StringIds AS {ENDLESS} SELECT x AS id, 'k' AS value FROM c WHERE x < 0",
            "StringIds",
        ),
        (
            f"DROP TABLE StringIds; CREATE VIEW StringIds AS {ENDLESS} SELECT x AS id, 'k' || x AS value FROM c",
            "StringIds",
        ),
        (
            "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL; CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS"
            f" {ENDLESS} SELECT x AS start, x + 1 AS end FROM c",
            "CUPTI_ACTIVITY_KIND_KERNEL",
        ),
        ("DROP TABLE NVTX_EVENTS; CREATE VIRTUAL TABLE NVTX_EVENTS USING fts5(start, end)", "NVTX_EVENTS"),
        ("DROP TABLE TARGET_INFO_GPU; CREATE VIEW TARGET_INFO_GPU AS SELECT * FROM TARGET_INFO_GPU", "TARGET_INFO_GPU"),
    ],
)
def test_views_and_virtual_tables_are_refused(tmp_path: Path, script: str, table: str) -> None:
    with pytest.raises(TraceFormatError, match=f"{table} is no plain table: export it again"):
        read_nsys(changed(tmp_path / "one.sqlite", script))


def test_generated_columns_are_not_read(tmp_path: Path) -> None:
    """Skip a computed column, which would give 400 MB per row."""
    computed = "value TEXT GENERATED ALWAYS AS (hex(zeroblob(200000000))) VIRTUAL"
    script = f"DROP TABLE StringIds; CREATE TABLE StringIds (id INTEGER PRIMARY KEY, {computed});"
    (trace,) = read_nsys(changed(tmp_path / "one.sqlite", script + "INSERT INTO StringIds (id) VALUES (1), (2)"))
    assert trace.names[0] == "unknown kernel"
    assert [(w.code, w.count) for w in trace.warnings] == [("unnamed_kernels", 3)]


def test_indexes_of_an_export_are_not_used(tmp_path: Path) -> None:
    """Read tables without indexes, which an attacker can empty to hide rows. Here, one has another table's page."""
    path = changed(tmp_path / "one.sqlite", "CREATE INDEX fast ON StringIds (id, value); CREATE TABLE other (a);")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "PRAGMA writable_schema=1; UPDATE sqlite_master SET rootpage ="
            " (SELECT rootpage FROM sqlite_master WHERE name='other') WHERE name='fast'"
        )
    (trace,) = read_nsys(path)
    assert FLASH in trace.names and trace.warnings == []


@pytest.mark.parametrize("column", ["start", "end", "deviceId", "streamId", "correlationId", "globalPid"])
@pytest.mark.parametrize("value", ["'x'", "x'00ff'", "1e300", "9223372036854775807", "-9223372036854775808", "NULL"])
def test_invalid_values_in_numeric_columns_are_handled(tmp_path: Path, column: str, value: str) -> None:
    script = f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {column} = {value} WHERE correlationId = 2"
    (trace, *others) = read_nsys(changed(tmp_path / "one.sqlite", script))
    kept = sum(len(part.activities.start_ns) for part in (trace, *others))
    codes = {warning.code for part in (trace, *others) for warning in part.warnings}
    assert kept == (4 if column in ("start", "end") else 5)
    assert ("damaged_events" in codes) == (kept == 4)


@pytest.mark.parametrize("value", ["'x'", "x'ff'", "NULL", "-5", "1e9"])
def test_invalid_device_values_are_handled(tmp_path: Path, value: str) -> None:
    script = (
        f"INSERT INTO TARGET_INFO_GPU VALUES ({value}, x'ff00', NULL, NULL); DELETE FROM TARGET_INFO_SESSION_START_TIME"
    )
    (trace,) = read_nsys(changed(tmp_path / "one.sqlite", script))
    assert trace.devices[0].name == "NVIDIA H200" and trace.base_ns == 0


def test_export_with_too_many_processes_is_refused(tmp_path: Path) -> None:
    row = "x, x + 1, x, 1, 7, x, (x + 100) << 24, 1, 1, NULL"
    counted = f"{ENDLESS} INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT {row} FROM c LIMIT 50000"
    with pytest.raises(TraceFormatError, match="50,001 processes used a GPU"):
        read_nsys(changed(tmp_path / "one.sqlite", counted))


def test_cyclic_b_tree_is_refused(tmp_path: Path) -> None:
    """Stop reading a tree in which a few pages refer to each other repeatedly and give billions of rows."""
    path = tmp_path / "tree.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA page_size=512; VACUUM")
    export(path, 41)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("WITH RECURSIVE c(x) AS (SELECT 10 UNION ALL SELECT x + 1 FROM c LIMIT 200000)"
                           " INSERT INTO StringIds SELECT x, 'k' FROM c")  # fmt: skip
        connection.commit()
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'StringIds'").fetchone()
    data = bytearray(path.read_bytes())
    inner = [offset for offset in range(512, len(data), 512) if data[offset] == 5 and offset != (root - 1) * 512]
    leaf = next(offset for offset in range(512, len(data), 512) if data[offset] == 13)
    line = [(root - 1) * 512, *inner[:15], leaf]
    for page, below in pairwise(line):
        (count,) = struct.unpack(">H", data[page + 3 : page + 5])
        cells = struct.unpack(f">{count}H", data[page + 12 : page + 12 + 2 * count])
        for child in (page + 8, *(page + cell for cell in cells)):
            data[child : child + 4] = struct.pack(">I", below // 512 + 1)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"interrupted|malformed|--max-memory"):
        read_nsys(path)


def varint(number: int) -> bytes:
    """Encode an integer as an SQLite varint."""
    groups = [number & 127]
    while number := number >> 7:
        groups.append(number & 127 | 128)
    return bytes(reversed(groups))


def test_text_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    """Stop reading a chain of overflow pages that leads back to its start."""
    path, size = tmp_path / "one.sqlite", 3_000_000
    changed(path, f"UPDATE StringIds SET value = '{'k' * size}' WHERE id = 1")
    data = bytearray(path.read_bytes())
    # The first 6 bytes of a row are its header. Its page also holds the bytes that exceed full overflow pages.
    cell = data.index(varint(size + 6) + varint(1) + b"\6\0" + varint(13 + 2 * size))
    longer = size + 25_000 * (4096 - 4)
    row = varint(longer + 6) + varint(1) + b"\6\0" + varint(13 + 2 * longer)
    data[cell : cell + len(row)] = row
    here = 489 + (size + 6 - 489) % (4096 - 4)
    begin = cell + 5 + (here if here <= 4096 - 35 else 489)
    (first,) = struct.unpack(">I", data[begin : begin + 4])
    last = first
    while following := struct.unpack(">I", data[(last - 1) * 4096 :][:4])[0]:
        last = following
    data[(last - 1) * 4096 : (last - 1) * 4096 + 4] = struct.pack(">I", first)
    path.write_bytes(data)
    assert longer > 30 * len(data)
    with pytest.raises(TraceFormatError, match=r"malformed|too big"):
        read_nsys(path)


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_export_with_a_pending_journal_is_refused(tmp_path: Path, suffix: str) -> None:
    path = export(tmp_path / "one.sqlite", 41)
    Path(f"{path}{suffix}").write_bytes(b"x")
    with pytest.raises(InputError, match=rf"changes to it wait in one\.sqlite{suffix}"):
        read_nsys(path)


def test_truncated_export_is_refused_or_has_a_warning(tmp_path: Path) -> None:
    path = export(tmp_path / "one.sqlite", 41)
    data = path.read_bytes()
    (whole,) = read_nsys(path)
    for size in range(0, len(data), 512):
        path.write_bytes(data[:size])
        try:
            (trace,) = read_nsys(path)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert trace.warnings or len(trace.activities.start_ns) == len(whole.activities.start_ns)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export whose 5 million calls take seconds to read."""
    counted = f"{ENDLESS} INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT x, x + 1, x, x, 3 FROM c LIMIT 5000000"
    return changed(tmp_path_factory.mktemp("large") / "large.sqlite", counted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_reading_of_an_export(large: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ringprof", "report", str(large), "--max-memory", str(8 << 30)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    opened = Path(f"/proc/{process.pid}/fd")

    def target(link: Path) -> str:
        try:
            return os.readlink(link)
        except FileNotFoundError:  # closed since it was listed
            return ""

    while not any(target(link) == str(large.resolve()) for link in opened.iterdir()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number and "Traceback" not in errors, errors
