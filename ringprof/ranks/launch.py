"""Choice of the launcher of ranks."""

from __future__ import annotations

from ringprof.errors import require_packages
from ringprof.ranks.launcher import Launcher, launcher_rank


def current_launcher() -> Launcher:
    """Return an `ExternalLauncher` if torchrun or srun started this process as a rank, else a `LocalLauncher`.

    Raises `UsageError` for contradictory variables, and `MissingExtraError` without the packages that ranks need.
    """
    rank_info = launcher_rank()
    require_packages("torch", "psutil")
    if rank_info is None:
        from ringprof.ranks.local_launcher import LocalLauncher

        return LocalLauncher()
    from ringprof.ranks.external_launcher import ExternalLauncher

    return ExternalLauncher(rank_info)
