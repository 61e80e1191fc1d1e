"""Reads the tables that torch prints (``key_averages().table()``), in every layout of columns that it has had.

With or without device, memory, shape, source, node and FLOP columns. Names cut to ``...`` stay as printed.
"""

from __future__ import annotations

import re

from ringprof.kernel_tables.layout import CALLS_TITLES, Columns, TableLayout, find_rule, parse_share, parse_time
from ringprof.kernel_tables.rows import MOST_ROWS, KernelTable, TableRow
from ringprof.log_lines import LogLines
from ringprof.trace.columns import Notice

MOST_STRAY = 200
"""Lines in a row that are not of the table before it counts as cut off."""

MOST_FOREIGN = 256
"""Lines of other streams between two rows before a table counts as cut off."""

_MOST_PARTS = 4
"""Lines that one name with line feeds in it may spread over."""

_FOOTER_LINES = 8
_CPU_TOTAL = re.compile(r"(?:Self )?CPU time total: *(\S{1,40})")
_DEVICE_TOTAL = re.compile(r"(?:Self )?((?!CPU\b)[A-Za-z]\w{0,30}) time total: *(\S{1,40})")


class TorchTable:
    """One table whose header was found."""

    def __init__(self, lines: LogLines, layout: TableLayout, path: str) -> None:
        self.lines, self.layout, self.path = lines, layout, path
        self.columns = Columns(layout.titles, layout.rule)
        self.device = _device_of(layout.titles)

    def read(self, limit: int) -> KernelTable:
        """What it says; none of it stands at line ``limit`` or behind."""
        layout, rows = self.layout, list[TableRow]()
        where, warnings = f"{self.path}:{layout.line + 1}", list[Notice]()
        index = own = layout.rows_at
        stray = skipped = 0
        footer: tuple[int | None, int | None, int] = (None, None, 0)
        while index < limit and stray < MOST_STRAY and index - own < MOST_FOREIGN and len(rows) <= MOST_ROWS:
            readings = layout.readings(self.lines, index)
            end = next((used for content, used in readings if layout.closes(content)), 0)
            if end:
                skipped, footer = skipped + stray, self._footer(index + end)
                break
            row, used = self._row_at(index, readings)
            if row is not None:
                rows.append(row)
                skipped, stray, own = skipped + stray, 0, index
            elif any(content.strip() and not self._continues_stack(content) for content, _ in readings):
                stray += 1
            index += used
        else:
            warnings.append(Notice("table_cut_off", f"{where}: no rule ends this table: it was cut off"))
        if skipped:
            message = f"{where}: {skipped} lines inside the table are not rows of it"
            warnings.append(Notice("table_lines_skipped", message, count=skipped))
        return KernelTable(
            self.path, layout.line + 1, "torch", self.device, layout.titles, tuple(rows), *footer,
            warnings=tuple(warnings),
        )  # fmt: skip

    def _continues_stack(self, content: str) -> bool:
        """Whether a line is a further one of a row's stack: only the last column is filled."""
        return not content[: self.layout.rule.spans[-1][0]].strip()

    def _row_at(self, index: int, readings: list[tuple[str, int]]) -> tuple[TableRow | None, int]:
        """The row that begins at line ``index``, None where there is none, and how many lines it took."""
        wrap, lines = self.layout.wrap, self.lines
        for content, used in readings:
            # A line that fills the width may go on, unless the next one begins a row.
            ends = used == readings[-1][1] or len(lines[index + used - 1]) < wrap or self._begins_row(index + used)
            if ends and (cells := self.columns.cut(content)):
                return self._row(cells, index), used
        if not readings or (not lines[index].strip() and self._begins_row(index + 1)):
            return None, 1
        if self._continues_stack(readings[0][0]):
            return None, readings[0][1]
        return (None, 1) if wrap else self._spread_row(index, readings[0][0])

    def _spread_row(self, index: int, first: str) -> tuple[TableRow | None, int]:
        """A name with line feeds in it is spread over lines, each feed one of its characters; a row that alone was too
        wide for the terminal is, too, without any."""
        fed = wrapped = first
        for at, line in enumerate(self.lines.between(index + 1, index + _MOST_PARTS), index + 1):
            content = self.layout.prefix.cut(line)
            following = line if content is None else content
            if self.layout.closes(following) or self.columns.cut(following):
                break
            fed, wrapped = f"{fed}\n{following}", wrapped + following
            exact = len(wrapped.rstrip()) == self.layout.rule.width
            if cells := self.columns.cut(wrapped if exact else fed) or self.columns.cut(wrapped):
                return self._row(cells, index), at + 1 - index
        return None, 1

    def _begins_row(self, index: int) -> bool:
        readings = self.layout.readings(self.lines, index) if index < len(self.lines) else []
        return any(self.columns.cut(content) or self.layout.closes(content) for content, _ in readings)

    def _row(self, cells: dict[str, str], index: int) -> TableRow:
        # The oldest tables have no self time of the device: its total stands for it.
        device = cells.get(f"Self {self.device}", cells.get(f"{self.device} total"))
        device_ns, step_ns, unit = parse_time(device if self.device else None)
        return TableRow(
            name=cells["Name"],
            line=index + 1,
            calls=next((int(cells[title]) for title in CALLS_TITLES if title in cells), None),
            self_cpu_ns=parse_time(cells.get("Self CPU", cells.get("Self CPU total")))[0],
            cpu_total_ns=parse_time(cells.get("CPU total"))[0],
            self_device_ns=device_ns,
            device_share=parse_share(cells.get(f"Self {self.device} %", cells.get(f"{self.device} total %", ""))),
            unit=unit,
            step_ns=step_ns,
        )

    def _footer(self, index: int) -> tuple[int | None, int | None, int]:
        """(CPU total, device total, worth of the device total's last digit) below the table's last rule."""
        cpu = device = None
        step = 0
        for line in self.lines.between(index, index + _FOOTER_LINES):
            content = self.layout.prefix.cut(line)
            if content is None:
                continue
            if find_rule(content) is not None:
                break
            if cpu is None and (match := _CPU_TOTAL.match(content.strip())):
                cpu, _, _ = parse_time(match[1])
            elif device is None and (match := _DEVICE_TOTAL.match(content.strip())):
                device, step, _ = parse_time(match[2])
        return cpu, device, step


def _device_of(titles: tuple[str, ...]) -> str | None:
    """The device that a table's time columns name, such as ``CUDA`` of ``CUDA total``."""
    for title in titles:
        device = title.removesuffix(" total")
        if device != title and device not in ("CPU", "Self CPU"):
            return device
    return None
