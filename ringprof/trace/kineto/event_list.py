"""The list of events, found in a trace's bytes and handed on in pieces that begin and end between two events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from ringprof.decoding import UNREADABLE as UNREADABLE
from ringprof.errors import TraceFormatError
from ringprof.limits import MEMORY_BYTES
from ringprof.trace.kineto.byte_source import ByteSource

EMPTY = msgspec.Raw(b"")


class _Row(msgspec.Struct, gc=False):
    """What an event says, but for its phase. What needs more work stays text: most events are dropped before."""

    cat: str | None = ""
    name: str | None = ""
    ts: msgspec.Raw = EMPTY
    dur: msgspec.Raw = EMPTY
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    args: msgspec.Raw = EMPTY


class Event(_Row, gc=False):
    """One event."""

    ph: str = ""


def _of_phase(phase: str, base: type[msgspec.Struct] = msgspec.Struct) -> Any:
    name, named = f"_Phase{ord(phase)}", {"ph": phase}
    return msgspec.defstruct(name, [], bases=(base,), namespace=named, tag_field="ph", tag=phase, gc=False)


decode_event = msgspec.json.Decoder(Event).decode
_decode_any = msgspec.json.Decoder(list[Event]).decode
# By their phase, with which nearly all events begin: of arrows, counters and others that nobody reads nothing is made.
_BY_PHASE = reduce(or_, [*(_of_phase(one, _Row) for one in "XMi"), *(_of_phase(one) for one in "sftCBEbneNODRP")])
_decode_known = msgspec.json.Decoder(list[_BY_PHASE]).decode  # type: ignore[valid-type]


def decode_events(data: bytes | msgspec.Raw) -> list[Event]:
    """All events of a list; those of phases that nobody reads have no more than that."""
    try:
        return _decode_known(data)
    except UNREADABLE:
        return _decode_any(data)


decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

_KEY = rb'"(?:ph|cat|name|ts|dur|pid|tid|id|s|bp|args)"\s*:'
BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{\s*" + _KEY + rb")")
"""Between two events. It cannot match inside a sound string (its quotes would be escaped), only between objects
inside an event's arguments; a piece cut there does not decode, and recovery puts it together."""

EVENT_START = re.compile(
    rb'\{\s*"(?:(?:ph|cat|ts)"\s*:|name"\s*:\s*"(?:[^"\\]|\\.){0,2000}"\s*,\s*"(?:ph|cat|ts|pid)")'
)
"""An event's beginning, to find the next one behind damage; strict enough to pass over arguments."""

LIST_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST = re.compile(rb"\[\s*(?=\{\s*" + _KEY + rb")")
_FIRST_EVENT = re.compile(rb"(?=" + EVENT_START.pattern + rb")")
"""Where the event list begins if its key or bracket is damaged; the first list of all is that of the devices."""

_HEAD_SHARE, _EVENT_SHARE = 64, 256
"""What is decoded at once may be one part in so many of the memory for reading: lists of empty lists or events take up
to thirty times their size. Of 1 GiB that is 16 MiB for all before the first event, and 4 MiB for one."""

UTF8_MARK = b"\xef\xbb\xbf"


class Piece(msgspec.Struct, frozen=True):
    """Consecutive events."""

    framed: bytes
    """As a list, with its brackets."""
    offset: int
    """Where `data` begins in the decompressed file."""
    last: bool
    """Whether the file ends with it: then the list's end and what follows it are part of ``data``."""

    @property
    def data(self) -> bytes:
        """Without the brackets."""
        return self.framed[1:-1]


class EventStream:
    """Splits a source into the head (all before the first event) and pieces of the event list."""

    def __init__(self, source: ByteSource, name: str, memory_bytes: int = MEMORY_BYTES) -> None:
        self.head_limit = memory_bytes // _HEAD_SHARE
        """Where no event list begins in this many bytes, none is expected."""
        self.event_limit = memory_bytes // _EVENT_SHARE
        """A piece is handed on with no event boundary in it once it is this large."""
        self._source = source
        self._chunks = iter(source)
        self._name = name
        self._rest = b""
        self._separator = b""
        """What stands between the piece handed on last and the rest."""
        self._offset = 0
        self._carried = b""
        self.list_root = False
        """Whether the file is a bare list of events, with nothing around it."""
        self.head = self._read_head()

    def _read_head(self) -> bytes:
        """Everything before the first event; raises `TraceFormatError` where there is no event list."""
        data = b""
        while len(data) < self.head_limit:
            chunk = next(self._chunks, b"")
            data += chunk
            start = data.removeprefix(UTF8_MARK).lstrip()[:1]
            found = LIST_KEY.search(data) if start != b"[" else None
            if not found and (start == b"[" or not chunk):
                found = (start != b"[" and _FIRST_EVENT.search(data)) or _BARE_LIST.search(data)
                self.list_root = start == b"["
            if found or not chunk:
                break
        else:
            found = None
        if not found:
            raise TraceFormatError(f"{self._name}: {self._source.damage or 'not a Kineto trace: ' + _what_it_is(data)}")
        self._rest = data[found.end() :]
        self._offset = found.end()
        return data[: found.start()]

    def push_back(self, data: bytes) -> None:
        """Hand the unfinished end of the piece just read back; it begins the next piece."""
        self._carried = data

    def pieces(self) -> Iterator[Piece]:
        """The pieces in order. Each holds about one chunk of the source."""
        for chunk in self._chunks:
            rest, cut = self._rest, last_boundary(chunk)
            if cut is None:
                rest, chunk = b"", rest + chunk
                cut = last_boundary(chunk)
            if cut is None and len(chunk) < self.event_limit:
                self._rest = chunk
                continue
            end, begin = cut or (len(chunk), len(chunk))
            piece = Piece(b"".join((b"[", rest, memoryview(chunk)[:end], b"]")), self._offset, last=False)
            # Before the piece is handed on: its reader may find the list closed in it and ask for the remainder.
            self._offset += len(rest) + begin
            self._separator, self._rest = chunk[end:begin], chunk[begin:]
            yield piece
            self._take_carried()
        yield Piece(b"".join((b"[", self._rest, b"]")), self._offset, last=True)

    def _take_carried(self) -> None:
        if self._carried:
            self._offset -= len(self._carried) + len(self._separator)
            self._rest = self._carried + self._separator + self._rest
            self._carried = b""

    def remainder(self) -> bytes:
        """Return what follows the last piece, as far as it may be decoded."""
        data = self._separator + self._rest
        for chunk in self._chunks:
            data += chunk
            if len(data) > self.head_limit:
                break
        return data[: self.head_limit]


def last_boundary(data: bytes) -> tuple[int, int] | None:
    """The last place between two events: the end of the one, the beginning of the next."""
    window = 1 << 12
    while True:
        low = max(0, len(data) - window)
        matches = list(BOUNDARY.finditer(data, low))
        if matches:
            return matches[-1].start() + 1, matches[-1].end()
        if low == 0:
            return None
        window *= 8


def _what_it_is(data: bytes) -> str:
    if not data.strip():
        return "the file is empty"
    if b'"deviceProperties"' in data or b'"schemaVersion"' in data:
        return "it is cut off, or damaged, before its first event"
    return 'no "traceEvents" list in it'
