"""Local processes count as ranks by their environment variables, and ranks that do not end are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from ringprof.recording.shutdown import end_local_ranks
from tests.recording.command import HANGS_S, wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start_process(started: list[subprocess.Popen[bytes]], **variables: str) -> int:
    started.append(subprocess.Popen(SLEEP, env={**psutil.Process().environ(), **variables, "STARTED": "1"}))
    pid = started[-1].pid
    # The operating system shows the variables of a new process some moments after its start.
    wait_until(lambda: "STARTED" in psutil.Process(pid).environ())
    return pid


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_a_rank_that_does_not_end_is_killed(started: list[subprocess.Popen[bytes]], variable: str) -> None:
    pid = start_process(started, **{variable: "3"})
    assert end_local_ranks({3: pid}, 0) == [3]
    assert started[0].wait(HANGS_S) == -signal.SIGKILL


def test_other_processes_are_not_killed(started: list[subprocess.Popen[bytes]]) -> None:
    """Not killed: no rank, another rank, ranks of other runs with a process id of this run, an id without a process."""
    pids = {
        1: start_process(started), 2: start_process(started, RANK="3"),
        4: start_process(started, RANK="4", MASTER_PORT="1"),
        5: start_process(started, RANK="5", TORCHELASTIC_RUN_ID="other"), 6: 2**22 + 1,
    }  # fmt: skip
    assert end_local_ranks(pids, 0) == []
    assert [process.poll() for process in started] == [None] * 4


def test_zombie_process_counts_as_dead(started: list[subprocess.Popen[bytes]]) -> None:
    pid = start_process(started, RANK="1")
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert end_local_ranks({1: pid}, 0) == []
