"""Choice of the launcher of ranks."""

from __future__ import annotations

from ringprof.record.launcher import Launcher, launcher_rank
from ringprof.record.request import require_packages


def current_launcher() -> Launcher:
    """Return an `ExternalLauncher` if torchrun or srun started this process as a rank, else a `LocalLauncher`.

    Raises `UsageError` for contradictory variables, and `MissingExtraError` without the packages that ranks need.
    """
    rank_info = launcher_rank()
    require_packages("torch", "psutil")
    if rank_info is None:
        from ringprof.record.local_launcher import LocalLauncher

        return LocalLauncher()
    from ringprof.record.external_launcher import ExternalLauncher

    return ExternalLauncher(rank_info)
