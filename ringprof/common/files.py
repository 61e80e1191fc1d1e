"""Access to files by path or by URL: on this machine or, with the ``cluster`` extra, on any file system of fsspec.

Only paths that the user names are opened, and files below them: the content of a file never leads elsewhere.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

from ringprof.common.limits import Limits
from ringprof.errors import InputError, MissingExtraError, RingprofError, install_command

# At least two letters, since a Windows path begins with one letter and a colon.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.:/-]+)?://")
_LOCAL = re.compile(r"^(file|local):(//)?")
_CACHES = re.compile(r"^((simplecache|filecache|blockcache|cached)::)+")


def is_url(name: str) -> bool:
    """Return whether ``name`` is a URL, such as ``s3://bucket/run.json``."""
    return _URL.match(name) is not None


def open_binary(name: str) -> BinaryIO:
    """Open a regular file for reading. Raises `InputError` if it cannot be opened or is not regular, such as a pipe."""
    with _as_input_error(name):
        if not is_url(name):
            # Non-blocking, since opening a pipe that nobody writes to would block.
            raw = _Local(name, opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0)))
            file = io.BufferedReader(raw)
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.close()
                raise InputError(f"{name}: not a regular file; to read from a pipe, give - as the path")
            return file
        system, path = _system_of(name)
        return cast(BinaryIO, io.BufferedReader(_Remote(name, system.open(path, "rb"))))


def read_bytes(name: str, size: int = -1) -> bytes:
    """Read a file, or its first ``size`` bytes. Raises `InputError`."""
    with open_binary(name) as file, _as_input_error(name):
        return file.read(size)


def read_whole(name: str, limits: Limits | None = None, share: int = 2) -> bytes:
    """Read a whole file of at most ``limits.memory_bytes / share`` bytes. Raises `InputError` for a larger one.

    ``share`` is the ratio of the memory that the decoded content may need to the size of the file.
    """
    with open_binary(name) as file, _as_input_error(name):
        return read_within(file, name, limits, share)


