"""Launcher of ringprof's own ranks on this host; ends all within seconds if one fails or the user interrupts.

torch's elastic agent would wait half a minute for a stuck rank, and nothing is to be restarted here. The rendezvous
store is in this parent process, on a port that the system chose, so that two runs cannot share a store.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import msgspec

from ringprof.common.compile_cache import choose_compile_cache
from ringprof.common.json_object import to_json
from ringprof.common.process_pool import cpu_count, interrupts_blocked, spawn_command
from ringprof.common.scratch import keep, remove, scratch_folder
from ringprof.errors import Interrupted, RecordError, RingprofError
from ringprof.ranks.launcher import Job, LaunchTask, RankInfo, Result
from ringprof.ranks.progress import ProgressLogReader, Reporter
from ringprof.ranks.rank_errors import RankOutcome, rank_error, slowest_rank

_POLL_S = 0.05
_SETTLE_S = 0.3
"""Seconds to wait after the first failure, for other ranks whose failure may be its cause."""
END_S = 2.0
"""Seconds between the request to end (SIGTERM) and SIGKILL."""
_KILLED_S = 30.0
"""Seconds to wait for killed ranks; one that is stuck in the kernel does not end."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def log_path(scratch: Path, rank: int) -> Path:
    """Return the path of the file that holds a rank's output."""
    return scratch / f"rank{rank}.log"


def progress_log_path(scratch: Path, rank: int) -> Path:
    """Return the path of a rank's progress log."""
    return scratch / f"rank{rank}.jsonl"


class LocalLauncher:
    """Launcher that starts one process per rank, and reports for all of them."""

    def run(self, job: Job[Result], reporter: Reporter) -> Result:
        """Prepare the job, start its ranks, wait until all have succeeded, and return the result.

        No rank survives this call. The scratch folder is kept only after a failure. Raises what
        `ringprof.ranks.launcher.Launcher.run` raises.
        """
        scratch, task = scratch_folder("ranks"), None
        try:
            task = job.prepare(reporter, str(scratch))
        finally:
            if task is None:
                remove(scratch)
        try:
            _run_ranks(task, scratch, reporter)
            result = task.result()
        except BaseException:
            task.discard()
            raise
        remove(scratch)
        return result


def _run_ranks(task: LaunchTask[Result], scratch: Path, reporter: Reporter) -> None:
    """Start the ranks and wait until all have succeeded. Raises the error to show to the user."""
    assert isinstance(task, msgspec.Struct)
    (scratch / "task.json").write_bytes(to_json(task))
    readers = [ProgressLogReader(progress_log_path(scratch, rank)) for rank in range(task.request.world)]
    ranks: list[Popen[bytes]] = []
    with _store() as port, _signals_held() as deliver_signals:
        try:
            with interrupts_blocked():
                _start(ranks, task, scratch, port)
            deliver_signals()
            _wait_until_done(ranks, readers, reporter, task)
        except BaseException as error:
            # A second Ctrl-C must not stop the shutdown of the ranks.
            _set_handlers(dict.fromkeys(_SIGNALS, signal.SIG_IGN))
            _end(ranks)
            user_error = _explain(error, readers, scratch, task.job)
            # The message of a refused task needs no logs.
            is_refusal = isinstance(user_error, RingprofError) and not isinstance(user_error, RecordError)
            (remove if is_refusal else keep)(scratch)
            raise user_error from None


@dataclass(eq=False)
class _RankFailed(Exception):
    """Failure of at least one rank; which rank and why is found out after all have ended."""

    statuses: dict[int, int]
    """Exit codes of the ranks that had ended, negative for signals."""


@dataclass(eq=False)
class _TimeIsUp(Exception):
    """Expiry of a time limit."""

    seconds: float


