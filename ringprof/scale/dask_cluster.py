"""The workers of a Dask cluster, which read the traces where they are.

A module of its own, loaded where a scheduler is asked for: what Dask needs takes long to import.
"""

from __future__ import annotations

import logging
import re
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from ringprof.errors import MissingExtraError, RingprofError, UsageError
from ringprof.process_pool import results_in_order

PATIENCE_S = 10
"""For a scheduler to answer, and to have a worker."""
_ADDRESS = re.compile(r"(tcp|tls|ws|wss|ucx)://[^/\s]{1,500}:[0-9]{1,5}")


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
            yield from results_in_order(submit, items, lambda: 2 * max(1, sum(self._client.nthreads().values())))
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
