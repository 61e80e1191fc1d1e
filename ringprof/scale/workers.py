"""Workers that run a map over ranks: this process, several processes of this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from ringprof.errors import InputError
from ringprof.run import Run


class Workers(Protocol):
    """Maps a function over many arguments."""

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield the results in the order of ``items``; only a few items are in progress at a time."""


class LocalProcesses:
    """Processes of this machine: ``jobs``, or as many as it has CPUs. A single job runs in this process."""

    def __init__(self, jobs: int | None = None) -> None:
        if jobs is None:
            # Imported lazily, here and below: few reports need processes, and the import is a tenth of the start time.
            from ringprof.common.process_pool import cpu_count

            jobs = cpu_count()
        self.jobs = jobs

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield the results in order. Raises `InputError` where a worker process ends early."""
        if self.jobs == 1:
            yield from (function(*item) for item in items)
            return
        from ringprof.common.process_pool import ProcessEnded, map_in_processes

        try:
            yield from map_in_processes(self.jobs, function, items)
        except ProcessEnded:
            raise InputError(
                "a process that read a trace ended, or none could begin (out of memory or processes?): try --jobs 1"
            ) from None


Notify = Callable[[str, int, int], None]
"""Progress callback: (name of the current step, completed items, total items)."""


def ignore_progress(step: str, completed: int, total: int) -> None:
    """Ignore progress notifications."""


class TraceSet(msgspec.Struct, frozen=True):
    """Paths, ranks and display names of a run's traces."""

    paths: Sequence[str]
    ranks: Sequence[int | None]
    """Rank of each trace, where the run names it."""
    shown: Sequence[str]
    """Display path of each trace."""
    run: Run | None = None
    run_path: str | None = None
    in_folder: bool = False
    """Whether the traces were found in a folder: then an unreadable trace is left out, like an unreadable trace of a
    run."""
    left_out: Sequence[InputError] = ()
    """Errors of traces that were left out earlier."""
