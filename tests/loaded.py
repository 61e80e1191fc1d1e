"""Loads runs and traces, with the type `Analysis`."""

from __future__ import annotations

import os
from typing import Any

import ringprof
from ringprof.results.analysis import Analysis


def analysis(path: str | os.PathLike[str], **options: Any) -> Analysis:
    """Load a run or traces, not a printed kernel table, with `ringprof.load`."""
    loaded = ringprof.load(path, **options)
    assert isinstance(loaded, Analysis)
    return loaded
