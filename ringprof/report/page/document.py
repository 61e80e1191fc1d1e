"""What reports are made of, as data: the parts of JSON (schema ``ringprof.report/1``), the sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import msgspec

from ringprof.json_object import JsonObject
from ringprof.report.text import clean

LONG = 60
"""Characters of a cell that must not widen its table."""
MOST_PAGE_ROWS = 2_000
"""Rows of a table beyond which the page says how many it leaves out."""


class Cell(msgspec.Struct, frozen=True):
    """One cell of a table: what is shown, and what it is sorted by."""

    text: str
    key: float | str
    numeric: bool = False

    @property
    def long(self) -> bool:
        """Whether it may be broken anywhere, as the names of kernels."""
        return len(self.text) > LONG


class PageTable(msgspec.Struct, frozen=True):
    """A sortable table."""

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def numeric(self, column: int) -> bool:
        """Whether a column holds figures, which stand to the right."""
        return any(row[column].numeric for row in self.rows)


class Content(msgspec.Struct, frozen=True):
    """What a section shows."""

    figure: Any = None
    """A Bokeh model."""
    tables: Sequence[PageTable] = ()
    lines: Sequence[str] = ()


class PageContext(NamedTuple):
    """What sections are shown with."""

    figures: Any
    """The module of the figures, see `ringprof.report.page.html.drawing`."""
    paths: Sequence[str]
    """What was read."""


class PageSection(msgspec.Struct, frozen=True):
    """A part of the page with a heading of its own."""

    anchor: str
    title: str
    meaning: str
    content: Content


class Document(msgspec.Struct, frozen=True):
    """All of a page."""

    title: str
    subtitle: str
    verdict: Sequence[str]
    tiles: Sequence[tuple[str, str]]
    """(figure, what it is), the few that matter most."""
    sections: Sequence[PageSection] = msgspec.field(default_factory=tuple)
    next_step: str = ""
    """What to do about it."""


def text(value: object) -> Cell:
    """A cell of words."""
    shown = clean(str(value))
    return Cell(shown, shown.lower())


def number(value: float | None, digits: int = 3, scale: float = 1.0) -> Cell:
    """A cell with a figure; a dash, sorted below all, where it is not known."""
    if value is None:
        return Cell("-", float("-inf"), numeric=True)
    # What rounds to nothing has no sign.
    return Cell(f"{round(value / scale, digits) + 0.0:,.{digits}f}", value, numeric=True)


class ReportSource(TypedDict):
    """What was read."""

    type: str
    """``run``, ``trace`` or ``text``."""
    paths: list[str]


class ReportParts(TypedDict, total=False):
    """What sections add, and what a table's report has instead."""

    summary: Any
    """An object, as waterfall, run and table are; null where there is none."""
    ranks: list[JsonObject]
    steps: list[JsonObject]
    waterfall: Any
    run: Any
    table: Any


class Report(ReportParts):
    """The whole, every part there."""

    schema: str
    source: ReportSource
    warnings: list[JsonObject]
