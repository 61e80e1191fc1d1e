"""Logs of a real job against the profiler's trace of the same job: two H200, PyTorch 2.11, NCCL 2.28.9.

A training loop with a ring of ``batch_isend_irecv`` (K and V in one batch) and an all-reduce per step. Flight Recorder
with event timing, the Inspector plugin of NCCL 2.30 with verbose times, and torch.profiler ran at once for four steps.
In the first of these rank 1 slept 50 ms, in the second rank 0 20 ms. In another job rank 1 stopped before its sixth
hop; PyTorch wrote the dumps when the watchdog of rank 0 gave up.
"""

from __future__ import annotations

import statistics
from functools import cache

import ringprof
from ringprof.analysis.transfers.hops import Split
from ringprof.printed.communication.analyse import Bounds
from ringprof.printed.communication.comm_log_report import CommLogAnalysis, load_comm_logs
from tests.paths import DATA

FOLDER = DATA / "comm-logs"


@cache
def profiled() -> dict[int, list[Split]]:
    """Return the communication kernels of each rank in the profiler's traces, by start."""
    ranks = ringprof.load(FOLDER / "traces").attribution.ranks
    return {rank.rank: sorted(rank.splits, key=lambda split: split.transfer.start_ns) for rank in ranks}


def pairs(analysis: CommLogAnalysis, kinds: set[str]) -> list[tuple[Bounds, int, int]]:
    """Pair the newest operations of the logs with the profiled kernels: (bounds, time and wait of the kernel)."""
    result = []
    for rank, splits in profiled().items():
        kernels = [split for split in splits if split.transfer.kind in kinds]
        rows = [
            row for row in analysis.findings.rows
            if row.operation.rank == rank and row.operation.name in kinds and (row.operation.counted_bytes or 0) > 1000
        ]  # fmt: skip
        assert len(kernels) in (4, 12) and len(rows) > len(kernels)
        for row, split in zip(rows[-len(kernels) :], kernels, strict=True):
            assert split.ready_ns is not None
            transfer = split.transfer
            result.append((row.bounds, transfer.duration_ns, max(0, split.ready_ns - transfer.start_ns)))
    return result


def test_event_times_are_microseconds_longer_than_their_kernels() -> None:
    compared = pairs(load_comm_logs(FOLDER / "flight-recorder"), {"send_recv", "all_reduce"})
    excess = [(bounds.time_most_ns or 0) - time_ns for bounds, time_ns, _ in compared]
    assert len(excess) == 24 and min(excess) > 4_000 and statistics.median(excess) < 5_000 and max(excess) < 100_000


def test_bounds_from_dumps_hold_the_profiled_waits() -> None:
    for bounds, time_ns, wait_ns in pairs(load_comm_logs(FOLDER / "flight-recorder"), {"send_recv", "all_reduce"}):
        assert bounds.wait_least_ns is not None and bounds.wait_most_ns is not None and bounds.wire_most_ns is not None
        assert bounds.wait_least_ns <= wait_ns <= bounds.wait_most_ns
        assert time_ns - wait_ns <= bounds.wire_most_ns


def test_time_beyond_the_shortest_is_the_profiled_wait() -> None:
    """Rank 1 waits 14.37 ms for a hop of the late rank by the profiler, and 14.27 ms by the dumps."""
    analysis = load_comm_logs(FOLDER / "flight-recorder")
    times = {(row.operation.rank, row.operation.sequence): row.operation.shown_ns for row in analysis.findings.rows
             if row.operation.is_hop}  # fmt: skip
    waits = {}
    for rank, splits in profiled().items():
        hops = [split for split in splits if split.transfer.kind == "send_recv"]
        assert len(hops) == 8
        for sequence, split in zip(range(5, 13), hops, strict=True):
            waits[rank, sequence] = max(0, (split.ready_ns or 0) - split.transfer.start_ns)
    for (rank, sequence), wait in waits.items():
        own, other = times[rank, sequence], times[1 - rank, sequence]
        assert own is not None and other is not None
        assert abs(max(0, own - other) - wait) < 110_000


def test_inspector_times_are_microseconds_shorter_than_their_kernels() -> None:
    compared = pairs(load_comm_logs(FOLDER / "inspector"), {"all_reduce"})
    missing = [time_ns - (bounds.time_most_ns or 0) for bounds, time_ns, _ in compared]
    assert len(missing) == 8 and 2_000 < min(missing) and max(missing) < 4_000
    for bounds, _, wait_ns in compared:
        assert bounds.wait_least_ns is not None and bounds.wait_most_ns is not None
        assert bounds.wait_least_ns <= wait_ns <= bounds.wait_most_ns


def test_inspector_and_flight_recorder_agree_on_who_came_late() -> None:
    worst = [
        max(load_comm_logs(FOLDER / name).findings.late, key=lambda item: item.late_ns)
        for name in ("flight-recorder", "inspector")
    ]
    assert {item.rank for item in worst} == {1}
    assert abs(worst[0].late_ns - worst[1].late_ns) < 100_000


def test_messages_of_inspector_have_peers_and_no_times_of_the_device() -> None:
    """Under NCCL 2.28.9 the plugin sees no kernel events of sends and receives: the host timed them."""
    analysis = load_comm_logs(FOLDER / "inspector")
    messages = [row for row in analysis.findings.rows if row.operation.is_hop]
    assert len(messages) == 96 and all(row.bounds.time_most_ns is None for row in messages)
    assert "96 of 120 operations have no time on the device" in analysis.warnings[-1].message


def test_one_rank_of_a_hung_job_says_that_the_others_dumps_are_needed() -> None:
    verdict = load_comm_logs(FOLDER / "hang" / "timeout_rank_0").verdict
    assert verdict[-1] == "Which rank is waited for needs the dumps of all ranks: 1 of 2 ranks have no log here: 1."
    # The rank that stopped has nothing open, so nothing is said of waiting.
    assert not load_comm_logs(FOLDER / "hang" / "timeout_rank_1").verdict


def test_the_rank_that_stopped_is_found_in_pytorchs_own_dumps() -> None:
    analysis = load_comm_logs(FOLDER / "hang")
    sentences = analysis.verdict
    assert sentences[0] == "2 operations had not ended when the dumps were written."
    assert sentences[1] == (
        "Rank 1 had not posted its part of send/recv 6 of group cp, which rank 0 posted from live.py:57 counting_batch,"
        " and stands at send/recv 5."
    )
    assert sentences[2].startswith("Rank 1 had not posted its part of all-reduce 3 of group world")
