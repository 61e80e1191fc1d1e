"""Parser of tables whose cells are separated by ``|``, or by commas (CSV).

Such tables are the summaries of Transformer Engine, double ring, USP and Ulysses scripts, Markdown tables of them, and
tables by ring type.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ringprof.common.log_lines import LinePrefix, LogLines
from ringprof.printed.benchmarks.rows import Fields

_NUMBER = re.compile(r"[0-9]{1,15}(?:,[0-9]{3}){0,4}(?:\.[0-9]{1,12})?")
_SEQUENCE = re.compile(r"([0-9]{1,12}(?:,[0-9]{3}){0,3})\s?([kKM]?)")
_SCALE = {"": 1, "k": 1 << 10, "K": 1 << 10, "M": 1 << 20}
_NO_NUMBER = frozenset({"x", "X", "\u00d7", "-", "--", "—", "n/a", "N/A", "NA", "nan", "NaN", ""})
"""Texts of cells that hold no value."""

_LAYOUT_NAMES = {"basic": "contiguous", "ring": "contiguous", "zigzag": "zigzag", "stripe": "stripe", "strip": "stripe"}


def parse_number(cell: str) -> tuple[float, float] | None:
    """Parse a cell as (value, value of one unit in the last printed digit); None where it holds no number."""
    text = cell.strip()
    if not _NUMBER.fullmatch(text):
        return None
    plain = text.replace(",", "")
    return float(plain), 10.0 ** -len(plain.partition(".")[2])


def parse_integer(cell: str) -> int | None:
    """Parse a whole number; None for every other cell."""
    number = parse_number(cell)
    return int(number[0]) if number is not None and "." not in cell else None


def parse_sequence(cell: str) -> int | None:
    """Parse a sequence length: ``131072``, ``131,072``, ``128k`` (k is 1024) or ``1M``; None for every other cell."""
    match = _SEQUENCE.fullmatch(cell.strip())
    return int(match[1].replace(",", "")) * _SCALE[match[2]] if match else None


def parse_bool(cell: str) -> bool | None:
    """Parse a printed boolean; None for every other cell."""
    return {"true": True, "false": False, "yes": True, "no": False}.get(cell.strip().lower())


_FIGURES = {
    "fwd(ms)": "forward_ms", "forward(ms)": "forward_ms", "fwd+bwd(ms)": "forward_backward_ms",
    "forward+backward(ms)": "forward_backward_ms", "memory(mb)": "memory_mb", "peakmemory(mb/device)": "memory_mb",
    "tflops/s": "tflops", "tflops": "tflops", "speed(tflops)": "tflops", "throughput(iters/s)": "throughput_per_s",
    "latency(ms/iter)": "latency_ms", "latency(ms)": "time_ms", "time(ms)": "time_ms", "timems": "time_ms",
    "fwdms": "forward_ms", "forwardms": "forward_ms", "fwd+bwdms": "forward_backward_ms", "iter/s": "throughput_per_s",
    "iter/sec": "throughput_per_s", "iters/s": "throughput_per_s", "it/s": "throughput_per_s", "tflop/s": "tflops",
}  # fmt: skip
_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "dtype": ("dtype", lambda cell: cell or None),
    "b": ("batch", parse_integer),
    "batch": ("batch", parse_integer),
    "batchsize": ("batch", parse_integer),
    "seqlen": ("seq", parse_sequence),
    "sequencelength": ("seq", parse_sequence),
    "seq": ("seq", parse_sequence),
    "bs": ("batch", parse_integer),
    "gpus": ("world_size", parse_integer),
    "ngpus": ("world_size", parse_integer),
    "method": ("label", str),
    "numheads": ("heads", parse_integer),
    "heads": ("heads", parse_integer),
    "headdim": ("head_dim", parse_integer),
    # Some tables call the hidden size so, which is larger than any head.
    "dim": ("head_dim", lambda cell: size if (size := parse_integer(cell)) and size <= _LARGEST_HEAD else None),
    "causal": ("causal", parse_bool),
    "spsize": ("world_size", parse_integer),
    "cpsize": ("world_size", parse_integer),
    "worldsize": ("world_size", parse_integer),
    "ringtype": ("layout", lambda cell: _LAYOUT_NAMES.get(cell.lower())),
    "ulyssesdegree": ("ulysses_degree", parse_integer),
    "ringdegree": ("ring_degree", parse_integer),
    "fwdonly": ("forward_only", parse_bool),
    "doublering": ("double_ring", parse_bool),
}
_KNOWN = {*_FIGURES, *_SETTINGS, "qkvformat", "cp", "window", "cudakernel", "optbwd"}
_LENGTHS = {"seqlen", "sequencelength", "seq"}
_LARGEST_HEAD = 512
_MARKDOWN_RULE = re.compile(r"[|:\- ]*")

_MAX_WRAPPED_LINES = 8
"""Most lines that one wrapped row may spread over."""


@dataclass(frozen=True)
class PipeHeader:
    """Header of one table."""

    line: int
    """Index of its first line."""
    line_count: int
    """Number of lines that it takes."""
    prefix: LinePrefix
    """Prefix that a launcher put before the first cell."""
    titles: tuple[str, ...]
    """Printed titles of the columns."""
    keys: tuple[str, ...]
    """Normalised titles: lower case, without spaces, underscores and backquotes."""
    wrap: int
    """Width at which the log was wrapped; 0 where the header is on one line."""
    separator: str = "|"
    """Mark between two cells: a bar, or a comma."""

    @property
    def known(self) -> int:
        """Number of titles whose meaning is known."""
        return sum(key in _KNOWN for key in self.keys)

    @property
    def markdown(self) -> bool:
        """Whether rows begin with a bar."""
        return self.keys[0] == ""

    @property
    def is_burst(self) -> bool:
        """Whether this is the header of a Burst block's settings, whose figures follow on separate lines."""
        return self.separator == "|" and "seqlen" in self.keys and _FIGURES.keys().isdisjoint(self.keys)


