"""Table of the trace formats that ringprof reads. A new format needs a reader and an entry in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ringprof.common.limits import MemoryBudget
from ringprof.errors import InputError, TraceFormatError
from ringprof.trace.columns import Trace
from ringprof.trace.kineto import parse_trace, read_trace
from ringprof.trace.kineto.byte_source import first_bytes
from ringprof.trace.kineto.event_list import UTF8_MARK
from ringprof.trace.kineto.tracks import by_device
from ringprof.trace.reduced import MAGIC, PREVIOUS_MAGIC, SUFFIX, read_reduced


class Format(msgspec.Struct, frozen=True):
    """One trace format: how to recognise its files and how to read them."""

    name: str
    """Name with its article, for messages."""
    suffixes: tuple[str, ...]
    """Suffixes of file names; files in a folder are opened only if their name has one of them."""
    sniff: Callable[[bytes], bool]
    """Return whether a file is of this format, given its first bytes, decompressed."""
    read: Callable[[str, MemoryBudget], list[Trace]]
    """Read the traces in a file: one per rank that the file holds."""
    one_rank: bool = True
    """Whether a file holds one rank only."""
    parse: Callable[[bytes, str, MemoryBudget], Trace] | None = None
    """Read one trace from the bytes of a file; None where the reader needs the file itself."""


_SQLITE_MAGIC = b"SQLite format 3\x00"
NCCL_PROFILER = b'"cat": "GROUP"'
"""Text in the traces of NCCL's example profiler plugin."""
_KINETO_MARKS = (b'"traceEvents"', b'"deviceProperties"', b'"baseTimeNanoseconds"', b'"distributedInfo"')


def _is_kineto(head: bytes) -> bool:
    """Return whether the bytes begin a Kineto trace: a list of events, or text with one of its top-level fields.

    A log that quotes a trace does not begin with a bracket. A trace whose first byte is damaged still has the fields.
    """
    bare_list = head.removeprefix(UTF8_MARK).lstrip()[:1] == b"[" and b'"ph"' in head and NCCL_PROFILER not in head
    return bare_list or any(mark in head for mark in _KINETO_MARKS)


def _read_nsys(path: str, budget: MemoryBudget) -> list[Trace]:
    from ringprof.trace.nsys import read_nsys  # imports SQLite, which most traces do not need

    return read_nsys(path, budget)


NSYS = Format(
    name="an Nsight Systems export", suffixes=(".sqlite", ".sqlite.gz", ".sqlite.zst"),
    sniff=lambda head: head.startswith(_SQLITE_MAGIC),
    read=_read_nsys, one_rank=False,
)  # fmt: skip
REDUCED = Format(
    name="a reduced trace", suffixes=(SUFFIX,), sniff=lambda head: head.startswith((MAGIC, PREVIOUS_MAGIC)),
    read=lambda path, budget: [read_reduced(path, budget)],
)  # fmt: skip
KINETO = Format(
    name="a Kineto trace", suffixes=(".json", ".json.gz", ".json.zst", ".json.zstd", ".gz", ".zst"), sniff=_is_kineto,
    read=lambda path, budget: [read_trace(path, budget)], parse=parse_trace,
)  # fmt: skip
XLA = Format(
    name="an XLA trace", suffixes=KINETO.suffixes,
    sniff=lambda head: b'"/device:GPU:' in head and b'"traceEvents"' in head,
    read=lambda path, budget: by_device(read_trace(path, budget)), one_rank=False,
)  # fmt: skip
"""Traces of JAX and TensorFlow. A file holds all GPUs of a process; each GPU counts as a rank."""
FORMATS = (NSYS, REDUCED, XLA, KINETO)


def format_of(head: bytes) -> Format | None:
    """Return the format of content that begins with ``head``; None if it is of no known format."""
    return next((form for form in FORMATS if form.sniff(head)), None)


def format_at(path: str) -> Format:
    """Return the format of a trace file; Kineto for an unknown or unreadable file, whose reader raises the error."""
    try:
        return format_of(first_bytes(path, path)) or KINETO
    except InputError:
        return KINETO


def is_newest_reduced(path: str) -> bool:
    """Return whether a file is a reduced trace of the current version, which has all information of the full trace."""
    try:
        return first_bytes(path, path).startswith(MAGIC)
    except InputError:
        return False


def parse_bytes(data: bytes, name: str, budget: MemoryBudget) -> Trace:
    """Parse a trace that came through a pipe. Raises `TraceFormatError` if its format can only be read from a file."""
    form = format_of(first_bytes(data, name)) or KINETO
    if form.parse is None:
        raise TraceFormatError(f"{name}: {form.name} cannot come through a pipe: give its path")
    return form.parse(data, name, budget)
