"""A pool of local worker processes that call one function with many arguments.

joblib is not used: loky starts its processes with ``python -m``, which imports from the current folder first. If a
signal breaks its pool, its manager thread may never end. Here each process has one connection and ends with it.
"""

from __future__ import annotations

import atexit
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
    """A worker process could not start or ended early, for instance for lack of memory or processes."""


def cpu_count() -> int:
    """Return the number of CPUs that this process may use, by its affinity and its control group's quota."""
    # Imported here: it takes longer than reading a small trace.
    from joblib import cpu_count as joblib_cpu_count

    return int(joblib_cpu_count())


_PROGRAM = """
import signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
sys.path[:] = PATHS
from MODULE import main
main(sys.argv[1:])
"""


def spawn_command(module: str, *arguments: str) -> list[str]:
    """Build the command line of a process that calls ``module.main(arguments)``.

    An untrusted current folder may hold a ``numpy.py``: the process gets the import paths of this one, without the
    current folder, and at their end the folder of this copy of the package. SIGINT, which `interrupts_blocked` has
    blocked, ends it without a traceback: this process reports it.
    """
    try:
        current = os.getcwd()
    except OSError:
        current = ""  # the folder was deleted, so nothing can be imported from it
    paths = [path for path in sys.path if path and os.path.realpath(path) != current]
    paths.append(str(Path(__file__).absolute().parents[2]))
    program = _PROGRAM.replace("PATHS", repr(paths)).replace("MODULE", module)
    return [sys.executable, "-P", "-u", "-c", program, *arguments]


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread and in the processes that it starts, which `spawn_command` unblocks.

    Otherwise Python would answer SIGINT with a traceback until the first line of such a process runs.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def map_in_processes(
    jobs: int, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]
) -> Generator[Any, None, None]:
    """Yield ``function(*item)`` for each item, in order, computed by ``jobs`` processes; few items run at a time.

    The processes stay alive for the next call. Raises `ProcessEnded` and the errors of ``function``. After an error,
    or if the caller does not take all results, the processes are killed.
    """
    pool = _WorkerPool.of(jobs)
    try:
        yield from results_in_order(lambda *item: pool.submit(function, item), items, lambda: 2 * jobs)
    except BaseException:
        end_all()
        raise


def results_in_order(
    submit: Callable[..., Any], items: Iterable[tuple[Any, ...]], most: Callable[[], int]
) -> Iterator[Any]:
    """Submit the items and yield the results of their futures in order.

    At most ``most()`` futures run at a time; it is called again for each result.
    """
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
    """Kill the worker processes at once, even while they work."""
    if _WorkerPool.started is not None:
        _WorkerPool.started.end()
        _WorkerPool.started = None


class _WorkerPool:
    """Worker processes, each with a thread in this process that waits for its answers."""

    started: _WorkerPool | None = None
    """The pool of this process, if one was started."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._threads = ThreadPoolExecutor(jobs, "ringprof-helper")
        self._of_thread = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starting = threading.Lock()
        self._ended = False

    @classmethod
    def of(cls, jobs: int) -> _WorkerPool:
        """Return a pool of ``jobs`` processes: the existing one if it has this size, else a new one."""
        if cls.started is None or cls.started.jobs != jobs:
            end_all()
            cls.started = cls(jobs)
        return cls.started

    def submit(self, function: Callable[..., Any], item: tuple[Any, ...]) -> Any:
        """Call the function in a worker; returns a future of its result."""
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
            if not hasattr(self._of_thread, "connection"):
                self._of_thread.connection = self._start_worker()
            self._of_thread.connection.send((function, item))
            done, result = self._of_thread.connection.recv()
        except (EOFError, OSError):
            raise ProcessEnded from None
        if done:
            return result
        raise ProcessEnded if isinstance(result, MemoryError) else result

    def _start_worker(self) -> Connection:
        parent_end, child_end = Pipe()
        with child_end, self._starting, interrupts_blocked():
            if self._ended:
                raise ProcessEnded
            command = spawn_command(__name__, str(child_end.fileno()))
            # In a new session, so that a terminal's Ctrl-C reaches only the main process, which ends the workers.
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[child_end.fileno()], start_new_session=True
                )
            )  # fmt: skip
        return parent_end


def main(arguments: list[str]) -> None:
    """Run a worker process: answer calls until the connection or the parent process ends."""
    connection = Connection(int(arguments[0]))
    calls: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
    try:
        threading.Thread(target=_receive_calls, args=(connection, calls), daemon=True).start()
    except RuntimeError:
        return  # no thread can be started; the parent notices the closed connection
    while True:
        function, item = calls.get()
        try:
            answer = True, function(*item)
        except Exception as error:
            answer = False, error
        connection.send(answer)


def _receive_calls(connection: Connection, calls: SimpleQueue[Any]) -> None:
    """Put received calls into the queue. When the connection ends, end this process, even during a computation."""
    try:
        while True:
            calls.put(connection.recv())
    finally:
        os._exit(0)
