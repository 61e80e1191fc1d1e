"""Tables of figures as they are measured, for the terminal and for the page; and tables of text for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringprof.report.page.document import MOST_ROWS, Cell, PageTable, number, text
from ringprof.report.text import TextStyle, duration, in_unit, percent, unit_for

BETWEEN = 2
"""Spaces between two columns."""


class TextColumn(NamedTuple):
    """A column of text; the first of a table holds names."""

    title: str
    """Of one line or several."""
    left: bool = False
    """Where its cells stand; figures to the right."""
    drop: int = 0
    """Where room is short, the column with the largest goes first; 0 stays."""
    paint: str = ""


def text_table(
    columns: Sequence[TextColumn], rows: Sequence[Sequence[str]], style: TextStyle, bold: Sequence[int] = ()
) -> str:
    """The table in the room there is: some columns are left out, which is said, or the rest stands below; never digits.

    ``bold``: the rows that are.
    """
    widths = [
        max(len(line) for cell in (column.title, *cells) for line in cell.split("\n"))
        for column, *cells in zip(columns, *rows, strict=True)
    ]
    shown, room = list(range(len(columns))), style.table_width

    def needed(places: Sequence[int]) -> int:
        return sum(widths[place] + BETWEEN for place in places) - BETWEEN

    while needed(shown) > room and any(columns[place].drop for place in shown):
        shown.remove(max(shown, key=lambda place: (columns[place].drop, place)))
    blocks: list[str] = []
    rest = shown[1:]
    while rest or not blocks:
        fitting = 1
        while fitting < len(rest) and needed([0, *rest[: fitting + 1]]) <= room:
            fitting += 1
        blocks.append(_block([0, *rest[:fitting]], columns, rows, widths, style, bold))
        rest = rest[fitting:]
    left_out = [columns[place].title.replace("\n", " ") for place in range(len(columns)) if place not in shown]
    if left_out:
        blocks.append(style.wrap(f"no room for {', '.join(left_out)}: --width {needed(range(len(columns)))}", "dim"))
    return "\n".join(blocks)


def _block(
    places: Sequence[int], columns: Sequence[TextColumn], rows: Sequence[Sequence[str]], widths: Sequence[int],
    style: TextStyle, bold: Sequence[int],
) -> str:  # fmt: skip
    height = max(columns[place].title.count("\n") for place in places) + 1
    titles = [[""] * (height - 1 - column.title.count("\n")) + column.title.split("\n") for column in columns]
    heads = [[title[line] for title in titles] for line in range(height)]
    lines = []
    for at, cells in enumerate([*heads, *rows], start=-height):
        line = []
        for place in places:
            column, cell = columns[place], cells[place]
            padded = cell.ljust(widths[place]) if column.left or place == 0 else cell.rjust(widths[place])
            line.append(style.paint(padded, "bold" if at < 0 or at in bold else column.paint))
        lines.append((" " * BETWEEN).join(line).rstrip())
    return "\n".join(lines)


# --- figures ------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of figures."""

    title: str
    unit: str = "text"
    """One of `UNITS`."""
    drop: int = 0
    """As of `TextColumn`."""
    on_page: str = ""
    """Its title on the page, where the unit alone does not make one."""

    @property
    def page_title(self) -> str:
        return self.on_page or self.title.replace("\n", " ") + UNITS[self.unit].suffix


class Unit(NamedTuple):
    """How a figure is written: in the terminal, and on the page with so many digits of so much."""

    in_terminal: Callable[[Any], str]
    digits: int
    scale: float = 1.0
    suffix: str = ""
    """Of the title on the page."""


UNITS = {
    "text": Unit(str, 0),
    "count": Unit(lambda value: f"{value:,.0f}", 0),
    "bytes": Unit(lambda value: f"{value / 1e6:,.1f}", 1, 1e6),
    "share": Unit(percent, 1, 0.01, " %"),
    "rough share": Unit(lambda value: percent(value, 0), 1, 0.01, " %"),
    "rate": Unit(lambda value: f"{value:.3g}", 1),
    "time": Unit(str, 3, 1e6, " ms"),
    "short time": Unit(lambda value: duration(value, 1), 1, 1e3, " µs"),
}
"""``time`` is in nanoseconds; in the terminal all of a table are in the unit that suits the longest. A ``rate`` is in
what the title says."""


class Table(NamedTuple):
    """Rows of figures as they are measured: nanoseconds, bytes, shares 0..1; None where one is not known."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    def text(self, style: TextStyle) -> str:
        """For the terminal."""
        times = [row[at] for at, column in enumerate(self.columns) if column.unit == "time" for row in self.rows]
        unit_ns, unit = unit_for(max((time for time in times if time is not None), default=0))

        def cell(value: Any, kind: str) -> str:
            if value is None:
                return "-"
            return in_unit(value, unit_ns) if kind == "time" else UNITS[kind].in_terminal(value)

        names = TextColumn(f"{self.title}\nin {unit}" if times else self.title)
        columns = [names, *(TextColumn(column.title, drop=column.drop) for column in self.columns[1:])]
        kinds = [column.unit for column in self.columns]
        return text_table(columns, [[*map(cell, row, kinds)] for row in self.rows], style)

    def page(self, whole: str = "") -> PageTable:
        """For the page, sortable; where rows are left out, a note says that ``whole`` has all."""
        kinds = [column.unit for column in self.columns]
        rows = [[*map(_cell, row, kinds)] for row in self.rows[:MOST_ROWS]]
        left = len(self.rows) - MOST_ROWS
        note = f"{left} more rows are left out; {whole} has all." if left > 0 else ""
        return PageTable([column.page_title for column in self.columns], rows, note)


def _cell(value: Any, unit: str) -> Cell:
    if unit == "text":
        return text("-" if value is None else value)
    return number(value, UNITS[unit].digits, UNITS[unit].scale)
