"""Tables of figures as they are measured, for the terminal and for the page; and tables of text for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ringprof.formatting import percent, three_digits
from ringprof.report.page.document import MOST_PAGE_ROWS, Cell, PageTable, number, text
from ringprof.report.text import LONGEST_KERNEL, TextStyle, clean, duration, in_unit, unit_for

BETWEEN = 2
"""Spaces between two columns."""
NARROWEST_NAME = 36
"""Room that a column of long names keeps."""


class Column(NamedTuple):
    """A column; the first of a table holds names."""

    title: str
    """Of one line or several."""
    unit: str = "text"
    """One of `UNITS`."""
    drop: int = 0
    """Where the terminal is too narrow, the column with the largest goes first; 0 stays."""
    on_page: str = ""
    """Its title on the page, where the unit alone does not make one."""
    folds: bool = False
    """Whether its cells may go on in a line below: long names."""
    left: bool = False
    """Whether its cells stand to the left; figures do not."""
    paint: str = ""

    @property
    def name(self) -> str:
        """Its title in one line, by which a listing is sorted."""
        return self.title.replace("\n", " ").lower()

    @property
    def page_title(self) -> str:
        return self.on_page or self.title.replace("\n", " ") + UNITS[self.unit].suffix


def text_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], style: TextStyle, bold: Sequence[int] = ()
) -> str:
    """A table of text in the room there is; no figure is ever cut.

    Long names go on below, columns are left out, which is said, and what still does not fit stands in a table below.
    ``bold``: the rows that are.
    """
    room, natural = style.table_width, _widths(columns, rows)
    widths = [min(width, NARROWEST_NAME) if one.folds else width for one, width in zip(columns, natural, strict=True)]
    enough, shown = _needed(widths, range(len(columns))), [*range(len(columns))]
    while _needed(widths, shown) > room and any(columns[place].drop for place in shown):
        shown.remove(max(shown, key=lambda place: (columns[place].drop, place)))
    for place in shown:
        if columns[place].folds:
            widths[place] = min(natural[place], max(widths[place], widths[place] + room - _needed(widths, shown)))
            rows = [[*row[:place], _folded(row[place], widths[place]), *row[place + 1 :]] for row in rows]
    blocks = [_block(places, columns, rows, widths, style, bold) for places in _side_by_side(shown, widths, room)]
    left_out = [
        column.title.replace("-\n", "").replace("\n", " ") for place, column in enumerate(columns) if place not in shown
    ]
    if left_out:
        blocks.append(style.wrap(f"no room for {', '.join(left_out)}: --width {enough}", "dim"))
    return "\n".join(blocks)


def table_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """How wide the whole table is."""
    return _needed(_widths(columns, rows), range(len(columns)))


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    titles = [column.title for column in columns]
    return [max(len(line) for cell in cells for line in cell.split("\n")) for cells in zip(titles, *rows, strict=True)]


def _needed(widths: Sequence[int], places: Sequence[int]) -> int:
    return sum(widths[place] + BETWEEN for place in places) - BETWEEN


def _folded(name: str, width: int) -> str:
    return "\n".join(name[at : at + width] for at in range(0, len(name), max(1, width)))


def _side_by_side(shown: Sequence[int], widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """The columns in groups that fit, each with the names before it."""
    group = shown[:2]
    for place in shown[2:]:
        if _needed(widths, [*group, place]) > room:
            yield [*group]
            group = shown[:1]
        group = [*group, place]
    yield [*group]


def _block(
    places: Sequence[int], columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: Sequence[int],
    style: TextStyle, bold: Sequence[int],
) -> str:  # fmt: skip
    lines = []
    for at, row in enumerate([[column.title for column in columns], *rows], start=-1):
        cells = [row[place].split("\n") for place in places]
        height = max(map(len, cells))
        # The lines of a title stand at its bottom, those of a cell at its top.
        rest = [[""] * (height - len(cell)) for cell in cells]
        padded = [above + cell if at < 0 else cell + above for cell, above in zip(cells, rest, strict=True)]
        for parts in zip(*padded, strict=True):
            line = []
            for place, part in zip(places, parts, strict=True):
                to_left = columns[place].left or place == 0
                text = part.ljust(widths[place]) if to_left else part.rjust(widths[place])
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


class Unit(NamedTuple):
    """How a figure is written: in the terminal, and on the page with so many digits of so much."""

    in_terminal: Callable[[Any], str]
    digits: int
    scale: float = 1.0
    suffix: str = ""
    """Of the title on the page."""


UNITS = {
    "text": Unit(lambda value: clean(str(value), LONGEST_KERNEL), 0),
    "count": Unit(lambda value: f"{value:,.0f}", 0),
    "rough count": Unit(lambda value: f"{value:,.0f}" if value == int(value) else f"{value:,.1f}", 1),
    "bytes": Unit(lambda value: f"{value / 1e6:,.1f}", 1, 1e6),
    "MiB": Unit(lambda value: f"{value / 2**20:,.1f}", 1, 2**20, " MiB"),
    "share": Unit(percent, 1, 0.01, " %"),
    "rough share": Unit(lambda value: percent(value, 0), 1, 0.01, " %"),
    "rate": Unit(three_digits, 1),
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

        cells = [[*map(cell, row, kinds)] for row in rows]
        # A title that would widen the column of names for its own sake stands above.
        above = len(self.title) > max((len(row[0]) for row in cells), default=0) + 6
        title = self.title + ((", " if above else "\n") + f"in {unit}" if times else "")
        names = self.columns[0]._replace(title="" if above else title)
        made = text_table([names, *self.columns[1:]], cells, style)
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
        rows = [[*map(_cell, row, kinds)] for row in self.rows[:MOST_PAGE_ROWS]]
        left = len(self.rows) - MOST_PAGE_ROWS
        note = f"{left} more rows are left out; {self.whole} has all." if left > 0 else ""
        return PageTable([column.page_title for column in self.columns], rows, note)


def _cell(value: Any, unit: str) -> Cell:
    if unit == "text":
        return text("-" if value is None else value)
    whole = unit == "rough count" and value is not None and value == int(value)
    return number(value, 0 if whole else UNITS[unit].digits, UNITS[unit].scale)
