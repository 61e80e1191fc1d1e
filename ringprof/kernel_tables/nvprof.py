"""Reads the summaries that ``nvprof`` prints: GPU activities and API calls, each line with its share of its part."""

from __future__ import annotations

import re

from ringprof.kernel_tables.layout import parse_share, parse_time
from ringprof.kernel_tables.rows import MOST_ROWS, KernelTable, TableRow
from ringprof.log_lines import LinePrefix, LogLines
from ringprof.trace.columns import Caveat

_HEADER = re.compile(r"(?:Type {1,16})?Time\(%\) {1,32}Time {1,32}Calls {1,32}Avg {1,32}Min {1,32}Max {1,32}Name *$")
# Where parts have headers of their own, their names stand on lines of their own: ==9261== API calls:
_PART = re.compile(r"(GPU activities|API calls|OpenACC \(\w{1,20}\)|OpenMP \(\w{1,20}\)):")
_TIME = r"([0-9]{1,18}(?:\.[0-9]{1,12})?(?:ns|us|ms|s))"
_ROW = re.compile(rf" *([0-9]{{1,3}}\.[0-9][0-9]%) +{_TIME} +([0-9]{{1,18}}) +{_TIME} +{_TIME} +{_TIME}  (\S.*)")


def read_nvprof(lines: LogLines, index: int, path: str) -> tuple[KernelTable, int] | None:
    """(the summary whose header is line ``index``, with all its parts; the line behind it); None without a header."""
    header = _HEADER.search(lines[index])
    if header is None:
        return None
    prefix = LinePrefix(lines[index][: header.start()].rstrip())
    rows: list[TableRow] = []
    part, at = "GPU activities", index + 1
    while at < len(lines) and len(rows) <= MOST_ROWS and (content := prefix.cut(lines[at])) is not None:
        if named := _PART.search(content):
            part, content = named[1], content[named.end() :]
        if row := _ROW.match(content):
            rows += _row(row, part, at + 1)
        elif content.strip() and not named and not _HEADER.search(content):
            break
        at += 1
    where = f"{path}:{index + 1}: the log ends inside this table: it may have been cut off"
    warnings = (Caveat("table_cut_off", where),) if at == len(lines) and lines.is_open(at - 1) else ()
    return KernelTable(path, index + 1, "nvprof", "CUDA", tuple(header[0].split()), tuple(rows), warnings=warnings), at


def _row(row: re.Match[str], part: str, line: int) -> list[TableRow]:
    time_ns, step_ns, unit = parse_time(row[2])
    if part == "GPU activities":
        return [TableRow(row[7].strip(), line, int(row[3]), 0, 0, time_ns, parse_share(row[1]), unit, step_ns)]
    return [TableRow(row[7].strip(), line, int(row[3]), time_ns, time_ns)] if part == "API calls" else []
