"""Recording: run a strategy on all ranks, verify its results, time it, profile it, and write the run.

Importing this package does not load torch; starting a recording does.
"""

from __future__ import annotations

from ringprof.iteration.request import RecordRequest
from ringprof.ranks.launcher import this_rank
from ringprof.ranks.progress import Reporter, SilentReporter
from ringprof.run import Run

__all__ = ["RecordRequest", "record"]


def record(request: RecordRequest, reporter: Reporter | None = None) -> Run | None:
    """Record one run, on ranks that this process starts, or as one rank if torchrun or srun started this process.

    Blocks until all ranks have ended. Returns the run, or None on ranks other than 0; the paths of its traces are
    relative to the folder of ``request.output``. A failed run leaves nothing but its log.
    Raises `UsageError` or a subclass before anything is started, `RecordError` if a rank fails or a result is wrong,
    and `Interrupted` if the user interrupts.
    """
    rank_info, reporter = this_rank(), reporter or SilentReporter()
    if rank_info is None:
        from ringprof.ranks.launch import run_local_ranks
        from ringprof.recording.recording import RankTask

        return run_local_ranks(lambda: RankTask.prepare(request, reporter), reporter)
    from ringprof.recording.as_rank import record_as_rank

    return record_as_rank(request, rank_info, reporter)
