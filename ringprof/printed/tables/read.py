"""Reader of every kernel table that torch, ``nsys stats`` or nvprof printed into a text, and of the text around it.

Torch's tables (``key_averages().table()``) are read in every layout up to now; names cut to ``...`` stay so. The
summaries of ``nsys stats``, as text or CSV, and of nvprof list kernels, memory operations and API calls.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

from ringprof.common.log_lines import LinePrefix, LogLines
from ringprof.errors import KernelTableError, NoKernelTableError
from ringprof.printed.tables.layout import (
    CALLS_TITLES,
    UNIT_NS,
    Columns,
    TableLayout,
    find_layout,
    find_rule,
    parse_share,
    parse_time,
    scaled,
)
from ringprof.printed.tables.rows import MOST_ROWS, KernelTable, StatedShare, TableRow
from ringprof.trace.columns import Notice

_MOST = {"dashed lines": 100_000, "kernel tables": 10_000, "rows of kernel tables": MOST_ROWS}
"""Most of each in one log: a log constructed to hold a table on every line would take minutes to read."""


def read_tables(data: bytes, path: str) -> list[KernelTable]:
    """Read every kernel table in a log, in order; ``path`` is used in messages and kept as ``KernelTable.path``.

    Tables of several ranks may be interleaved line by line if each rank has its own prefix. The API, kernel and memory
    summaries of one ``nsys stats`` report become one table. Raises `NoKernelTableError` where there is no table, and
    `KernelTableError` where no row of any table can be read.
    """
    lines = LogLines(data)
    layouts: list[TableLayout] = []
    nsys: list[KernelTable] = []
    nvprof: list[KernelTable] = []
    nvprof_end = 0
    counts: Counter[str] = Counter()

    def count(noun: str, number: int) -> None:
        counts[noun] += number
        if counts[noun] > _MOST[noun]:
            raise KernelTableError(f"{path}: more than {_MOST[noun]} {noun}: cut out the part that you want to see")

    def counted(table: KernelTable) -> KernelTable:
        count("kernel tables", 1)
        count("rows of kernel tables", len(table.rows))
        return table

    for index, line in enumerate(lines):
        if "--" in line:
            count("dashed lines", line.rstrip().endswith("-"))
            if layout := find_layout(lines, index):
                layouts.append(layout)
        if "," in line and "Total" in line and (table := _read_nsys_csv(lines, index, path)):
            nsys.append(counted(table))
        if "Time(%)" in line and index >= nvprof_end and (summary := _read_nvprof(lines, index, path)):
            nvprof.append(counted(summary[0]))
            nvprof_end = summary[1]
    nsys += [counted(_read_nsys_text(lines, layout, path)) for layout in layouts if _is_nsys(layout.titles)]
    # A table ends at the latest where the next one with the same prefix begins.
    ends: list[int] = []
    following: dict[str, int] = {}
    for layout in reversed(layouts):
        ends.append(following.get(layout.rule.prefix, len(lines)))
        following[layout.rule.prefix] = layout.line
    torch = [
        counted(_TorchTable(lines, layout, path).read(end))
        for layout, end in zip(layouts, reversed(ends), strict=True)
        # Summaries of nsys by size have other counts than torch's tables, and no times.
        if not _is_nsys(layout.titles) and not set(CALLS_TITLES).isdisjoint(layout.titles)
    ]
    tables = sorted([*torch, *_fold_nsys(nsys), *nvprof], key=lambda table: table.line)
    if not tables:
        raise NoKernelTableError(f"{path}: no kernel table in this text (torch's .table(), nsys stats or nvprof)")
    if not any(table.rows for table in tables):
        where = f"{path}:{tables[0].line}"
        raise KernelTableError(f"{where}: a kernel table without a row that can be read: was the log cut off here?")
    # The text up to the next table belongs to a table; that before the first table, to the first.
    borders = pairwise([0, *(table.line - 1 for table in tables[1:]), len(lines)])
    return [_with_context(table, lines, start, end) for table, (start, end) in zip(tables, borders, strict=True)]


# --- tables of torch ---------------------------------------------------------------------------------

_MAX_UNRELATED_LINES = 200
"""Number of consecutive lines with the table's prefix that are not rows, after which the table counts as cut off."""

_MAX_LINES_BETWEEN_ROWS = 256
"""Number of lines between two rows after which the table counts as cut off."""

_MAX_NAME_LINES = 4
"""Most lines that a name with line feeds in it may spread over."""

_FOOTER_LINES = 8
_CPU_TOTAL = re.compile(r"(?:Self )?CPU time total: *(\S{1,40})")
_DEVICE_TOTAL = re.compile(r"(?:Self )?((?!CPU\b)[A-Za-z]\w{0,30}) time total: *(\S{1,40})")


