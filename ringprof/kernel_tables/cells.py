"""The cells of a row of torch's table: what each column may hold, and numbers as integers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ringprof.kernel_tables.layout import GAP, DashedRule

_DECIMAL = r"-?[0-9]{1,18}(?:\.[0-9]{1,12})?"
_SHAPES = {
    "time": rf"{_DECIMAL}(?:ns|us|ms|s)",
    "share": rf"{_DECIMAL}%|nan|NaN|0|-?inf%?",
    "count": r"-?[0-9]{1,18}",
    "memory": rf"{_DECIMAL} ?(?:[KMGTP]i?)?[bB]",
}
_TIME = re.compile(r"(-?)([0-9]{1,18})(?:\.([0-9]{1,12}))?(ns|us|ms|s)")
_SHARE = re.compile(r"(-?[0-9]{1,18})(?:\.([0-9]{1,12}))?%?")

_MOST_SHIFT = 80
"""How far a cell that is wider than its column can push the numbers behind it: a cut name is about 55 wide."""

CALLS_TITLES = ("# of Calls", "Number of Calls", "Calls")
"""Titles of the column that counts calls."""
UNIT_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "μs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
"""Nanoseconds in each unit that tables print; the micro sign and the Greek letter are two characters."""


def _shape_of(title: str) -> str | None:
    """What the cells of a column of numbers look like; None for a column of text."""
    if title in CALLS_TITLES or title == "Node ID":
        return _SHAPES["count"]
    if title.endswith("%"):
        return _SHAPES["share"]
    if title.endswith("Mem"):
        return _SHAPES["memory"]
    if title in ("Name", "Overload Name", "Input Shapes") or title.startswith("Source Loc") or "FLOP" in title:
        return None
    return _SHAPES["time"]


class Columns:
    """The columns of one table: names at the left, numbers behind them, perhaps shapes and stacks at the right."""

    def __init__(self, titles: Sequence[str], rule: DashedRule) -> None:
        shapes = [_shape_of(title) for title in titles]
        first = next((index for index, shape in enumerate(shapes) if shape), len(shapes))
        numbers = " {2,}".join(f"({shape})" for shape in shapes if shape)
        self._numbers = re.compile(numbers + (r"(?: {2}| ?$)" if shapes[-1] is None else " *$"))
        self._titles = [title for title, shape in zip(titles, shapes, strict=True) if shape]
        self._name_end = rule.spans[0][1] if first > 1 else None
        self._numbers_at = rule.spans[min(first, len(shapes) - 1)][0]

    def cut(self, text: str) -> dict[str, str] | None:
        """Name and numbers of a row by title; None where the line does not hold what the columns must.

        Cells are two spaces apart or more. One that is wider than its column pushes those behind it to the right, but
        nothing ever stands further left than its column.
        """
        for gap in GAP.finditer(text, max(0, self._numbers_at - 2), self._numbers_at + _MOST_SHIFT):
            if match := self._numbers.match(text, gap.end()):
                name = text[: gap.end()][: self._name_end].strip()
                return {"Name": name, **dict(zip(self._titles, match.groups(), strict=True))}
        return None


def parse_time(cell: str | None) -> tuple[int | None, int, str]:
    """Nanoseconds (None for what is no time), the worth of the last printed digit, and the unit of ``14.531s``."""
    match = _TIME.fullmatch(cell) if cell else None
    if match is None:
        return None, 0, ""
    sign, whole, decimals, unit = match.groups()
    value, step = scaled(whole, decimals or "", unit)
    return (-value if sign else value), step, unit


def scaled(whole: str, decimals: str, unit: str) -> tuple[int, int]:
    """A printed number in nanoseconds, and the worth of its last digit."""
    # Printed digits below a nanosecond are dropped: no printer has them but as zeros.
    scale = UNIT_NS[unit]
    parts = 10 ** len(decimals)
    return int(whole) * scale + int(decimals or "0") * scale // parts, max(1, scale // parts)


def parse_share(cell: str) -> float | None:
    """A printed percentage as 0..1; None for NaN and anything else that is not a number."""
    match = _SHARE.fullmatch(cell)
    if match is None:
        return None
    decimals = match[2] or ""
    # Of integers, so that 44.46 % is 0.4446 and not a hair less.
    share: float = int(match[1] + decimals) / 10 ** (2 + len(decimals))
    return share
