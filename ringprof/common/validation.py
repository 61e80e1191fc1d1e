"""Validation of whole numbers from users: from environment variables, options and notebook cells."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ringprof.errors import UsageError

_WHOLE = re.compile(r"[0-9]{1,18}")


def whole(text: str) -> int | None:
    """Parse a whole number of at most 18 plain digits; None for ``1e3``, ``1_000``, ``²``, ``-1`` or 5,000 digits.

    Python's ``int`` accepts ``1_000`` and raises an error for 5,000 digits; ``str.isdigit`` accepts ``²``.
    """
    return int(text) if _WHOLE.fullmatch(text) else None


def refuse_below_one(named: Mapping[str, int | None]) -> None:
    """Raise `UsageError` for the first number that is neither None nor at least 1."""
    for name, value in named.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