class _TorchTable:
    """A table whose header was found, with its parser."""

    def __init__(self, lines: LogLines, layout: TableLayout, path: str) -> None:
        self.lines, self.layout, self.path = lines, layout, path
        self.columns = Columns(layout.titles, layout.rule)
        # The titles of the time columns name the device, such as CUDA in "CUDA total"; None if CPU only.
        others = (title.removesuffix(" total") for title in layout.titles if title.endswith(" total"))
        self.device = next((device for device in others if device not in ("CPU", "Self CPU")), None)

    def read(self, limit: int) -> KernelTable:
        """Read the table, using only lines before index ``limit``."""
        layout, rows = self.layout, list[TableRow]()
        position, warnings = f"{self.path}:{layout.line + 1}", list[Notice]()
        index = last_row = layout.rows_start
        unrelated = skipped = 0
        footer: tuple[int | None, int | None, int] = (None, None, 0)
        while (
            index < limit
            and unrelated < _MAX_UNRELATED_LINES
            and index - last_row < _MAX_LINES_BETWEEN_ROWS
            and len(rows) <= MOST_ROWS
        ):
            candidate_rows = layout.candidate_rows(self.lines, index)
            rule_lines = next((line_count for content, line_count in candidate_rows if layout.ends_table(content)), 0)
            if rule_lines:
                skipped, footer = skipped + unrelated, self._footer(index + rule_lines)
                break
            row, line_count = self._read_row_at(index, candidate_rows)
            if row is not None:
                rows.append(row)
                skipped, unrelated, last_row = skipped + unrelated, 0, index
            elif any(content.strip() and not self._continues_stack(content) for content, _ in candidate_rows):
                unrelated += 1
            index += line_count
        else:
            warnings.append(Notice("table_cut_off", f"{position}: no rule ends this table: it was cut off"))
        if skipped:
            message = f"{position}: {skipped} lines inside the table are not rows of it"
            warnings.append(Notice("table_lines_skipped", message, count=skipped))
        return KernelTable(
            self.path, layout.line + 1, "torch", self.device, layout.titles, tuple(rows), *footer,
            warnings=tuple(warnings),
        )  # fmt: skip

    def _continues_stack(self, content: str) -> bool:
        """Return whether a line continues the stack of the row above: only its last column is filled."""
        return not content[: self.layout.rule.spans[-1][0]].strip()

    def _read_row_at(self, index: int, candidate_rows: list[tuple[str, int]]) -> tuple[TableRow | None, int]:
        """Read the row that begins at line ``index``; return it, or None, and the number of lines read."""
        wrap, lines = self.layout.wrap, self.lines
        for content, line_count in candidate_rows:
            # A line that fills the width may continue on the next line, unless that one begins a row.
            complete = (
                line_count == candidate_rows[-1][1]
                or len(lines[index + line_count - 1]) < wrap
                or self._begins_row(index + line_count)
            )
            if complete and (cells := self.columns.split(content)):
                return self._row(cells, index), line_count
        if not candidate_rows or (not lines[index].strip() and self._begins_row(index + 1)):
            return None, 1
        if self._continues_stack(candidate_rows[0][0]):
            return None, candidate_rows[0][1]
        return (None, 1) if wrap else self._read_spread_row(index, candidate_rows[0][0])

    def _read_spread_row(self, index: int, first: str) -> tuple[TableRow | None, int]:
        """Read a row that is spread over several lines; return it, or None, and the number of lines read.

        Either its name contains line feeds, which count as characters of the name. Or only this row was too wide for
        the terminal and was wrapped, which adds no characters.
        """
        with_line_feeds = without_line_feeds = first
        for last_index, line in enumerate(self.lines.between(index + 1, index + _MAX_NAME_LINES), index + 1):
            content = self.layout.prefix.cut(line)
            next_line = line if content is None else content
            if self.layout.ends_table(next_line) or self.columns.split(next_line):
                break
            with_line_feeds, without_line_feeds = f"{with_line_feeds}\n{next_line}", without_line_feeds + next_line
            fills_rule = len(without_line_feeds.rstrip()) == self.layout.rule.width
            likelier = without_line_feeds if fills_rule else with_line_feeds
            if cells := self.columns.split(likelier) or self.columns.split(without_line_feeds):
                return self._row(cells, index), last_index + 1 - index
        return None, 1

    def _begins_row(self, index: int) -> bool:
        candidate_rows = self.layout.candidate_rows(self.lines, index) if index < len(self.lines) else []
        return any(self.columns.split(content) or self.layout.ends_table(content) for content, _ in candidate_rows)

    def _row(self, cells: dict[str, str], index: int) -> TableRow:
        """Build a row from its cells by title."""
        # The oldest tables have no self time of the device; the device's total is used for it.
        device = cells.get(f"Self {self.device}", cells.get(f"{self.device} total"))
        device_ns, step_ns, unit = parse_time(device if self.device else None)
        return TableRow(
            name=cells["Name"], line=index + 1,
            calls=next((int(cells[title]) for title in CALLS_TITLES if title in cells), None),
            self_cpu_ns=parse_time(cells.get("Self CPU", cells.get("Self CPU total")))[0],
            cpu_total_ns=parse_time(cells.get("CPU total"))[0], self_device_ns=device_ns,
            device_share=parse_share(cells.get(f"Self {self.device} %", cells.get(f"{self.device} total %", ""))),
            unit=unit, step_ns=step_ns,
        )  # fmt: skip

    def _footer(self, index: int) -> tuple[int | None, int | None, int]:
        """Read the footer; return the CPU total, the device total, and the value of the device total's last digit."""
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


