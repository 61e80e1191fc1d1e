"""Data types of reports: the parts of the JSON report (schema ``ringprof.report/1``) and the sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import msgspec

from ringprof.common.json_object import JsonObject
from ringprof.report.text import clean

LONG_CELL = 60
"""Length in characters above which a cell may be broken anywhere, so that it does not widen its table."""
MAX_PAGE_ROWS = 2_000
"""Number of rows that a page shows per table; a note says how many are left out."""


class Cell(msgspec.Struct, frozen=True):
    """One cell of a table: the text shown and the key it is sorted by."""

    text: str
    key: float | str
    numeric: bool = False

    @property
    def long(self) -> bool:
        """Whether the text may be broken anywhere, such as the name of a kernel."""
        return len(self.text) > LONG_CELL


class PageTable(msgspec.Struct, frozen=True):
    """A sortable table."""

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def numeric(self, column: int) -> bool:
        """Return whether a column holds numbers, which are aligned right."""
        return any(row[column].numeric for row in self.rows)


class Content(msgspec.Struct, frozen=True):
    """Content of a section: a figure, tables and lines of text, each of them optional."""

    figure: Any = None
    """A Bokeh model."""
    tables: Sequence[PageTable] = ()
    lines: Sequence[str] = ()


class PageContext(NamedTuple):
    """Inputs that every section of a page gets beside the findings."""

    figures: Any
    """The module that draws figures, from `ringprof.report.page.html.drawing`."""
    paths: Sequence[str]
    """Paths of the files that were read."""


class PageSection(msgspec.Struct, frozen=True):
    """A section of a page, with its heading and a sentence on its meaning."""

    anchor: str
    title: str
    meaning: str
    content: Content


class Document(msgspec.Struct, frozen=True):
    """A whole page."""

    title: str
    subtitle: str
    verdict: Sequence[str]
    tiles: Sequence[tuple[str, str]]
    """Most important figures, as pairs (figure, description)."""
    sections: Sequence[PageSection] = msgspec.field(default_factory=tuple)
    next_step: str = ""
    """Recommended next step; empty where there is none."""


def text(value: object) -> Cell:
    """Create a cell of text."""
    shown = clean(str(value))
    return Cell(shown, shown.lower())


def number(value: float | None, digits: int = 3, scale: float = 1.0) -> Cell:
    """Create a cell of a number; None is shown as a dash and sorted below all numbers."""
    if value is None:
        return Cell("-", float("-inf"), numeric=True)
    # Adding 0.0 turns -0.0 into 0.0: a value that rounds to zero has no sign.
    return Cell(f"{round(value / scale, digits) + 0.0:,.{digits}f}", value, numeric=True)


class ReportSource(TypedDict):
    """Type and paths of the files that a report is made from."""

    type: str
    """``run``, ``trace`` or ``text``."""
    paths: list[str]


class ReportParts(TypedDict, total=False):
    """Parts of a report: what sections add, and what a report on printed tables has instead."""

    summary: Any
    """An object, like ``waterfall``, ``run`` and ``table``; null where there is none."""
    ranks: list[JsonObject]
    steps: list[JsonObject]
    waterfall: Any
    run: Any
    table: Any


class Report(ReportParts):
    """The whole report; every part is present."""

    schema: str
    source: ReportSource
    warnings: list[JsonObject]
