"""Recording: run a strategy on all ranks, verify its results, time it, profile it, and write the run.

Importing this package does not load torch; starting a recording does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ringprof.common.scratch import remove, scratch_folder
from ringprof.record.launcher import RankInfo, launcher_rank
from ringprof.record.progress import Reporter, SilentReporter
from ringprof.record.request import RankTask, RecordRequest, require_packages
from ringprof.record.run_folder import discard, stage
from ringprof.run import Run, read_run

__all__ = ["RecordRequest", "record"]


def record(request: RecordRequest, reporter: Reporter | None = None, reduce: Any = None) -> Run | None:
    """Record one run, on ranks that this process starts, or as one rank if torchrun or srun started this process.

    Blocks until all ranks have ended. Returns the run, or None on ranks other than 0; the paths of its traces are
    relative to the folder of ``request.output``. A failed run leaves nothing but its log.
    ``reduce`` writes the reduced form of this rank's trace (`ringprof.record.recording.Reduce`). Ranks that ringprof
    starts reduce their traces themselves.
    Raises `UsageError` or a subclass before anything is started, and `RecordError` if a rank fails or a result is
    wrong.
    """
    reporter = reporter or SilentReporter()
    rank_info = launcher_rank()
    if rank_info is not None:
        require_packages("torch", "psutil")
        from ringprof.record.external_launcher import record_as_rank

        return record_as_rank(request, rank_info, reporter, reduce)
    return _record_here(request, reporter)


def _record_here(request: RecordRequest, reporter: Reporter) -> Run:
    from ringprof.record.local_launcher import launch

    task = prepare(request, None, reporter, str(scratch_folder("ranks")))
    try:
        return launch(task, reporter, "record", lambda: read_run(task.request.output))
    except BaseException:
        discard(Path(task.staging))
        raise


def prepare(request: RecordRequest, rank_info: RankInfo | None, reporter: Reporter, scratch: str | None) -> RankTask:
    """Resolve the request, report the plan, refuse a run that is too large, and create the run's staging folder.

    Removes the folder ``scratch`` if it raises.
    """
    staging = None
    try:
        require_packages("torch", "psutil")
        from ringprof.record.estimate import describe, estimate_of, raise_if_too_large
        from ringprof.record.resolve import ranks_per_host, resolve

        request = resolve(request, rank_info)
        estimate = estimate_of(request, ranks_per_host(request, rank_info))
        for line in describe(request, estimate):
            reporter.say(line)
        raise_if_too_large(request, estimate)
        staging = stage(
            Path(request.output).absolute(),
            f"{request.strategy}-{request.workload.kv_length or request.workload.seq}",
            request.world or 1,
        )
    finally:
        if staging is None and scratch is not None:
            remove(Path(scratch))
    return RankTask(
        request=replace(request, output=str(Path(request.output).absolute())),
        name=staging.name,
        staging=str(staging.path),
        token=staging.token,
        scratch=scratch,
        created=staging.created,
        time_limit=request.time_limit or estimate.time_limit,
    )
