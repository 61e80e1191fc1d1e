"""Parser of the summaries of NVIDIA's tools: ``nsys stats``, as text or CSV, and ``nvprof``.

The summaries list kernels and memory operations of the device, and API calls. Each line of nvprof also has its share of
its part of the summary.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from ringprof.common.log_lines import LinePrefix, LogLines
from ringprof.kernel_tables.layout import TableLayout, parse_share, parse_time, scaled
from ringprof.kernel_tables.rows import MOST_ROWS, KernelTable, TableRow
from ringprof.trace.columns import Notice

_TOTAL = re.compile(r"Total(?: Time)? ?\((ns|us|μs|ms|s)\)|Total Time")
_NAMES = ("Name", "Operation")
_KERNEL_COUNTS, _MEMORY_COUNTS, _API_COUNTS = ("Instances",), ("Count", "Operations"), ("Num Calls",)
_NUMBER = re.compile(r"([0-9]{1,3}(?:,[0-9]{3}){1,6}|[0-9]{1,19})(?:\.([0-9]{1,9}))?")


def is_nsys(titles: Sequence[str]) -> bool:
    """Return whether these are the columns of an ``nsys stats`` summary of kernels, memory operations or API calls."""
    return _count_column(titles) is not None and any(_TOTAL.fullmatch(title) for title in titles)


def _count_column(titles: Sequence[str]) -> str | None:
    """Return the title of the column that holds counts; None for tables that are not supported."""
    # Summaries of NVTX ranges also have instances, but only they have these two columns.
    if "Range" in titles or "Style" in titles or not any(name in titles for name in _NAMES):
        return None
    return next((t for t in titles if t in (*_KERNEL_COUNTS, *_MEMORY_COUNTS, *_API_COUNTS)), None)


def read_nsys_text(lines: LogLines, layout: TableLayout, path: str) -> KernelTable:
    """Read the summary with the given layout: all rows up to the first line that is not a row."""
    rows: list[TableRow] = []
    spans, index, lines_used = layout.rule.spans, layout.rows_start, 1
    while lines_used and index < len(lines) and len(rows) <= MOST_ROWS:
        lines_used = 0
        for content, line_count in layout.candidate_rows(lines, index):
            # Cells lie at the columns' offsets; where one is wider than its column, only spaces separate them.
            if any(content[end:start].strip() for (_, end), (start, _) in pairwise(spans)):
                cells = content.split(None, len(spans) - 1)
            else:
                cells = [content[start:end].strip() for start, end in (*spans[:-1], (spans[-1][0], None))]
            if row := _row(cells, layout.titles, index + 1):
                rows.append(row)
                lines_used = line_count
                break
        index += lines_used
    return _table(lines, layout.line, path, layout.titles, rows, index)


def _table(
    lines: LogLines, header: int, path: str, titles: tuple[str, ...], rows: list[TableRow], end: int
) -> KernelTable:
    """Build a table from its rows; ``end`` is the index of the first line after them."""
    warnings = _cut_off(lines, header, path, end)
    return KernelTable(path, header + 1, "nsys", "CUDA", titles, tuple(rows), warnings=warnings)


def _cut_off(lines: LogLines, header: int, path: str, end: int) -> tuple[Notice, ...]:
    """Return a warning where the log ends with the table's last line and that line may be incomplete."""
    message = f"{path}:{header + 1}: the log ends inside this table: it may have been cut off"
    return (Notice("table_cut_off", message),) if end == len(lines) and lines.is_open(end - 1) else ()


def read_nsys_csv(lines: LogLines, index: int, path: str) -> KernelTable | None:
    """Read the summary in the form of ``--format csv`` whose header is line ``index``; None without such a header."""
    titles = tuple(_csv_cells(lines[index]))
    if not is_nsys(titles):
        return None
    rows: list[TableRow] = []
    line_index = index + 1
    while line_index < len(lines) and len(rows) <= MOST_ROWS:
        row = _row(_csv_cells(lines[line_index]), titles, line_index + 1)
        if row is None:
            break
        rows.append(row)
        line_index += 1
    return _table(lines, index, path, titles, rows, line_index)


