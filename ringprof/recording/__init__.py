"""Recording: run a strategy on all ranks, verify its results, time it, profile it, and write the run.

Importing this package does not load torch; starting a recording does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ringprof.iteration.request import RecordRequest
from ringprof.ranks.launch import current_launcher
from ringprof.ranks.launcher import RankInfo
from ringprof.ranks.progress import Reporter, SilentReporter
from ringprof.recording.run_folder import stage
from ringprof.recording.task import RankTask
from ringprof.run import Run

__all__ = ["RecordRequest", "record"]


def record(request: RecordRequest, reporter: Reporter | None = None, reduce: Any = None) -> Run | None:
    """Record one run, on ranks that this process starts, or as one rank if torchrun or srun started this process.

    Blocks until all ranks have ended. Returns the run, or None on ranks other than 0; the paths of its traces are
    relative to the folder of ``request.output``. A failed run leaves nothing but its log.
    ``reduce`` writes the reduced form of this rank's trace (`ringprof.recording.recording.Reduce`). Ranks that ringprof
    starts reduce their traces themselves.
    Raises `UsageError` or a subclass before anything is started, and `RecordError` if a rank fails or a result is
    wrong.
    """
    return current_launcher().run(RecordJob(request, reduce), reporter or SilentReporter())


@dataclass(frozen=True)
class RecordJob:
    """Recording of one run, for a `ringprof.ranks.launcher.Launcher`."""

    request: RecordRequest
    reduce: Any = None

    def prepare(self, reporter: Reporter, scratch: str | None, rank_info: RankInfo | None = None) -> RankTask:
        """Resolve the request, report the plan, refuse a run that is too large, and create its staging folder."""
        from ringprof.iteration.resolve import ranks_per_host, resolve
        from ringprof.recording.estimate import describe, estimate_of, raise_if_too_large

        request = resolve(self.request, rank_info)
        estimate = estimate_of(request, ranks_per_host(request, rank_info))
        for line in describe(request, estimate):
            reporter.say(line)
        raise_if_too_large(request, estimate)
        output = Path(request.output).absolute()
        label = f"{request.strategy}-{request.workload.kv_length or request.workload.seq}"
        staging = stage(output, label, request.world or 1)
        return RankTask(
            request=replace(request, output=str(output)), name=staging.name, staging=str(staging.path),
            token=staging.token, scratch=scratch, created=staging.created,
            time_limit=request.time_limit or estimate.time_limit,
        )  # fmt: skip

    def run_as_rank(self, rank_info: RankInfo, reporter: Reporter) -> Run | None:
        """Record as one rank; return the run on rank 0 and None on other ranks."""
        from ringprof.recording.as_rank import record_as_rank

        def prepare(reporter: Reporter, rank_info: RankInfo) -> RankTask:
            return self.prepare(reporter, None, rank_info)

        return record_as_rank(self.request, prepare, self.reduce, rank_info, reporter)
