"""Launcher of ringprof's own ranks on this host; ends all within seconds if one fails or the user interrupts.

Ranks are started by the process layer of torch's elastic launcher, without its agent and rendezvous service: there is
one host, nothing is restarted, and the agent would wait half a minute for a stuck rank. The rendezvous store is in this
parent process, on a port that the system chose, so that two runs cannot share a store.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import psutil

from ringprof.common.compile_cache import VARIABLE as COMPILE_CACHE
from ringprof.common.compile_cache import choose_compile_cache
from ringprof.common.process_pool import cpu_count, interrupts_blocked, spawn_command
from ringprof.common.scratch import keep, remove
from ringprof.errors import Interrupted, RecordError, RingprofError
from ringprof.record.progress import ProgressLogReader, Reporter
from ringprof.record.request import to_json
from ringprof.record.shutdown.rank_errors import is_consequence, rank_error, signal_error, slowest_rank

_POLL_S = 0.05
_SETTLE_S = 0.3
"""Seconds to wait after the first failure, for other ranks whose failure may be its cause."""
END_S = 2
"""Seconds between the request to end (SIGTERM) and SIGKILL."""
Result = TypeVar("Result")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PYTHON_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)


def log_path(scratch: Path, rank: int) -> Path:
    """Return the path of the file that holds a rank's output."""
    return scratch / f"rank{rank}.log"


def progress_log_path(scratch: Path, rank: int) -> Path:
    """Return the path of a rank's progress log."""
    return scratch / f"rank{rank}.jsonl"


class LaunchTask(Protocol):
    """Task of locally launched ranks, sent to them as JSON: `ringprof.record.request.RankTask` or `CheckTask`."""

    @property
    def request(self) -> Any:
        """Request whose ``world`` and ``device`` are resolved."""

    @property
    def scratch(self) -> str | None:
        """Folder of the ranks' logs."""

    def limit_of(self, phase: str | None) -> float | None:
        """Return the time limit of a phase of rank 0 in seconds; None if the limit that runs already covers it.

        The phase None is the time before rank 0's first phase.
        """


def launch(task: LaunchTask, reporter: Reporter, job: str, result: Callable[[], Result]) -> Result:
    """Start ranks on this host, wait until all have succeeded, and return ``result()``.

    ``job`` is ``record`` or ``check``, as `ringprof.entry_points.spawn` takes it. No rank survives this call. The
    scratch folder is kept only after a failure. Raises `RecordError`, `VerificationError` or another error of a rank,
    and `Interrupted` if the user interrupts.
    """
    assert task.scratch is not None and task.request.world is not None and isinstance(task, msgspec.Struct)
    scratch = Path(task.scratch)
    (scratch / "task.json").write_bytes(to_json(task))
    with _signals_restored(), _store() as port:
        context = None
        readers = [ProgressLogReader(progress_log_path(scratch, rank)) for rank in range(task.request.world)]
        try:
            with _signals_deferred(), interrupts_blocked():
                context = _start(task.request, scratch, port, job)
            _wait_until_done(context.pids(), readers, reporter, task)
        except BaseException as error:
            # A second Ctrl-C must not stop the shutdown of the ranks.
            _set_handlers(dict.fromkeys(_SIGNALS, signal.SIG_IGN))
            if context is not None:
                # SIGTERM first, so that the ranks can log where they were, then SIGKILL.
                context.close(signal.SIGTERM, END_S)
            user_error = _explain(error, readers, scratch, job)
            # The message of a refused task needs no logs.
            is_refusal = isinstance(user_error, RingprofError) and not isinstance(user_error, RecordError)
            (remove if is_refusal else keep)(scratch)
            raise user_error from None
        context.close()
    value = result()
    remove(scratch)
    return value


class _RankFailed(Exception):
    """Failure of at least one rank; which rank and why is found out after all have ended."""

    def __init__(self, statuses: dict[int, int]) -> None:
        super().__init__()
        self.statuses = statuses


class _TimeIsUp(Exception):
    """Expiry of a time limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


def _start(request: Any, scratch: Path, port: int, job: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    # The launcher would log failures that ringprof reports itself.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    world = request.world or 1
    command = spawn_command(job, str(scratch / "task.json"), str(os.getpid()))
    try:
        return start_processes(
            name="ringprof",
            entrypoint=command[0],
            args={rank: tuple(command[1:]) for rank in range(world)},
            envs={rank: _environment(request, rank, world, port, scratch) for rank in range(world)},
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        )
    except (OSError, RuntimeError) as error:
        # A failed start leaves processes that the launcher does not return.
        for process in psutil.Process().children():
            with suppress(psutil.Error):
                if command[-2] in process.cmdline():
                    process.kill()
                    process.wait()
        raise _start_error(error) from None


def _start_error(error: Exception) -> RecordError:
    why = getattr(error, "strerror", None) or error
    return RecordError(f"not all ranks can be started here ({why}): see ulimit -u and -n, or use a smaller --world")


def _environment(request: Any, rank: int, world: int, port: int, scratch: Path) -> dict[str, str]:
    """Return a rank's environment variables: those that torch reads, and its number of threads."""
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The parent's store is the rendezvous: no rank opens a port of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_count() // world))),
    }
    choose_compile_cache(compiling := dict(os.environ), str(scratch / "torchinductor"))
    env[COMPILE_CACHE] = compiling[COMPILE_CACHE]
    if request.device == "cpu" and any(name == "lo" for _, name in socket.if_nameindex()):
        # One host: gloo must not depend on what the host's name resolves to.
        env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return env


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
def _signals_restored() -> Iterator[None]:
    """Restore the handlers of signals after the block."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        _set_handlers(before)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Hold back signals while ranks are being started, when nothing could end them; raise the first one afterwards.

    The launcher is kept from setting its own handlers. They would raise in the middle of the start, and would handle
    signals that nohup ignores.
    """
    variable, received = "TORCHELASTIC_SIGNALS_TO_HANDLE", list[int]()
    previous = os.environ.pop(variable, None)
    os.environ[variable] = ""
    handlers = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    _set_handlers(dict.fromkeys(handlers, lambda number, _: received.append(number)))
    try:
        yield
    finally:
        os.environ.pop(variable)
        if previous is not None:
            os.environ[variable] = previous
        _set_handlers(
            {number: _stop if handler in _PYTHON_HANDLERS else handler for number, handler in handlers.items()}
        )
    if received:
        signal.raise_signal(received[0])


