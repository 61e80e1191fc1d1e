"""Reads rows of tables whose cells stand between ``|``: the summaries of Transformer Engine, double ring, USP and
Ulysses scripts, Markdown tables of them, and tables by ring type."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ringprof.benchmark_logs.cells import LAYOUT_NAMES, NO_NUMBER, integer, parse_number, sequence, truth
from ringprof.benchmark_logs.rows import Fields
from ringprof.log_lines import LinePrefix, LogLines

_FIGURES = {
    "fwd(ms)": "forward_ms",
    "forward(ms)": "forward_ms",
    "fwd+bwd(ms)": "forward_backward_ms",
    "forward+backward(ms)": "forward_backward_ms",
    "memory(mb)": "memory_mb",
    "peakmemory(mb/device)": "memory_mb",
    "tflops/s": "tflops",
    "tflops": "tflops",
    "speed(tflops)": "tflops",
    "throughput(iters/s)": "throughput_per_s",
    "latency(ms/iter)": "latency_ms",
}
_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "dtype": ("dtype", lambda cell: cell or None),
    "b": ("batch", integer),
    "batch": ("batch", integer),
    "batchsize": ("batch", integer),
    "seqlen": ("seq", sequence),
    "sequencelength": ("seq", sequence),
    "numheads": ("heads", integer),
    "heads": ("heads", integer),
    "headdim": ("head_dim", integer),
    "dim": ("head_dim", integer),
    "causal": ("causal", truth),
    "spsize": ("world_size", integer),
    "cpsize": ("world_size", integer),
    "worldsize": ("world_size", integer),
    "ringtype": ("layout", lambda cell: LAYOUT_NAMES.get(cell.lower())),
    "ulyssesdegree": ("ulysses_degree", integer),
    "ringdegree": ("ring_degree", integer),
    "fwdonly": ("forward_only", truth),
    "doublering": ("double_ring", truth),
}
_KNOWN = {*_FIGURES, *_SETTINGS, "qkvformat", "cp", "window", "cudakernel", "optbwd"}
_LENGTHS = {"seqlen", "sequencelength"}
_MARKDOWN_RULE = re.compile(r"[|:\- ]*")

_MOST_PIECES = 8
"""Lines that one wrapped row may spread over."""


@dataclass(frozen=True)
class PipeHeader:
    """The header of one table."""

    line: int
    """Index."""
    used: int
    """Lines that it takes."""
    prefix: LinePrefix
    """What a launcher put before the first cell."""
    titles: tuple[str, ...]
    """As printed."""
    keys: tuple[str, ...]
    """Without spaces and underscores, lower case."""
    wrap: int
    """Width at which the log was wrapped; 0 where the header is on one line."""

    @property
    def known(self) -> int:
        """Titles whose meaning is known."""
        return sum(key in _KNOWN for key in self.keys)

    @property
    def markdown(self) -> bool:
        """Whether rows begin with a bar."""
        return self.keys[0] == ""

    @property
    def is_burst(self) -> bool:
        """Whether these are the settings of a Burst block, whose figures follow on lines of their own."""
        return "seqlen" in self.keys and _FIGURES.keys().isdisjoint(self.keys)


@dataclass(frozen=True)
class PipeRow:
    """One row of a table."""

    fields: Fields
    """By the names of `LogRow`; with the worth of each figure's last digit as ``steps``."""
    used: int
    """Lines that it takes."""
    last_figure: str
    """What stands in the last column; empty where it is no figure."""
    last_cell: str


def _key(title: str) -> str:
    return title.strip().lower().replace(" ", "").replace("_", "").replace("`", "")


def may_be_header(lines: LogLines, index: int) -> bool:
    """Whether `find_pipe_header`, which takes ten times as long, could find one at line ``index``."""
    line = lines[index]
    if line.count("|") < 2 or not any(_key(cell) in _KNOWN for cell in line.split("|")):
        return False
    return _names_length(line) or _names_length("".join(lines.between(index, index + _MOST_PIECES)))


def _names_length(text: str) -> bool:
    key = _key(text)
    return any(title in key for title in _LENGTHS)


def find_pipe_header(lines: LogLines, index: int) -> PipeHeader | None:
    """The header that begins at line ``index``, or None: bars between at least three known titles, one a length.

    Ask `may_be_header` first.
    """
    line = lines[index]
    best, used = _header_of(line, index, 1, 0), 1
    # A wrapped header goes on over lines without its prefix, each of which makes more of it known.
    for following in lines.between(index + 1, index + _MOST_PIECES):
        if _starts_anew(following, best) or _header_of(following, index, 1, 0) is not None:
            break
        line, used = line + following, used + 1
        found = _header_of(line, index, used, len(lines[index]))
        if found is not None and (best is None or found.known > best.known):
            best = found
        elif best is not None and not following.strip():
            return replace(best, used=used, wrap=len(lines[index]))
    return best


