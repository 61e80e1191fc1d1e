"""Intact traces: every column is compared with literal values, and with a slow reference reader of real traces."""

import gzip
import json
import sys
from decimal import Decimal

import numpy as np
import pytest

from ringprof.common.limits import Limits, MemoryBudget
from ringprof.errors import InputError, MissingExtraError, TraceFormatError
from ringprof.trace.columns import KERNEL, MEMCPY, MEMSET, NONE, CommRecord, Device
from ringprof.trace.kineto import parse_trace, read_trace
from ringprof.trace.kineto.byte_source import ByteSource
from ringprof.trace.kineto.collectives import whole_number
from ringprof.trace.kineto.event_list import EventStream
from tests.trace.kineto_text import REAL, TEN, document, kernel

DEVICE = {"kernel": KERNEL, "gpu_memcpy": MEMCPY, "gpu_memset": MEMSET}


def test_the_columns_of_a_small_trace():
    base = 1_790_857_026_000_000_000
    send = {"Collective name": "Send", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "BFloat16"}
    group = {"Process Group Name": "1", "Process Group Description": "cp", "Group size": 2}
    peers = {"Dst Rank": 5, "Process Group Ranks": "[3, 5]", "Seq": 9, "Comms Id": 18446744073709551615}
    events = [
        kernel(1, args={"External id": 70, "device": 2, "stream": 20, "correlation": 11, "graph node id": 4}),
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        kernel(0, cat="gpu_memcpy", name="Memcpy PtoP", args={"device": 2, "stream": 8, "bytes": 4096}),
        {"ph": "s", "id": 11, "cat": "ac2g", "name": "ac2g", "pid": 9, "tid": 9, "ts": 900.125},
        kernel(
            0, cat="cuda_runtime", name="cudaLaunchKernel", ts=900.125, dur=2, pid=9, tid=9, args={"correlation": 11}
        ),
        kernel(0, cat="cuda_runtime", name="cudaLaunchKernel", ts=901, dur=2, pid=9, tid=9, args={"correlation": 12}),
        kernel(0, cat="cpu_op", name="aten::add", pid=9, tid=9),
        kernel(0, cat="cpu_op", name="c10d::send", pid=9, tid=9, args={"External id": 70}),
        kernel(0, cat="cpu_op", name="record_param_comms", tid=9, args={"External id": 71, **send, **group, **peers}),
        kernel(0, cat="user_annotation", name="ring_step_fwd_0", pid=9, tid=9, args={"External id": 72}),
        kernel(0, cat="gpu_user_annotation", name="ring_step_fwd_0", pid=2, tid=20, args={"External id": 72}),
        kernel(0, cat="python_function", name="main.py: main", pid=9, tid=9),
    ]
    device = {"id": 2, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "numSms": 132}
    trace = parse_trace(document(events, deviceProperties=[device], baseTimeNanoseconds=base, host_name="node7"))
    activities = trace.activities
    assert activities.start_ns.tolist() == [base + 1_000_500, base + 1_100_500]
    assert activities.end_ns.tolist() == [base + 1_050_750, base + 1_150_750]
    assert [trace.names[index] for index in activities.name] == ["Memcpy PtoP", "k1"]
    assert activities.category.tolist() == [MEMCPY, KERNEL]
    assert activities.device.tolist() == [2, 2]
    assert activities.stream.tolist() == [8, 20]
    assert activities.correlation.tolist() == [NONE, 11]
    assert activities.external_id.tolist() == [NONE, 70]
    assert activities.size_bytes.tolist() == [4096, NONE]
    assert activities.graph_node.tolist() == [NONE, 4]
    assert activities.collective.tolist() == [NONE, NONE]
    assert trace.launches.start_ns.tolist() == [base + 900_125]
    assert trace.launches.correlation.tolist() == [11]
    assert trace.launches.thread.tolist() == [9]
    assert [trace.names[index] for index in trace.operators.name] == ["c10d::send"]
    assert [trace.names[index] for index in trace.annotations.name] == ["ring_step_fwd_0"]
    assert trace.annotations.device.tolist() == [NONE]
    assert trace.device_annotations.device.tolist() == [2]
    assert trace.device_annotations.thread.tolist() == [20]
    assert trace.comm_records.external_id.tolist() == [71]
    assert trace.collectives == [
        CommRecord(
            name="send",
            group="1",
            group_description="cp",
            group_ranks=(3, 5),
            group_size=2,
            in_elements=8,
            out_elements=8,
            dtype="BFloat16",
            source_rank=None,
            destination_rank=5,
            sequence=9,
            comms_id=18446744073709551615,
        )
    ]
    assert (trace.rank, trace.world_size, trace.host) == (3, 8, "node7")
    assert trace.devices == [Device(2, "NVIDIA H200")]
    assert (trace.events_total, trace.events_skipped) == (12, 0)
    assert [warning.code for warning in trace.warnings] == ["missing_correlation"]
    assert trace.base_ns == base


