"""Whole numbers that come from outside: from a variable, an option, a cell."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ringprof.errors import UsageError

_WHOLE = re.compile(r"[0-9]{1,18}")


def whole(text: str) -> int | None:
    """A whole number in plain digits that 64 bits hold; None for ``1e3``, ``1_000``, ``²``, ``-1`` or 5,000 digits.

    Python's own ``int`` takes the second, ``str.isdigit`` the third, and the last raises an error in ``int``.
    """
    return int(text) if _WHOLE.fullmatch(text) else None


def refuse_below_one(named: Mapping[str, int | None]) -> None:
    """Raises `UsageError` of the first number that is given and not at least 1."""
    for name, value in named.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
