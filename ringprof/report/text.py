"""Figures and names as text: units, rounding that keeps sums, bars, and nothing that a terminal would obey."""

from __future__ import annotations

import csv
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ringprof.formatting import percent

BLOCKS = " ▏▎▍▌▋▊▉█"
_ASCII = str.maketrans({"·": "|", "█": "#", "…": "~", "µ": "u"})
_UNITS = ((10e9, 1e9, "s"), (1e6, 1e6, "ms"), (0.0, 1e3, "µs"))
_LONGEST_NAME = 200
LONGEST_KERNEL = 2_000
_NAMESPACE = re.compile(r"(?:\b\w{1,100}::|\(anonymous namespace\)::)+(?=\w)")


def short_count(value: float) -> str:
    """Such as a length in tokens: 128k or 2M where it is so many times 1024, else the number."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:,g}"


LONGEST_SENTENCE = 1_000
"""Characters of a line with names from a file in it."""


def clean(text: str, longest: int = _LONGEST_NAME) -> str:
    """A name from a file, safe to print: one line, no control or direction characters, not endless."""
    plain = " ".join(printable(text).split())
    return plain if len(plain) <= longest else plain[: longest - 1] + "…"


def short_name(kernel: str) -> str:
    """A kernel's name without namespaces and what it returns and takes: ``f<8, G>`` of ``void a::f<8, b::G>(int)``."""
    name = kernel.removeprefix("void ")
    at, depth = len(name) - 1, 0
    while name.endswith(")") and at > 0:
        depth += {")": 1, "(": -1}.get(name[at], 0)
        if not depth:
            # "Memset (Device)" takes nothing.
            name = name[:at] if name[at - 1] != " " else name
            break
        at -= 1
    return clean(_NAMESPACE.sub("", name) or kernel, LONGEST_KERNEL)


def printable(text: str) -> str:
    """A text without what a terminal would obey: spaces stand for it."""
    return "".join(char if char.isprintable() else " " for char in text)


def shell_words(paths: Iterable[str]) -> str:
    """Paths as a shell takes them when a hint is copied; ``PATH`` for one with what a terminal would obey."""
    return shlex.join(path if path.isprintable() else "PATH" for path in paths)


def in_ascii(text: str) -> str:
    """The same text for an output that knows only ASCII."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def unit_for(time_ns: float) -> tuple[float, str]:
    """(nanoseconds in one unit, its name) that suits times up to ``time_ns``."""
    return next((size, name) for least, size, name in _UNITS if time_ns >= least)


def in_unit(time_ns: float, unit_ns: float, digits: int = 3) -> str:
    """A time as a number with a fixed count of digits."""
    return f"{time_ns / unit_ns:,.{digits}f}"


def duration(time_ns: float, digits: int = 2) -> str:
    """A time with the unit that suits it."""
    unit_ns, name = unit_for(time_ns)
    return f"{in_unit(time_ns, unit_ns, digits)} {name}"


def or_dash(value: float | None, form: str) -> str:
    """A number in a form, a dash where it is not known."""
    return "-" if value is None else format(value, form)


def slower_or_faster(excess: float) -> str:
    """How much longer something takes, as a share, in words; what rounds to nothing is neither."""
    shown = percent(abs(excess))
    return "as fast" if shown == percent(0.0) else f"{shown} {'slower' if excess > 0 else 'faster'}"


def rate(tflops: float) -> str:
    """A rate of floating-point operations; on a CPU it is small."""
    return f"{tflops:,.1f} TFLOP/s" if tflops >= 1 else f"{1000 * tflops:,.1f} GFLOP/s"


def captured_in_words(iterations: int | None) -> str:
    """Say how many iterations a captured block holds, for a heading or a sentence."""
    if iterations is None:
        return "a captured block"
    return f"{iterations} captured iteration{'s' if iterations > 1 else ''}"


def binary_size(size_bytes: int) -> str:
    """A size in the largest binary unit that leaves a number of at least 1."""
    for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):,.1f} {name}"
    return f"{size_bytes} bytes"


def rounded_to_sum(values: Sequence[float], whole: float, digits: int) -> list[float]:
    """``values`` rounded to ``digits`` so that they add up to ``whole`` as it is rounded itself.

    Those cut most are rounded up first; where rounding alone cannot close the gap, it is left open.
    """
    scale = 10**digits
    scaled = [value * scale for value in values]
    floors = [int(value // 1) for value in scaled]
    # As formatting rounds it: the product with the scale may fall on the other side of a half.
    missing = round(round(whole, digits) * scale) - sum(floors)
    by_rest = sorted(range(len(scaled)), key=lambda i: floors[i] - scaled[i])
    for index in by_rest[: max(0, missing)]:
        floors[index] += 1
    return [floor / scale for floor in floors]


_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""How a spreadsheet's formula begins; to some also in full width."""


