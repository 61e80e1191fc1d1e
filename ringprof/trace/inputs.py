"""What the paths on a command line are: a run, traces or text. Looks at names and first bytes only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringprof.errors import InputError, MissingExtraError, TraceFormatError
from ringprof.files import exists, files_in, is_file, is_folder, within
from ringprof.trace.formats import FORMATS, KINETO, REDUCED, Format, format_of
from ringprof.trace.kineto.byte_source import first_bytes
from ringprof.trace.kineto.event_list import UTF8_MARK

InputType = Literal["run", "trace", "text"]

RUN_FILE = "run.json"


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
    found = [_detect_folder(name) if is_folder(name) else _detect_file(name) for name in names]
    if len(found) == 1:
        return found[0]
    for name, one in zip(names, found, strict=True):
        if one.type != "trace":
            what = "a run" if one.type == "run" else "a text file"
            raise InputError(f"{name}: several inputs must all be traces; this is {what}")
    return Input("trace", tuple(dict.fromkeys(path for one in found for path in one.paths)))


def detect_bytes(data: bytes, name: str = "-") -> InputType:
    """As `detect`, for what came through a pipe."""
    return _type_of(first_bytes(data, name), name)[0]


def _detect_file(name: str) -> Input:
    if not exists(name):
        raise InputError(f"{name}: no such file or folder")
    if not is_file(name):
        raise InputError(f"{name}: not a regular file; to read from a pipe, give - as the path")
    kind, _ = _type_of(first_bytes(name, name), name)
    return Input("run", run=name) if kind == "run" else Input(kind, (name,))


def _detect_folder(name: str) -> Input:
    run = within(name, RUN_FILE)
    if is_file(run):
        return Input("run", run=run)
    files = [(file, _trace_format(file)) for file in sorted(files_in(name), key=_natural_order)]
    # Reduced traces lie beside those that they were made of: one of the two is enough.
    traces = [file for file, form in files if form not in (None, REDUCED)]
    traces = traces or [file for file, form in files if form is REDUCED]
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


def _trace_format(name: str) -> Format | None:
    """The format of a file found in a folder, None where it is no trace, however it is named."""
    if not any(name.lower().endswith(one.suffixes) for one in FORMATS):
        return None
    try:
        head = first_bytes(name, name)
        kind, _ = _type_of(head, name)
        return format_of(head) if kind == "trace" else None
    except MissingExtraError:
        raise
    except InputError:
        return None


# --- first bytes --------------------------------------------------------------------------------------

_PERFETTO = "a Perfetto trace: export JSON from the profiler (a path that ends in .json) and give that"
_NSIGHT = "an Nsight Systems report: export it (nsys export --type sqlite FILE) and give the .sqlite file"
_ARCHIVE = "an archive: unpack it and give the folder"
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive: unpack it and give the folder"),
    (b"\x7fELF", "a program, not a trace"),
    (b"BZh", "bzip2: unpack it, or compress with gzip"),
    (b"\xfd7zXZ", "xz: unpack it, or compress with gzip"),
    (b"\xff\xfe", "UTF-16 text: save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text: save it as UTF-8"),
)
_FOREIGN_SUFFIXES = {
    (".pftrace", ".perfetto-trace"): _PERFETTO,
    (".nsys-rep", ".qdrep"): _NSIGHT,
    (".ncu-rep",): "an Nsight Compute report, which has no timeline; give a Kineto trace (.json)",
    (".tar", ".tgz", ".zip"): _ARCHIVE,
}


def _type_of(head: bytes, name: str) -> tuple[InputType, Format | None]:
    """What a file that begins so is, and a trace's format."""
    if not head.strip():
        raise InputError(f"{name}: the file is empty")
    form = format_of(head)
    if form is None or form is KINETO:
        _refuse_foreign(head, name)
    text = head.removeprefix(UTF8_MARK).lstrip()
    if text.startswith(b"{") and b'"ringprof.run/' in text:
        return "run", None
    if form is not None:
        return "trace", form
    if text.startswith((b"{", b"[")) and name.lower().endswith(KINETO.suffixes):
        return "trace", KINETO
    if _is_binary(head):
        raise InputError(f"{name}: binary data of an unknown kind; give a Kineto trace (.json), a run.json or a log")
    return "text", None


def _refuse_foreign(head: bytes, name: str) -> None:
    what = [said for magic, said in _FOREIGN if head.startswith(magic)]
    what += [_ARCHIVE] if head[257:262] == b"ustar" else []
    what += [said for suffixes, said in _FOREIGN_SUFFIXES.items() if name.lower().endswith(suffixes)]
    if what:
        raise TraceFormatError(f"{name}: {what[0]}")


def _is_binary(head: bytes) -> bool:
    """Text has no zero bytes and few other control characters."""
    controls = len(head) - len(head.translate(None, bytes(range(9)) + bytes(range(14, 27)) + bytes(range(28, 32))))
    return b"\0" in head or controls * 10 > len(head)
