"""End of a run whose ranks torchrun or srun started: who reports, and who ends whom."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

from ringprof.common.scratch import has_token, remove_all
from ringprof.errors import RecordError, RingprofError
from ringprof.ranks.heartbeat import END, Heartbeat, HeartbeatServer
from ringprof.ranks.progress import PositionReporter
from ringprof.ranks.rank_errors import FailedRun, RankOutcome, failed_outcome, stopped_outcome, write_log
from ringprof.ranks.watchdog import TIME_LIMIT
from ringprof.recording.recording import RankTask

GRACE_S = 3.0
"""Time that a rank has to end by itself before it is killed."""
_SETTLE_S = 0.5
"""Time from the first failure to the choice of its cause, which may arrive after its effects."""
OUTCOMES_S = 2.0
"""Time in which the other ranks may send their outcomes once they are told to end."""
BACKUP_S = 15.0
"""Time after the time limit at which ranks other than 0 end by themselves, if rank 0 has not ended the run."""


class ReportedElsewhere(RecordError):
    """This rank's run has failed, and another rank reports why."""


@dataclass
class _RankShutdown:
    """One rank's part in the shutdown of a run."""

    task: RankTask
    rank: int
    hosts: list[str]
    """Host of each rank."""
    position: PositionReporter
    siblings: Mapping[int, int]
    """Process ids of this host's other ranks, by rank."""

    def discard_run(self, failed: FailedRun) -> RingprofError:
        """Remove the half-written run and write the log; return the error, which names the log."""
        self.task.discard()
        error = failed.cause()
        if not isinstance(error, RecordError):
            # All ranks refused the request for the same reason: a log would add nothing.
            return error
        log = write_log(failed.log(self.task.request.command), Path(self.task.request.output), self.task.staging.name)
        return type(error)(f"{error}; log: {log}") if log else error


@dataclass
class FirstRankShutdown(_RankShutdown):
    """Rank 0's part in the shutdown of a run."""

    def __post_init__(self) -> None:
        self._own_outcome: RankOutcome | None = None
        self._ending = threading.Lock()
        self._sealed = False
        self.server = HeartbeatServer(len(self.hosts), self._on_trouble, one_host=len(set(self.hosts)) == 1)

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
        self._own_outcome = self._own_outcome or failed_outcome(self.position, error)
        if not self._sealed and not self._ending.acquire(blocking=False):
            _wait_for_exit()
        return self._end_run()

    def stopped(self, reason: str, code: int) -> None:
        """End the run and this process, on the watchdog's call."""
        self._own_outcome = self._own_outcome or stopped_outcome(self.position, reason)
        if self._ending.acquire(timeout=OUTCOMES_S + _SETTLE_S):
            code = _print_error(self._end_run())
        _exit_now(code)

    def _on_trouble(self) -> None:
        """End the run and this process, on the heartbeat server's call after another rank's failure."""
        if self._ending.acquire(blocking=False):
            self._own_outcome = self._own_outcome or stopped_outcome(self.position, "")
            _exit_now(_print_error(self._end_run()))

    def _end_run(self) -> RingprofError:
        """End all other ranks, collect their outcomes, discard the run; return the error with the cause."""
        time.sleep(_SETTLE_S)
        disconnected = list(self.server.disconnected)
        self.server.end_all_ranks(OUTCOMES_S)
        self.server.close()
        outcomes = {**({0: self._own_outcome} if self._own_outcome else {}), **self.server.outcomes}
        error = self.discard_run(FailedRun(self.hosts, outcomes, disconnected, self.task.time_limit))
        # The ranks were told to end ``OUTCOMES_S`` ago, which counts towards their grace period.
        end_local_ranks(self.siblings, GRACE_S - OUTCOMES_S)
        return error


@dataclass
class OtherRankShutdown(_RankShutdown):
    """The part of a rank other than 0 in the shutdown of a run."""

    heartbeat: Heartbeat = field(init=False)

    def __post_init__(self) -> None:
        self._outcome_sent = False
        self._reporting = threading.Lock()

    def connect(self, address: str, port: int, token: str) -> None:
        """Connect to rank 0's host at ``address``. Raises OSError where rank 0 cannot be reached."""
        self.heartbeat = Heartbeat(address, port, token, self.rank, self._on_end)

    def done(self) -> None:
        """Send the outcome ``done`` to rank 0, and ignore what rank 0 sends from here on."""
        self.heartbeat.close()
        self.heartbeat.send(RankOutcome(kind="done"))

    def failed(self, error: BaseException) -> RingprofError:
        """Send the error to rank 0, which reports it; return an error that needs no report here."""
        outcome = failed_outcome(self.position, error)
        self._send_outcome(outcome)
        # Normally the process ends during this sleep: rank 0 ends it, or rank 0's disconnect does.
        time.sleep(GRACE_S)
        return ReportedElsewhere(outcome.message)

    def stopped(self, reason: str, code: int) -> None:
        """End this process, on the watchdog's call, after sending the outcome to rank 0.

        Where rank 0 cannot be reached, or has let the time limit pass, the backup reporter reports the cause.
        """
        if reason == TIME_LIMIT:
            self._report_for_rank_0(FailedRun(self.hosts, limit_s=self.task.time_limit, overdue=True))
        elif not self._send_outcome(stopped_outcome(self.position, reason)):
            self._report_for_rank_0()
        _exit_now(code)

    def _send_outcome(self, outcome: RankOutcome) -> bool:
        self._outcome_sent = True
        return self.heartbeat.send(outcome)

    def _on_end(self, message: bytes) -> NoReturn:
        """End this process on rank 0's message, or after rank 0 has disconnected (an empty message)."""
        if message != END:
            self._report_for_rank_0()
        elif not self._outcome_sent:
            self._send_outcome(stopped_outcome(self.position, ""))
        if self._is_first_of_host():
            # Rank 0 does so on its own host.
            end_local_ranks(self.siblings)
        _exit_now(RecordError.exit_code)

    def _is_first_of_host(self) -> bool:
        return self.rank == self.hosts.index(self.hosts[self.rank])

    def _report_for_rank_0(self, failed: FailedRun | None = None) -> None:
        """Discard the run and print its error in place of rank 0, if this rank is the one to do so; end rank 0's host.

        ``failed`` is by default a run whose rank 0 has disconnected.
        """
        host = self.hosts[self.rank]
        if self.rank != 1 and not (self._is_first_of_host() and host not in self.hosts[:2]):
            return
        failed = failed or FailedRun(self.hosts, {self.rank: stopped_outcome(self.position, "")}, [0])
        if not self._reporting.acquire(blocking=False):
            _wait_for_exit()
        sees_folder = has_token(self.task.staging.path, self.task.staging.token)
        _print_error(self.discard_run(failed) if sees_folder else failed.cause())
        if host == self.hosts[0]:
            end_local_ranks(self.siblings)


def _print_error(error: RingprofError) -> int:
    """Print an error as the command line does; return its exit code."""
    sys.stderr.write(f"ringprof: {error}\n")
    sys.stderr.flush()
    return error.exit_code


def _wait_for_exit() -> NoReturn:
    """Wait while another thread ends this process."""
    time.sleep(60)
    _exit_now(RecordError.exit_code)


def _exit_now(code: int) -> NoReturn:
    """Remove the scratch folders and end this process at once, whatever its other threads are doing."""
    remove_all()
    os._exit(code)


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
