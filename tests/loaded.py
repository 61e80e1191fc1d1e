"""Loads runs and traces, with the type `Analysis`."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import ringprof
from ringprof.results.analysis import Analysis
from tests.paths import DATA, TRACES


def analysis(path: str | os.PathLike[str], **options: Any) -> Analysis:
    """Load a run or traces, not a printed kernel table, with `ringprof.load`; committed ones once per process."""
    if not options and Path(path).parent in (TRACES, DATA):
        return _committed(Path(path))
    loaded = ringprof.load(path, **options)
    assert isinstance(loaded, Analysis)
    return loaded


@cache
def _committed(folder: Path) -> Analysis:
    loaded = ringprof.load(folder)
    assert isinstance(loaded, Analysis)
    return loaded
