"""Reader of the benchmark logs of ring-attention systems into rows, with any text between the rows.

Formats: the ``|`` tables of Transformer Engine, double ring, USP and Ulysses scripts, with or without a launcher's
prefix; Markdown tables of the same; tables by ring type with throughput, latency, peak memory and speed; Burst's
blocks of settings, times and rates; ``Benchmark Results for`` blocks; CSV of the same columns; flash-attention's
printouts. Settings that the text states elsewhere apply to
the rows that follow, which name the line that a setting comes from.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import lru_cache

from ringprof.common.files import read_whole
from ringprof.common.limits import Limits
from ringprof.common.log_lines import TEXT_SHARE, LinePrefix, LogLines
from ringprof.errors import InputError
from ringprof.printed.benchmarks.pipes import (
    PipeHeader,
    PipeRow,
    find_pipe_header,
    may_be_header,
    parse_bool,
    parse_integer,
    parse_number,
    read_pipe_row,
)
from ringprof.printed.benchmarks.rows import STATED, BenchmarkLog, Fields, Flag, LogRow, LogSettings, completed, flag

_TWO_RINGS = re.compile(r"\[[0-9]+(?:, ?[0-9]+){0,4096}\]\s{1,16}\[[0-9]+(?:, ?[0-9]+){0,4096}\]")
_ITERATIONS = re.compile(r"(fwd only|fwd \+ bwd) \(iters?/s(?:ec)?\)")
_MAX_HEADERS = 16
"""Most tables of different prefixes that may be interleaved."""
_MAX_EFFORT = 1_000_000
_TABLE_LINE_EFFORT = 20
"""Effort of a line that may belong to a table; one plain line counts 1, and a log is read up to `_MAX_EFFORT`."""
_OF_ONE_RUN = ("seq", "batch", "forward_ms", "forward_backward_ms", "tflops")
"""Figures by which a table row repeats a results block."""
_FORMATS = (
    ": those are tables (| or CSV) with a column seqlen and one of times (ms), TFLOP/s or iter/s; flash-attention's"
    " '### causal=..., seqlen=... ###' with 'NAME fwd: ...'; Burst's and 'Benchmark Results for' blocks"
)
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
        if b"algbw" in data and b"busbw" in data:
            raise InputError(f"{name}: tables of nccl-tests, which time links alone: ringprof calibrate {name}")
        raise InputError(f"{name}: no benchmark rows in a known format{hint or _FORMATS}")
    return BenchmarkLog(name, tuple(reader.rows), reader.settings, tuple(reader.flags))


def has_rows(data: bytes) -> bool:
    """Return whether a log holds benchmark rows."""
    if not any(mark in data for mark in (b"|", b"Benchmark Results for", b"seqlen")):
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
        self._methods: list[str] = []
        """Titles of the last table with one column per method."""
        self._printout: Fields = {}
        """Settings of the last heading of flash-attention's benchmarks."""
        self._last_row: tuple[int, PipeRow] | None = None

    def read(self, *, only_first: bool = False) -> None:
        """Read all rows, or with ``only_first`` just the first one."""
        # Prefixes that launchers put before the lines of tables, to read headings without them.
        prefixes: dict[str, LinePrefix] = {}
        for index, line in enumerate(self.lines) if not only_first else ():
            if "|" in line and (header := self._find_header(index)) and header.prefix.text:
                prefixes.setdefault(header.prefix.key, header.prefix)
            if len(prefixes) == _MAX_HEADERS or self._effort > _MAX_EFFORT:
                break
        self._prefixes, self._effort = list(prefixes.values()), 0
        index = 0
        while index < self.end and not (only_first and self.rows):
            index += self._read_at(index)
            self._effort += 1
            if self._effort > _MAX_EFFORT:
                self.end = min(index, self.end)
        self._end_block()
        self._check_end()

    def _read_at(self, index: int) -> int:
        """Read the item that begins at line ``index``; return the number of lines that it takes."""
        line = self.lines[index]
        may_be_csv = "," in line and (self._headers or "seq" in line.lower())
        if ("|" in line or may_be_csv) and (line_count := self._read_pipes(index)):
            return line_count
        if self._read_printout(line, index) or ("|" in line and self._read_iterations(line, index)):
            return 1
        if block := _read_results(self.lines, index):
            fields, line_count = block
            self._end_block()
            label = fields.pop("label")
            system = "double_ring" if self._double_ring else _system_of(label)
            # The row of a block is kept until a table row repeats it or the block ends.
            row = self._build_row(fields, index, "results", ())
            self._block = replace(row, label=label, label_line=index + 1, system=system)
            return line_count
        if "[" in line and _TWO_RINGS.search(line):
            self._double_ring = True
        self._read_heading(line, index)
        for name in _LOG_NAME.findall(line) if any(suffix in line for suffix in _LOG_SUFFIXES) else ():
            first = self._first_mentions.setdefault(name, index + 1)
            if first != index + 1:
                message = f"{name} is listed a second time (first on line {first}): another file was probably meant"
                self.flags.append(Flag("repeated_source", "note", self.path, index + 1, message, name))
        if "|" not in line:
            before, self.settings = self.settings, _read_settings(self.settings, line, index + 1)
            self._effort += 0 if self.settings is before else 2
        return 1

    def _read_printout(self, line: str, index: int) -> bool:
        """Read a heading of flash-attention's benchmarks, or one result line below it; return whether it is one."""
        if settings := _read_printout_heading(line):
            self._end_block()
            self._label, self._printout = (line.strip("# \n"), index + 1), settings
            return True
        figures = _read_printout_figures(line) if self._printout and "wd" in line else None
        if not self._printout or figures is None:
            return False
        method, fields = figures
        last = self.rows[-1] if self.rows else None
        if last and (last.label, last.label_line) == (method, self._label[1]):
            # The backward pass stands on a line of its own.
            steps = {**last.steps, **fields.pop("steps")}
            self.rows[-1] = replace(last, **fields, steps=steps)
        else:
            row = self._build_row(self._printout | fields, index, "printout", ())
            self.rows.append(_of_method(row, method))
        return True

    def _read_iterations(self, line: str, index: int) -> bool:
        """Read a row of iterations per second with one column per method, or its header; return whether it is one."""
        cells = [cell.strip("* ") for cell in line.strip().strip("|").split("|")]
        if len(cells) > 2 and cells[1].lower() == "gpu":
            self._methods = cells
            return True
        stated = _ITERATIONS.fullmatch(cells[0]) if len(cells) == len(self._methods) else None
        if stated is None:
            return False
        settings: Fields = {"forward_only": stated[1] == "fwd only"}
        if gpus := _GPU_COUNT.search(cells[1].replace("x", "x ", 1)):
            settings |= {"world_size": int(gpus[1]), "device": gpus[2]}
        for method, cell in zip(self._methods[2:], cells[2:], strict=True):
            if number := parse_number(cell):
                fields = settings | {"throughput_per_s": number[0], "steps": {"throughput_per_s": number[1]}}
                row = self._build_row(fields, index, "markdown", tuple(self._methods))
                self.rows.append(_of_method(row, method))
        return True

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
        kind = "csv" if header.separator == "," else kind
        method = fields.pop("label", "")
        ulysses, ring = fields.get("ulysses_degree"), fields.get("ring_degree")
        if ulysses and ring:
            fields.setdefault("world_size", ulysses * ring)
        row = self._build_row(fields, index, kind, header.titles)
        if method:
            row = _of_method(row, method)
        if row.layout is not None:
            system = "ring" if row.layout == "contiguous" else row.layout
            row = replace(row, system="usp" if (ulysses or 1) > 1 else system)
        block = self._block
        if block is not None and all(getattr(block, name) == getattr(row, name) for name in _OF_ONE_RUN):
            # The block above a summary row prints more settings than the row.
            names = ("heads", "kv_heads", "head_dim", "causal", "world_size", "dtype")
            unprinted = [name for name in names if getattr(row, name) is None or name in row.sources]
            row = completed(row, block, unprinted, f"line {block.line}")
            row = replace(row, label=block.label, label_line=block.label_line, system=block.system)
            self._block = None
        self.rows.append(row)

    def _read_burst(self, header: PipeHeader) -> int:
        """Read a Burst block: titles, their values, then lines of times and rates; return its number of lines."""
        start = row_index = header.line + header.line_count
        while row_index < min(len(self.lines), start + 3) and not self.lines[row_index].strip():
            row_index += 1
        settings_row = read_pipe_row(self.lines, row_index, header) if row_index < len(self.lines) else None
        figures = _read_burst_figures(self.lines, row_index + settings_row.line_count) if settings_row else None
        if settings_row is None or figures is None:
            return header.line_count
        row = self._build_row(settings_row.fields | figures[0], row_index, "burst", header.titles)
        self.rows.append(replace(row, system="burst"))
        return row_index + settings_row.line_count + figures[1] - header.line

    def _end_block(self) -> None:
        """Add the last results block as a row, unless a table row has repeated it."""
        if self._block is not None:
            self.rows.append(self._block)
            self._block = None

    # --- rows ---

    def _check_end(self) -> None:
        """Flag a log that is too long, or that ends inside a table row, whose last figure may be incomplete.

        A last figure with fewer decimals than those above it is left out; one that cannot be compared is only noted.
        """
        if self.end < len(self.lines):
            message = f"lines {self.end + 1} to {len(self.lines)} are not read: {_TOO_LONG}"
            self.flags.append(Flag("too_long", "warning", self.path, self.end + 1, message))
            return
        last = len(self.lines) - 1
        above = self.lines[last - 1] if last else ""
        if not self.lines.is_open(last):
            return
        if self._last_row is None or self._last_row[0] != last:
            if self._headers and "|" in self.lines[last] and set(above) & set("|=-"):
                message = "the log ends inside this row, which is left out: it was cut off here"
                self.flags.append(Flag("cut_off", "warning", self.path, last + 1, message))
            return
        row, name, cell = self.rows[-1], self._last_row[1].last_figure, self._last_row[1].last_cell
        complete = cell and (row.missing or not self.lines[last][-1].isalnum())
        if not name or row.oom or complete:
            return
        step = row.steps.get(name, 0.0)
        same_table = (earlier for earlier in self.rows[:-1] if earlier.columns == row.columns)
        steps_above = [earlier.steps[name] for earlier in same_table if name in earlier.steps]
        if step < 1 and step in steps_above:
            return
        if step and step <= min(steps_above, default=step):
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
            file=self.path, line=index + 1, format=kind, system=_system_of(label), label=label, label_line=label_line,
            placement=_placement_of(label), columns=tuple(title for title in titles if title),
            sources={name: f"line {self.settings.lines.get(name, 0)}" for name in stated}, **printed, **stated,
        )  # fmt: skip


