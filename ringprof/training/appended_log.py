"""Log of a training: JSON lines in a file that is appended to, whatever happens to its disk meanwhile."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path

from ringprof.common.json_object import JsonObject

_log = logging.getLogger("ringprof.monitor")


class AppendedLog:
    """Writer of JSON lines, each whole or not at all; a line that cannot be written does not end the training.

    The first line that is lost is warned of, then the tenth, the hundredth and so on. The next line that can be written
    has their number as ``lost``. In a chained log, each line has ``previous``, the hash of the line before in the file,
    and ``hash``, its own.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, chained: bool = False) -> None:
        self._path = None if path is None else Path(path)
        self._chained, self._previous, self._lost = chained, "", 0

    def add(self, line: JsonObject) -> None:
        """Write a line; add the keys of the log to it."""
        if self._lost:
            line["lost"] = self._lost
        if self._chained:
            line["previous"] = self._previous
            line["hash"] = line_hash(line)
        if self._path is not None:
            try:
                _append(self._path, f"{json.dumps(line)}\n".encode())
            except OSError as error:
                self._lost += 1
                if re.fullmatch("10*", str(self._lost)):
                    _log.warning("%s cannot be written (%s): %d lines are lost", self._path, error.strerror, self._lost)
                return
        self._lost, self._previous = 0, line.get("hash", "")


def line_hash(line: JsonObject) -> str:
    """Return the SHA-256 of a line without its own hash, as sorted JSON."""
    content = {key: value for key, value in line.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _append(path: Path, data: bytes) -> None:
    """Append ``data`` and make its folder if that has vanished; leave the file as it was where that fails (OSError)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        # Another program, or a process that was killed, may have left half a line.
        data = data if file.read(1) in (b"", b"\n") else b"\n" + data
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise
