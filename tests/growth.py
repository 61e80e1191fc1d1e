"""Check that time grows linearly with the length of a text, by two lengths, even on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PART = 8
"""Number of parts of a text; with quadratic growth, the first part takes a sixty-fourth of the time."""
NOISE_S = 0.1


def assert_linear(work: Callable[[Any], object], text: Any, part: Any = None) -> None:
    """Assert that a text, or another input, takes at most three times the CPU time that a part of it predicts.

    ``part`` is a similar input, an eighth as long; the default is the first eighth.
    """
    part_s, whole_s = (spent_s(work, sample) for sample in (part or text[: len(text) // PART], text))
    assert whole_s < 3 * PART * (part_s + NOISE_S), (part_s, whole_s)


def spent_s(work: Callable[[Any], object], text: Any) -> float:
    """Return the CPU time of ``work(text)`` in seconds."""
    begin = time.process_time()
    work(text)
    return time.process_time() - begin
