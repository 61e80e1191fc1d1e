"""Files of NCCL Inspector: versions, rates, who came last, gaps, ranks, and damage."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ringprof.common.limits import Limits, MemoryBudget, MemoryLimitError
from ringprof.errors import InputError
from ringprof.printed.communication.comm_log_report import CommLogAnalysis, load_comm_logs
from ringprof.printed.communication.nccl_inspector import parse_inspector

README_LINE = {
    "header": {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1},
    "metadata": {
        "inspector_output_format_version": "v4.0", "git_rev": "", "rec_mechanism": "profiler_plugin",
        "dump_timestamp_us": 1748030377748202, "hostname": "example-hostname", "pid": 1639453,
    },
    "coll_perf": {
        "coll": "AllReduce", "coll_sn": 1407, "coll_msg_size_bytes": 17179869184, "coll_exec_time_us": 61974,
        "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 277.210914, "coll_busbw_gbs": 485.119099,
    },
}  # fmt: skip
"""The example of the plugin's README, with the timing source that later versions write."""


def line(rank: int, number: int, time_us: int, **changes: Any) -> dict[str, Any]:
    header = {"id": "0xab", "comm_name": "cp", "rank": rank, "n_ranks": 2, "nnodes": 1}
    coll = {"coll": "AllGather", "coll_sn": number, "coll_msg_size_bytes": 1 << 20, "coll_exec_time_us": time_us,
            "coll_timing_source": "kernel_gpu"}  # fmt: skip
    metadata = {"inspector_output_format_version": "v4.0", "hostname": "node", "pid": 10 + rank}
    return {"header": header, "metadata": metadata, "coll_perf": coll} | changes


def message(rank: int, number: int, kind: str, time_us: int, **trace: Any) -> dict[str, Any]:
    p2p = {"p2p": kind, "p2p_sn": number, "p2p_peer": 1 - rank, "p2p_msg_size_bytes": 1 << 20,
           "p2p_exec_time_us": time_us, "p2p_timing_source": "kernel_gpu", **trace}  # fmt: skip
    return {key: value for key, value in line(rank, 0, 0).items() if key != "coll_perf"} | {"p2p_perf": p2p}


def text_of(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(item) + "\n" for item in lines).encode()


def write(folder: Path, *files: list[dict[str, Any]]) -> CommLogAnalysis:
    folder.mkdir(exist_ok=True)
    for index, lines in enumerate(files):
        (folder / f"node-pid{10 + index}.log").write_bytes(text_of(lines))
    return load_comm_logs(folder)


def test_bandwidths_of_the_readme_are_within_the_bounds(tmp_path: Path) -> None:
    """The plugin's own algorithmic and bus bandwidth lie between the bounds, which differ by the cut microsecond."""
    analysis = write(tmp_path, [README_LINE])
    (row,) = analysis.findings.sizes
    perf: Any = README_LINE["coll_perf"]
    least, most = row.bounds["rate_least"], row.bounds["rate_most"]
    assert least is not None and most is not None and least < most
    assert most == pytest.approx(perf["coll_algobw_gbs"], rel=1e-6) and most / least < 1.0001
    assert row.bus_factor == 2 * 7 / 8
    assert most * row.bus_factor == pytest.approx(perf["coll_busbw_gbs"], rel=1e-6)


@pytest.mark.parametrize(("coll", "scale", "bus"), [
    ("AllReduce", 1, 1.0), ("AllGather", 2, 0.5), ("ReduceScatter", 2, 0.5), ("Broadcast", 1, 1.0), ("Reduce", 1, 1.0),
])  # fmt: skip
def test_sizes_and_bus_bandwidth_follow_nccl_tests(coll: str, scale: int, bus: float, tmp_path: Path) -> None:
    item = line(0, 1, 10)
    item["coll_perf"]["coll"] = coll
    (row,) = write(tmp_path, [item]).findings.sizes
    assert (row.size_bytes, row.bus_factor) == (scale << 20, bus)
    assert row.bounds["rate_most"] == pytest.approx((scale << 20) / 10_000)


def test_the_shortest_time_came_last(tmp_path: Path) -> None:
    analysis = write(
        tmp_path, [line(0, number, 100 + number) for number in (1, 2, 3)], [line(1, n, 100) for n in (1, 2, 3)]
    )
    assert analysis.findings.late_by == "time"
    assert [(row.last, row.compared, row.late_most_ns) for row in analysis.findings.ranks] == [
        (0, 3, None),
        (3, 3, 3000),
    ]
    assert "Rank 1 has the shortest time in 3 of 3 operations." in " ".join(analysis.verdict)


