"""Ranks that torchrun or srun started: the launcher, and the end of those on this host."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from ringprof.ranks.launcher import Job, RankInfo, Result
from ringprof.ranks.progress import Reporter, SilentReporter

GRACE_S = 3.0
"""Time that a rank has to end by itself before it is killed."""


class ExternalLauncher:
    """Launcher that has started this process as one rank; rank 0 reports."""

    def __init__(self, rank_info: RankInfo) -> None:
        self._rank_info = rank_info

    def run(self, job: Job[Result], reporter: Reporter) -> Result | None:
        """Run the job as this rank."""
        return job.run_as_rank(self._rank_info, reporter if self._rank_info.rank == 0 else SilentReporter())


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
