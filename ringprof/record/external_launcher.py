"""Recording as one rank of an external launcher: torchrun on one or many hosts, or srun. Loads torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from ringprof import errors
from ringprof.errors import RecordError, RingprofError
from ringprof.record import prepare
from ringprof.record.launcher import RankInfo
from ringprof.record.machine import RankHost, distinct_host_names, host_name, host_numbers
from ringprof.record.process_group import gather_bytes, world_group
from ringprof.record.progress import PositionReporter, Reporter, SilentReporter
from ringprof.record.recording import RankRecording, Reduce
from ringprof.record.request import RankTask, RecordRequest, from_json, to_json
from ringprof.record.resolve import resolve
from ringprof.record.run_folder import discard
from ringprof.record.shutdown.coordinator import (
    BACKUP_S,
    FirstRankShutdown,
    OtherRankShutdown,
    RankContext,
    ReportedElsewhere,
)
from ringprof.record.shutdown.heartbeat import LOOPBACK
from ringprof.record.shutdown.rank_errors import error_line
from ringprof.record.shutdown.watchdog import Watchdog
from ringprof.run import Run, read_run
from ringprof.strategies.transport.hosts import Hosts

SETUP_LIMIT_S = 600.0
"""Time limit in seconds of the process group's first collectives, before the estimate sets the run's own limit."""

Ready = tuple[RankRecording, FirstRankShutdown | OtherRankShutdown]
"""Recording of this rank, and its shutdown coordinator."""


class _TaskMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Message of rank 0 to the other ranks before anything is computed: the task, or the error that refuses it."""

    task: RankTask | None = None
    port: int = 0
    token: str = ""
    error: str = ""
    message: str = ""


def record_as_rank(
    request: RecordRequest, rank_info: RankInfo, reporter: Reporter, reduce: Reduce | None = None
) -> Run | None:
    """Record as the rank ``rank_info``; return the run on rank 0 and None on other ranks.

    Only rank 0 reports, estimates and writes ``run.json``. ``reduce`` writes the reduced form of this rank's trace.
    Raises an error of rank 0 before the recording (`UsageError` and others) on every rank.
    """
    if rank_info.rank != 0:
        reporter = SilentReporter()
    resolved = resolve(request, rank_info)
    # A rank that waits in a collective for missing ranks notices signals and its launcher's end only by the watchdog.
    watchdog = Watchdog(partial(_exit_before_run, rank_info), rank_info.parent)
    watchdog.start()
    try:
        with _connection_errors(rank_info), world_group(rank_info, resolved.device, SETUP_LIMIT_S) as device:
            hosts, pids = _gather_hosts(rank_info, device)
            ranks_per_host = Hosts(dict(enumerate(host_numbers(hosts)))).per_host(range(len(hosts)))
            rank_info = replace(rank_info, local_world_size=ranks_per_host)
            rank = _LaunchedRank(rank_info, hosts, pids, PositionReporter(reporter), device, reduce)
            run = rank.record(request, watchdog)
    finally:
        watchdog.stop()
    return None if run is None else read_run(request.output)


def _exit_before_run(rank_info: RankInfo, reason: str, code: int) -> None:
    """End this process. Rank 0 prints the reason, if it is an interrupt and not the launcher that ends all ranks."""
    if rank_info.rank == 0 and reason == signal.SIGINT.name:
        sys.stderr.write("ringprof: interrupted before all ranks were there; nothing was recorded\n")
    os._exit(code)


@contextmanager
def _connection_errors(rank_info: RankInfo) -> Iterator[None]:
    """Turn a RuntimeError of torch.distributed into a `RecordError`: another rank, perhaps rank 0, has gone.

    Before the heartbeats start, a lost rank shows only as such an error.
    """
    try:
        yield
    except RuntimeError as error:
        raise RecordError(f"rank {rank_info.rank} cannot reach the other ranks: {error_line(error)}") from error


