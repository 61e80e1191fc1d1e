"""Launcher whose rank this process is, and recording as that rank: torchrun on one or many hosts, or srun. Loads torch.

If the run fails, all ranks end within seconds and one rank reports the cause. Rank 0 receives the outcome of every rank
that fails, is stopped or disconnects. It waits briefly, since the cause may arrive after its effects, ends all ranks
and reports the cause. If rank 0 itself has disconnected, rank 1 reports, and so does the first rank of every host that
holds neither rank 0 nor rank 1.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil
import torch

from ringprof import errors
from ringprof.common.scratch import has_token, remove_all
from ringprof.errors import RecordError, RingprofError
from ringprof.record.launcher import Job, RankInfo, Result
from ringprof.record.machine import RankHost, distinct_host_names, host_name, host_numbers
from ringprof.record.process_group import gather_bytes, world_group
from ringprof.record.progress import PositionReporter, Reporter, SilentReporter
from ringprof.record.recording import RankRecording, Reduce
from ringprof.record.request import RankTask, RecordRequest, from_json, to_json
from ringprof.record.resolve import resolve
from ringprof.record.shutdown.heartbeat import END, LOOPBACK, Heartbeat, HeartbeatServer
from ringprof.record.shutdown.rank_errors import (
    FailedRun,
    RankOutcome,
    error_line,
    failed_outcome,
    stopped_outcome,
    write_log,
)
from ringprof.record.shutdown.watchdog import INTERRUPT, TIME_LIMIT, Watchdog
from ringprof.run import Run, read_run
from ringprof.strategies.transport.hosts import Hosts

SETUP_LIMIT_S = 600.0
"""Time limit in seconds of the process group's first collectives, before the estimate sets the run's own limit."""
GRACE_S = 3.0
"""Time that a rank has to end by itself before it is killed."""
Prepare = Callable[[Reporter, RankInfo], RankTask]
"""Resolves and estimates a recording on rank 0; raises a `RingprofError` that refuses it."""
_SETTLE_S = 0.5
"""Time from the first failure to the choice of its cause, which may arrive after its effects."""
OUTCOMES_S = 2.0
"""Time in which the other ranks may send their outcomes once they are told to end."""
BACKUP_S = 15.0
"""Time after the time limit at which ranks other than 0 end by themselves, if rank 0 has not ended the run."""


class ReportedElsewhere(RecordError):
    """This rank's run has failed, and another rank reports why."""


