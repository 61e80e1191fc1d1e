"""Further processes of this machine that carry out one function for many arguments.

Not joblib's: loky starts its processes by ``python -m``, which imports from the current folder first, and where a
signal breaks its pool, the thread that manages it may never end. Here a process has one connection, and ends with it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any


class ProcessEnded(Exception):
    """One of the processes ended before its work did, or could not begin, as when memory or processes run out."""


def cpu_count() -> int:
    """How many CPUs this process may use, by its affinity and its control group's quota."""
    # Imported here: it takes longer than reading a small trace.
    from joblib import cpu_count as counted

    return int(counted())


def isolated(what: str, *arguments: str) -> list[str]:
    """The command that starts a process of ringprof's which imports nothing from the current folder.

    ``what`` is ``record``, ``check`` or ``helper`` (`ringprof.spawn`). It gets this process's import paths, without
    that folder.
    """
    try:
        here = os.getcwd()
    except OSError:
        here = ""  # the folder is gone, and nothing can be imported from it
    paths = [path for path in sys.path if path and os.path.realpath(path) != here]
    script = str(Path(__file__).absolute().with_name("spawn.py"))
    return [sys.executable, "-u", script, json.dumps(paths), what, *arguments]


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread and in the processes that it starts, which `ringprof.spawn` unblocks.

    Until their first line runs, Python would answer it with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def mapped(jobs: int, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Generator[Any, None, None]:
    """The results in the order of ``items``, few of which are under way at a time.

    The processes stay, for the next call. Raises `ProcessEnded`, and what ``function`` raises; then, or where the
    results are not all taken, the processes are ended with what they are doing.
    """
    helpers = _Helpers.of(jobs)
    try:
        yield from in_order(lambda *item: helpers.submit(function, item), items, lambda: 2 * jobs)
    except BaseException:
        end_all()
        raise


def in_order(submit: Callable[..., Any], items: Iterable[tuple[Any, ...]], most: Callable[[], int]) -> Iterator[Any]:
    """The results of what ``submit`` begins, in order; at most ``most()`` are under way, asked anew each time."""
    waiting = iter(items)
    running: deque[Any] = deque()
    try:
        while True:
            running.extend(submit(*item) for item in islice(waiting, max(0, most() - len(running))))
            if not running:
                return
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


@atexit.register
def end_all() -> None:
    """End the processes at once, whatever they are doing."""
    if _Helpers.started is not None:
        _Helpers.started.end()
        _Helpers.started = None


class _Helpers:
    """Processes, each with a thread here that waits for its answers."""

    started: _Helpers | None = None

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._threads = ThreadPoolExecutor(jobs, "ringprof-helper")
        self._mine = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starting = threading.Lock()
        self._ended = False

    @classmethod
    def of(cls, jobs: int) -> _Helpers:
        """So many, those that there are if possible."""
        if cls.started is None or cls.started.jobs != jobs:
            end_all()
            cls.started = cls(jobs)
        return cls.started

    def submit(self, function: Callable[..., Any], item: tuple[Any, ...]) -> Any:
        """A future of what the function returns."""
        try:
            return self._threads.submit(self._call, function, item)
        except RuntimeError:  # no thread can be started
            raise ProcessEnded from None

    def end(self) -> None:
        with self._starting:
            self._ended = True
        for process in self._processes:
            process.kill()
            process.wait()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _call(self, function: Callable[..., Any], item: tuple[Any, ...]) -> Any:
        try:
            if not hasattr(self._mine, "connection"):
                self._mine.connection = self._begin()
            self._mine.connection.send((function, item))
            done, result = self._mine.connection.recv()
        except (EOFError, OSError):
            raise ProcessEnded from None
        if done:
            return result
        raise ProcessEnded if isinstance(result, MemoryError) else result

    def _begin(self) -> Connection:
        ours, theirs = Pipe()
        with theirs, self._starting, interrupts_blocked():
            if self._ended:
                raise ProcessEnded
            command = isolated("helper", str(theirs.fileno()))
            # Out of a terminal's reach, where Ctrl-C is for the process that was started there: it ends the others.
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
                )
            )  # fmt: skip
        return ours


def main(arguments: list[str]) -> None:
    """One of the processes: answers calls until the connection ends, or the process that it is for."""
    connection = Connection(int(arguments[0]))
    calls: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
    try:
        threading.Thread(target=_hear, args=(connection, calls), daemon=True).start()
    except RuntimeError:
        return  # no thread can be started; the end of the connection tells it
    while True:
        function, item = calls.get()
        try:
            answer = True, function(*item)
        except Exception as error:
            answer = False, error
        connection.send(answer)


def _hear(connection: Connection, calls: SimpleQueue[Any]) -> None:
    """Put what comes into the queue; at its end, end this process, whatever it is computing."""
    try:
        while True:
            calls.put(connection.recv())
    finally:
        os._exit(0)