def read_within(file: BinaryIO, name: str, limits: Limits | None = None, share: int = 2) -> bytes:
    """Read an open file or a pipe whole, within the limits of `read_whole`. Raises `InputError` and OSError."""
    limits = limits or Limits()
    most = min(limits.memory_bytes // share, limits.expanded_bytes)
    data = bytearray()
    while piece := file.read(1 << 20):
        data += piece
        if len(data) > most:
            option = "--max-bytes" if most == limits.expanded_bytes else "--max-memory"
            raise InputError(f"{name}: larger than {most:,} bytes: raise the limit with {option}, or give a part")
    return bytes(data)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` at the end, so that a file is never incomplete. Raises OSError.

    A device, a pipe, or a file in a folder that is not writable is yielded itself.
    """
    original, file = Path(path), Path(os.path.realpath(path))  # resolved, so that a link stays a link
    if original.exists() and not (original.is_file() and os.access(file.parent, os.W_OK)):
        yield original
        return
    temporary = file.with_name(f".ringprof-{os.urandom(8).hex()}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        if file.exists():
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        yield temporary
        temporary.replace(file)
    except OSError as error:
        error.filename = os.fspath(path) if error.filename in (None, str(temporary)) else error.filename
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(file: Path, data: bytes) -> None:
    """Write a file, and flush it to the disk before it replaces an existing one."""
    with replacing(file) as temporary, temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def size_of(name: str) -> int:
    """Return the size of a file in bytes. Raises `InputError`."""
    return int(_query(name, lambda path: path.stat().st_size, "size") or 0)


def is_folder(name: str) -> bool:
    """Return whether a folder of this name exists. Raises `InputError`."""
    return bool(_query(name, Path.is_dir, "isdir"))


def is_file(name: str) -> bool:
    """Return whether a file of this name exists. Raises `InputError`."""
    return bool(_query(name, Path.is_file, "isfile"))


def exists(name: str) -> bool:
    """Return whether a file or folder of this name exists. Raises `InputError`."""
    return bool(_query(name, Path.exists, "exists"))


def _query(name: str, local: Callable[[Path], Any], method: str) -> Any:
    """Call ``local`` on a path of this machine, or ``method`` of the fsspec file system on the path of a URL."""
    with _as_input_error(name):
        if not is_url(name):
            return local(Path(name))
        system, path = _system_of(name)
        return getattr(system, method)(path)


def files_in(folder: str) -> list[str]:
    """List the files of a folder or, if it has none, the files of its subfolders. Raises `InputError`."""
    with _as_input_error(folder):
        if is_url(folder):
            system, path = _system_of(folder)
            entries = system.ls(path, detail=True)
            files = [entry for entry in entries if entry["type"] == "file"]
            if not files:
                inner = [system.ls(entry["name"], detail=True) for entry in entries if entry["type"] == "directory"]
                files = [entry for listed in inner for entry in listed if entry["type"] == "file"]
            return [str(system.unstrip_protocol(entry["name"])) for entry in files]
        local = Path(folder)
        files = [entry for entry in local.iterdir() if entry.is_file()]
        return [str(file) for file in files or (entry for entry in local.glob("*/*") if entry.is_file())]


def folders_in(folder: str) -> list[str]:
    """List the folders of a folder, without links to folders elsewhere. Raises `InputError`."""
    with _as_input_error(folder):
        if not is_url(folder):
            return [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        system, path = _system_of(folder)
        entries = system.ls(path, detail=True)
        return [str(system.unstrip_protocol(entry["name"])) for entry in entries if entry["type"] == "directory"]


def within(folder: str, relative: str) -> str:
    """Join a folder and a relative path, for paths and URLs."""
    return f"{folder.rstrip('/')}/{relative}" if is_url(folder) else os.path.join(folder, relative)


def folder_of(name: str) -> str:
    """Return the folder of a file, by path or URL."""
    return name.rpartition("/")[0] if is_url(name) else os.path.dirname(name) or "."


def leading_out(file: str, relatives: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each of the paths named in ``file`` that leaves the folder of ``file``, with the reason.

    An untrusted file must not make its reader open other folders or other machines.
    """
    local = _CACHES.sub("", file)
    local = _LOCAL.sub("", local)
    real: dict[str, str] = {}

    def resolved(folder: str) -> str:
        if folder not in real:
            real[folder] = os.path.realpath(folder)
        return real[folder]

    for relative in relatives:
        # "::" chains URLs of fsspec; backslashes separate folders on some systems; servers read %2e as a dot.
        plain = PurePosixPath(unquote(relative) if is_url(local) else relative)
        unsafe = any(mark in relative for mark in ("\\", "\0", "::"))
        if unsafe or plain.is_absolute() or ".." in plain.parts or not plain.parts:
            yield relative, "leaves the run's folder"
        elif not is_url(local):
            folder = os.path.dirname(local) or "."
            path = os.path.join(resolved(os.path.join(folder, os.path.dirname(relative))), plain.name)
            if os.path.islink(path):
                path = os.path.realpath(path)
            if not path.startswith(os.path.join(resolved(folder), "")):
                yield relative, "leaves the run's folder through a link"
            elif os.path.islink(path):
                yield relative, "is a link that leads in a circle"


def _system_of(name: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it. Raises `InputError`, `MissingExtraError`."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingExtraError(f"{name}: URLs need one more package: {install_command('cluster')}") from None
    system, path = url_to_fs(name)
    return system, str(path)


class _Local(io.FileIO):
    """A local file whose read errors name the file, for instance when a disk fails."""

    def readinto(self, buffer: Any) -> int:
        with _as_input_error(str(self.name)):
            return super().readinto(buffer) or 0


class _Remote(io.RawIOBase):
    """A file of fsspec whose errors are raised as `InputError`."""

    def __init__(self, name: str, file: Any) -> None:
        self._name, self._file = name, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _as_input_error(self._name):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        with _as_input_error(self._name):
            return int(self._file.seek(offset, whence))

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def _as_input_error(name: str) -> Iterator[None]:
    """Turn every error of a file into an `InputError` or `MissingExtraError` of one line that names the file."""
    try:
        yield
    except RingprofError:
        raise
    except ImportError as error:
        raise MissingExtraError(f"{name}: {_one_line(error)}") from None
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or _one_line(error)}") from None
    except Exception as error:
        if not is_url(name):
            raise
        # The file systems of fsspec raise errors of many types: BadZipFile, TypeError, errors of their clients.
        raise InputError(f"{name}: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
