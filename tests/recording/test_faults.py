"""Things going wrong, with real processes: all of them end, nothing half-written stays, one line says why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.recording.command import (
    HANGS_S,
    RINGPROF,
    SMALL,
    environment,
    rank_process,
    run,
    run_and_disturb,
    started_in,
    wait_until,
)
from tests.scale.test_command import obey_signals
from tests.test_processes import INTERRUPTED_AT_START

TWO = [*SMALL, "--world", "2"]
SLOW = ["record", "--strategy", "mine:Slow", *TWO, "--iters", "100"]


def nothing_recorded(folder: Path) -> bool:
    """Neither a run nor a half-written one."""
    return list((folder / "traces").iterdir()) == []


def one_line(stderr: str) -> str:
    """The error, which is the only line that begins so."""
    lines = [line for line in stderr.splitlines() if line.startswith("ringprof: ")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


def kept_log(line: str, folder: Path) -> None:
    path = Path(line.split("log: ")[1])
    assert path.exists() and path.is_relative_to(folder), line


@pytest.mark.processes
@pytest.mark.parametrize(("name", "tensor"), [("Wrong", "out"), ("NotANumber", "dv")])
def test_a_wrong_result_ends_the_run_before_timing(strategy_folder: Path, name: str, tensor: str) -> None:
    done = run(["record", "--strategy", f"mine:{name}", *TWO], strategy_folder, TMPDIR=str(strategy_folder))
    assert done.returncode == 3
    line = one_line(done.stderr)
    assert f"wrong result on rank 1: {tensor} is off by" in line and "allowed" in line
    assert "warm-up" not in done.stderr and "iterations" not in done.stderr
    kept_log(line, strategy_folder)
    assert nothing_recorded(strategy_folder)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "problem"), [("LongOnly", "is off by"), ("SecondCall", "is not finite, in the last timed iteration")]
)
def test_result_wrong_only_when_timed_ends_the_run(strategy_folder: Path, name: str, problem: str) -> None:
    done = run(["record", "--strategy", f"mine:{name}", *TWO], strategy_folder, TMPDIR=str(strategy_folder))
    assert done.returncode == 3
    line = one_line(done.stderr)
    assert "wrong result on rank" in line and problem in line and "sequence 512" in line
    assert "nothing was recorded" in line and nothing_recorded(strategy_folder)


@pytest.mark.processes
def test_rows_with_a_single_key_are_verified(strategy_folder: Path) -> None:
    """Rows that attend one key have no error of the kernel alone."""
    tiny = ["--seq", "4", "--world", "4", "--heads", "4", "--head-dim", "8", "--device", "cpu", "--iters", "1"]
    done = run(["record", "--strategy", "ring", *tiny], strategy_folder)
    assert done.returncode == 0, done.stderr


def test_killed_rank_ends_the_run(strategy_folder: Path) -> None:
    code, stderr = run_and_disturb(
        SLOW, strategy_folder, lambda _: os.kill(rank_process(strategy_folder, 1), signal.SIGKILL)
    )
    assert code == 3
    line = one_line(stderr)
    assert "rank 1 was killed by SIGKILL" in line
    kept_log(line, strategy_folder)
    assert nothing_recorded(strategy_folder)


def to_group(process: subprocess.Popen[str]) -> None:
    """Send SIGINT to the process group, as a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


def to_parent_twice(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)


@pytest.mark.processes
@pytest.mark.parametrize("interrupt", [to_group, pytest.param(to_parent_twice, marks=pytest.mark.long)])
def test_ctrl_c_ends_every_rank(strategy_folder: Path, interrupt: Callable[[subprocess.Popen[str]], None]) -> None:
    code, stderr = run_and_disturb(SLOW, strategy_folder, interrupt)
    assert code == 130
    assert "interrupted during iterations" in one_line(stderr)
    assert nothing_recorded(strategy_folder)