def slow_rows(path):
    """Read device activities with the standard library, event by event, with times as Decimal."""
    with gzip.open(path) as file:
        whole = json.load(file, parse_float=Decimal, parse_int=Decimal)
    base = int(whole["baseTimeNanoseconds"])
    rows, launches = [], []
    for event in whole["traceEvents"]:
        args = event.get("args", {})
        if event["ph"] != "X":
            continue
        start = int(event["ts"] * 1000) + base
        end = start + int(event["dur"] * 1000)
        if event["cat"] in DEVICE:
            numbers = [int(args.get(key, -1)) for key in ("device", "stream", "correlation", "External id", "bytes")]
            rows.append((start, end, event["name"], DEVICE[event["cat"]], *numbers))
        if event["cat"] in ("cuda_runtime", "cuda_driver"):
            launches.append((start, end, int(event["tid"]), int(args.get("correlation", -1))))
    used = {row[6] for row in rows}
    return sorted(rows), sorted(launch for launch in launches if launch[3] in used), len(whole["traceEvents"])


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.parent.name)
def test_trace_columns_equal_a_slow_reader(path):
    rows, launches, total = slow_rows(path)
    trace = read_trace(path)
    a = trace.activities
    names = [trace.names[index] for index in a.name]
    columns = (a.start_ns, a.end_ns, names, a.category, a.device, a.stream, a.correlation, a.external_id, a.size_bytes)
    assert sorted(zip(*(list(column) for column in columns), strict=True)) == rows
    calls = trace.launches
    launch_columns = (calls.start_ns, calls.end_ns, calls.thread, calls.correlation)
    assert sorted(zip(*(list(column) for column in launch_columns), strict=True)) == launches
    assert trace.events_total == total
    assert trace.warnings == []
    assert trace.groups == {"0": tuple(range(8)), "default_pg": tuple(range(8))}
    assert {collective.name for collective in trace.collectives} == {"send", "recv", "wait"}
    hops = [record for record in trace.collectives if record.name == "send" and record.dtype == "BFloat16"]
    assert [(record.in_elements, record.destination_rank) for record in hops] == [(83886080, (trace.rank or 0) + 1)]


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 16])
def test_piece_size_does_not_change_the_result(size, monkeypatch):
    """Read a file in pieces of any size with the same result as in one piece."""
    data = gzip.decompress(REAL[0].read_bytes())[:200_000]
    whole = parse_trace(data)
    monkeypatch.setattr("ringprof.trace.kineto.byte_source.PIECE_BYTES", max(size, 50))
    parts = parse_trace(data)
    assert np.array_equal(whole.activities.start_ns, parts.activities.start_ns)
    assert sorted(whole.names) == sorted(parts.names)
    assert (whole.warnings, whole.events_total) == (parts.warnings, parts.events_total)


def test_event_like_objects_in_arguments_are_not_events(monkeypatch):
    inner = [{"name": "a", "ph": "b"}, {"ph": "c", "cat": "d"}, {"name": "e"}]
    events = [kernel(number, args={"correlation": number, "items": inner}) for number in range(50)]
    for size in (60, 100, 333, 1 << 20):
        monkeypatch.setattr("ringprof.trace.kineto.byte_source.PIECE_BYTES", size)
        trace = parse_trace(document(events))
        assert len(trace.activities.start_ns) == 50
        assert (trace.events_skipped, trace.warnings) == (0, [])


