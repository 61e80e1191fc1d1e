"""Tables of figures in their measured units, for the terminal and the page, and tables of text for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ringprof.common.formatting import percent, three_digits
from ringprof.report.page.document import MAX_PAGE_ROWS, Cell, PageTable, TimeSpan, number, text
from ringprof.report.text import LONGEST_KERNEL, LONGEST_NAME, TextStyle, clean, duration, in_unit, unit_for

COLUMN_GAP = 2
"""Number of spaces between two columns."""
MIN_NAME_WIDTH = 36
"""Least width that a column of long names keeps."""


class Column(NamedTuple):
    """A column of a table; the first column of a table holds names."""

    title: str
    """Title, of one or several lines."""
    unit: str = "text"
    """Key of `UNITS`: the unit of the values, and how they are formatted."""
    drop: int = 0
    """Rank for leaving columns out on a narrow terminal: the largest goes first; 0 is never left out."""
    on_page: str = ""
    """Title on the page, where title and unit do not make a good one."""
    folds: bool = False
    """Whether a cell may continue on the next line, for long names."""
    left: bool = False
    """Whether cells are aligned left; numbers are aligned right."""
    paint: str = ""

    @property
    def name(self) -> str:
        """Title in one line, in lower case: the name to sort a listing by."""
        return self.title.replace("\n", " ").lower()

    @property
    def page_title(self) -> str:
        return self.on_page or self.title.replace("\n", " ") + UNITS[self.unit].suffix


def text_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], style: TextStyle, bold: Sequence[int] = ()
) -> str:
    """Format a table of text in the width of the terminal; no number is ever truncated.

    Long names continue on the next line. Columns that may be dropped are left out where there is no room, with a note.
    A table that is still too wide is split into several below each other. ``bold`` holds the indices of bold rows.
    """
    available, natural_widths = style.table_width, _widths(columns, rows)
    widths = [
        min(width, MIN_NAME_WIDTH) if column.folds else width
        for column, width in zip(columns, natural_widths, strict=True)
    ]
    full_width, shown = _total_width(widths, range(len(columns))), [*range(len(columns))]
    while _total_width(widths, shown) > available and any(columns[index].drop for index in shown):
        shown.remove(max(shown, key=lambda index: (columns[index].drop, index)))
    for index in shown:
        if columns[index].folds:
            widths[index] = min(
                natural_widths[index], max(widths[index], widths[index] + available - _total_width(widths, shown))
            )
            rows = [[*row[:index], _fold(row[index], widths[index]), *row[index + 1 :]] for row in rows]
    blocks = [
        _render_columns(group, columns, rows, widths, style, bold) for group in _column_groups(shown, widths, available)
    ]
    left_out = [
        column.title.replace("-\n", "").replace("\n", " ") for index, column in enumerate(columns) if index not in shown
    ]
    if left_out:
        blocks.append(style.wrap(f"no room for {', '.join(left_out)}: --width {full_width}", "dim"))
    return "\n".join(blocks)


def table_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of the whole table in characters."""
    return _total_width(_widths(columns, rows), range(len(columns)))


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    titles = [column.title for column in columns]
    return [max(len(line) for cell in cells for line in cell.split("\n")) for cells in zip(titles, *rows, strict=True)]


def _total_width(widths: Sequence[int], indices: Sequence[int]) -> int:
    return sum(widths[index] + COLUMN_GAP for index in indices) - COLUMN_GAP


def _fold(name: str, width: int) -> str:
    return "\n".join(name[start : start + width] for start in range(0, len(name), max(1, width)))


def _column_groups(shown: Sequence[int], widths: Sequence[int], available: int) -> Iterator[list[int]]:
    """Split the columns into groups that fit, each starting with the column of names."""
    group = shown[:2]
    for index in shown[2:]:
        if _total_width(widths, [*group, index]) > available:
            yield [*group]
            group = shown[:1]
        group = [*group, index]
    yield [*group]


def _render_columns(
    indices: Sequence[int], columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: Sequence[int],
    style: TextStyle, bold: Sequence[int],
) -> str:  # fmt: skip
    lines = []
    for row_index, row in enumerate([[column.title for column in columns], *rows], start=-1):
        cells = [row[index].split("\n") for index in indices]
        height = max(map(len, cells))
        # Titles are aligned at the bottom, cells at the top.
        padding = [[""] * (height - len(cell)) for cell in cells]
        padded = [
            blank_lines + cell if row_index < 0 else cell + blank_lines
            for cell, blank_lines in zip(cells, padding, strict=True)
        ]
        for parts in zip(*padded, strict=True):
            line = []
            for index, part in zip(indices, parts, strict=True):
                left_aligned = columns[index].left or index == 0
                text = part.ljust(widths[index]) if left_aligned else part.rjust(widths[index])
                line.append(style.paint(text, "bold" if row_index < 0 or row_index in bold else columns[index].paint))
            lines.append((" " * COLUMN_GAP).join(line).rstrip())
    return "\n".join(lines)


