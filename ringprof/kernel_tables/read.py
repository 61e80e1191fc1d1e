"""Finds every printed kernel table in a text: torch's ``key_averages().table()``, ``nsys stats`` and nvprof's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringprof.errors import KernelTableError, NoKernelTableError
from ringprof.kernel_tables.context import read_context
from ringprof.kernel_tables.layout import TableLayout, find_layout
from ringprof.kernel_tables.nsys_stats import fold_nsys, is_nsys, read_nsys_csv, read_nsys_text
from ringprof.kernel_tables.nvprof import read_nvprof
from ringprof.kernel_tables.rows import KernelTable
from ringprof.kernel_tables.torch_tables import read_torch
from ringprof.log_lines import LogLines


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
    for index, line in enumerate(lines):
        if "--" in line and (layout := find_layout(lines, index)):
            layouts.append(layout)
        if "," in line and "Total" in line and (table := read_nsys_csv(lines, index, path)):
            nsys.append(table)
        if "Time(%)" in line and index >= read_to and (found := read_nvprof(lines, index, path)):
            nvprof.append(found[0])
            read_to = found[1]
    nsys += [read_nsys_text(lines, layout, path) for layout in layouts if is_nsys(layout.titles)]
    torch = [
        read_torch(lines, layout, path, limit)
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
