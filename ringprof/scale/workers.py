"""Where a map over ranks is carried out: in this process, in several of this machine, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from ringprof.errors import InputError


class Workers(Protocol):
    """Carries out a function for many arguments."""

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """The results in the order of ``items``, of which only a few are under way at a time."""


class LocalProcesses:
    """As many processes of this machine as it has CPUs, or ``jobs``; one is this one."""

    def __init__(self, jobs: int | None = None) -> None:
        if jobs is None:
            # Imported here and below: few reports need more processes, and this is a tenth of the time to start.
            from ringprof.process_pool import cpu_count

            jobs = cpu_count()
        self.jobs = jobs

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        if self.jobs == 1:
            return (function(*item) for item in items)
        return self._elsewhere(function, items)

    def _elsewhere(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        from ringprof.process_pool import ProcessEnded, map_in_processes

        try:
            yield from map_in_processes(self.jobs, function, items)
        except ProcessEnded:
            raise InputError(
                "a process that read a trace ended, or none could begin (out of memory or processes?): try --jobs 1"
            ) from None