# --- text outside the tables: results printed line by line, settings, headings ---------------------------

_MAX_BLOCK_LINES = 60
"""Most lines of one block of results."""

_PASS = r"(forward_backward|forward|backward) {0,4}: {0,4}([0-9]{1,12}(?:\.[0-9]{1,9})?) {0,4}"
_TIME = re.compile(_PASS + r"(ms|us|s)\b")
_RATE = re.compile(_PASS + r"TFLOPS", re.IGNORECASE)
_TIMES = {"forward": "forward_ms", "forward_backward": "forward_backward_ms"}
_RATES = {"forward": "tflops_forward", "forward_backward": "tflops", "backward": "tflops_backward"}

_RESULTS = re.compile(r"\bBenchmark Results for {1,4}([\w./:-]{1,120})")
_ITEM = re.compile(r"- ([A-Z][\w+ /]{0,40}?) {0,4}: {0,4}(\S[^\r\n]{0,120})")
_FIGURE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(ms|us|s|MB|GB|TFLOPs?/s|TFLOPS)?")
_SCALES = {"us": 1e-3, "ms": 1.0, "s": 1e3, "MB": 1.0, "GB": 1024.0}
_INTEGERS = {
    "batch size": "batch", "sequence length": "seq", "num heads": "heads", "head dimension": "head_dim",
    "gqa groups": "kv_heads", "world size": "world_size",
}  # fmt: skip
_FIGURES = {
    "forward time": "forward_ms", "forward+backward time": "forward_backward_ms", "memory usage": "memory_mb",
    "performance": "tflops",
}  # fmt: skip