def _gather_hosts(rank_info: RankInfo, device: torch.device) -> tuple[list[str], list[int]]:
    """Gather the host name and the process id of every rank."""
    messages = gather_bytes(to_json(RankHost(host_name(), rank_info.node, os.getpid())), device)
    ranks = [from_json(part, RankHost) for part in messages]
    return distinct_host_names(ranks), [rank.pid for rank in ranks]


class _LaunchedRank:
    """This rank of the launcher's, once the hosts and processes of all ranks are known."""

    def __init__(
        self, rank_info: RankInfo, hosts: list[str], pids: list[int], position: PositionReporter,
        device: torch.device, reduce: Reduce | None,
    ) -> None:  # fmt: skip
        self._rank_info, self._hosts, self._position, self._device = rank_info, hosts, position, device
        self._reduce = reduce
        own_host = hosts[rank_info.rank]
        self._siblings = {
            rank: pids[rank] for rank, host in enumerate(hosts) if host == own_host and rank != rank_info.rank
        }
        self._first = rank_info.rank == 0

    def record(self, request: RecordRequest, watchdog: Watchdog) -> Run | None:
        """Receive the task and record it, under a watchdog.

        The watchdog ends this rank when the launcher or another rank ends, or at the time limit.
        """
        recording, shutdown = self._share_task(request)
        patience_s = 0 if self._first else BACKUP_S
        watchdog.hand_over(shutdown.stopped, recording.task.time_limit, patience_s)
        try:
            run = recording.record(self._device)
            shutdown.done()
            return run
        except Exception as error:
            raise shutdown.failed(error) from error
        finally:
            watchdog.stop()

    def _share_task(self, request: RecordRequest) -> Ready:
        """Share rank 0's task with all ranks, and connect each rank's heartbeat. Raises rank 0's error on all ranks."""
        own_message, refusal, ready = _TaskMessage(), None, None
        if self._first:
            try:
                recording = self._create_recording(prepare(request, self._rank_info, self._position, None))
                shutdown = FirstRankShutdown(self._context(recording))
                recording.before_publish = shutdown.seal
                ready = recording, shutdown
                own_message = _TaskMessage(task=recording.task, port=shutdown.server.port, token=shutdown.server.token)
            except RingprofError as error:
                own_message, refusal = _TaskMessage(error=type(error).__name__, message=str(error)), error
        message = from_json(gather_bytes(to_json(own_message), self._device)[0], _TaskMessage)
        if refusal is not None:
            raise refusal
        if message.task is None:
            raise getattr(errors, message.error, RecordError)(message.message)
        return self._connect(message, message.task, ready)

    def _connect(self, message: _TaskMessage, task: RankTask, ready: Ready | None) -> Ready:
        """Connect this rank to rank 0's heartbeat server. Raises an error on all ranks if any rank cannot connect."""
        one_host = len(set(self._hosts)) == 1
        address, problem = LOOPBACK if one_host else os.environ.get("MASTER_ADDR", LOOPBACK), ""
        if ready is None:
            recording = self._create_recording(task)
            try:
                ready = recording, OtherRankShutdown(self._context(recording), address, message.port, message.token)
            except OSError as error:
                rank_name = f"rank {self._rank_info.rank} on host {self._hosts[self._rank_info.rank]}"
                problem = (
                    f"{rank_name} cannot reach rank 0 at {address}, port {message.port}: {error.strerror or error}"
                )
        problems = [os.fsdecode(part) for part in gather_bytes(os.fsencode(problem), self._device) if part]
        if not problems and ready is not None:
            return ready
        if self._first:
            discard(Path(task.staging))
        # On one host no firewall is between the ranks, so there is nothing to advise.
        advice = "" if one_host else "; check that the hosts accept each other's TCP connections on any port"
        raise (RecordError if self._first else ReportedElsewhere)(f"{problems[0]}{advice}")

    def _create_recording(self, task: RankTask) -> RankRecording:
        return RankRecording(task, self._rank_info, self._position, hosts=self._hosts, reduce=self._reduce)

    def _context(self, recording: RankRecording) -> RankContext:
        return RankContext(
            recording.task, self._rank_info.rank, self._hosts, self._position, recording.hops, self._siblings
        )
