"""Reads printed kernel tables out of any text: torch's ``key_averages().table()`` and ``nsys stats`` summaries.

Columns are found by title and cut at the offsets of the dashed rule, so names may hold spaces and commas, and
every column layout that torch has printed is read: with or without device, memory, shape, source, node and
FLOP columns. Rows with a name cut to ``...`` stay as printed.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ringprof.benchmark_logs.read import has_rows
from ringprof.errors import KernelTableError
from ringprof.kernel_tables.cells import cut_row, is_calls, kind_of, parse_share, parse_time
from ringprof.kernel_tables.context import read_context
from ringprof.kernel_tables.nsys_stats import fold_nsys, is_nsys, read_nsys, read_nsys_csv
from ringprof.kernel_tables.rows import Claim, KernelTable, TableContext, TableRow
from ringprof.kernel_tables.text import FoundHeader, Prefix, find_header, find_rule, split_lines
from ringprof.trace.columns import Caveat

__all__ = ["Claim", "KernelTable", "TableContext", "TableRow", "has_table", "read_tables"]

MOST_STRAY = 200
"""Lines in a row that are not of the table before it counts as cut off."""

MOST_FOREIGN = 256
"""Lines of other streams between two rows before a table counts as cut off."""

_FOOTER_LINES = 8
_CPU_TOTAL = re.compile(r"(?:Self )?CPU time total: *(\S{1,40})")
_DEVICE_TOTAL = re.compile(r"(?:Self )?((?!CPU\b)[A-Za-z]\w{0,30}) time total: *(\S{1,40})")
_MARKS = ("# of Calls", "Number of Calls", "Total Time (", "Calls")


def has_table(text: str) -> bool:
    """Whether a kernel table stands anywhere in ``text``."""
    if not any(mark in text for mark in _MARKS):
        # The title itself may be wrapped: only a rule then tells, and wrapped titles still hold this word.
        if "Name" not in text:
            return False
    lines = split_lines(text)
    return any(find_header(lines, i) is not None for i in range(len(lines))) or bool(read_nsys_csv(lines, ""))


def read_tables(text: str, path: str) -> list[KernelTable]:
    """Every kernel table in ``text``, in order; ``path`` is for messages and kept as ``KernelTable.path``.

    Tables of several ranks may be interleaved line by line if each has its own prefix. The API, kernel and
    memory summaries of one ``nsys stats`` report become one table. Raises `KernelTableError` where there is
    no table, or one whose rows cannot be read.
    """
    lines = split_lines(text)
    found = [header for i in range(len(lines)) if (header := find_header(lines, i)) is not None]
    tables: list[KernelTable] = []
    nsys = read_nsys_csv(lines, path)
    limits = _limits(found, len(lines))
    for header, limit in zip(found, limits, strict=True):
        if is_nsys(header.titles):
            nsys.append(read_nsys(lines, header, path))
        else:
            tables.append(_read_torch(lines, header, path, limit))
    tables += fold_nsys(nsys)
    if not tables:
        if has_rows(text):
            raise KernelTableError(f"{path}: benchmark rows but no kernel table: ringprof logs {path}")
        raise KernelTableError(f"{path}: no kernel table in this text (torch's .table() or nsys stats)")
    if not any(table.rows for table in tables):
        raise KernelTableError(
            f"{path}:{tables[0].line}: a kernel table without a row that can be read: was the log cut off here?"
        )
    tables.sort(key=lambda table: table.line)
    return _with_context(tables, lines)


def _limits(found: list[FoundHeader], end: int) -> list[int]:
    """For each table the line at which the next one of its stream begins: no table is read past it."""
    limits: list[int] = []
    following: dict[str, int] = {}
    for header in reversed(found):
        limits.append(following.get(header.rule.prefix, end))
        following[header.rule.prefix] = header.line
    return limits[::-1]


def _with_context(tables: list[KernelTable], lines: list[str]) -> list[KernelTable]:
    """Gives each table what the text up to the next one says; what stands before the first belongs to the first."""
    ends = [table.line - 1 for table in tables[1:]] + [len(lines)]
    starts = [0] + [table.line - 1 for table in tables[1:]]
    return [
        replace(table, context=read_context(lines, start, end))
        for table, start, end in zip(tables, starts, ends, strict=True)
    ]


# --- torch ------------------------------------------------------------------------------------------


def _read_torch(lines: list[str], header: FoundHeader, path: str, limit: int) -> KernelTable:
    kinds = tuple(kind_of(title) for title in header.titles)
    prefix = Prefix(header.rule.prefix)
    rows: list[TableRow] = []
    warnings: list[Caveat] = []
    index, stray, skipped, closed = header.rows_at, 0, 0, False
    own = index
    while index < limit and stray < MOST_STRAY and index - own < MOST_FOREIGN:
        readings = header.readings(lines, index, prefix)
        ends = next((used for content, used in readings if _closes(content, header)), None)
        if ends is not None:
            closed, index = True, index + ends
            break
        row, used = _read_row(lines, index, readings, header, prefix, kinds)
        if row is not None:
            rows.append(row)
            skipped, stray, own = skipped + stray, 0, index
        elif any(content.strip() and not _is_source_line(content, header) for content, _ in readings):
            stray += 1
        index += used
    if not closed:
        warnings.append(Caveat("table_cut_off", f"{path}:{header.line + 1}: no rule ends this table: it was cut off"))
    elif skipped + stray:
        message = f"{path}:{header.line + 1}: {skipped + stray} lines inside the table are not rows of it"
        warnings.append(Caveat("table_lines_skipped", message, count=skipped + stray))
    cpu, device, step = _footer(lines, index, prefix) if closed else (None, None, 0)
    return KernelTable(
        path, header.line + 1, "torch", _device_of(header.titles), header.titles, tuple(rows), cpu, device, step,
        warnings=tuple(warnings),
    )  # fmt: skip


def _closes(content: str, header: FoundHeader) -> bool:
    if content.strip("- \t"):
        return False
    rule = find_rule(content)
    return rule is not None and rule.spans == header.rule.spans


def _is_source_line(content: str, header: FoundHeader) -> bool:
    """A further line of a row's stack: only the last column is filled."""
    return not content[: header.rule.spans[-1][0]].strip()


