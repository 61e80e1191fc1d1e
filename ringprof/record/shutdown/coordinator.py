"""Shutdown of a failed run under an external launcher: all ranks end within seconds, and one rank reports the cause.

Rank 0 receives the outcome of every rank that fails, is stopped or disconnects. It waits briefly, since the cause may
arrive after its effects, ends all ranks and reports the cause. If rank 0 itself has disconnected, rank 1 reports, and
so does the first rank of every host that holds neither rank 0 nor rank 1.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from ringprof.common.scratch import has_token, remove_all
from ringprof.errors import RecordError, RingprofError
from ringprof.record.progress import PositionReporter
from ringprof.record.request import RankTask
from ringprof.record.run_folder import discard
from ringprof.record.shutdown.heartbeat import END, Heartbeat, HeartbeatServer, RankOutcome
from ringprof.record.shutdown.rank_errors import (
    FailedRun,
    error_kind,
    error_line,
    is_consequence,
    traceback_text,
    write_log,
)
from ringprof.record.shutdown.watchdog import TIME_LIMIT

_SETTLE_S = 0.5
"""Time from the first failure to the choice of its cause, which may arrive after its effects."""
OUTCOMES_S = 2.0
"""Time in which the other ranks may send their outcomes once they are told to end."""
BACKUP_S = 15.0
"""Time after the time limit at which ranks other than 0 end by themselves, if rank 0 has not ended the run."""


class ReportedElsewhere(RecordError):
    """This rank's run has failed, and another rank reports why."""


@dataclass
class RankContext:
    """One rank of a run, with everything that its shutdown needs."""

    task: RankTask
    rank: int
    hosts: Sequence[str]
    position: PositionReporter
    hops: Callable[[], int | None]
    siblings: Mapping[int, int]
    """Process ids of this host's other ranks, by rank."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(set(self.hosts)) == 1

    def stopped(self, reason: str) -> RankOutcome:
        """Return the outcome of this rank when it was stopped; ``reason`` is empty where rank 0 stopped it."""
        return RankOutcome(kind="stopped", where=self.position.where(), hops=self.hops(), reason=reason)

    def failed(self, error: BaseException) -> RankOutcome:
        """Return the outcome of this rank when it failed with ``error``."""
        kind, message = error_kind(error), error_line(error)
        return RankOutcome(
            kind="failed", where=self.position.where(), hops=self.hops(), reason=kind, message=message,
            effect=is_consequence(kind, message), detail=traceback_text(error),
        )  # fmt: skip


class FirstRankShutdown:
    """Rank 0's part in the shutdown of a run."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._own_outcome: RankOutcome | None = None
        self._ending = threading.Lock()
        self._sealed = False
        self.server = HeartbeatServer(len(context.hosts), self._on_trouble, one_host=context.one_host)

    def seal(self) -> None:
        """Mark the recording as complete, so that later failures of other ranks are ignored.

        Does not return where another thread is already ending the run.
        """
        if not self._ending.acquire(blocking=False):
            _wait_for_exit()
        self._sealed = True
        self.server.stop_reporting()

    def done(self) -> None:
        """Announce to all ranks that the run is written."""
        self.server.announce_complete()

    def failed(self, error: BaseException) -> RingprofError:
        """End the run after an error on this rank; return the error to raise for the whole run."""
        self._own_outcome = self._own_outcome or self._context.failed(error)
        if not self._sealed and not self._ending.acquire(blocking=False):
            _wait_for_exit()
        return self._end_run()

    def stopped(self, reason: str, code: int) -> None:
        """End the run and this process, on the watchdog's call."""
        self._own_outcome = self._own_outcome or self._context.stopped(reason)
        if self._ending.acquire(timeout=OUTCOMES_S + _SETTLE_S):
            self._report_and_exit(self._end_run())
        _exit_now(code)

    def _on_trouble(self) -> None:
        """End the run and this process, on the heartbeat server's call after another rank's failure."""
        if self._ending.acquire(blocking=False):
            self._own_outcome = self._own_outcome or self._context.stopped("")
            self._report_and_exit(self._end_run())

    def _end_run(self) -> RingprofError:
        """End all other ranks, collect their outcomes, discard the run; return the error with the cause."""
        time.sleep(_SETTLE_S)
        disconnected = list(self.server.disconnected)
        self.server.end_all_ranks(OUTCOMES_S)
        self.server.close()
        outcomes = {**({0: self._own_outcome} if self._own_outcome else {}), **self.server.outcomes}
        failed = FailedRun(self._context.hosts, outcomes, disconnected, self._context.task.time_limit)
        error = _discard_run(self._context.task, failed)
        # The ranks were told to end ``OUTCOMES_S`` ago, which counts towards their grace period.
        end_local_ranks(self._context.siblings, GRACE_S - OUTCOMES_S)
        return error

    def _report_and_exit(self, error: RingprofError) -> NoReturn:
        _print_error(error)
        _exit_now(error.exit_code)


