"""Recovery of events from a piece that is not valid JSON: keeps every complete event and counts the others.

Traces of killed profilers are cut off. Names with quotes or backslashes, NaN and Infinity in arguments, and copies that
lost a block damage single events. The text between two event boundaries is decoded separately. If that fails, a lenient
decoder tries; if that fails too, the text is skipped up to the next start of an event. The work is linear in the size
of the piece.
"""

from __future__ import annotations

import json
import re
from itertools import islice

from ringprof.trace.kineto.event_list import BOUNDARY, EVENT_START, LIST_KEY, UNREADABLE, Event, Piece, decode_event

# The list is followed by the next key, by the end of the file, or by another document in concatenated files.
_LIST_END = re.compile(rb"\s*(?:,\s*)?\]\s*(?=,\s*\"|\}\s*(?:\Z|[{\[])|\Z|\[)")
_LAST_EVENT_END = re.compile(rb"\}(?=" + _LIST_END.pattern + rb")")
_MOST_ENDS = 4
"""Number of places that are tried as the end of the last event, where it must be repaired."""
_SEPARATOR = re.compile(rb"\s*(?:,\s*)?")

# Invalid text that can be repaired: a word in place of a number, a comma before a closing bracket, a backslash that
# escapes nothing.
_BARE_WORD = re.compile(r"(?<=[:\[,])(\s*)[-+]?(?:NaN|nan|NAN|Infinity|inf|Inf|INF|N/A|None|null)(?=\s*[,\]}])")
_LOOSE_COMMA = re.compile(r",(?=\s*[\]}])")
_STRAY_BACKSLASH = re.compile(r'\\(?!["\\/bfnrtu])|\\u(?![0-9a-fA-F]{4})')
_STRING_OR_OTHER = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[^"]+', re.DOTALL)

# Numbers stay text, from which the columns are built anyway: no digit is lost, and long numbers cost no conversion.
_LENIENT = json.JSONDecoder(strict=False, parse_float=str, parse_int=str, parse_constant=lambda _word: None)
_FIELDS = {"ph": str, "cat": str, "name": str, "pid": str, "tid": str, "args": dict}

REPAIRABLE_BYTES = 1 << 20
"""Largest size in bytes of an event that is repaired."""

UNFINISHED_BYTES = 1 << 20
"""Largest size in bytes of an unfinished event that is carried over to the next piece."""

EFFORT = 4 << 20
"""Initial effort of a piece: the bytes that may be read without result before the rest of the piece is skipped. Every
event read adds to the effort, so only text with almost no events uses it up."""

EFFORT_PER_EVENT = 512
"""Effort that each event read adds, and that each skipped event costs at least."""


class Recovery:
    """Recovery of one piece, event by event; the attributes hold the events and describe the damage."""

    def __init__(self, piece: Piece) -> None:
        self.events: list[Event] = []
        self.repaired = 0
        """Number of entries of ``events`` that needed the lenient decoder."""
        self.skipped = 0
        self.first_damage: int | None = None
        """Byte offset in the file of the first event repaired or skipped."""
        self.gaps = 0
        """Number of gaps between two complete events with anything but one comma in them."""
        self.unfinished = b""
        """Incomplete event at the end of the piece, which may continue in the next piece."""
        self.end: int | None = None
        """Offset in the piece at which the list of events is closed; None if it is not."""
        self.skipped_last = False
        """Whether the piece ends with an incomplete event that was skipped."""
        self.last_whole = 0
        """Offset in the piece at which the last event read ends, or at which the incomplete event begins."""
        self._piece, self._data = piece, piece.data
        self._effort = EFFORT
        self._ran_out = False
        self._read()

    def _read(self) -> None:
        """Read all events of the piece, until the list is closed or the effort is used up."""
        data = self._data
        separator = _SEPARATOR.match(data)
        position, end, next_start = separator.end() if separator else 0, -1, -1
        while position < len(data) and self.end is None and self._effort > 0:
            if end < position:
                boundary = BOUNDARY.search(data, position)
                end, next_start = (boundary.start() + 1, boundary.end()) if boundary else (len(data), len(data))
            try:
                self._keep(decode_event(memoryview(data)[position:end]), end)
                position = next_start
            except UNREADABLE:
                position = self._read_slowly(position, end, next_start)
        if self._effort <= 0 and self.end is None:
            self._skip(position)
            self.skipped += len(BOUNDARY.findall(data, position))

    def _keep(self, event: Event, end: int) -> None:
        """Add an event that ends at ``end``."""
        self.events.append(event)
        self.last_whole = end
        self._effort += EFFORT_PER_EVENT

    def _read_slowly(self, start: int, end: int, next_start: int) -> int:
        """Read one event of ``data[start:end]`` leniently; return the offset at which to continue."""
        if self._is_closed(start):
            return len(self._data)
        stop = self._read_event(start, end)
        if stop is None:
            return self._after_damage(start, end, next_start)
        if stop >= end:
            # The event ends at a boundary, or behind it if its arguments hold objects that look like events.
            separator = _SEPARATOR.match(self._data, stop)
            return next_start if stop == end or not separator else separator.end()
        if self._is_closed(stop):
            return len(self._data)
        following = self._next_event(stop, end)
        if self.end is None:
            self._note_gap(stop, end if following is None else following)
        return next_start if following is None else following

    def _next_event(self, start: int, end: int) -> int | None:
        """Return the offset of the next event, None if there is none; close this list if another one starts first."""
        following = EVENT_START.search(self._data, start, end)
        second = LIST_KEY.search(self._data, start, following.start() if following else end)
        if second:
            self.end = second.start() - 1
        return following.start() if following else None

    def _is_closed(self, position: int) -> bool:
        """Return whether the list is closed at ``position``, and set `end` if it is."""
        closing = _LIST_END.match(self._data, position)
        if not closing:
            return False
        self.end = self._data.index(b"]", position)
        if b"," in closing.group().partition(b"]")[0]:
            self.gaps += 1
            self._note_damage(position)
        return True

    def _read_event(self, start: int, end: int) -> int | None:
        """Keep the event that begins at ``start``; return the offset of its end, None if it cannot be read."""
        value_end = self._value_end(start)
        if value_end is not None:
            stop = value_end
            try:
                self._keep(decode_event(memoryview(self._data)[start:stop]), stop)
                return stop
            except UNREADABLE:
                event = _decode_leniently(self._data[start:stop].decode("utf-8", "replace"))
        elif end - start <= REPAIRABLE_BYTES:
            # The end of the list follows the last event, not the start of another one.
            last = islice(_LAST_EVENT_END.finditer(self._data, start, end), _MOST_ENDS)
            for stop in (*(match.end() for match in last), end):
                self._effort -= 8 * (stop - start)
                event = _decode_leniently(_repair(self._data[start:stop].decode("utf-8", "replace")))
                if event is not None:
                    break
        else:
            return None
        if event is None:
            return None
        self._keep(event, stop)
        self._effort += 8 * (stop - start)
        self.repaired += 1
        self._note_damage(start)
        return stop

    def _value_end(self, start: int) -> int | None:
        """Return the end of the JSON value that begins at ``start``; None if it is not valid."""
        length = 1 << 12
        self._ran_out = False
        while True:
            # latin-1 has one character per byte, so offsets in the text are those of the data. Only a slice is
            # decoded, because a failing decoder counts the lines of its whole input.
            text = self._data[start : start + length].decode("latin-1")
            try:
                _value, stop = _LENIENT.raw_decode(text)
                return start + stop
            except json.JSONDecodeError as error:
                self._effort -= error.pos
                may_continue = error.pos >= len(text) - 12 or error.msg.startswith("Unterminated")
            except UNREADABLE:
                self._effort -= len(text)
                return None
            self._ran_out = may_continue and start + length >= len(self._data)
            if not may_continue or self._ran_out or self._effort <= 0:
                return None
            length *= 8

    def _after_damage(self, start: int, end: int, next_start: int) -> int:
        """Skip the damaged event at ``start``; return the offset at which to continue.

        An incomplete event at the end of the piece becomes `unfinished` instead.
        """
        at_the_end = end == len(self._data)
        following = self._next_event(start + 1, end)
        at_the_end &= following is None and self.end is None
        is_open = (self._ran_out and self.end is None) or at_the_end
        if is_open and not self._piece.last and len(self._data) - start <= UNFINISHED_BYTES:
            self.unfinished = self._data[start:]
            return len(self._data)
        if at_the_end:
            self.skipped_last, self.last_whole = True, start
        self._skip(start)
        return next_start if following is None else following

    def _note_gap(self, start: int, end: int) -> None:
        """Count the text between two complete events: the remains of a damaged event, or a wrong separator."""
        remains = self._data[start:end].strip(b", \t\r\n")
        if b":" in remains:
            self._skip(start)
        elif end < len(self._data):
            self.gaps += 1
            self._note_damage(start)

    def _skip(self, position: int) -> None:
        """Count the event at ``position`` as skipped."""
        self.skipped += 1
        self._effort -= EFFORT_PER_EVENT
        self._note_damage(position)

    def _note_damage(self, position: int) -> None:
        """Set `first_damage` if this is the first damage in the piece."""
        if self.first_damage is None:
            self.first_damage = self._piece.offset + position


def _decode_leniently(text: str) -> Event | None:
    """Decode a text as one event; control characters, NaN and replaced bytes are allowed. None for other text."""
    try:
        value = _LENIENT.decode(text)
        if not isinstance(value, dict):
            return None
        fields = {key: field for key, field in value.items() if isinstance(field, _FIELDS.get(key, object))}
        # Replace lone surrogates, which UTF-8 cannot encode.
        return decode_event(json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace"))
    except UNREADABLE:
        return None


def _repair(text: str) -> str:
    """Remove text that no JSON decoder accepts: bare words, loose commas, backslashes that escape nothing."""
    return "".join(
        _STRAY_BACKSLASH.sub(r"\\\\", part)
        if part.startswith('"')
        else _LOOSE_COMMA.sub("", _BARE_WORD.sub(r"\1null", part))
        for part in _STRING_OR_OTHER.findall(text)
    )
