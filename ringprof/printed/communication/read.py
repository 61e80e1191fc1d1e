"""Reader of communication logs: which files of a folder they are, by their first bytes, and the log of every rank."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ringprof.common.files import files_in, is_file, is_folder, leading_out, within
from ringprof.common.limits import Limits, MemoryBudget, MemoryLimitError, size_text
from ringprof.errors import InputError
from ringprof.printed.communication.flight_recorder import parse_dump
from ringprof.printed.communication.nccl_inspector import parse_inspector, with_job_ranks
from ringprof.printed.communication.operations import RankLog
from ringprof.printed.communication.pickle_values import is_pickle
from ringprof.trace.checks import RANKS_LIMIT
from ringprof.trace.columns import Notice
from ringprof.trace.formats import format_of
from ringprof.trace.kineto.byte_source import ByteSource, first_bytes
from ringprof.trace.one_run import rank_in_name

_SHARE = 24
"""Memory that a decoded log takes, as a multiple of its text."""
_OPERATION_BYTES = 1_000
_DIGITS_AT_END = re.compile(r"([0-9]{1,7})(?:\.(?:json|pkl|pickle|pt|bin|trace))?(?:\.gz)?$")
_MOST_FILES = 20_000
_NAMES = re.compile(r"([0-9]|\.(json|pkl|pickle|pt|bin|trace|log))(\.gz)?$")
"""Names of files in a folder that are opened: they end in a rank, or as dumps and logs do."""
_MARKS = (b'"pg_config"', b'"record_id"', b'"comm_lib_version"')


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


def read_comm_logs(paths: Sequence[str], limits: Limits | None = None) -> tuple[list[RankLog], list[Notice]]:
    """Read the logs of all ranks; return them by rank, with warnings.

    A JSON dump beside its pickle is not read, and neither are files of NCCL Inspector beside dumps. A damaged file is
    left out with a warning. Raises `InputError` if all are damaged, for two logs of one rank, for a dump whose name
    states no rank, and where the memory of ``limits`` does not suffice.
    """
    budget, notices = MemoryBudget(limits), []
    sources = {path: source_of(path) for path in paths}
    kinds = {source for source in sources.values() if source}
    if len(kinds) > 1:
        paths = [path for path in paths if sources[path] == "flight_recorder"]
        text = "the files of NCCL Inspector in this folder are left out: give them as paths of their own"
        notices.append(Notice("two_sources", text))
    read, damage = [], list[InputError]()
    for path in _without_copies(paths):
        rank = 0 if sources[path] == "nccl_inspector" else _rank_of(path)
        if rank is None:
            raise InputError(f"{path}: its name does not end in a rank: rename it, for instance to trace_rank_0")
        try:
            read.append(_read(path, sources[path], rank, budget))
        except MemoryLimitError:
            raise
        except InputError as error:
            damage.append(error)
            continue
        budget.take(_OPERATION_BYTES * len(read[-1].operations), path)
    if not read:
        raise damage[0]
    notices += [Notice("damaged", f"{error}: left out") for error in damage]
    if kinds == {"nccl_inspector"}:
        read, numbered = with_job_ranks(read)
        notices += numbered
    logs: dict[int, RankLog] = {}
    for log in read:
        other = logs.setdefault(log.rank, log)
        if other is not log:
            raise InputError(f"{log.path}: rank {log.rank} again, as in {other.path}: give the files of one dump")
    return [logs[rank] for rank in sorted(logs)], notices


def _without_copies(paths: Sequence[str]) -> list[str]:
    """Leave out the JSON form of a dump that lies beside its pickle, which has the places in the program, too."""
    kept = set(paths)
    return [
        path
        for path in dict.fromkeys(paths)
        if not any(
            path.removesuffix(".gz").removesuffix(".json") + suffix in kept
            for suffix in ("", ".pkl", ".pickle")
            if path.removesuffix(".gz").endswith(".json")
        )
    ]


def _read(path: str, source: str | None, rank: int, budget: MemoryBudget) -> RankLog:
    most = min(budget.left // _SHARE, budget.limits.expanded_bytes)
    data = bytearray()
    pieces = ByteSource(path, path, max(most, 1))
    for piece in pieces:
        data += piece
        if len(data) > most:
            raise MemoryLimitError(
                f"{path}: with the other files it needs more than {size_text(budget.limits.memory_bytes)} of memory;"
                " if you trust the files, raise the limit with --max-memory"
            )
    if pieces.damage:
        raise InputError(f"{path}: {pieces.damage}: copy the file again")
    if source == "nccl_inspector":
        return parse_inspector(bytes(data), path, budget)
    return parse_dump(bytes(data), path, rank, budget)


def _rank_of(path: str) -> int | None:
    """Return the rank in the name of a dump: PyTorch appends it to the prefix that the user chose."""
    digits = _DIGITS_AT_END.search(os.path.basename(path))
    rank = rank_in_name(path) if digits is None or "rank" in os.path.basename(path) else int(digits[1])
    return rank if rank is not None and rank < RANKS_LIMIT else None
