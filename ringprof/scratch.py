"""Folders that one process makes and writes: half-written runs, and scratch folders, removed however it ends.

The file ``.owner`` holds a random token, and the process that writes there keeps it locked. A rank that reads the same
token sees the same folder. A folder whose lock is free, taken on this very machine since it was started, was left by a
process that was killed: the next one that makes such a folder removes it. So it does with an empty one after an hour.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import platform
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ringprof.decoding import decode_file
from ringprof.errors import InputError

OWNER_FILE = ".owner"
PARTIAL = ".partial"
MAX_OWNER_BYTES = 4096
UNCLAIMED_S = 3600.0
"""Age of an empty folder from which nobody is about to claim it."""


class _Owner(msgspec.Struct, frozen=True):
    token: str
    machine: str


_locks: dict[Path, int] = {}
_made: set[Path] = set()
"""Scratch folders of this process."""


def claim(folder: Path) -> str:
    """Make this process the owner of a new folder; returns the token. Raises OSError."""
    token = os.urandom(16).hex()
    file = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _lock(file)
        os.write(file, msgspec.json.encode(_Owner(token, _machine())))
    except BaseException:
        os.close(file)
        raise
    _locks[folder] = file
    return token


def release(folder: Path, now_at: Path | None = None) -> None:
    """Give up a claim; the folder stays, or is at ``now_at`` by now."""
    ((now_at or folder) / OWNER_FILE).unlink(missing_ok=True)
    _unlock(folder)


def sees(folder: Path, token: str) -> bool:
    """Whether this process sees the folder that ``token`` was given for, and not another of that name."""
    owner = _read(folder)
    return owner is not None and owner.token == token


def abandoned(folder: Path) -> bool:
    """Whether the process that was writing here is gone. False where this machine cannot know."""
    owner = _read(folder)
    if owner is None or owner.machine != _machine() or folder in _locks:
        return False
    try:
        file = os.open(folder / OWNER_FILE, os.O_RDWR)
    except OSError:
        return False
    try:
        return _lock(file)
    finally:
        os.close(file)


def clear_abandoned(parent: Path, pattern: str = f".*{PARTIAL}", min_age_s: float = 0.0) -> list[str]:
    """Remove what killed processes left in ``parent``, by default half-written recordings; returns the names.

    Folders that changed within the last ``min_age_s`` seconds stay.
    """
    removed = []
    for path in parent.glob(pattern):
        with suppress(OSError):  # another process may be removing it
            own = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
            old = time.time() - path.stat().st_mtime >= min_age_s
            if own and old and (abandoned(path) or _never_claimed(path)):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path.name)
    return removed


def _never_claimed(folder: Path) -> bool:
    """Whether its maker was killed before the owner file was written: the folder holds nothing else, and is old."""
    with os.scandir(folder) as entries:
        content = [(entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries]
    return content in ([], [(OWNER_FILE, 0)]) and time.time() - folder.stat().st_mtime > UNCLAIMED_S


def _lock(file: int) -> bool:
    """Take the lock if it is free. A file system without locks cannot tell the living from the dead: False."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlock(folder: Path) -> None:
    file = _locks.pop(folder, None)
    if file is not None:
        os.close(file)


def _machine() -> str:
    """This machine since it was started: a lock says nothing about processes elsewhere, nor from before."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"


def _read(folder: Path) -> _Owner | None:
    try:
        return decode_file(str(folder / OWNER_FILE), _Owner, "an owner file", MAX_OWNER_BYTES)
    except InputError:
        return None


def scratch_folder(what: str, min_age_s: float = 0.0) -> Path:
    """Make a folder ``ringprof-WHAT-...`` among the temporary ones, and remove abandoned ones of that name.

    ``min_age_s`` is the age in seconds from which an abandoned folder is removed. Raises OSError.
    """
    with suppress(OSError):
        clear_abandoned(Path(tempfile.gettempdir()), f"ringprof-{what}-*", min_age_s)
    folder = Path(tempfile.gettempdir(), f"ringprof-{what}-{os.urandom(8).hex()}")
    # Before it is there: a signal may end this process at any moment.
    _made.add(folder)
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        _made.discard(folder)
        raise
    claim(folder)
    return folder


def abandon(folder: Path) -> None:
    """Leave a folder of `scratch_folder` behind, for a later call of it to remove."""
    _made.discard(folder)
    _unlock(folder)


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
