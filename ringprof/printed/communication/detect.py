"""Detection of communication logs by their first bytes: which files of a folder they are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ringprof.common.files import files_in, is_file, is_folder, leading_out, within
from ringprof.errors import InputError
from ringprof.trace.formats import format_of
from ringprof.trace.kineto.byte_source import first_bytes

_MOST_FILES = 20_000
_NAMES = re.compile(r"([0-9]|\.(json|pkl|pickle|pt|bin|trace|log))(\.gz)?$")
"""Names of files in a folder that are opened: they end in a rank, or as dumps and logs do."""
_MARKS = (b'"pg_config"', b'"record_id"', b'"comm_lib_version"')


def is_pickle(head: bytes) -> bool:
    """Return whether the first bytes of a file begin a pickle of protocol 2 to 5: a dictionary or a frame."""
    return len(head) > 3 and head[0] == 0x80 and 2 <= head[1] <= 5 and (head[2] == 0x7D or head[2] == 0x95)


def is_flight_recorder(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a Flight Recorder dump, a pickle or JSON."""
    if is_pickle(head):
        return any(key in head for key in (b"pg_config", b"profiling_name", b"nccl_version", b"pg_status"))
    return head.lstrip()[:1] == b"{" and b'"traceEvents"' not in head and sum(mark in head for mark in _MARKS) >= 1


def is_inspector(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of NCCL Inspector's JSON lines."""
    return head.lstrip()[:1] == b"{" and b'"inspector_output_format_version"' in head[:4096]


def source_of(path: str) -> str | None:
    """Return the kind of communication log in a file, ``flight_recorder`` or ``nccl_inspector``.

    Returns None for other files, and for files that cannot be read.
    """
    try:
        head = first_bytes(path, path)
    except InputError:
        return None
    if is_inspector(head):
        return "nccl_inspector"
    return "flight_recorder" if format_of(head) is None and is_flight_recorder(head) else None


def find_comm_logs(paths: Sequence[str]) -> list[str]:
    """Return the paths of communication logs: those in one folder, or the given files if all are logs.

    Returns an empty list for a folder that has none or also holds a run or a trace, and if a given file is not a log.
    """
    if len(paths) == 1 and is_folder(paths[0]):
        folder = paths[0]
        if is_file(within(folder, "run.json")):
            return []
        prefix = os.path.join(folder, "")
        files = [file for file in sorted(files_in(folder)) if _NAMES.search(file)][:_MOST_FILES]
        unsafe = dict(leading_out(within(folder, "run.json"), (file.removeprefix(prefix) for file in files)))
        logs = []
        for file in files:
            if file.removeprefix(prefix) in unsafe:
                continue
            if source_of(file) is not None:
                logs.append(file)
            elif _is_trace(file):
                return []
        return logs
    return [*paths] if paths and all(is_file(path) and source_of(path) is not None for path in paths) else []


def _is_trace(path: str) -> bool:
    try:
        return format_of(first_bytes(path, path)) is not None
    except InputError:
        return False