def _start(ranks: list[Popen[bytes]], task: LaunchTask[Any], scratch: Path, port: int) -> None:
    """Start the ranks and append their processes to ``ranks``, each in a session of its own."""
    world = task.request.world
    command = spawn_command(task.job, str(scratch / "task.json"), str(os.getpid()))
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
    ranks: list[Popen[bytes]], readers: list[ProgressLogReader], reporter: Reporter, task: LaunchTask[Any]
) -> None:
    """Relay rank 0's progress until all ranks have ended with success. Raises `_RankFailed` and `_TimeIsUp`."""

    def statuses() -> dict[int, int]:
        return {rank: code for rank, process in enumerate(ranks) if (code := process.poll()) is not None}

    limit_s, phase, begin = task.limit_of(None) or 0.0, None, time.monotonic()
    while True:
        readers[0].relay(reporter)
        current = (readers[0].last("start") or {}).get("start")
        if current != phase and task.limit_of(current) is not None:
            limit_s, begin = task.limit_of(current) or 0.0, time.monotonic()
        phase, ended = current, statuses()
        if any(ended.values()):
            time.sleep(_SETTLE_S)
            raise _RankFailed(statuses())
        if len(ended) == len(ranks):
            readers[0].relay(reporter)
            for reader in readers[1:]:
                reader.read()
            # User code may have ended a rank with exit code 0 before it was done.
            unfinished = {rank: code for rank, code in ended.items() if readers[rank].last("done") is None}
            if unfinished:
                raise _RankFailed(unfinished)
            return
        if time.monotonic() > begin + limit_s:
            raise _TimeIsUp(limit_s)
        time.sleep(_POLL_S)


def _explain(error: BaseException, readers: list[ProgressLogReader], scratch: Path, job: str) -> BaseException:
    """Return the error to raise to the user for ``error``, which ended the launch; all ranks have ended.

    The cause of failures is a rank that was killed by a signal, else the rank with the earliest error of its own. A
    rank that only lost its peers fails a moment later, with an error of the communication library.
    """
    for reader in readers:
        reader.read()
    logs = f"; logs kept in {scratch}"
    if not isinstance(error, Exception):
        entry = readers[0].last("start")
        phase, nothing = f" during {entry['start']}" if entry else "", "; nothing was recorded" * (job == "record")
        return Interrupted(f"interrupted{phase}{nothing}{logs}")
    if isinstance(error, _TimeIsUp):
        stopped = {rank: entry for rank, reader in enumerate(readers) if (entry := reader.last("stopped"))}
        outcomes = {rank: msgspec.convert(entry["stopped"], RankOutcome) for rank, entry in stopped.items()}
        slowest = slowest_rank(outcomes, len(readers))
        return RecordError(f"{slowest} when the time limit of {error.seconds:.0f} s was over{logs}")
    if not isinstance(error, _RankFailed):
        return error
    statuses = error.statuses
    killed = [rank for rank, status in statuses.items() if status < 0]
    if killed:
        rank, number = killed[0], signal.Signals(-statuses[killed[0]])
        hint = " (often the system's answer to memory running out)" if number == signal.SIGKILL else ""
        return RecordError(f"rank {rank} was killed by {number.name}{hint}; log: {log_path(scratch, rank)}")
    failed = {rank: entry for rank in statuses if (entry := readers[rank].last("failed"))}
    outcomes = {rank: msgspec.convert(entry["failed"], RankOutcome) for rank, entry in failed.items()}
    unexplained = [rank for rank in statuses if rank not in outcomes]
    if unexplained and all(outcome.effect for outcome in outcomes.values()):
        # All logged errors are consequences: the cause is a rank that ended without an error, whatever its exit code.
        rank = max(unexplained, key=lambda rank: statuses[rank] != 0)
        log = log_path(scratch, rank)
        return RecordError(f"rank {rank} exited with code {statuses[rank]} and printed no error; log: {log}")
    rank = min(outcomes, key=lambda rank: (outcomes[rank].effect, failed[rank]["at"]))
    return rank_error(rank, outcomes[rank], f"; log: {log_path(scratch, rank)}")
