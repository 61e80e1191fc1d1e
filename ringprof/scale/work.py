"""Where a map over ranks is carried out: in this process, in several of this machine, or on a Dask cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from ringprof.errors import InputError, MissingExtraError, UsageError
from ringprof.processes import ProcessEnded, mapped
from ringprof.trace.ranks import cpus


class Work(Protocol):
    """Carries out a function for many arguments."""

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """The results in the order of ``items``, of which only a few are under way at a time."""


class Processes:
    """As many processes of this machine as it has CPUs, or ``jobs``; one is this one."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or cpus()

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        if self.jobs == 1:
            return (function(*item) for item in items)
        return self._elsewhere(function, items)

    def _elsewhere(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        try:
            yield from mapped(self.jobs, function, items)
        except ProcessEnded:
            raise InputError("a process that read a trace ended (out of memory?): try --jobs 1") from None


class Cluster:
    """The workers of a Dask cluster that exists, which must see the same files and have ringprof installed."""

    def __init__(self, address: str) -> None:
        """Raises `MissingExtraError` without Dask, `UsageError` where the scheduler does not answer."""
        try:
            import distributed
        except ImportError:
            raise MissingExtraError("--scheduler needs Dask: pip install 'ringprof[cluster]'") from None
        try:
            client: Any = distributed.Client
            self._client = client(address, timeout="10s", set_as_default=False)
        except (OSError, ValueError) as error:
            raise UsageError(f"--scheduler {address}: no Dask scheduler answers there ({_first_line(error)})") from None

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        waiting = iter(items)
        slots = 2 * max(1, sum(self._client.nthreads().values()))
        running: deque[Any] = deque()
        while True:
            fresh = islice(waiting, slots - len(running))
            # Pure by default: the result of a trace that has since been written again would be remembered.
            running.extend(self._client.submit(function, *item, pure=False) for item in fresh)
            if not running:
                return
            yield running.popleft().result()

    def close(self) -> None:
        """Leave the cluster; what it still computes for this client is dropped."""
        self._client.close()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
