"""Reduced traces: they hold everything that the analysis needs, and untrusted ones are safe to read."""

import json
import random
import zlib

import msgspec
import numpy as np
import pytest

from ringprof.common.limits import Limits, MemoryBudget, MemoryLimitError
from ringprof.errors import RingprofError, TraceFormatError
from ringprof.trace.columns import CommRecord, Trace
from ringprof.trace.kineto import parse_trace, read_trace
from ringprof.trace.ranks import read_traces
from ringprof.trace.reduced import MAGIC, parse_reduced, reduce_file, reduce_trace
from tests.paths import DATA
from tests.trace.kineto_text import REAL, TEN, document, kernel

RUNS = DATA.parents[1] / "traces"
TEN_EVENTS = [kernel(number) for number in range(10)]
SOURCES = [*REAL, RUNS / "cpu4-burst-4096" / "rank1.json.gz", RUNS / "h200x4-burst-262144-copied" / "rank2.json.gz"]


def assert_same(first: Trace, second: Trace) -> None:
    for field in Trace.__struct_fields__:
        expected, actual = getattr(first, field), getattr(second, field)
        if isinstance(expected, msgspec.Struct):
            for column in expected.__struct_fields__:
                a, b = getattr(expected, column), getattr(actual, column)
                assert a.dtype == b.dtype and np.array_equal(a, b), (field, column)
        else:
            assert expected == actual, field


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_reduced_trace_keeps_everything(path):
    trace = read_trace(path)
    data = reduce_trace(trace)
    assert_same(trace, parse_reduced(data))
    # The reduced trace is smaller than the gzipped one, which is a fifteenth of the JSON.
    assert len(data) < path.stat().st_size


def test_reduced_trace_can_replace_a_trace(tmp_path):
    traces = sorted((RUNS / "h200x4-zigzag-65536").glob("rank*.json.gz"))
    for path in traces:
        (tmp_path / f"{path.name[:5]}.ringprof").write_bytes(reduce_trace(read_trace(path)))
    reduced = read_traces(sorted(tmp_path.iterdir()))
    for trace, reduced_trace in zip(read_traces(traces), reduced, strict=True):
        assert_same(msgspec.structs.replace(trace, path=reduced_trace.path), reduced_trace)


@pytest.mark.parametrize("name", [b'"k\\ud8004"', b'"k\xff4"', b'"k\x004"'])
def test_any_name_can_be_stored(name):
    trace = parse_trace(TEN.replace(b'"k4"', name))
    assert_same(trace, parse_reduced(reduce_trace(trace)))


def repacked(change):
    """Return a valid reduced trace with one change."""
    file = msgspec.msgpack.decode(zlib.decompress(reduce_trace(parse_trace(TEN))[len(MAGIC) :]))
    change(file)
    return MAGIC + zlib.compress(msgspec.msgpack.encode(file))


def int64(*values):
    return np.array(values, "<i8").tobytes()


def record(**changes):
    """Return a change that adds a communication record with invalid fields."""
    valid = CommRecord("send", None, None, (0, 1), 2, 8, 8, "Float", 0, 1)

    def change(file):
        file["lists"] = {"sizes": int64(2, 0, 1), "data": int64(0, 1, -1)}
        indices = {"group_ranks": 0, "in_split": 1, "out_split": 1}
        file["collectives"].append({**msgspec.structs.asdict(valid), **indices, **changes})

    return change


def put(part, column, values, dtype):
    return lambda file: file["columns"][part].__setitem__(column, np.array(values, dtype).tobytes())


def group(*ranks):
    def change(file):
        file["lists"] = {"sizes": int64(len(ranks)), "data": int64(*ranks)}
        file.update(group_names={"sizes": int64(1), "data": b"0"}, group_lists=int64(0))

    return change


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
        (lambda file: file["columns"].pop("launches"), "launches"),
        (lambda file: file.update(world_size=10**12), "rank"),
        (lambda file: file.update(world_size="many"), "world_size"),
        (group(-5), "rank"),
        (group(1 << 20), "rank"),
        (record(in_elements=1 << 60), "count"),
        (record(out_split=2), "count"),
        (record(out_split=3), "index"),
        (record(out_split=-1), "index"),
        (record(group_size=1 << 40), "count"),
        (record(destination_rank=1 << 40), "rank"),
        (lambda file: file.update(names={"sizes": int64(20), "data": b"k" * 19}), "sizes"),
        (lambda file: file.update(names={"sizes": int64(-1, 20), "data": b"k" * 19}), "sizes"),
        (lambda file: file.update(names={"sizes": int64(1, 1), "data": b"k" * 19}), "sizes"),
        (lambda file: file.update(names={"sizes": int64(1), "data": b"\xff"}), "damaged"),
        (lambda file: file.update(group_lists=int64(0)), "damaged"),
        (lambda file: file["columns"].update({str(number): {} for number in range(100)}), "length"),
    ],
)
def test_reduced_trace_with_invalid_columns_is_refused(change, reason):
    with pytest.raises(TraceFormatError, match=reason):
        parse_reduced(repacked(change))


