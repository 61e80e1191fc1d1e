"""Text behind the event list: metadata of the same trace, or another trace of a concatenated file."""

from __future__ import annotations

import gzip
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from ringprof.trace.columns import TABLES, Device, Trace
from ringprof.trace.kineto import parse_trace
from tests.trace.kineto_text import kernel

BASE_NS = 1_790_857_026_000_000_000
DEVICES = [{"id": number, "name": f"GPU {number}", "numSms": 132} for number in range(4)]


def events_of(rank: int) -> list[dict[str, Any]]:
    args = {"device": rank, "stream": 7}
    return [kernel(n, name=f"r{rank}k{n}", args={**args, "correlation": n + 1}) for n in range(9)]


def fields_of(rank: int) -> dict[str, Any]:
    config = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}, {"pg_name": "9", "ranks": [1]}]
    return {
        "schemaVersion": 1,
        "deviceProperties": DEVICES,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": config},
        "baseTimeNanoseconds": BASE_NS + rank,
        "host_name": f"node{rank}",
    }


def text_of(rank: int, *, behind: bool, indent: int | None = None) -> bytes:
    events, fields = {"traceEvents": events_of(rank)}, fields_of(rank)
    return json.dumps(events | fields if behind else fields | events, indent=indent).encode()


def content(trace: Trace) -> dict[str, Any]:
    """Return all fields of a trace, with columns as lists."""
    facts = {name: getattr(trace, name) for name in trace.__struct_fields__ if name not in (*TABLES, "warnings")}
    tables = {name: msgspec.structs.asdict(getattr(trace, name)) for name in TABLES}
    return facts | {name: {key: column.tolist() for key, column in table.items()} for name, table in tables.items()}


def names(trace: Trace) -> list[str]:
    return [trace.names[index] for index in trace.activities.name]


def codes(trace: Trace) -> set[str]:
    return {warning.code for warning in trace.warnings}


@pytest.mark.parametrize("indent", [None, 1])
def test_metadata_behind_events_is_read_at_any_piece_size(monkeypatch, indent):
    """Read metadata behind the events with any piece size; entries of "deviceProperties" look like events at a cut."""
    front, behind = text_of(1, behind=False, indent=indent), text_of(1, behind=True, indent=indent)
    expected = content(parse_trace(front))
    assert (expected["rank"], expected["world_size"], expected["host"]) == (1, 2, "node1")
    assert expected["devices"] == [Device(number, f"GPU {number}") for number in range(4)]
    assert expected["activities"]["start_ns"][0] == BASE_NS + 1 + 1_000_500
    for size in range(1, len(behind) + 1, 7):
        monkeypatch.setattr("ringprof.trace.kineto.byte_source.PIECE_BYTES", size)
        trace = parse_trace(behind)
        assert (content(trace), trace.warnings) == (expected, []), size


def test_metadata_behind_the_events_of_a_compressed_trace():
    """Check compressed files, whose pieces have other sizes."""
    expected = content(parse_trace(text_of(0, behind=False)))
    assert content(parse_trace(gzip.compress(text_of(0, behind=True)))) == expected
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.ZstdCompressor().compress(text_of(0, behind=True))
    assert content(parse_trace(packed)) == expected


def test_cpu_trace_with_metadata_at_the_end_keeps_every_operator():
    events = [kernel(n, cat="cpu_op", name=f"aten::op{n}") for n in range(3)]
    trace = parse_trace(json.dumps({"traceEvents": events, "deviceProperties": []}).encode())
    assert len(trace.operators.start_ns) == 3


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("between", [b"", b"\n", b"\n\n  "])
def test_first_of_concatenated_traces_is_read(monkeypatch, first, second, between):
    whole = text_of(0, behind=first) + between + text_of(1, behind=second)
    expected = content(parse_trace(text_of(0, behind=first)))
    for size in (100, 333, 1 << 20):
        monkeypatch.setattr("ringprof.trace.kineto.byte_source.PIECE_BYTES", size)
        trace = parse_trace(whole, "rank1.json")
        assert content(trace) == {**expected, "path": "rank1.json"}
        assert codes(trace) == {"second_event_list"}


def test_concatenated_gzip_files_are_a_warning():
    trace = parse_trace(gzip.compress(text_of(0, behind=False)) + gzip.compress(text_of(1, behind=False)))
    assert (trace.rank, names(trace)) == (0, [f"r0k{n}" for n in range(9)])
    assert codes(trace) == {"second_event_list"}


