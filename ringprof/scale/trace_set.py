"""Input traces of one run, and the callback for progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ringprof.errors import InputError
from ringprof.run import Run

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
