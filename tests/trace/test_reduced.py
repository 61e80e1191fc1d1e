"""A reduced trace says all that its trace says, and one from a stranger does no harm."""

import dataclasses
import random
import subprocess
import sys
import zlib

import msgspec
import numpy as np
import pytest

from ringprof.errors import RingprofError, TraceFormatError
from ringprof.trace.columns import Collective, Trace
from ringprof.trace.kineto import parse_trace, read_trace
from ringprof.trace.ranks import read_traces
from ringprof.trace.reduced import MAGIC, parse_reduced, reduce_trace
from tests.paths import DATA
from tests.trace.kineto_text import REAL, TEN

RUNS = DATA.parents[1] / "traces"
SOURCES = [*REAL, RUNS / "cpu4-burst-4096" / "rank1.json.gz", RUNS / "h200x4-burst-262144-copied" / "rank2.json.gz"]


def assert_same(one: Trace, other: Trace) -> None:
    for field in dataclasses.fields(Trace):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(mine):
            for column in dataclasses.fields(mine):
                a, b = getattr(mine, column.name), getattr(theirs, column.name)
                assert a.dtype == b.dtype and np.array_equal(a, b), (field.name, column.name)
        else:
            assert mine == theirs, field.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_nothing_is_lost(path):
    trace = read_trace(path)
    data = reduce_trace(trace)
    assert_same(trace, parse_reduced(data))
    # Smaller than the gzipped trace, which itself is a fifteenth of the JSON.
    assert len(data) < path.stat().st_size


def test_it_is_read_in_place_of_a_trace(tmp_path):
    traces = sorted((RUNS / "h200x4-zigzag-65536").glob("rank*.json.gz"))
    for path in traces:
        (tmp_path / f"{path.name[:5]}.ringprof").write_bytes(reduce_trace(read_trace(path)))
    reduced = read_traces(sorted(tmp_path.iterdir()))
    for one, other in zip(read_traces(traces), reduced, strict=True):
        assert_same(dataclasses.replace(one, path=other.path), other)


@pytest.mark.parametrize("name", [b'"k\\ud8004"', b'"k\xff4"', b'"k\x004"'])
def test_whatever_a_name_holds_can_be_stored(name):
    trace = parse_trace(TEN.replace(b'"k4"', name))
    assert_same(trace, parse_reduced(reduce_trace(trace)))


def repacked(change):
    """A sound file with one thing changed."""
    file = msgspec.msgpack.decode(zlib.decompress(reduce_trace(parse_trace(TEN))[len(MAGIC) :]))
    change(*file.values())
    return MAGIC + zlib.compress(msgspec.msgpack.encode(file))


def record(**changes):
    """Another communication record, with what no reader lets through."""
    one = Collective("send", None, None, (0, 1), 2, 8, 8, "Float", 0, 1)
    return lambda head, columns: head["collectives"].append({**dataclasses.asdict(one), **changes})


def put(part, column, values, dtype):
    return lambda head, columns: columns[part].__setitem__(column, np.array(values, dtype).tobytes())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("activities", "name", [99] * 10, "<i4"), "index"),
        (put("activities", "name", [-1] * 10, "<i4"), "index"),
        (put("activities", "collective", [5] * 10, "<i4"), "index"),
        (put("activities", "category", [3] * 10, "<i1"), "category"),
        (put("activities", "start_ns", range(9, -1, -1), "<i8"), "order"),
        (put("activities", "end_ns", [-(1 << 62)] * 10, "<i8"), "ends before"),
        (put("activities", "end_ns", [(1 << 63) - 1] * 10, "<i8"), "73 years"),
        (put("activities", "end_ns", [1 << 60] * 10, "<i8"), "73 years"),
        (put("activities", "start_ns", [*range(9), -(1 << 63)], "<i8"), "order"),
        (put("activities", "start_ns", [-(1 << 63)] * 10, "<i8"), "73 years"),
        (put("activities", "stream", [0] * 9, "<i4"), "unequal"),
        (put("activities", "stream", [0] * 10, "<i1"), "multiple"),
        (lambda head, columns: columns.pop("launches"), "launches"),
        (lambda head, columns: head.update(world_size=10**12), "rank"),
        (lambda head, columns: head.update(world_size="many"), "world_size"),
        (lambda head, columns: head.update(groups={"0": [-5]}), "rank"),
        (record(in_elements=1 << 60), "count"),
        (record(out_split=[-1]), "count"),
        (record(group_size=1 << 40), "count"),
        (record(destination_rank=1 << 40), "rank"),
        (lambda head, columns: head.update(names=[""] * (2 << 20)), "length"),
        (lambda head, columns: columns.update({str(number): {} for number in range(100)}), "length"),
    ],
)
def test_what_no_reader_makes_is_refused(change, reason):
    with pytest.raises(TraceFormatError, match=reason):
        parse_reduced(repacked(change))


def test_a_bomb_is_not_expanded():
    bomb = MAGIC + zlib.compress(bytes(64 << 20), 9)
    with pytest.raises(TraceFormatError, match="expands beyond 16,777,216 bytes"):
        parse_reduced(bomb, limit_bytes=16 << 20)


def test_a_small_file_does_not_fill_memory(tmp_path):
    """Things that take a byte in the file and sixty in memory: refused before there is one of them."""
    sound = zlib.decompress(reduce_trace(parse_trace(TEN))[len(MAGIC) :])
    file = msgspec.msgpack.decode(sound)
    file["head"]["groups"] = {"x": "MARK"}
    count = 8 << 20
    lists = b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    bomb = msgspec.msgpack.encode(file).replace(msgspec.msgpack.encode("MARK"), lists)
    path = tmp_path / "rank0.ringprof"
    path.write_bytes(MAGIC + zlib.compress(bomb))
    program = (
        "import resource, sys; from ringprof.trace.reduced import read_reduced\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: read_reduced(sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    error, grown_kib = done.stdout.split()
    assert error == "TraceFormatError" and int(grown_kib) < 64 << 10


def test_every_cut_and_damage_is_told():
    data = reduce_trace(read_trace(REAL[0]))
    draw = random.Random(3)
    for _ in range(300):
        at = draw.randrange(len(MAGIC), len(data))
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]):
            try:
                trace = parse_reduced(damaged)
            except RingprofError as error:
                assert "\n" not in str(error)
            else:
                # zlib's own checksum covers the stream: what passes is what was written.
                assert_same(trace, read_trace(REAL[0]))
