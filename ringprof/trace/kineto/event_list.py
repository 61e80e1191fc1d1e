"""Stream of the event list in a trace, in pieces that begin and end between two events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from ringprof.common.decoding import UNREADABLE as UNREADABLE
from ringprof.common.limits import MEMORY_BYTES
from ringprof.errors import TraceFormatError
from ringprof.trace.kineto.byte_source import ByteSource

EMPTY = msgspec.Raw(b"")


class _Row(msgspec.Struct, gc=False):
    """Fields of an event, without its phase. Times and arguments stay text, because most events are dropped unread."""

    cat: str | None = ""
    name: str | None = ""
    ts: msgspec.Raw = EMPTY
    dur: msgspec.Raw = EMPTY
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    args: msgspec.Raw = EMPTY


class Event(_Row, gc=False):
    """One event with its phase."""

    ph: str = ""
    id: int | str | float | None = None


class _ArrowEnd(msgspec.Struct, gc=False):
    """Fields of one end of an arrow: a trace has more of them than kernels, and most are dropped."""

    cat: str | None = ""
    id: int | str | float | None = None
    tid: int | str | float | None = None
    ts: msgspec.Raw = EMPTY


def _struct_of_phase(phase: str, base: type[msgspec.Struct] = msgspec.Struct) -> Any:
    """Define a struct for the events of one phase, so that msgspec chooses it by the field ``ph``."""
    name, namespace = f"_Phase{ord(phase)}", {"ph": phase}
    return msgspec.defstruct(name, [], bases=(base,), namespace=namespace, tag_field="ph", tag=phase, gc=False)


decode_event = msgspec.json.Decoder(Event).decode
_decode_any = msgspec.json.Decoder(list[Event]).decode
# Nearly all events begin with their phase. Counters and other unused phases decode to empty structs.
_BY_PHASE = reduce(
    or_,
    [
        *(_struct_of_phase(phase, _Row) for phase in "XMi"),
        *(_struct_of_phase(phase, _ArrowEnd) for phase in "sf"),
        *(_struct_of_phase(phase) for phase in "tCBEbneNODRP"),
    ],
)
_decode_known = msgspec.json.Decoder(list[_BY_PHASE]).decode  # type: ignore[valid-type]


def decode_events(data: bytes | msgspec.Raw) -> list[Event]:
    """Decode all events of a list; events of unused phases have only the field ``ph``."""
    try:
        return _decode_known(data)
    except UNREADABLE:
        return _decode_any(data)


decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

_KEY = rb'"(?:ph|cat|name|ts|dur|pid|tid|id|s|bp|args)"\s*:'
BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{\s*" + _KEY + rb")")
"""Pattern of the boundary between two events. It cannot match inside a valid string, whose quotes would be escaped. It
may match between objects in an event's arguments: a piece cut there does not decode, and recovery reassembles it."""

EVENT_START = re.compile(
    rb'\{\s*"(?:(?:ph|cat|ts)"\s*:|name"\s*:\s*"(?:[^"\\]|\\.){0,2000}"\s*,\s*"(?:ph|cat|ts|pid)")'
)
"""Pattern of the start of an event, used to find the next event behind damage; too strict to match arguments."""

LIST_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_LIST_ROOT = re.compile(rb"\s*\[(?!\s*\")")
"""Start of a file that is a bare list. A key after the bracket shows a damaged brace instead."""
_BARE_LIST = re.compile(rb"\[\s*(?=\{\s*" + _KEY + rb")")
_FIRST_EVENT = re.compile(rb"(?=" + EVENT_START.pattern + rb")")
"""Pattern of the first event, in case the key or the bracket of the list is damaged. The first list in the file would
be that of the devices."""

_HEAD_SHARE, _EVENT_SHARE = 64, 256
"""Divisors of the memory limit: largest head before the first event, and largest event. Lists of empty lists or events
take up to thirty times their size once decoded. With 1 GiB, the head may have 16 MiB and an event 4 MiB."""

UTF8_MARK = b"\xef\xbb\xbf"


