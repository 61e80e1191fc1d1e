"""Limits on the values of a trace, tested on both sides; and defaults for missing facts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ringprof.errors import TraceFormatError
from ringprof.trace import checks
from ringprof.trace.columns import NONE, Trace
from ringprof.trace.kineto import parse_trace
from ringprof.trace.kineto.event_list import decode_event
from ringprof.trace.kineto.event_tables import Collector
from ringprof.trace.ranks import read_traces
from ringprof.trace.reduced import parse_reduced, reduce_trace
from tests.analysis.build import FLASH, Builder, collective
from tests.trace.kineto_text import document, kernel


def facts(**distributed: Any) -> Trace:
    return parse_trace(document([kernel(0)], distributedInfo=distributed))


@pytest.mark.parametrize(("stated", "rank"), [(0, 0), (1_048_575, 1_048_575), (1_048_576, None), (-1, None), ("7", 7)])
def test_a_rank_is_a_natural_number_below_a_million(stated: object, rank: int | None) -> None:
    assert facts(rank=stated).rank == rank
    assert facts(rank=0, world_size=stated).world_size == rank


def test_devices_without_an_id_are_numbered_by_position() -> None:
    listed: list[object] = [{"id": 5, "name": "NVIDIA H200"}, {}, "none", {"id": 0}]
    devices = parse_trace(document([kernel(0)], deviceProperties=listed)).devices
    assert [(device.index, device.name) for device in devices] == [(5, "NVIDIA H200"), (1, ""), (0, "")]


def test_device_annotation_takes_the_device_of_its_arguments() -> None:
    events = [
        kernel(0),
        kernel(1, cat="gpu_user_annotation", pid=2, tid=20, args={"device": 3, "stream": 9}),
        kernel(2, cat="gpu_user_annotation", pid=2, tid=20, args={}),
    ]
    marks = parse_trace(document(events)).device_annotations
    assert (marks.device.tolist(), marks.thread.tolist()) == ([3, 2], [9, 20])


@pytest.mark.parametrize(
    ("stated", "kept"),
    [
        (2**31 - 1, 2**31 - 1),
        (0x55835C8A2100, 0x5C8A2100),
        (-(2**31) + 1, -(2**31) + 1),
        (2**64, NONE),
        ("stream 12", 12),
    ],
)
def test_streams_are_numbers_of_32_bits(stated: object, kept: int) -> None:
    """Keep the lower bits of pointers, which ROCm writes as streams."""
    trace = parse_trace(document([kernel(0, args={"stream": stated})]))
    assert trace.activities.stream.tolist() == [kept]


FIRST = ", ".join(str(8 * number) for number in range(29))


@pytest.mark.parametrize(
    ("ranks", "size", "read"),
    [
        ("[0, ..., 6]", 4, None),
        ("[0, 2, ..., 6]", 4, (0, 2, 4, 6)),
        ("[0, 2, 4, ..., 10]", 6, (0, 2, 4, 6, 8, 10)),
        ("[5, 6, 7, ..., 9]", 5, (5, 6, 7, 8, 9)),
        ("[6, 4, 2, ..., 0]", 4, None),
        ("[0, 1, 3, ..., 6]", 5, None),
        (f"[{FIRST}, ..., 504]", 64, tuple(range(0, 512, 8))),
        (f"[{FIRST}, ..., 505]", 64, None),
        (f"[{FIRST}, ..., 504]", 65, None),
        ([0, 2], 2, (0, 2)),
        (None, 4, (2, 5, 8, 11)),
    ],
)
def test_a_shortened_list_of_ranks_needs_a_stride(ranks: object, size: int, read: tuple[int, ...] | None) -> None:
    args = {"Collective name": "allreduce", "Group size": size, "Process Group Ranks": ranks}
    args |= {"Global rank start": 2, "Global rank stride": 3} if ranks is None else {}
    assert parse_trace(document([kernel(0, args=args)])).collectives[0].group_ranks == read


@pytest.mark.parametrize(("elements", "kept"), [(1 << 48, 1 << 48), ((1 << 48) + 1, None), (-1, None), (True, None)])
def test_message_element_count_has_an_upper_limit(elements: object, kept: int | None) -> None:
    args = {"Collective name": "send", "In msg nelems": elements}
    (record,) = parse_trace(document([kernel(0, args=args)])).collectives
    assert record.in_elements == kept


def test_every_damaged_event_is_counted() -> None:
    text = document([kernel(number) for number in range(10)]).replace(b'"k2"', b'"k2').replace(b'"k6"', b'"k6')
    trace = parse_trace(text)
    assert trace.events_skipped == 2
    assert [trace.names[index] for index in trace.activities.name] == [f"k{n}" for n in range(10) if n not in (2, 6)]


def test_traces_of_the_cpu_that_do_not_overlap_are_of_different_runs(tmp_path: Any) -> None:
    for rank, start in enumerate((0, 10**9)):
        events = [kernel(n, cat="cpu_op", name="aten::add", ts=start + n) for n in range(2)]
        fields = {"distributedInfo": {"rank": rank, "world_size": 2}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({**fields, "traceEvents": events}))
    traces = read_traces(sorted(tmp_path.iterdir()))
    assert {warning.code for trace in traces for warning in trace.warnings} == {"mixed_runs"}


@pytest.mark.parametrize(
    ("name", "peer", "ends"),
    [("send", 1, (None, 6)), ("recv", 0, (4, None)), ("send", 2, (None, None)), ("allreduce", 1, (None, None))],
)
def test_group_rank_of_a_peer_in_older_traces_is_converted(name: str, peer: int, ends: tuple[int | None, ...]) -> None:
    args = {"Collective name": name, "Group size": 2, "Process Group Ranks": "[4, 6]", "Rank": peer}
    (record,) = parse_trace(document([kernel(0, args=args)])).collectives
    assert (record.source_rank, record.destination_rank) == ends


@pytest.mark.parametrize("start", [0, 1234567890123])
def test_times_keep_their_nanoseconds_however_they_are_written(start: int) -> None:
    written = [f"{start + 1}.250", f"{start + 2}.5", start + 3, f"{start + 4}.0005", f"{start + 5}.0015"]
    events = [kernel(number, ts=text, dur="1.250") for number, text in enumerate(written)]
    trace = parse_trace(document(events))
    whole = [1_250, 2_500, 3_000, 4_000, 5_002]
    assert trace.activities.start_ns.tolist() == [1000 * start + time for time in whole]
    assert (trace.activities.end_ns - trace.activities.start_ns).tolist() == [1250] * 5


# --- reduced traces -------------------------------------------------------------------------------------


def reduced(**changes: Any) -> Trace:
    """Reduce and read a trace of two names and one collective, with changed columns of activities."""
    builder = Builder().run(FLASH, 0, 10, launched=1).run("send", 20, 30, launched=2, own=collective("send"))
    trace = builder.trace()
    activities = replace(trace.activities, **changes)
    return parse_reduced(reduce_trace(replace(trace, activities=activities)), "rank0.ringprof")


def column(*values: int, kind: type = np.int32) -> Any:
    return np.array(values, kind)


def test_out_of_range_indices_of_a_reduced_trace_are_refused() -> None:
    assert reduced(name=column(1, 0)).activities.name.tolist() == [1, 0]
    assert reduced(collective=column(NONE, 0)).activities.collective.tolist() == [NONE, 0]
    for broken in (
        {"name": column(0, 2)},
        {"name": column(0, -1)},
        {"collective": column(1, 0)},
        {"collective": column(-2, 0)},
        {"category": column(0, 3, kind=np.int8)},
        {"category": column(0, -1, kind=np.int8)},
    ):
        with pytest.raises(TraceFormatError):
            reduced(**broken)


def test_no_part_of_a_reduced_trace_lasts_over_73_years() -> None:
    """Refuse longer times also in a table that follows one without rows, here the launches."""

    def through(end_ns: int) -> Trace:
        return parse_reduced(reduce_trace(Builder().run(FLASH, 0, 10).mark("m", 0, end_ns).trace()), "rank0.ringprof")

    assert through(1 << 61).annotations.end_ns.tolist() == [1 << 61]
    with pytest.raises(TraceFormatError, match="73 years"):
        through((1 << 61) + 1024)


# --- kept rows, counts and warnings -----------------------------------------------------------------------


def test_group_ranks_count_towards_the_limit_for_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Builder().run("send", 0, 10, launched=1, own=collective("send", group_ranks=None)).trace()
    trace = replace(trace, groups={"cp": (0, 1, 2, 3)})
    monkeypatch.setattr(checks, "NAMED_LIMIT", 4)
    assert checks.validate_trace(trace) is trace
    monkeypatch.setattr(checks, "NAMED_LIMIT", 3)
    with pytest.raises(TraceFormatError, match="name over 3 ranks"):
        checks.validate_trace(trace)


def test_group_ranks_count_towards_the_limit_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count six ranks for two groups that share one list of three ranks."""
    ranks = (0, 1, 2)
    trace = replace(Builder().run(FLASH, 0, 10).trace(), groups={"a": ranks, "b": ranks})
    monkeypatch.setattr(checks, "NAMED_LIMIT", 6)
    assert checks.validate_trace(trace) is trace
    monkeypatch.setattr(checks, "NAMED_LIMIT", 5)
    with pytest.raises(TraceFormatError, match="groups name over 5 ranks"):
        checks.validate_trace(trace)


