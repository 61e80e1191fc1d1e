"""Where a run is written: a hidden folder beside the output, which takes its name when the run is complete."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ringprof.errors import RunFormatError, UsageError
from ringprof.run import Run, read_run, relocated, write_run
from ringprof.scratch import PARTIAL, lock, remove_abandoned, unlock

RUN_FILE = "run.json"
NEEDED_BYTES_PER_RANK = 4 * 2**20
"""Room for a compressed trace, asked for before the work is done."""


@dataclass(frozen=True)
class StagingFolder:
    """A run's folder while it is being written."""

    path: Path
    name: str
    created: str
    token: str
    """By which other processes know this folder."""


def trace_name(rank: int) -> str:
    """The file of one rank's trace in the run's folder."""
    return f"rank{rank}.json.gz"


def reduced_name(rank: int) -> str:
    """The file of one rank's reduced trace, beside its trace."""
    return f"rank{rank}.ringprof"


def stage(output: Path, label: str, ranks: int) -> StagingFolder:
    """Make the hidden folder of a new run beside ``output``; the run is called after the time and ``label``.

    What recordings that were killed have left there is removed. Raises `UsageError` where ``output`` is something else
    than a run, or where there is no room or no permission: in one line, and before anything has been computed.
    """
    _refuse_foreign(output)
    parent = output.parent
    now = datetime.now(timezone.utc)
    stem = f"{now:%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9._-]+', '-', label)}"
    path, token = None, ""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        path = _fresh(parent, stem)
        token = lock(path)
        _try_writing(path)
    except OSError as error:
        if path is not None:
            discard(path)
        raise UsageError(f"{parent}: cannot write the run here: {error.strerror or error}") from None
    free = shutil.disk_usage(parent).free
    if free < NEEDED_BYTES_PER_RANK * ranks:
        discard(path)
        raise UsageError(f"{parent}: {free / 2**20:.0f} MiB free, {ranks} ranks' traces need more: choose --output")
    return StagingFolder(path, path.name[1 : -len(PARTIAL)], f"{now:%Y-%m-%dT%H:%M:%SZ}", token)


def publish(staging: Path, run: Run, output: Path) -> Path:
    """Write ``run.json`` into the staged folder, give the folder the run's name, and make ``output`` this run.

    Every step is atomic, in this order, so that a ``run.json`` which exists is complete. Returns the folder. Raises
    OSError, and then there is no such run.
    """
    write_run(run, staging / RUN_FILE)
    folder = output.parent / run.name
    os.rename(staging, folder)
    try:
        unlock(staging, folder)  # not before: killed in between, the folder would be nobody's
        write_run(relocated(run, run.name), output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def discard(staging: Path) -> None:
    """Remove what a run that failed has written."""
    shutil.rmtree(staging, ignore_errors=True)
    unlock(staging)


def _fresh(parent: Path, stem: str) -> Path:
    """A folder that nobody else has: two runs of the same second get different names."""
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
            # The other run of this second was completed since we looked.
            path.rmdir()
            continue
        return path
    raise FileExistsError(f"too many runs are called {stem}")


def _try_writing(folder: Path) -> None:
    """Find out now whether there is room: a full disk shows when a file is flushed, not when it is made."""
    data = bytes(1 << 16)
    # Without a buffer, whose rest would be written, and fail, again when the file is closed.
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as probe:
        if probe.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(probe.fileno())


def _refuse_foreign(output: Path) -> None:
    if output.is_dir():
        raise UsageError(f"{output}: a folder; --output is the file that names the newest run, such as traces/run.json")
    if not output.exists():
        return
    try:
        read_run(output)
    except RunFormatError:
        raise UsageError(f"{output}: exists and is not a ringprof run; choose another --output") from None
