"""Rare defects of files, each with the results that must still be correct."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import pytest

from ringprof.errors import InputError, TraceFormatError
from ringprof.trace import nsys
from ringprof.trace.columns import NONE, Trace
from ringprof.trace.kineto import parse_trace
from ringprof.trace.kineto.collectives import whole_number
from ringprof.trace.kineto.event_tables import integers
from ringprof.trace.nccl_payloads import Layouts, add_entries, decode
from ringprof.trace.ranks import read_traces
from ringprof.trace.reduced import MAGIC, parse_reduced
from tests.trace.kineto_text import document, kernel


def codes(trace: Trace) -> list[str]:
    return [warning.code for warning in trace.warnings]


def events(trace: Trace) -> list[str]:
    return [trace.names[index] for index in trace.activities.name]


@pytest.mark.parametrize("between", ["", ', "schemaVersion": 1'])
def test_second_event_list_is_a_warning_and_the_first_is_read(between: str) -> None:
    text = document([kernel(1), kernel(2)]).decode()
    second = document([kernel(7)]).decode()
    joined = text.rstrip().removesuffix("}") + between + "," + second.lstrip().removeprefix("{")
    trace = parse_trace(joined.encode())
    assert events(trace) == ["k1", "k2"]
    assert "second_event_list" in codes(trace) and "damaged_events" not in codes(trace)


def test_data_behind_a_gzip_stream_is_a_warning() -> None:
    packed = gzip.compress(document([kernel(1)]))
    trace = parse_trace(packed + b"\0\0" + b"a line of a log\n")
    assert events(trace) == ["k1"]
    (warning,) = [notice for notice in trace.warnings if notice.code == "damaged_compression"]
    assert warning.message == "the data behind the gzip stream is not gzip: read up to there"
    # Zeros behind a gzip member are padding.
    assert codes(parse_trace(packed + b"\0" * 600)) == codes(parse_trace(document([kernel(1)])))


@pytest.mark.parametrize(
    ("value", "expected"), [(7.0, 7), (-3.0, -3), (7.5, None), (1e300, None), (float("nan"), None), (2.0**63, None)]
)
def test_whole_numbers_may_be_written_as_decimals(value: float, expected: int | None) -> None:
    assert whole_number(value) == expected


def test_integers_beyond_64_bits_are_missing() -> None:
    assert integers([2**63, 2**63 - 1, None, -(2**63) + 1]).tolist() == [NONE, 2**63 - 1, NONE, -(2**63) + 1]


def test_process_with_an_invalid_name_is_ignored() -> None:
    named = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": args} for args in ({"name": 7}, {"name": "stream 7"})
    ]
    assert events(parse_trace(document([*named, kernel(1)]))) == ["k1"]


def test_folder_of_broken_traces_error_names_the_first(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("no trace")
    with pytest.raises(InputError, match=r"a\.json: not a Kineto trace"):
        read_traces([tmp_path / "a.json", tmp_path / "b.json"], in_folder=True)


@pytest.mark.parametrize("data", [b"", b"something else", MAGIC[:-1] + b"\x7f"])
def test_reduced_trace_of_another_version_is_refused(data: bytes) -> None:
    with pytest.raises(TraceFormatError, match=r"^reduced trace: not a reduced trace of this version: remove it"):
        parse_reduced(data)


# Size in bytes and signedness of NVTX's types (nvToolsExtPayload.h) on 64-bit Linux, by number.
NVTX_TYPES = {
    5: (4, True), 6: (4, False), 7: (8, True), 8: (8, False), 9: (8, True), 10: (8, False), 15: (4, True),
    16: (4, False), 17: (8, True), 18: (8, False), 22: (8, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", range(30))
def test_fields_of_payloads_are_of_the_size_and_sign_of_their_type(kind: int) -> None:
    layouts: Layouts = {}
    add_entries(layouts, [(1, "Peer rank", kind, None)])
    payload: Any = b"\xfe" + b"\xff" * 7
    fields = decode(struct.pack("<QQQQ", 0, 1, len(payload), 0) + payload, layouts)
    if kind not in NVTX_TYPES:
        assert fields == {}
        return
    size, signed = NVTX_TYPES[kind]
    assert fields == {"peer": int.from_bytes(payload[:size], "little", signed=signed)}


def test_nsight_copy_names_match_cupti() -> None:
    """Check the names against CUPTI's CUpti_ActivityMemcpyKind, in its order: host, device, array, peer."""
    ends = "HtoD DtoH HtoA AtoH AtoA AtoD DtoA DtoD HtoH PtoP".split()
    named = {number: f"Memcpy {pair}" for number, pair in enumerate(ends, 1)}
    # Nsight Systems numbers the page migrations of managed memory behind CUPTI's kinds.
    assert nsys._COPY_NAMES == named | {11: "Page migration to the device", 12: "Page migration to the host"}


def test_payload_field_at_two_offsets_is_not_read() -> None:
    layouts: Layouts = {}
    add_entries(layouts, [(1, "Peer rank", 5, 8), (1, "Peer rank", 5, 16), (1, "Rank", 5, 4), (1, "Rank", 5, 4)])
    assert layouts[1]["peer"] is None and layouts[1]["rank"] is not None
    add_entries(layouts, [(1, "Peer rank", 5, 8)])
    assert layouts[1]["peer"] is None
