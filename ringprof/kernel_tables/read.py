"""Finds every printed kernel table in a text: torch's ``key_averages().table()``, ``nsys stats`` and nvprof's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringprof.errors import KernelTableError, NoKernelTableError
from ringprof.kernel_tables.context import read_context
from ringprof.kernel_tables.layout import TableLayout, find_layout
from ringprof.kernel_tables.nsys_stats import fold_nsys, is_nsys, read_nsys_csv, read_nsys_text
from ringprof.kernel_tables.nvprof import read_nvprof
from ringprof.kernel_tables.rows import MOST_ROWS, KernelTable
from ringprof.kernel_tables.torch_tables import read_torch
from ringprof.log_lines import LogLines

_MOST_TABLES = 10_000
_MOST_RULES = 100_000


def read_tables(data: bytes, path: str) -> list[KernelTable]:
    """Every kernel table in a log, in order; ``path`` is for messages and kept as ``KernelTable.path``.

    Tables of several ranks may be interleaved line by line if each has its own prefix. The API, kernel and
    memory summaries of one ``nsys stats`` report become one table. Raises `KernelTableError` where there is
    no table, or one whose rows cannot be read.
    """
    lines = LogLines(data)
    layouts: list[TableLayout] = []
    nsys: list[KernelTable] = []
    nvprof: list[KernelTable] = []
    read_to = 0
    bound = _Bound(path)
    for index, line in enumerate(lines):
        if "--" in line:
            bound.rule(line)
            if layout := find_layout(lines, index):
                layouts.append(layout)
        if "," in line and "Total" in line and (table := read_nsys_csv(lines, index, path)):
            nsys.append(bound.table(table))
        if "Time(%)" in line and index >= read_to and (found := read_nvprof(lines, index, path)):
            nvprof.append(bound.table(found[0]))
            read_to = found[1]
    nsys += [bound.table(read_nsys_text(lines, layout, path)) for layout in layouts if is_nsys(layout.titles)]
    torch = [
        bound.table(read_torch(lines, layout, path, limit))
        for layout, limit in zip(layouts, _limits(layouts, len(lines)), strict=True)
        if not is_nsys(layout.titles)
    ]
    tables = sorted([*torch, *fold_nsys(nsys), *nvprof], key=lambda table: table.line)
    if not tables:
        raise NoKernelTableError(f"{path}: no kernel table in this text (torch's .table(), nsys stats or nvprof)")
    if not any(table.rows for table in tables):
        where = f"{path}:{tables[0].line}"
        raise KernelTableError(f"{where}: a kernel table without a row that can be read: was the log cut off here?")
    return _with_context(tables, lines)


@dataclass
class _Bound:
    """Counts what a log holds: one made to hold a table on every line would take minutes."""

    path: str
    rules: int = 0
    tables: int = 0
    rows: int = 0

    def rule(self, line: str) -> None:
        self.rules += line.rstrip().endswith("-")
        self._check(self.rules, _MOST_RULES, "dashed lines")

    def table(self, table: KernelTable) -> KernelTable:
        self.tables, self.rows = self.tables + 1, self.rows + len(table.rows)
        self._check(self.tables, _MOST_TABLES, "kernel tables")
        self._check(self.rows, MOST_ROWS, "rows of kernel tables")
        return table

    def _check(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise KernelTableError(f"{self.path}: more than {most} {what}: cut out the part that you want to see")


def _limits(layouts: Sequence[TableLayout], end: int) -> list[int]:
    """For each table the line at which the next one of its stream begins: no table is read past it."""
    limits: list[int] = []
    following: dict[str, int] = {}
    for layout in reversed(layouts):
        limits.append(following.get(layout.rule.prefix, end))
        following[layout.rule.prefix] = layout.line
    return limits[::-1]


def _with_context(tables: list[KernelTable], lines: LogLines) -> list[KernelTable]:
    """Gives each table what the text up to the next one says; what stands before the first belongs to the first."""
    borders = [0, *(table.line - 1 for table in tables[1:]), len(lines)]
    return [
        replace(table, context=read_context(lines, borders[index], borders[index + 1]))
        for index, table in enumerate(tables)
    ]
