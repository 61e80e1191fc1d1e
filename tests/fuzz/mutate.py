"""Structured mutations of files: damage to a field, a cell or a line, not to a byte.

``python -m tests.fuzz.mutate READER FIRST COUNT ...`` reads COUNT files per reader, generated from the seeds FIRST,
FIRST + 1, ..., in one process with a limit of 1 GB of memory and 10 s per file. It prints each problem, and a summary
per reader, as a line of JSON.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.common import json_object
from ringprof.common.limits import Limits, MemoryBudget
from ringprof.errors import RingprofError
from ringprof.report import as_json
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import Trace
from ringprof.trace.kineto import parse_trace
from ringprof.trace.nsys import read_nsys
from ringprof.trace.reduced import MAGIC, parse_reduced
from tests.fuzz import foreign, given
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MOST_BYTES, MOST_S = 1 << 30, 10
OF_PYTHON = 1 << 30
"""Address space that Python and its libraries need before anything is read, in bytes."""
HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**32 + 1, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, 1e300, -1e-300,
    "", "x", "0", "1_000", "1e3", "NaN", "9" * 30, "\x1b[31m", "</script>", "é\ud800", "=1+1", [], {}, [[]], {"a": []},
)  # fmt: skip
NO_NUMBER: tuple[Any, ...] = ("x", "", "1_000", None, [], {}, [1], "\x00")
"""Values that no program writes in place of a time."""
NO_TEXT: tuple[Any, ...] = (None, [], {}, [1], 7, 1.5, True)
"""Values that no program writes in place of a string or an object."""


@dataclass(frozen=True)
class Damaged:
    """A damaged file."""

    data: Any
    sound: Any = None
    """Key of the undamaged file, if the damage is obvious and must cause a warning."""


# --- trees: JSON and MessagePack ------------------------------------------------------------------------


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every node of a tree: its container, and its key or index."""
    keys = range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ()
    for key in keys:
        yield tree, key
        yield from nodes(tree[key])


def disturb(tree: Any, chance: random.Random) -> None:
    """Make one random change to a tree, in place."""
    all_nodes = list(nodes(tree))
    if not all_nodes:
        return
    container, key = chance.choice(all_nodes)
    other, other_key = chance.choice(all_nodes)
    kind = chance.randrange(7)
    if kind == 0:
        container[key] = copy.deepcopy(chance.choice(HOSTILE))
    elif kind == 1:
        del container[key]
    elif kind == 2:
        container[key] = copy.deepcopy(other[other_key])
    elif kind == 3 and isinstance(container, list):
        container[key:key] = [copy.deepcopy(container[key]) for _ in range(chance.choice((1, 2, 300)))]
    elif kind == 4 and isinstance(container, dict):
        value = container.pop(key)
        names = (name for _, name in all_nodes if isinstance(name, str))
        container[chance.choice(("", "x", "\x00", *names))] = value
    elif kind == 5:
        for _ in range(chance.choice((1, 10, 100))):
            container[key] = [container[key]]
    elif isinstance(container[key], bytes):
        container[key] = disturbed_columns(container[key], chance)
    elif isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
        container[key] *= chance.choice((-1, 0, 2, 1000, 1 << 40))


