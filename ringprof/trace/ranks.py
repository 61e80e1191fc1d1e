"""Many ranks' traces: read side by side where that pays, put in order, checked to be one run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ringprof.errors import InputError
from ringprof.files import read_bytes, size_of
from ringprof.limits import Limits, MemoryBudget, MemoryLimitError
from ringprof.trace.columns import CommRecord, Trace
from ringprof.trace.formats import format_at
from ringprof.trace.kineto.byte_source import is_packed
from ringprof.trace.memory import take_trace
from ringprof.trace.one_run import checked_facts, facts_of, order

WORTH_A_PROCESS = 100 << 20
"""Bytes of JSON, all files together, from which further processes read faster than this one alone."""

COMPRESSION = 15
"""How many times larger than its compressed file a trace is, about."""


def read_traces(
    paths: Sequence[str | os.PathLike[str]],
    *,
    jobs: int | None = None,
    limits: Limits | None = None,
    ranks: Sequence[int] | None = None,
    in_folder: bool = False,
    left_out: Sequence[InputError] = (),
) -> list[Trace]:
    """Read the traces of several ranks, sorted by rank.

    ``jobs``: processes to read in, by default as many as there are CPUs when the files are large. Where no
    trace names its rank, the order of the paths does. Several traces of one rank stay in the list, and so do those of
    different runs, whose warnings say so. Raises as `read_file` does, `MemoryLimitError` where memory may not hold all.

    ``ranks``: those of a run that names its traces. Such a trace, or one ``in_folder``, is left out with a warning
    where it cannot be read, as long as there is one that can; ``left_out``: others that already are.
    """
    names = [os.fspath(path) for path in paths]
    if ranks is None and not in_folder:
        return _checked([trace for traces in _read_all(read_file, names, jobs, limits) for trace in traces], left_out)
    found = _read_all(try_file, names, jobs, limits)
    problems = [one for one in found if isinstance(one, InputError)]
    fatal = [one for one in problems if isinstance(one, MemoryLimitError) or len(problems) == len(found)]
    if fatal:
        raise fatal[0]
    read = [(at, trace) for at, one in enumerate(found) if isinstance(one, list) for trace in one]
    return _checked(
        [trace if ranks is None else msgspec.structs.replace(trace, rank=ranks[at]) for at, trace in read],
        [*left_out, *problems],
    )


def read_file(name: str, budget: MemoryBudget) -> list[Trace]:
    """The traces in a file: one, or of every rank that it holds. Raises `InputError`, `MissingExtraError`."""
    return format_at(name).read(name, budget)


def try_file(name: str, budget: MemoryBudget) -> list[Trace] | InputError:
    """As `read_file`, but returns the error where it cannot be read."""
    try:
        return read_file(name, budget)
    except InputError as error:
        return error


def _checked(traces: Sequence[Trace], problems: Sequence[InputError] = ()) -> list[Trace]:
    """The traces sorted by rank, each with warnings about its place among the others, one about those not read."""
    facts = checked_facts([facts_of(trace) for trace in traces], problems)
    sharing = Counter(trace.path for trace in traces if trace.rank is None)
    first: dict[str, int] = {}
    placed = []
    for trace, one in zip(traces, facts, strict=True):
        # A file that holds several ranks counts them from its own first one.
        offset = first.setdefault(trace.path, one.rank or 0) if sharing[trace.path] > 1 else 0
        records = [_counted_from(offset, record) for record in trace.collectives] if offset else trace.collectives
        placed.append(msgspec.structs.replace(trace, rank=one.rank, warnings=list(one.warnings), collectives=records))
    reported = [place for place, one in enumerate(facts) if not one.other_cycle]
    return [placed[place] for place in sorted(reported, key=lambda place: order(facts[place]))]


def _counted_from(first: int, record: CommRecord) -> CommRecord:
    def global_rank(rank: int | None) -> int | None:
        return None if rank is None else first + rank

    return msgspec.structs.replace(
        record,
        group_ranks=record.group_ranks and tuple(first + rank for rank in record.group_ranks),
        source_rank=global_rank(record.source_rank),
        destination_rank=global_rank(record.destination_rank),
    )


# --- other processes ----------------------------------------------------------------------------------


def json_bytes(names: Sequence[str]) -> int:
    """About how much JSON the files hold; 0 for those that cannot be opened, which reading will report."""

    def of_one(name: str) -> int:
        try:
            return size_of(name) * (COMPRESSION if is_packed(read_bytes(name, 4)) else 1)
        except InputError:
            return 0

    return sum(of_one(name) for name in names)


_Read = TypeVar("_Read")


def _read_all(
    read: Callable[[str, MemoryBudget], _Read], names: Sequence[str], jobs: int | None, limits: Limits | None
) -> list[_Read]:
    """Each file's traces, in processes of their own where that pays."""
    budget = MemoryBudget(limits)
    if len(names) < 2 or jobs == 1 or (jobs is None and json_bytes(names) < WORTH_A_PROCESS):
        return [read(name, budget) for name in names]
    from ringprof.process_pool import ProcessEnded, cpu_count, map_in_processes

    jobs = min(jobs or cpu_count(), len(names))
    found = []
    try:
        for one in map_in_processes(jobs, read, ((name, MemoryBudget(limits)) for name in names)):
            found.append(one)
            for trace in one if isinstance(one, list) else []:
                take_trace(trace, budget)
    except ProcessEnded:
        raise InputError(
            f"{names[0]} and others: a process that read them ended, or none could begin (out of memory or processes?)"
        ) from None
    return found
