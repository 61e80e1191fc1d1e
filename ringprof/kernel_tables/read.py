"""Reader of every kernel table that torch, ``nsys stats`` or nvprof printed into a text, and of the text around it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

from ringprof.common.log_lines import LogLines
from ringprof.errors import KernelTableError, NoKernelTableError
from ringprof.kernel_tables.layout import UNIT_NS, TableLayout, find_layout
from ringprof.kernel_tables.nvidia_tables import fold_nsys, is_nsys, read_nsys_csv, read_nsys_text, read_nvprof
from ringprof.kernel_tables.rows import MOST_ROWS, KernelTable, StatedShare, TableContext
from ringprof.kernel_tables.torch_tables import TorchTable

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
        if "," in line and "Total" in line and (table := read_nsys_csv(lines, index, path)):
            nsys.append(counted(table))
        if "Time(%)" in line and index >= nvprof_end and (summary := read_nvprof(lines, index, path)):
            nvprof.append(counted(summary[0]))
            nvprof_end = summary[1]
    nsys += [counted(read_nsys_text(lines, layout, path)) for layout in layouts if is_nsys(layout.titles)]
    # A table ends at the latest where the next one with the same prefix begins.
    ends: list[int] = []
    following: dict[str, int] = {}
    for layout in reversed(layouts):
        ends.append(following.get(layout.rule.prefix, len(lines)))
        following[layout.rule.prefix] = layout.line
    torch = [
        counted(TorchTable(lines, layout, path).read(end))
        for layout, end in zip(layouts, reversed(ends), strict=True)
        if not is_nsys(layout.titles)
    ]
    tables = sorted([*torch, *fold_nsys(nsys), *nvprof], key=lambda table: table.line)
    if not tables:
        raise NoKernelTableError(f"{path}: no kernel table in this text (torch's .table(), nsys stats or nvprof)")
    if not any(table.rows for table in tables):
        where = f"{path}:{tables[0].line}"
        raise KernelTableError(f"{where}: a kernel table without a row that can be read: was the log cut off here?")
    # The text up to the next table belongs to a table; that before the first table, to the first.
    borders = pairwise([0, *(table.line - 1 for table in tables[1:]), len(lines)])
    return [
        replace(table, context=_read_context(lines, start, end))
        for table, (start, end) in zip(tables, borders, strict=True)
    ]


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


def _read_context(lines: LogLines, start: int, end: int) -> TableContext:
    """Read the context in lines ``start`` to ``end``; the first statement on each subject counts."""
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
    return TableContext(completed, iteration_ns, world, iterations or None)
