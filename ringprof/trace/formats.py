"""The formats of traces that ringprof reads, a row each: a new one is its reader and its row here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ringprof.errors import InputError, TraceFormatError
from ringprof.limits import MemoryBudget
from ringprof.trace.columns import Trace
from ringprof.trace.kineto import parse_trace, read_trace
from ringprof.trace.kineto.byte_source import first_bytes
from ringprof.trace.kineto.event_list import UTF8_MARK
from ringprof.trace.kineto.tracks import by_device
from ringprof.trace.reduced import BEFORE, MAGIC, SUFFIX, read_reduced


class Format(msgspec.Struct, frozen=True):
    """One format of traces."""

    name: str
    """With its article, for messages."""
    suffixes: tuple[str, ...]
    """How the names of such files end; what a folder holds is looked at only if its name ends so."""
    sniff: Callable[[bytes], bool]
    """Whether content that begins so, unpacked, is of this format."""
    read: Callable[[str, MemoryBudget], list[Trace]]
    """The traces in a file: one, or of every rank that it holds."""
    one_rank: bool = True
    """Whether a file is of one rank only."""
    parse: Callable[[bytes, str, MemoryBudget], Trace] | None = None
    """Reads one trace from a file's bytes; None where that needs the file."""


_SQLITE_MAGIC = b"SQLite format 3\x00"
_KINETO_MARKS = (b'"traceEvents"', b'"deviceProperties"', b'"baseTimeNanoseconds"', b'"distributedInfo"')


def _is_kineto(head: bytes) -> bool:
    """A log that quotes a trace does not begin with a bracket; a trace whose first byte is damaged has its fields."""
    bare_list = head.removeprefix(UTF8_MARK).lstrip()[:1] == b"[" and b'"ph"' in head
    return bare_list or any(mark in head for mark in _KINETO_MARKS)


def _read_nsys(path: str, budget: MemoryBudget) -> list[Trace]:
    from ringprof.trace.nsys import read_nsys  # here, with SQLite, since most traces are Kineto's

    return read_nsys(path, budget)


NSYS = Format(
    name="an Nsight Systems export",
    suffixes=(".sqlite",),
    sniff=lambda head: head.startswith(_SQLITE_MAGIC),
    read=_read_nsys,
    one_rank=False,
)
REDUCED = Format(
    name="a reduced trace",
    suffixes=(SUFFIX,),
    sniff=lambda head: head.startswith((MAGIC, BEFORE)),
    read=lambda path, budget: [read_reduced(path, budget)],
)
KINETO = Format(
    name="a Kineto trace",
    suffixes=(".json", ".json.gz", ".json.zst", ".json.zstd", ".gz", ".zst"),
    sniff=_is_kineto,
    read=lambda path, budget: [read_trace(path, budget)],
    parse=parse_trace,
)
XLA = Format(
    name="an XLA trace",
    suffixes=KINETO.suffixes,
    sniff=lambda head: b'"/device:GPU:' in head and b'"traceEvents"' in head,
    read=lambda path, budget: by_device(read_trace(path, budget)),
    one_rank=False,
)
"""JAX's and TensorFlow's: of all GPUs of a process, each of which is a rank."""
FORMATS = (NSYS, REDUCED, XLA, KINETO)


def format_of(head: bytes) -> Format | None:
    """The format of content that begins with these bytes."""
    return next((one for one in FORMATS if one.sniff(head)), None)


def format_at(path: str) -> Format:
    """The format of a trace; that of what cannot be told is Kineto's, whose reader says what is wrong."""
    try:
        return format_of(first_bytes(path, path)) or KINETO
    except InputError:
        return KINETO


def is_newest_reduced(path: str) -> bool:
    """Tell whether a file is a reduced trace of this version, which holds all that the trace itself tells."""
    try:
        return first_bytes(path, path).startswith(MAGIC)
    except InputError:
        return False


def parse_bytes(data: bytes, name: str, budget: MemoryBudget) -> Trace:
    """The trace that came through a pipe. Raises `TraceFormatError` where its format needs a file."""
    form = format_of(first_bytes(data, name)) or KINETO
    if form.parse is None:
        raise TraceFormatError(f"{name}: {form.name} cannot come through a pipe: give its path")
    return form.parse(data, name, budget)