# --- summaries of nsys and nvprof ----------------------------------------------------------------------

_TOTAL = re.compile(r"Total(?: Time)? ?\((ns|us|μs|ms|s)\)|Total Time")
_NAMES = ("Name", "Operation")
_KERNEL_COUNTS, _MEMORY_COUNTS, _API_COUNTS = ("Instances",), ("Count", "Operations"), ("Num Calls",)
_NUMBER = re.compile(r"([0-9]{1,3}(?:,[0-9]{3}){1,6}|[0-9]{1,19})(?:\.([0-9]{1,9}))?")


def _is_nsys(titles: Sequence[str]) -> bool:
    """Return whether these are the columns of an ``nsys stats`` summary of kernels, memory operations or API calls."""
    return _count_column(titles) is not None and any(_TOTAL.fullmatch(title) for title in titles)


def _count_column(titles: Sequence[str]) -> str | None:
    """Return the title of the column that holds counts; None for tables that are not supported."""
    # Summaries of NVTX ranges also have instances, but only they have these two columns.
    if "Range" in titles or "Style" in titles or not any(name in titles for name in _NAMES):
        return None
    return next((t for t in titles if t in (*_KERNEL_COUNTS, *_MEMORY_COUNTS, *_API_COUNTS)), None)


def _read_nsys_text(lines: LogLines, layout: TableLayout, path: str) -> KernelTable:
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


def _read_nsys_csv(lines: LogLines, index: int, path: str) -> KernelTable | None:
    """Read the summary in the form of ``--format csv`` whose header is line ``index``; None without such a header."""
    titles = tuple(_csv_cells(lines[index]))
    if not _is_nsys(titles):
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


def _fold_nsys(tables: Iterable[KernelTable]) -> list[KernelTable]:
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


def _read_nvprof(lines: LogLines, index: int, path: str) -> tuple[KernelTable, int] | None:
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


# --- the text around the tables -----------------------------------------------------------------------

_SHARE = re.compile(r"\b(FlashAttention Kernel|RingComm) {0,4}: {0,4}([0-9]{1,12}(?:\.[0-9]{1,9})?) {0,4}(%?)")
_SUBJECTS = {"FlashAttention Kernel": "flash", "RingComm": "send_recv"}
_ITERATION_TIME = re.compile(
    r"\bForward ?\+ ?Backward Time {0,4}: {0,4}([0-9]{1,12}(?:\.[0-9]{1,9})?) {0,4}(us|ms|s)\b", re.IGNORECASE
)
_WORLD = re.compile(r"\bWorld Size {0,4}: {0,4}([0-9]{1,7})\b", re.IGNORECASE)
_ITERATIONS = re.compile(
    r"\b(?:profiled |active |num[ _])?(?:iterations|iters|steps) {0,4}[:=] {0,4}([0-9]{1,9})\b", re.IGNORECASE
)

# The list that some scripts print beside a table: {'flash': [(milliseconds, fraction), ...], 'SendRecv': [...]}.
_LIST = re.compile(r"'(flash|SendRecv)': {0,4}\[([^\]]{0,100000})\]")
_PAIR = re.compile(r"\( {0,4}[-0-9.e+]{1,40}, {0,4}([0-9]{1,12}\.?[0-9]{0,12}) {0,4}\)")
_LISTED = {"flash": "flash", "SendRecv": "send_recv"}


def _with_context(table: KernelTable, lines: LogLines, start: int, end: int) -> KernelTable:
    """Add the facts about the run in lines ``start`` to ``end``; the first statement on each subject counts."""
    shares: list[StatedShare] = []
    fractions: dict[str, tuple[float, ...]] = {}
    iteration_ns = world = iterations = None
    for index in range(start, end):
        line = lines[index]
        if "'" in line:
            for author_list in _LIST.finditer(line):
                listed = tuple(float(pair[1]) for pair in _PAIR.finditer(author_list[2]))
                fractions.setdefault(_LISTED[author_list[1]], listed)
        if ":" not in line and "=" not in line:
            continue
        if match := _SHARE.search(line):
            shares.append(StatedShare(_SUBJECTS[match[1]], match[1], match[2], bool(match[3]), index + 1))
        elif iteration_ns is None and (match := _ITERATION_TIME.search(line)):
            iteration_ns = int(Decimal(match[1]) * UNIT_NS[match[2].lower()])
        elif world is None and (match := _WORLD.search(line)):
            world = int(match[1])
        elif iterations is None and "warm" not in line.lower() and (match := _ITERATIONS.search(line)):
            iterations = int(match[1])
    completed = tuple(replace(share, parts=fractions.get(share.subject)) for share in shares)
    return replace(
        table, shares=completed, iteration_ns=iteration_ns, world_size=world, iterations=iterations or None
    )  # fmt: skip
