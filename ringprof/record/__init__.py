"""Recording: run a strategy on all ranks, check it, time it, profile it, and write the run.

Loads torch, when a recording begins; importing this package does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ringprof.record.launcher import RankPlace, launcher_rank
from ringprof.record.progress import Reporter, SilentReporter
from ringprof.record.request import Request, Task, need
from ringprof.record.run_folder import discard, stage
from ringprof.run import Run, read_run
from ringprof.scratch import remove, scratch_folder

__all__ = ["Request", "record"]


def record(request: Request, reporter: Reporter | None = None, reduce: Any = None) -> Run | None:
    """Record one run, on ranks started here, or as one rank where torchrun or srun started this process.

    Returns the run, whose traces are named from the folder of ``request.output``; None on ranks other than 0. Blocks
    until all ranks have ended. Raises `UsageError` and its kinds before anything is started, `RecordError` where a
    rank fails or the result is wrong. A run that failed leaves nothing but its log.
    ``reduce`` writes the reduced form of this rank's trace (`ringprof.record.recording.Reduce`); ranks started here do
    so by themselves.
    """
    reporter = reporter or SilentReporter()
    place = launcher_rank()
    if place is not None:
        need("torch", "psutil")
        from ringprof.record.external_launcher import record_as_rank

        return record_as_rank(request, place, reporter, reduce)
    return _record_here(request, reporter)


def _record_here(request: Request, reporter: Reporter) -> Run:
    from ringprof.record.local_launcher import launch

    task = prepare(request, None, reporter, str(scratch_folder("ranks")))
    try:
        return launch(task, reporter, "record", lambda: read_run(task.request.output))
    except BaseException:
        discard(Path(task.staging))
        raise


def prepare(request: Request, place: RankPlace | None, reporter: Reporter, scratch: str | None) -> Task:
    """Make every choice, say what will be done, refuse what will not do, and make the run's folder."""
    staging = None
    try:
        need("torch", "psutil")
        from ringprof.record.estimate import describe, estimate_of, refuse_too_large
        from ringprof.record.resolve import ranks_per_host, resolve

        request = resolve(request, place)
        plan = estimate_of(request, ranks_per_host(request, place))
        for line in describe(request, plan):
            reporter.say(line)
        refuse_too_large(request, plan)
        staging = stage(
            Path(request.output).absolute(),
            f"{request.strategy}-{request.workload.kv_length or request.workload.seq}",
            request.world or 1,
        )
    finally:
        if staging is None and scratch is not None:
            remove(Path(scratch))
    return Task(
        request=replace(request, output=str(Path(request.output).absolute())),
        name=staging.name,
        staging=str(staging.path),
        token=staging.token,
        scratch=scratch,
        created=staging.created,
        time_limit=request.time_limit or plan.time_limit,
    )
