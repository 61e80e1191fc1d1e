"""Data types of reports: the parts of the JSON report (schema ``ringprof.report/1``) and the sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import msgspec

from ringprof.common.formatting import significant
from ringprof.common.json_object import JsonObject
from ringprof.report.text import LONGEST_NAME, clean

LONG_CELL = 60
"""Length in characters above which a cell may be broken anywhere, so that it does not widen its table."""
MAX_LABELLED_ROWS = 20
"""Number of rows of a bar chart above which rows are thin, and only every n-th has its label."""
MAX_LABELLED_RANKS = 10
"""Number of rows above which a chart of ranks labels only every n-th: all its rows share one fixed height, which leaves
room for the overview on the first screen."""
MAX_PAGE_ROWS = 2_000
"""Number of rows that a page shows per table; a note says how many are left out."""


class Cell(msgspec.Struct, frozen=True):
    """One cell of a table: the text shown and the key it is sorted by."""

    text: str
    key: float | str
    """Sort key of the column: a number in the unit that is shown, or the text in lower case."""
    numeric: bool = False

    @property
    def exact(self) -> str:
        """The number with all its digits, where the text does not show them; a page of many ranks has many cells."""
        full = f"{self.key:.10g}" if self.numeric else ""
        return "" if full == self.text.replace(",", "") else full

    @property
    def long(self) -> bool:
        """Whether the text may be broken anywhere, such as the name of a kernel."""
        return len(self.text) > LONG_CELL


class TimeSpan(msgspec.Struct, frozen=True):
    """Time of one rank that a row of a table is about, in ms from the first activity of any rank."""

    rank: int
    start_ms: float
    end_ms: float


class PageTable(msgspec.Struct, frozen=True):
    """A table that the page sorts, filters and saves as CSV."""

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    bars_by: str = ""
    """How a row leads to bars of the timeline: ``name`` or ``kind`` (the first cell is the name of an activity, or the
    label of a kind), ``span`` (by ``spans``); empty where rows do not."""
    spans: Sequence[TimeSpan] = ()
    """One per row, where rows lead to bars by their time."""

    def numeric(self, column: int) -> bool:
        """Return whether a column holds numbers, which are aligned right."""
        return any(row[column].numeric for row in self.rows)


class Bar(msgspec.Struct, frozen=True):
    """A bar, or a part of a stacked bar; positions are percentages of the chart's width."""

    left: float
    width: float
    colour: str
    tooltip: str
    form: str = "bar"
    """``bar``, or ``range`` and ``dot`` for an interval and its middle."""


class BarRow(msgspec.Struct, frozen=True):
    """A row of a bar chart."""

    label: str
    bars: Sequence[Bar]
    value: str = ""
    """Text to the right of the bars."""


class BarChart(msgspec.Struct, frozen=True):
    """Horizontal bars with labels beside them, drawn as elements of the page, without a plotting library."""

    rows: Sequence[BarRow]
    ticks: Sequence[tuple[float, str]]
    """Positions in percent of the width, with labels."""
    axis: str
    """Quantity and unit of the axis."""
    legend: Sequence[tuple[str, str]] = ()
    """Pairs (label, colour); empty where all bars mean the same."""
    title: str = ""
    of_ranks: bool = False
    """Whether each row is a rank: the rows then share a fixed height, however many they are."""

    @property
    def form(self) -> str:
        """Classes of the chart's element: ``ranks``; ``dense`` and ``by-N`` where only every N-th row has a label."""
        count = len(self.rows)
        classes = ["ranks"] if self.of_ranks else []
        if count > (MAX_LABELLED_RANKS if self.of_ranks else MAX_LABELLED_ROWS):
            classes += ["dense", "by-4" if count <= 4 * MAX_LABELLED_RANKS else "by-8"]
        return " ".join(classes)


class Content(msgspec.Struct, frozen=True):
    """Content of a section: charts, a figure, tables and lines of text, each of them optional."""

    figure: Any = None
    """A Bokeh model."""
    tables: Sequence[PageTable] = ()
    lines: Sequence[str] = ()
    charts: Sequence[BarChart] = ()
    legend: Sequence[tuple[str, str]] = ()
    """Pairs (label, colour) of the figure's parts, to be shown and hidden; a figure with a legend is a timeline."""
    key: Sequence[tuple[str, str]] = ()
    """Pairs (label, colour) of the marks above the figure, such as those of an overview."""
    folds_tables: bool = False
    """Whether tables are folded below the chart or figure."""


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
    folded: bool = False
    """Whether the section shows only its heading until it is opened."""


class Document(msgspec.Struct, frozen=True):
    """A whole page."""

    title: str
    subtitle: str
    verdict: Sequence[str]
    tiles: Sequence[tuple[str, str]]
    """Most important figures, as pairs (figure, description)."""
    sections: Sequence[PageSection] = msgspec.field(default_factory=tuple)
    headline: str = ""
    """The page's answer in a sentence: the largest loss, what to do, what it gains. Empty where there is none."""


def text(value: object, longest: int = LONGEST_NAME) -> Cell:
    """Create a cell of text, cut to ``longest`` characters."""
    shown = clean(str(value), longest)
    return Cell(shown, shown.lower())


def number(value: float | None, digits: int = 4, scale: float = 1.0) -> Cell:
    """Create a cell of a number with ``digits`` significant digits; None is shown as a dash, sorted below all numbers.

    The value is divided by ``scale``, the size of the unit that is shown. Integers are shown in full.
    """
    if value is None:
        return Cell("-", float("-inf"), numeric=True)
    if scale == 1.0 and isinstance(value, int):
        return Cell(f"{value:,}", value, numeric=True)
    return Cell(significant(value / scale, digits), value / scale, numeric=True)


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