class _TaskMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Message of rank 0 to the other ranks before anything is computed: the task, or the error that refuses it."""

    task: RankTask | None = None
    port: int = 0
    token: str = ""
    error: str = ""
    message: str = ""


class ExternalLauncher:
    """Launcher that has started this process as one rank; rank 0 reports."""

    def __init__(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info

    def run(self, job: Job[Result], reporter: Reporter) -> Result | None:
        """Run the job as this rank."""
        return job.run_as_rank(self._rank_info, reporter if self._rank_info.rank == 0 else SilentReporter())


def record_as_rank(
    request: RecordRequest, prepare: Prepare, reduce: Reduce | None, rank_info: RankInfo, reporter: Reporter
) -> Run | None:
    """Record as the rank ``rank_info``; return the run on rank 0 and None on other ranks.

    Only rank 0 calls ``prepare``, which estimates, and writes ``run.json``. ``reduce`` writes the reduced form of this
    rank's trace. Raises an error of rank 0 before the recording (`UsageError` and
    others) on every rank.
    """

    def exit_before_run(reason: str, code: int) -> None:
        # Rank 0 reports an interrupt, not a launcher that ends all ranks.
        if rank_info.rank == 0 and reason == INTERRUPT:
            sys.stderr.write("ringprof: interrupted before all ranks were there; nothing was recorded\n")
        os._exit(code)

    resolved = resolve(request, rank_info)
    # A rank that waits in a collective for missing ranks notices signals and its launcher's end only by the watchdog.
    watchdog = Watchdog(exit_before_run, rank_info.parent)
    watchdog.start()
    try:
        with world_group(rank_info, resolved.device, SETUP_LIMIT_S) as device:
            run = _record(prepare, reduce, rank_info, PositionReporter(reporter), device, watchdog)
    except RuntimeError as error:
        # Before the heartbeats start, a lost rank, perhaps rank 0, shows only as an error of torch.distributed.
        raise RecordError(f"rank {rank_info.rank} cannot reach the other ranks: {error_line(error)}") from error
    finally:
        watchdog.stop()
    return None if run is None else read_run(request.output)


def _record(
    prepare: Prepare, reduce: Reduce | None, rank_info: RankInfo, position: PositionReporter, device: torch.device,
    watchdog: Watchdog,
) -> Run | None:  # fmt: skip
    """Share the task with the other ranks and record it.

    The watchdog ends this rank when the launcher or another rank ends, or at the time limit.
    """
    own = RankHost(host_name(), rank_info.node, os.getpid())
    ranks = [from_json(part, RankHost) for part in gather_bytes(to_json(own), device)]
    hosts = distinct_host_names(ranks)
    rank, host = rank_info.rank, hosts[rank_info.rank]
    siblings = {number: ranks[number].pid for number, name in enumerate(hosts) if name == host and number != rank}
    ranks_per_host = Hosts(dict(enumerate(host_numbers(hosts)))).per_host(range(len(hosts)))
    rank_info = replace(rank_info, local_world_size=ranks_per_host)

    # Rank 0 sends its task, or the error that refuses it, to all ranks.
    own_message, refusal = _TaskMessage(), None
    shutdown: FirstRankShutdown | OtherRankShutdown | None = None
    if rank == 0:
        try:
            task = prepare(position, rank_info)
            shutdown = FirstRankShutdown(task, rank, hosts, position, siblings)
            own_message = _TaskMessage(task=task, port=shutdown.server.port, token=shutdown.server.token)
        except RingprofError as error:
            own_message, refusal = _TaskMessage(error=type(error).__name__, message=str(error)), error
    message = from_json(gather_bytes(to_json(own_message), device)[0], _TaskMessage)
    if refusal is not None:
        raise refusal
    if message.task is None:
        raise getattr(errors, message.error, RecordError)(message.message)

    # The other ranks connect to rank 0's heartbeat server; if one cannot, all ranks give up.
    one_host, problem = len(set(hosts)) == 1, ""
    address = LOOPBACK if one_host else os.environ.get("MASTER_ADDR", LOOPBACK)
    if rank != 0:
        shutdown = OtherRankShutdown(message.task, rank, hosts, position, siblings)
        try:
            shutdown.connect(address, message.port, message.token)
        except OSError as error:
            why = error.strerror or error
            problem = f"rank {rank} on host {host} cannot reach rank 0 at {address}, port {message.port}: {why}"
    problems = [os.fsdecode(part) for part in gather_bytes(os.fsencode(problem), device) if part]
    if problems or shutdown is None:
        if rank == 0:
            message.task.discard()
        # On one host no firewall is between the ranks, so there is nothing to advise.
        advice = "" if one_host else "; check that the hosts accept each other's TCP connections on any port"
        raise (RecordError if rank == 0 else ReportedElsewhere)(f"{problems[0]}{advice}")

    recording = RankRecording(message.task, rank_info, position, hosts=hosts, reduce=reduce)
    position.hops = recording.hops
    if isinstance(shutdown, FirstRankShutdown):
        recording.before_publish = shutdown.seal
    watchdog.hand_over(shutdown.stopped, message.task.time_limit, 0 if rank == 0 else BACKUP_S)
    try:
        run = recording.record(device)
        shutdown.done()
        return run
    except Exception as error:
        raise shutdown.failed(error) from error
    finally:
        watchdog.stop()


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
        log = write_log(failed.log(self.task.request.command), Path(self.task.request.output), self.task.name)
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
        sees_folder = has_token(Path(self.task.staging), self.task.token)
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
