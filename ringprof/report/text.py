"""Figures and names as text: units, rounding that keeps sums, bars, and names made safe for a terminal."""

from __future__ import annotations

import csv
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ringprof.common.formatting import percent, three_digits

BLOCKS = " ▏▎▍▌▋▊▉█"
_TO_ASCII = str.maketrans({"·": "|", "█": "#", "…": "~", "µ": "u"})
_TIME_UNITS = ((10e9, 1e9, "s"), (1e6, 1e6, "ms"), (0.0, 1e3, "µs"))
LONGEST_NAME = 200
"""Length in characters up to which a name from a file is kept."""
LONGEST_KERNEL = 2_000
"""Length in characters up to which the name of a kernel is kept where it identifies the kernel."""
_NAMESPACE = re.compile(r"(?:\b\w{1,100}::|\(anonymous namespace\)::)+(?=\w)")


def short_count(value: float) -> str:
    """Format a count such as a length in tokens: 128k or 2M if it is a multiple of 1024, else the number."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:,g}"


def strategy_in_title(name: str, params: Mapping[str, Any]) -> str:
    """Name a strategy with the parameters that are numbers, such as degrees, in words: ``usp, ulysses degree 2``."""
    degrees = [f"{key.replace('_', ' ')} {value}" for key, value in params.items() if type(value) in (int, float)]
    return ", ".join([name, *degrees])


LONGEST_SENTENCE = 1_000
"""Length in characters up to which a line that contains names from a file is kept."""


def clean(text: str, longest: int = LONGEST_NAME) -> str:
    """Make a name from a file safe to print: one line, no control or direction characters, limited length."""
    plain = " ".join(printable(text).split())
    return plain if len(plain) <= longest else plain[: longest - 1] + "…"


def short_name(kernel: str) -> str:
    """Shorten a kernel's name: no namespaces, return type or parameters.

    For example, ``void a::f<8, b::G>(int)`` becomes ``f<8, G>``.
    """
    name = kernel.removeprefix("void ")
    position, depth = len(name) - 1, 0
    while name.endswith(")") and position > 0:
        depth += {")": 1, "(": -1}.get(name[position], 0)
        if not depth:
            # "Memset (Device)" has no parameters: its parentheses belong to the name.
            name = name[:position] if name[position - 1] != " " else name
            break
        position -= 1
    return clean(_NAMESPACE.sub("", name) or kernel, LONGEST_KERNEL)


def printable(text: str) -> str:
    """Replace every character that is not printable by a space, so that a terminal obeys none."""
    return "".join(char if char.isprintable() else " " for char in text)


def shell_words(paths: Iterable[str]) -> str:
    """Quote paths for a shell command in a hint; a path that is not printable becomes ``PATH``."""
    return shlex.join(path if path.isprintable() else "PATH" for path in paths)


def in_ascii(text: str) -> str:
    """Convert a text for an output that supports only ASCII."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode("ascii")


def unit_for(time_ns: float) -> tuple[float, str]:
    """Return (nanoseconds per unit, its name) of the unit that suits times up to ``time_ns``."""
    return next((size, name) for least, size, name in _TIME_UNITS if time_ns >= least)


def in_unit(time_ns: float, unit_ns: float, digits: int = 3) -> str:
    """Format a time in a unit with a fixed number of digits after the point."""
    return f"{time_ns / unit_ns:,.{digits}f}"


def duration(time_ns: float, digits: int = 2) -> str:
    """Format a time in the unit that suits it: seconds from 1 s up, with one more digit below 10 s."""
    if 1e9 <= time_ns < 10e9:
        return f"{in_unit(time_ns, 1e9, digits + 1)} s"
    unit_ns, name = unit_for(time_ns)
    return f"{in_unit(time_ns, unit_ns, digits)} {name}"


def or_dash(value: float | None, form: str) -> str:
    """Format a number; return a dash for None."""
    return "-" if value is None else format(value, form)


def slower_or_faster(excess: float) -> str:
    """Describe a relative excess of time: ``3.0 % slower``, ``as fast`` if it rounds to zero, ``2.5 times as slow``."""
    if excess >= 1:
        return f"{three_digits(1 + excess)} times as slow"
    shown = percent(abs(excess))
    return "as fast" if shown == percent(0.0) else f"{shown} {'slower' if excess > 0 else 'faster'}"


