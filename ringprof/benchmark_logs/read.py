"""Reads the benchmark logs of ring-attention systems into rows, whatever stands between them.

Formats: the ``|`` tables of Transformer Engine, double ring, USP and Ulysses scripts, with or without a launcher's
prefix; Markdown tables of the same; tables by ring type with throughput, latency, peak memory and speed; Burst's
blocks of settings, times and rates; ``Benchmark Results for`` blocks. Settings that the text states elsewhere
are put on the rows that follow and say from which line they come.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from ringprof.benchmark_logs.blocks import read_burst_figures, read_results
from ringprof.benchmark_logs.cells import placement_of, system_of
from ringprof.benchmark_logs.pipes import PipeHeader, find_pipe_header, read_pipe_row
from ringprof.benchmark_logs.rows import BenchmarkLog, LogRow, Settings
from ringprof.benchmark_logs.settings import log_names, read_settings
from ringprof.errors import InputError
from ringprof.files import read_whole
from ringprof.kernel_tables.text import split_lines

__all__ = ["BenchmarkLog", "LogRow", "Settings", "has_rows", "parse_log", "read_log"]

_STATED = ("batch", "heads", "kv_heads", "head_dim", "causal", "world_size", "device")
_TWO_RINGS = re.compile(r"\[\d+(?:, ?\d+){0,4096}\]\s{1,16}\[\d+(?:, ?\d+){0,4096}\]")
_MOST_HEADERS = 16
"""Tables of different prefixes that may be interleaved."""


def has_rows(text: str) -> bool:
    """Whether ``text`` holds benchmark rows."""
    return bool(parse_log(text, "").rows)


LIMIT_BYTES = 1 << 30
"""Of a log, unless the caller says otherwise."""


def read_log(path: str | os.PathLike[str], limit_bytes: int | None = None) -> BenchmarkLog:
    """Read one log. Raises `InputError` where it cannot be read or holds no benchmark rows."""
    name = os.fspath(path)
    return decode_log(read_whole(name, limit_bytes or LIMIT_BYTES), name)


def decode_log(data: bytes, name: str) -> BenchmarkLog:
    """As `read_log`, for bytes that are there already; what is not UTF-8 is replaced."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    text = data.decode(encoding, errors="replace")
    log = parse_log(text, name)
    if not log.rows:
        marks = ("# of Calls", "Total Time (ns)")
        hint = f": for its kernel table, ringprof report {name}" if any(mark in text for mark in marks) else ""
        raise InputError(f"{name}: no benchmark rows in a known format{hint}")
    return log


def parse_log(text: str, path: str) -> BenchmarkLog:
    """Every benchmark row in ``text``; none, where it holds none. ``path`` is kept as ``LogRow.file``."""
    reader = _Reader(split_lines(text), path)
    reader.read()
    return BenchmarkLog(
        path, tuple(reader.rows), reader.settings, reader.blocks, tuple(reader.repeated)
    )  # fmt: skip