def csv_text(titles: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table as CSV: empty for what is not known, names on one line, and none that a spreadsheet would run."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows([spreadsheet_cell(value) for value in row] for row in rows)
    return stream.getvalue()


def spreadsheet_cell(value: Any) -> Any:
    """A value for a CSV: text from outside on one line, and none that a spreadsheet would run as a formula."""
    if not isinstance(value, str):
        return value
    plain = clean(value)
    return f"'{plain}" if plain.startswith(_FORMULA) else plain


_TO_SECOND_COLUMN = re.compile(r" *\S+(?: \S+)*  +")
MOST_READABLE = 100
"""Columns of a line of text where there is room for more."""
_PAINT = {"bold": "1", "dim": "2", "cyan": "36", "yellow": "33", "bold yellow": "1;33"}


class TextStyle(msgspec.Struct, frozen=True):
    """How text is to be written."""

    width: int = 80
    color: bool = False
    ascii_only: bool = False
    wide_tables: bool = False
    """Whether tables may be wider than the text: in a file or a pipe nothing needs to be left out."""

    @property
    def table_width(self) -> int:
        return sys.maxsize if self.wide_tables else self.width

    def paint(self, text: str, kind: str) -> str:
        """The text in one of a few colours, where there are colours."""
        return f"\x1b[{_PAINT[kind]}m{text}\x1b[0m" if self.color and kind and text.strip() else text

    def wrap(self, text: str, kind: str = "", indent: int = 0) -> str:
        """The text in lines that fit."""
        space = " " * indent
        wrapper = textwrap.TextWrapper(
            self.width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
        )  # fmt: skip
        lines = (part for line in text.split("\n") for part in wrapper.wrap(line) or [""])
        return "\n".join(self.paint(line, kind) for line in lines)

    def fit(self, text: str) -> str:
        """The text `printable`, its long lines on lines of readable width: under the second column, if they have one.

        Words are kept whole, since some are paths.
        """
        return "\n".join(self._fitted(printable(line)) for line in text.split("\n"))

    def _fitted(self, line: str) -> str:
        width = min(self.table_width, MOST_READABLE)
        if len(line) <= width:
            return line
        indent = len(line) - len(line.lstrip()) + 2
        column = _TO_SECOND_COLUMN.match(line)
        if column and column.end() + max(map(len, line.split())) <= width:
            indent = column.end()
        return textwrap.fill(
            line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )

    def bar(self, share: float, width: int) -> str:
        """A bar that is ``share`` of ``width`` characters long, to an eighth of one; in ASCII to a whole one."""
        length = max(0.0, min(share, 1.0)) * width
        if self.ascii_only:
            return "#" * round(length)
        whole, rest = divmod(round(length * 8), 8)
        return "█" * whole + (BLOCKS[rest] if rest else "")

    def finish(self, text: str) -> str:
        """The whole text as the output can show it: no spaces at the end of a line, a newline at the end of all."""
        lines = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        return in_ascii(lines) if self.ascii_only else lines
