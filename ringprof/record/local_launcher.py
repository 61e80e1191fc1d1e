"""Starting ranks of our own, and ending all of them within seconds when one fails or the user says stop.

Ranks are started by torch's elastic launcher (its process layer, without agent and rendezvous service: there is one
host, nothing is restarted, and the agent would give a stuck rank half a minute). The rendezvous store lives here in the
parent, on a port that the system chose, so that two runs cannot meet.
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

from ringprof.compile_cache import VARIABLE as COMPILE_CACHE
from ringprof.compile_cache import choose_compile_cache
from ringprof.errors import Interrupted, RecordError, RingprofError
from ringprof.process_pool import cpu_count, spawn_command
from ringprof.record.progress import ProgressLogReader, Reporter
from ringprof.record.request import to_json
from ringprof.record.shutdown.rank_errors import is_consequence, laggard, rank_error, signal_error
from ringprof.scratch import keep, remove

_POLL_S = 0.05
_SETTLE_S = 0.3
"""After a first rank has failed: others that failed by themselves show up, and the cause is told from the effects."""
END_S = 2
"""What a rank gets between the request to end and SIGKILL."""
Result = TypeVar("Result")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PYTHONS_OWN = (signal.SIG_DFL, signal.default_int_handler)


def log_path(scratch: Path, rank: int) -> Path:
    """What a rank printed."""
    return scratch / f"rank{rank}.log"


def progress_log_path(scratch: Path, rank: int) -> Path:
    """What a rank reported."""
    return scratch / f"rank{rank}.jsonl"


class RanksTask(Protocol):
    """What ranks of our own are told, as JSON: `ringprof.record.request.Task`, and its like."""

    @property
    def request(self) -> Any:
        """With ``world`` and ``device``, which must be decided."""

    @property
    def scratch(self) -> str | None:
        """Where they keep their logs."""

    def limit_of(self, phase: str | None) -> float | None:
        """Seconds for a phase of rank 0's, or with None for what comes before the first; None: as the one before."""


def launch(task: RanksTask, reporter: Reporter, what: str, result: Callable[[], Result]) -> Result:
    """Run a task on ranks of our own until all have ended well; returns what ``result`` then finds.

    ``what`` is ``record`` or ``check``, as `ringprof.spawn` takes it. Raises `RecordError`, `VerificationError` or
    another error that a rank had; `Interrupted` when the user said stop. Whatever happens, no rank is left behind; the
    scratch folder stays only after a failure.
    """
    assert task.scratch is not None and task.request.world is not None and isinstance(task, msgspec.Struct)
    scratch = Path(task.scratch)
    (scratch / "task.json").write_bytes(to_json(task))
    with _signals_restored(), _store() as port:
        context = None
        readers = [ProgressLogReader(progress_log_path(scratch, rank)) for rank in range(task.request.world)]
        try:
            with _signals_put_off():
                context = _start(task.request, scratch, port, what)
            _until_done(context.pids(), readers, reporter, task)
        except BaseException as error:
            # From here on the ranks are being ended: a second Ctrl-C must not stop that.
            _set_handlers(dict.fromkeys(_SIGNALS, signal.SIG_IGN))
            if context is not None:
                # Asked first, so that the ranks can say where they were, then killed.
                context.close(signal.SIGTERM, END_S)
            explained = _explained(error, readers, scratch, what)
            # What is refused says all itself, and names no logs.
            refused = isinstance(explained, RingprofError) and not isinstance(explained, RecordError)
            (remove if refused else keep)(scratch)
            raise explained from None
        context.close()
    found = result()
    remove(scratch)
    return found


class _RankFailed(Exception):
    """At least one rank has ended badly; which one and why is found out after all have ended."""

    def __init__(self, statuses: dict[int, int]) -> None:
        super().__init__()
        self.statuses = statuses


class _TimeIsUp(Exception):
    """A time limit has passed."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


def _start(request: Any, scratch: Path, port: int, what: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    # The launcher reports on its own; here it is part of a program that does.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    world = request.world or 1
    command = spawn_command(what, str(scratch / "task.json"), str(os.getpid()))
    try:
        return start_processes(
            name="ringprof",
            entrypoint=command[0],
            args={rank: tuple(command[1:]) for rank in range(world)},
            envs={rank: _environment(request, rank, world, port, scratch) for rank in range(world)},
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        )
    except (OSError, RuntimeError) as error:
        # The launcher does not know of those that it has started.
        for process in psutil.Process().children():
            with suppress(psutil.Error):
                if command[-2] in process.cmdline():
                    process.kill()
                    process.wait()
        raise _no_more(error) from None


def _no_more(error: Exception) -> RecordError:
    why = getattr(error, "strerror", None) or error
    return RecordError(f"not all ranks can be started here ({why}): see ulimit -u and -n, or use a smaller --world")


def _environment(request: Any, rank: int, world: int, port: int, scratch: Path) -> dict[str, str]:
    """Return the environment variables of a rank that torch reads, and the threads that it may use."""
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
    """A store for the ranks' rendezvous, for this host alone; yields its port."""
    import torch.distributed

    untyped: Any = torch.distributed
    try:
        # A store that opens its port itself listens to all networks.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # Torch says at length on stderr what it cannot reach.
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        listener.accept()[0].close()
        store = untyped.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except OSError as error:
        why = error.strerror or error
        raise RecordError(f"ranks cannot meet on 127.0.0.1 ({why}): bring it up (ip link set lo up)") from None
    except RuntimeError as error:  # its thread cannot be started
        raise _no_more(error) from None
    yield port
    del store


