"""Folders that one process creates and locks: incomplete runs and scratch folders, removed however the process ends.

The file ``.owner`` holds a random token, and the writing process keeps it locked. A rank that reads the same token
shares the folder. A folder was abandoned by a killed process if its lock is free and was taken on this machine since
its last boot. The next process that creates such a folder removes it, and empty folders older than an hour.
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

from ringprof.common.decoding import decode_file
from ringprof.errors import InputError

OWNER_FILE = ".owner"
PARTIAL = ".partial"
MAX_OWNER_BYTES = 4096
UNLOCKED_S = 3600.0
"""Age in seconds from which an empty folder counts as abandoned: nobody is about to lock it."""


class _Owner(msgspec.Struct, frozen=True):
    token: str
    machine: str


_locks: dict[Path, int] = {}
"""Open owner files of this process by folder."""
_scratch_folders: set[Path] = set()
"""Scratch folders of this process."""


def lock(folder: Path) -> str:
    """Make this process the owner of a new folder; returns the token. Raises OSError."""
    token = os.urandom(16).hex()
    file = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _try_lock(file)
        os.write(file, msgspec.json.encode(_Owner(token, _machine())))
    except BaseException:
        os.close(file)
        raise
    _locks[folder] = file
    return token


def unlock(folder: Path, moved_to: Path | None = None) -> None:
    """Release the lock of a folder, which was possibly moved to ``moved_to``; the folder stays."""
    ((moved_to or folder) / OWNER_FILE).unlink(missing_ok=True)
    _release_lock(folder)


def has_token(folder: Path, token: str) -> bool:
    """Return whether ``folder`` is the one locked with ``token``, and not another folder of the same name."""
    owner = _read_owner(folder)
    return owner is not None and owner.token == token


def is_abandoned(folder: Path) -> bool:
    """Return whether the process that wrote to ``folder`` is gone. False if this machine cannot know."""
    owner = _read_owner(folder)
    if owner is None or owner.machine != _machine() or folder in _locks:
        return False
    try:
        file = os.open(folder / OWNER_FILE, os.O_RDWR)
    except OSError:
        return False
    try:
        return _try_lock(file)
    finally:
        os.close(file)


def remove_abandoned(parent: Path, pattern: str = f".*{PARTIAL}", min_age_s: float = 0.0) -> list[str]:
    """Remove folders of killed processes from ``parent``, by default incomplete recordings; returns their names.

    Folders that changed within the last ``min_age_s`` seconds stay.
    """
    removed = []
    for path in parent.glob(pattern):
        with suppress(OSError):  # another process may be removing it
            owned = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
            old = time.time() - path.stat().st_mtime >= min_age_s
            if owned and old and (is_abandoned(path) or _was_never_locked(path)):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path.name)
    return removed


def _was_never_locked(folder: Path) -> bool:
    """Return whether the folder is old and has no owner and no content: its process was killed before it locked it."""
    with os.scandir(folder) as entries:
        content = [(entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries]
    return content in ([], [(OWNER_FILE, 0)]) and time.time() - folder.stat().st_mtime > UNLOCKED_S


def _try_lock(file: int) -> bool:
    """Take the lock if it is free; False if it is taken, or if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _release_lock(folder: Path) -> None:
    """Close the owner file of a folder, which ends this process's lock on it."""
    file = _locks.pop(folder, None)
    if file is not None:
        os.close(file)


def _machine() -> str:
    """Return an identifier of this machine and its last boot, beyond which a lock says nothing about a process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"


def _read_owner(folder: Path) -> _Owner | None:
    try:
        return decode_file(str(folder / OWNER_FILE), _Owner, "an owner file", MAX_OWNER_BYTES)
    except InputError:
        return None


def scratch_folder(what: str, min_age_s: float = 0.0) -> Path:
    """Create and lock a temporary folder ``ringprof-WHAT-...``, and remove abandoned folders of that name.

    ``min_age_s`` is the age in seconds from which an abandoned folder is removed. Raises OSError.
    """
    with suppress(OSError):
        remove_abandoned(Path(tempfile.gettempdir()), f"ringprof-{what}-*", min_age_s)
    folder = Path(tempfile.gettempdir(), f"ringprof-{what}-{os.urandom(8).hex()}")
    # Registered before it exists: a signal may end this process at any moment.
    _scratch_folders.add(folder)
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        _scratch_folders.discard(folder)
        raise
    lock(folder)
    return folder


def abandon(folder: Path) -> None:
    """Leave a scratch folder behind for a later call of `scratch_folder` to remove."""
    _scratch_folders.discard(folder)
    _release_lock(folder)


def keep(folder: Path) -> None:
    """Unlock a scratch folder and leave it on the disk when this process ends."""
    _scratch_folders.discard(folder)
    unlock(folder)


def remove(folder: Path) -> None:
    """Remove a scratch folder if it still exists."""
    shutil.rmtree(folder, ignore_errors=True)
    unlock(folder)
    _scratch_folders.discard(folder)


@atexit.register
def remove_all() -> None:
    """Remove all scratch folders of this process. To be called before an exit that runs no exit handlers."""
    for folder in list(_scratch_folders):
        remove(folder)
