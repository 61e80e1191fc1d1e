"""Ending the ranks of this host that answer neither rank 0 nor the launcher's request to end.

A launcher gives a stuck process half a minute. A process is taken for a rank only where its own variables say so: in a
container of its own, another process may have its number.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

GRACE_S = 3.0
"""What a rank that was told to end gets."""
_RANK = ("RANK", "SLURM_PROCID")
_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")


def end_local_ranks(pids: Mapping[int, int], seconds: float = GRACE_S) -> list[int]:
    """Kill what is left of these ranks' processes after ``seconds``; returns the ranks that had to be killed."""
    deadline = time.monotonic() + seconds
    left = dict(pids)
    while True:
        left = {rank: pid for rank, pid in left.items() if _is_rank(pid, rank)}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for pid in left.values():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return list(left)


def _is_rank(pid: int, rank: int) -> bool:
    """Whether the process is that rank of this very run, and not yet dead."""
    try:
        process = psutil.Process(pid)
        variables, dead = process.environ(), process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    # As both were started: what a process adds later to its own variables does not show in another's.
    own = psutil.Process().environ()
    same_run = all(variables.get(name) == own.get(name) for name in _RUN)
    return same_run and not dead and str(rank) in {variables.get(name) for name in _RANK}
