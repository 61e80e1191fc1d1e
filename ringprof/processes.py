"""Further processes of this machine that carry out one function for many arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class ProcessEnded(Exception):
    """One of the processes ended before its work did, as when memory runs out."""


def mapped(jobs: int, function: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """The results in the order of ``items``, few of which are under way at a time. Raises `ProcessEnded`.

    The processes stay for the next call. When the results are no longer wanted, because of an error or a signal, they
    end with what they are doing.
    """
    # Imported here: most of what is read needs no further process.
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    pool = Parallel(n_jobs=jobs, return_as="generator", batch_size=1, pre_dispatch="2 * n_jobs")
    try:
        yield from pool(delayed(function)(*item) for item in items)
    except TerminatedWorkerError:
        raise ProcessEnded from None
    except BaseException:
        get_reusable_executor().shutdown(wait=False, kill_workers=True)
        raise
