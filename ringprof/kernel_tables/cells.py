"""Cells of a printed table: what each column may hold, and rows cut at the columns' offsets."""

from __future__ import annotations

import re
from decimal import Decimal
from itertools import pairwise

from ringprof.kernel_tables.text import Rule

_TIME = re.compile(r"(-?)(\d{1,18})(?:\.(\d{1,12}))?(ns|us|ms|s)")
_SHAPES = {
    "time": _TIME,
    "share": re.compile(r"-?\d{1,18}(?:\.\d{1,12})?%|nan|NaN|0|-?inf%?"),
    "count": re.compile(r"-?\d{1,18}"),
    "memory": re.compile(r"-?\d{1,18}(?:\.\d{1,12})? ?(?:[KMGTP]i?)?[bB]"),
}
_CALLS = ("# of Calls", "Number of Calls", "Calls")
_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}

_MOST_SHIFT = 80
"""How far a cell that is wider than its column can push the numbers after it: a cut name is about 55 wide."""


def kind_of(title: str) -> str:
    """What the cells of a column hold: ``text``, ``time``, ``share``, ``count`` or ``memory``."""
    if title in _CALLS or title == "Node ID":
        return "count"
    if title.endswith("%"):
        return "share"
    if title.endswith("Mem"):
        return "memory"
    if title in ("Name", "Overload Name", "Input Shapes") or title.startswith("Source Loc") or "FLOP" in title:
        return "text"
    return "time"


def is_calls(title: str) -> bool:
    """Whether a column counts calls."""
    return title in _CALLS


def parse_time(cell: str) -> tuple[int, int, str] | None:
    """Nanoseconds, the worth of the last printed digit, and the unit of a cell such as ``14.531s``."""
    match = _TIME.fullmatch(cell)
    if match is None:
        return None
    sign, whole, decimals, unit = match.groups()
    scale, digits = _NS[unit], decimals or ""
    # Printed digits below a nanosecond are dropped: no printer has them but as zeros.
    value = int(whole) * scale + int(digits or "0") * scale // 10 ** len(digits)
    return (-value if sign else value), max(1, scale // 10 ** len(digits)), unit


def parse_share(cell: str) -> float | None:
    """A printed percentage as 0..1; None for NaN and anything else that is not a number."""
    text = cell.removesuffix("%")
    return float(Decimal(text) / 100) if re.fullmatch(r"-?\d{1,18}(?:\.\d{1,12})?", text) else None


def cut_row(text: str, rule: Rule, kinds: tuple[str, ...]) -> list[str] | None:
    """The cells of a row at the rule's offsets, stripped; None where they do not hold what their columns must.

    Where a cell is wider than its column, everything after it is pushed to the right; then the numbers are
    followed one after the other, starting where their last one ends at the end of the line.
    """
    text = text.rstrip()
    cells = [text[start:end].strip() for start, end in rule.spans]
    cells[-1] = text[rule.spans[-1][0] :].strip()
    gaps = (text[end:start] for (_, end), (start, _) in pairwise(rule.spans))
    if not any(gap.strip() for gap in gaps) and _all_fit(cells, kinds):
        return cells
    over = len(text) - rule.width
    near = [over] if 0 < over <= _MOST_SHIFT else []
    for shift in (*near, *range(_MOST_SHIFT)):
        cells_or_none = _follow(text, rule, kinds, shift)
        if cells_or_none is not None:
            return cells_or_none
    return None


def _all_fit(cells: list[str], kinds: tuple[str, ...]) -> bool:
    return all(kind == "text" or _SHAPES[kind].fullmatch(cell) for cell, kind in zip(cells, kinds, strict=True))


def _follow(text: str, rule: Rule, kinds: tuple[str, ...], shift: int) -> list[str] | None:
    """The cells where the first number's column begins ``shift`` to the right and any may be too wide."""
    first = next((i for i, kind in enumerate(kinds) if kind != "text"), len(kinds))
    cells = [text[start:end].strip() for start, end in rule.spans[:first]]
    if first >= len(kinds):
        return None
    position = rule.spans[first][0] + shift
    if text[max(0, position - 2) : position].strip():
        return None
    cells[-1:] = [text[rule.spans[first - 1][0] : position].strip()] if cells else []
    if cells and not cells[0]:
        return None
    for (start, end), kind in zip(rule.spans[first:], kinds[first:], strict=True):
        column_end = position + end - start
        if kind == "text":
            cell_end = column_end if len(cells) + 1 < len(kinds) else len(text)
            cells.append(text[position:cell_end].strip())
            # With both stacks and FLOPs torch prints each under the other's title, as wide as it happens to be.
        else:
            token = re.compile(r" *(\S+(?: [KMGTP]?i?[bB](?!\S))?)").match(text, position)
            if token is None or not _SHAPES[kind].fullmatch(token[1]):
                return None
            column_end = max(column_end, token.end())
            cells.append(token[1])
            if text[column_end : column_end + 2].strip() and len(cells) < len(kinds):
                return None
        position = column_end + 2
    return cells