@dataclass(frozen=True)
class PipeRow:
    """One row of a table."""

    fields: Fields
    """Values by the field names of `LogRow`; ``steps`` has the value of each figure's last digit."""
    line_count: int
    """Number of lines that it takes."""
    last_figure: str
    """Field name of the figure in the last column; empty where that column holds no figure."""
    last_cell: str
    """Text of the last cell."""


def _key(title: str) -> str:
    """Return a column title in lower case without spaces, underscores and backticks, to look it up."""
    return title.strip().lower().replace(" ", "").replace("_", "").replace("`", "")


def may_be_header(lines: LogLines, index: int) -> bool:
    """Return whether `find_pipe_header`, which takes ten times as long, could find a header at line ``index``."""
    line = lines[index]
    separator = _separator(line)
    if line.count(separator) < 2 or not any(_key(cell) in _KNOWN for cell in line.split(separator)):
        return False
    return _has_length_title(line) or _has_length_title("".join(lines.between(index, index + _MAX_WRAPPED_LINES)))


def _separator(line: str) -> str:
    """Return the mark between the cells of a line."""
    return "|" if "|" in line else ","


def _has_length_title(text: str) -> bool:
    key = _key(text)
    return any(title in key for title in _LENGTHS)


def find_pipe_header(lines: LogLines, index: int) -> PipeHeader | None:
    """Return the header that begins at line ``index``, or None.

    A header has bars between at least three known titles, one of which is the sequence length. Call `may_be_header`
    first.
    """
    line = lines[index]
    best, line_count = _parse_header(line, index, 1, 0), 1
    if "|" not in line:
        return best
    # A wrapped header continues over lines without its prefix, each of which adds known titles.
    for next_line in lines.between(index + 1, index + _MAX_WRAPPED_LINES):
        if _begins_new_row(next_line, best) or _parse_header(next_line, index, 1, 0) is not None:
            break
        line, line_count = line + next_line, line_count + 1
        candidate = _parse_header(line, index, line_count, len(lines[index]))
        if candidate is not None and (best is None or candidate.known > best.known):
            best = candidate
        elif best is not None and not next_line.strip():
            return replace(best, line_count=line_count, wrap=len(lines[index]))
    return best


def _begins_new_row(line: str, header: PipeHeader | None) -> bool:
    """Return whether a line begins a new row or ends the table, rather than continuing a wrapped line."""
    if not line.strip():
        return header is None
    if not line.strip("=-| :"):
        return True
    # A wrapped line may continue with a bar; in a table whose rows begin with a bar, that is a new row.
    if (header is None or header.markdown) and line.lstrip().startswith("|"):
        return True
    if header is None:
        return line.lstrip().startswith("#")
    if header.prefix.text:
        return header.prefix.cut(line.lstrip()) is not None
    cells = _split_cells(line, header) or []
    return len(cells) == len(header.keys) and bool(_parse_fields(cells, header).get("seq"))


