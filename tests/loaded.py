"""Runs and traces as the library loads them, typed as what they are."""

from __future__ import annotations

import os
from typing import Any

import ringprof
from ringprof.api import Analysis


def analysis(path: str | os.PathLike[str], **how: Any) -> Analysis:
    """`ringprof.load` of what is a run or traces, not a printed table."""
    loaded = ringprof.load(path, **how)
    assert isinstance(loaded, Analysis)
    return loaded
