"""Start of ringprof's own ranks on this host; all end within seconds if one fails or the user interrupts.

torch's elastic agent would wait half a minute for a stuck rank, and nothing is to be restarted here. The rendezvous
store is in this parent process, on a port that the system chose, so that two runs cannot share a store.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, Protocol, TypeVar

import msgspec

from ringprof.common.compile_cache import choose_compile_cache
from ringprof.common.json_object import JsonObject, to_json
from ringprof.common.process_pool import cpu_count, interrupts_blocked, spawn_command
from ringprof.common.scratch import keep, remove, scratch_folder
from ringprof.errors import RecordError, RingprofError
from ringprof.ranks.launcher import RankInfo
from ringprof.ranks.machine import host_name
from ringprof.ranks.progress import PositionReporter, ProgressLogReader, Reporter, SilentReporter, progress_log_path
from ringprof.ranks.rank_errors import FailedRun, RankOutcome

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

RANK_MAIN = "ringprof.recording.rank_main"
_POLL_S = 0.05
_SETTLE_S = 0.3
"""Seconds to wait after the first failure, for other ranks whose failure may be its cause."""
END_S = 2.0
"""Seconds between the request to end (SIGTERM) and SIGKILL."""
_KILLED_S = 30.0
"""Seconds to wait for killed ranks; one that is stuck in the kernel does not end."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Task(Protocol[Result_co]):
    """Task of ranks that ringprof starts, sent to them as JSON: `RankTask` of a recording, or `CheckTask`."""

    @property
    def job(self) -> str:
        """Kind of task, ``record`` or ``check``, as `ringprof.recording.rank_main` takes it."""

    @property
    def request(self) -> Any:
        """Request whose ``world`` and ``device`` are resolved."""

    def limit_of(self, phase: str | None) -> float | None:
        """Return the time limit of a phase of rank 0 in seconds; None if the limit that runs already covers it.

        The phase None is the time before rank 0's first phase.
        """

    def run(self, rank_info: RankInfo, position: PositionReporter, scratch: Path) -> object:
        """Run as one rank, which this process is."""

    def result(self, scratch: Path) -> Result_co:
        """Read the result that rank 0 has written."""

    def discard(self) -> None:
        """Remove what the ranks have written outside the scratch folder."""


def run_local_ranks(prepare: Callable[[], Task[Result]], reporter: Reporter) -> Result:
    """Prepare a task, start its ranks on this host, wait until all have succeeded, and return the result.

    ``prepare`` raises `UsageError` for a request that no rank could fulfil. Raises the error of the rank that caused a
    failure, and `Interrupted` if the user interrupts. No rank survives this call. The scratch folder is kept only after
    a failure.
    """
    scratch = scratch_folder("ranks")
    try:
        task = prepare()
    except BaseException:
        remove(scratch)
        raise
    try:
        _run_ranks(task, scratch, reporter)
        result = task.result(scratch)
    except BaseException:
        task.discard()
        raise
    remove(scratch)
    return result


def _run_ranks(task: Task[Result], scratch: Path, reporter: Reporter) -> None:
    """Start the ranks and wait until all have succeeded. Raises the error to show to the user."""
    assert isinstance(task, msgspec.Struct)
    (scratch / "task.json").write_bytes(to_json(task))
    reporters = [reporter, *(SilentReporter() for _ in range(1, task.request.world))]
    readers = [ProgressLogReader(progress_log_path(scratch, rank), to) for rank, to in enumerate(reporters)]
    failed = FailedRun([host_name()] * len(readers), logs=scratch, records=task.job == "record")
    ranks: list[Popen[bytes]] = []
    with _store() as port, _signals_held() as deliver_signals:
        try:
            with interrupts_blocked():
                _start(ranks, task, scratch, port)
            deliver_signals()
            _wait_until_done(ranks, readers, task, failed)
        except BaseException as error:
            # Here, since the command line raises Ctrl-C again until a handler runs; a second one must change nothing.
            _set_handlers(dict.fromkeys(_SIGNALS, signal.SIG_IGN))
            _end(ranks)
            if isinstance(error, Exception) and not isinstance(error, _RanksFailed):
                user_error: BaseException = error
            else:
                failed.interrupted = not isinstance(error, Exception)
                # The parent ended the other ranks, so only the first to end can be the cause.
                failed.outcomes = _outcomes(readers, failed.statuses or range(len(readers)))
                user_error = failed.cause()
            # The message of a refused task needs no logs.
            is_refusal = isinstance(user_error, RingprofError) and not isinstance(user_error, RecordError)
            (remove if is_refusal else keep)(scratch)
            raise user_error from None


class _RanksFailed(Exception):
    """Failure of at least one rank, or the end of a time limit; the cause is found out after all have ended."""


