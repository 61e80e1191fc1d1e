"""Reader of the benchmark logs of ring-attention systems into rows, with any text between the rows.

Formats: the ``|`` tables of Transformer Engine, double ring, USP and Ulysses scripts, with or without a launcher's
prefix; Markdown tables of the same; tables by ring type with throughput, latency, peak memory and speed; Burst's
blocks of settings, times and rates; ``Benchmark Results for`` blocks. Settings that the text states elsewhere apply to
the rows that follow, which name the line that a setting comes from.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from ringprof.benchmark_logs.cells import placement_of, system_of
from ringprof.benchmark_logs.free_text import log_names, read_burst_figures, read_results, read_settings
from ringprof.benchmark_logs.pipes import PipeHeader, PipeRow, find_pipe_header, may_be_header, read_pipe_row
from ringprof.benchmark_logs.rows import STATED, BenchmarkLog, Fields, Flag, LogRow, LogSettings, flag
from ringprof.common.files import read_whole
from ringprof.common.limits import Limits
from ringprof.common.log_lines import TEXT_SHARE, LinePrefix, LogLines
from ringprof.errors import InputError

_TWO_RINGS = re.compile(r"\[[0-9]+(?:, ?[0-9]+){0,4096}\]\s{1,16}\[[0-9]+(?:, ?[0-9]+){0,4096}\]")
_MAX_HEADERS = 16
"""Most tables of different prefixes that may be interleaved."""
_MAX_EFFORT = 1_000_000
_TABLE_LINE_EFFORT = 20
"""Effort of a line that may belong to a table; one plain line counts 1, and a log is read up to `_MAX_EFFORT`."""
_TOO_LONG = "the log is longer than one that holds tables alone; cut these out of it"


def read_log(path: str | os.PathLike[str], limits: Limits | None = None) -> BenchmarkLog:
    """Read one log. Raises `InputError` where it cannot be read or holds no benchmark rows."""
    name = os.fspath(path)
    return parse_log(read_whole(name, limits, TEXT_SHARE), name)


def parse_log(data: bytes, name: str) -> BenchmarkLog:
    """Read one log from its content; ``name`` is kept as ``LogRow.file``.

    Raises `InputError` where it holds no benchmark rows.
    """
    reader = _Reader(LogLines(data), name)
    reader.read()
    if not reader.rows:
        if reader.end < len(reader.lines):
            raise InputError(f"{name}: no benchmark rows in the {reader.end} lines that were read: {_TOO_LONG}")
        has_titles = b"# of Calls" in data or b"Total Time (ns)" in data
        hint = f": for its kernel table, ringprof report {name}" if has_titles else ""
        raise InputError(f"{name}: no benchmark rows in a known format{hint}")
    return BenchmarkLog(name, tuple(reader.rows), reader.settings, tuple(reader.flags))


def has_rows(data: bytes) -> bool:
    """Return whether a log holds benchmark rows."""
    if b"|" not in data and b"Benchmark Results for" not in data:
        return False
    reader = _Reader(LogLines(data), "")
    reader.read(only_first=True)
    return bool(reader.rows)


class _Reader:
    """A single pass over the lines of a log, with the heading, settings and table headers that apply at each line."""

    def __init__(self, lines: LogLines, path: str) -> None:
        self.lines, self.path = lines, path
        self.rows: list[LogRow] = []
        self.settings = LogSettings()
        self.flags: list[Flag] = []
        self.end = len(lines)
        """Index of the first line that is not read; before the log's end where the log is too long."""
        self._first_mentions: dict[str, int] = {}
        self._label: tuple[str, int | None] = ("", None)
        self._headers: dict[str, PipeHeader] = {}
        self._prefixes: list[LinePrefix] = []
        self._effort = 0
        self._block: LogRow | None = None
        self._double_ring = False
        self._last_row: tuple[int, PipeRow] | None = None

    def read(self, *, only_first: bool = False) -> None:
        """Read all rows, or with ``only_first`` just the first one."""
        if not only_first:
            self._find_prefixes()
        index = 0
        while index < self.end and not (only_first and self.rows):
            index += self._read_at(index)
            self._effort += 1
            if self._effort > _MAX_EFFORT:
                self.end = min(index, self.end)
        self._end_block()
        self._check_last_line()

    def _find_prefixes(self) -> None:
        """Find the prefixes that launchers put before the lines of tables, to read headings without them."""
        prefixes: dict[str, LinePrefix] = {}
        for index, line in enumerate(self.lines):
            if "|" in line and (header := self._find_header(index)) and header.prefix.text:
                prefixes.setdefault(header.prefix.key, header.prefix)
            if len(prefixes) == _MAX_HEADERS or self._effort > _MAX_EFFORT:
                break
        self._prefixes, self._effort = list(prefixes.values()), 0

    def _read_at(self, index: int) -> int:
        """Read the item that begins at line ``index``; return the number of lines that it takes."""
        line = self.lines[index]
        if "|" in line and (line_count := self._read_pipes(index)):
            return line_count
        if block := read_results(self.lines, index):
            self._read_results_block(block[0], index)
            return block[1]
        if "[" in line and _TWO_RINGS.search(line):
            self._double_ring = True
        self._read_heading(line, index)
        for name in log_names(line):
            first = self._first_mentions.setdefault(name, index + 1)
            if first != index + 1:
                message = f"{name} is listed a second time (first on line {first}): another file was probably meant"
                self.flags.append(Flag("repeated_source", "note", self.path, index + 1, message, name))
        if "|" not in line:
            before, self.settings = self.settings, read_settings(self.settings, line, index + 1)
            self._effort += 0 if self.settings is before else 2
        return 1

    def _read_heading(self, line: str, index: int) -> None:
        """Update the current label from a line that is a heading or a list item."""
        contents = (prefix.cut(line.lstrip()) for prefix in self._prefixes)
        text = next((content for content in contents if content), line).strip()
        if text.startswith("#"):
            self._end_block()
            self._headers.clear()
            self._double_ring = False
        elif not text.startswith(("- ", "* ")) or ": " in text or "=" in text:
            return
        self._label = (text.strip("#*- ").strip(), index + 1)

    # --- tables ---

    def _find_header(self, index: int) -> PipeHeader | None:
        """Return the table header that begins at line ``index``, or None; counts the effort of the search."""
        self._effort += 2
        if not may_be_header(self.lines, index):
            return None
        self._effort += _TABLE_LINE_EFFORT
        return find_pipe_header(self.lines, index)

    def _read_pipes(self, index: int) -> int:
        """Read a header, a Burst block or a table row at line ``index``; return its number of lines, or 0."""
        header = self._find_header(index)
        if header is not None:
            if header.is_burst:
                return self._read_burst(header)
            if len(self._headers) >= _MAX_HEADERS:
                self._headers.clear()
            self._headers[header.prefix.key] = header
            return header.line_count
        for header in self._headers.values():
            if row := read_pipe_row(self.lines, index, header):
                self._add_table_row(row.fields, header, index)
                self._last_row = (index + row.line_count - 1, row)
                return row.line_count
        return 0

    def _add_table_row(self, fields: Fields, header: PipeHeader, index: int) -> None:
        """Add a table row, with its system by layout, and with the settings of a results block that it repeats."""
        kind = "ring_type" if "ringtype" in header.keys else "markdown" if header.markdown else "columns"
        ulysses, ring = fields.get("ulysses_degree"), fields.get("ring_degree")
        if ulysses and ring:
            fields.setdefault("world_size", ulysses * ring)
        row = self._build_row(fields, index, kind, header.titles)
        if row.layout is not None:
            system = "ring" if row.layout == "contiguous" else row.layout
            row = replace(row, system="usp" if (ulysses or 1) > 1 else system)
        if self._block is not None and _same_run(self._block, row):
            row = _with_block_settings(row, self._block)
            self._block = None
        self.rows.append(row)

    def _read_burst(self, header: PipeHeader) -> int:
        """Read a Burst block: titles, their values, then lines of times and rates; return its number of lines."""
        start = row_index = header.line + header.line_count
        while row_index < min(len(self.lines), start + 3) and not self.lines[row_index].strip():
            row_index += 1
        settings_row = read_pipe_row(self.lines, row_index, header) if row_index < len(self.lines) else None
        figures = read_burst_figures(self.lines, row_index + settings_row.line_count) if settings_row else None
        if settings_row is None or figures is None:
            return header.line_count
        row = self._build_row(settings_row.fields | figures[0], row_index, "burst", header.titles)
        self.rows.append(replace(row, system="burst"))
        return row_index + settings_row.line_count + figures[1] - header.line

    def _read_results_block(self, fields: Fields, index: int) -> None:
        """Keep the row of a results block, until a table row repeats it or the block ends."""
        self._end_block()
        label = fields.pop("label")
        system = "double_ring" if self._double_ring else system_of(label)
        row = self._build_row(fields, index, "results", ())
        self._block = replace(row, label=label, label_line=index + 1, system=system)

    def _end_block(self) -> None:
        """Add the last results block as a row, unless a table row has repeated it."""
        if self._block is not None:
            self.rows.append(self._block)
            self._block = None

    # --- rows ---

    def _check_last_line(self) -> None:
        """Flag a log that is too long, or that ends inside a table row, whose last figure may be incomplete."""
        if self.end < len(self.lines):
            message = f"lines {self.end + 1} to {len(self.lines)} are not read: {_TOO_LONG}"
            self.flags.append(Flag("too_long", "warning", self.path, self.end + 1, message))
            return
        last = len(self.lines) - 1
        above = self.lines[last - 1] if last else ""
        if not self.lines.is_open(last):
            return
        if self._last_row is not None and self._last_row[0] == last:
            self._check_last_figure(self.rows[-1], self._last_row[1])
        elif self._headers and "|" in self.lines[last] and set(above) & set("|=-"):
            message = "the log ends inside this row, which is left out: it was cut off here"
            self.flags.append(Flag("cut_off", "warning", self.path, last + 1, message))

    def _check_last_figure(self, row: LogRow, pipe_row: PipeRow) -> None:
        """Leave out a last figure with fewer decimals than those above it; only note one that cannot be compared."""
        name, cell = pipe_row.last_figure, pipe_row.last_cell
        complete = cell and (row.missing or not self.lines[len(self.lines) - 1][-1].isalnum())
        if not name or row.oom or complete:
            return
        step = row.steps.get(name, 0.0)
        above = [
            earlier.steps[name]
            for earlier in self.rows[:-1]
            if earlier.columns == row.columns and name in earlier.steps
        ]
        if step < 1 and step in above:
            return
        if step and step <= min(above, default=step):
            message = f"the log ends right behind {cell}: it may be the beginning of another figure"
            self.flags.append(flag(row, "cut_off", "note", message, cell))
            return
        without: Fields = {name: None, "steps": {n: s for n, s in row.steps.items() if n != name}}
        self.rows[-1] = replace(row, missing=False, **without)
        message = f"the log ends inside the last figure of this row, which is left out ({cell or 'nothing'} is there)"
        self.flags.append(flag(row, "cut_off", "warning", message, cell or None))

    def _build_row(self, fields: Fields, index: int, kind: str, titles: tuple[str, ...]) -> LogRow:
        """Build a row from its printed fields, the current heading and the settings stated so far."""
        self._effort += _TABLE_LINE_EFFORT
        label, label_line = self._label
        printed = {name: value for name, value in fields.items() if value is not None}
        stated = {name: getattr(self.settings, name) for name in STATED if name not in printed}
        stated = {name: value for name, value in stated.items() if value is not None}
        return LogRow(
            file=self.path,
            line=index + 1,
            format=kind,
            system=system_of(label),
            label=label,
            label_line=label_line,
            placement=placement_of(label),
            columns=tuple(title for title in titles if title),
            sources={name: f"line {self.settings.lines.get(name, 0)}" for name in stated},
            **printed,
            **stated,
        )


def _same_run(block: LogRow, row: LogRow) -> bool:
    names = ("seq", "batch", "forward_ms", "forward_backward_ms", "tflops")
    return all(getattr(block, name) == getattr(row, name) for name in names)


def _with_block_settings(row: LogRow, block: LogRow) -> LogRow:
    """Complete a summary row with the settings of the results block above it, which prints more settings."""
    names = ("heads", "kv_heads", "head_dim", "causal", "world_size", "dtype")
    added = {name: getattr(block, name) for name in names if getattr(row, name) is None or name in row.sources}
    added = {name: value for name, value in added.items() if value is not None}
    sources = {**row.sources, **dict.fromkeys(added, f"line {block.line}")}
    return replace(row, label=block.label, label_line=block.label_line, system=block.system, sources=sources, **added)