@pytest.mark.processes
def test_ranks_interrupted_at_their_start_write_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_AT_START)
    arguments = ["record", "--strategy", "zigzag", *TWO]
    done = run(arguments, tmp_path, TMPDIR=str(tmp_path), PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]))
    assert done.returncode == 3
    assert re.fullmatch(r"ringprof: rank [01] was killed by SIGINT.*", one_line(done.stderr))


@pytest.mark.long
def test_ranks_do_not_outlive_their_parent(strategy_folder: Path) -> None:
    code, _ = run_and_disturb(SLOW, strategy_folder, lambda process: process.kill())
    assert code == -signal.SIGKILL
    # The ranks clear up as they notice, which on a busy machine is after the parent's end has been seen.
    wait_until(lambda: nothing_recorded(strategy_folder))


@pytest.mark.long
def test_rank_stopped_by_sigstop_is_killed(strategy_folder: Path) -> None:
    def disturb(process: subprocess.Popen[str]) -> None:
        os.kill(rank_process(strategy_folder, 1), signal.SIGSTOP)
        process.send_signal(signal.SIGINT)

    code, _ = run_and_disturb(SLOW, strategy_folder, disturb)
    assert code == 130
    assert nothing_recorded(strategy_folder)


@pytest.mark.long
def test_running_out_of_memory_names_the_rank(strategy_folder: Path) -> None:
    arguments = ["record", "--strategy", "mine:Later", "-p", "what=out_of_memory", *TWO]
    done = run(arguments, strategy_folder, TMPDIR=str(strategy_folder))
    assert done.returncode == 3
    assert "rank 1 failed: out of memory" in one_line(done.stderr)
    assert nothing_recorded(strategy_folder)


@pytest.mark.processes
def test_ranks_exiting_early_with_code_0_record_nothing(strategy_folder: Path) -> None:
    """An earlier run is not reported as the result."""
    done = run(["record", "--strategy", "zigzag", *TWO, "--iters", "1"], strategy_folder)
    assert done.returncode == 0, done.stderr
    runs = strategy_folder / "traces"
    earlier = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    done = run(["record", "--strategy", "mine:Leaves", *TWO], strategy_folder, TMPDIR=str(strategy_folder))
    assert done.returncode == 3 and done.stdout == ""
    line = one_line(done.stderr)
    assert re.match("ringprof: rank [01] exited with code 0 and printed no error; nothing was recorded; log: ", line)
    kept_log(line, strategy_folder)
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == earlier


@pytest.mark.long
@pytest.mark.parametrize(("what", "code"), [("leave", 0), ("leave_badly", 7)])
def test_rank_that_exits_is_named_not_the_one_waiting(strategy_folder: Path, what: str, code: int) -> None:
    done = run(["record", "--strategy", "mine:Later", "-p", f"what={what}", *TWO], strategy_folder)
    assert done.returncode == 3
    assert f"rank 1 exited with code {code} and printed no error; nothing was recorded; log: " in one_line(done.stderr)
    assert nothing_recorded(strategy_folder)


@pytest.mark.long
def test_hanging_rank_is_named_at_the_time_limit(strategy_folder: Path) -> None:
    arguments = ["record", "--strategy", "mine:Later", "-p", "what=hang", *TWO, "--time-limit", "15"]
    done = run(arguments, strategy_folder, TMPDIR=str(strategy_folder))
    assert done.returncode == 3
    line = one_line(done.stderr)
    assert "rank 1 hung in iterations, step 1, after 0 hops" in line and "15 s" in line
    assert nothing_recorded(strategy_folder)