class OtherRankShutdown:
    """The part of a rank other than 0 in the shutdown of a run."""

    def __init__(self, context: RankContext, address: str, port: int, token: str) -> None:
        """Connect to rank 0's host at ``address``. Raises OSError where rank 0 cannot be reached."""
        self._context = context
        self._outcome_sent = False
        self._reporting = threading.Lock()
        self.heartbeat = Heartbeat(address, port, token, context.rank, self._on_end)

    def done(self) -> None:
        """Send the outcome ``done`` to rank 0, and ignore what rank 0 sends from here on."""
        self.heartbeat.close()
        self.heartbeat.send(RankOutcome(kind="done"))

    def failed(self, error: BaseException) -> RingprofError:
        """Send the error to rank 0, which reports it; return an error that needs no report here."""
        outcome = self._context.failed(error)
        self._send_outcome(outcome)
        # Normally the process ends during this sleep: rank 0 ends it, or rank 0's disconnect does.
        time.sleep(GRACE_S)
        return ReportedElsewhere(outcome.message)

    def stopped(self, reason: str, code: int) -> None:
        """End this process, on the watchdog's call, after sending the outcome to rank 0.

        Where rank 0 cannot be reached, or has let the time limit pass, the backup reporter reports the cause.
        """
        if reason == TIME_LIMIT:
            if self._is_backup_reporter():
                limit_s = self._context.task.time_limit
                self._report_for_rank_0(FailedRun(self._context.hosts, limit_s=limit_s, overdue=True))
        elif not self._send_outcome(self._context.stopped(reason)) and self._is_backup_reporter():
            self._report_for_rank_0(self._rank_0_disconnected())
        _exit_now(code)

    def _send_outcome(self, outcome: RankOutcome) -> bool:
        self._outcome_sent = True
        return self.heartbeat.send(outcome)

    def _on_end(self, message: bytes) -> NoReturn:
        """End this process on rank 0's message, or after rank 0 has disconnected (an empty message)."""
        if message == END:
            if not self._outcome_sent:
                self._send_outcome(self._context.stopped(""))
        elif self._is_backup_reporter():
            self._report_for_rank_0(self._rank_0_disconnected())
        context = self._context
        if context.rank == context.hosts.index(context.hosts[context.rank]):
            # The first rank of a host ends the host's other ranks; rank 0 does so on its own host.
            end_local_ranks(context.siblings)
        _exit_now(RecordError.exit_code)

    def _is_backup_reporter(self) -> bool:
        hosts, rank = self._context.hosts, self._context.rank
        return rank == 1 or (rank == hosts.index(hosts[rank]) and hosts[rank] not in hosts[:2])

    def _rank_0_disconnected(self) -> FailedRun:
        return FailedRun(self._context.hosts, {self._context.rank: self._context.stopped("")}, [0])

    def _report_for_rank_0(self, failed: FailedRun) -> None:
        """Discard the run and print its error in place of rank 0; end this host's ranks if it is rank 0's."""
        if not self._reporting.acquire(blocking=False):
            _wait_for_exit()
        context = self._context
        if has_token(Path(context.task.staging), context.task.token):
            _print_error(_discard_run(context.task, failed))
        else:
            _print_error(failed.cause())
        if context.hosts[context.rank] == context.hosts[0]:
            end_local_ranks(context.siblings)


def _discard_run(task: RankTask, failed: FailedRun) -> RingprofError:
    """Remove the half-written run and write the log; return the error, which names the log."""
    discard(Path(task.staging))
    error = failed.cause()
    if not isinstance(error, RecordError):
        # All ranks refused the request for the same reason: a log would add nothing.
        return error
    log = write_log(failed.log(task.request.command), Path(task.request.output), task.name)
    return type(error)(f"{error}; log: {log}") if log else error


def _print_error(error: object) -> None:
    sys.stderr.write(f"ringprof: {error}\n")
    sys.stderr.flush()


def _wait_for_exit() -> NoReturn:
    """Wait while another thread ends this process."""
    time.sleep(60)
    _exit_now(RecordError.exit_code)


def _exit_now(code: int) -> NoReturn:
    """Remove the scratch folders and end this process at once, whatever its other threads are doing."""
    remove_all()
    os._exit(code)


GRACE_S = 3.0
"""Time that a rank has to end by itself before it is killed."""
_RANK = ("RANK", "SLURM_PROCID")
_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")


def end_local_ranks(pids: Mapping[int, int], seconds: float = GRACE_S) -> list[int]:
    """Wait ``seconds`` for these processes to end, then kill the remaining ones; return the ranks that were killed.

    ``pids`` maps ranks to process ids. A launcher would give a stuck process half a minute. A process counts as a rank
    only where its environment variables say so: in a separate container, another process may have the same id.
    """
    deadline = time.monotonic() + seconds
    remaining = dict(pids)
    while True:
        remaining = {rank: pid for rank, pid in remaining.items() if _is_rank(pid, rank)}
        if not remaining or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for pid in remaining.values():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return list(remaining)


def _is_rank(pid: int, rank: int) -> bool:
    """Return whether the process is that rank of this very run, and still alive."""
    try:
        process = psutil.Process(pid)
        variables, dead = process.environ(), process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    # psutil reads both environments as they were at the start of the process; later changes do not show.
    own_variables = psutil.Process().environ()
    same_run = all(variables.get(name) == own_variables.get(name) for name in _RUN)
    return same_run and not dead and str(rank) in {variables.get(name) for name in _RANK}