def _stop(*_: object) -> None:
    """Raise KeyboardInterrupt, as the handler of signals whose default would end this process but not its ranks."""
    raise KeyboardInterrupt


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait_until_done(
    pids: dict[int, int], readers: list[ProgressLogReader], reporter: Reporter, task: LaunchTask
) -> None:
    """Relay rank 0's progress until all ranks have ended with success. Raises `_RankFailed` and `_TimeIsUp`."""
    limit_s, phase, begin = task.limit_of(None) or 0.0, None, time.monotonic()
    while True:
        readers[0].relay(reporter)
        current = (readers[0].last("start") or {}).get("start")
        if current != phase and task.limit_of(current) is not None:
            limit_s, begin = task.limit_of(current) or 0.0, time.monotonic()
        phase = current
        statuses = _statuses(pids)
        if any(statuses.values()):
            time.sleep(_SETTLE_S)
            raise _RankFailed(_statuses(pids))
        if len(statuses) == len(pids):
            readers[0].relay(reporter)
            _refuse_unfinished(statuses, readers)
            return
        if time.monotonic() > begin + limit_s:
            raise _TimeIsUp(limit_s)
        time.sleep(_POLL_S)


def _refuse_unfinished(statuses: dict[int, int], readers: list[ProgressLogReader]) -> None:
    """Raise `_RankFailed` for ranks that ended with exit code 0 before they were done, as user code may do."""
    for reader in readers[1:]:
        reader.read()
    unfinished = {rank: status for rank, status in statuses.items() if readers[rank].last("done") is None}
    if unfinished:
        raise _RankFailed(unfinished)


def _statuses(pids: dict[int, int]) -> dict[int, int]:
    """Return the exit codes of the ranks that have ended, negative for signals. The processes are not reaped."""
    statuses = {}
    for rank, pid in pids.items():
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if ended is not None:
            statuses[rank] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return statuses


def _explain(error: BaseException, readers: list[ProgressLogReader], scratch: Path, job: str) -> BaseException:
    """Return the error to raise to the user for ``error``, which ended the launch."""
    for reader in readers:
        reader.read()
    logs = f"; logs kept in {scratch}"
    if not isinstance(error, Exception):
        nothing = "; nothing was recorded" if job == "record" else ""
        return Interrupted(f"interrupted{_phase_text(readers)}{nothing}{logs}")
    if isinstance(error, _RankFailed):
        return _cause(error.statuses, readers, scratch)
    if isinstance(error, _TimeIsUp):
        return RecordError(f"{_laggard(readers)} when the time limit of {error.seconds:.0f} s was over{logs}")
    return error


def _phase_text(readers: list[ProgressLogReader]) -> str:
    entry = readers[0].last("start") if readers else None
    return f" during {entry['start']}" if entry else ""


def _cause(statuses: dict[int, int], readers: list[ProgressLogReader], scratch: Path) -> RingprofError:
    """Return the error of the rank whose failure caused the others.

    A rank killed by a signal comes first, then the rank with the earliest error of its own. A rank that only lost its
    peers fails a moment later, with an error of the communication library.
    """
    killed = [rank for rank, status in statuses.items() if status < 0]
    if killed:
        return signal_error(killed[0], -statuses[killed[0]], f"; log: {log_path(scratch, killed[0])}")
    errors = {rank: entry for rank in statuses if (entry := readers[rank].last("error"))}
    unexplained = [rank for rank in statuses if rank not in errors]
    if unexplained and all(is_consequence(entry["error"], entry["message"]) for entry in errors.values()):
        # All logged errors are consequences: the cause is a rank that ended without an error, whatever its exit code.
        rank = max(unexplained, key=lambda rank: statuses[rank] != 0)
        log = log_path(scratch, rank)
        return RecordError(f"rank {rank} ended with exit code {statuses[rank]} and said nothing; log: {log}")
    rank, entry = min(
        errors.items(), key=lambda item: (is_consequence(item[1]["error"], item[1]["message"]), item[1]["at"])
    )
    return rank_error(rank, entry["error"], entry["message"], f"; log: {log_path(scratch, rank)}")


def _laggard(readers: list[ProgressLogReader]) -> str:
    stops = {rank: entry for rank, reader in enumerate(readers) if (entry := reader.last("stopped"))}
    return slowest_rank({rank: (entry["stopped"], entry["hops"]) for rank, entry in stops.items()}, len(readers))
