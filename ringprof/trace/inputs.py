"""What the paths on a command line are: a run, traces or text. Looks at names and first bytes only."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Literal

import msgspec

from ringprof.decoding import decode_json
from ringprof.errors import InputError, TraceFormatError, nearest
from ringprof.files import exists, files_in, folders_in, is_file, is_folder, is_url, leading_out, within
from ringprof.trace.formats import FORMATS, KINETO, REDUCED, XLA, Format, format_of
from ringprof.trace.kineto.byte_source import LOOK_BYTES, first_bytes
from ringprof.trace.kineto.event_list import UTF8_MARK
from ringprof.trace.one_run import rank_in_name

_RUN_FILE = "run.json"
_COPY_OF_XLA = "perfetto_trace.json.gz"
"""What JAX writes beside its trace, for Perfetto: the same events."""

_DEEPEST, _MOST_FOLDERS = 8, 1000
"""How far below a folder traces are looked for (TensorBoard's stand at RUN/plugins/profile), in how many folders."""
_MOST_LISTED = 8

_GROUP_FOLDER = re.compile(r"rank[0-9]+|ranks[0-9]+([-_][0-9]+)*(_more)?")
"""What `capture` names the folder of one group where several groups of a job name one folder."""

InputType = Literal["run", "trace", "text"]


class Input(msgspec.Struct, frozen=True):
    """What an input is, and where its parts lie."""

    type: InputType
    paths: tuple[str, ...] = ()
    """The traces in order of name, or the text file; for a run only its ``run.json`` names them."""
    run: str | None = None
    """The ``run.json``."""
    in_folder: bool = False
    """Whether the traces were found in a folder: one of them that cannot be read is left out."""
    left_out: tuple[InputError, ...] = ()
    """What in the folder is named as a trace and is none, or lies elsewhere."""


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
    return Input(
        "trace",
        tuple(dict.fromkeys(path for one in found for path in one.paths)),
        in_folder=any(one.in_folder for one in found),
        left_out=tuple(problem for one in found for problem in one.left_out),
    )


def detect_bytes(data: bytes, name: str = "-") -> InputType:
    """As `detect`, for what came through a pipe."""
    return _type_of(first_bytes(data, name), name)[0]


def _detect_file(name: str) -> Input:
    if not exists(name):
        raise InputError(f"{name}: no such file or folder{_meant(name)}")
    if not is_file(name):
        raise InputError(f"{name}: not a regular file; to read from a pipe, give - as the path")
    head = first_bytes(name, name)
    kind, form = _type_of(head, name)
    if form is KINETO and format_of(head) is None:
        for mark, said in _FOREIGN_JSON:
            if mark in head:
                raise TraceFormatError(f"{name}: {said}")
    return Input("run", run=name) if kind == "run" else Input(kind, (name,))


def _meant(name: str) -> str:
    """Which neighbour was likely meant, of a folder's first five hundred names."""
    folder, own = os.path.split(os.path.abspath(name))
    if is_url(name) or not is_folder(folder):
        return ""
    with suppress(OSError), os.scandir(folder) as beside:
        return nearest(own, [one.name for one in islice(beside, 500)])
    return ""


def _detect_folder(name: str) -> Input:
    """Tell what a folder holds, or the folders below it. Raises `InputError` where that is nothing, or several runs."""
    found = _input_in(name)
    if found is not None:
        return found
    below, problems, all_looked_at = _inputs_below(name)
    if len(below) == 1:
        (one,) = below.values()
        return msgspec.structs.replace(one, left_out=(*one.left_out, *problems))
    if below:
        shown = ", ".join(islice(below, _MOST_LISTED)) + (", ..." if len(below) > _MOST_LISTED else "")
        count = f"{len(below)}" if all_looked_at else f"at least {len(below)}"
        raise InputError(f"{name}: {count} folders below hold runs or traces: give one, or those of one run: {shown}")
    if problems:
        raise problems[0]
    raise InputError(f"{name}: no run.json and no Kineto trace (.json, .json.gz, .json.zst) in this folder or below it")


def _inputs_below(name: str) -> tuple[dict[str, Input], list[InputError], bool]:
    """Find the outermost folders below that hold a run or traces, and what is damaged in folders that hold neither.

    The last value says whether all folders were looked at: there may be too many.
    """
    found: dict[str, Input] = {}
    problems: list[InputError] = []
    folders, looked_at = deque((folder, 1) for folder in _sorted_folders(name)), 0
    while folders and looked_at < _MOST_FOLDERS:
        (folder, depth), looked_at = folders.popleft(), looked_at + 1
        try:
            one = _input_in(folder)
            if one is not None:
                found[folder] = one
            elif depth < _DEEPEST:
                folders.extend((inner, depth + 1) for inner in _sorted_folders(folder))
        except InputError as error:
            problems.append(error)
    return found, problems, not folders


def _sorted_folders(name: str) -> list[str]:
    return sorted(folders_in(name), key=_natural_order)


def _input_in(name: str) -> Input | None:
    """Tell what a folder holds, or the folders in it where it has no files; None where that is no run and no trace.

    Raises `InputError` where what is named like a trace is none.
    """
    run = within(name, _RUN_FILE)
    if is_file(run):
        return Input("run", run=run)
    here = name if is_url(name) else os.path.join(name, "")
    files = [file for file in files_in(name) if any(file.lower().endswith(one.suffixes) for one in FORMATS)]
    runs = [os.path.dirname(file) for file in files if os.path.basename(file) == _RUN_FILE]
    if not all(_GROUP_FOLDER.fullmatch(os.path.basename(folder)) for folder in runs):
        return None  # Runs in folders of their own, each with its traces; those of the groups of one job are one run.
    outside = dict(leading_out(within(name, _RUN_FILE), (file.removeprefix(here) for file in files)))
    formats: dict[str, Format] = {}
    problems: dict[str, InputError] = {}
    for file in sorted(files, key=_natural_order):
        reason = outside.get(file.removeprefix(here))
        if reason is not None:
            problems[file] = InputError(f"{file}: {reason}: give its own path")
            continue
        form = _format_in_folder(file)
        if isinstance(form, InputError):
            problems[file] = form
        elif form is not None:
            formats[file] = form
    # Reduced traces lie beside those that they were made of: one of the two is enough.
    whole = {_which(file) for file, form in formats.items() if form is not REDUCED}
    traces = [file for file, form in formats.items() if form is not REDUCED or _which(file) not in whole]
    if sum(formats[file] is XLA for file in traces) > 1:
        traces = [file for file in traces if os.path.basename(file) != _COPY_OF_XLA]
    if not traces and problems:
        raise next(iter(problems.values()))
    if not traces:
        return None
    known = {_which(file) for file in traces}
    left_out = tuple(problem for file, problem in problems.items() if _which(file) not in known)
    return Input("trace", tuple(traces), in_folder=True, left_out=left_out)


def _which(file: str) -> str | int:
    """What a trace and its reduced form have in common: the rank in their names, else the name before its first dot."""
    folder, base = os.path.split(file)
    rank = rank_in_name(file)
    return os.path.join(folder, base.partition(".")[0]) if rank is None else rank


def _natural_order(text: str) -> tuple[object, ...]:
    """rank2 before rank10."""
    key: list[tuple[object, ...]] = []
    digits = ""
    for letter in text + "\0":
        if letter.isdecimal() and letter.isascii():
            digits += letter
            continue
        if digits:
            key.append((0, len(digits.lstrip("0")), digits.lstrip("0")))
            digits = ""
        key.append((1, 0, letter))
    return tuple(key)


def _format_in_folder(file: str) -> Format | InputError | None:
    """The format of a file that is named like a trace; why it cannot be told; None for something else."""
    expected = rank_in_name(file) is not None or ".json" in os.path.basename(file)
    try:
        head = first_bytes(file, file)
        kind, form = _type_of(head, file)
    except InputError as error:
        return error if expected else None
    if kind == "trace" and form is KINETO and format_of(head) is None:
        # JSON without any mark of a trace.
        other = rank_in_name(file) is None and (len(head) == LOOK_BYTES or _is_json(head))
        return None if other else InputError(f"{file}: no Kineto trace, or damaged at its beginning")
    if kind == "run":
        return None
    if kind != "trace":
        return InputError(f"{file}: no trace, for all its name") if expected else None
    return form


def _is_json(text: bytes) -> bool:
    try:
        decode_json(text, msgspec.Raw, "file", "JSON")
        return True
    except InputError:
        return False


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
    (".xplane.pb",): "an XLA profile: give the .trace.json.gz beside it, or export that from XProf",
    (".ncu-rep",): "an Nsight Compute report, which has no timeline; give a Kineto trace (.json)",
    (".tar", ".tgz", ".zip"): _ARCHIVE,
}
_FOREIGN_JSON = (
    (b'"CudaEvent"', _NSIGHT),
    (b'"rocprofiler-sdk-tool"', "rocprofv3's JSON, which is not read: record with torch.profiler"),
    (b'"nodes"', "a graph of operators, with no times of a device: give the profiler's trace of the same run"),
    (b"speedscope.app", "a CPU profile, with nothing of a GPU: give a Kineto trace"),
)
"""What JSON has in it that is nothing like a trace of ours."""


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