@pytest.mark.parametrize("second", [json.dumps(events_of(1)).encode(), text_of(1, behind=False)])
def test_event_list_takes_no_rank_from_concatenated_data(second):
    trace = parse_trace(json.dumps(events_of(0)).encode() + b"\n" + second, "rank1.json")
    assert (trace.rank, names(trace)) == (None, [f"r0k{n}" for n in range(9)])
    assert "second_event_list" in codes(trace)


@pytest.mark.parametrize("cut", [1, 20, 60, 150])
@pytest.mark.parametrize("devices", [[], DEVICES[:1], DEVICES])
def test_truncated_trace_takes_nothing_from_a_concatenated_one(cut, devices):
    first = json.dumps({"traceEvents": events_of(0)}).encode()[: -2 - cut]
    second = json.dumps({**fields_of(1), "deviceProperties": devices, "traceEvents": events_of(1)}).encode()
    trace = parse_trace(first + second, "rank1.json")
    assert {name[:2] for name in names(trace)} == {"r0"} and len(names(trace)) >= 7
    assert (trace.rank, trace.world_size, trace.base_ns) == (None, None, 0)
    assert "second_event_list" in codes(trace)


def test_second_event_list_in_an_object_gives_no_rank():
    """Ignore fields behind both lists, which may belong to either; fields before both belong to the first."""
    first, second = text_of(0, behind=False), text_of(1, behind=False)
    joined = parse_trace(first.rstrip(b"}") + b"," + second.lstrip(b"{"))
    assert (joined.rank, names(joined)[0], codes(joined)) == (0, "r0k0", {"second_event_list"})
    bare = parse_trace(json.dumps({"traceEvents": events_of(0)}).encode().rstrip(b"}") + b"," + second.lstrip(b"{"))
    assert (bare.rank, codes(bare)) == (None, {"second_event_list"})


def test_metadata_text_may_look_like_the_end_of_a_document():
    text = json.dumps({"traceEvents": events_of(1), "note": 'a "}{" b', **fields_of(1)})
    for damaged in (False, True):
        trace = parse_trace((text[:-1] + ("x" if damaged else "}")).encode())
        assert trace.rank == 1
        assert codes(trace) == ({"damaged_metadata"} if damaged else set())
    whole = parse_trace(text.encode() + text_of(0, behind=False))
    assert (whole.rank, codes(whole)) == (1, {"second_event_list"})
    assert np.all(whole.activities.device == 1)


def test_damaged_metadata_of_two_traces_names_no_rank():
    """Read the second list if the first has lost its key; the metadata before it may belong to either."""
    first = text_of(0, behind=False).replace(b'"traceEvents"', b'"traceEvXnts"')
    trace = parse_trace(first + text_of(1, behind=False))
    assert (trace.rank, names(trace)[0]) == (None, "r1k0")
    assert "damaged_metadata" in codes(trace)
    # A single trace with the same damage keeps its rank.
    damaged = text_of(1, behind=False).replace(b'"schemaVersion": 1,', b'"schemaVersion" 1,')
    assert (parse_trace(damaged).rank, codes(parse_trace(damaged))) == (1, {"damaged_metadata"})


@pytest.mark.parametrize("value", ["nan", "NaN", "-Infinity", '[1, {"a": nan}]'])
@pytest.mark.parametrize("fields", [{}, {"host_name": "node0"}, {"deviceProperties": DEVICES}])
def test_an_unsound_last_event_cuts_nothing_off(value: str, fields: dict[str, Any]) -> None:
    last = kernel(9, args={"device": 0, "stream": 7, "correlation": 10, "v": 0})
    text = json.dumps({"traceEvents": [*events_of(0), last]} | fields).replace('"v": 0', f'"v": {value}')
    trace = parse_trace(text.encode())
    assert [warning.code for warning in trace.warnings] == ["repaired_events"]
    assert names(trace)[-1] == "k9" and trace.host == fields.get("host_name")


def test_one_event_a_line_is_whole_where_its_last_line_is() -> None:
    lines = [json.dumps(event) for event in events_of(0)]
    codes = [warning.code for warning in parse_trace("\n".join(lines).encode()).warnings]
    assert codes == ["misplaced_commas"]
    cut = "\n".join([*lines, lines[0][:-20]])
    assert "truncated" in [warning.code for warning in parse_trace(cut.encode()).warnings]
    # A list that lost its bracket has commas; then nothing tells that it is whole.
    codes = [warning.code for warning in parse_trace(",\n".join(lines).encode()).warnings]
    assert "truncated" in codes
