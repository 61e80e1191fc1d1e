"""Small files that would fill the reader's memory are refused, or read within the memory limit."""

from __future__ import annotations

import gzip
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ringprof.trace.kineto import parse_trace, read_trace
from ringprof.trace.reduced import MAGIC, reduce_trace
from tests.bounded import LIMIT, commands
from tests.paths import TRACES
from tests.trace.kineto_text import TEN
from tests.trace.test_nsys import export

MB = 1 << 20
KERNEL = b'{"ph":"X","cat":"kernel","name":"a","ts":1,"dur":1},'
LAST = b'{"ph":"X","cat":"kernel","name":"z","ts":1,"dur":1}]}'
HOP = (
    b'{"ph":"X","cat":"kernel","name":"ncclDevKernel_SendRecv","ts":1,"dur":1,"args":{"Collective name":"send",'
    b'"Dst Rank":1,"Group size":2,"In msg nelems":8}},'
)
BEGIN = b'{"traceEvents":['


def around(unit: bytes, size: int, begin: bytes = BEGIN, end: bytes = LAST) -> Iterator[bytes]:
    """Yield a repeated unit of the given total size, with the text before and behind it."""
    yield begin
    block = unit * max(1, MB // len(unit))
    yield from (block for _ in range(size // len(block)))
    yield end


def numbered(unit: bytes, count: int, begin: bytes = BEGIN, end: bytes = LAST) -> Iterator[bytes]:
    """Yield a unit with each number inserted."""
    yield begin
    for block in range(0, count, 1000):
        yield b"".join(unit % number for number in range(block, min(block + 1000, count)))
    yield end


CPU = {"end": LAST.replace(b"kernel", b"cpu_op")}
LONG = b"n" * 900 + b'","ts":1,"dur":1},'
RECORD = b'{"ph":"X","cat":"kernel","name":"a","ts":1,"dur":1,"args":{"Collective name":'
DEVICES, INFO = b'{"deviceProperties":[', b'{"distributedInfo":{"pg_config":['
LISTED = b'],"traceEvents":[' + LAST

# name -> expanded content, and whether it is refused because of its memory
TRACES_OF_TEXT: dict[str, tuple[Callable[[], Iterator[bytes]], bool]] = {
    "kernels": (partial(around, KERNEL, 40 * MB), True),
    "hops": (partial(around, HOP, 40 * MB), True),
    "operators": (partial(around, KERNEL.replace(b"kernel", b"cpu_op"), 40 * MB, **CPU), True),
    "names": (partial(numbered, b'{"ph":"X","cat":"kernel","name":"%07d' + LONG, 60_000), True),
    "wide names": (partial(numbered, '{"ph":"X","cat":"kernel","name":"💥%07d'.encode() + LONG, 60_000), True),
    "categories": (partial(numbered, b'{"ph":"X","cat":"%07d' + LONG, 100_000), False),
    "operators of no use": (partial(numbered, b'{"ph":"X","cat":"cpu_op","name":"%07d' + LONG, 100_000), False),
    "records": (partial(numbered, RECORD + b'"send","dtype":"%07d' + b"c" * 900 + b'"}},', 60_000), True),
    "groups": (
        partial(
            numbered,
            RECORD + b'"allreduce","Group size":1000000,"Global rank start":%d,"Global rank stride":1}},',
            1000,
        ),
        True,
    ),
    "empty events": (partial(around, b"{},", 40 * MB), False),
    "no events": (partial(around, b"[", 40 * MB), False),
    "one long name": (
        partial(around, b"a", 40 * MB, BEGIN + b'{"ph":"X","cat":"kernel","ts":1,"dur":1,"name":"', b'"},' + LAST),
        False,
    ),
    "spaces": (partial(around, b" ", 40 * MB, BEGIN + KERNEL), False),
    "lists before the events": (partial(around, b"[],", 3 * MB, DEVICES, b"[]" + LISTED), False),
    "too much before the events": (partial(around, b"[],", 40 * MB, DEVICES, b"[]" + LISTED), False),
    "lists behind the events": (
        partial(around, b"[],", 40 * MB, BEGIN + LAST[:-1] + b',"deviceProperties":[', b"[]]}"),
        False,
    ),
    "groups of objects": (partial(around, b"{},", 3 * MB, INFO, b"{}]}" + LISTED[1:]), False),
    "ranks of a group": (
        partial(around, b"1000,", 3 * MB, INFO + b'{"pg_name":"a","ranks":[', b"1]}]}" + LISTED[1:]),
        False,
    ),
}


@pytest.mark.long
def test_expanding_traces_stay_within_memory_limits(tmp_path: Path) -> None:
    sound = tmp_path / "rank0.json"
    sound.write_bytes(TEN)
    paths = []
    for name, (text, _) in TRACES_OF_TEXT.items():
        paths.append(tmp_path / f"{name.replace(' ', '-')}.json.gz")
        with gzip.open(paths[-1], "wb", 1) as file:
            file.writelines(text())
    assert_bounded(paths, sound, refused(paths, TRACES_OF_TEXT))


def refused(paths: list[Path], table: dict[str, Any]) -> set[Path]:
    return {path for path, (_, for_memory) in zip(paths, table.values(), strict=True) if for_memory}


def assert_bounded(paths: list[Path], sound: Path, for_memory: set[Path]) -> None:
    results = commands([["report", str(path), "--max-memory", str(LIMIT)] for path in paths], sound)
    assert len(results) == len(paths)
    for path, result in zip(paths, results, strict=True):
        assert result.grown_bytes < LIMIT, (path.name, result)
        assert result.code in (0, 2) and result.errors.count("\n") <= 1 and "Traceback" not in result.errors, (
            path.name,
            result,
        )
        assert ("raise the limit with --max-memory" in result.errors) == (path in for_memory), (path.name, result)


# --- reduced traces -----------------------------------------------------------------------------------


def int64(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def rows(table: str, count: int) -> Callable[[dict[str, Any]], None]:
    def change(file: dict[str, Any]) -> None:
        narrow = {"name": 4, "device": 4, "stream": 4, "collective": 4, "category": 1}
        file["columns"][table] = {name: bytes(narrow.get(name, 8) * count) for name in file["columns"][table]}

    return change


def groups_of_all(file: dict[str, Any]) -> None:
    file["lists"] = {"sizes": int64(*[1 << 20] * 10), "data": bytes(10 * 8 << 20)}
    file["group_names"] = {"sizes": int64(*[1] * 10), "data": b"0123456789"}
    file.update(group_lists=int64(*range(10)), collectives=[])
    for table in ("activities", "comm_records"):
        rows(table, 0)(file)


def one_group_in_all_records(file: dict[str, Any]) -> None:
    index = len(file["lists"]["sizes"]) // 8
    file["lists"]["sizes"] += int64(1 << 20)
    file["lists"]["data"] += bytes(8 << 20)
    file["collectives"] += [file["collectives"][0] | {"group_ranks": index}] * 1000


def one_list_in_all_groups(file: dict[str, Any]) -> None:
    file["lists"] = {"sizes": int64(1 << 17), "data": bytes(8 << 17)}
    names = [b"%06d" % number for number in range(100_000)]
    file["group_names"] = {"sizes": int64(*map(len, names)), "data": b"".join(names)}
    file.update(group_lists=bytes(8 * len(names)), collectives=[])
    for table in ("activities", "comm_records"):
        rows(table, 0)(file)


REDUCED: dict[str, tuple[Callable[[dict[str, Any]], None], bool]] = {
    "activities": (rows("activities", 2_000_000), True),
    "annotations": (rows("annotations", 2_000_000), True),
    "records": (lambda file: file["collectives"].extend(file["collectives"][:1] * 300_000), True),
    "names": (lambda file: file.update(names={"sizes": bytes(8_000_000), "data": b""}), True),
    "a long name": (lambda file: file.update(names={"sizes": int64(200 * MB), "data": bytes(200 * MB)}), True),
    "group names": (
        lambda file: file.update(group_names={"sizes": bytes(8_000_000), "data": b""}, group_lists=bytes(8_000_000)),
        True,
    ),
    "groups of a million": (groups_of_all, True),
    "one list in every group": (one_list_in_all_groups, False),
    "a million in every record": (one_group_in_all_records, False),
    "devices": (lambda file: file.update(devices=[{"index": 0, "name": ""}] * 500_000), False),
    "warnings": (lambda file: file.update(warnings=[{"code": "x", "message": ""}] * 500_000), False),
    "other fields": (lambda file: file.update(more=[[]] * 10_000_000), False),
}


def test_expanding_reduced_traces_stay_within_memory_limits(tmp_path: Path) -> None:
    sound = tmp_path / "rank0.json"
    sound.write_bytes(TEN)
    trace = read_trace(TRACES / "h200x4-zigzag-65536" / "rank0.json.gz")
    file = zlib.decompress(reduce_trace(trace)[len(MAGIC) :])
    paths = []
    for name, (change, _) in REDUCED.items():
        changed = msgspec.msgpack.decode(file)
        change(changed)
        paths.append(tmp_path / f"{name.replace(' ', '-')}.ringprof")
        paths[-1].write_bytes(MAGIC + zlib.compress(msgspec.msgpack.encode(changed), 1))
    assert_bounded(paths, sound, refused(paths, REDUCED))


# --- the others ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_expanding_exports_and_runs_stay_within_memory_limits(tmp_path: Path) -> None:
    sound = tmp_path / "rank0.json"
    sound.write_bytes(TEN)
    texts, rows = export(tmp_path / "texts.sqlite", 41), export(tmp_path / "rows.sqlite", 41)
    with closing(sqlite3.connect(texts)) as connection, connection:
        connection.execute(f"{COUNTED} INSERT INTO StringIds SELECT x + 10, printf('%.1000c', 'n') || x FROM c")
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = demangledName")
        connection.execute(f"{COUNTED} INSERT INTO NVTX_EVENTS SELECT x, x + 1, 59, NULL, x + 10, 1 FROM c")
    with closing(sqlite3.connect(rows)) as connection, connection:
        connection.execute(
            f"{COUNTED.replace('100000', '700000')} INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL"
            " SELECT x, x + 1, 0, 1, 7, x, 41 << 24, 1, 1, NULL FROM c"
        )
    run = tmp_path / "run" / "run.json"
    run.parent.mkdir()
    recorded = json.loads((TRACES / "h200x4-zigzag-65536" / "run.json").read_bytes())
    recorded["strategy"]["params"] = {"x": "MARK"}
    run.write_bytes(json.dumps(recorded).encode().replace(b'"MARK"', b"[" + b"[]," * 20_000_000 + b"[]]"))
    assert_bounded([texts, rows, run], sound, {texts, rows, run})


COUNTED = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100000)"


@pytest.mark.parametrize(
    "line",
    [
        "step 💥\n" + "Self CUDA time total: 1.0ms and more\n" * 2,
        pytest.param("| a | b | c |\n", marks=pytest.mark.long),
    ],
)
def test_expanding_texts_stay_within_memory_limits(tmp_path: Path, line: str) -> None:
    sound, log = tmp_path / "rank0.json", tmp_path / "some.log"
    sound.write_bytes(TEN)
    log.write_bytes(line.encode() * (10 * MB // len(line)))
    for options in ([], ["--show", "rows"]):
        (result,) = commands([["report", str(log), *options, "--max-memory", str(LIMIT)]], sound)
        assert result.code == 2 and result.grown_bytes < LIMIT


def test_max_memory_option_raises_the_limit(tmp_path: Path) -> None:
    data = b"".join(around(KERNEL, 4 * MB))
    path = tmp_path / "rank0.json"
    path.write_bytes(data)
    small, large = commands([["report", str(path), "--max-memory", str(size << 20)] for size in (16, 256)], path)
    assert (small.code, large.code) == (2, 0)
    assert "rank0.json: needs more than 16 MiB of memory" in small.errors
    assert len(parse_trace(data).activities.start_ns) == len(data) // len(KERNEL)