def test_metadata_behind_the_events_is_read():
    events = json.dumps([kernel(0)]).encode()
    facts = b'"distributedInfo": {"rank": 5, "world_size": 8}, "baseTimeNanoseconds": 7000, "INFO": ["a"]'
    trace = parse_trace(b'{"traceEvents": ' + events + b", " + facts + b"}")
    assert (trace.rank, trace.activities.start_ns.tolist()) == (5, [1_007_500])


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json.gz", 3),
        ("trace_rank_12.json", 12),
        ("rank07_trace.json.gz", 7),
        ("run-r2.json", 2),
        ("worker5.1712.pt.trace.json", 5),
        ("4.json", 4),
        ("rank_6/trace.json", 6),
        ("host_1234.1712345678901.pt.trace.json", None),
        ("trace.json", None),
    ],
)
def test_rank_from_the_file_name(name, rank):
    data = json.dumps({"traceEvents": [kernel(0)]}).encode()
    assert parse_trace(data, f"some/folder/{name}").rank == rank


def test_a_cpu_trace_keeps_every_operator():
    events = [kernel(n, cat="cpu_op", name=f"aten::op{n}") for n in range(3)] + [kernel(4, cat="python_function")]
    assert len(parse_trace(document(events)).operators.start_ns) == 3
    assert len(parse_trace(document(events, deviceProperties=[])).operators.start_ns) == 3
    assert len(parse_trace(document([*events, kernel(5)])).operators.start_ns) == 0


def test_old_categories_are_capitalised():
    events = [kernel(0, cat="Kernel"), kernel(1, cat="Memcpy"), kernel(2, cat="Memset"), kernel(0, cat="Runtime")]
    trace = parse_trace(document(events))
    assert trace.activities.category.tolist() == [KERNEL, MEMCPY, MEMSET]
    assert len(trace.launches.start_ns) == 1


def test_group_whose_size_disagrees_is_ignored():
    config = [
        {"pg_name": "whole", "pg_size": 2, "ranks": [4, 6]},
        {"pg_name": "fewer", "pg_size": 4, "ranks": [0, 1]},
        {"pg_name": "more", "pg_size": 1, "ranks": [0, 1]},
        {"pg_name": "of no stated size", "ranks": [3, 5]},
        {"pg_name": "one unreadable", "pg_size": 3, "ranks": [0, "x", 2]},
        {"pg_name": "all ranks", "pg_size": 0, "ranks": []},
        {"ranks": [0], "pg_size": 1},
    ]
    info = {"rank": 3, "world_size": 8, "pg_config": config}
    trace = parse_trace(document([kernel(0)], distributedInfo=info))
    assert trace.groups == {"whole": (4, 6), "of no stated size": (3, 5)}


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("stream 7", 7), ("rank_2", 2), (" 5 ", 5), ("-4", -4)])
def test_text_that_is_a_number(text, number):
    assert whole_number(text) == number


def test_numbers_beyond_64_bits_are_none():
    assert whole_number(2**64 - 1) == 2**64 - 1 and whole_number(-(2**63)) == -(2**63)
    assert whole_number(2**64) is None and whole_number(-(2**63) - 1) is None


@pytest.mark.parametrize("text", ["1_000", "1e3", "8x", "0x10", "7.5", "", "1 2", "²", "٣", "9" * 30, "NaN"])
def test_text_beginning_like_a_number_is_none(text):
    assert whole_number(text) is None
    info = {"rank": text, "world_size": 8}
    assert parse_trace(document([kernel(0)], distributedInfo=info)).rank is None
    # int(), Decimal and NumPy all accept "1_000" as a number.
    (row,) = parse_trace(document([kernel(0, args={"correlation": text})])).activities.correlation.tolist()
    assert row == NONE