def disturbed_columns(column: bytes, chance: random.Random) -> bytes:
    """Change, drop or repeat numbers of a column."""
    width, extreme = chance.choice((1, 4, 8)), chance.choice((0, 1, 0x7F, 0x80, 0xFF))
    offset = chance.randrange(len(column) // width + 1) * width
    new = bytes([extreme]) * width
    return chance.choice(
        (
            column[:offset] + new + column[offset + width :],
            column[:offset],
            column[:offset] + column[offset + width :],
            column * 2,
            new,
        )
    )


def json_text(tree: Any) -> bytes:
    """Encode a tree as JSON, including lone surrogates."""
    return json.dumps(tree).encode()


# --- the readers ----------------------------------------------------------------------------------------


def figures(traces: list[Trace]) -> tuple[Any, list[str]]:
    """Return the report without its warnings, and the codes of the warnings."""
    report = as_json.as_dict(findings_in_memory(attribute(traces, None)), source="trace", paths=["rank0"])
    json.loads(json_object.json_text(report))
    return report | {"warnings": []}, sorted(warning["code"] for warning in report["warnings"])


def budget() -> MemoryBudget:
    return MemoryBudget(Limits(expanded_bytes=1 << 26))


@cache
def seeds(name: str) -> list[bytes]:
    """Read the files of a corpus, some of which are damaged already."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


@cache
def sound_traces() -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted((CORPUS / "trace").glob("h200*.json"))]


def trace(chance: random.Random) -> Damaged:
    """Damage a Kineto trace: change any node, make times unreadable, or truncate it."""
    index = chance.randrange(len(sound_traces()))
    tree = copy.deepcopy(sound_traces()[index])
    if chance.random() < 0.3:
        kernels = [event for event in tree["traceEvents"] if event.get("cat") == "kernel"]
        for event in chance.sample(kernels, chance.randint(1, 3)):
            field = chance.choice(("ts", "dur", "ph", "cat", "name", "args"))
            event[field] = copy.deepcopy(chance.choice(NO_NUMBER if field in ("ts", "dur") else NO_TEXT))
        return Damaged(json_text(tree), index)
    if chance.random() < 0.2:
        text = json_text(tree)
        return Damaged(text[: chance.randrange(text.index(b'"traceEvents"') + 20, len(text) - 1)], index)
    for _ in range(chance.randint(1, 4)):
        disturb(tree, chance)
    return Damaged(json_text(tree))


def read_trace(file: Damaged) -> None:
    damaged = figures([parse_trace(file.data, "rank0.json", budget())])
    if file.sound is not None:
        assert_warned(damaged, sound_figures(file.sound))


def assert_warned(damaged: tuple[Any, list[str]], sound: tuple[Any, list[str]]) -> None:
    """Assert that damage changes no figure, or causes a warning."""
    assert damaged[0] == sound[0] or set(damaged[1]) - set(sound[1]), f"silent damage; warnings: {damaged[1]}"


@cache
def sound_figures(index: int) -> tuple[Any, list[str]]:
    return figures([parse_trace(json_text(sound_traces()[index]), "rank0.json")])


def foreign_trace(name: str) -> Callable[[random.Random], Damaged]:
    """Return a function that damages a trace of another profiler: any node, or times of device rows."""

    def damage(chance: random.Random) -> Damaged:
        tree = foreign.document(name)
        if chance.random() < 0.3:
            rows = [event for event in foreign.events_of(tree) if event.get("name") in foreign.ON_DEVICE[name]]
            for event in chance.sample(rows, chance.randint(1, 3)):
                event[chance.choice(("ts", "dur"))] = copy.deepcopy(chance.choice(NO_NUMBER))
            return Damaged(json_text(tree), name)
        for _ in range(chance.randint(1, 4)):
            disturb(tree, chance)
        return Damaged(json_text(tree))

    return damage


def read_foreign(file: Damaged) -> None:
    damaged = figures(foreign.read(file.data, budget().limits))
    if file.sound is not None:
        assert_warned(damaged, sound_foreign_figures(file.sound))


@cache
def sound_foreign_figures(name: str) -> tuple[Any, list[str]]:
    return figures(foreign.read(json_text(foreign.document(name)), budget().limits))


def reduced(chance: random.Random) -> Damaged:
    """Damage a reduced trace: fields of its MessagePack, numbers of its columns, or bytes of its compressed data."""
    tree = msgspec.msgpack.decode(chance.choice([data for data in seeds("reduced") if data[:1] >= b"\x80"]))
    for _ in range(chance.randint(1, 4)):
        disturb(tree, chance)
    packed = zlib.compress(msgspec.msgpack.Encoder(enc_hook=str).encode(packable(tree)), 1)
    if chance.random() < 0.2:
        offset = chance.randrange(len(packed))
        return Damaged(
            MAGIC
            + packed[:offset]
            + bytes([packed[offset] ^ 1 << chance.randrange(8)]) * chance.randrange(2)
            + packed[offset + 1 :]
        )
    return Damaged(MAGIC + packed)


def packable(tree: Any) -> Any:
    """Convert values that MessagePack cannot encode."""
    if isinstance(tree, dict):
        return {packable(key): packable(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [packable(value) for value in tree]
    if isinstance(tree, int) and not -(1 << 63) <= tree < 1 << 64:
        return float(tree)
    return tree.encode("utf-8", "replace").decode() if isinstance(tree, str) else tree


def read_reduced(file: Damaged) -> None:
    figures([parse_reduced(file.data, "rank0.ringprof", budget())])


def run(chance: random.Random) -> Damaged:
    """Damage a run.json."""
    tree = json.loads((CORPUS / "run" / "zigzag.json").read_bytes())
    for _ in range(chance.randint(1, 4)):
        disturb(tree, chance)
    return Damaged(json_text(tree))


def text(kind: str) -> Callable[[random.Random], Damaged]:
    """Return a function that damages lines and cells of a log or printed table."""

    def damage(chance: random.Random) -> Damaged:
        lines = chance.choice(seeds(kind)).decode("utf-8", "surrogateescape").split("\n")
        for _ in range(chance.randint(1, 8)):
            disturb_lines(lines, chance)
        data = "\n".join(lines).encode("utf-8", "surrogateescape")
        return Damaged(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.1 else data)

    return damage


CELLS = (
    "",
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "9" * 400,
    "1,2,3",
    "1.2.3",
    "\x1b[2J",
    "💥",
    "|",
    "---",
    "\t",
    "٣",
    "²",
    "=1+1",
)


def disturb_lines(lines: list[str], chance: random.Random) -> None:
    """Make one random change to a line, or to the order of lines, in place."""
    index, other, kind = chance.randrange(len(lines)), chance.randrange(len(lines)), chance.randrange(6)
    words = lines[index].split(" ")
    if kind == 0 and len(lines) > 1:
        del lines[index]
    elif kind == 1:
        lines[index:index] = [lines[other]] * chance.choice((1, 2, 200))
    elif kind == 2:
        lines[index], lines[other] = lines[other], lines[index]
    elif kind == 3:
        words[chance.randrange(len(words))] = chance.choice(CELLS)
        lines[index] = " ".join(words)
    elif kind == 4:
        lines[index] = lines[index][: chance.randrange(len(lines[index]) + 1)] + lines[other]
    else:
        lines[index] = lines[index] * chance.choice((2, 50))


@cache
def export_bytes() -> bytes:
    """Make an Nsight export of two processes."""
    from tests.trace.test_nsys import export

    with tempfile.TemporaryDirectory() as folder:
        return Path(export(Path(folder) / "sound.sqlite", 41, 42)).read_bytes()


def nsight(chance: random.Random) -> Damaged:
    """Damage an Nsight export: cells, rows, columns and tables of its database, or times of its kernels."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(export_bytes())  # type: ignore[attr-defined,unused-ignore]
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        obvious = chance.random() < 0.3
        if obvious:
            column = chance.choice(("start", "end"))
            value = chance.choice((None, "x", b"\x00\xff"))
            database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {column} = ? WHERE correlationId = 1", (value,))
        for _ in range(0 if obvious else chance.randint(1, 4)):
            disturb_table(database, chance.choice(tables), chance)
        database.commit()
        return Damaged(database.serialize(), obvious or None)  # type: ignore[attr-defined,unused-ignore]


def disturb_table(database: sqlite3.Connection, table: str, chance: random.Random) -> None:
    """Make one random change to a table, which an earlier change may have dropped."""
    columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    if not columns:
        return
    column, other = chance.choice(columns), chance.choice(columns)
    value = chance.choice(
        [item for item in HOSTILE if isinstance(item, (str, int, float)) and item != "é\ud800"] + [b"\xff"]
    )
    some = f"rowid IN (SELECT rowid FROM {table} ORDER BY rowid LIMIT 1 OFFSET {chance.randrange(4)})"
    value = value if not isinstance(value, int) or -(1 << 63) <= value < 1 << 63 else -1
    change = chance.choice((
        f"UPDATE OR IGNORE {table} SET {column} = ?1 WHERE {some}",
        f"UPDATE OR IGNORE {table} SET {column} = ?1",
        f"UPDATE OR IGNORE {table} SET {column} = {other}",
        f"DELETE FROM {table} WHERE {some}",
        f"INSERT OR IGNORE INTO {table} SELECT * FROM {table}",
        f"ALTER TABLE {table} RENAME COLUMN {column} TO gone",
        f"DROP TABLE {table}",
    ))  # fmt: skip
    try:
        database.execute(change, (value,) if "?1" in change else ())
    except (sqlite3.OperationalError, sqlite3.IntegrityError):
        return  # a column of that name exists already, or the change violates a constraint


def read_export(file: Damaged) -> None:
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as export:
        export.write(file.data)
        export.flush()
        reports = [figures([trace]) for trace in read_nsys(export.name, budget())]
        assert file.sound is None or any(codes for _, codes in reports), "silent damage"


def machine(chance: random.Random) -> Damaged:
    """Damage a calibration file."""
    tree = copy.deepcopy(given.machine())
    for _ in range(chance.randint(1, 4)):
        disturb(tree, chance)
    return Damaged(json_text(tree))


def of_text(chance: random.Random, *texts: str) -> Damaged:
    return Damaged(given.cut_up(chance.choice(texts), chance))


READERS: dict[str, tuple[Callable[[random.Random], Damaged], Callable[[Damaged], None]]] = {
    "machine": (machine, lambda file: given.read_machine(file.data)),
    "measurements": (
        lambda chance: Damaged(given.measurements(chance)),
        lambda file: given.read_measurements(file.data),
    ),
    "lengths": (lambda chance: of_text(chance, *given.LENGTHS), lambda file: given.read_lengths(file.data)),
    "rules": (lambda chance: of_text(chance, given.RULES), lambda file: given.read_rules(file.data)),
    "condition": (lambda chance: of_text(chance, *given.CONDITIONS), lambda file: given.read_condition(file.data)),
    "names": (
        lambda chance: Damaged(json.dumps(given.named(copy.deepcopy(chance.choice(sound_traces())), chance))),
        lambda file: given.read_names(file.data),
    ),
    "trace": (trace, read_trace),
    **{name: (foreign_trace(name), read_foreign) for name in foreign.SOUND},
    "reduced": (reduced, read_reduced),
    "nsight": (nsight, read_export),
    "run": (run, lambda file: TARGETS["run"](file.data)),
    "log": (text("log"), lambda file: TARGETS["log"](file.data)),
    "table": (text("table"), lambda file: TARGETS["table"](file.data)),
}


def problem(reader: str, number: int) -> str:
    """Read one damaged file, and return what is wrong, or nothing. Ends the process if reading takes over 10 s."""
    make, read = READERS[reader]
    file = make(random.Random(f"{reader} {number}"))
    signal.setitimer(signal.ITIMER_PROF, MOST_S)  # CPU time, which does not depend on the machine's load
    try:
        read(file)
    except RingprofError as error:
        return "several lines: " + str(error) if "\n" in str(error) else ""
    except Exception:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


def read_files(reader: str, first: int, count: int) -> None:
    """Read files by one reader, and print each problem and then a summary."""
    longest_s, slowest = 0.0, first
    for number in range(first, first + count):
        begin = time.process_time()
        reason = problem(reader, number)
        longest_s, slowest = max((longest_s, slowest), (time.process_time() - begin, number))
        if reason:
            print(json.dumps({"reader": reader, "number": number, "problem": reason}), flush=True)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    summary = {
        "reader": reader,
        "read": count,
        "longest_s": round(longest_s, 2),
        "slowest": slowest,
        "peak_mb": peak_mb,
    }
    print(json.dumps(summary), flush=True)


def main() -> None:
    readers, firsts, counts = sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]
    most = OF_PYTHON + MOST_BYTES
    if {"machine", "measurements"} & {*readers}:
        # These readers import torch, which maps several GB if it can use GPUs.
        import torch  # noqa: F401

        most += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for reader, first, count in zip(readers, firsts, counts, strict=True):
        read_files(reader, int(first), int(count))


if __name__ == "__main__":
    main()
