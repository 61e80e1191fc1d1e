"""Reads the summaries that ``nsys stats`` prints: CUDA kernels, memory operations and API calls, as text or CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ringprof.kernel_tables.rows import KernelTable, TableRow
from ringprof.kernel_tables.text import FoundHeader, Prefix

_TOTAL = re.compile(r"Total(?: Time)? ?\((ns|us|μs|ms|s)\)|Total Time")
_UNIT_NS = {"ns": 1, "us": 1_000, "μs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_NAMES = ("Name", "Operation")
_KERNEL_COUNTS, _MEMORY_COUNTS, _API_COUNTS = ("Instances",), ("Count", "Operations"), ("Num Calls",)
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3}){1,6}(?:\.\d{1,9})?|\d{1,19}(?:\.\d{1,9})?")


def is_nsys(titles: Sequence[str]) -> bool:
    """Whether these are the columns of an ``nsys stats`` summary of kernels, memory operations or API calls."""
    return _count_column(titles) is not None and any(_TOTAL.fullmatch(title) for title in titles)


def _count_column(titles: Sequence[str]) -> str | None:
    # Ranges of NVTX have instances too, and kernels below them; those of kernels have no such columns.
    if "Range" in titles or "Style" in titles or not any(name in titles for name in _NAMES):
        return None
    return next((t for t in titles if t in (*_KERNEL_COUNTS, *_MEMORY_COUNTS, *_API_COUNTS)), None)


def read_nsys(lines: list[str], header: FoundHeader, path: str) -> KernelTable:
    """The summary whose header was found: rows up to the first line that is none."""
    rows: list[TableRow] = []
    prefix = Prefix(header.rule.prefix)
    index = header.rows_at
    while index < len(lines):
        found = None
        for content, used in header.readings(lines, index, prefix):
            found = _row(_cells(content, header), header.titles, index + 1)
            if found is not None:
                rows.append(found)
                index += used
                break
        if found is None:
            break
    return KernelTable(path, header.line + 1, "nsys", "CUDA", header.titles, tuple(rows))


def _cells(content: str, header: FoundHeader) -> list[str]:
    spans = header.rule.spans
    cells = [content[start:end].strip() for start, end in spans]
    cells[-1] = content[spans[-1][0] :].strip()
    gaps = (content[end:start] for (_, end), (start, _) in pairwise(spans))
    return content.split(None, len(spans) - 1) if any(gap.strip() for gap in gaps) else cells


def read_nsys_csv(lines: list[str], path: str) -> list[KernelTable]:
    """The summaries written with ``--format csv``, one for each header line."""
    tables = []
    for index, line in enumerate(lines):
        if "Total" not in line or "," not in line:
            continue
        titles = tuple(_csv_cells(line))
        if not is_nsys(titles):
            continue
        rows = []
        for at in range(index + 1, len(lines)):
            row = _row(_csv_cells(lines[at]), titles, at + 1)
            if row is None:
                break
            rows.append(row)
        tables.append(KernelTable(path, index + 1, "nsys", "CUDA", titles, tuple(rows)))
    return tables


def _csv_cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]), [])]
    except csv.Error:
        return []


def _row(cells: list[str], titles: Sequence[str], line: int) -> TableRow | None:
    if len(cells) != len(titles):
        return None
    by_title = dict(zip(titles, cells, strict=True))
    total_title = next(title for title in titles if _TOTAL.fullmatch(title))
    unit = (_TOTAL.fullmatch(total_title) or [""])[1] or "ns"
    count_title = _count_column(titles) or ""
    total, count = by_title[total_title], by_title[count_title]
    if not _NUMBER.fullmatch(total) or not _NUMBER.fullmatch(count):
        return None
    name = next(by_title[title] for title in _NAMES if title in titles)
    time_ns = _scaled(total, _UNIT_NS[unit])
    calls = int(count.replace(",", "").split(".")[0])
    if count_title in _API_COUNTS:
        return TableRow(name, line, calls, self_cpu_ns=time_ns, cpu_total_ns=time_ns)
    decimals = len(total.partition(".")[2])
    step = max(1, _UNIT_NS[unit] // 10**decimals)
    return TableRow(
        name, line, calls, self_cpu_ns=0, cpu_total_ns=0, self_device_ns=time_ns, device_total_ns=time_ns,
        unit=unit, step_ns=step,
    )  # fmt: skip


def _scaled(number: str, scale: int) -> int:
    whole, _, decimals = number.replace(",", "").partition(".")
    value: int = int(whole) * scale + int(decimals or "0") * scale // 10 ** len(decimals)
    return value


def fold_nsys(tables: list[KernelTable]) -> list[KernelTable]:
    """One table a report: API calls stand before the kernels, memory operations after them."""
    folded: list[KernelTable] = []
    waiting: list[KernelTable] = []
    for table in sorted(tables, key=lambda table: table.line):
        count = _count_column(table.columns)
        if count in _KERNEL_COUNTS:
            before = tuple(row for other in waiting for row in other.rows)
            folded.append(replace(table, rows=(*before, *table.rows)))
            waiting = []
        elif folded and count in _MEMORY_COUNTS:
            folded[-1] = replace(folded[-1], rows=(*folded[-1].rows, *table.rows))
        else:
            waiting.append(table)
    return folded
