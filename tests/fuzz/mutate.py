"""Files that are damaged where they mean something: in a field, a cell or a line, not in a byte.

``python -m tests.fuzz.mutate READER FIRST COUNT ...`` reads COUNT files per reader, made by the numbers from FIRST on,
in one process that may take 1 GB of memory and 10 s of time for each, and prints what is wrong, a line of JSON each.
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

from ringprof import json_object
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.errors import RingprofError
from ringprof.limits import Limits, MemoryBudget
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
"""Addresses that Python and its libraries have before anything is read."""
HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**32 + 1, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, 1e300, -1e-300,
    "", "x", "0", "1_000", "1e3", "NaN", "9" * 30, "\x1b[31m", "</script>", "é\ud800", "=1+1", [], {}, [[]], {"a": []},
)  # fmt: skip
NO_NUMBER: tuple[Any, ...] = ("x", "", "1_000", None, [], {}, [1], "\x00")
"""What no writer puts where a time stands."""
NO_TEXT: tuple[Any, ...] = (None, [], {}, [1], 7, 1.5, True)
"""What no writer puts where a text or an object stands."""


@dataclass(frozen=True)
class Damaged:
    """A file."""

    data: Any
    sound: Any = None
    """Where anybody would see that it is damaged: the file before."""


# --- trees: JSON and MessagePack ------------------------------------------------------------------------


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree: its container, and its key or index."""
    places = range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ()
    for place in places:
        yield tree, place
        yield from nodes(tree[place])


def disturb(tree: Any, chance: random.Random) -> None:
    """One change of a tree, in place."""
    found = list(nodes(tree))
    if not found:
        return
    container, place = chance.choice(found)
    other, there = chance.choice(found)
    kind = chance.randrange(7)
    if kind == 0:
        container[place] = copy.deepcopy(chance.choice(HOSTILE))
    elif kind == 1:
        del container[place]
    elif kind == 2:
        container[place] = copy.deepcopy(other[there])
    elif kind == 3 and isinstance(container, list):
        container[place:place] = [copy.deepcopy(container[place]) for _ in range(chance.choice((1, 2, 300)))]
    elif kind == 4 and isinstance(container, dict):
        container[chance.choice(("", "x", "\x00", *(key for _, key in found if isinstance(key, str))))] = container.pop(
            place
        )
    elif kind == 5:
        for _ in range(chance.choice((1, 10, 100))):
            container[place] = [container[place]]
    elif isinstance(container[place], bytes):
        container[place] = disturbed_columns(container[place], chance)
    elif isinstance(container[place], (int, float)) and not isinstance(container[place], bool):
        container[place] *= chance.choice((-1, 0, 2, 1000, 1 << 40))