def test_a_bomb_is_not_expanded():
    bomb = MAGIC + zlib.compress(bytes(64 << 20), 9)
    with pytest.raises(TraceFormatError, match="expands beyond 16,777,216 bytes"):
        parse_reduced(bomb, budget=MemoryBudget(Limits(expanded_bytes=16 << 20)))


MOST = (1 << 64) - 1


def many_events(count):
    return [kernel(number, name=f"k{number}") for number in range(count)]


def groups_of_one(count):
    config = [{"pg_name": str(number), "pg_size": 1, "ranks": [0]} for number in range(count)]
    return {"distributedInfo": {"rank": 0, "world_size": 1, "pg_config": config}}


@pytest.mark.parametrize(
    "build",
    [
        lambda: document(TEN_EVENTS, note="\U0001f4a5" * 1000),
        lambda: document(TEN_EVENTS, note=json.loads("[" * 500 + "]" * 500)),
        lambda: document(TEN_EVENTS, deviceProperties=[{"id": number, "name": "H200"} for number in range(4200)]),
        lambda: document(TEN_EVENTS, **groups_of_one(70_000)),
        lambda: document([kernel(0, name="\U0001f4a5" * 100_000)]),
        lambda: document([kernel(0, args={"correlation": MOST, "Comms Id": MOST, "Collective name": "send"})]),
        lambda: document(TEN_EVENTS, baseTimeNanoseconds=(1 << 61) - (1 << 40)),
        lambda: document(many_events(50_000)),
    ],
)
def test_every_accepted_trace_can_be_reduced_and_read(build):
    """Accept every trace that the Kineto reader accepts: both have the same limits, so no rank is lost."""
    trace = parse_trace(build())
    assert trace.warnings == []
    assert_same(trace, parse_reduced(reduce_trace(trace)))


def test_lone_surrogates_in_names_are_stored():
    """Replace lone surrogates: JSON can hold them, but UTF-8, and so the reduced form, cannot."""
    config = [{"pg_name": "g\ud800", "pg_size": 2, "ranks": [0, 1]}]
    info = {"rank": 3, "world_size": 8, "pg_config": config}
    device = {"id": 0, "name": "H\udfff00"}
    data = document(TEN_EVENTS, host_name="a\ud800", deviceProperties=[device], distributedInfo=info)
    trace = parse_trace(data)
    assert [warning.code for warning in trace.warnings] == ["damaged_metadata"]
    assert (trace.host, trace.groups, trace.devices[0].name) == ("a?", {"g?": (0, 1)}, "H?00")
    assert_same(trace, parse_reduced(reduce_trace(trace)))
    elsewhere = msgspec.structs.replace(trace, path="bad\udcff/rank0.json")
    assert parse_reduced(reduce_trace(elsewhere)).path == "bad?/rank0.json"


def test_reduced_trace_needs_no_more_memory_than_its_trace():
    """Read the reduced trace with every memory limit that suffices for the trace itself."""
    data = document([kernel(number, name=f"kernel {number}") for number in range(2000)], **groups_of_one(300))
    taken = []
    for limit in range(1 << 20, 6 << 20, 1 << 16):
        budget = MemoryBudget(Limits(memory_bytes=limit))
        try:
            trace = parse_trace(data, "-", budget)
        except MemoryLimitError:
            continue
        taken.append(limit)
        assert_same(trace, parse_reduced(reduce_trace(trace), budget=MemoryBudget(Limits(memory_bytes=limit))))
    assert 10 < len(taken) < 80


def test_truncated_or_damaged_reduced_trace_is_refused():
    data = reduce_trace(read_trace(REAL[0]))
    draw = random.Random(3)
    for _ in range(300):
        offset = draw.randrange(len(MAGIC), len(data))
        for damaged in (
            data[:offset],
            data[:offset] + bytes([data[offset] ^ (1 << draw.randrange(8))]) + data[offset + 1 :],
        ):
            try:
                trace = parse_reduced(damaged)
            except RingprofError as error:
                assert "\n" not in str(error)
            else:
                # zlib's checksum covers the stream, so data that passes is unchanged.
                assert_same(trace, read_trace(REAL[0]))


def test_unreadable_trace_is_not_reduced(tmp_path):
    trace, target = tmp_path / "rank0.json", tmp_path / "rank0.ringprof"
    trace.write_bytes(b"no trace")
    assert not reduce_file(trace, target) and not target.exists()
    trace.write_bytes(TEN)
    assert reduce_file(trace, target) and len(parse_reduced(target.read_bytes()).activities.start_ns) == 10
