"""Text of a log as lines, and the dashed rules by which its tables are found.

A printed table is found by its rules (``-----  ---  ---``): their runs of dashes give the offset of every
column, and what stands before the first run is the prefix that a launcher or a logger put on each line.
Nothing here searches with a pattern that can match a stretch of text in more than one way, so the time is
linear in the size of the text whatever it holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Control sequences (colours, cursor moves) and titles (OSC), as ECMA-48 writes them.
_ANSI = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[@-Z\\^_])")
_DASHES = re.compile(r"-+")
_GAP = re.compile(r" {2,}")

_LEAST_FIRST_COLUMN = 4
"""Narrower first runs are punctuation of a prefix (``INFO - -----  ---``): names get at least 5 columns."""

MOST_PIECES = 40
"""Lines that one wrapped row may spread over."""

COUNT_TITLES = {"# of Calls", "Number of Calls", "Calls", "Instances", "Num Calls", "Count", "Operations"}
"""Columns that count: of torch's tables, and of the summaries that ``nsys stats`` prints."""

MOST_BETWEEN = 64
"""Lines of other streams that may stand between a table's header and the rule below it."""


def split_lines(text: str) -> list[str]:
    """The lines of ``text`` without colours; only line feeds end a line, since names may hold other separators."""
    return [_ANSI.sub("", line) if "\x1b" in line else line for line in text.replace("\r\n", "\n").split("\n")]


@dataclass(frozen=True)
class Rule:
    """A dashed line: what stands before it, and the span of each column counted from its first dash."""

    prefix: str
    spans: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Characters from the first dash to the last."""
        return self.spans[-1][1]


def find_rule(line: str, least: int = 3) -> Rule | None:
    """The rule that ``line`` ends in, or None: runs of dashes exactly two spaces apart, at least ``least``."""
    text = line.rstrip()
    if not text.endswith("-"):
        return None
    tail = len(text.rstrip("- "))
    runs = [match.span() for match in _DASHES.finditer(text, tail)]
    first = len(runs) - 1
    while first > 0 and runs[first][0] - runs[first - 1][1] == 2:
        first -= 1
    while first < len(runs) and runs[first][1] - runs[first][0] < _LEAST_FIRST_COLUMN:
        first += 1
    if len(runs) - first < least:
        return None
    start = runs[first][0]
    return Rule(text[:start], tuple((a - start, b - start) for a, b in runs[first:]))


def split_header(text: str) -> list[str]:
    """Column titles of a header line: at least two spaces apart, since a title wider than its column pushes on."""
    return _GAP.split(text.strip())


class Prefix:
    """Tells whether a line has the prefix of its table, and takes it off; times in a prefix may differ."""

    def __init__(self, text: str) -> None:
        self.text = text
        general = _prefix_pattern(text)
        self._pattern = re.compile(general) if general is not None else None

    def cut(self, line: str) -> str | None:
        """``line`` without its prefix; None where it has another one or none."""
        if line.startswith(self.text):
            return line[len(self.text) :]
        if self._pattern is not None and (match := self._pattern.match(line)):
            return line[match.end() :]
        # A blank cell can have lost the spaces that end the prefix.
        return "" if self.text.strip() and line.rstrip() == self.text.rstrip() else None


# What changes from line to line in a prefix. A rank's or a host's number does not: it tells streams apart.
_CHANGING = (
    (re.compile(r"\d{4}[-/]\d\d[-/]\d\d"), r"\d{4}[-/]\d\d[-/]\d\d"),
    (re.compile(r"\d\d?:\d\d:\d\d(?:[.,]\d{1,9})?"), r"\d\d?:\d\d:\d\d(?:[.,]\d{1,9})?"),
    (re.compile(r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d\d?"), r"[A-Z][a-z]{2} {1,2}\d\d?"),
    (re.compile(r"[IWEF]\d{4}(?= )"), r"[IWEF]\d{4}"),
    (re.compile(r" {0,64}\d{1,12}\.\d{1,9}"), r" *\d{1,12}\.\d{1,9}"),
    (re.compile(r"\d{9,20}"), r"\d{9,20}"),
)


def _prefix_pattern(text: str) -> str | None:
    """A pattern like ``text`` with every time in it left open; None where it has none."""
    parts: list[str] = []
    position, changing = 0, False
    while position < len(text):
        for found, general in _CHANGING:
            if match := found.match(text, position):
                parts.append(general)
                changing = True
                position = match.end()
                break
        else:
            parts.append(re.escape(text[position]))
            position += 1
    return "".join(parts) if changing else None


@dataclass(frozen=True)
class FoundHeader:
    """Where a table begins, and how its lines are laid out."""

    line: int
    """Index of the header's first line."""
    rows_at: int
    """Index of the first line after the rule below the header."""
    titles: tuple[str, ...]
    rule: Rule
    wrap: int = 0
    """Width at which the log was wrapped; 0 where it was not."""

    def readings(self, lines: list[str], index: int, prefix: Prefix) -> list[tuple[str, int]]:
        """(content, lines used) of the row that may begin at line ``index``; empty where its prefix is another's.

        A wrapped row may be wider than the rule, so several are possible, fewest lines first.
        """
        if not self.wrap:
            content = prefix.cut(lines[index])
            return [] if content is None else [(content, 1)]
        return _joined(lines, index, self.wrap, self.rule.width, prefix)


