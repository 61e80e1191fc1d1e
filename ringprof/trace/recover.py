"""Events out of a piece of text that is not sound JSON: every event that is whole, a count of those that are not.

Each stretch between two event boundaries is decoded by itself; what fails goes through a lenient decoder, and what
still fails is skipped up to the next event that begins behind it. The work stays linear in the piece.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ringprof.trace.events import BOUNDARY, EMPTY, EVENT_START, UNREADABLE, Event, Piece, decode_event

_LIST_END = re.compile(rb"\s*(?:,\s*)?\]\s*(?=,\s*\"|\}\s*\Z|\Z)")
_SEPARATOR = re.compile(rb"\s*(?:,\s*)?")

# Words that stand where a number should, a comma before a closing bracket, and a backslash that escapes nothing.
_BARE_WORD = re.compile(r"(?<=[:\[,])(\s*)[-+]?(?:NaN|nan|NAN|Infinity|inf|Inf|INF|N/A|None|null)(?=\s*[,\]}])")
_LOOSE_COMMA = re.compile(r",(?=\s*[\]}])")
_STRAY_BACKSLASH = re.compile(r'\\(?!["\\/bfnrtu])|\\u(?![0-9a-fA-F]{4})')
_STRING_OR_OTHER = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[^"]+', re.DOTALL)

_LENIENT = json.JSONDecoder(strict=False, parse_float=str, parse_constant=lambda _word: None)

MENDED_BYTES = 1 << 20
"""An event longer than this is not mended."""

UNFINISHED_BYTES = 1 << 20
"""An event at the end of a piece is expected to go on in the next only if it is not longer than this so far."""

EFFORT = 4 << 20
"""Bytes that may be looked at in vain before the rest of a piece is given up. Every event read adds to it, so only
text that holds next to none comes to its end."""

EFFORT_PER_EVENT = 512
"""What an event read adds, and one not read costs at least."""


@dataclass
class Recovered:
    """What a damaged piece held."""

    events: list[Event] = field(default_factory=list)
    repaired: int = 0
    """Events among ``events`` that had to be read leniently."""
    skipped: int = 0
    first_damage: int | None = None
    """Byte offset in the file of the first event repaired or skipped."""
    gaps: int = 0
    """Places between two whole events where something other than one comma stands."""
    unfinished: bytes = b""
    """The end of the piece where an event is not complete; it may continue in the next piece."""
    end: int | None = None
    """Where in the piece the list of events is closed; None where it is not."""
    skipped_last: bool = False
    """Whether what ends the piece is an event that is not complete."""
    last_whole: int = 0
    """Where in the piece the last event read ends, or the incomplete one begins."""


def recover(piece: Piece) -> Recovered:
    """Read a piece event by event."""
    return _Recovery(piece).run()


class _Recovery:
    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._data = piece.data
        self._effort = EFFORT
        self._boundary = (-1, -1)
        self._ran_out = False
        self._out = Recovered()

    def run(self) -> Recovered:
        out, data = self._out, self._data
        position = self._past_separator(0)
        while position < len(data) and out.end is None and self._effort > 0:
            end, begin = self._next_boundary(position)
            try:
                out.events.append(decode_event(memoryview(data)[position:end]))
                out.last_whole, position = end, begin
                self._effort += EFFORT_PER_EVENT
            except UNREADABLE:
                position = self._slowly(position, end, begin)
        if self._effort <= 0 and out.end is None:
            self._skip(position)
            out.skipped += len(BOUNDARY.findall(data, position))
        return out

    def _next_boundary(self, position: int) -> tuple[int, int]:
        """The end of the stretch that begins at ``position``, and the beginning of the next."""
        if self._boundary[0] < position:
            found = BOUNDARY.search(self._data, position)
            self._boundary = (found.start() + 1, found.end()) if found else (len(self._data), len(self._data))
        return self._boundary

    def _past_separator(self, position: int) -> int:
        found = _SEPARATOR.match(self._data, position)
        return found.end() if found else position

    def _slowly(self, start: int, end: int, begin: int) -> int:
        """Read one event of ``data[start:end]`` leniently; returns where to go on."""
        closed = self._list_end(start)
        if closed is not None:
            return closed
        stop = self._decode_one(start, end)
        if stop is None:
            return self._after_damage(start, end, begin)
        self._out.last_whole = stop
        if stop >= end:
            # At a boundary, or behind it: an event whose arguments hold objects that look like events.
            return begin if stop == end else self._past_separator(stop)
        closed = self._list_end(stop)
        if closed is not None:
            return closed
        following = EVENT_START.search(self._data, stop, end)
        self._note_gap(stop, following.start() if following else end)
        return following.start() if following else begin

    def _list_end(self, position: int) -> int | None:
        """The end of the data where the list is closed at ``position``, else None."""
        closing = _LIST_END.match(self._data, position)
        if not closing:
            return None
        self._out.end = self._data.index(b"]", position)
        if b"," in closing.group().partition(b"]")[0]:
            self._out.gaps += 1
            self._note(position)
        return len(self._data)

    def _decode_one(self, start: int, end: int) -> int | None:
        """Append the event that begins at ``start``; returns its end, None where it cannot be read."""
        stop = self._value_end(start)
        if stop is not None:
            try:
                self._out.events.append(decode_event(memoryview(self._data)[start:stop]))
                self._effort += 2 * EFFORT_PER_EVENT
                return stop
            except UNREADABLE:
                event = _leniently(self._data[start:stop].decode("utf-8", "replace"))
        elif end - start <= MENDED_BYTES:
            self._effort -= 8 * (end - start)
            stop, event = end, _leniently(_mended(self._data[start:end].decode("utf-8", "replace")))
        else:
            return None
        if event is None:
            return None
        self._out.events.append(event)
        self._out.repaired += 1
        self._effort += EFFORT_PER_EVENT + 8 * (stop - start)
        self._note(start)
        return stop

    def _value_end(self, start: int) -> int | None:
        """Where the JSON value that begins at ``start`` ends; None where it is not sound."""
        length = 1 << 12
        self._ran_out = False
        while True:
            # One character a byte, so that the length of the text is that of the data; and a slice, because the
            # decoder counts the lines of all the text that it was given when it fails.
            text = self._data[start : start + length].decode("latin-1")
            try:
                _value, stop = _LENIENT.raw_decode(text)
                return start + stop
            except json.JSONDecodeError as error:
                self._effort -= error.pos
                cut = error.pos >= len(text) - 12 or error.msg.startswith("Unterminated")
            except UNREADABLE:
                self._effort -= len(text)
                return None
            self._ran_out = cut and start + length >= len(self._data)
            if not cut or self._ran_out or self._effort <= 0:
                return None
            length *= 8

    def _after_damage(self, start: int, end: int, begin: int) -> int:
        """Skip the event at ``start``: on to the next that begins behind it, if only inside the same stretch."""
        at_the_end = end == len(self._data)
        following = EVENT_START.search(self._data, start + 1, end)
        ends_open = self._ran_out or (at_the_end and not following)
        if ends_open and not self._piece.last and len(self._data) - start <= UNFINISHED_BYTES:
            self._out.unfinished = self._data[start:]
            return len(self._data)
        if at_the_end and not following:
            self._out.skipped_last, self._out.last_whole = True, start
        self._skip(start)
        return following.start() if following else begin

    def _note_gap(self, start: int, end: int) -> None:
        """What stands behind a whole event is either the remains of the next or a wrong separator."""
        remains = self._data[start:end].strip(b", \t\r\n")
        if b":" in remains:
            self._skip(start)
        elif end < len(self._data):
            self._out.gaps += 1
            self._note(start)

    def _skip(self, position: int) -> None:
        self._out.skipped += 1
        self._effort -= EFFORT_PER_EVENT
        self._note(position)

    def _note(self, position: int) -> None:
        if self._out.first_damage is None:
            self._out.first_damage = self._piece.offset + position


def _leniently(text: str) -> Event | None:
    """The event that is all of the text, which may have control characters, NaN or replaced bytes in it."""
    try:
        value = _LENIENT.decode(text)
    except UNREADABLE:
        return None
    return _event(value) if isinstance(value, dict) else None


def _mended(text: str) -> str:
    """The text without what no JSON decoder takes: bare words, loose commas, backslashes that escape nothing."""
    return "".join(
        _STRAY_BACKSLASH.sub(r"\\\\", part)
        if part.startswith('"')
        else _LOOSE_COMMA.sub("", _BARE_WORD.sub(r"\1null", part))
        for part in _STRING_OR_OTHER.findall(text)
    )


def _event(fields: dict[str, Any]) -> Event:
    return Event(
        ph=_plain(fields.get("ph")),
        cat=_plain(fields.get("cat")),
        name=_plain(fields.get("name")),
        ts=_raw(fields.get("ts")),
        dur=_raw(fields.get("dur")),
        pid=_scalar(fields.get("pid")),
        tid=_scalar(fields.get("tid")),
        args=_raw_object(fields.get("args")),
    )


def _plain(value: object) -> str:
    """Text without lone surrogates, which no UTF-8 file can hold."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else ""


def _raw(value: object) -> msgspec.Raw:
    if isinstance(value, str | int) and not isinstance(value, bool):
        return msgspec.Raw(_as_text(value).encode("utf-8", "replace"))
    return EMPTY


def _as_text(value: str | int) -> str:
    try:
        return str(value)
    except ValueError:  # An integer of thousands of digits, which Python refuses to write out.
        return ""


def _scalar(value: object) -> int | str | float | None:
    return value if isinstance(value, int | str | float) and not isinstance(value, bool) else None


def _raw_object(value: object) -> msgspec.Raw:
    if not isinstance(value, dict):
        return EMPTY
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (ValueError, OverflowError, RecursionError):
        return EMPTY
