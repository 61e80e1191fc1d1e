"""Shutting down a run on somebody else's launcher: all ranks within seconds of the first trouble, one of them says why.

Rank 0 hears of every trouble, waits a moment for the cause to show among its effects, tells all to end, and speaks. If
it is rank 0 that has gone, rank 1 speaks, and on every other host the host's first rank.
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

from ringprof.errors import RecordError, RingprofError
from ringprof.record.progress import PositionReporter
from ringprof.record.request import Task
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
from ringprof.scratch import has_token, remove_all

_SETTLE_S = 0.5
"""From the first trouble to the judgement: a cause may be heard of after its effects."""
OUTCOMES_S = 2.0
BACKUP_S = 15.0
"""After the time limit, which is rank 0's to see: then the others end by themselves."""


class ReportedElsewhere(RecordError):
    """This rank's run has failed, and another rank says why."""


@dataclass
class RankContext:
    """One rank of a run, as its ending needs to know it."""

    task: Task
    rank: int
    hosts: Sequence[str]
    position: PositionReporter
    hops: Callable[[], int | None]
    siblings: Mapping[int, int]
    """The processes of this host's other ranks, by rank."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(set(self.hosts)) == 1

    def stopped(self, reason: str) -> RankOutcome:
        return RankOutcome(kind="stopped", where=self.position.where(), hops=self.hops(), reason=reason)

    def failed(self, error: BaseException) -> RankOutcome:
        kind, message = error_kind(error), error_line(error)
        return RankOutcome(
            kind="failed", where=self.position.where(), hops=self.hops(), reason=kind, message=message,
            effect=is_consequence(kind, message), detail=traceback_text(error),
        )  # fmt: skip


class FirstRankShutdown:
    """Rank 0's ending of a run."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._own: RankOutcome | None = None
        self._concluding = threading.Lock()
        self._sealed = False
        self.server = HeartbeatServer(len(context.hosts), self._trouble, one_host=context.one_host)

    def seal(self) -> None:
        """Everything is here: what happens to the others from now on changes nothing."""
        if not self._concluding.acquire(blocking=False):
            _wait_for_the_end()
        self._sealed = True
        self.server.stop_reporting()

    def done(self) -> None:
        """The run is written."""
        self.server.announce_complete()

    def failed(self, error: BaseException) -> RingprofError:
        """The error to raise for the whole run, when this rank has one."""
        self._own = self._own or self._context.failed(error)
        if not self._sealed and not self._concluding.acquire(blocking=False):
            _wait_for_the_end()
        return self._conclude()

    def stopped(self, reason: str, code: int) -> None:
        """Called by the watchdog: ends the process."""
        self._own = self._own or self._context.stopped(reason)
        if self._concluding.acquire(timeout=OUTCOMES_S + _SETTLE_S):
            self._speak(self._conclude())
        _leave(code)

    def _trouble(self) -> None:
        if self._concluding.acquire(blocking=False):
            self._own = self._own or self._context.stopped("")
            self._speak(self._conclude())

    def _conclude(self) -> RingprofError:
        time.sleep(_SETTLE_S)
        gone = list(self.server.gone)
        self.server.tell_all_to_end(OUTCOMES_S)
        self.server.close()
        outcomes = {**({0: self._own} if self._own else {}), **self.server.outcomes}
        failed = FailedRun(self._context.hosts, outcomes, gone, self._context.task.time_limit)
        error = _closed(self._context.task, failed)
        # They have been told, and have had their time to answer.
        end_local_ranks(self._context.siblings, GRACE_S - OUTCOMES_S)
        return error

    def _speak(self, error: RingprofError) -> NoReturn:
        _print(error)
        _leave(error.exit_code)


