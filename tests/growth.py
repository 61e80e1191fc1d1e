"""Whether time grows with a text's length, or with its square: told by two lengths, on a machine however busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PART = 8
"""Of so many parts of a text, the first takes a sixty-fourth of the time where it grows with the square."""
NOISE_S = 0.1


def assert_linear(work: Callable[[Any], object], text: str | bytes, part: str | bytes | None = None) -> None:
    """The processor's time for a text, three times as long as a part of its kind lets expect at the most.

    ``part``: an eighth as long  [default: the first eighth]
    """
    part_s, whole_s = (spent_s(work, each) for each in (part or text[: len(text) // PART], text))
    assert whole_s < 3 * PART * (part_s + NOISE_S), (part_s, whole_s)


def spent_s(work: Callable[[Any], object], text: str | bytes) -> float:
    """The processor's time."""
    begin = time.process_time()
    work(text)
    return time.process_time() - begin