def _read_row(
    lines: list[str],
    index: int,
    readings: list[tuple[str, int]],
    header: FoundHeader,
    prefix: Prefix,
    kinds: tuple[str, ...],
) -> tuple[TableRow | None, int]:
    """The row that begins at line ``index``, None where there is none, and how many lines it took."""
    for content, used in readings:
        cells = cut_row(content, header.rule, kinds)
        if cells is None:
            continue
        # A line that fills the width may go on, unless the next one begins a row.
        ends = used == readings[-1][1] or len(lines[index + used - 1]) < header.wrap
        if ends or _begins_row(lines, index + used, header, prefix, kinds):
            return _row(cells, header.titles, index + 1), used
    if not readings or (not lines[index].strip() and _begins_row(lines, index + 1, header, prefix, kinds)):
        return None, 1
    if _is_source_line(readings[0][0], header):
        return None, readings[0][1]
    if header.wrap:
        return None, 1
    # A name with line feeds in it is spread over lines, each feed one of its characters; a row that alone was too
    # wide for the terminal is, too, without any.
    fed = wrapped = readings[0][0]
    for at in range(index + 1, min(index + 4, len(lines))):
        following = prefix.cut(lines[at])
        if following is None:
            following = lines[at]
        if _closes(following, header) or cut_row(following, header.rule, kinds) is not None:
            break
        fed, wrapped = f"{fed}\n{following}", wrapped + following
        exact = len(wrapped.rstrip()) == header.rule.width
        cells = cut_row(wrapped if exact else fed, header.rule, kinds) or cut_row(wrapped, header.rule, kinds)
        if cells is not None:
            return _row(cells, header.titles, index + 1), at + 1 - index
    return None, 1


def _begins_row(lines: list[str], index: int, header: FoundHeader, prefix: Prefix, kinds: tuple[str, ...]) -> bool:
    if index >= len(lines):
        return False
    readings = header.readings(lines, index, prefix)
    return any(cut_row(content, header.rule, kinds) is not None or _closes(content, header) for content, _ in readings)


def _row(cells: list[str], titles: tuple[str, ...], line: int) -> TableRow | None:
    """The values of a row's cells by the titles of their columns; None for a row without a name."""
    by_title = dict(zip(titles, cells, strict=True))
    name = by_title["Name"]
    device = _device_of(titles)
    # The oldest tables have no self time of the device: its total stands for it.
    device_cell = by_title.get(f"Self {device}", by_title.get(f"{device} total", ""))
    parsed = parse_time(device_cell) if device else None
    calls = next((cell for title, cell in by_title.items() if is_calls(title)), "")
    if not name and not calls:
        return None
    return TableRow(
        name=name,
        line=line,
        calls=int(calls) if calls else None,
        self_cpu_ns=_time(by_title.get("Self CPU", by_title.get("Self CPU total"))),
        cpu_total_ns=_time(by_title.get("CPU total")),
        self_device_ns=parsed[0] if parsed else None,
        device_total_ns=_time(by_title.get(f"{device} total")),
        device_average_ns=_time(by_title.get(f"{device} time avg")),
        device_share=parse_share(by_title.get(f"Self {device} %", by_title.get(f"{device} total %", ""))),
        unit=parsed[2] if parsed else "",
        step_ns=parsed[1] if parsed else 0,
        overload=by_title.get("Overload Name") or None,
        shapes=by_title.get("Input Shapes") or None,
    )


def _time(cell: str | None) -> int | None:
    parsed = parse_time(cell) if cell else None
    return parsed[0] if parsed else None


def _device_of(titles: tuple[str, ...]) -> str | None:
    """The device that a table's time columns name, such as ``CUDA`` of ``CUDA total``."""
    for title in titles:
        device = title.removesuffix(" total")
        if device != title and device not in ("CPU", "Self CPU"):
            return device
    return None


def _footer(lines: list[str], index: int, prefix: Prefix) -> tuple[int | None, int | None, int]:
    """(CPU total, device total, worth of the device total's last digit) below a table's last rule."""
    cpu = device = None
    step = 0
    for line in lines[index : index + _FOOTER_LINES]:
        content = prefix.cut(line)
        if content is None:
            continue
        if find_rule(content) is not None:
            break
        if cpu is None and (match := _CPU_TOTAL.match(content.strip())):
            cpu = _time(match[1])
        elif device is None and (match := _DEVICE_TOTAL.match(content.strip())):
            parsed = parse_time(match[2])
            device, step = (parsed[0], parsed[1]) if parsed else (None, 0)
    return cpu, device, step
