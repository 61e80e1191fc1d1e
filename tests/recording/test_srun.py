"""Under srun: Slurm itself is not here, the 2 tasks on each of 2 nodes are started here with its variables."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringprof.run import read_run
from tests.recording.command import HANGS_S, RINGPROF, SMALL, environment, run, started_in, wait_until
from tests.recording.two_hosts import TwoHosts

RECORD = ["record", "--strategy", "zigzag", *SMALL, "--iters", "1"]


def variables(rank: int, node: int, local: int, hosts: str, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": hosts, "MASTER_PORT": str(port),
    }  # fmt: skip


@pytest.fixture
def port() -> Iterator[int]:
    """A port that the ranks can listen on, kept from other programs' outgoing connections until the test ends."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def start(folder: Path, arguments: list[str], port: int) -> list[subprocess.Popen[str]]:
    """Four tasks, two on each of two nodes that are this one."""
    started = []
    for rank in range(4):
        with (folder / f"printed{rank}.txt").open("w") as output:
            more = variables(rank, rank // 2, rank % 2, "127.0.0.1", port)
            started.append(
                subprocess.Popen(
                    [*RINGPROF, *arguments], cwd=folder, text=True, stdout=output, stderr=output,
                    env=environment(TMPDIR=str(folder), **more),
                )
            )  # fmt: skip
    return started


@pytest.mark.processes
def test_two_nodes_of_two_tasks_make_one_run(tmp_path: Path, port: int) -> None:
    started = start(tmp_path, RECORD, port)
    codes = [process.wait(HANGS_S) for process in started]
    printed = [(tmp_path / f"printed{rank}.txt").read_text() for rank in range(4)]
    assert codes == [0, 0, 0, 0], printed
    assert ["next: ringprof report" in text for text in printed] == [True, False, False, False]
    run = read_run(tmp_path / "traces/run.json")
    assert run.topology.local_ranks == [0, 1, 0, 1] and run.topology.ranks_per_host == 2 and run.work is not None
    assert [name[-2:] for name in run.topology.hosts] == ["#0", "#0", "#1", "#1"]
    assert [(work.sent or [])[0].link for work in run.work] == ["same_host", "other_host", "same_host", "other_host"]


@pytest.mark.long
def test_cyclic_rank_placement_sends_every_hop_between_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    """srun --distribution=cyclic: neighbours in the ring are on different hosts, which no count a host can say."""
    started = []
    for rank in range(4):
        node = rank % 2
        more = variables(rank, node, rank // 2, "10.77.0.[1-2]", 29_600)
        started.append(
            hosts.start_process(node, [*RINGPROF, *RECORD], tmp_path, ":", f"printed{rank}.txt", **more)
        )  # fmt: skip
    assert [process.wait(HANGS_S) for process in started] == [0, 0, 0, 0]
    run = read_run(tmp_path / "traces/run.json")
    assert [name[-2:] for name in run.topology.hosts] == ["#0", "#1", "#0", "#1"] and run.work is not None
    assert run.topology.local_ranks == [0, 0, 1, 1]
    assert {entry.link for work in run.work for entry in work.sent or []} == {"other_host"}


@pytest.mark.long
def test_a_killed_task_ends_all(strategy_folder: Path, port: int) -> None:
    """Without --kill-on-bad-exit Slurm itself would let the others run on."""
    started = start(strategy_folder, ["record", "--strategy", "mine:Slow", *SMALL, "--iters", "100"], port)
    output = strategy_folder / "printed0.txt"
    wait_until(lambda: "iterations" in output.read_text())
    started[2].kill()
    wait_until(lambda: not started_in(strategy_folder))
    assert [process.wait(HANGS_S) for process in started] == [3, 3, -signal.SIGKILL, 3]
    said = [line for rank in range(4) for line in (strategy_folder / f"printed{rank}.txt").read_text().splitlines()]
    (line,) = [line for line in said if line.startswith("ringprof: ")]
    assert "rank 2 on host" in line and "has gone" in line
    assert list((strategy_folder / "traces").iterdir()) == [Path(line.split("log: ")[1])]


@pytest.mark.long
def test_hanging_task_is_ended_by_the_other_node(strategy_folder: Path, port: int) -> None:
    """Rank 2 ends the other tasks of its node, but no process there ends rank 2."""
    hang = ["-p", "what=never_let_go", "-p", "on=2", "--time-limit", "8"]
    started = start(strategy_folder, ["record", "--strategy", "mine:Later", *SMALL, *hang], port)
    wait_until(lambda: started[0].poll() is not None)
    wait_until(lambda: not started_in(strategy_folder))
    assert [process.wait(HANGS_S) for process in started] == [3, 3, 1, 3]
    assert not started_in(strategy_folder)
    said = [(strategy_folder / f"printed{rank}.txt").read_text() for rank in range(4)]
    assert "ringprof: rank 2 hung" in said[0] and "in never_let_go" in said[2]


@pytest.mark.long
def test_rank_that_exits_before_the_run_begins(tmp_path: Path, port: int) -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    meet_and_leave = "import os, torch.distributed as d; d.init_process_group('gloo'); os._exit(0)"
    other = subprocess.Popen([sys.executable, "-c", meet_and_leave], env=environment(RANK="1", **env))
    done = run(RECORD, tmp_path, RINGPROF, RANK="0", **env)
    other.wait(HANGS_S)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ringprof: ")]
    assert "rank 0 cannot reach the other ranks" in line and not (tmp_path / "traces").exists()