def _read_burst_figures(lines: LogLines, index: int) -> tuple[Fields, int] | None:
    """Read the times in ms and the TFLOP/s in the lines from ``index`` on; return them and the number of lines read.

    None where no figures follow.
    """
    fields: Fields = {}
    steps: dict[str, float] = {}
    used = 0
    for line in lines.between(index, index + _MAX_BLOCK_LINES):
        times, rates = list(_TIME.finditer(line)), list(_RATE.finditer(line))
        if (not times and not rates and line.strip() and used >= 2) or "seqlen" in line:
            break
        for match in times:
            if name := _TIMES.get(match[1]):
                fields[name], steps[name] = _parse_figure(match[2], match[3])
        for match in rates:
            name = _RATES[match[1].lower()]
            fields[name], steps[name] = _parse_figure(match[2])
        used += 1
        if rates:
            break
    return (fields | {"steps": steps}, used) if fields else None


def _parse_figure(text: str, unit: str = "") -> tuple[float, float]:
    """Parse a figure; return it and the value of its last digit, both converted to ms or MB."""
    value, step = parse_number(text) or (0.0, 0.0)
    scale = _SCALES.get(unit, 1.0)
    # Rounded, so that 0.06 s is exactly 60 ms.
    return round(value * scale, 9), round(step * scale, 9)