def _starts_anew(line: str, header: PipeHeader | None) -> bool:
    if not line.strip():
        return header is None
    if not line.strip("=-| :"):
        return True
    # A wrapped line may go on with a bar; where rows begin with one, that is a new row.
    if (header is None or header.markdown) and line.lstrip().startswith("|"):
        return True
    if header is None:
        return line.lstrip().startswith("#")
    if header.prefix.text:
        return header.prefix.cut(line.lstrip()) is not None
    cells = _cells(line, header) or []
    return len(cells) == len(header.keys) and bool(_fields(cells, header).get("seq"))


def _header_of(text: str, index: int, used: int, wrap: int) -> PipeHeader | None:
    if not _names_length(text):
        return None
    cells = text.split("|")
    if cells[-1].strip() == "":
        cells.pop()
    prefix = ""
    if first := cells[0].split() if cells and _key(cells[0]) not in _KNOWN else []:
        # The title may be of two words ("ring type"); what stands before it is the prefix.
        title = next((t for n in (2, 1) if _key(t := " ".join(first[-n:])) in _KNOWN), "")
        prefix = cells[0][: cells[0].rindex(first[-len(title.split())])] if title else cells[0]
        cells[0] = title
    keys = tuple(map(_key, cells))
    header = PipeHeader(index, used, LinePrefix(prefix.strip()), tuple(cell.strip() for cell in cells), keys, wrap)
    return header if header.known >= 3 and not _LENGTHS.isdisjoint(keys) else None


def read_pipe_row(lines: LogLines, index: int, header: PipeHeader) -> PipeRow | None:
    """The row that begins at line ``index``; None where no row of this table begins there."""
    joined, used = lines[index], 1
    if "|" not in joined:
        return None
    cells = _cells(joined, header)
    while cells is not None and used < min(_MOST_PIECES, len(lines) - index):
        cut = len(cells) < len(header.keys) or (header.wrap > 0 and len(lines[index + used - 1]) == header.wrap)
        following = lines[index + used]
        if not cut or _starts_anew(following, header) or _header_of(following, index, 1, 0):
            break
        joined, used = joined + following, used + 1
        cells = _cells(joined, header)
    if cells is None or len(cells) != len(header.keys):
        return None
    fields = _fields(cells, header)
    last = _FIGURES.get(header.keys[-1], "")
    last = _time_of(fields) if last == "latency_ms" else last
    return PipeRow(fields, used, last, cells[-1]) if fields.get("seq") else None


def _cells(text: str, header: PipeHeader) -> list[str] | None:
    """Stripped cells; None where the line has another prefix, or is the rule of a Markdown table."""
    content = header.prefix.cut(text.lstrip())
    if content is None or _MARKDOWN_RULE.fullmatch(content):
        return None
    cells = [cell.strip() for cell in content.split("|")]
    # Markdown ends rows with a bar, and the header's own last bar was dropped.
    while len(cells) > len(header.keys) and not cells[-1]:
        cells.pop()
    if not header.markdown and len(cells) == len(header.keys) and cells[0].count(" "):
        cells[0] = cells[0].split()[-1]
    return cells


def _fields(cells: list[str], header: PipeHeader) -> Fields:
    fields: Fields = {}
    steps: dict[str, float] = {}
    for key, cell in zip(header.keys, cells, strict=True):
        if key in _SETTINGS:
            name, convert = _SETTINGS[key]
            fields[name] = convert(cell)
        elif key in _FIGURES:
            name = _FIGURES[key]
            if found := parse_number(cell):
                fields[name], steps[name] = found
            elif cell.lower() in ("oom", "out of memory"):
                fields["oom"] = True
            elif cell in NO_NUMBER and name == "tflops":
                fields["missing"] = True
    if "latency_ms" in fields:
        name = _time_of(fields)
        fields[name], steps[name] = fields.pop("latency_ms"), steps.pop("latency_ms")
    return fields | {"steps": steps}


def _time_of(fields: Fields) -> str:
    """What the one time of a row is of: forward, or forward and backward, as the row says."""
    return "forward_ms" if fields.get("forward_only") else "forward_backward_ms"
