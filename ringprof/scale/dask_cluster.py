"""Workers of a Dask cluster, which read the traces where they are stored.

A separate module, loaded only where a scheduler is given: importing Dask takes long.
"""

from __future__ import annotations

import logging
import re
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from ringprof.common.process_pool import results_in_order
from ringprof.errors import MissingExtraError, RingprofError, UsageError, install_command

PATIENCE_S = 10
"""Seconds to wait for a scheduler to answer and to have a worker."""
_ADDRESS = re.compile(r"(tcp|tls|ws|wss|ucx)://[^/\s]{1,500}:[0-9]{1,5}")


class DaskCluster:
    """Workers of an existing Dask cluster, which must see the same files and have ringprof installed."""

    def __init__(self, address: str) -> None:
        """Connect to the scheduler at ``address``.

        Raises `MissingExtraError` without Dask, `UsageError` where no worker with this version of ringprof is found.
        """
        try:
            import distributed
        except ImportError:
            raise MissingExtraError(f"--scheduler needs Dask: {install_command('cluster')}") from None
        self._address = address
        if not _ADDRESS.fullmatch(address):
            raise self._usage_error("an address is tcp://HOST:PORT (or tls, ws, wss, ucx)")
        client: Any = distributed.Client
        try:
            self._client = client(address, timeout=f"{PATIENCE_S}s", set_as_default=False)
        except (OSError, ValueError) as error:
            raise self._usage_error(f"no Dask scheduler answers there ({_first_line(error)})") from None
        try:
            self._check_workers()
        except BaseException:
            self.close()
            raise

    def _check_workers(self) -> None:
        """Raise `UsageError` without usable workers: Dask itself would wait for them for ever."""
        try:
            self._client.wait_for_workers(1, timeout=PATIENCE_S)
        except TimeoutError:
            raise self._usage_error("the scheduler has no workers") from None
        specs = self._client.run(find_spec, __name__, on_error="return")
        for worker, spec in specs.items():
            if not isinstance(spec, ModuleSpec):
                raise self._usage_error(f"worker {worker} cannot import this version of ringprof")

    def _usage_error(self, problem: str) -> UsageError:
        """Build an error that names the scheduler."""
        return UsageError(f"--scheduler {self._address}: {problem}")

    def map(self, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield the results in order; a failure of the cluster becomes `UsageError`."""

        def submit(*item: Any) -> Any:
            # Not pure: Dask would return the remembered result of a trace that has been rewritten since.
            return self._client.submit(function, *item, pure=False)

        try:
            yield from results_in_order(submit, items, lambda: 2 * max(1, sum(self._client.nthreads().values())))
        except RingprofError:
            raise
        except (Exception, CancelledError) as error:
            # A cluster can fail in many ways: its scheduler ends, a worker is killed, the network fails.
            raise self._usage_error(f"the work was not done ({_first_line(error)})") from None

    def close(self) -> None:
        """Disconnect from the cluster, which drops the work that it still does for this client."""
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        self._client.close(timeout=PATIENCE_S)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
