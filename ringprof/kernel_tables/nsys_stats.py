"""Reads the summaries that ``nsys stats`` prints: CUDA kernels, memory operations and API calls, as text or CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from ringprof.kernel_tables.layout import TableLayout, scaled
from ringprof.kernel_tables.rows import MOST_ROWS, KernelTable, TableRow
from ringprof.log_lines import LogLines
from ringprof.trace.columns import Caveat

_TOTAL = re.compile(r"Total(?: Time)? ?\((ns|us|μs|ms|s)\)|Total Time")
_NAMES = ("Name", "Operation")
_KERNEL_COUNTS, _MEMORY_COUNTS, _API_COUNTS = ("Instances",), ("Count", "Operations"), ("Num Calls",)
_NUMBER = re.compile(r"([0-9]{1,3}(?:,[0-9]{3}){1,6}|[0-9]{1,19})(?:\.([0-9]{1,9}))?")


def is_nsys(titles: Sequence[str]) -> bool:
    """Whether these are the columns of an ``nsys stats`` summary of kernels, memory operations or API calls."""
    return _count_column(titles) is not None and any(_TOTAL.fullmatch(title) for title in titles)


def _count_column(titles: Sequence[str]) -> str | None:
    # Ranges of NVTX have instances too, and kernels below them; those of kernels have no such columns.
    if "Range" in titles or "Style" in titles or not any(name in titles for name in _NAMES):
        return None
    return next((t for t in titles if t in (*_KERNEL_COUNTS, *_MEMORY_COUNTS, *_API_COUNTS)), None)


def read_nsys_text(lines: LogLines, layout: TableLayout, path: str) -> KernelTable:
    """The summary whose header was found: rows up to the first line that is none."""
    rows: list[TableRow] = []
    index, used = layout.rows_at, 1
    while used and index < len(lines) and len(rows) <= MOST_ROWS:
        used = 0
        for content, pieces in layout.readings(lines, index):
            if row := _row(_cells(content, layout), layout.titles, index + 1):
                rows.append(row)
                used = pieces
                break
        index += used
    return _table(lines, layout.line, path, layout.titles, rows, index)


def _table(
    lines: LogLines, header: int, path: str, titles: tuple[str, ...], rows: list[TableRow], end: int
) -> KernelTable:
    """The table of these rows, of which the first line behind them is ``end``."""
    warnings: tuple[Caveat, ...] = ()
    if end == len(lines) and lines.is_open(end - 1):
        message = f"{path}:{header + 1}: the log ends inside this table: it may have been cut off"
        warnings = (Caveat("table_cut_off", message),)
    return KernelTable(path, header + 1, "nsys", "CUDA", titles, tuple(rows), warnings=warnings)


def _cells(content: str, layout: TableLayout) -> list[str]:
    spans = layout.rule.spans
    if any(content[end:start].strip() for (_, end), (start, _) in pairwise(spans)):
        return content.split(None, len(spans) - 1)
    return [content[start:end].strip() for start, end in spans[:-1]] + [content[spans[-1][0] :].strip()]


def read_nsys_csv(lines: LogLines, index: int, path: str) -> KernelTable | None:
    """The summary whose header is line ``index`` as ``--format csv`` writes it; None where there is none."""
    titles = tuple(_csv_cells(lines[index]))
    if not is_nsys(titles):
        return None
    rows: list[TableRow] = []
    at = index + 1
    while at < len(lines) and len(rows) <= MOST_ROWS and (row := _row(_csv_cells(lines[at]), titles, at + 1)):
        rows.append(row)
        at += 1
    return _table(lines, index, path, titles, rows, at)


def _csv_cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]), [])]
    except csv.Error:
        return []


def _row(cells: list[str], titles: Sequence[str], line: int) -> TableRow | None:
    if len(cells) != len(titles):
        return None
    by_title = dict(zip(titles, cells, strict=True))
    unit, total = next((match[1] or "ns", by_title[title]) for title in titles if (match := _TOTAL.fullmatch(title)))
    count_title = _count_column(titles) or ""
    time, count = _NUMBER.fullmatch(total), _NUMBER.fullmatch(by_title[count_title])
    if time is None or count is None:
        return None
    name = next(by_title[title] for title in _NAMES if title in titles)
    calls = int(count[1].replace(",", ""))
    time_ns, step_ns = scaled(time[1].replace(",", ""), time[2] or "", unit)
    if count_title in _API_COUNTS:
        return TableRow(name, line, calls, self_cpu_ns=time_ns, cpu_total_ns=time_ns)
    return TableRow(name, line, calls, 0, 0, time_ns, unit=unit, step_ns=step_ns)


def fold_nsys(tables: Iterable[KernelTable]) -> list[KernelTable]:
    """One table a report, in order of lines: API calls stand before the kernels, memory operations after them."""
    folded: list[KernelTable] = []
    waiting: list[TableRow] = []
    for table in sorted(tables, key=lambda table: table.line):
        count = _count_column(table.columns)
        if count in _KERNEL_COUNTS:
            folded.append(replace(table, rows=(*waiting, *table.rows)))
            waiting = []
        elif folded and count in _MEMORY_COUNTS:
            folded[-1] = replace(folded[-1], rows=(*folded[-1].rows, *table.rows))
        else:
            waiting += table.rows
    return folded
