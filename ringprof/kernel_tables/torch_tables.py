"""Parser of the tables that torch prints (``key_averages().table()``), in every layout of columns up to now.

Tables may have device, memory, shape, source, node and FLOP columns. Names cut to ``...`` stay as printed.
"""

from __future__ import annotations

import re

from ringprof.common.log_lines import LogLines
from ringprof.kernel_tables.layout import CALLS_TITLES, Columns, TableLayout, find_rule, parse_share, parse_time
from ringprof.kernel_tables.rows import MOST_ROWS, KernelTable, TableRow
from ringprof.trace.columns import Notice

MAX_UNRELATED_LINES = 200
"""Number of consecutive lines with the table's prefix that are not rows, after which the table counts as cut off."""

MAX_LINES_BETWEEN_ROWS = 256
"""Number of lines between two rows after which the table counts as cut off."""

_MAX_NAME_LINES = 4
"""Most lines that a name with line feeds in it may spread over."""

_FOOTER_LINES = 8
_CPU_TOTAL = re.compile(r"(?:Self )?CPU time total: *(\S{1,40})")
_DEVICE_TOTAL = re.compile(r"(?:Self )?((?!CPU\b)[A-Za-z]\w{0,30}) time total: *(\S{1,40})")


class TorchTable:
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
            and unrelated < MAX_UNRELATED_LINES
            and index - last_row < MAX_LINES_BETWEEN_ROWS
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
