"""Events out of a piece of text that is not sound JSON: every event that is whole, a count of those that are not.

Profilers that are killed cut their traces; names with quotes or backslashes, NaN and Infinity in arguments, and copies
that lost a block damage single events. Each stretch between two event boundaries is decoded by itself; what fails goes
through a lenient decoder, and what still fails is skipped up to the next event that begins behind it. The work stays
linear in the piece.
"""

from __future__ import annotations

import json
import re

from ringprof.trace.kineto.event_list import BOUNDARY, EVENT_START, LIST_KEY, UNREADABLE, Event, Piece, decode_event

# Behind the list stands the next key or the end of the file, or another document where files were concatenated.
_LIST_END = re.compile(rb"\s*(?:,\s*)?\]\s*(?=,\s*\"|\}\s*(?:\Z|[{\[])|\Z|\[)")
_SEPARATOR = re.compile(rb"\s*(?:,\s*)?")

# Words that stand where a number should, a comma before a closing bracket, and a backslash that escapes nothing.
_BARE_WORD = re.compile(r"(?<=[:\[,])(\s*)[-+]?(?:NaN|nan|NAN|Infinity|inf|Inf|INF|N/A|None|null)(?=\s*[,\]}])")
_LOOSE_COMMA = re.compile(r",(?=\s*[\]}])")
_STRAY_BACKSLASH = re.compile(r'\\(?!["\\/bfnrtu])|\\u(?![0-9a-fA-F]{4})')
_STRING_OR_OTHER = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[^"]+', re.DOTALL)

# Numbers stay text, which the columns are made of anyway: no digit is lost, and none is too many.
_LENIENT = json.JSONDecoder(strict=False, parse_float=str, parse_int=str, parse_constant=lambda _word: None)
_FIELDS = {"ph": str, "cat": str, "name": str, "pid": str, "tid": str, "args": dict}

MENDED_BYTES = 1 << 20
"""An event longer than this is not mended."""

UNFINISHED_BYTES = 1 << 20
"""An event at the end of a piece is expected to go on in the next only if it is not longer than this so far."""

EFFORT = 4 << 20
"""Bytes that may be looked at in vain before the rest of a piece is given up. Every event read adds to it, so only
text that holds next to none comes to its end."""

EFFORT_PER_EVENT = 512
"""What an event read adds, and one not read costs at least."""


class Recovery:
    """Reads a piece event by event; its attributes say what the piece held."""

    def __init__(self, piece: Piece) -> None:
        self.events: list[Event] = []
        self.repaired = 0
        """Events among ``events`` that had to be read leniently."""
        self.skipped = 0
        self.first_damage: int | None = None
        """Byte offset in the file of the first event repaired or skipped."""
        self.gaps = 0
        """Places between two whole events where something other than one comma stands."""
        self.unfinished = b""
        """The end of the piece where an event is not complete; it may continue in the next piece."""
        self.end: int | None = None
        """Where in the piece the list of events is closed; None where it is not."""
        self.skipped_last = False
        """Whether what ends the piece is an event that is not complete."""
        self.last_whole = 0
        """Where in the piece the last event read ends, or the incomplete one begins."""
        self._piece, self._data = piece, piece.data
        self._effort = EFFORT
        self._ran_out = False
        self._read()

    def _read(self) -> None:
        data = self._data
        found = _SEPARATOR.match(data)
        position, end, begin = found.end() if found else 0, -1, -1
        while position < len(data) and self.end is None and self._effort > 0:
            if end < position:
                boundary = BOUNDARY.search(data, position)
                end, begin = (boundary.start() + 1, boundary.end()) if boundary else (len(data), len(data))
            try:
                self._keep(decode_event(memoryview(data)[position:end]), end)
                position = begin
            except UNREADABLE:
                position = self._read_slowly(position, end, begin)
        if self._effort <= 0 and self.end is None:
            self._skip(position)
            self.skipped += len(BOUNDARY.findall(data, position))

    def _keep(self, event: Event, end: int) -> None:
        self.events.append(event)
        self.last_whole = end
        self._effort += EFFORT_PER_EVENT

    def _read_slowly(self, start: int, end: int, begin: int) -> int:
        """Read one event of ``data[start:end]`` leniently; returns where to go on."""
        if self._is_closed(start):
            return len(self._data)
        stop = self._read_one(start, end)
        if stop is None:
            return self._after_damage(start, end, begin)
        if stop >= end:
            # At a boundary, or behind it: an event whose arguments hold objects that look like events.
            found = _SEPARATOR.match(self._data, stop)
            return begin if stop == end or not found else found.end()
        if self._is_closed(stop):
            return len(self._data)
        following = self._next_event(stop, end)
        if self.end is None:
            self._note_gap(stop, end if following is None else following)
        return begin if following is None else following

    def _next_event(self, start: int, end: int) -> int | None:
        """Find where the next event begins. A second event list that begins before it ends this one."""
        following = EVENT_START.search(self._data, start, end)
        second = LIST_KEY.search(self._data, start, following.start() if following else end)
        if second:
            self.end = second.start() - 1
        return following.start() if following else None

    def _is_closed(self, position: int) -> bool:
        """Whether the list is closed at ``position``."""
        closing = _LIST_END.match(self._data, position)
        if not closing:
            return False
        self.end = self._data.index(b"]", position)
        if b"," in closing.group().partition(b"]")[0]:
            self.gaps += 1
            self._note(position)
        return True

    def _read_one(self, start: int, end: int) -> int | None:
        """Keep the event that begins at ``start``; returns its end, None where it cannot be read."""
        stop = self._value_end(start)
        if stop is not None:
            try:
                self._keep(decode_event(memoryview(self._data)[start:stop]), stop)
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
        self._keep(event, stop)
        self._effort += 8 * (stop - start)
        self.repaired += 1
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
        following = self._next_event(start + 1, end)
        at_the_end &= following is None and self.end is None
        ends_open = (self._ran_out and self.end is None) or at_the_end
        if ends_open and not self._piece.last and len(self._data) - start <= UNFINISHED_BYTES:
            self.unfinished = self._data[start:]
            return len(self._data)
        if at_the_end:
            self.skipped_last, self.last_whole = True, start
        self._skip(start)
        return begin if following is None else following

    def _note_gap(self, start: int, end: int) -> None:
        """What stands behind a whole event is either the remains of the next or a wrong separator."""
        remains = self._data[start:end].strip(b", \t\r\n")
        if b":" in remains:
            self._skip(start)
        elif end < len(self._data):
            self.gaps += 1
            self._note(start)

    def _skip(self, position: int) -> None:
        self.skipped += 1
        self._effort -= EFFORT_PER_EVENT
        self._note(position)

    def _note(self, position: int) -> None:
        if self.first_damage is None:
            self.first_damage = self._piece.offset + position


def _leniently(text: str) -> Event | None:
    """The event that is all of the text, which may have control characters, NaN or replaced bytes in it."""
    try:
        value = _LENIENT.decode(text)
        if not isinstance(value, dict):
            return None
        sound = {key: part for key, part in value.items() if isinstance(part, _FIELDS.get(key, object))}
        # Lone surrogates, which no UTF-8 file can hold, are replaced.
        return decode_event(json.dumps(sound, ensure_ascii=False).encode("utf-8", "replace"))
    except UNREADABLE:
        return None


def _mended(text: str) -> str:
    """The text without what no JSON decoder takes: bare words, loose commas, backslashes that escape nothing."""
    return "".join(
        _STRAY_BACKSLASH.sub(r"\\\\", part)
        if part.startswith('"')
        else _LOOSE_COMMA.sub("", _BARE_WORD.sub(r"\1null", part))
        for part in _STRING_OR_OTHER.findall(text)
    )
