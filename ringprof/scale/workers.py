"""Where a map over ranks is carried out: in this process, in several of this machine, or on a Dask cluster."""

from __future__ import annotations

import logging
import re
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, Protocol

from ringprof.errors import InputError, MissingExtraError, RingprofError, UsageError
from ringprof.processes import ProcessEnded, cpu_count, in_order, mapped

PATIENCE_S = 10
"""For a scheduler to answer, and to have a worker."""
_ADDRESS = re.compile(r"(tcp|tls|ws|wss|ucx)://[^/\s]{1,500}:\d{1,5}")


class Workers(Protocol):
    """Carries out a function for many arguments."""

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """The results in the order of ``items``, of which only a few are under way at a time."""


class LocalProcesses:
    """As many processes of this machine as it has CPUs, or ``jobs``; one is this one."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or cpu_count()

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        if self.jobs == 1:
            return (function(*item) for item in items)
        return self._elsewhere(function, items)

    def _elsewhere(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        try:
            yield from mapped(self.jobs, function, items)
        except ProcessEnded:
            raise InputError("a process that read a trace ended (out of memory?): try --jobs 1") from None


class DaskCluster:
    """The workers of a Dask cluster that exists, which must see the same files and have ringprof installed."""

    def __init__(self, address: str) -> None:
        """Raises `MissingExtraError` without Dask, `UsageError` where no workers with this ringprof are to be had."""
        try:
            import distributed
        except ImportError:
            raise MissingExtraError("--scheduler needs Dask: pip install 'ringprof[cluster]'") from None
        self._address = address
        if not _ADDRESS.fullmatch(address):
            raise self._trouble("an address is tcp://HOST:PORT (or tls, ws, wss, ucx)")
        client: Any = distributed.Client
        try:
            self._client = client(address, timeout=f"{PATIENCE_S}s", set_as_default=False)
        except (OSError, ValueError) as error:
            raise self._trouble(f"no Dask scheduler answers there ({_first_line(error)})") from None
        try:
            self._check_workers()
        except BaseException:
            self.close()
            raise

    def _check_workers(self) -> None:
        """Dask itself would wait for workers for ever, and for those that cannot do the work."""
        try:
            self._client.wait_for_workers(1, timeout=PATIENCE_S)
        except TimeoutError:
            raise self._trouble("the scheduler has no workers") from None
        found = self._client.run(find_spec, __name__, on_error="return")
        for worker, spec in found.items():
            if not isinstance(spec, ModuleSpec):
                raise self._trouble(f"worker {worker} cannot import this version of ringprof")

    def _trouble(self, what: str) -> UsageError:
        return UsageError(f"--scheduler {self._address}: {what}")

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        def submit(*item: Any) -> Any:
            # Pure by default: the result of a trace that has since been written again would be remembered.
            return self._client.submit(function, *item, pure=False)

        try:
            yield from in_order(submit, items, lambda: 2 * max(1, sum(self._client.nthreads().values())))
        except RingprofError:
            raise
        except (Exception, CancelledError) as error:
            # A cluster has many ways to go: its scheduler ends, a worker is killed, the network fails.
            raise self._trouble(f"the work was not done ({_first_line(error)})") from None

    def close(self) -> None:
        """Leave the cluster; what it still computes for this client is dropped."""
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        self._client.close(timeout=PATIENCE_S)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
