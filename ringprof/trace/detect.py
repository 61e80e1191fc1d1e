"""Which reader fits an input: looks at names and first bytes, reads nothing in full."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringprof.errors import InputError, MissingExtraError, TraceFormatError
from ringprof.files import exists, files_in, is_file, is_folder, read_bytes, within
from ringprof.trace.nsys import SQLITE_MAGIC
from ringprof.trace.reduced import MAGIC, SUFFIX
from ringprof.trace.stream import GZIP_MAGIC, ZSTD_MAGIC, ByteSource

InputType = Literal["run", "trace", "text"]

RUN_FILE = "run.json"

LOOK_BYTES = 1 << 16
"""How much of a file is looked at."""

_TRACE_SUFFIXES = (".json", ".json.gz", ".json.zst", ".json.zstd", ".gz", ".zst", ".sqlite")


@dataclass(frozen=True)
class Input:
    """What an input is, and where its parts lie."""

    type: InputType
    paths: tuple[str, ...] = ()
    """The traces in order of name, or the text file; for a run only its ``run.json`` names them."""
    run: str | None = None
    """The ``run.json``."""


def detect(paths: Sequence[str | os.PathLike[str]]) -> Input:
    """Tell what the paths on a command line are: a run, a trace, a folder of traces, several traces, or text.

    Raises `InputError`, or `TraceFormatError` for a known format that is not read, with what to do about it.
    """
    names = [os.fspath(path) for path in paths]
    if not names:
        raise InputError("no input: give a run.json, a trace, a folder of traces, or a log")
    if len(names) == 1:
        return _detect_folder(names[0]) if is_folder(names[0]) else _detect_file(names[0])
    found: list[str] = []
    for name in names:
        one = _detect_folder(name) if is_folder(name) else _detect_file(name)
        if one.type != "trace":
            raise InputError(f"{name}: several inputs must all be traces; this is {_article(one.type)}")
        found.extend(one.paths)
    return Input("trace", tuple(dict.fromkeys(found)))


def detect_bytes(data: bytes, name: str = "-") -> InputType:
    """As `detect`, for what came through a pipe."""
    if data.startswith(SQLITE_MAGIC):
        raise TraceFormatError(f"{name}: an Nsight Systems export cannot come through a pipe: give its path")
    if data.startswith(MAGIC):
        raise TraceFormatError(f"{name}: a reduced trace cannot come through a pipe: give its path")
    return _type_of(_look(data, name), name)


def _article(kind: InputType) -> str:
    return {"run": "a run", "text": "a text file", "trace": "a trace"}[kind]


def _detect_file(name: str) -> Input:
    if not exists(name):
        raise InputError(f"{name}: no such file or folder")
    if not is_file(name):
        raise InputError(f"{name}: not a regular file; to read from a pipe, give - as the path")
    kind = _type_of(_look(name, name), name)
    return Input("run", run=name) if kind == "run" else Input(kind, (name,))


def _detect_folder(name: str) -> Input:
    run = within(name, RUN_FILE)
    if is_file(run):
        return Input("run", run=run)
    files = sorted(files_in(name), key=_natural_order)
    traces = [file for file in files if file.lower().endswith(_TRACE_SUFFIXES) and _is_trace(file)]
    # Reduced traces lie beside those that they were made of: one of the two is enough.
    traces = traces or [file for file in files if file.endswith(SUFFIX) and read_bytes(file, len(MAGIC)) == MAGIC]
    if not traces:
        raise InputError(f"{name}: no run.json and no Kineto trace (.json, .json.gz, .json.zst) in this folder")
    return Input("trace", tuple(traces))


def _natural_order(text: str) -> tuple[object, ...]:
    """rank2 before rank10."""
    key: list[tuple[object, ...]] = []
    digits = ""
    for letter in text + "\0":
        if letter.isdecimal() and letter.isascii():
            digits += letter
            continue
        if digits:
            key.append((0, int(digits), ""))
            digits = ""
        key.append((1, 0, letter))
    return tuple(key)


def _is_trace(name: str) -> bool:
    """Whether a file found in a folder is a trace; one that is only named like it may be anything."""
    try:
        head = _look(name, name)
        return _type_of(head, name) == "trace" and (_has_marks(head) or head.startswith(SQLITE_MAGIC))
    except MissingExtraError:
        raise
    except InputError:
        return False


# --- first bytes --------------------------------------------------------------------------------------


def _look(source: str | bytes, name: str) -> bytes:
    """The first bytes of the content, decompressed."""
    if isinstance(source, bytes):
        head = source[:LOOK_BYTES]
    else:
        head = read_bytes(source, LOOK_BYTES)
    if head.startswith(GZIP_MAGIC):
        return _gunzip_start(head, name)
    if head.startswith(ZSTD_MAGIC):
        return next(iter(ByteSource(source, name)), b"")[:LOOK_BYTES]
    return head


def _gunzip_start(head: bytes, name: str) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(head, LOOK_BYTES)
    except zlib.error as error:
        raise TraceFormatError(f"{name}: damaged gzip file ({error}): copy it again") from None


_FOREIGN = (
    (b"PK\x03\x04", "a zip archive: unpack it and give the folder"),
    (b"\x7fELF", "a program, not a trace"),
    (b"BZh", "bzip2: unpack it, or compress with gzip"),
    (b"\xfd7zXZ", "xz: unpack it, or compress with gzip"),
    (b"\xff\xfe", "UTF-16 text: save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text: save it as UTF-8"),
)
_FOREIGN_SUFFIXES = {
    ".pftrace": "a Perfetto trace: export JSON from the profiler (a path that ends in .json) and give that",
    ".perfetto-trace": "a Perfetto trace: export JSON from the profiler (a path that ends in .json) and give that",
    ".nsys-rep": "an Nsight Systems report: export it (nsys export --type sqlite FILE) and give the .sqlite file",
    ".qdrep": "an Nsight Systems report: export it (nsys export --type sqlite FILE) and give the .sqlite file",
    ".ncu-rep": "an Nsight Compute report, which has no timeline; give a Kineto trace (.json)",
    ".tar": "an archive: unpack it and give the folder",
    ".tgz": "an archive: unpack it and give the folder",
    ".zip": "an archive: unpack it and give the folder",
}


def _type_of(head: bytes, name: str) -> InputType:
    if not head.strip():
        raise InputError(f"{name}: the file is empty")
    if head.startswith((SQLITE_MAGIC, MAGIC)):
        return "trace"
    _refuse_foreign(head, name)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{") and b'"ringprof.run/' in text:
        return "run"
    if _looks_like_trace(text, name):
        return "trace"
    if _is_binary(head):
        raise InputError(f"{name}: binary data of an unknown kind; give a Kineto trace (.json), a run.json or a log")
    return "text"


def _refuse_foreign(head: bytes, name: str) -> None:
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            raise TraceFormatError(f"{name}: {what}")
    if head[257:262] == b"ustar":
        raise TraceFormatError(f"{name}: an archive: unpack it and give the folder")
    for suffix, what in _FOREIGN_SUFFIXES.items():
        if name.lower().endswith(suffix):
            raise TraceFormatError(f"{name}: {what}")


_TRACE_MARKS = (b'"traceEvents"', b'"deviceProperties"', b'"baseTimeNanoseconds"', b'"distributedInfo"')


def _looks_like_trace(text: bytes, name: str) -> bool:
    """JSON that has a trace's fields near its start, or that at least is named as one.

    A log that quotes a trace does not begin with a bracket; a trace whose first byte is damaged has its fields.
    """
    return _has_marks(text) or (text.startswith((b"{", b"[")) and name.lower().endswith(_TRACE_SUFFIXES))


def _has_marks(text: bytes) -> bool:
    return any(mark in text for mark in _TRACE_MARKS) or (text.lstrip()[:1] == b"[" and b'"ph"' in text)


def _is_binary(head: bytes) -> bool:
    """Text has no zero bytes and few other control characters."""
    controls = len(head) - len(head.translate(None, bytes(range(9)) + bytes(range(14, 27)) + bytes(range(28, 32))))
    return b"\0" in head or controls * 10 > len(head)
