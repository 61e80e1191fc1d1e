"""Where a printed table stands in a log: its dashed rule, its titles, the prefix and the cells of its lines.

A table is found by its rules (``-----  ---  ---``): their runs of dashes give the offset of every column, and what
stands before the first run is the prefix that a launcher or a logger put on each line. Nothing here searches with a
pattern that can match a stretch of text in more than one way, so the time is linear in the size of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ringprof.log_lines import LinePrefix, LogLines

_DASHES = re.compile(r"-+")
GAP = re.compile(r" {2,}")

_LEAST_FIRST_COLUMN = 4
"""Narrower first runs are punctuation of a prefix (``INFO - -----  ---``): names get at least 5 columns."""

_MOST_PIECES = 40
"""Lines that one wrapped row may spread over."""

_MOST_BETWEEN = 64
"""Lines of other streams that may stand between a table's header and the rule below it."""

_NAME_TITLES = {"Name", "Operation"}
_COUNT_TITLES = {"# of Calls", "Number of Calls", "Calls", "Instances", "Num Calls", "Count", "Operations"}
"""Columns that count: of torch's tables, and of the summaries that ``nsys stats`` prints."""


@dataclass(frozen=True)
class DashedRule:
    """A dashed line: what stands before it, and the span of each column counted from its first dash."""

    prefix: str
    spans: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Characters from the first dash to the last."""
        return self.spans[-1][1]


def find_rule(line: str, least: int = 3) -> DashedRule | None:
    """The rule that ``line`` ends in, or None: runs of dashes exactly two spaces apart, at least ``least``."""
    text = line.rstrip()
    if not text.endswith("-"):
        return None
    runs = [match.span() for match in _DASHES.finditer(text, len(text.rstrip("- ")))]
    first = len(runs) - 1
    while first > 0 and runs[first][0] - runs[first - 1][1] == 2:
        first -= 1
    while first < len(runs) and runs[first][1] - runs[first][0] < _LEAST_FIRST_COLUMN:
        first += 1
    if len(runs) - first < least:
        return None
    start = runs[first][0]
    return DashedRule(text[:start], tuple((a - start, b - start) for a, b in runs[first:]))


@dataclass(frozen=True)
class TableLayout:
    """Where a table begins, and how its lines are laid out."""

    line: int
    """Index of the header's first line."""
    rows_at: int
    """Index of the first line after the rule below the header."""
    titles: tuple[str, ...]
    rule: DashedRule
    wrap: int = 0
    """Width at which the log was wrapped; 0 where it was not."""

    @cached_property
    def prefix(self) -> LinePrefix:
        """What stands before each of its lines."""
        return LinePrefix(self.rule.prefix)

    def readings(self, lines: LogLines, index: int) -> list[tuple[str, int]]:
        """(content, lines used) of the row that may begin at line ``index``; empty where its prefix is another's.

        A wrapped row may be wider than the rule, so several are possible, fewest lines first.
        """
        if not self.wrap:
            content = self.prefix.cut(lines[index])
            return [] if content is None else [(content, 1)]
        least = -(-(len(self.prefix.text) + self.rule.width) // self.wrap)
        found: list[tuple[str, int]] = []
        for used in range(least, min(least + 3, len(lines) - index + 1)):
            content = _joined(lines.between(index, index + used), self.wrap, self.prefix)
            if content is None:
                break
            found.append((content, used))
            following = lines.between(index + used, index + used + 1)
            if following and self.prefix.text.strip() and self.prefix.cut(following[0]) is not None:
                break
        return found

    def closes(self, content: str) -> bool:
        """Whether a line without its prefix is the rule that ends this table."""
        if content.strip("- \t"):
            return False
        rule = find_rule(content)
        return rule is not None and rule.spans == self.rule.spans


def _joined(pieces: list[str], wrap: int, prefix: LinePrefix) -> str | None:
    """One line of a table from the lines that it was wrapped into; a stripped piece gets its spaces back."""
    first = prefix.cut(pieces[0].ljust(wrap))
    return None if first is None else first + "".join(piece.ljust(wrap) for piece in pieces[1:])


def find_layout(lines: LogLines, index: int) -> TableLayout | None:
    """The table whose rule below the header is (or, wrapped, begins at) line ``index``; else None."""
    following = lines.between(index + 1, index + 2)
    if following and _only_dashes(following[0]) and (wrapped := _find_wrapped(lines, index)):
        return wrapped
    rule = find_rule(lines[index])
    if rule is None:
        return None
    prefix = LinePrefix(rule.prefix)
    # Other ranks' lines may stand between a header and the rule below it.
    for above in range(index - 1, max(-1, index - 1 - _MOST_BETWEEN), -1):
        text = prefix.cut(lines[above])
        if text is not None and text.strip():
            titles = _titles(text, rule)
            return TableLayout(above, index + 1, titles, rule) if titles else _find_wrapped(lines, index)
    return None


def _titles(header: str | None, rule: DashedRule) -> tuple[str, ...]:
    """The titles of a table that is read, one a column: names, and counts of calls or of kernels; else none."""
    # They are two spaces or more apart; by offset they cannot be told, since one wider than its column pushes on.
    titles = tuple(GAP.split(header.strip())) if header else ()
    known = not _NAME_TITLES.isdisjoint(titles) and not _COUNT_TITLES.isdisjoint(titles)
    return titles if known and len(titles) == len(rule.spans) else ()


def _find_wrapped(lines: LogLines, index: int) -> TableLayout | None:
    """As `find_layout`, where the rule runs on over the next lines, which hold dashes and spaces only."""
    if index == 0 or _only_dashes(lines[index - 1]):
        return None
    pieces = 1
    for line in lines.between(index + 1, index + 1 + _MOST_PIECES):
        if not _only_dashes(line):
            break
        pieces += 1
    begun = find_rule(lines[index], least=1)
    if index < pieces or begun is None:
        return None
    prefix, found = LinePrefix(begun.prefix), list[TableLayout]()
    seen = max(map(len, lines.between(max(0, index - pieces), index + 3 * pieces)))
    # Cut inside a gap and stripped, every line near it is one or two spaces short of the width.
    for wrap in (seen, seen + 1, seen + 2):
        joined = _joined(lines.between(index, index + pieces), wrap, prefix)
        rule = find_rule(joined) if joined is not None else None
        if rule is None or rule.prefix:
            continue
        for above in range(index - pieces, max(-1, index - pieces - 3), -1):
            if titles := _titles(_joined(lines.between(above, index), wrap, prefix), rule):
                found.append(TableLayout(above, index + pieces, titles, DashedRule(begun.prefix, rule.spans), wrap))
    # Joined at a wrong width, one column is split or two become one, whose width then no other column has.
    return min(found, key=lambda one: len({end - start for start, end in one.rule.spans}), default=None)


def _only_dashes(line: str) -> bool:
    return "-" in line and not line.strip("- ")


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
