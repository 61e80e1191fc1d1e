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
from pathlib import Path

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
    folder = Path(f"/proc/{pid}")
    try:
        variables = dict(
            entry.split("=", 1)
            for entry in (folder / "environ").read_text(errors="replace").split("\0")
            if "=" in entry
        )
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    same_run = all(variables.get(name) == _at_start.get(name) for name in _RUN)
    return state != "Z" and same_run and str(rank) in {variables.get(name) for name in _RANK}


_at_start = {name: value for name, value in os.environ.items() if name in _RUN}
"""As this process was started: later additions to the environment do not show in another's."""
