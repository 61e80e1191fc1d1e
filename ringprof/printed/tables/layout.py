"""Layout of a printed table in a log: its dashed rule, its titles, and the prefix and the cells of its lines.

A table is found by its rules (``-----  ---  ---``). Their runs of dashes give the offset of every column. The text
before the first run is the prefix that a launcher or a logger put on each line. No pattern here can match a stretch of
text in more than one way, so the time is linear in the size of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ringprof.common.log_lines import LinePrefix, LogLines

_DASHES = re.compile(r"-+")
GAP = re.compile(r" {2,}")

_MIN_FIRST_COLUMN = 4
"""Smallest width of the first run of dashes: names have at least 5 characters, and narrower runs are punctuation of a
prefix (``INFO - -----  ---``)."""

_MAX_WRAPPED_LINES = 40
"""Most lines that one wrapped row may spread over."""

_MAX_LINES_BETWEEN = 64
"""Most lines of other streams between a table's header and the rule below it."""

_NAME_TITLES = {"Name", "Operation"}
_COUNT_TITLES = {"# of Calls", "Number of Calls", "Calls", "Instances", "Num Calls", "Count", "Operations"}
"""Titles of columns that hold counts, in torch's tables and in the summaries of ``nsys stats``."""


@dataclass(frozen=True)
class DashedRule:
    """A dashed line: the prefix before it, and the span of each column, as offsets from the first dash."""

    prefix: str
    spans: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Number of characters from the first dash to the last."""
        return self.spans[-1][1]


def find_rule(line: str, min_columns: int = 3) -> DashedRule | None:
    """Return the rule at the end of ``line``, or None.

    A rule has at least ``min_columns`` runs of dashes, which are exactly two spaces apart.
    """
    text = line.rstrip()
    if not text.endswith("-"):
        return None
    runs = [match.span() for match in _DASHES.finditer(text, len(text.rstrip("- ")))]
    first = len(runs) - 1
    while first > 0 and runs[first][0] - runs[first - 1][1] == 2:
        first -= 1
    while first < len(runs) and runs[first][1] - runs[first][0] < _MIN_FIRST_COLUMN:
        first += 1
    if len(runs) - first < min_columns:
        return None
    start = runs[first][0]
    return DashedRule(text[:start], tuple((begin - start, end - start) for begin, end in runs[first:]))


@dataclass(frozen=True)
class TableLayout:
    """Position of a table in a log, and the layout of its lines."""

    line: int
    """Index of the header's first line."""
    rows_start: int
    """Index of the first line after the rule below the header."""
    titles: tuple[str, ...]
    rule: DashedRule
    wrap: int = 0
    """Width at which the log was wrapped; 0 for a log that was not wrapped."""

    @cached_property
    def prefix(self) -> LinePrefix:
        """Prefix of each line of the table."""
        return LinePrefix(self.rule.prefix)

    def candidate_rows(self, lines: LogLines, index: int) -> list[tuple[str, int]]:
        """List the possible rows that begin at line ``index``, as (content, number of lines), fewest lines first.

        The list is empty where the line has another prefix. There can be several, since a wrapped row may be wider than
        the rule.
        """
        if not self.wrap:
            content = self.prefix.cut(lines[index])
            return [] if content is None else [(content, 1)]
        min_lines = -(-(len(self.prefix.text) + self.rule.width) // self.wrap)
        candidates: list[tuple[str, int]] = []
        for used in range(min_lines, min(min_lines + 3, len(lines) - index + 1)):
            content = _join_wrapped(lines.between(index, index + used), self.wrap, self.prefix)
            if content is None:
                break
            candidates.append((content, used))
            following = lines.between(index + used, index + used + 1)
            if following and self.prefix.text.strip() and self.prefix.cut(following[0]) is not None:
                break
        return candidates

    def ends_table(self, content: str) -> bool:
        """Return whether a line, without its prefix, is the rule that ends this table."""
        if content.strip("- \t"):
            return False
        rule = find_rule(content)
        return rule is not None and rule.spans == self.rule.spans


def _join_wrapped(pieces: list[str], wrap: int, prefix: LinePrefix) -> str | None:
    """Join a line of a table from the lines that it was wrapped into, with the stripped trailing spaces restored.

    Returns None where the first line has another prefix.
    """
    first = prefix.cut(pieces[0].ljust(wrap))
    return None if first is None else first + "".join(piece.ljust(wrap) for piece in pieces[1:])


def find_layout(lines: LogLines, index: int) -> TableLayout | None:
    """Return the layout of the table whose rule below the header begins at line ``index``, or None."""
    following = lines.between(index + 1, index + 2)
    if following and _only_dashes(following[0]) and (wrapped := _find_wrapped(lines, index)):
        return wrapped
    rule = find_rule(lines[index])
    if rule is None:
        return None
    prefix = LinePrefix(rule.prefix)
    # Lines of other ranks may stand between a header and the rule below it.
    for above in range(index - 1, max(-1, index - 1 - _MAX_LINES_BETWEEN), -1):
        text = prefix.cut(lines[above])
        if text is None and above == index - 1 and not rule.prefix.strip() and _parse_titles(lines[above], rule):
            # Whoever copied the table began behind the first line's indentation.
            text = lines[above]
        if text is not None and text.strip():
            titles = _parse_titles(text, rule)
            return TableLayout(above, index + 1, titles, rule) if titles else _find_wrapped(lines, index)
    return None


def _parse_titles(header: str | None, rule: DashedRule) -> tuple[str, ...]:
    """Return the titles of a supported table, one per column; empty for other headers.

    Supported tables have a column of names, and one of counts of calls or kernels.
    """
    # Titles are separated by two or more spaces. Their offsets are no help: a title that is wider than its column
    # pushes the next ones to the right.
    titles = tuple(GAP.split(header.strip())) if header else ()
    has_table_titles = not _NAME_TITLES.isdisjoint(titles) and not _COUNT_TITLES.isdisjoint(titles)
    return titles if has_table_titles and len(titles) == len(rule.spans) else ()


def _find_wrapped(lines: LogLines, index: int) -> TableLayout | None:
    """Return the layout of a wrapped table, whose rule continues over the lines after ``index``, or None.

    These lines hold only dashes and spaces.
    """
    if index == 0 or _only_dashes(lines[index - 1]):
        return None
    rule_lines = 1
    for line in lines.between(index + 1, index + 1 + _MAX_WRAPPED_LINES):
        if not _only_dashes(line):
            break
        rule_lines += 1
    first_rule = find_rule(lines[index], min_columns=1)
    if index < rule_lines or first_rule is None:
        return None
    prefix, layouts = LinePrefix(first_rule.prefix), list[TableLayout]()
    longest = max(map(len, lines.between(max(0, index - rule_lines), index + 3 * rule_lines)))
    # Where lines were wrapped inside a gap and stripped, all of them are one or two spaces shorter than the width.
    for wrap in (longest, longest + 1, longest + 2):
        joined = _join_wrapped(lines.between(index, index + rule_lines), wrap, prefix)
        rule = find_rule(joined) if joined is not None else None
        if rule is None or rule.prefix:
            continue
        for above in range(index - rule_lines, max(-1, index - rule_lines - 3), -1):
            if titles := _parse_titles(_join_wrapped(lines.between(above, index), wrap, prefix), rule):
                layouts.append(
                    TableLayout(above, index + rule_lines, titles, DashedRule(first_rule.prefix, rule.spans), wrap)
                )
    # At a wrong width, one column is split or two are joined, which gives a column of a width that no other has.
    return min(layouts, key=lambda layout: len({end - start for start, end in layout.rule.spans}), default=None)


def _only_dashes(line: str) -> bool:
    return "-" in line and not line.strip("- ")


_DECIMAL = r"-?[0-9]{1,18}(?:\.[0-9]{1,12})?"
_CELL_PATTERNS = (
    (r"# of Calls|Number of Calls|Calls|Node ID", r"-?[0-9]{1,18}"),
    (r".*%", rf"{_DECIMAL}%|nan|NaN|0|-?inf%?"),
    (r".*Mem", rf"{_DECIMAL} ?(?:[KMGTP]i?)?[bB]"),
    (r"Self .*|.*\b(?:time|total|avg)", rf"{_DECIMAL}(?:ns|us|ms|s)"),
    (r".*", None),
)
"""Patterns of titles, with the pattern of the cells below them; None for a column of text. The first match counts."""
_TEXT_CELL = r"\S{1,200}(?: \S{1,200}){0,8}"
"""Pattern of a text cell between numbers; only one space at a time is inside of a cell."""
_TIME = re.compile(r"(-?)([0-9]{1,18})(?:\.([0-9]{1,12}))?(ns|us|ms|s)")
_SHARE = re.compile(r"(-?[0-9]{1,18})(?:\.([0-9]{1,12}))?%?")

_MAX_SHIFT = 80
"""Most characters by which a cell wider than its column shifts the numbers after it; a cut name has about 55."""

CALLS_TITLES = ("# of Calls", "Number of Calls", "Calls")
"""Titles of the column that counts calls."""
UNIT_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "μs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
"""Nanoseconds in each unit that tables print; the micro sign and the Greek letter are two characters."""


class Columns:
    """The columns of one table: names at the left, then numbers with texts between, then possibly more texts."""

    def __init__(self, titles: Sequence[str], rule: DashedRule) -> None:
        patterns = [next(cells for title, cells in _CELL_PATTERNS if re.fullmatch(title, text)) for text in titles]
        first_number = next((index for index, pattern in enumerate(patterns) if pattern), len(patterns))
        last_number = max((index for index, pattern in enumerate(patterns) if pattern), default=-1)
        cells = patterns[first_number : last_number + 1]
        numbers = " {2,}".join(f"({pattern})" if pattern else _TEXT_CELL for pattern in cells)
        self._numbers = re.compile(numbers + (r"(?: {2}| ?$)" if patterns[-1] is None else " *$"))
        self._titles = [title for title, pattern in zip(titles, patterns, strict=True) if pattern]
        self._name_end = rule.spans[0][1] if first_number > 1 else None
        self._numbers_at = rule.spans[min(first_number, len(patterns) - 1)][0]

    def split(self, text: str) -> dict[str, str] | None:
        """Return the name and the numbers of a row by title, or None for a line that does not match the columns.

        Cells are two or more spaces apart. A cell that is wider than its column shifts the cells after it to the right,
        but no cell ever begins to the left of its column.
        """
        for gap in GAP.finditer(text, max(0, self._numbers_at - 2), self._numbers_at + _MAX_SHIFT):
            if match := self._numbers.match(text, gap.end()):
                name = text[: gap.end()][: self._name_end].strip()
                return {"Name": name, **dict(zip(self._titles, match.groups(), strict=True))}
        return None


def parse_time(cell: str | None) -> tuple[int | None, int, str]:
    """Parse a time such as ``14.531s``; return nanoseconds, the value of its last digit in ns, and the unit.

    Returns (None, 0, "") for a cell that is not a time.
    """
    match = _TIME.fullmatch(cell) if cell else None
    if match is None:
        return None, 0, ""
    sign, integer, decimals, unit = match.groups()
    value, step = scaled(integer, decimals or "", unit)
    return (-value if sign else value), step, unit


def scaled(integer: str, decimals: str, unit: str) -> tuple[int, int]:
    """Convert a printed number to nanoseconds; return it with the value of its last digit in ns."""
    # Digits below a nanosecond are dropped: all tools print them only as zeros.
    scale = UNIT_NS[unit]
    parts = 10 ** len(decimals)
    return int(integer) * scale + int(decimals or "0") * scale // parts, max(1, scale // parts)


def parse_share(cell: str) -> float | None:
    """Parse a printed percentage as 0..1; None for NaN and every other cell that is not a number."""
    match = _SHARE.fullmatch(cell)
    if match is None:
        return None
    decimals = match[2] or ""
    # The quotient of two integers, so that 44.46 % is exactly the float 0.4446.
    share: float = int(match[1] + decimals) / 10 ** (2 + len(decimals))
    return share