@contextmanager
def _signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        _set_handlers(before)


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """While ranks are being started nobody could end them: what comes is heeded when all are there.

    The launcher sets no handlers of its own: they would raise in its midst, and undo what nohup has ignored.
    """
    variable, came = "TORCHELASTIC_SIGNALS_TO_HANDLE", list[int]()
    asked = os.environ.pop(variable, None)
    os.environ[variable] = ""
    heeded = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    _set_handlers(dict.fromkeys(heeded, lambda number, _: came.append(number)))
    try:
        yield
    finally:
        os.environ.pop(variable)
        if asked is not None:
            os.environ[variable] = asked
        _set_handlers({number: _stop if handler in _PYTHONS_OWN else handler for number, handler in heeded.items()})
    if came:
        signal.raise_signal(came[0])


def _stop(*_: object) -> None:
    """In place of Python's own handlers, most of which would leave the ranks behind."""
    raise KeyboardInterrupt


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _until_done(pids: dict[int, int], readers: list[ProgressLogReader], reporter: Reporter, task: RanksTask) -> None:
    limit_s, phase, begin = task.limit_of(None) or 0.0, None, time.monotonic()
    while True:
        readers[0].relay(reporter)
        entered = (readers[0].last("start") or {}).get("start")
        if entered != phase and task.limit_of(entered) is not None:
            limit_s, begin = task.limit_of(entered) or 0.0, time.monotonic()
        phase = entered
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
    """Raise `_RankFailed` for ranks that ended with exit code 0 in the midst of their work, as code of a user may."""
    for reader in readers[1:]:
        reader.read()
    unfinished = {rank: status for rank, status in statuses.items() if readers[rank].last("done") is None}
    if unfinished:
        raise _RankFailed(unfinished)


def _statuses(pids: dict[int, int]) -> dict[int, int]:
    """Exit codes of the ranks that have ended, negative for signals; looked at, not collected."""
    statuses = {}
    for rank, pid in pids.items():
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if ended is not None:
            statuses[rank] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return statuses


def _explained(error: BaseException, readers: list[ProgressLogReader], scratch: Path, what: str) -> BaseException:
    """The error to end with, in the user's words."""
    for reader in readers:
        reader.read()
    logs = f"; logs kept in {scratch}"
    if not isinstance(error, Exception):
        nothing = "; nothing was recorded" if what == "record" else ""
        return Interrupted(f"interrupted{_stood(readers)}{nothing}{logs}")
    if isinstance(error, _RankFailed):
        return _cause(error.statuses, readers, scratch)
    if isinstance(error, _TimeIsUp):
        return RecordError(f"{_laggard(readers)} when the time limit of {error.seconds:.0f} s was over{logs}")
    return error


def _stood(readers: list[ProgressLogReader]) -> str:
    entry = readers[0].last("start") if readers else None
    return f" during {entry['start']}" if entry else ""


def _cause(statuses: dict[int, int], readers: list[ProgressLogReader], scratch: Path) -> RingprofError:
    """The rank that failed first by itself: one killed, then one with an error of its own, earliest first.

    A rank that only lost its peers fails with an error of the communication library, a moment later.
    """
    killed = [rank for rank, status in statuses.items() if status < 0]
    if killed:
        return signal_error(killed[0], -statuses[killed[0]], f"; log: {log_path(scratch, killed[0])}")
    told = {rank: entry for rank in statuses if (entry := readers[rank].last("error"))}
    silent = [rank for rank in statuses if rank not in told]
    if silent and all(is_consequence(entry["error"], entry["message"]) for entry in told.values()):
        # Whatever its exit code, one that left without a word is what the others fail from.
        rank = max(silent, key=lambda rank: statuses[rank] != 0)
        log = log_path(scratch, rank)
        return RecordError(f"rank {rank} ended with exit code {statuses[rank]} and said nothing; log: {log}")
    rank, entry = min(
        told.items(), key=lambda item: (is_consequence(item[1]["error"], item[1]["message"]), item[1]["at"])
    )
    return rank_error(rank, entry["error"], entry["message"], f"; log: {log_path(scratch, rank)}")


def _laggard(readers: list[ProgressLogReader]) -> str:
    words = {rank: entry for rank, reader in enumerate(readers) if (entry := reader.last("stopped"))}
    return laggard({rank: (entry["stopped"], entry["hops"]) for rank, entry in words.items()}, len(readers))