@pytest.mark.parametrize("text", ["1_000", "1e 3", "²", "0x10"])
def test_malformed_times_are_missing(text):
    trace = parse_trace(document([kernel(0), kernel(1, ts=text)]))
    assert [(w.code, w.count) for w in trace.warnings] == [("missing_time", 1)]


def test_kernel_with_its_own_collective_metadata():
    args = {"Collective name": "all_to_all", "In split size": "[2, 0]", "Out split size": [1, 1], "stream": 3}
    trace = parse_trace(document([kernel(0, args=args), kernel(1, args=args), kernel(2)]))
    assert trace.activities.collective.tolist() == [0, 0, NONE]
    assert (trace.collectives[0].in_split, trace.collectives[0].out_split) == ((2, 0), (1, 1))


def test_compressed_traces_are_read_with_any_name(tmp_path):
    file = tmp_path / "rank1.json"
    file.write_bytes(gzip.compress(TEN[:500]) + gzip.compress(TEN[500:]) + b"\0" * 100)
    assert len(read_trace(file).activities.start_ns) == 10


def test_zstd_traces_are_read(tmp_path):
    file = tmp_path / "rank1.json.zst"
    zstandard = pytest.importorskip("zstandard")
    file.write_bytes(zstandard.compress(TEN[:900]) + zstandard.compress(TEN[900:]))
    assert len(read_trace(file).activities.start_ns) == 10
    file.write_bytes(zstandard.compress(TEN[:900]) + zstandard.compress(TEN[900:])[:-20])
    assert {warning.code for warning in read_trace(file).warnings} >= {"truncated"}


def test_zstd_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    file = tmp_path / "rank1.json"
    file.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(MissingExtraError, match="pip install zstandard"):
        read_trace(file)


def test_compression_bomb_is_refused(tmp_path):
    file = tmp_path / "bomb.json.gz"
    file.write_bytes(gzip.compress(TEN[:-3] + b" " * (8 << 20)))
    with pytest.raises(InputError, match=r"bomb\.json\.gz: expands to more than 1 MiB; .*--max-bytes"):
        read_trace(file, MemoryBudget(Limits(expanded_bytes=1 << 20)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"hello", 'no "traceEvents" list'),
        (TEN[:100], "cut off, or damaged, before its first event"),
        (document([]), "nothing to analyse: 0 events"),
        (document([{"ph": "M", "name": "process_name", "args": {"name": "python"}}]), "nothing to analyse: 1 events"),
        (document([kernel(0, ph="B"), kernel(0, ph="E")]), "only begin/end events"),
        (document([kernel(0, cat="Op")]), r"nothing to analyse: 1 events, .*; of category 'Op' \(1\)"),
    ],
)
def test_invalid_traces_are_a_one_line_error(data, message):
    with pytest.raises(TraceFormatError, match=message) as caught:
        parse_trace(data, "some.json")
    assert str(caught.value).startswith("some.json: ")
    assert "\n" not in str(caught.value)


def test_missing_trace_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "none.json")


def test_memory_is_bounded_by_the_piece_size():
    """Yield pieces of about the read size, however long the list of events is."""
    data = document([kernel(number) for number in range(60_000)])
    source = ByteSource(data, "-")
    pieces = list(EventStream(source, "-").pieces())
    assert len(pieces) > 3
    assert max(len(piece.data) for piece in pieces) < 2 * (2 << 20)
    assert sum(len(piece.data) for piece in pieces) < len(data)


