"""Further processes of this machine that carry out one function for many arguments."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any


class ProcessEnded(Exception):
    """One of the processes ended before its work did, as when memory runs out."""


def mapped(jobs: int, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """The results in the order of ``items``, few of which are under way at a time. Raises `ProcessEnded`.

    The processes stay a while, for the next call.
    """
    # Imported here: most of what is read needs no further process.
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import BrokenProcessPool

    executor = get_reusable_executor(max_workers=jobs)
    try:
        yield from in_order(lambda *item: executor.submit(function, *item), items, lambda: 2 * jobs)
    except BrokenProcessPool:
        raise ProcessEnded from None


def in_order(submit: Callable[..., Any], items: Iterable[tuple[Any, ...]], most: Callable[[], int]) -> Iterator[Any]:
    """The results of what ``submit`` begins, in order; at most ``most()`` are under way, asked anew each time."""
    waiting = iter(items)
    running: deque[Any] = deque()
    try:
        while True:
            running.extend(submit(*item) for item in islice(waiting, max(0, most() - len(running))))
            if not running:
                return
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def end_all() -> None:
    """End the processes with what they are doing; for a process that ends at once."""
    if "joblib" not in sys.modules:
        return
    from joblib.externals.loky import get_reusable_executor

    # What breaks with them is not worth a word.
    logging.disable()
    get_reusable_executor().shutdown(wait=True, kill_workers=True)