def _joined(lines: list[str], index: int, wrap: int, width: int, prefix: Prefix) -> list[tuple[str, int]]:
    """Lines from ``index`` on put together to at least ``width`` characters of content; a few may be too wide."""
    least = -(-(len(prefix.text) + width) // wrap)
    found: list[tuple[str, int]] = []
    for pieces in range(least, min(least + 3, len(lines) - index + 1)):
        content = join_pieces(lines[index : index + pieces], wrap, prefix)
        if content is None:
            break
        found.append((content, pieces))
        last = index + pieces - 1
        anew = prefix.text.strip() and last + 1 < len(lines) and prefix.cut(lines[last + 1]) is not None
        if anew:
            break
    return found


def join_pieces(pieces: list[str], wrap: int, prefix: Prefix) -> str | None:
    """One line of a table from the lines that it was wrapped into; a stripped piece gets its spaces back."""
    first = prefix.cut(pieces[0].ljust(wrap))
    return None if first is None else first + "".join(piece.ljust(wrap) for piece in pieces[1:])


def find_header(lines: list[str], index: int) -> FoundHeader | None:
    """The table whose rule below the header is (or, wrapped, begins at) line ``index``; else None."""
    if "--" not in lines[index]:
        return None
    if index + 1 < len(lines) and _only_dashes(lines[index + 1]):
        wrapped = _find_wrapped(lines, index)
        if wrapped is not None:
            return wrapped
    rule = find_rule(lines[index])
    if rule is None:
        return None
    prefix = Prefix(rule.prefix)
    # Other ranks' lines may stand between a header and the rule below it.
    for above in range(index - 1, max(-1, index - 1 - MOST_BETWEEN), -1):
        text = prefix.cut(lines[above])
        if text is not None and text.strip():
            titles = split_header(text)
            fits = len(titles) == len(rule.spans) and _are_titles(titles)
            return FoundHeader(above, index + 1, tuple(titles), rule) if fits else _find_wrapped(lines, index)
    return None


def _are_titles(titles: list[str]) -> bool:
    """Whether a table that we read has such columns: names, and counts of calls or of kernels."""
    return not {"Name", "Operation"}.isdisjoint(titles) and not COUNT_TITLES.isdisjoint(titles)


def _find_wrapped(lines: list[str], index: int) -> FoundHeader | None:
    """As `find_header`, where the rule runs on over the next lines, which hold dashes and spaces only."""
    pieces = 1
    while index + pieces < len(lines) and pieces <= MOST_PIECES and _only_dashes(lines[index + pieces]):
        pieces += 1
    begun = find_rule(lines[index], least=1)
    if index < pieces or begun is None:
        return None
    prefix = Prefix(begun.prefix)
    seen = max(len(line) for line in lines[max(0, index - pieces) : index + 3 * pieces])
    # Cut inside a gap and stripped, every line near it is one or two spaces short of the width.
    for wrap in (seen, seen + 1, seen + 2):
        joined = join_pieces(lines[index : index + pieces], wrap, prefix)
        rule = find_rule(joined) if joined is not None else None
        if rule is None or rule.prefix:
            continue
        for above in range(index - pieces, max(-1, index - pieces - 3), -1):
            header = join_pieces(lines[above:index], wrap, prefix)
            titles = split_header(header) if header else []
            if len(titles) == len(rule.spans) and _are_titles(titles):
                return FoundHeader(above, index + pieces, tuple(titles), Rule(begun.prefix, rule.spans), wrap)
    return None


def _only_dashes(line: str) -> bool:
    return "-" in line and not line.strip("- ")