class Piece(msgspec.Struct, frozen=True):
    """Part of the event list: consecutive events as text."""

    framed: bytes
    """Events as a JSON list, with brackets."""
    offset: int
    """Offset of `data` in the decompressed file."""
    last: bool
    """Whether the file ends with this piece. ``data`` then includes the end of the list and the text behind it."""

    @property
    def data(self) -> bytes:
        """Text of the events, without brackets."""
        return self.framed[1:-1]


class EventStream:
    """Splitter of a source into the head (everything before the first event) and pieces of the event list."""

    def __init__(self, source: ByteSource, name: str, memory_bytes: int = MEMORY_BYTES) -> None:
        self.head_limit = memory_bytes // _HEAD_SHARE
        """Largest size of the head in bytes; a file whose event list starts later is refused."""
        self.event_limit = memory_bytes // _EVENT_SHARE
        """Size in bytes from which a piece is yielded even if it contains no event boundary."""
        self._source = source
        self._chunks = iter(source)
        self._name = name
        self._rest = b""
        self._separator = b""
        """Text between the piece yielded last and `_rest`."""
        self._offset = 0
        self._pushed_back = b""
        self.list_root = False
        """Whether the file is a bare list of events, without an object around it."""
        self.head = self._read_head()

    def _read_head(self) -> bytes:
        """Read everything before the first event. Raises `TraceFormatError` if there is no event list."""
        data = b""
        while len(data) < self.head_limit:
            chunk = next(self._chunks, b"")
            data += chunk
            self.list_root = _LIST_ROOT.match(data.removeprefix(UTF8_MARK)) is not None
            match = None if self.list_root else LIST_KEY.search(data)
            if not match and (self.list_root or not chunk):
                match = (not self.list_root and _FIRST_EVENT.search(data)) or _BARE_LIST.search(data)
            if match or not chunk:
                break
        else:
            match = None
        if not match:
            reason = self._source.damage or f"not a Kineto trace: {_why_no_events(data)}"
            raise TraceFormatError(f"{self._name}: {reason}")
        self._rest = data[match.end() :]
        self._offset = match.end()
        return data[: match.start()]

    def push_back(self, data: bytes) -> None:
        """Return the unfinished end of the current piece to the stream; it becomes the start of the next piece."""
        self._pushed_back = data

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces in order. Each has about the size of one chunk of the source."""
        for chunk in self._chunks:
            rest, boundary = self._rest, last_boundary(chunk)
            if boundary is None:
                rest, chunk = b"", rest + chunk
                boundary = last_boundary(chunk)
            if boundary is None and len(chunk) < self.event_limit:
                self._rest = chunk
                continue
            end, start = boundary or (len(chunk), len(chunk))
            piece = Piece(b"".join((b"[", rest, memoryview(chunk)[:end], b"]")), self._offset, last=False)
            # Update before the yield: the caller may find the end of the list in the piece and call `remainder`.
            self._offset += len(rest) + start
            self._separator, self._rest = chunk[end:start], chunk[start:]
            yield piece
            if self._pushed_back:
                self._offset -= len(self._pushed_back) + len(self._separator)
                self._rest = self._pushed_back + self._separator + self._rest
                self._pushed_back = b""
        yield Piece(b"".join((b"[", self._rest, b"]")), self._offset, last=True)

    def remainder(self) -> bytes:
        """Return the text that follows the last piece, up to `head_limit` bytes."""
        data = self._separator + self._rest
        for chunk in self._chunks:
            data += chunk
            if len(data) > self.head_limit:
                break
        return data[: self.head_limit]


def last_boundary(data: bytes) -> tuple[int, int] | None:
    """Find the last boundary between two events: the end of one, the start of the next; None if there is none."""
    window = 1 << 12
    while True:
        low = max(0, len(data) - window)
        matches = list(BOUNDARY.finditer(data, low))
        if matches:
            return matches[-1].start() + 1, matches[-1].end()
        if low == 0:
            return None
        window *= 8


def _why_no_events(data: bytes) -> str:
    """Explain why a file has no event list, from its first bytes."""
    if not data.strip():
        return "the file is empty"
    if b'"deviceProperties"' in data or b'"schemaVersion"' in data:
        return "it is cut off, or damaged, before its first event"
    return 'no "traceEvents" list in it'