def _read_results(lines: LogLines, index: int) -> tuple[Fields, int] | None:
    """Read the block of results that begins at line ``index``; return its fields and the number of lines read.

    None where no block begins there.
    """
    head = _RESULTS.search(lines[index]) if "Benchmark Results for" in lines[index] else None
    if head is None:
        return None
    items: dict[str, str] = {}
    used = 1
    for line in lines.between(index + 1, index + _MAX_BLOCK_LINES):
        if "Benchmark Summary" in line or "Benchmark Results for" in line or "|" in line:
            break
        # Where the log ends inside a line, only a unit after a figure proves that the figure is complete.
        if match := _ITEM.search(line):
            figure = _FIGURE.match(match[2])
            if not lines.is_open(index + used) or (figure is not None and figure[2] is not None):
                items[match[1].strip().lower()] = match[2].strip()
        used += 1
    if "sequence length" not in items:
        return None
    fields: Fields = {name: parse_integer(items.get(key, "")) for key, name in _INTEGERS.items()}
    fields["dtype"] = items.get("dtype")
    steps: dict[str, float] = {}
    for key, name in _FIGURES.items():
        text = items.get(key, "")
        if match := _FIGURE.match(text):
            fields[name], steps[name] = _parse_figure(match[1], match[2] or "")
        elif text.upper().startswith("OOM"):
            fields["oom"] = True
    mask = items.get("attention mask")
    if mask is not None:
        fields["causal"] = "causal" in mask and "no" not in mask.split("causal")[0]
    return fields | {"steps": steps, "label": head[1]}, used


