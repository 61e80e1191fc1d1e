"""Reading of several ranks' traces, in parallel where that is faster; sorts them and checks that they form one run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ringprof.common.files import read_bytes, size_of
from ringprof.common.limits import Limits, MemoryBudget, MemoryLimitError
from ringprof.errors import InputError
from ringprof.trace.columns import CommRecord, Trace
from ringprof.trace.formats import format_at
from ringprof.trace.kineto.byte_source import is_compressed
from ringprof.trace.kineto.tracks import by_device
from ringprof.trace.memory import take_trace
from ringprof.trace.one_run import checked_facts, facts_of, rank_sort_key

WORTH_A_PROCESS = 100 << 20
"""Total bytes of JSON from which reading in several processes is faster than in one."""

_LEAST_SHARE = 0.01
"""Share of the busiest device's time from which on a device counts as used."""

COMPRESSION = 15
"""Typical ratio of the size of a trace to the size of its compressed file."""


def read_traces(
    paths: Sequence[str | os.PathLike[str]], *, jobs: int | None = None, limits: Limits | None = None,
    ranks: Sequence[int] | None = None, in_folder: bool = False, left_out: Sequence[InputError] = (),
) -> list[Trace]:  # fmt: skip
    """Read the traces of several ranks, sorted by rank.

    ``jobs``: number of reading processes; by default the number of CPUs if the files are large, else one.
    ``ranks``: the rank of each path, for a run whose ``run.json`` lists its traces. Without it, a trace that does not
    name its rank gets the one of its position, if no other trace names its rank either.
    ``in_folder``: whether the paths were found in a folder.
    ``left_out``: errors of traces that the caller has already left out.

    An unreadable trace is left out with a warning if ``ranks`` or ``in_folder`` is given and another one is readable.
    Several traces of one rank stay in the list, and so do those of different runs, with warnings.
    Raises `InputError` and `MissingExtraError` as `read_file` does, `MemoryLimitError` if memory does not suffice.
    """
    names = [os.fspath(path) for path in paths]
    if ranks is None and not in_folder:
        return checked_traces(
            [trace for traces in _read_all(read_file, names, jobs, limits) for trace in traces], left_out
        )
    results = _read_all(try_file, names, jobs, limits)
    problems = [result for result in results if isinstance(result, InputError)]
    fatal = [result for result in problems if isinstance(result, MemoryLimitError) or len(problems) == len(results)]
    if fatal:
        raise fatal[0]
    read = [(index, trace) for index, result in enumerate(results) if isinstance(result, list) for trace in result]
    return checked_traces(
        [trace if ranks is None else msgspec.structs.replace(trace, rank=ranks[index]) for index, trace in read],
        [*left_out, *problems],
    )


def read_file(name: str, budget: MemoryBudget) -> list[Trace]:
    """Read the traces in a file: one per rank that the file holds. Raises `InputError`, `MissingExtraError`."""
    return format_at(name).read(name, budget)


def try_file(name: str, budget: MemoryBudget) -> list[Trace] | InputError:
    """Read the traces in a file; return the error instead of raising it if the file cannot be read."""
    try:
        return read_file(name, budget)
    except InputError as error:
        return error


def checked_traces(traces: Sequence[Trace], problems: Sequence[InputError] = ()) -> list[Trace]:
    """Return the traces sorted by rank, with ranks and warnings assigned; one warning lists the unreadable ones.

    A single trace without a rank, of a process that drives several devices, becomes one trace per device.
    """
    if len(traces) == 1 and traces[0].rank is None and traces[0].world_size in (None, 1):
        traces = by_device(traces[0], least_share=_LEAST_SHARE)
    facts = checked_facts([facts_of(trace) for trace in traces], problems)
    traces_per_file = Counter(trace.path for trace in traces if trace.rank is None)
    first_rank: dict[str, int] = {}
    checked = []
    for trace, trace_facts in zip(traces, facts, strict=True):
        # A file with several ranks numbers them from 0; shift them by the first rank of the file.
        offset = first_rank.setdefault(trace.path, trace_facts.rank or 0) if traces_per_file[trace.path] > 1 else 0
        records = [_shift_ranks(offset, record) for record in trace.collectives] if offset else trace.collectives
        checked.append(
            msgspec.structs.replace(
                trace, rank=trace_facts.rank, warnings=list(trace_facts.warnings), collectives=records
            )
        )
    reported = [index for index, trace_facts in enumerate(facts) if not trace_facts.other_cycle]
    return [checked[index] for index in sorted(reported, key=lambda index: rank_sort_key(facts[index]))]


def _shift_ranks(offset: int, record: CommRecord) -> CommRecord:
    """Add ``offset`` to all global ranks of a communication record."""

    def global_rank(rank: int | None) -> int | None:
        return None if rank is None else offset + rank

    return msgspec.structs.replace(
        record,
        group_ranks=record.group_ranks and tuple(offset + rank for rank in record.group_ranks),
        source_rank=global_rank(record.source_rank),
        destination_rank=global_rank(record.destination_rank),
    )


# --- other processes ----------------------------------------------------------------------------------


def json_bytes(names: Sequence[str]) -> int:
    """Estimate the decompressed bytes of JSON in the files; a file that cannot be opened counts 0."""

    def file_bytes(name: str) -> int:
        try:
            return size_of(name) * (COMPRESSION if is_compressed(read_bytes(name, 4)) else 1)
        except InputError:
            return 0

    return sum(file_bytes(name) for name in names)


_Read = TypeVar("_Read")


def _read_all(
    read: Callable[[str, MemoryBudget], _Read], names: Sequence[str], jobs: int | None, limits: Limits | None
) -> list[_Read]:
    """Read each file with ``read``, in several processes if that is faster."""
    budget = MemoryBudget(limits)
    if len(names) < 2 or jobs == 1 or (jobs is None and json_bytes(names) < WORTH_A_PROCESS):
        return [read(name, budget) for name in names]
    from ringprof.common.process_pool import ProcessEnded, cpu_count, map_in_processes

    jobs = min(jobs or cpu_count(), len(names))
    results = []
    try:
        for result in map_in_processes(jobs, read, ((name, MemoryBudget(limits)) for name in names)):
            results.append(result)
            for trace in result if isinstance(result, list) else []:
                take_trace(trace, budget)
    except ProcessEnded:
        raise InputError(
            f"{names[0]} and others: a process that read them ended, or none could begin (out of memory or processes?)"
        ) from None
    return results
