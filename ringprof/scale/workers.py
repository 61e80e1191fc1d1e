"""Workers that run a map over ranks: this process, several processes of this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from ringprof.errors import InputError


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
        if self.jobs == 1:
            return (function(*item) for item in items)
        return self._map_in_processes(function, items)

    def _map_in_processes(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield the results of worker processes. Raises `InputError` where a process ends early."""
        from ringprof.common.process_pool import ProcessEnded, map_in_processes

        try:
            yield from map_in_processes(self.jobs, function, items)
        except ProcessEnded:
            raise InputError(
                "a process that read a trace ended, or none could begin (out of memory or processes?): try --jobs 1"
            ) from None
