"""Many ranks' traces: read side by side where that pays, put in order, checked to be one run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ringprof.errors import InputError
from ringprof.files import read_bytes, size_of
from ringprof.processes import ProcessEnded, cpu_count, mapped
from ringprof.trace.columns import Trace
from ringprof.trace.heads import checked_heads, head_of, order
from ringprof.trace.kineto import read_trace
from ringprof.trace.nsys import SQLITE_MAGIC, read_nsys
from ringprof.trace.reduced import MAGIC, read_reduced
from ringprof.trace.stream import GZIP_MAGIC, ZSTD_MAGIC

WORTH_A_PROCESS = 100 << 20
"""Bytes of JSON, all files together, from which further processes read faster than this one alone."""

COMPRESSION = 15
"""How many times larger than its compressed file a trace is, about."""


def read_traces(
    paths: Sequence[str | os.PathLike[str]],
    *,
    jobs: int | None = None,
    limit_bytes: int | None = None,
    ranks: Sequence[int] | None = None,
) -> list[Trace]:
    """Read the traces of several ranks, sorted by rank.

    ``jobs``: processes to read in, by default as many as there are CPUs when the files are large. Where no
    trace names its rank, the order of the paths does. Several traces of one rank, or of different runs, stay
    in the list; their warnings say so. Raises as `read_trace` does.

    ``ranks``: those of a run that names its traces. Such a trace is left out with a warning where it cannot be read,
    as long as there is one that can.
    """
    given = [os.fspath(path) for path in paths]
    if ranks is not None:
        return _read_of_run(given, ranks, jobs, limit_bytes)
    exports = [name for name in given if starts_with(name, SQLITE_MAGIC)]
    names = [name for name in given if name not in exports]
    traces = _read_all(read_one, names, jobs, limit_bytes)
    return checked([*traces, *(trace for name in exports for trace in read_nsys(name))])


def _read_of_run(names: Sequence[str], ranks: Sequence[int], jobs: int | None, limit_bytes: int | None) -> list[Trace]:
    found = _read_all(try_one, names, jobs, limit_bytes)
    problems = [one for one in found if isinstance(one, InputError)]
    if len(problems) == len(found):
        raise problems[0]
    traces = [replace(one, rank=rank) for one, rank in zip(found, ranks, strict=True) if isinstance(one, Trace)]
    return checked(traces, problems)


def read_one(name: str, limit_bytes: int | None = None) -> Trace:
    """Read one rank's trace, as the profiler wrote it or reduced."""
    if starts_with(name, MAGIC):
        return read_reduced(name, limit_bytes=limit_bytes)
    return read_trace(name, limit_bytes=limit_bytes)


def try_one(name: str, limit_bytes: int | None = None) -> Trace | InputError:
    """As `read_one`, but returns the error where it cannot be read."""
    try:
        return read_one(name, limit_bytes)
    except InputError as error:
        return error


def checked(traces: Sequence[Trace], problems: Sequence[InputError] = ()) -> list[Trace]:
    """The traces sorted by rank, each with warnings about its place among the others, one about those not read."""
    heads = checked_heads([head_of(trace) for trace in traces], problems)
    placed = [
        replace(trace, rank=head.rank, warnings=list(head.warnings)) for trace, head in zip(traces, heads, strict=True)
    ]
    return [placed[at] for at in sorted(range(len(heads)), key=lambda at: order(heads[at]))]


def starts_with(name: str, magic: bytes) -> bool:
    """Whether a file does; not for one that cannot be opened, which reading will report."""
    try:
        return read_bytes(name, len(magic)) == magic
    except InputError:
        return False


# --- other processes ----------------------------------------------------------------------------------


def json_bytes(names: Sequence[str]) -> int:
    """About how much JSON the files hold; 0 for those that cannot be opened, which reading will report."""
    total = 0
    for name in names:
        try:
            magic, size = read_bytes(name, 4), size_of(name)
        except InputError:
            continue
        total += size * (COMPRESSION if magic.startswith(GZIP_MAGIC) or magic == ZSTD_MAGIC else 1)
    return total


_Read = TypeVar("_Read")


def _read_all(
    read: Callable[[str, int | None], _Read], names: Sequence[str], jobs: int | None, limit_bytes: int | None
) -> list[_Read]:
    """Each file's trace, in processes of their own where that pays."""
    if jobs is None:
        jobs = cpu_count() if json_bytes(names) >= WORTH_A_PROCESS else 1
    jobs = min(jobs, max(len(names), 1))
    if jobs == 1:
        return [read(name, limit_bytes) for name in names]
    try:
        return list(mapped(jobs, read, ((name, limit_bytes) for name in names)))
    except ProcessEnded:
        raise InputError(f"{names[0]} and others: a process that read them ended (out of memory?)") from None