def disturbed_columns(column: bytes, chance: random.Random) -> bytes:
    """Numbers of a column changed, dropped or repeated."""
    width, extreme = chance.choice((1, 4, 8)), chance.choice((0, 1, 0x7F, 0x80, 0xFF))
    at = chance.randrange(len(column) // width + 1) * width
    new = bytes([extreme]) * width
    return chance.choice(
        (column[:at] + new + column[at + width :], column[:at], column[:at] + column[at + width :], column * 2, new)
    )


def json_text(tree: Any) -> bytes:
    """As JSON, lone surrogates and all."""
    return json.dumps(tree).encode()


# --- the readers ----------------------------------------------------------------------------------------


def figures(traces: list[Trace]) -> tuple[Any, list[str]]:
    """The whole report without its warnings, and these, by code."""
    report = as_json.as_dict(findings_in_memory(attribute(traces, None)), source="trace", paths=["rank0"])
    json.loads(json_object.json_text(report))
    return report | {"warnings": []}, sorted(warning["code"] for warning in report["warnings"])


def budget() -> MemoryBudget:
    return MemoryBudget(Limits(expanded_bytes=1 << 26))


@cache
def seeds(name: str) -> list[bytes]:
    """Sound files; what fuzzing has found is damaged already, and serves as well where no harm is looked for."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


@cache
def sound_traces() -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted((CORPUS / "trace").glob("h200*.json"))]


def trace(chance: random.Random) -> Damaged:
    """A Kineto trace: changed anywhere, or its times made unreadable, or cut off."""
    place = chance.randrange(len(sound_traces()))
    tree = copy.deepcopy(sound_traces()[place])
    if chance.random() < 0.3:
        kernels = [event for event in tree["traceEvents"] if event.get("cat") == "kernel"]
        for event in chance.sample(kernels, chance.randint(1, 3)):
            field = chance.choice(("ts", "dur", "ph", "cat", "name", "args"))
            event[field] = copy.deepcopy(chance.choice(NO_NUMBER if field in ("ts", "dur") else NO_TEXT))
        return Damaged(json_text(tree), place)
    if chance.random() < 0.2:
        text = json_text(tree)
        return Damaged(text[: chance.randrange(text.index(b'"traceEvents"') + 20, len(text) - 1)], place)
    for _ in range(chance.randint(1, 4)):
        disturb(tree, chance)
    return Damaged(json_text(tree))


def read_trace(file: Damaged) -> None:
    found = figures([parse_trace(file.data, "rank0.json", budget())])
    if file.sound is not None:
        assert_told(found, of_sound(file.sound))


def assert_told(found: tuple[Any, list[str]], sound: tuple[Any, list[str]]) -> None:
    """Damage either changes no figure, or a warning says so."""
    assert found[0] == sound[0] or set(found[1]) - set(sound[1]), f"silent damage; told: {found[1]}"


@cache
def of_sound(place: int) -> tuple[Any, list[str]]:
    return figures([parse_trace(json_text(sound_traces()[place]), "rank0.json")])


def of_others(name: str) -> Callable[[random.Random], Damaged]:
    """A trace of another profiler: changed anywhere, or times of its device's rows made unreadable."""

    def made(chance: random.Random) -> Damaged:
        tree = foreign.document(name)
        if chance.random() < 0.3:
            rows = [event for event in foreign.events_of(tree) if event.get("name") in foreign.ON_DEVICE[name]]
            for event in chance.sample(rows, chance.randint(1, 3)):
                event[chance.choice(("ts", "dur"))] = copy.deepcopy(chance.choice(NO_NUMBER))
            return Damaged(json_text(tree), name)
        for _ in range(chance.randint(1, 4)):
            disturb(tree, chance)
        return Damaged(json_text(tree))

    return made


def read_of_others(file: Damaged) -> None:
    found = figures(foreign.read(file.data, budget().limits))
    if file.sound is not None:
        assert_told(found, of_sound_others(file.sound))


@cache
def of_sound_others(name: str) -> tuple[Any, list[str]]:
    return figures(foreign.read(json_text(foreign.document(name)), budget().limits))


def reduced(chance: random.Random) -> Damaged:
    """A reduced trace: fields of its MessagePack, numbers of its columns, or bytes of its compression."""
    tree = msgspec.msgpack.decode(chance.choice([data for data in seeds("reduced") if data[:1] >= b"\x80"]))
    for _ in range(chance.randint(1, 4)):
        disturb(tree, chance)
    packed = zlib.compress(msgspec.msgpack.Encoder(enc_hook=str).encode(packable(tree)), 1)
    if chance.random() < 0.2:
        at = chance.randrange(len(packed))
        return Damaged(
            MAGIC
            + packed[:at]
            + bytes([packed[at] ^ 1 << chance.randrange(8)]) * chance.randrange(2)
            + packed[at + 1 :]
        )
    return Damaged(MAGIC + packed)


def packable(tree: Any) -> Any:
    """Without what MessagePack cannot hold."""
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
    """A run.json."""
    tree = json.loads((CORPUS / "run" / "zigzag.json").read_bytes())
    for _ in range(chance.randint(1, 4)):
        disturb(tree, chance)
    return Damaged(json_text(tree))


def text(kind: str) -> Callable[[random.Random], Damaged]:
    """A log or printed table: its lines and cells."""

    def made(chance: random.Random) -> Damaged:
        lines = chance.choice(seeds(kind)).decode("utf-8", "surrogateescape").split("\n")
        for _ in range(chance.randint(1, 8)):
            disturb_lines(lines, chance)
        found = "\n".join(lines).encode("utf-8", "surrogateescape")
        return Damaged(found[: chance.randrange(len(found) + 1)] if chance.random() < 0.1 else found)

    return made


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
    """One change of a line, or among lines."""
    at, other, kind = chance.randrange(len(lines)), chance.randrange(len(lines)), chance.randrange(6)
    words = lines[at].split(" ")
    if kind == 0 and len(lines) > 1:
        del lines[at]
    elif kind == 1:
        lines[at:at] = [lines[other]] * chance.choice((1, 2, 200))
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 3:
        words[chance.randrange(len(words))] = chance.choice(CELLS)
        lines[at] = " ".join(words)
    elif kind == 4:
        lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)] + lines[other]
    else:
        lines[at] = lines[at] * chance.choice((2, 50))


