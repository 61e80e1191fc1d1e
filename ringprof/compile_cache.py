"""Where torch keeps what it compiles: in this user's own cache folder.

torch's default is ``torchinductor_USER`` among the temporary files. Nobody removes it, and another user of the host can
guess the name and make the folder first, from which torch would then load code.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def choose_compile_cache(environment: MutableMapping[str, str], fallback: str | None = None) -> None:
    """Name the folder in ``environment``, unless the user has named one; torch makes it when it needs it.

    ``fallback`` is named where this user has no cache folder that can be written to.
    """
    folder = _user_folder(environment) or fallback
    if not environment.get(VARIABLE) and folder is not None:
        environment[VARIABLE] = folder


def _user_folder(environment: MutableMapping[str, str]) -> str | None:
    """This user's cache folder; None where it cannot be made, or would lie in a folder of somebody else."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", ""), ".cache")
    folder = existing = os.path.join(base, "ringprof", "torchinductor")
    if not os.path.isabs(folder):
        return None
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    try:
        own = os.path.isdir(existing) and os.stat(existing).st_uid == os.getuid()
    except OSError:
        return None
    return folder if own and os.access(existing, os.W_OK | os.X_OK) else None
