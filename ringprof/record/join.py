"""Recording as one rank of somebody else's launcher: torchrun on one or many hosts, srun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from ringprof import errors
from ringprof.errors import RecordError, RingprofError
from ringprof.record import prepare
from ringprof.record.folder import discard
from ringprof.record.placement import Placement
from ringprof.record.progress import Reporter, Silent
from ringprof.record.request import Request, Task
from ringprof.record.resolve import need_torch, resolve
from ringprof.run import Run, read_run

MEETING_LIMIT_S = 600.0
"""Until the plan has said how long the run may take."""


class _Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others before anything is computed: the task, or why there is none."""

    task: Task | None = None
    error: str = ""
    message: str = ""


def record_as_rank(request: Request, place: Placement, reporter: Reporter) -> Run | None:
    """Record as rank ``place``; only rank 0 reports, plans and writes ``run.json``.

    Raises on every rank what rank 0 refuses.
    """
    need_torch()
    from ringprof.record.group import process_group

    if place.rank != 0:
        reporter = Silent()
    resolved = resolve(request, place)
    with process_group(place, resolved.device, MEETING_LIMIT_S) as device:
        task = _agree(resolved, place, reporter, device)
        run = _watched(task, place, reporter, device)
    return None if run is None else read_run(task.request.output)


def _agree(request: Request, place: Placement, reporter: Reporter, device: Any) -> Task:
    from ringprof.record.group import gather_bytes

    opening, refused = _Opening(), None
    if place.rank == 0:
        try:
            opening = _Opening(task=prepare(request, place, reporter, None))
        except RingprofError as error:
            opening, refused = _Opening(error=type(error).__name__, message=str(error)), error
    said = msgspec.json.decode(gather_bytes(msgspec.json.encode(opening), device)[0], type=_Opening)
    if refused is not None:
        raise refused
    if said.task is None:
        raise getattr(errors, said.error, RecordError)(said.message)
    return said.task


def _watched(task: Task, place: Placement, reporter: Reporter, device: Any) -> Run | None:
    """Record under a watchman, which removes the half-written folder when the launcher ends this rank."""
    from ringprof.record.failure import kind_of, message_of, rank_error
    from ringprof.record.rank import Rank
    from ringprof.record.watch import Watch

    rank = Rank(task, place, reporter)

    def at_end(reason: str, code: int) -> None:
        if place.rank == 0:
            discard(Path(task.staging))
        if place.rank == 0 or reason == "time limit":
            sys.stderr.write(f"ringprof: rank {place.rank} stopped ({reason}); nothing was recorded\n")
            sys.stderr.flush()

    watch = Watch(at_end, limit_s=task.time_limit, parent=None)
    watch.start()
    try:
        return rank.record(device)
    except Exception as error:
        if place.rank == 0:
            discard(Path(task.staging))
        raise rank_error(place.rank, kind_of(error), message_of(error), "") from error
    finally:
        watch.stop()