class Listing(NamedTuple):
    """Options of a listing: the order and the number of rows."""

    sort: str = ""
    """Name of the column whose largest value comes first; empty for the table's own order."""
    top: int | None = None
    everything: bool = False
    """Whether to list the rows of every rank, however many, instead of means over ranks."""


# --- figures ------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """Format of a value: a function for the terminal; significant digits and scale for the page."""

    in_terminal: Callable[[Any], str]
    digits: int
    scale: float = 1.0
    suffix: str = ""
    """Suffix of the column's title on the page."""


UNITS = {
    "text": Unit(lambda value: clean(str(value), LONGEST_KERNEL), 0),
    "name": Unit(lambda value: clean(str(value), LONGEST_KERNEL), 0),
    "count": Unit(lambda value: f"{value:,.0f}", 4),
    "rough count": Unit(lambda value: f"{value:,.0f}" if value == int(value) else f"{value:,.1f}", 4),
    "bytes": Unit(lambda value: f"{value / 1e6:,.1f}", 4, 1e6),
    "MiB": Unit(lambda value: f"{value / 2**20:,.1f}", 4, 2**20, " MiB"),
    "share": Unit(percent, 3, 0.01, " %"),
    "rough share": Unit(lambda value: percent(value, 0), 3, 0.01, " %"),
    "rate": Unit(three_digits, 4),
    "time": Unit(str, 4, 1e6, " ms"),
    "short time": Unit(lambda value: duration(value, 1), 4, 1e3, " µs"),
}
"""Units of columns. A ``time`` is in nanoseconds; in the terminal all times of a table share the unit that suits the
longest. A ``rate`` is in the unit that the title names. A ``name`` is a text that identifies an activity,
however long."""


class Table(NamedTuple):
    """Rows of unformatted values: nanoseconds, bytes, shares 0 to 1; None where a value is not known."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    whole: str = ""
    """Where to find all rows when some are left out, such as an option or a method."""

    def text(self, style: TextStyle, max_rows: int | None = None) -> str:
        """Format the first ``max_rows`` rows for the terminal."""
        rows, kinds = self.rows[:max_rows], [column.unit for column in self.columns]
        times = [value for row in rows for value, kind in zip(row, kinds, strict=True) if kind == "time"]
        unit_ns, unit = unit_for(max((time for time in times if time is not None), default=0))

        def cell(value: Any, kind: str) -> str:
            if value is None:
                return "-"
            return in_unit(value, unit_ns) if kind == "time" else UNITS[kind].in_terminal(value)

        cells = [[*map(cell, row, kinds)] for row in rows]
        # A long title goes above the table, so that it does not widen the column of names.
        title_above = len(self.title) > max((len(row[0]) for row in cells), default=0) + 6
        title = self.title + ((", " if title_above else "\n") + f"in {unit}" if times else "")
        names = self.columns[0]._replace(title="" if title_above else title)
        table = text_table([names, *self.columns[1:]], cells, style)
        table = style.paint(title, "bold") + "\n" + table if title_above else table
        left_out = len(self.rows) - len(rows)
        return table + "\n" + style.wrap(f"and {left_out} more: {self.whole}", "dim") if left_out > 0 else table

    def listed(self, style: TextStyle, listing: Listing, default_rows: int | None = None) -> str:
        """Format the rows for the terminal in the order and number of ``listing``.

        ``default_rows`` limits the rows where the listing sets no number.
        """
        names, rows = [column.name for column in self.columns], self.rows
        if listing.sort and listing.sort in names:
            index = names.index(listing.sort)
            # Unknown values come last in either order.
            known_rows = [row for row in rows if row[index] is not None]
            known_rows.sort(key=lambda row: row[index], reverse=self.columns[index].unit != "text")
            rows = [*known_rows, *(row for row in rows if row[index] is None)]
        return self._replace(rows=rows).text(style, listing.top or (None if listing.everything else default_rows))

    def page(self, bars_by: str = "", spans: Sequence[TimeSpan] = ()) -> PageTable:
        """Build a table for the page; ``bars_by`` and ``spans``: how its rows lead to bars of the timeline."""
        kinds = [column.unit for column in self.columns]
        rows = [[*map(_cell, row, kinds)] for row in self.rows[:MAX_PAGE_ROWS]]
        left_out = len(self.rows) - MAX_PAGE_ROWS
        note = f"{left_out} more rows are left out; {self.whole} has all." if left_out > 0 else ""
        return PageTable([column.page_title for column in self.columns], rows, note, bars_by, spans[:MAX_PAGE_ROWS])


def _cell(value: Any, unit: str) -> Cell:
    if unit in ("text", "name"):
        return text("-" if value is None else value, LONGEST_KERNEL if unit == "name" else LONGEST_NAME)
    if unit.endswith("count") and value is not None and value == int(value):
        value = int(value)
    return number(value, UNITS[unit].digits, UNITS[unit].scale)
