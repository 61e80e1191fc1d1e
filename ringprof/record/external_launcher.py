"""Recording as one rank of somebody else's launcher: torchrun on one or many hosts, srun. Loads torch."""

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
from ringprof.record.launcher import RankPlace
from ringprof.record.machine import RankHost, distinct_host_names, host_name, host_numbers
from ringprof.record.process_group import gather_bytes, world_group
from ringprof.record.progress import PositionReporter, Reporter, SilentReporter
from ringprof.record.recording import RankRecording, Reduce
from ringprof.record.request import Request, Task, from_json, to_json
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

MEETING_LIMIT_S = 600.0
"""Until the plan has said how long the run may take."""

Ready = tuple[RankRecording, FirstRankShutdown | OtherRankShutdown]
"""This rank's recording, and how it ends."""


class _Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others before anything is computed: the task, or why there is none."""

    task: Task | None = None
    port: int = 0
    token: str = ""
    error: str = ""
    message: str = ""


def record_as_rank(request: Request, place: RankPlace, reporter: Reporter, reduce: Reduce | None = None) -> Run | None:
    """Record as rank ``place``; only rank 0 reports, plans and writes ``run.json``. ``reduce``: the rank's own trace.

    Raises on every rank what rank 0 refuses.
    """
    if place.rank != 0:
        reporter = SilentReporter()
    resolved = resolve(request, place)
    # Ranks that wait for others that never come hear of signals and of their launcher's end through it alone.
    watchdog = Watchdog(partial(_leave_before_the_run, place), place.parent)
    watchdog.start()
    try:
        with _lost_before_the_run(place), world_group(place, resolved.device, MEETING_LIMIT_S) as device:
            hosts, pids = _meet(place, device)
            together = Hosts(dict(enumerate(host_numbers(hosts)))).per_host(range(len(hosts)))
            place = replace(place, local_world_size=together)
            rank = _LaunchedRank(place, hosts, pids, PositionReporter(reporter), device, reduce)
            run = rank.record(request, watchdog)
    finally:
        watchdog.stop()
    return None if run is None else read_run(request.output)


def _leave_before_the_run(place: RankPlace, reason: str, code: int) -> None:
    """End this process. Rank 0 says why, unless it is the launcher that ends all."""
    if place.rank == 0 and reason == signal.SIGINT.name:
        sys.stderr.write("ringprof: interrupted before all ranks were there; nothing was recorded\n")
    os._exit(code)


@contextmanager
def _lost_before_the_run(place: RankPlace) -> Iterator[None]:
    """A rank that is gone before there is a lifeline shows as an error of torch.distributed, and rank 0 may be it."""
    try:
        yield
    except RuntimeError as error:
        raise RecordError(f"rank {place.rank} cannot reach the other ranks: {error_line(error)}") from error


def _meet(place: RankPlace, device: torch.device) -> tuple[list[str], list[int]]:
    """The host of every rank, and its process there."""
    said = gather_bytes(to_json(RankHost(host_name(), place.node, os.getpid())), device)
    ranks = [from_json(part, RankHost) for part in said]
    return distinct_host_names(ranks), [rank.pid for rank in ranks]


class _LaunchedRank:
    """This rank, once all know where each other is."""

    def __init__(
        self, place: RankPlace, hosts: list[str], pids: list[int], position: PositionReporter,
        device: torch.device, reduce: Reduce | None,
    ) -> None:  # fmt: skip
        self._place, self._hosts, self._position, self._device = place, hosts, position, device
        self._reduce = reduce
        here = hosts[place.rank]
        self._siblings = {rank: pids[rank] for rank, host in enumerate(hosts) if host == here and rank != place.rank}
        self._first = place.rank == 0

    def record(self, request: Request, watchdog: Watchdog) -> Run | None:
        """Agree, and record under a watchdog that ends this rank when the launcher, another rank or time says so."""
        rank, ending = self._agree(request)
        patience_s = 0 if self._first else BACKUP_S
        watchdog.hand_over(ending.stopped, rank.task.time_limit, patience_s)
        try:
            run = rank.record(self._device)
            ending.done()
            return run
        except Exception as error:
            raise ending.failed(error) from error
        finally:
            watchdog.stop()

    def _agree(self, request: Request) -> Ready:
        """The task as rank 0 sees it, and each rank's line to rank 0. Raises on all ranks what rank 0 refuses."""
        agreement, refused, made = _Agreement(), None, None
        if self._first:
            try:
                rank = self._rank(prepare(request, self._place, self._position, None))
                ending = FirstRankShutdown(self._context(rank))
                rank.seal = ending.seal
                made = rank, ending
                agreement = _Agreement(task=rank.task, port=ending.server.port, token=ending.server.token)
            except RingprofError as error:
                agreement, refused = _Agreement(error=type(error).__name__, message=str(error)), error
        said = from_json(gather_bytes(to_json(agreement), self._device)[0], _Agreement)
        if refused is not None:
            raise refused
        if said.task is None:
            raise getattr(errors, said.error, RecordError)(said.message)
        return self._linked(said, said.task, made)

    def _linked(self, said: _Agreement, task: Task, made: Ready | None) -> Ready:
        one_host = len(set(self._hosts)) == 1
        address, problem = LOOPBACK if one_host else os.environ.get("MASTER_ADDR", LOOPBACK), ""
        if made is None:
            rank = self._rank(task)
            try:
                made = rank, OtherRankShutdown(self._context(rank), address, said.port, said.token)
            except OSError as error:
                here = f"rank {self._place.rank} on host {self._hosts[self._place.rank]}"
                problem = f"{here} cannot reach rank 0 at {address}, port {said.port}: {error.strerror or error}"
        problems = [os.fsdecode(part) for part in gather_bytes(os.fsencode(problem), self._device) if part]
        if not problems and made is not None:
            return made
        if self._first:
            discard(Path(task.staging))
        # On one host nothing stands between the ranks that the user could open.
        advice = "" if one_host else "; check that the hosts accept each other's TCP connections on any port"
        raise (RecordError if self._first else ReportedElsewhere)(f"{problems[0]}{advice}")

    def _rank(self, task: Task) -> RankRecording:
        return RankRecording(task, self._place, self._position, hosts=self._hosts, reduce=self._reduce)

    def _context(self, rank: RankRecording) -> RankContext:
        return RankContext(rank.task, self._place.rank, self._hosts, self._position, rank.hops, self._siblings)
