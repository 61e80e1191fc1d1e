"""Folders for what a process needs for a while, removed however it ends.

A process that is killed removes nothing: the next one that makes such a folder does it.
"""

from __future__ import annotations

import atexit
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ringprof.folder_owner import claim, clear_abandoned, release

_made: set[Path] = set()


def scratch_folder(what: str) -> Path:
    """A new folder ``ringprof-WHAT-...`` among the temporary ones. Raises OSError."""
    with suppress(OSError):
        clear_abandoned(Path(tempfile.gettempdir()), f"ringprof-{what}-*")
    folder = Path(tempfile.gettempdir(), f"ringprof-{what}-{secrets.token_hex(8)}")
    # Before it is there: a signal may end this process at any moment.
    _made.add(folder)
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        _made.discard(folder)
        raise
    claim(folder)
    return folder


def keep(folder: Path) -> None:
    """Let one that `scratch_folder` made stay for good."""
    _made.discard(folder)
    release(folder)


def remove(folder: Path) -> None:
    """Remove one that `scratch_folder` made, if it is still there."""
    shutil.rmtree(folder, ignore_errors=True)
    release(folder)
    _made.discard(folder)


@atexit.register
def remove_all() -> None:
    """Remove all that this process has; to be called before it ends in a way that runs nothing more."""
    for folder in list(_made):
        remove(folder)