def _parse_header(text: str, index: int, line_count: int, wrap: int) -> PipeHeader | None:
    """Parse a line, joined from ``line_count`` wrapped ones, as a header; None where it is none."""
    if not _has_length_title(text):
        return None
    separator = _separator(text)
    cells = text.split(separator)
    if cells[-1].strip() == "":
        cells.pop()
    prefix = ""
    if first_words := cells[0].split() if cells and _key(cells[0]) not in _KNOWN else []:
        # The title may have two words ("ring type"); the text before it is the prefix.
        title = next((t for n in (2, 1) if _key(t := " ".join(first_words[-n:])) in _KNOWN), "")
        prefix = cells[0][: cells[0].rindex(first_words[-len(title.split())])] if title else cells[0]
        cells[0] = title
    keys = tuple(map(_key, cells))
    titles = tuple(cell.strip() for cell in cells)
    header = PipeHeader(index, line_count, LinePrefix(prefix.strip()), titles, keys, wrap, separator)
    has_figures = not _FIGURES.keys().isdisjoint(keys) or header.is_burst
    return header if header.known >= 3 and has_figures and not _LENGTHS.isdisjoint(keys) else None


def read_pipe_row(lines: LogLines, index: int, header: PipeHeader) -> PipeRow | None:
    """Read the row that begins at line ``index``; None where no row of this table begins there."""
    joined, line_count = lines[index], 1
    if header.separator not in joined or header.separator != _separator(joined):
        return None
    cells = _split_cells(joined, header)
    while cells is not None and line_count < min(_MAX_WRAPPED_LINES, len(lines) - index):
        full = header.wrap > 0 and len(lines[index + line_count - 1]) == header.wrap
        incomplete = header.separator == "|" and (full or len(cells) < len(header.keys))
        next_line = lines[index + line_count]
        if not incomplete or _begins_new_row(next_line, header) or _parse_header(next_line, index, 1, 0):
            break
        joined, line_count = joined + next_line, line_count + 1
        cells = _split_cells(joined, header)
    if cells is None or len(cells) != len(header.keys):
        return None
    fields = _parse_fields(cells, header)
    last_figure = _FIGURES.get(header.keys[-1], "")
    last_figure = _time_name(fields) if last_figure == "latency_ms" else last_figure
    return PipeRow(fields, line_count, last_figure, cells[-1]) if fields.get("seq") else None


def _split_cells(text: str, header: PipeHeader) -> list[str] | None:
    """Split a line into stripped cells; None for another prefix, or for the rule of a Markdown table."""
    content = header.prefix.cut(text.lstrip())
    if content is None or _MARKDOWN_RULE.fullmatch(content):
        return None
    cells = [cell.strip() for cell in content.split(header.separator)]
    # Markdown ends rows with a bar; in the header, the empty cell after the last bar was dropped, too.
    while len(cells) > len(header.keys) and not cells[-1]:
        cells.pop()
    if not header.markdown and len(cells) == len(header.keys) and cells[0].count(" "):
        cells[0] = cells[0].split()[-1]
    return cells


def _parse_fields(cells: list[str], header: PipeHeader) -> Fields:
    """Convert the cells of a row to fields of a `LogRow`, by the header's titles."""
    fields: Fields = {}
    steps: dict[str, float] = {}
    for key, cell in zip(header.keys, cells, strict=True):
        if key in _SETTINGS:
            name, convert = _SETTINGS[key]
            fields[name] = convert(cell)
        elif key in _FIGURES:
            name = _FIGURES[key]
            if number := parse_number(cell):
                fields[name], steps[name] = number
            elif cell.lower() in ("oom", "out of memory"):
                fields["oom"] = True
            elif cell in _NO_NUMBER and name == "tflops":
                fields["missing"] = True
    for title in ("latency_ms", "time_ms"):
        # A time of passes that the row does not state stays what it is.
        if title in fields and (title == "latency_ms" or fields.get("forward_only") is not None):
            name = _time_name(fields)
            fields[name], steps[name] = fields.pop(title), steps.pop(title)
    return fields | {"steps": steps}


def _time_name(fields: Fields) -> str:
    """Return the field name of a row's only time: forward, or forward and backward, as the row states."""
    return "forward_ms" if fields.get("forward_only") else "forward_backward_ms"
