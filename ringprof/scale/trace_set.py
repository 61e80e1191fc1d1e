"""What a run is read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ringprof.errors import InputError
from ringprof.run import Run

Notify = Callable[[str, int, int], None]
"""Told what is being done, and how much of how many is done."""


def unheard(what: str, done: int, of: int) -> None:
    """Where nobody looks on."""


class TraceSet(msgspec.Struct, frozen=True):
    """Paths, ranks and display names of a run's traces."""

    paths: Sequence[str]
    ranks: Sequence[int | None]
    """The rank of each where the run names it."""
    shown: Sequence[str]
    """The path of each for people."""
    run: Run | None = None
    run_path: str | None = None
    in_folder: bool = False
    """Whether they were found in a folder: one that cannot be read is left out, as one of a run."""
    left_out: Sequence[InputError] = ()
    """Why others are left out already."""
