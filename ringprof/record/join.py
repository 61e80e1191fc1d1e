"""Recording as one rank of somebody else's launcher: torchrun on one or many hosts, srun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ringprof import errors
from ringprof.errors import RecordError, RingprofError
from ringprof.record import prepare
from ringprof.record.hosts import Where, host_names, host_numbers, regular_per_host
from ringprof.record.placement import Placement
from ringprof.record.progress import Reporter, Silent, Standing
from ringprof.record.request import Request, Task
from ringprof.record.resolve import need_torch, resolve
from ringprof.run import Run, read_run

MEETING_LIMIT_S = 600.0
"""Until the plan has said how long the run may take."""


class _Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others before anything is computed: the task, or why there is none."""

    task: Task | None = None
    port: int = 0
    token: str = ""
    error: str = ""
    message: str = ""


def record_as_rank(request: Request, place: Placement, reporter: Reporter, reduce: Any = None) -> Run | None:
    """Record as rank ``place``; only rank 0 reports, plans and writes ``run.json``.

    ``reduce``: a `ringprof.record.rank.Reduce`, for the rank's own trace.

    Raises on every rank what rank 0 refuses.
    """
    need_torch()
    from ringprof.record.group import process_group

    if place.rank != 0:
        reporter = Silent()
    resolved = resolve(request, place)
    with _lost_before_the_run(place), process_group(place, resolved.device, MEETING_LIMIT_S) as device:
        hosts, pids = _meet(place, device)
        shared = regular_per_host(host_numbers(hosts))
        joined = _Joined(replace(place, local_world_size=shared), hosts, pids, Standing(reporter), device, reduce)
        run = joined.record(request)
    return None if run is None else read_run(request.output)


@contextmanager
def _lost_before_the_run(place: Placement) -> Iterator[None]:
    """A rank that is gone before there is a lifeline shows as an error of torch.distributed, and rank 0 may be it."""
    from ringprof.record.ending.failure import message_of

    try:
        yield
    except RuntimeError as error:
        raise RecordError(f"rank {place.rank} cannot reach the other ranks: {message_of(error)}") from error


def _meet(place: Placement, device: Any) -> tuple[list[str], list[int]]:
    """The host of every rank, and its process there."""
    from ringprof.record.group import gather_bytes
    from ringprof.record.machine import host_name

    said = gather_bytes(msgspec.json.encode(Where(host_name(), place.node, os.getpid())), device)
    ranks = [msgspec.json.decode(part, type=Where) for part in said]
    return host_names(ranks), [rank.pid for rank in ranks]


class _Joined:
    """This rank, once all know where each other is."""

    def __init__(
        self, place: Placement, hosts: list[str], pids: list[int], standing: Standing, device: Any, reduce: Any
    ) -> None:  # fmt: skip
        self._place, self._hosts, self._standing, self._device = place, hosts, standing, device
        self._reduce = reduce
        here = hosts[place.rank]
        self._siblings = {
            rank: pids[rank] for rank, host in enumerate(hosts) if host == here and rank != place.rank
        }  # fmt: skip
        self._first = place.rank == 0

    def record(self, request: Request) -> Run | None:
        """Agree, and record under a watchman who ends this rank when the launcher, another rank or time says so."""
        from ringprof.record.ending.ending import BACKUP_S
        from ringprof.record.ending.watch import Watch

        rank, ending = self._agree(request)
        patience_s = 0 if self._first else BACKUP_S
        watch = Watch(ending.stopped, limit_s=rank.task.time_limit, patience_s=patience_s)
        watch.start()
        try:
            run: Run | None = rank.record(self._device)
            ending.done()
            return run
        except Exception as error:
            raise ending.failed(error) from error
        finally:
            watch.stop()

    def _agree(self, request: Request) -> tuple[Any, Any]:
        """The task as rank 0 sees it, and each rank's line to rank 0. Raises on all ranks what rank 0 refuses."""
        from ringprof.record.ending.ending import FirstRank
        from ringprof.record.group import gather_bytes

        opening, refused, made = _Opening(), None, None
        if self._first:
            try:
                rank = self._rank(prepare(request, self._place, self._standing, None))
                ending = FirstRank(self._scene(rank))
                rank.seal = ending.seal
                made = rank, ending
                opening = _Opening(task=rank.task, port=ending.hub.port, token=ending.hub.token)
            except RingprofError as error:
                opening, refused = _Opening(error=type(error).__name__, message=str(error)), error
        said = msgspec.json.decode(gather_bytes(msgspec.json.encode(opening), self._device)[0], type=_Opening)
        if refused is not None:
            raise refused
        if said.task is None:
            raise getattr(errors, said.error, RecordError)(said.message)
        return self._linked(said, said.task, made)

    def _linked(self, said: _Opening, task: Task, made: tuple[Any, Any] | None) -> tuple[Any, Any]:
        from ringprof.record.ending.ending import OtherRank, SaidElsewhere
        from ringprof.record.folder import discard
        from ringprof.record.group import gather_bytes

        address, problem = os.environ.get("MASTER_ADDR", "127.0.0.1"), ""
        if made is None:
            rank = self._rank(task)
            try:
                made = rank, OtherRank(self._scene(rank), address, said.port, said.token)
            except OSError as error:
                here = f"rank {self._place.rank} on host {self._hosts[self._place.rank]}"
                problem = f"{here} cannot reach rank 0 at {address}, port {said.port}: {error.strerror or error}"
        problems = [part.decode() for part in gather_bytes(problem.encode(), self._device) if part]
        if not problems and made is not None:
            return made
        if self._first:
            discard(Path(task.staging))
        raise (RecordError if self._first else SaidElsewhere)(f"{problems[0]}: let the hosts reach each other's ports")

    def _rank(self, task: Task) -> Any:
        from ringprof.record.rank import Rank, no_reduction

        reduce = self._reduce or no_reduction
        return Rank(task, self._place, self._standing, hosts=self._hosts, reduce=reduce)

    def _scene(self, rank: Any) -> Any:
        from ringprof.record.ending.ending import Scene

        return Scene(rank.task, self._place.rank, self._hosts, self._standing, rank.hops, self._siblings)
