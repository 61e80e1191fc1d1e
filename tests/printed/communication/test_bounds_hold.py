"""Bounds from logs hold the exact figures of the traces that the logs were made from."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import pytest

import ringprof
from ringprof.printed.communication.analyse import OperationRow, analyse, begun_by_of, bounds_of
from ringprof.printed.communication.comm_log_report import load_comm_logs
from ringprof.printed.communication.match import match_operations
from ringprof.printed.communication.operations import Group, Operation, RankLog
from ringprof.trace.columns import Message
from tests.paths import COMMITTED, DATA
from tests.printed.communication.strip import Truth, stripped_splits, truth_of, write_dumps, write_inspector_files

RUNS = [DATA / "h200x8-zigzag-131072", DATA / "waits-nccl"]
RUNS += [run for run in COMMITTED if run.name.startswith("h200x") and "copied" not in run.name]


@cache
def analysis_of(run: Path) -> ringprof.Analysis:
    return ringprof.load(run)


def truths(run: Path) -> dict[int, list[Truth | None]]:
    return {
        rank.rank: [truth_of(split) for split in stripped_splits(rank)] for rank in analysis_of(run).attribution.ranks
    }


def assert_within(row: OperationRow, truth: Truth) -> None:
    """Assert that every bound of an operation holds its exact figure."""
    bounds = row.bounds
    for exact, least, most in (
        (truth.time_ns, bounds.time_least_ns, bounds.time_most_ns),
        (truth.wait_ns, bounds.wait_least_ns, bounds.wait_most_ns),
        (truth.wire_ns, bounds.wire_least_ns, bounds.wire_most_ns),
    ):
        assert least is None or least <= exact
        assert most is None or exact <= most
    size = row.operation.counted_bytes
    for time_ns, slowest, fastest in (
        (truth.time_ns, bounds.rate_least, bounds.rate_most),
        (truth.wire_ns, bounds.wire_rate_least, bounds.wire_rate_most),
    ):
        if size and time_ns:
            assert slowest is None or slowest <= size / time_ns * (1 + 1e-12)
            assert fastest is None or size / time_ns <= fastest * (1 + 1e-12)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_bounds_of_flight_recorder_dumps_hold_the_figures_of_the_trace(run: Path, tmp_path: Path) -> None:
    exact = truths(run)
    for seed, timing in ((1, True), (2, False)):
        folder = tmp_path / str(seed)
        write_dumps(analysis_of(run), folder, Random(seed), timing=timing, as_json=seed == 2)
        if not any(exact.values()):
            continue
        findings = load_comm_logs(folder).findings
        assert not [notice for notice in findings.warnings if notice.code == "clocks_differ"]
        for rank, expected in exact.items():
            rows = [row for row in findings.rows if row.operation.rank == rank]
            assert len(rows) == len(expected)
            for row, truth in zip(rows, expected, strict=True):
                assert row.bounds.time_most_ns is not None
                if truth is not None:
                    assert_within(row, truth)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_bounds_of_inspector_files_hold_the_figures_of_the_trace(run: Path, tmp_path: Path) -> None:
    exact = truths(run)
    for seed, verbose in ((1, True), (2, False)):
        folder = tmp_path / str(seed)
        write_inspector_files(analysis_of(run), folder, Random(seed), verbose=verbose)
        if not all(exact.values()):
            continue
        findings = load_comm_logs(folder).findings
        for rank, expected in exact.items():
            splits = stripped_splits(analysis_of(run).attribution.ranks[[*exact].index(rank)])
            # A batch of sends and receives is one kernel, and one line for each of its messages.
            repeated = [
                truth
                for split, truth in zip(splits, expected, strict=True)
                for _ in range(max(1, len(split.transfer.sends) + len(split.transfer.receives)))
            ]
            rows = [row for row in findings.rows if row.operation.rank == rank]
            assert len(rows) == len(repeated)
            for row, truth in zip(rows, repeated, strict=True):
                if truth is not None:
                    assert_within(row, truth)


def test_bounds_of_a_measured_ring_are_close(tmp_path: Path) -> None:
    """With event timing the bounds on the time of hops are exact, and waiting beyond the shortest is near the wait."""
    run = DATA / "h200x8-zigzag-131072"
    write_dumps(analysis_of(run), tmp_path / "dumps", Random(3), timing=True)
    findings = load_comm_logs(tmp_path / "dumps").findings
    exact = truths(run)
    for rank in findings.ranks:
        known = [truth for truth in exact[rank.rank] if truth is not None]
        own = [row for row in findings.rows if row.operation.rank == rank.rank]
        for row, truth in zip(own, known, strict=True):
            assert row.bounds.time_least_ns == pytest.approx(truth.time_ns, rel=2e-6)
        assert rank.excess_ns is not None
        time_ns = sum(truth.time_ns for truth in known)
        assert abs(rank.excess_ns - sum(truth.wait_ns for truth in known)) < 0.35 * time_ns


@pytest.mark.parametrize("seed", range(20))
def test_other_ranks_times_are_those_of_every_pair(seed: int) -> None:
    """Bounds are those of brute force, which compares every operation with every other one that it waits for."""
    random = Random(seed)
    count = random.randint(2, 6)
    groups = {"g": Group("g", tuple(range(count)))}
    logs = [
        RankLog(path="", source="flight_recorder", rank=rank, operations=[], groups=groups) for rank in range(count)
    ]
    for number in range(1, 9):
        ring = random.random() < 0.5
        for rank, log in enumerate(logs):
            posted = 1_000 * number + random.randrange(300)
            ended = random.choice([None, posted + 400 + random.randrange(200)])
            sends, receives = ((Message((rank + step) % count, 8),) * ring for step in (1, -1))
            log.operations.append(Operation(
                rank=rank, group="g", name="send_recv" if ring else "all_gather", sequence=number,
                state="completed" if ended else "started", posted_ns=random.choice([None, posted, posted]),
                started_by_ns=random.choice([None, posted + random.randrange(90)]), completed_by_ns=ended,
                most_ns=None if ended is None else ended - posted, least_ns=random.choice([None, 100]),
                size_bytes=8, sends=sends, receives=receives,
            ))  # fmt: skip
    rows = analyse(logs).rows
    for row in rows:
        operation, rank = row.operation, row.operation.rank
        alike = [log.operations[operation.sequence - 1] for log in logs]
        near = {(rank + 1) % count, (rank - 1) % count} if operation.is_hop else set(range(count))
        waited_for = {(rank + step) % count for step in (-2, -1, 1, 2)} if operation.is_hop else near
        posts = [time for other in near - {rank} if (time := alike[other].posted_ns) is not None]
        begun = [begun_by_of(alike[other]) for other in waited_for - {rank}]
        last_begun = None if None in begun else max(time for time in begun if time is not None)
        assert row.bounds == bounds_of(operation, max(posts, default=None), last_begun)


@pytest.mark.parametrize("seed", range(20))
def test_the_worst_pair_of_clocks_is_that_of_every_pair(seed: int) -> None:
    random = Random(seed)
    logs = [
        RankLog(path="", source="flight_recorder", rank=rank, operations=[], groups={"g": Group("g", (0, 1, 2, 3))})
        for rank in range(4)
    ]
    times: list[list[tuple[int, int]]] = []  # of each operation and rank: when it was posted and when it ended
    for number in range(1, 6):
        times.append([])
        for log in logs:
            posted = random.randrange(1_000)
            ended = posted + random.randrange(600)
            times[-1].append((posted, ended))
            log.operations.append(Operation(rank=log.rank, group="g", name="all_reduce", sequence=number,
                                            state="completed", posted_ns=posted, completed_by_ns=ended))  # fmt: skip
    conflicts = {
        (first, second, of_ranks[second][0] - of_ranks[first][1])
        for of_ranks in times for first in range(4) for second in range(4) if first != second
    }  # fmt: skip
    most = max(excess for *_, excess in conflicts)
    worst = match_operations(logs).clock_conflict
    assert worst in conflicts if most > 0 else worst is None
    assert worst is None or worst[2] == most
