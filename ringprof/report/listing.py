"""Listings: each value of their rows is declared once, as a `Field`, for terminal, page, JSON and data frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringprof.analysis.findings.findings import Findings
from ringprof.common.json_object import JsonObject
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.text import TextStyle


class Field(NamedTuple):
    """One value of each row of a `FieldTable`."""

    key: str
    """Key of the value in a row, and name of its column in the data frame."""
    meaning: str = ""
    """Meaning of the frame's column, with the unit unless the key names it; empty where the frame does not have it."""
    column: Column | None = None
    """Column of the tables in terminal and page; None where only data has the value."""
    summed: bool = False
    """Whether the value is a sum over all ranks, of which tables show the mean."""
    shown: Callable[[Any], Any] | None = None
    """Function from the value to the one that tables show."""
    json: str | None = None
    """Key in the JSON report; None for ``key``, empty where the report does not have the value."""


RANK = Field("rank", "rank in the world", Column("rank", "count"))
ITERATION = Field("iteration", "number of the profiled iteration, from 0")
SPAN = tuple(Field(key, "unix time by the rank's own clock") for key in ("start_ns", "end_ns"))
"""Fields of several tables."""


class FieldTable(NamedTuple):
    """Rows of values in every form that shows them."""

    name: str
    """Name of the data frame, and of the section and the list in the JSON report where there are any."""
    rows: Callable[[Findings], Sequence[JsonObject]]
    """Function that returns the rows, with sums over all ranks; a row has at least the keys of all fields."""
    fields: Sequence[Field]
    """Fields in the order of the data frame."""
    order: Sequence[str] = ()
    """Keys of the columns of tables from left to right; empty for the order of the fields."""
    title: str = ""
    """Title in the terminal."""
    nothing: Callable[[Findings], str] = lambda findings: ""
    """Function that returns the sentence to print where there are no rows; empty to print nothing."""
    most_rows: int = 25
    """Number of rows in the terminal, unless the user sets one."""
    note: str = ""
    """Sentence below the table in the terminal."""
    bars_by: str = ""
    """How rows of the page lead to bars of the timeline, see `ringprof.report.page.document.PageTable`."""
    rows_of_frame: Callable[[Findings], Sequence[JsonObject]] | None = None
    """Function that returns the rows of the data frame, where they are not those of the report."""
    of_few_ranks: bool = False
    """Whether page and JSON leave the rows out for very many ranks, whose traces would have to be read again."""

    @property
    def columns(self) -> list[Column]:
        """Columns of the tables, from left to right."""
        return [field.column for field in self._shown(self.order) if field.column is not None]

    @property
    def meanings(self) -> dict[str, str]:
        """Columns of the data frame with their meanings."""
        return {field.key: field.meaning for field in self.fields if field.meaning}

    def table(self, findings: Findings, title: str = "", order: Sequence[str] = (), count: int = 0) -> Table:
        """Build a table for the terminal, or without a title for the page, of the columns ``order``.

        Sums are divided by ``count``, by default the number of ranks.
        """
        shown, count = self._shown(order or self.order), count or len(findings.attribution.ranks)

        def cell(field: Field, value: Any) -> Any:
            value = value / count if field.summed and value is not None else value
            return field.shown(value) if field.shown else value

        rows = [[cell(field, row[field.key]) for field in shown] for row in self.rows(findings)]
        columns = [field.column for field in shown if field.column]
        return Table(title, columns, rows, "--all" if title else f"run.{self.name}()")

    def terminal(self, findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
        """List the rows, as means over ranks, or say why there are none."""
        count = len(findings.attribution.ranks)
        table = self.table(findings, self.title + (f", mean of {count} ranks" if count > 1 else ""))
        if not table.rows:
            return [style.wrap(nothing)] if (nothing := self.nothing(findings)) else []
        note = "\n" + style.wrap(self.note, "dim") if self.note else ""
        return [table.listed(style, listing, self.most_rows) + note]

    def html(self, findings: Findings, page: PageContext) -> Content | None:
        """Build the table of the page, as means over ranks; None without rows."""
        table = None if self._left_out(findings) else self.table(findings)
        return Content(tables=[table.page(self.bars_by)]) if table and table.rows else None

    def items(self, findings: Findings) -> list[JsonObject]:
        """Build the rows of the JSON report, summed over all ranks."""
        names = [(field.key, field.key if field.json is None else field.json) for field in self.fields]
        rows = () if self._left_out(findings) else self.rows(findings)
        return [{name: row[key] for key, name in names if name} for row in rows]

    def _shown(self, order: Sequence[str]) -> list[Field]:
        fields = {field.key: field for field in self.fields if field.column is not None}
        return [fields[key] for key in order or fields]

    def _left_out(self, findings: Findings) -> bool:
        return self.of_few_ranks and not findings.lists_steps