STARTED = """
import os
from ringprof.ranks import launch
end = launch._end
class Started(launch.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), NUMBER)
def ended(ranks):
    os.kill(os.getpid(), NUMBER)
    end(ranks)
launch.Popen, launch._end = Started, ended
from ringprof.cli import main
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ranks_are_being_started_ends_them(tmp_path: Path, number: signal.Signals) -> None:
    """Before the launcher knows the first of them, and again while it ends them."""
    command = ["record", "--strategy", "ring", *TWO, "--iters", "100000"]
    program = f"NUMBER = {int(number)}\n{STARTED}main({command})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=HANGS_S,
        env=environment(TMPDIR=str(tmp_path)), preexec_fn=obey_signals,
    )  # fmt: skip
    assert done.returncode == 130 and "interrupted" in one_line(done.stderr)
    wait_until(lambda: not started_in(tmp_path))
    assert nothing_recorded(tmp_path)


SCARCE = """
import subprocess, threading, torch.distributed
from ringprof.ranks import launch
from ringprof.cli import main
def scarce(begin, count):
    left = iter(range(count))
    def instead(*arguments, **options):
        if next(left, None) is None:
            raise ERROR
        return begin(*arguments, **options)
    return instead
"""
NO_PROCESS = "launch.Popen = scarce(subprocess.Popen, 1)"
NO_THREAD = "threading.Thread.start = scarce(threading.Thread.start, 0)"
NO_STORE = "torch.distributed.TCPStore = scarce(torch.distributed.TCPStore, 0)"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "error"),
    [
        (NO_PROCESS, "BlockingIOError(11, 'Resource temporarily unavailable')"),
        (NO_STORE, "RuntimeError('Resource temporarily unavailable')"),
    ],
    ids=["process", "store"],
)
def test_failure_to_start_a_rank_ends_the_started_ones(tmp_path: Path, what: str, error: str) -> None:
    """Simulate the limit of ``ulimit -u``, which does not apply to root."""
    command = ["record", "--strategy", "ring", *TWO, "--iters", "100000"]
    program = f"{SCARCE.replace('ERROR', error)}{what}\nmain({command})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert done.returncode == 3 and "not all ranks can be started here" in one_line(done.stderr)
    assert started_in(tmp_path) == []
    assert nothing_recorded(tmp_path)


@pytest.mark.processes
def test_recording_works_if_the_parent_cannot_start_threads(tmp_path: Path) -> None:
    error = 'RuntimeError("can\'t start new thread")'
    command = ["record", "--strategy", "ring", *TWO, "--iters", "1"]
    program = f"{SCARCE.replace('ERROR', error)}{NO_THREAD}\nmain({command})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_ignored_sighup_and_sigint_stay_ignored(tmp_path: Path) -> None:
    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    process = subprocess.Popen(
        [*RINGPROF, "record", "--strategy", "ring", *TWO], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env=environment(), preexec_fn=ignore, start_new_session=True,
    )  # fmt: skip
    while process.poll() is None:
        for number in (signal.SIGHUP, signal.SIGINT):
            os.killpg(process.pid, number)
        time.sleep(0.05)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert (tmp_path / "traces/run.json").exists()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_before_ranks_start_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [*RINGPROF, "record", "--strategy", "ring", *TWO], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env=environment(TMPDIR=str(tmp_path / "tmp")), preexec_fn=obey_signals,
    )  # fmt: skip
    wait_until(lambda: bool(list((tmp_path / "tmp").glob("ringprof-ranks-*"))))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=HANGS_S)
    assert process.returncode == 128 + number and "Traceback" not in stderr
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "traces").exists()


@pytest.mark.long
def test_temporary_files_of_a_killed_recording_are_removed_by_the_next(strategy_folder: Path) -> None:
    run_and_disturb(SLOW, strategy_folder, kill_all)
    assert list(strategy_folder.glob("ringprof-ranks-*"))
    done = run(["record", "--strategy", "ring", *TWO, "--iters", "1"], strategy_folder, TMPDIR=str(strategy_folder))
    assert done.returncode == 0 and not list(strategy_folder.glob("ringprof-*"))


def kill_all(process: subprocess.Popen[str]) -> None:
    """The ranks first stopped, so that none can clear up."""
    folder = Path(os.readlink(f"/proc/{process.pid}/cwd"))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in started_in(folder):
            os.kill(pid, number)
