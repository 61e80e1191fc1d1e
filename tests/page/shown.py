"""Check of a number in a cell: rounded correctly, with three or four significant digits."""

from __future__ import annotations

_LEAST = 5e-7
"""Numbers below it may be shown as 0."""


def shows(text: str, value: float | None, digits: int = 4) -> bool:
    """Return whether a cell's text is a number rounded to so many significant digits, or a dash for None."""
    if value is None:
        return text == "-"
    shown = float(text.replace(",", ""))
    within = 0.5001 * 10 ** (1 - digits) * abs(value) if abs(value) < 10**digits else 0.5001
    figures = text.replace(",", "").replace(".", "").lstrip("-0")
    whole = len(text.replace(",", "").lstrip("-").partition(".")[0])
    return abs(shown - value) <= max(within, _LEAST) and len(figures) <= max(digits, whole) and "e" not in text
