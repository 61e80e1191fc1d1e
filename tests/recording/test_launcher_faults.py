"""Things going wrong on ranks that torchrun started: one line names the cause, its log stays beside the runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.recording.command import (
    HANGS_S,
    SMALL,
    TORCHRUN,
    environment,
    rank_process,
    run,
    run_and_disturb,
    started_in,
    wait_until,
)
from tests.recording.test_faults import to_group

pytestmark = pytest.mark.processes

RECORD = ["-m", "ringprof", "record", *SMALL, "--iters", "1"]
SLOW = ["-m", "ringprof", "record", "--strategy", "mine:Slow", *SMALL, "--iters", "100"]


def one_line(stderr: str) -> str:
    """Return the error line; torchrun adds its own report, with a traceback, that a process has failed."""
    lines = [line for line in stderr.splitlines() if line.startswith("ringprof: ")]
    assert len(lines) == 1, stderr
    assert "/ringprof/" not in stderr
    return lines[0]


def only_a_log(line: str, folder: Path) -> str:
    """The log that the line names is all that the run has left; returns its text."""
    path = Path(line.split("log: ")[1])
    assert list((folder / "traces").iterdir()) == [path] and path.name.endswith(".failed.log")
    return path.read_text()


def later(folder: Path, what: str, call: int = 3, on: int = 1, *more: str) -> str:
    """The line that a run ends with where something happens to a rank in one call."""
    arguments = [*RECORD, "--strategy", "mine:Later", "-p", f"what={what}", "-p", f"call={call}", "-p", f"on={on}"]
    done = run([*arguments, *more], folder, TORCHRUN, TMPDIR=str(folder))
    assert done.returncode != 0
    wait_until(lambda: not started_in(folder))
    return one_line(done.stderr)


@pytest.mark.parametrize(
    ("call", "phase"),
    [pytest.param(1, "verify", marks=pytest.mark.long), (3, "iterations"),
     pytest.param(5, "profile", marks=pytest.mark.long)],
)  # fmt: skip
def test_a_rank_killed_before_in_and_after_the_timed_section(strategy_folder: Path, call: int, phase: str) -> None:
    line = later(strategy_folder, "die", call)
    assert "rank 1 on host" in line and "has gone without a word" in line and f"the others were in {phase}" in line
    assert ": connection lost\n" in only_a_log(line, strategy_folder)


@pytest.mark.long
def test_rank_0_killed(strategy_folder: Path) -> None:
    line = later(strategy_folder, "die", 3, 0)
    assert "rank 0 on host" in line and "has gone without a word" in line
    assert "rank 1 on" in only_a_log(line, strategy_folder)


@pytest.mark.long
def test_a_rank_out_of_gpu_memory(strategy_folder: Path) -> None:
    line = later(strategy_folder, "gpu_out_of_memory")
    assert "rank 1 failed: out of memory: use a shorter sequence or more ranks" in line
    log = only_a_log(line, strategy_folder)
    assert "Tried to allocate 80.00 GiB" in log and 'raise torch.OutOfMemoryError("CUDA' in log


@pytest.mark.long
def test_a_rank_that_hangs(strategy_folder: Path) -> None:
    line = later(strategy_folder, "hang", 3, 1, "--time-limit", "12")
    assert "rank 1 hung in iterations, step 1, after 0 hops: hop 1 was not posted" in line and "12 s" in line
    assert "rank 0 on" in only_a_log(line, strategy_folder)


@pytest.mark.long
@pytest.mark.parametrize("on", [0, 1])
def test_a_stopped_process(strategy_folder: Path, on: int) -> None:
    """Nothing of a rank answers: the time limit names it, whichever rank it is."""
    code, stderr = run_and_disturb(
        [*SLOW, "--time-limit", "14"], strategy_folder,
        lambda _: os.kill(rank_process(strategy_folder, on), signal.SIGSTOP), TORCHRUN,
    )  # fmt: skip
    assert code != 0 and f"rank {on} " in one_line(stderr)


def twice(process: subprocess.Popen[str]) -> None:
    to_group(process)
    time.sleep(0.2)
    to_group(process)


@pytest.mark.long
@pytest.mark.parametrize("interrupt", [to_group, twice])
def test_ctrl_c(strategy_folder: Path, interrupt: Callable[[subprocess.Popen[str]], None]) -> None:
    _, stderr = run_and_disturb(SLOW, strategy_folder, interrupt, TORCHRUN)
    line = one_line(stderr)
    assert "interrupted during iterations" in line
    only_a_log(line, strategy_folder)


# A launcher, and one rank of it that waits for another which never comes.
LONELY = """
import os, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-m", "ringprof", "record", *sys.argv[1:]])
print(rank.pid, flush=True)
sys.exit(rank.wait())
"""


@pytest.fixture
def waiting_rank(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launched = environment(
        RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="waiting_rank", TMPDIR=str(tmp_path),
    )  # fmt: skip
    command = [sys.executable, "-c", LONELY, "--strategy", "ring", *SMALL]
    launcher = subprocess.Popen(
        command, cwd=tmp_path, env=launched, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert launcher.stdout is not None and launcher.stderr is not None
    rank = int(launcher.stdout.readline())
    # It waits when the port is open where the ranks are to meet.
    wait_until(lambda: any(connection.laddr.port == port for connection in psutil.Process(rank).net_connections()))
    yield launcher, rank
    launcher.stdout.close()
    launcher.stderr.close()
    if psutil.pid_exists(rank):
        os.kill(rank, signal.SIGKILL)


def test_waiting_rank_ends_when_its_launcher_is_killed(
    waiting_rank: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    launcher, rank = waiting_rank
    launcher.kill()
    launcher.wait(HANGS_S)
    wait_until(lambda: not psutil.pid_exists(rank))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_waiting_rank_reacts_to_signals(
    waiting_rank: tuple[subprocess.Popen[str], int], number: signal.Signals, code: int
) -> None:
    launcher, rank = waiting_rank
    os.kill(rank, number)
    assert launcher.wait(HANGS_S) == code
    said = launcher.stderr.read() if launcher.stderr else ""
    assert ("ringprof: interrupted before all ranks were there" in said) == (number == signal.SIGINT)
    assert "Traceback" not in said