def rate(tflops: float) -> str:
    """Format a rate of floating-point operations: in TFLOP/s from 1 TFLOP/s up, else in GFLOP/s or MFLOP/s."""
    if tflops >= 1:
        return f"{tflops:,.1f} TFLOP/s"
    return f"{1e3 * tflops:,.1f} GFLOP/s" if tflops >= 1e-3 or tflops <= 0 else f"{1e6 * tflops:,.3g} MFLOP/s"


def captured_in_words(iterations: int | None) -> str:
    """Say how many iterations a captured block holds, for a heading or a sentence."""
    if iterations is None:
        return "a captured block"
    return f"{iterations} captured iteration{'s' if iterations > 1 else ''}"


def binary_size(size_bytes: int) -> str:
    """Format a size in the largest binary unit in which it is at least 1."""
    for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):,.1f} {name}"
    return f"{size_bytes} bytes"


def rounded_to_sum(values: Sequence[float], whole: float, digits: int) -> list[float]:
    """Round ``values`` to ``digits`` so that they add up to the rounded ``whole``.

    The values with the largest remainders are rounded up first. Where rounding alone cannot close the gap, a gap
    remains.
    """
    scale = 10**digits
    scaled = [value * scale for value in values]
    floors = [int(value // 1) for value in scaled]
    # Round before scaling, as formatting does: the scaled product may fall on the other side of a half.
    missing = round(round(whole, digits) * scale) - sum(floors)
    by_rest = sorted(range(len(scaled)), key=lambda i: floors[i] - scaled[i])
    for index in by_rest[: max(0, missing)]:
        floors[index] += 1
    return [floor / scale for floor in floors]


_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Characters that start a formula in a spreadsheet; some programs also accept the full-width forms."""


def csv_text(titles: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Render a table as CSV: empty cells for unknown values, text safe for spreadsheets."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows([spreadsheet_cell(value) for value in row] for row in rows)
    return stream.getvalue()


def spreadsheet_cell(value: Any) -> Any:
    """Make a value safe for CSV: text on one line, and none that a spreadsheet would run as a formula."""
    if not isinstance(value, str):
        return value
    plain = clean(value)
    return f"'{plain}" if plain.startswith(_FORMULA_STARTS) else plain


_TO_SECOND_COLUMN = re.compile(r" *\S+(?: \S+)*  +")
MAX_READABLE_WIDTH = 100
"""Width in characters that prose is limited to on wide terminals."""
_PAINT = {"bold": "1", "dim": "2", "cyan": "36", "yellow": "33", "bold yellow": "1;33"}


class TextStyle(msgspec.Struct, frozen=True):
    """How to write text: width, colours and character set."""

    width: int = 80
    color: bool = False
    ascii_only: bool = False
    wide_tables: bool = False
    """Whether tables may be wider than the text: a file or a pipe needs no columns left out."""

    @property
    def table_width(self) -> int:
        return sys.maxsize if self.wide_tables else self.width

    def paint(self, text: str, kind: str) -> str:
        """Colour a text, if colours are on."""
        return f"\x1b[{_PAINT[kind]}m{text}\x1b[0m" if self.color and kind and text.strip() else text

    def wrap(self, text: str, kind: str = "", indent: int = 0) -> str:
        """Wrap a text to the width."""
        space = " " * indent
        wrapper = textwrap.TextWrapper(
            self.width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
        )  # fmt: skip
        lines = (part for line in text.split("\n") for part in wrapper.wrap(line) or [""])
        return "\n".join(self.paint(line, kind) for line in lines)

    def fit(self, text: str) -> str:
        """Make a text `printable` and wrap its long lines, below the second column if there is one.

        Words are kept whole, since some are paths.
        """
        return "\n".join(self._fitted(printable(line)) for line in text.split("\n"))

    def _fitted(self, line: str) -> str:
        width = min(self.table_width, MAX_READABLE_WIDTH)
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
        """Draw a bar of ``share`` of ``width`` characters, to an eighth of a character; in ASCII to a whole one."""
        length = max(0.0, min(share, 1.0)) * width
        if self.ascii_only:
            return "#" * round(length)
        whole, rest = divmod(round(length * 8), 8)
        return "█" * whole + (BLOCKS[rest] if rest else "")

    def finish(self, text: str) -> str:
        """Finish a whole text for the output: no spaces at the end of a line, and a newline at the end."""
        lines = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        return in_ascii(lines) if self.ascii_only else lines