class OtherRankShutdown:
    """Any other rank's ending of a run."""

    def __init__(self, context: RankContext, address: str, port: int, token: str) -> None:
        """``address`` is of rank 0's host. Raises OSError where rank 0 cannot be reached."""
        self._context = context
        self._has_told = False
        self._speaking = threading.Lock()
        self.lifeline = Heartbeat(address, port, token, context.rank, self._end)

    def done(self) -> None:
        """This rank has nothing more to do for the run."""
        self.lifeline.close()
        self.lifeline.tell(RankOutcome(kind="done"))

    def failed(self, error: BaseException) -> RingprofError:
        """Tell rank 0, and leave the speaking to it if it can."""
        outcome = self._context.failed(error)
        self._tell(outcome)
        # Rank 0 tells this rank to end, or is found to be gone: both end the process.
        time.sleep(GRACE_S)
        return ReportedElsewhere(outcome.message)

    def stopped(self, reason: str, code: int) -> None:
        """Called by the watchdog: ends the process. At the time limit, rank 0 has not seen to it."""
        if reason == TIME_LIMIT:
            if self._speaks():
                limit_s = self._context.task.time_limit
                self._speak_for_rank_0(FailedRun(self._context.hosts, limit_s=limit_s, overdue=True))
        elif not self._tell(self._context.stopped(reason)) and self._speaks():
            self._speak_for_rank_0(self._without_rank_0())
        _leave(code)

    def _tell(self, outcome: RankOutcome) -> bool:
        self._has_told = True
        return self.lifeline.tell(outcome)

    def _end(self, rank_0_said: bytes) -> NoReturn:
        if rank_0_said == END:
            if not self._has_told:
                self._tell(self._context.stopped(""))
        elif self._speaks():
            self._speak_for_rank_0(self._without_rank_0())
        context = self._context
        if context.rank == context.hosts.index(context.hosts[context.rank]):
            # The first rank of a host sees to it that the host's others end; rank 0 does on its own.
            end_local_ranks(context.siblings)
        _leave(RecordError.exit_code)

    def _speaks(self) -> bool:
        hosts, rank = self._context.hosts, self._context.rank
        return rank == 1 or (rank == hosts.index(hosts[rank]) and hosts[rank] not in hosts[:2])

    def _without_rank_0(self) -> FailedRun:
        return FailedRun(self._context.hosts, {self._context.rank: self._context.stopped("")}, [0])

    def _speak_for_rank_0(self, failed: FailedRun) -> None:
        if not self._speaking.acquire(blocking=False):
            _wait_for_the_end()
        context = self._context
        if has_token(Path(context.task.staging), context.task.token):
            _print(_closed(context.task, failed))
        else:
            _print(failed.cause())
        if context.hosts[context.rank] == context.hosts[0]:
            end_local_ranks(context.siblings)


def _closed(task: Task, failed: FailedRun) -> RingprofError:
    """Remove the half-written run, keep the log; the error says where."""
    discard(Path(task.staging))
    error = failed.cause()
    if not isinstance(error, RecordError):
        # Refused, by all ranks alike: there is nothing to look up.
        return error
    log = write_log(failed.log(task.request.command), Path(task.request.output), task.name)
    return type(error)(f"{error}; log: {log}") if log else error


def _print(text: object) -> None:
    sys.stderr.write(f"ringprof: {text}\n")
    sys.stderr.flush()


def _wait_for_the_end() -> NoReturn:
    """Another thread is ending this process."""
    time.sleep(60)
    _leave(RecordError.exit_code)


def _leave(code: int) -> NoReturn:
    """End this process at once, whatever its other threads are in."""
    remove_all()
    os._exit(code)


GRACE_S = 3.0
"""What a rank that was told to end gets."""
_RANK = ("RANK", "SLURM_PROCID")
_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")


def end_local_ranks(pids: Mapping[int, int], seconds: float = GRACE_S) -> list[int]:
    """Kill what is left of these ranks' processes after ``seconds``; returns the ranks that had to be killed.

    A launcher gives a stuck process half a minute. A process is taken for a rank only where its own variables say so:
    in a container of its own, another process may have its number.
    """
    deadline = time.monotonic() + seconds
    left = dict(pids)
    while True:
        left = {rank: pid for rank, pid in left.items() if _is_rank(pid, rank)}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for pid in left.values():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return list(left)


def _is_rank(pid: int, rank: int) -> bool:
    """Whether the process is that rank of this very run, and not yet dead."""
    try:
        process = psutil.Process(pid)
        variables, dead = process.environ(), process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    # As both were started: what a process adds later to its own variables does not show in another's.
    own = psutil.Process().environ()
    same_run = all(variables.get(name) == own.get(name) for name in _RUN)
    return same_run and not dead and str(rank) in {variables.get(name) for name in _RANK}
