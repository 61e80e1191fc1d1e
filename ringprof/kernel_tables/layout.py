"""Where a printed table stands in a log: its dashed rule, its titles, and what stands before each of its lines.

A table is found by its rules (``-----  ---  ---``): their runs of dashes give the offset of every column, and what
stands before the first run is the prefix that a launcher or a logger put on each line. Nothing here searches with a
pattern that can match a stretch of text in more than one way, so the time is linear in the size of the text.
"""

from __future__ import annotations

import re
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