def test_verbose_times_say_who_posted_last(tmp_path: Path) -> None:
    def verbose(rank: int) -> dict[str, Any]:
        start = 1_000_000 + 700 * rank
        channels = [
            {"channel_id": c, "kernel_start_ts": start + 5 + c, "kernel_stop_ts": 1_002_000 + c} for c in (0, 1)
        ]
        trace = {"p2p_start_ts": start, "kernel_events": channels}
        return message(rank, 1, "Send" if rank == 0 else "Recv", 1900 - 700 * rank, event_trace_ts=trace)

    analysis = write(tmp_path, [verbose(0)], [verbose(1)])
    assert analysis.findings.late_by == "posted"
    assert [row.late_most_ns for row in analysis.findings.ranks] == [None, 700_000]
    sender = analysis.findings.rows[0].bounds
    # It ran from 1,000,006 µs at the latest, by what a thread saw, and by its own time; the other came at 1,000,700.
    assert sender.wait_least_ns == 1_000_700_000 - 1_000_006_000
    assert sender.time_least_ns == 1_900_000 and sender.time_most_ns == 1_901_000


def test_gaps_are_counted(tmp_path: Path) -> None:
    analysis = write(tmp_path, [line(0, n, 10) for n in (3, 4, 9)], [line(1, n, 9) for n in (4, 7, 9)])
    assert [(log.missing, log.from_start) for log in analysis.findings.logs] == [(4, False), (3, False)]
    assert [notice.code for notice in analysis.warnings].count("sampled") == 2
    assert analysis.findings.ranks[0].compared == 2


def test_peers_in_a_small_communicator_are_ranks_of_the_job(tmp_path: Path) -> None:
    """Four processes; a pair's communicator has ranks 2 and 3 of the job as 0 and 1."""
    files = []
    for rank in range(4):
        wide = line(rank, 1, 10, header={"id": "0xff", "rank": rank, "n_ranks": 4, "nnodes": 1})
        small = message(rank % 2, 1, "Send" if rank % 2 == 0 else "Recv", 10)
        small["header"] = {"id": f"0x{rank // 2}", "rank": rank % 2, "n_ranks": 2, "nnodes": 1}
        files.append([wide, small])
    analysis = write(tmp_path, *files)
    ends = {row.operation.rank: row.operation for row in analysis.findings.rows if row.operation.is_hop}
    assert ends[2].sends[0].peer == 3 and ends[3].receives[0].peer == 2
    assert all(log.groups["0x1"].ranks == (2, 3) for log in analysis.findings.logs if "0x1" in log.groups)


def test_processes_are_numbered_where_no_communicator_spans_the_job(tmp_path: Path) -> None:
    files = [[line(0, 1, 10, header={"id": f"0x{n}", "rank": 0, "n_ranks": 2, "nnodes": 1})] for n in range(2)]
    analysis = write(tmp_path, *files)
    assert [row.rank for row in analysis.findings.ranks] == [0, 1]
    assert "ranks_numbered" in [notice.code for notice in analysis.warnings]


def test_a_cut_last_line_is_left_out_and_any_other_is_an_error(tmp_path: Path) -> None:
    sound = text_of([line(0, 1, 10), line(0, 2, 10)])
    log = parse_inspector(sound[:-20], "x.log", MemoryBudget())
    assert len(log.operations) == 1 and [notice.code for notice in log.notices] == ["truncated"]
    with pytest.raises(InputError, match=r"^x\.log:1: not a line of NCCL Inspector"):
        parse_inspector(sound[20:], "x.log", MemoryBudget())


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("coll_perf", "coll_sn", -1), ("coll_perf", "coll_exec_time_us", "7"), ("header", "rank", 1e9),
        ("coll_perf", "coll_msg_size_bytes", 1 << 63), ("header", "id", None), ("metadata", "pid", []),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_line(part: str, field: str, value: Any) -> None:
    bad = line(0, 2, 10)
    bad[part][field] = value
    with pytest.raises(InputError, match=rf"^x\.log:2: .*\$\.{part}\.{field}"):
        parse_inspector(text_of([line(0, 1, 10), bad, line(0, 3, 10)]), "x.log", MemoryBudget())


def test_another_format_version_is_refused() -> None:
    item = line(0, 1, 10)
    item["metadata"]["inspector_output_format_version"] = "v5.0"
    with pytest.raises(InputError, match=r"inspector_output_format_version is 'v5.0'"):
        parse_inspector(text_of([item]), "x.log", MemoryBudget())


def test_many_channels_stay_within_the_memory_limit() -> None:
    events = [{"channel_id": 0}] * 200_000
    item = message(0, 1, "Send", 10, event_trace_ts={"p2p_start_ts": 1, "kernel_events": events})
    with pytest.raises(MemoryLimitError, match="--max-memory"):
        parse_inspector(text_of([item] * 4), "x.log", MemoryBudget(Limits(1 << 26)))


def test_damaged_files_are_read_or_refused_in_one_line() -> None:
    random, sound = Random(3), text_of([line(0, 1, 10), message(0, 1, "Recv", 7), line(0, 2, 11)])
    for _ in range(2000):
        data = bytearray(sound)
        for _ in range(random.choice((1, 3))):
            data[random.randrange(len(data))] = random.randrange(256)
        try:
            parse_inspector(bytes(data), "x.log", MemoryBudget(Limits(1 << 26)))
        except InputError as error:
            assert "\n" not in str(error) and str(error).startswith("x.log")