def test_kernel_overlapping_eight_others_of_its_stream_is_a_warning() -> None:
    builder = Builder().run(FLASH, 0, 1000).run(FLASH, 0, 1000, stream=8)
    for number in range(8):
        builder.run(FLASH, 10 + number, 11 + number)
    (warning,) = checks.overlap_warnings(builder.trace().activities, 5)
    assert (warning.code, warning.rank, warning.count) == ("overlapping_kernels", 5, 1)


def test_a_host_has_4096_devices_at_most() -> None:
    assert len(parse_trace(document([kernel(0)], deviceProperties=[{}] * 4097)).devices) == 4096


def test_repeated_name_counts_once_towards_memory() -> None:
    taken: list[int] = []
    collector = Collector(taken.append, every_operator=False)
    spent = []
    for _ in range(2):
        collector.add([decode_event(json.dumps(kernel(0, name="k" * 1_000_000)))])
        collector.flush()
        spent.append(sum(taken))
    assert spent[0] > 1_000_000 > spent[1] - spent[0]


def test_rows_that_are_a_nanosecond_out_of_order_are_refused() -> None:
    trace = Builder().run(FLASH, 1000, 2000).run(FLASH, 1000, 2000).trace("a.json")
    assert checks.validate_trace(trace) is trace
    swapped = replace(trace.activities, start_ns=np.array([1001, 1000]))
    with pytest.raises(TraceFormatError, match=r"a.json: damaged trace: of its activities the times are out of order"):
        checks.validate_trace(replace(trace, activities=swapped))
