"""Worker processes: results in order, processes that end or fail, and no process that stays."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Pipe
from pathlib import Path
from unittest.mock import Mock

import pytest

from ringprof.common import process_pool
from ringprof.common.process_pool import ProcessEnded, map_in_processes
from tests.paths import ROOT
from tests.recording.command import HANGS_S, wait_until


def test_results_come_in_the_order_of_the_items() -> None:
    assert list(map_in_processes(2, pow, [(2, power) for power in range(40)])) == [2**power for power in range(40)]


def test_few_items_are_consumed_ahead_of_results() -> None:
    taken = []

    def items():
        for number in range(1000):
            taken.append(number)
            yield (number,)

    results = map_in_processes(2, math.sqrt, items())
    assert next(results) == 0.0 and len(taken) <= 5
    results.close()


def test_workers_are_reused_by_the_next_call() -> None:
    first, second = (set(map_in_processes(2, os.getpid, [()] * 20)) for _ in range(2))
    assert first | second <= set(first) and os.getpid() not in first


def test_error_of_the_function_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(map_in_processes(2, divmod, [(1, 1), (1, 0)]))
    assert list(map_in_processes(2, divmod, [(7, 2)])) == [(3, 1)]


@pytest.mark.parametrize(("function", "item"), [(os._exit, (0,)), (os.kill, (0, signal.SIGKILL))])
def test_ended_worker_is_an_error_and_is_replaced(function, item) -> None:
    with pytest.raises(ProcessEnded):
        list(map_in_processes(2, function, [item]))
    assert list(map_in_processes(2, abs, [(-1,)])) == [1]


def test_worker_imports_this_copy_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from a program that has found the package in the current folder, which is on no import path of a worker."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path and Path(path) != ROOT])
    process_pool.end_all()
    assert list(map_in_processes(1, abs, [(-1,)])) == [1]


INTERRUPTED_AT_START = """
import os, signal, sys
if "-P" in sys.orig_argv and "pthread_sigmask" in str(sys.orig_argv):
    os.kill(os.getpid(), signal.SIGINT)
"""
"""A ``sitecustomize.py``: Python runs it before the program's first line, while SIGINT still has its own handler."""


def test_worker_interrupted_at_start_writes_no_traceback(tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_AT_START)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process_pool.end_all()
    with pytest.raises(ProcessEnded):
        list(map_in_processes(1, abs, [(-1,)]))
    assert capfd.readouterr().err == ""
    monkeypatch.delenv("PYTHONPATH")
    assert list(map_in_processes(1, abs, [(-1,)])) == [1]


NO_PROCESS = BlockingIOError(11, "Resource temporarily unavailable")
NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("where", "name", "error"), [(subprocess, "Popen", NO_PROCESS), (threading.Thread, "start", NO_THREAD)]
)
def test_failure_to_start_workers_is_an_error_until_it_works(
    where: object, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail to start processes or threads, as under ``ulimit -u``, which does not apply to root."""
    process_pool.end_all()
    with monkeypatch.context() as scarce, pytest.raises(ProcessEnded):
        scarce.setattr(where, name, Mock(side_effect=error))
        list(map_in_processes(2, abs, [(-1,)]))
    assert list(map_in_processes(2, abs, [(-1,)])) == [1]


def test_worker_that_cannot_start_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Check that the worker prints nothing: its parent reports the error in one line."""
    parent_end, child_end = Pipe()
    with parent_end, child_end, pytest.MonkeyPatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", Mock(side_effect=NO_THREAD))
        process_pool.main([str(os.dup(child_end.fileno()))])
    assert capfd.readouterr() == ("", "")


def test_interrupted_worker_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Send SIGINT to a worker alone during a call."""
    process_pool.end_all()
    with pytest.raises(ProcessEnded):
        list(map_in_processes(1, signal.raise_signal, [(signal.SIGINT,)]))
    assert capfd.readouterr() == ("", "")


def test_abandoned_results_end_the_workers() -> None:
    results = map_in_processes(2, time.sleep, [(0,), (1000,), (1000,)])
    next(results)
    assert process_pool._WorkerPool.started is not None
    workers = [process.pid for process in process_pool._WorkerPool.started._processes]
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)
    assert workers and not any(Path(f"/proc/{pid}").exists() for pid in workers)


OWNER = """
import time
from ringprof.common.process_pool import _WorkerPool, map_in_processes
results = map_in_processes(2, time.sleep, [(0.01,), (0.01,), (1000,), (1000,)])
next(results); next(results)
# The first worker may have finished both before the second was started.
while len(_WorkerPool.started._processes) < 2:
    time.sleep(0.01)
print(*(process.pid for process in _WorkerPool.started._processes), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    with owner:
        assert owner.stdout is not None
        workers = [int(pid) for pid in owner.stdout.readline().split()]
        owner.send_signal(number)
        owner.wait(HANGS_S)
    assert len(workers) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
