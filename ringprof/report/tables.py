"""Tables of figures as they are measured, for the terminal and for the page; and tables of text for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringprof.analysis.transfers.hops import total
from ringprof.report.page.document import MOST_ROWS, Cell, PageTable, number, text
from ringprof.report.text import TextStyle, duration, in_unit, percent, unit_for

BETWEEN = 2
"""Spaces between two columns."""
NARROWEST_NAME = 36
"""Room that a column of long names keeps."""


_BELOW = "\n"


class TextColumn(NamedTuple):
    """A column of text; the first of a table holds names."""

    title: str
    """Of one line or several."""
    left: bool = False
    """Where its cells stand; figures to the right."""
    drop: int = 0
    """Where room is short, the column with the largest goes first; 0 stays."""
    paint: str = ""
    folds: bool = False
    """Whether its cells may go on in a line below: long names."""


def text_table(
    columns: Sequence[TextColumn], rows: Sequence[Sequence[str]], style: TextStyle, bold: Sequence[int] = ()
) -> str:
    """The table in the room there is; no figure is ever cut.

    Long names go on below, columns are left out, which is said, and what still does not fit stands in a table below.
    ``bold``: the rows that are.
    """
    room, shown = style.table_width, [*range(len(columns))]
    widths = _widths(columns, rows)

    def needed(places: Sequence[int]) -> int:
        return sum(widths[place] + BETWEEN for place in places) - BETWEEN

    natural, everything = list(widths), shown
    for place in shown:
        widths[place] = min(widths[place], NARROWEST_NAME) if columns[place].folds else widths[place]
    enough = needed(everything)
    while needed(shown) > room and any(columns[place].drop for place in shown):
        dropped = max(shown, key=lambda place: (columns[place].drop, place))
        shown = [place for place in shown if place != dropped]
    for place in shown:
        if columns[place].folds:
            widths[place] = min(natural[place], max(widths[place], room - needed(shown) + widths[place]))
            rows = [[*row[:place], _folded(row[place], widths[place]), *row[place + 1 :]] for row in rows]
    blocks: list[str] = []
    rest = shown[1:]
    while rest or not blocks:
        fitting = 1
        while fitting < len(rest) and needed([0, *rest[: fitting + 1]]) <= room:
            fitting += 1
        places = [0, *rest[:fitting]]
        blocks.append(_block(places, columns, rows, [widths[place] for place in places], style, bold))
        rest = rest[fitting:]
    left_out = [columns[place].title.replace("\n", " ") for place in everything if place not in shown]
    if left_out:
        blocks.append(style.wrap(f"no room for {', '.join(left_out)}: --width {enough}", "dim"))
    return "\n".join(blocks)


def table_width(columns: Sequence[TextColumn], rows: Sequence[Sequence[str]]) -> int:
    """How wide the whole table is."""
    return sum(width + BETWEEN for width in _widths(columns, rows)) - BETWEEN


def _widths(columns: Sequence[TextColumn], rows: Sequence[Sequence[str]]) -> list[int]:
    titles = [column.title for column in columns]
    return [max(len(line) for cell in cells for line in cell.split("\n")) for cells in zip(titles, *rows, strict=True)]


def _folded(name: str, width: int) -> str:
    return "\n".join(name[at : at + width] for at in range(0, len(name), width)) or name


def _block(
    places: Sequence[int], columns: Sequence[TextColumn], rows: Sequence[Sequence[str]], widths: Sequence[int],
    style: TextStyle, bold: Sequence[int],
) -> str:  # fmt: skip
    lines = []
    for at, row in enumerate([[column.title for column in columns], *rows], start=-1):
        cells = [row[place].split("\n") for place in places]
        height = max(map(len, cells))
        # The lines of a title stand at its bottom, those of a cell at its top.
        padded = [
            [""] * (height - len(cell)) + cell if at < 0 else cell + [""] * (height - len(cell)) for cell in cells
        ]
        for parts in zip(*padded, strict=True):
            line = []
            for place, part, width in zip(places, parts, widths, strict=True):
                text = part.ljust(width) if columns[place].left or place == 0 else part.rjust(width)
                line.append(style.paint(text, "bold" if at < 0 or at in bold else columns[place].paint))
            lines.append((" " * BETWEEN).join(line).rstrip())
    return "\n".join(lines)


class Listing(NamedTuple):
    """What of the tables that were asked for is listed."""

    sort: str = ""
    """Name of the column whose largest figure comes first; empty for the table's own order."""
    top: int | None = None
    everything: bool = False
    """Every rank's row, not means over ranks, however many there are."""


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
    folds: bool = False
    """As of `TextColumn`."""

    @property
    def name(self) -> str:
        """Its title in one line, by which a listing is sorted."""
        return self.title.replace("\n", " ").lower()

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
    "rough count": Unit(lambda value: f"{value:,.0f}" if value == int(value) else f"{value:,.1f}", 1),
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
    whole: str = ""
    """What has all rows, where some are left out."""

    def text(self, style: TextStyle, most: int | None = None) -> str:
        """For the terminal: the first rows."""
        rows, kinds = self.rows[:most], [column.unit for column in self.columns]
        times = [value for row in rows for value, kind in zip(row, kinds, strict=True) if kind == "time"]
        unit_ns, unit = unit_for(max((time for time in times if time is not None), default=0))

        def cell(value: Any, kind: str) -> str:
            if value is None:
                return "-"
            return in_unit(value, unit_ns) if kind == "time" else UNITS[kind].in_terminal(value)

        first, *others = self.columns
        cells = [[*map(cell, row, kinds)] for row in rows]
        # A title that would widen the column of names for its own sake stands above.
        above = len(self.title) > max((len(row[0]) for row in cells), default=0) + 6
        title = self.title + (f"{', ' if above else _BELOW}in {unit}" if times else "")
        names = TextColumn("" if above else title, folds=first.folds)
        columns = [names, *(TextColumn(column.title, drop=column.drop) for column in others)]
        made = text_table(columns, cells, style)
        made = style.paint(title, "bold") + "\n" + made if above else made
        left = len(self.rows) - len(rows)
        return made + "\n" + style.wrap(f"and {left} more: {self.whole}", "dim") if left > 0 else made

    def listed(self, style: TextStyle, listing: Listing, most: int | None = None) -> str:
        """For the terminal: as many rows as were asked for in the order that was; ``most`` where nobody asked."""
        names, rows = [column.name for column in self.columns], self.rows
        if listing.sort and listing.sort in names:
            place = names.index(listing.sort)
            # What is not known comes last, whichever way the rest goes.
            known = [row for row in rows if row[place] is not None]
            known.sort(key=lambda row: row[place], reverse=self.columns[place].unit != "text")
            rows = [*known, *(row for row in rows if row[place] is None)]
        return self._replace(rows=rows).text(style, listing.top or (None if listing.everything else most))

    def page(self) -> PageTable:
        """For the page, sortable."""
        kinds = [column.unit for column in self.columns]
        rows = [[*map(_cell, row, kinds)] for row in self.rows[:MOST_ROWS]]
        left = len(self.rows) - MOST_ROWS
        note = f"{left} more rows are left out; {self.whole} has all." if left > 0 else ""
        return PageTable([column.page_title for column in self.columns], rows, note)


def _cell(value: Any, unit: str) -> Cell:
    if unit == "text":
        return text("-" if value is None else value)
    return number(value, UNITS[unit].digits, UNITS[unit].scale)


def mean(values: list[int | None]) -> float | None:
    """The mean; None where one is not known."""
    whole = total(values)
    return None if whole is None else whole / len(values)