class _Reader:
    """Goes through the lines once, with the headings, settings and table headers that hold at each."""

    def __init__(self, lines: list[str], path: str) -> None:
        self.lines, self.path = lines, path
        self.rows: list[LogRow] = []
        self.settings = Settings()
        self.blocks = 0
        self.repeated: list[tuple[int, int, str]] = []
        self._named: dict[str, int] = {}
        self._label: tuple[str, int | None] = ("", None)
        self._headers: dict[str, PipeHeader] = {}
        self._block: LogRow | None = None
        self._two_rings = False

    def read(self) -> None:
        index = 0
        while index < len(self.lines):
            index += self._step(index)
        self._end_block()

    def _step(self, index: int) -> int:
        """Reads what begins at a line, and returns how many lines it took."""
        line = self.lines[index]
        if "|" in line:
            used = self._pipes(index)
            if used:
                return used
        block = read_results(self.lines, index)
        if block is not None:
            self._results(block[0], index)
            return block[1]
        if _TWO_RINGS.search(line):
            self._two_rings = True
        self._heading(line, index)
        for name in log_names(line):
            if name in self._named:
                self.repeated.append((self._named[name], index + 1, name))
            self._named.setdefault(name, index + 1)
        if "|" not in line:
            self.settings = read_settings(self.settings, line, index + 1)
        return 1

    def _heading(self, line: str, index: int) -> None:
        text = line.strip()
        if text.startswith("#"):
            self._end_block()
            self._headers.clear()
            self._two_rings = False
        elif not text.startswith(("- ", "* ")) or ": " in text or "=" in text:
            return
        self._label = (text.strip("#*- ").strip(), index + 1)

    # --- tables ---

    def _pipes(self, index: int) -> int:
        header = find_pipe_header(self.lines, index)
        if header is not None:
            if header.is_burst:
                return self._burst(header)
            if len(self._headers) >= _MOST_HEADERS:
                self._headers.clear()
            self._headers[header.prefix.strip()] = header
            return header.used
        for header in self._headers.values():
            found = read_pipe_row(self.lines, index, header)
            if found is not None:
                self._table_row(found[0], header, index)
                return found[1]
        return 0

    def _table_row(self, fields: dict[str, Any], header: PipeHeader, index: int) -> None:
        kind = "ring_type" if "ringtype" in header.keys else "markdown" if header.markdown else "columns"
        ulysses, ring = fields.get("ulysses_degree"), fields.get("ring_degree")
        if ulysses and ring:
            fields.setdefault("world_size", ulysses * ring)
        row = self._row(fields, index, kind, header.titles)
        layout = fields.get("layout")
        if layout is not None:
            own = "ring" if layout == "contiguous" else layout
            row = replace(row, system="usp" if (ulysses or 1) > 1 else own)
        if self._block is not None and _same_run(self._block, row):
            row = _completed(row, self._block)
            self._block = None
        self.rows.append(row)

    def _burst(self, header: PipeHeader) -> int:
        """A block: titles, their values, then lines of times and of rates."""
        at = header.line + header.used
        while at < len(self.lines) and at < header.line + header.used + 3 and not self.lines[at].strip():
            at += 1
        found = read_pipe_row(self.lines, at, header) if at < len(self.lines) else None
        figures = read_burst_figures(self.lines, at + found[1]) if found else None
        if found is None or figures is None:
            return header.used
        fields = found[0] | figures[0]
        row = self._row(fields, at, "burst", header.titles)
        self.rows.append(replace(row, system="burst"))
        return at + found[1] + figures[1] - header.line

    def _results(self, fields: dict[str, Any], index: int) -> None:
        self._end_block()
        self.blocks += 1
        label = fields.pop("label")
        row = self._row(fields, index, "results", ())
        system = "double_ring" if self._two_rings else system_of(label)
        self._block = replace(row, label=label, label_line=index + 1, system=system)

    def _end_block(self) -> None:
        """A results block that no table row repeats is a row itself."""
        if self._block is not None:
            self.rows.append(self._block)
            self._block = None

    # --- rows ---

    def _row(self, fields: dict[str, Any], index: int, kind: str, titles: tuple[str, ...]) -> LogRow:
        label, label_line = self._label
        sources: dict[str, str] = {}
        known = {name: value for name, value in fields.items() if value is not None}
        for name in _STATED:
            value = getattr(self.settings, name)
            if value is not None and name not in known:
                known[name] = value
                sources[name] = f"line {self.settings.lines.get(name, 0)}"
        return LogRow(
            file=self.path,
            line=index + 1,
            format=kind,
            system=system_of(label),
            label=label,
            label_line=label_line,
            placement=placement_of(label),
            columns=tuple(title for title in titles if title),
            sources=sources,
            **known,
        )


def _same_run(block: LogRow, row: LogRow) -> bool:
    names = ("seq", "batch", "forward_ms", "forward_backward_ms", "tflops")
    return all(getattr(block, name) == getattr(row, name) for name in names)


def _completed(row: LogRow, block: LogRow) -> LogRow:
    """A summary row with the settings of the results block above it, which prints more of them."""
    names = ("heads", "kv_heads", "head_dim", "causal", "world_size", "dtype")
    added = {name: getattr(block, name) for name in names if getattr(row, name) is None or name in row.sources}
    added = {name: value for name, value in added.items() if value is not None}
    sources = {**row.sources, **dict.fromkeys(added, f"line {block.line}")}
    return replace(row, label=block.label, label_line=block.label_line, system=block.system, sources=sources, **added)
