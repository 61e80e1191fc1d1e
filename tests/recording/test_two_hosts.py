"""One run over two hosts: who is where, what crossed the wire by closed formulas, and all traces in one folder."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from ringprof.ranks.heartbeat import KEEPALIVE_S
from ringprof.run import Run, Sent, read_run
from ringprof.trace.reduced import read_reduced
from tests.recording.command import wait_until
from tests.recording.two_hosts import TwoHosts

SEQ, HEADS, HEAD_DIM = 1024, 2, 32
BF16, FP32 = 2, 4
LOCAL = SEQ // 4 * HEADS * HEAD_DIM
"""Elements of one rank's K, V or Q."""
SHAPE = ["--seq", str(SEQ), "--heads", str(HEADS), "--head-dim", str(HEAD_DIM), "--device", "cpu", "--iters", "1"]


def printed(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("printed*.txt")))


def recorded(hosts: TwoHosts, folder: Path, strategy: str, *more: str) -> Run:
    hosts.start(["record", "--strategy", strategy, *SHAPE, *more], [folder, folder])
    assert hosts.wait() == [0, 0], printed(folder)
    return read_run(folder / "traces/run.json")


def crossing(sent: list[Sent] | None, link: str) -> int:
    return sum(entry.sent_bytes for entry in sent or [] if entry.link == link)


def traces_of_all_ranks(run: Run, folder: Path) -> None:
    """Check that every trace and reduced trace is complete and belongs to its rank."""
    for entry in run.traces:
        with gzip.open(folder / entry.path) as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == entry.rank
        assert any(event.get("name") == "ringprof::iteration" for event in trace["traceEvents"])
        assert entry.reduced is not None
        reduced = read_reduced(folder / entry.reduced)
        assert reduced.rank == entry.rank and "ringprof::iteration" in reduced.names


@pytest.mark.processes
def test_separate_folders_on_two_hosts_make_one_run(hosts: TwoHosts, tmp_path: Path) -> None:
    """The second host cannot see the output folder of the first, so its traces are sent."""
    other = tmp_path / "disk-of-the-second"
    other.mkdir()
    hosts.start(
        ["record", "--strategy", "zigzag", *SHAPE, "--output", str(tmp_path / "traces/run.json")],
        [tmp_path, tmp_path], before=f"mkdir -p '{tmp_path}/traces' && mount --bind '{other}' '{tmp_path}/traces'",
    )  # fmt: skip
    assert hosts.wait() == [0, 0], printed(tmp_path)
    run = read_run(tmp_path / "traces/run.json")
    assert printed(tmp_path).count("next: ringprof report") == 1
    traces_of_all_ranks(run, tmp_path / "traces")
    assert list(other.iterdir()) == [] and not list(tmp_path.glob("ringprof-trace-*"))
    # Namespaces have the machine's one name: the launcher's number tells them apart.
    first, second = dict.fromkeys(run.topology.hosts)
    assert run.topology.hosts == [first, first, second, second] and (first[-2:], second[-2:]) == ("#0", "#1")
    assert run.topology.local_ranks == [0, 1, 0, 1] and run.topology.ranks_per_host == 2
    assert run.work is not None
    for rank, work in enumerate(run.work):
        # A flat ring: ranks 1 and 3 send all they send to the other host. K and V make 3 hops a pass, and so do
        # dK and dV, which travel in float32 and begin their way at the next rank.
        link = "other_host" if rank % 2 else "same_host"
        expected = 2 * 3 * 2 * LOCAL * BF16 + 3 * 2 * LOCAL * FP32
        assert {entry.link for entry in work.sent or []} == {link} and crossing(work.sent, link) == expected


ROWS = FP32 / HEAD_DIM
"""One number in float32 a row of Q, for each of Q's elements: LSE, or delta."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "wire", "within", "between"),
    [
        # Two windows of two: in either pass, K and V make one hop in each window and one to the other window. dK and dV
        # go all the way round each window, two hops, and by two hops over the outer ring back to where they started.
        ("double-ring", "fp32", 2 * (2 * 2 * BF16) + 4 * 2 * FP32, 2 * 2 * BF16 + 2 * 2 * FP32),
        # Backward, Q, dO, LSE and delta travel as K and V did. dQ leaves each window, by the outer ring, where its
        # queries' tour ends: one hop in each window, and after both one that closes the inner ring.
        ("burst", "input", 2 * 2 * BF16 + 2 * (2 * BF16 + 2 * ROWS) + 3 * BF16, 4 * BF16 + 2 * ROWS + 2 * BF16),
    ],
)
def test_bytes_of_a_double_ring_between_hosts(
    hosts: TwoHosts, tmp_path: Path, strategy: str, wire: str, within: float, between: float
) -> None:
    run = recorded(hosts, tmp_path, strategy, "-p", f"grad_wire={wire}")
    assert run.strategy is not None and run.strategy.params["ring_window"] == 2 and run.work is not None
    traces_of_all_ranks(run, tmp_path / "traces")
    for work in run.work:
        assert crossing(work.sent, "same_host") == within * LOCAL
        assert crossing(work.sent, "other_host") == between * LOCAL


SLOW = ["record", "--strategy", "mine:Slow", *SHAPE[:-1], "100"]


def under_way(hosts: TwoHosts, folder: Path) -> None:
    hosts.start(SLOW, [folder, folder])
    wait_until(lambda: "iterations" in printed(folder))
    time.sleep(1)
    assert len(hosts.ranks()) == 4


def lines(folder: Path, node: int) -> list[str]:
    text = (folder / f"printed{node}.txt").read_text()
    return [line for line in text.splitlines() if line.startswith("ringprof: ")]


def only_a_log(line: str, folder: Path) -> None:
    assert list((folder / "traces").iterdir()) == [Path(line.split("log: ")[1])]


@pytest.mark.long
@pytest.mark.parametrize(("killed", "says"), [(1, "#1 with ranks 2, 3 has gone"), (0, "rank 0 on host")])
def test_processes_of_one_host_are_killed(killed: int, says: str, hosts: TwoHosts, strategy_folder: Path) -> None:
    under_way(hosts, strategy_folder)
    hosts.kill(hosts.namespaces[killed])
    wait_until(lambda: not hosts.ranks())
    (line,) = lines(strategy_folder, 1 - killed)
    assert says in line and "has gone" in line and (killed == 0 or "in iterations" in line)
    only_a_log(line, strategy_folder)


@pytest.mark.long
def test_network_between_hosts_is_cut(hosts: TwoHosts, strategy_folder: Path) -> None:
    """Neither side receives data; TCP keep-alive detects the loss, and each side reports it."""
    under_way(hosts, strategy_folder)
    hosts.disconnect()
    idle, between, count = KEEPALIVE_S
    wait_until(lambda: all(lines(strategy_folder, node) for node in range(2)), idle + between * count + 10)
    wait_until(lambda: not hosts.ranks())
    (first,), (second,) = lines(strategy_folder, 0), lines(strategy_folder, 1)
    assert "#1" in first and "out of reach" in first.replace("cannot be reached", "out of reach")
    assert "rank 0 on host" in second and "out of reach" in second
    assert not list((strategy_folder / "traces").glob("*/run.json"))