GPU = {"id": 0, "name": "NVIDIA H100", "totalGlobalMem": 1}
OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5, "dur": 10}
LAUNCH = {**OPERATOR, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": 7}}


@pytest.mark.parametrize(
    ("events", "fields", "lacks"),
    [
        ([OPERATOR, LAUNCH], {}, True),
        ([OPERATOR], {"deviceProperties": [GPU]}, True),
        ([OPERATOR, LAUNCH, kernel(0)], {"deviceProperties": [GPU]}, False),
        ([OPERATOR, LAUNCH], {"distributedInfo": {"backend": "gloo", "rank": 0}}, True),
        ([OPERATOR, {**LAUNCH, "name": "cudaGetDeviceCount"}], {"distributedInfo": {"backend": "gloo"}}, False),
        # A gloo run on a machine with a GPU, which it does not use.
        ([OPERATOR], {"deviceProperties": [GPU], "distributedInfo": {"backend": "gloo", "rank": 0}}, False),
        ([OPERATOR], {"deviceProperties": [], "distributedInfo": {"backend": "gloo", "rank": 0}}, False),
        ([OPERATOR], {"distributedInfo": {"backend": "cpu:gloo,cuda:nccl", "rank": 0}}, True),
    ],
)
def test_gpu_run_without_device_activities_is_not_a_cpu_run(events, fields, lacks):
    trace = parse_trace(document(events, **fields))
    assert trace.lacks_device is lacks
    assert ("no_device_activities" in [warning.code for warning in trace.warnings]) is lacks


@pytest.mark.parametrize("category", ["mtia_ccp_events", "hpu_op", "privateuse1_kernels"])
def test_rows_of_an_unknown_category_are_a_warning(category):
    """Unread device rows do not make a CPU run; next to kernels that are read, they are named in a warning."""
    unknown = [kernel(number, cat=category) for number in range(3)]
    (warning,) = parse_trace(document([OPERATOR, *unknown])).warnings
    assert (warning.code, warning.message) == (
        "no_device_activities",
        f"what ran on the device is not read: category '{category}' (3)",
    )
    trace = parse_trace(document([OPERATOR, kernel(9), *unknown]))
    assert len(trace.activities.start_ns) == 1
    (warning,) = trace.warnings
    assert (warning.code, warning.count) == ("unknown_category", 3)


@pytest.mark.parametrize("category", ["Kernel", "gpu_kernel", "concurrent_kernel", "cuda memcpy", "GPU_MEMSET"])
def test_categories_of_other_writers_are_read(category):
    trace = parse_trace(document([kernel(0, cat=category)]))
    assert trace.activities.category.tolist() == [{"l": 0, "y": 1}.get(category[-1], 2)]
    assert not trace.warnings


def merged(name: str) -> bytes:
    """Return two ranks in one file, as merged by different tools."""
    launch = {**LAUNCH, "pid": 100}
    first = [kernel(number) for number in range(10)]
    match name:
        case "shifted processes":
            second = [{**event, "pid": 1_000_000} for event in first]
        case "labelled processes":
            first = [{**event, "pid": "[TP00] 0"} for event in first]
            second = [{**event, "pid": "[TP01] 0"} for event in first]
        case _:
            first += [launch] * 10
            args = {"device": 1, "stream": 7}
            second = [{**event, "pid": 1, "args": args} for event in first[:10]] + [{**launch, "pid": 200}] * 10
    return document(first + second)


@pytest.mark.parametrize("name", ["shifted processes", "labelled processes", "a device each"])
def test_ranks_merged_into_one_file_are_refused(name):
    with pytest.raises(TraceFormatError, match=r"some\.json: several ranks, merged into one file"):
        parse_trace(merged(name), "some.json")


@pytest.mark.parametrize(
    "events",
    [
        # One row of thirty is damage, not a second rank.
        [*(kernel(number) for number in range(30)), kernel(30, pid=5)],
        # One process drives two devices.
        [*(kernel(0, args={"device": device, "stream": 7}, pid=device) for device in (0, 1)), LAUNCH],
    ],
)
def test_several_processes_of_one_rank_are_not_refused(events):
    assert len(parse_trace(document(events)).activities.start_ns) > 1


@pytest.mark.parametrize("odd", [{"ph": "C", "ts": 1}, {"ph": "s", "cat": "ac2g", "id": 1}, {"ph": "?"}, {}, {"ts": 1}])
def test_events_of_other_phases_are_skipped(odd):
    trace = parse_trace(document([kernel(0), odd, kernel(1)]))
    assert len(trace.activities.start_ns) == 2
    assert (trace.events_total, trace.warnings) == (3, [])