# Results of one method a line, below a heading that states the settings of one GPU, as flash-attention prints them:
# ### causal=True, headdim=128, batch_size=4, seqlen=4096 ###
# Flash2 fwd: 150.25 TFLOPs/s, bwd: 170.50 TFLOPs/s, fwd + bwd: 164.25 TFLOPs/s
# Fav3 fwd: 0.545ms, 126.2 TFLOPS
_PRINTOUT = re.compile(r"#{2,4} (?=[^#]{0,400}seqlen)([^#]{1,400}) #{2,4}\s*")
_PRINTED_SETTING = re.compile(r"(\w{1,40}) ?= ?([\w.]{1,20})")
_PRINTED_NAMES = {
    "causal": "causal", "headdim": "head_dim", "hdim": "head_dim", "batch_size": "batch", "batch": "batch",
    "seqlen": "seq", "seqlen_k": "seq", "nheads": "heads", "nheads_q": "heads", "nheads_k": "kv_heads",
}  # fmt: skip
_PRINTED_PASS = re.compile(r"(fwd \+ bwd|fwd|bwd)\b(?! \+)[^:,]{0,40}:")
_PRINTED_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,20})?) ?(ms|us|s)\b")
_PRINTED_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,20})?) ?TFLOP", re.IGNORECASE)
_TIME_OF_PASS = {"fwd": "forward_ms", "fwd + bwd": "forward_backward_ms"}
_RATE_OF_PASS = {"fwd": "tflops_forward", "bwd": "tflops_backward", "fwd + bwd": "tflops"}
_LONGEST_LINE = 400


def _read_printout_heading(line: str) -> Fields | None:
    """Return the settings of a heading that states a sequence length; None for any other line."""
    match = _PRINTOUT.fullmatch(line.strip()) if "###" in line else None
    if match is None:
        return None
    settings = {name.lower(): text for name, text in _PRINTED_SETTING.findall(match[1])}
    fields: Fields = {"world_size": 1}
    for title, name in _PRINTED_NAMES.items():
        if title in settings:
            fields.setdefault(name, (parse_bool if name == "causal" else parse_integer)(settings[title]))
    return fields if fields.get("seq") else None


def _read_printout_figures(line: str) -> tuple[str, Fields] | None:
    """Return the method and the figures of a result line; None for any other line."""
    passes = list(_PRINTED_PASS.finditer(line, 0, _LONGEST_LINE))
    fields: Fields = {}
    steps: dict[str, float] = {}
    for match, following in zip(passes, [*passes[1:], None], strict=True):
        text = line[match.end() : following.start() if following else _LONGEST_LINE]
        for pattern, names in ((_PRINTED_TIME, _TIME_OF_PASS), (_PRINTED_RATE, _RATE_OF_PASS)):
            if match[1] in names and (figure := pattern.search(text)) and (number := parse_number(figure[1])):
                scale = _SCALES[figure[2]] if pattern is _PRINTED_TIME else 1.0
                fields[names[match[1]]], steps[names[match[1]]] = (round(value * scale, 12) for value in number)
    return (line[: passes[0].start()].strip(), fields | {"steps": steps}) if fields else None


_GAP = r"[`*\"' ]{0,4}[:=][`*\"' ]{0,4}"
_NUMBER = re.compile(
    r"\b(?:(?P<kv_heads>num_kv_heads|num_key_value_heads|kv_heads)"
    r"|(?P<heads>num_attn_heads|num_attention_heads|num_heads|nheads|heads)"
    r"|(?P<head_dim>head_dim|head_size|dim_per_head|head dimension)"
    r"|(?P<batch>batch[_ ]size|batch|bs)|(?P<hidden>hidden[_ ]size)|(?P<world_size>world[_ ]size))"
    rf"{_GAP}([0-9]{{1,7}})\b",
    re.IGNORECASE,
)
_GPUS = re.compile(r"(?<![\w.])([0-9]{1,6}) ?(?:[x\u00d7*] ?GPU\b|(?:[x\u00d7*] ?)?GPUs\b)", re.IGNORECASE)
_DEVICE = (
    r"((?:RTX ?)?\b(?:A10|A40|A100|A800|A6000|B100|B200|GB200|H20|H100|H200|H800|L20|L40S?|V100"
    r"|3090|4090D?|MI[0-9]{3}X?))\b"
)
_GPU_COUNT = re.compile(rf"(?<![\w.])([0-9]{{1,6}}) ?[x\u00d7*] ?(?:NVIDIA )?{_DEVICE}", re.IGNORECASE)
_DEVICE_ALONE = re.compile(_DEVICE)
_SEQS = re.compile(
    rf"\bseq(?:uence)?[_ ]?len(?:gths?)?s?{_GAP}([0-9]{{2,9}}(?: ?, ?[0-9]{{2,9}}){{0,63}})", re.IGNORECASE
)