def _start(ranks: list[Popen[bytes]], task: Task[Any], scratch: Path, port: int) -> None:
    """Start the ranks and append their processes to ``ranks``, each in a session of its own."""
    world = task.request.world
    command = spawn_command(RANK_MAIN, task.job, str(scratch / "task.json"), str(os.getpid()))
    env = {
        **os.environ,
        # The parent's store is the rendezvous: no rank opens a port of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_count() // world))),
    }
    choose_compile_cache(env, str(scratch / "torchinductor"))
    if task.request.device == "cpu" and any(name == "lo" for _, name in socket.if_nameindex()):
        # One host: gloo must not depend on what the host's name resolves to.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for rank in range(world):
        variables = RankInfo(rank, world, rank, world).variables("127.0.0.1", port)
        try:
            ranks.append(Popen(command, env={**env, **variables}, start_new_session=True))
        except OSError as error:
            raise _start_error(error) from None


def _start_error(error: Exception) -> RecordError:
    why = getattr(error, "strerror", None) or error
    return RecordError(f"not all ranks can be started here ({why}): see ulimit -u and -n, or use a smaller --world")


def _end(ranks: list[Popen[bytes]]) -> None:
    """End the ranks: SIGTERM first, so that they can log where they were, then SIGKILL."""
    for number, seconds in ((signal.SIGTERM, END_S), (signal.SIGKILL, _KILLED_S)):
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + seconds
        for process in ranks:
            with suppress(TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


@contextmanager
def _store() -> Iterator[int]:
    """Open a store for the ranks' rendezvous that only this host can reach; yield its port."""
    import torch.distributed

    untyped: Any = torch.distributed
    try:
        # A store that opens its port itself listens on all interfaces.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # Connect first: torch prints many lines on stderr about an address that it cannot reach.
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        listener.accept()[0].close()
        store = untyped.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except OSError as error:
        why = error.strerror or error
        raise RecordError(f"ranks cannot meet on 127.0.0.1 ({why}): bring it up (ip link set lo up)") from None
    except RuntimeError as error:  # the store's thread cannot be started
        raise _start_error(error) from None
    yield port
    del store


@contextmanager
def _signals_held() -> Iterator[Callable[[], None]]:
    """Hold back signals while ranks are being started, since a rank whose start is cut short could not be ended.

    Yields a function that raises the first one and lets later ones through. The handlers are restored after the block.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    received: list[int] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def deliver() -> None:
        # The default of a signal would end this process but not its ranks.
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        _set_handlers({number: interrupt if handler in defaults else handler for number, handler in before.items()})
        if received:
            signal.raise_signal(received[0])

    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    _set_handlers(dict.fromkeys(heeded, lambda number, _: received.append(number)))
    try:
        yield deliver
    finally:
        _set_handlers(before)


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait_until_done(
    ranks: list[Popen[bytes]], readers: list[ProgressLogReader], task: Task[Any], failed: FailedRun
) -> None:
    """Relay rank 0's progress until all ranks have ended with success.

    Raises `_RanksFailed` after it has noted the exit codes or the expired time limit in ``failed``.
    """

    def ended_early() -> dict[int, int]:
        codes = {rank: code for rank, process in enumerate(ranks) if (code := process.poll()) is not None}
        done = [rank for rank, outcome in _outcomes(readers, codes).items() if outcome.kind == "done"]
        # User code may end a rank with exit code 0 before it is done.
        return {rank: code for rank, code in codes.items() if code or rank not in done}

    phase, begin = None, time.monotonic()
    failed.limit_s = task.limit_of(None) or 0.0
    while True:
        readers[0].read()
        if readers[0].phase != phase and (limit_s := task.limit_of(readers[0].phase)) is not None:
            failed.limit_s, begin = limit_s, time.monotonic()
        phase = readers[0].phase
        if ended_early():
            time.sleep(_SETTLE_S)
            failed.statuses = ended_early()
            raise _RanksFailed
        if all(process.returncode == 0 for process in ranks):
            readers[0].read()
            return
        failed.overdue = time.monotonic() > begin + failed.limit_s
        if failed.overdue:
            raise _RanksFailed
        time.sleep(_POLL_S)


def _outcomes(readers: list[ProgressLogReader], ranks: Iterable[int]) -> dict[int, RankOutcome]:
    """Read the outcomes that these ranks have logged; the earliest first."""
    entries: dict[int, tuple[float, JsonObject]] = {}
    for rank in ranks:
        readers[rank].read()
        if (outcome := readers[rank].outcome) is not None:
            entries[rank] = outcome
    in_order = sorted(entries, key=lambda rank: entries[rank][0])
    return {rank: msgspec.convert(entries[rank][1], RankOutcome) for rank in in_order}