@cache
def export_bytes() -> bytes:
    """An Nsight export of two processes."""
    from tests.trace.test_nsys import export

    with tempfile.TemporaryDirectory() as folder:
        return Path(export(Path(folder) / "sound.sqlite", 41, 42)).read_bytes()


def nsight(chance: random.Random) -> Damaged:
    """An Nsight export: cells, rows, columns and tables of its database; its kernels' times made unreadable."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(export_bytes())  # type: ignore[attr-defined,unused-ignore]
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        plain = chance.random() < 0.3
        if plain:
            column = chance.choice(("start", "end"))
            value = chance.choice((None, "x", b"\x00\xff"))
            database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {column} = ? WHERE correlationId = 1", (value,))
        for _ in range(0 if plain else chance.randint(1, 4)):
            disturb_table(database, chance.choice(tables), chance)
        database.commit()
        return Damaged(database.serialize(), plain or None)  # type: ignore[attr-defined,unused-ignore]


def disturb_table(database: sqlite3.Connection, table: str, chance: random.Random) -> None:
    """One change of a table, which may be gone by now."""
    columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    if not columns:
        return
    column, other = chance.choice(columns), chance.choice(columns)
    value = chance.choice(
        [one for one in HOSTILE if isinstance(one, (str, int, float)) and one != "é\ud800"] + [b"\xff"]
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
        return  # a column of that name is there already, or a key is none


def read_export(file: Damaged) -> None:
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as place:
        place.write(file.data)
        place.flush()
        traces = read_nsys(place.name, budget())
        found = [figures([one]) for one in traces]
        assert file.sound is None or any(codes for _, codes in found), "silent damage"


def machine(chance: random.Random) -> Damaged:
    """A calibration file."""
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
    **{name: (of_others(name), read_of_others) for name in foreign.SOUND},
    "reduced": (reduced, read_reduced),
    "nsight": (nsight, read_export),
    "run": (run, lambda file: TARGETS["run"](file.data)),
    "log": (text("log"), lambda file: TARGETS["log"](file.data)),
    "table": (text("table"), lambda file: TARGETS["table"](file.data)),
}


def problem(reader: str, number: int) -> str:
    """What is wrong with how one file is read, or nothing. Ends the process where reading takes over 10 s."""
    make, read = READERS[reader]
    file = make(random.Random(f"{reader} {number}"))
    signal.setitimer(signal.ITIMER_PROF, MOST_S)  # of the processor: a busy machine makes nothing slow
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
        found = problem(reader, number)
        longest_s, slowest = max((longest_s, slowest), (time.process_time() - begin, number))
        if found:
            print(json.dumps({"reader": reader, "number": number, "problem": found}), flush=True)
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
        # These load torch, which maps some GB where it can use GPUs.
        import torch  # noqa: F401

        most += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for reader, first, count in zip(readers, firsts, counts, strict=True):
        read_files(reader, int(first), int(count))


if __name__ == "__main__":
    main()
