"""The folder in which torch keeps compiled code: this user's own cache folder.

torch's default is ``torchinductor_USER`` among the temporary files, which nobody removes. Another user of the host can
guess that name and create the folder first; torch would then load code from it.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def choose_compile_cache(environment: MutableMapping[str, str], fallback: str | None = None) -> None:
    """Set `VARIABLE` in ``environment`` to the cache folder, unless the user has set it. torch creates the folder.

    ``fallback`` is used where this user has no writable cache folder.
    """
    folder = _user_folder(environment) or fallback
    if not environment.get(VARIABLE) and folder is not None:
        environment[VARIABLE] = folder


def _user_folder(environment: MutableMapping[str, str]) -> str | None:
    """Return this user's cache folder; None if it cannot be created, or would lie in another user's folder."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", ""), ".cache")
    folder = parent = os.path.join(base, "ringprof", "torchinductor")
    if not os.path.isabs(folder):
        return None
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    try:
        owned = os.path.isdir(parent) and os.stat(parent).st_uid == os.getuid()
    except OSError:
        return None
    return folder if owned and os.access(parent, os.W_OK | os.X_OK) else None