# A line without any of these words states no settings. Searching for them is much faster than matching the patterns.
_NUMBER_WORDS = ("heads", "head_", "head d", "dim_per", "batch", "bs", "hidden", "world")
_DEVICE_WORDS = ("gpu", "00", "a10", "a40", "h20", "l20", "l40", "090", "mi")

_LOG_NAME = re.compile(r"[`'\"]((?:[\w.-]{1,80}/){0,8}[\w.-]{1,120}\.(?:log|txt|csv|jsonl?))[`'\"]")
_LOG_SUFFIXES = (".log", ".txt", ".csv", ".json")


def _read_settings(settings: LogSettings, line: str, number: int) -> LogSettings:
    """Return ``settings`` updated with those that line ``number`` states; the same object where it states none."""
    lower, fields = line.lower(), Fields()
    assigns = ":" in line or "=" in line
    if assigns and any(word in lower for word in _NUMBER_WORDS):
        for number_match in _NUMBER.finditer(line):
            name = next(name for name, text in number_match.groupdict().items() if text)
            fields.setdefault(name, int(number_match[7]))
    if any(word in lower for word in _DEVICE_WORDS):
        if match := _GPU_COUNT.search(line):
            fields |= {"world_size": int(match[1]), "device": match[2]}
        else:
            if match := _GPUS.search(line):
                fields.setdefault("world_size", int(match[1]))
            if match := _DEVICE_ALONE.search(line):
                fields["device"] = match[1]
    if assigns and "len" in lower and (listed := _SEQS.search(line)):
        seqs = tuple(int(part) for part in listed[1].split(","))
        # A single length is that of one run; a list states the lengths that the log measures.
        if len(seqs) > 1:
            fields["seqs"] = seqs
    fields = {name: value for name, value in fields.items() if value}
    if not fields:
        return settings
    heads, hidden = fields.get("heads", settings.heads), fields.get("hidden", settings.hidden)
    # A hidden size gives the head dimension once the number of heads is known, in whichever order they are stated.
    if heads and hidden and "head_dim" not in fields and settings.head_dim is None and hidden % heads == 0:
        fields["head_dim"] = hidden // heads
    return replace(settings, **fields, lines={**settings.lines, **dict.fromkeys(fields, number)})


# The first pattern that a heading matches names the system. Burst's logs name other systems only in other headings.
_SYSTEMS = (
    ("burst", re.compile(r"burst", re.IGNORECASE)),
    ("double_ring", re.compile(r"double[ _-]?ring|loong", re.IGNORECASE)),
    ("usp", re.compile(r"\busp\b|unified sequence|yunchang", re.IGNORECASE)),
    ("megatron_cp", re.compile(r"(?i:megatron|transformer ?engine|DotProductAttention)|\bTE\b")),
    ("ulysses", re.compile(r"ulysses", re.IGNORECASE)),
    ("zigzag", re.compile(r"zig-?zag", re.IGNORECASE)),
    ("stripe", re.compile(r"strip", re.IGNORECASE)),
    ("ring", re.compile(r"\bring\b|ring ?att", re.IGNORECASE)),
)


def _of_method(row: LogRow, method: str) -> LogRow:
    """Return a row with the system that its own method names."""
    return replace(row, label=method, system=_system_of(method.replace("_", " ")))


@lru_cache(maxsize=256)
def _system_of(label: str) -> str:
    """Return the system that a heading names; ``unknown`` where it names no known system."""
    return next((system for system, pattern in _SYSTEMS if pattern.search(label)), "unknown")


def _placement_of(label: str) -> str | None:
    """Return ``head_first`` or ``ring_first`` if a heading states the placement, else None."""
    plain = label.lower().replace("_", " ").replace("-", " ")
    if "ring first" in plain or "context first" in plain:
        return "ring_first"
    return "head_first" if "head first" in plain else None
