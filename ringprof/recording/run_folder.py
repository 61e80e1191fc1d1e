"""Staging folder of a run: a hidden folder beside the output, renamed when the run is complete."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ringprof.common.scratch import PARTIAL, lock, remove_abandoned, unlock
from ringprof.errors import RunFormatError, UsageError
from ringprof.run import Run, read_run, relocated, write_run

RUN_FILE = "run.json"
NEEDED_BYTES_PER_RANK = 4 * 2**20
"""Free disk space per rank that a compressed trace needs, checked before anything is computed."""


class StagingFolder(msgspec.Struct, frozen=True):
    """Folder of a run that is being written. It is renamed to the run's name when it is complete."""

    location: str
    """Path of the folder: JSON has no paths."""
    name: str
    """Name of the run, and of its folder when it is complete."""
    created: str
    """Time of creation: UTC, ISO 8601."""
    token: str
    """Token by which other processes recognise this folder."""

    @property
    def path(self) -> Path:
        """Path of the folder."""
        return Path(self.location)


def trace_name(rank: int) -> str:
    """Return the name of one rank's trace file in the run's folder."""
    return f"rank{rank}.json.gz"


def reduced_name(rank: int) -> str:
    """Return the name of one rank's reduced trace, beside its trace."""
    return f"rank{rank}.ringprof"


def stage(output: Path, label: str, ranks: int) -> StagingFolder:
    """Create the hidden folder of a new run beside ``output``; name the run after the time and ``label``.

    Removes the folders of killed recordings there. Raises `UsageError` in one line if ``output`` is not a run, or if
    disk space or permission is missing, before anything is computed.
    """
    _refuse_other_file(output)
    parent = output.parent
    now = datetime.now(UTC)
    stem = f"{now:%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9._-]+', '-', label)}"
    path, token = None, ""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        path = _create_hidden(parent, stem)
        token = lock(path)
        _test_writing(path)
    except OSError as error:
        if path is not None:
            discard(path)
        raise UsageError(f"{parent}: cannot write the run here: {error.strerror or error}") from None
    free = shutil.disk_usage(parent).free
    if free < NEEDED_BYTES_PER_RANK * ranks:
        discard(path)
        raise UsageError(f"{parent}: {free / 2**20:.0f} MiB free, {ranks} ranks' traces need more: choose --output")
    return StagingFolder(str(path), path.name[1 : -len(PARTIAL)], f"{now:%Y-%m-%dT%H:%M:%SZ}", token)


def publish(staging: Path, run: Run, output: Path) -> Path:
    """Write ``run.json`` into the staged folder, give the folder the run's name, and make ``output`` this run.

    Every step is atomic, in this order, so that a ``run.json`` which exists is complete. Returns the folder. Raises
    OSError, and then there is no such run.
    """
    write_run(run, staging / RUN_FILE)
    folder = output.parent / run.name
    os.rename(staging, folder)
    try:
        # After the rename: a kill in between would leave a staging folder without an owner, which nothing removes.
        unlock(staging, folder)
        write_run(relocated(run, run.name), output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def discard(staging: Path) -> None:
    """Remove the staging folder of a failed run."""
    shutil.rmtree(staging, ignore_errors=True)
    unlock(staging)


def _create_hidden(parent: Path, stem: str) -> Path:
    """Create a folder that no other run uses: two runs of the same second get different names."""
    for attempt in range(1, 1000):
        name = stem if attempt == 1 else f"{stem}-{attempt}"
        path = parent / f".{name}{PARTIAL}"
        if (parent / name).exists():
            continue
        try:
            path.mkdir()
        except FileExistsError:
            continue
        if (parent / name).exists():
            # The other run of this second was completed since the first look at the name.
            path.rmdir()
            continue
        return path
    raise FileExistsError(f"too many runs are called {stem}")


def _test_writing(folder: Path) -> None:
    """Write and flush a test file, because a full disk shows only when a file is flushed. Raises OSError."""
    data = bytes(1 << 16)
    # Unbuffered: closing the file would try to write the rest of a buffer again, and fail again.
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as probe:
        if probe.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(probe.fileno())


def _refuse_other_file(output: Path) -> None:
    """Raise `UsageError` if ``output`` exists and is not the file of a run."""
    if output.is_dir():
        raise UsageError(f"{output}: a folder; --output is the file that names the newest run, such as traces/run.json")
    if not output.exists():
        return
    try:
        read_run(output)
    except RunFormatError:
        raise UsageError(f"{output}: exists and is not a ringprof run; choose another --output") from None
