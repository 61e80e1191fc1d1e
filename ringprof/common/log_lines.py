"""Lines of a log, decoded block by block: a log takes no more memory than its bytes.

Python stores every character of a string as wide as the widest one: with one emoji, a log of 500 MB would be a string
of 2 GB.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache

TEXT_SHARE = 3
"""Ratio of the memory that a log may need to its size: it is read in pieces, joined, and converted from UTF-16."""

LONGEST_LINE = 1 << 20
"""Maximum bytes of a line that are read; the rest is dropped. No table is wider."""

_BLOCK_BYTES = 1 << 16
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Control sequences (colours, cursor moves) and titles (OSC) as defined by ECMA-48.
_ANSI = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[@-Z\\^_])")


class LogLines:
    """Sequence of the lines of UTF-8 or UTF-16 text, without colour codes; undecodable bytes are replaced.

    Only a line feed ends a line, with or without a carriage return, since names may contain other separators.
    """

    def __init__(self, data: bytes) -> None:
        self._data = _as_utf8(data)
        self._starts, self._firsts = [len(codecs.BOM_UTF8) if self._data.startswith(codecs.BOM_UTF8) else 0], [0]
        while (end := self._data.find(b"\n", self._starts[-1] + _BLOCK_BYTES)) >= 0:
            self._firsts.append(self._firsts[-1] + self._data.count(b"\n", self._starts[-1], end + 1))
            self._starts.append(end + 1)
        self._count = self._firsts[-1] + self._data.count(b"\n", self._starts[-1]) + 1
        # Readers go a few lines back and forth, so a few blocks are cached.
        self._block = lru_cache(maxsize=4)(self._decode_block)
        self._first, self._lines = 0, self._block(0)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:
        if not 0 <= index - self._first < len(self._lines):
            if not 0 <= index < self._count:
                raise IndexError(index)
            block = bisect_right(self._firsts, index) - 1
            self._first, self._lines = self._firsts[block], self._block(block)
        return self._lines[index - self._first]

    def __iter__(self) -> Iterator[str]:
        for block in range(len(self._starts)):
            yield from self._block(block)

    def between(self, start: int, end: int) -> list[str]:
        """Return the lines from ``start`` up to but not including ``end``, clipped to the end of the text."""
        return [self[index] for index in range(start, min(end, self._count))]

    def is_open(self, index: int) -> bool:
        """Return whether a line is not empty and has no line feed: the log may be cut off inside it."""
        return index == self._count - 1 and bool(self[index])

    def _decode_block(self, block: int) -> list[str]:
        start, last = self._starts[block], block + 1 == len(self._starts)
        end = len(self._data) if last else self._starts[block + 1] - 1
        # Only the last line of a block can be longer than a block.
        text = self._data[start : min(end, start + _BLOCK_BYTES + LONGEST_LINE)].decode("utf-8", errors="replace")
        lines = text.replace("\r\n", "\n").split("\n")
        if not last:
            lines[-1] = lines[-1].removesuffix("\r")
        return [_ANSI.sub("", line) for line in lines] if "\x1b" in text else lines


def _as_utf8(data: bytes) -> bytes:
    if not data.startswith(_UTF_16):
        return data
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
    pieces = (data[offset : offset + _BLOCK_BYTES] for offset in range(0, len(data), _BLOCK_BYTES))
    return b"".join(decoder.decode(piece).encode() for piece in pieces) + decoder.decode(b"", final=True).encode()


class LinePrefix:
    """Prefix that a launcher or logger writes before each line of one stream: constant text except for times."""

    def __init__(self, text: str) -> None:
        self.text = text
        general = _prefix_pattern(text)
        self._pattern = re.compile(general) if general is not None else None
        self.key = general or text
        """Key of the stream: equal for all prefixes of one stream."""

    def cut(self, line: str) -> str | None:
        """Return ``line`` without its prefix; None if it has another prefix or none."""
        if line.startswith(self.text):
            return line[len(self.text) :]
        if self._pattern is not None and (match := self._pattern.match(line)):
            return line[match.end() :]
        # In a blank line, the trailing spaces of the prefix may have been stripped.
        return "" if self.text.strip() and line.rstrip() == self.text.rstrip() else None


# Parts of a prefix that change from line to line: (pattern, general pattern). Rank and host numbers do not change:
# they distinguish streams.
_CHANGING = tuple(
    (re.compile(pattern), general or pattern)
    for pattern, general in (
        (r"[0-9]{4}[-/][0-9][0-9][-/][0-9][0-9]", ""),
        (r"[0-9][0-9]?:[0-9][0-9]:[0-9][0-9](?:[.,][0-9]{1,9})?", ""),
        (r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +[0-9][0-9]?", r"[A-Z][a-z]{2} {1,2}[0-9][0-9]?"),
        (r"[IWEF][0-9]{4}(?= )", r"[IWEF][0-9]{4}"),
        (r" {0,64}[0-9]{1,12}\.[0-9]{1,9}", r" *[0-9]{1,12}\.[0-9]{1,9}"),
        (r"[0-9]{9,20}", ""),
    )
)


def _prefix_pattern(text: str) -> str | None:
    """Return a regular expression that matches ``text`` with any other times; None if it contains no time."""
    parts: list[str] = []
    position, changing = 0, False
    while position < len(text):
        for pattern, general in _CHANGING:
            if match := pattern.match(text, position):
                parts.append(general)
                changing = True
                position = match.end()
                break
        else:
            parts.append(re.escape(text[position]))
            position += 1
    return "".join(parts) if changing else None