def _csv_cells(line: str) -> list[str]:
    """Split a line of CSV into stripped cells; empty where it is not valid CSV."""
    try:
        return [cell.strip() for cell in next(csv.reader([line]), [])]
    except csv.Error:
        return []


def _row(cells: list[str], titles: Sequence[str], line: int) -> TableRow | None:
    """Parse the cells of one row of an nsys summary; None where they are not those of a row."""
    if len(cells) != len(titles):
        return None
    by_title = dict(zip(titles, cells, strict=True))
    unit, total_text = next(
        (match[1] or "ns", by_title[title]) for title in titles if (match := _TOTAL.fullmatch(title))
    )
    count_title = _count_column(titles) or ""
    time_match, count_match = _NUMBER.fullmatch(total_text), _NUMBER.fullmatch(by_title[count_title])
    if time_match is None or count_match is None:
        return None
    name = next(by_title[title] for title in _NAMES if title in titles)
    calls = int(count_match[1].replace(",", ""))
    time_ns, step_ns = scaled(time_match[1].replace(",", ""), time_match[2] or "", unit)
    if count_title in _API_COUNTS:
        return TableRow(name, line, calls, self_cpu_ns=time_ns, cpu_total_ns=time_ns)
    return TableRow(name, line, calls, 0, 0, time_ns, unit=unit, step_ns=step_ns)


def fold_nsys(tables: Iterable[KernelTable]) -> list[KernelTable]:
    """Join the summaries of each ``nsys stats`` report into one table, in order of lines.

    In a report, the API calls stand before the kernels, and the memory operations after them.
    """
    folded: list[KernelTable] = []
    pending: list[TableRow] = []
    for table in sorted(tables, key=lambda table: table.line):
        count_title = _count_column(table.columns)
        if count_title in _KERNEL_COUNTS:
            folded.append(replace(table, rows=(*pending, *table.rows)))
            pending = []
        elif folded and count_title in _MEMORY_COUNTS:
            folded[-1] = replace(folded[-1], rows=(*folded[-1].rows, *table.rows))
        else:
            pending += table.rows
    return folded


_HEADER = re.compile(r"(?:Type {1,16})?Time\(%\) {1,32}Time {1,32}Calls {1,32}Avg {1,32}Min {1,32}Max {1,32}Name *$")
# Where each part has its own header, the name of the part stands on a separate line: ==9261== API calls:
_PART = re.compile(r"(GPU activities|API calls|OpenACC \(\w{1,20}\)|OpenMP \(\w{1,20}\)):")
_TIME = r"([0-9]{1,18}(?:\.[0-9]{1,12})?(?:ns|us|ms|s))"
_NVPROF_ROW = re.compile(rf" *([0-9]{{1,3}}\.[0-9][0-9]%) +{_TIME} +([0-9]{{1,18}}) +{_TIME} +{_TIME} +{_TIME}  (\S.*)")


def read_nvprof(lines: LogLines, index: int, path: str) -> tuple[KernelTable, int] | None:
    """Read all parts of the summary whose header is line ``index``; return it and the index of the line after it.

    None where line ``index`` is no header.
    """
    header = _HEADER.search(lines[index])
    if header is None:
        return None
    prefix = LinePrefix(lines[index][: header.start()].rstrip())
    rows: list[TableRow] = []
    part, line_index = "GPU activities", index + 1
    while line_index < len(lines) and len(rows) <= MOST_ROWS and (content := prefix.cut(lines[line_index])) is not None:
        if part_title := _PART.search(content):
            part, content = part_title[1], content[part_title.end() :]
        if row := _NVPROF_ROW.match(content):
            time_ns, step_ns, unit = parse_time(row[2])
            name, line, calls = row[7].strip(), line_index + 1, int(row[3])
            if part == "GPU activities":
                rows.append(TableRow(name, line, calls, 0, 0, time_ns, parse_share(row[1]), unit, step_ns))
            elif part == "API calls":
                rows.append(TableRow(name, line, calls, time_ns, time_ns))
        elif content.strip() and not part_title and not _HEADER.search(content):
            break
        line_index += 1
    titles, warnings = tuple(header[0].split()), _cut_off(lines, index, path, line_index)
    return KernelTable(path, index + 1, "nvprof", "CUDA", titles, tuple(rows), warnings=warnings), line_index
