"""Detection of the input type of command-line paths: a run, traces or text. Only names and first bytes are read."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Literal

import msgspec

from ringprof.common.decoding import decode_json
from ringprof.common.files import exists, files_in, folders_in, is_file, is_folder, is_url, leading_out, within
from ringprof.errors import InputError, TraceFormatError, nearest
from ringprof.trace.formats import FORMATS, KINETO, NCCL_PROFILER, REDUCED, XLA, Format, format_of
from ringprof.trace.kineto.byte_source import HEAD_BYTES, first_bytes
from ringprof.trace.kineto.event_list import UTF8_MARK
from ringprof.trace.one_run import rank_in_name

EXPORT_SUFFIX = ".perfetto.json.gz"
"""End of the names that ``ringprof export`` chooses; a folder's traces do not include such files."""
_RUN_FILE = "run.json"
_COPY_OF_XLA = "perfetto_trace.json.gz"
"""File that JAX writes next to its trace for Perfetto, with the same events."""

_DEEPEST, _MOST_FOLDERS = 8, 1000
"""Depth and number of subfolders that are searched for traces; TensorBoard puts them into RUN/plugins/profile."""
_MOST_LISTED = 8
"""Number of folders that an error message lists."""

GROUP_FOLDER = re.compile(r"rank[0-9]+|ranks[0-9]+([-_][0-9]+)*(_more)?")
"""Folder name that `capture` chooses for one group when several groups of a job are given the same folder."""

InputType = Literal["run", "trace", "text"]


class Input(msgspec.Struct, frozen=True):
    """Type of an input, and the paths of its files."""

    type: InputType
    paths: tuple[str, ...] = ()
    """Paths of the traces in order of name, or of the text file; empty for a run, whose ``run.json`` lists them."""
    run: str | None = None
    """Path of the ``run.json``."""
    in_folder: bool = False
    """Whether the traces were found in a folder. An unreadable one is then skipped with a warning."""
    left_out: tuple[InputError, ...] = ()
    """Errors of files in the folder that are named like a trace but are none, or that lead outside of the folder."""


def detect(paths: Sequence[str | os.PathLike[str]]) -> Input:
    """Detect what the paths on a command line are: a run, a trace, a folder of traces, several traces, or text.

    Raises `InputError`, or `TraceFormatError` for a known but unsupported format, with a way to convert it.
    """
    names = [os.fspath(path) for path in paths]
    if not names:
        raise InputError("no input: give a run.json, a trace, a folder of traces, or a log")
    inputs = [_detect_folder(name) if is_folder(name) else _detect_file(name) for name in names]
    if len(inputs) == 1:
        return inputs[0]
    for name, item in zip(names, inputs, strict=True):
        if item.type != "trace":
            actual_type = "a run" if item.type == "run" else "a text file"
            raise InputError(f"{name}: several inputs must all be traces; this is {actual_type}")
    return Input(
        "trace",
        tuple(dict.fromkeys(path for item in inputs for path in item.paths)),
        in_folder=any(item.in_folder for item in inputs),
        left_out=tuple(problem for item in inputs for problem in item.left_out),
    )


def detect_bytes(data: bytes, name: str = "-") -> InputType:
    """Detect the type of an input that came through a pipe."""
    return _type_of(first_bytes(data, name), name)[0]


def _detect_file(name: str) -> Input:
    if not exists(name):
        if os.path.islink(name):
            raise InputError(f"{name}: a link to {os.readlink(name)}, which does not exist")
        raise InputError(f"{name}: no such file or folder{_suggestion(name)}")
    if not is_file(name):
        raise InputError(f"{name}: not a regular file; to read from a pipe, give - as the path")
    head = first_bytes(name, name)
    kind, form = _type_of(head, name)
    if form is KINETO and format_of(head) is None:
        for mark, advice in _UNSUPPORTED_JSON:
            if mark in head:
                raise TraceFormatError(f"{name}: {advice}")
    return Input("run", run=name) if kind == "run" else Input(kind, (name,))


def _suggestion(name: str) -> str:
    """Suggest a name for the first missing part of a path, from the first 500 names of its folder; may be empty.

    Where no name is similar and a run is missing, name the command that lists runs.
    """
    if is_url(name):
        return ""
    folder, base_name = os.path.split(os.path.abspath(name))
    while not os.path.lexists(folder):
        folder, base_name = os.path.split(folder)
    with suppress(OSError), os.scandir(folder) as entries:
        similar = nearest(base_name, [entry.name for entry in islice(entries, 500)])
        return similar or (" (ringprof report FOLDER lists the runs of a folder)" if base_name == "run.json" else "")
    return ""


def _detect_folder(name: str) -> Input:
    """Detect the run or the traces in a folder or below it. Raises `InputError` if there is none, or several runs."""
    own_input = _input_in(name)
    if own_input is not None:
        return own_input
    inputs, problems, complete = _inputs_below(name)
    if len(inputs) == 1:
        (only_input,) = inputs.values()
        return msgspec.structs.replace(only_input, left_out=(*only_input.left_out, *problems))
    if inputs:
        listed_folders = ", ".join(islice(inputs, _MOST_LISTED)) + (", ..." if len(inputs) > _MOST_LISTED else "")
        count = f"{len(inputs)}" if complete else f"at least {len(inputs)}"
        raise InputError(
            f"{name}: {count} folders below hold runs or traces: give one, or those of one run: {listed_folders}"
        )
    if problems:
        raise problems[0]
    raise InputError(f"{name}: no run.json and no Kineto trace (.json, .json.gz, .json.zst) in this folder or below it")


def _inputs_below(name: str) -> tuple[dict[str, Input], list[InputError], bool]:
    """Return the input of each outermost subfolder that has one, and the errors of subfolders that cannot be read.

    The last value is False where there are too many subfolders to visit them all.
    """
    inputs: dict[str, Input] = {}
    problems: list[InputError] = []
    folders, visited = deque((folder, 1) for folder in _sorted_folders(name)), 0
    while folders and visited < _MOST_FOLDERS:
        (folder, depth), visited = folders.popleft(), visited + 1
        try:
            own_input = _input_in(folder)
            if own_input is not None:
                inputs[folder] = own_input
            elif depth < _DEEPEST:
                folders.extend((subfolder, depth + 1) for subfolder in _sorted_folders(folder))
        except InputError as error:
            problems.append(error)
    return inputs, problems, not folders


def _sorted_folders(name: str) -> list[str]:
    return sorted(folders_in(name), key=_natural_order)


def _input_in(name: str) -> Input | None:
    """Detect the run or the traces in a folder; None if it holds neither.

    ``files_in`` lists the folder's files, or those of its subfolders if it has none of its own.
    Raises `InputError` if every file named like a trace is damaged.
    """
    run = within(name, _RUN_FILE)
    if is_file(run):
        return Input("run", run=run)
    prefix = name if is_url(name) else os.path.join(name, "")
    suffixes = tuple(suffix for form in FORMATS for suffix in form.suffixes)
    files = [file for file in files_in(name) if file.lower().endswith(suffixes) and not file.endswith(EXPORT_SUFFIX)]
    runs = [os.path.dirname(file) for file in files if os.path.basename(file) == _RUN_FILE]
    if not all(GROUP_FOLDER.fullmatch(os.path.basename(folder)) for folder in runs):
        return None  # Separate runs, each with its own traces. The groups of one job, in contrast, count as one run.
    unsafe_links = dict(leading_out(within(name, _RUN_FILE), (file.removeprefix(prefix) for file in files)))
    formats: dict[str, Format] = {}
    problems: dict[str, InputError] = {}
    for file in sorted(files, key=_natural_order):
        reason = unsafe_links.get(file.removeprefix(prefix))
        if reason is not None:
            problems[file] = InputError(f"{file}: {reason}: give its own path")
            continue
        form = _format_in_folder(file)
        if isinstance(form, InputError):
            problems[file] = form
        elif form is not None:
            formats[file] = form
    # A reduced trace next to the trace that it was made from is redundant.
    complete = {_trace_key(file) for file, form in formats.items() if form is not REDUCED}
    traces = [file for file, form in formats.items() if form is not REDUCED or _trace_key(file) not in complete]
    if sum(formats[file] is XLA for file in traces) > 1:
        traces = [file for file in traces if os.path.basename(file) != _COPY_OF_XLA]
    if not traces and problems:
        raise next(iter(problems.values()))
    if not traces:
        return None
    readable_keys = {_trace_key(file) for file in traces}
    left_out = tuple(problem for file, problem in problems.items() if _trace_key(file) not in readable_keys)
    return Input("trace", tuple(traces), in_folder=True, left_out=left_out)


def _trace_key(file: str) -> str | int:
    """Return a key shared by a trace and its reduced form: the rank in the name, else the path up to its first dot."""
    folder, base = os.path.split(file)
    rank = rank_in_name(file)
    return os.path.join(folder, base.partition(".")[0]) if rank is None else rank


def _natural_order(text: str) -> tuple[object, ...]:
    """Return a sort key that orders digits by value, so that rank2 comes before rank10."""

    def key(part: str) -> tuple[object, ...]:
        digits = part.lstrip("0")
        return (0, len(digits), digits) if part[0] in "0123456789" else (1, 0, part)

    return tuple(map(key, re.findall(r"[0-9]+|[^0-9]", text + "\0")))


def _format_in_folder(file: str) -> Format | InputError | None:
    """Return the trace format of a file; an error if it is named like a trace but damaged; None for other files."""
    expected = rank_in_name(file) is not None or ".json" in os.path.basename(file)
    try:
        head = first_bytes(file, file)
        kind, form = _type_of(head, file)
    except InputError as error:
        return error if expected else None
    if kind == "trace" and form is KINETO and format_of(head) is None:
        # JSON without any mark of a trace.
        unrelated = rank_in_name(file) is None and (len(head) == HEAD_BYTES or _is_json(head))
        return None if unrelated else InputError(f"{file}: no Kineto trace, or damaged at its beginning")
    if kind == "run":
        return None
    if kind != "trace":
        return InputError(f"{file}: not a trace, despite its name") if expected else None
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
_UNSUPPORTED_MAGIC = (
    (b"PK\x03\x04", "a zip archive: unpack it and give the folder"),
    (b"\x7fELF", "a program, not a trace"),
    (b"BZh", "bzip2: unpack it, or compress with gzip"),
    (b"\xfd7zXZ", "xz: unpack it, or compress with gzip"),
    (b"\xff\xfe", "UTF-16 text: save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text: save it as UTF-8"),
)
_UNSUPPORTED_SUFFIXES = {
    (".pftrace", ".perfetto-trace"): _PERFETTO,
    (".nsys-rep", ".qdrep"): _NSIGHT,
    (".xplane.pb",): "an XLA profile: give the .trace.json.gz beside it, or export that from XProf",
    (".ncu-rep",): "an Nsight Compute report, which has no timeline; give a Kineto trace (.json)",
    (".tar", ".tgz", ".zip"): _ARCHIVE,
}
_UNSUPPORTED_JSON = (
    (b'"CudaEvent"', _NSIGHT),
    (b'"rocprofiler-sdk-tool"', "rocprofv3's JSON, which is not read: record with torch.profiler"),
    (
        NCCL_PROFILER,
        "a trace of NCCL's profiler plugin, which holds the host's events and no kernels: give the files of NCCL "
        "Inspector, or a trace of torch.profiler or Nsight Systems",
    ),
    (b'"nodes"', "a graph of operators, with no times of a device: give the profiler's trace of the same run"),
    (b"speedscope.app", "a CPU profile, with nothing of a GPU: give a Kineto trace"),
)
"""Text that identifies JSON of other tools, with advice for each."""


def _type_of(head: bytes, name: str) -> tuple[InputType, Format | None]:
    """Return the input type of a file that begins with ``head``, and its format if it is a trace."""
    if not head.strip():
        raise InputError(f"{name}: the file is empty")
    form = format_of(head)
    if form is None or form is KINETO:
        advice = [advice for magic, advice in _UNSUPPORTED_MAGIC if head.startswith(magic)]
        advice += [_ARCHIVE] if head[257:262] == b"ustar" else []
        advice += [advice for suffixes, advice in _UNSUPPORTED_SUFFIXES.items() if name.lower().endswith(suffixes)]
        if advice:
            raise TraceFormatError(f"{name}: {advice[0]}")
    text = head.removeprefix(UTF8_MARK).lstrip()
    if text.startswith(b"{") and b'"ringprof.run/' in text:
        return "run", None
    if form is not None:
        return "trace", form
    if text.startswith((b"{", b"[")) and name.lower().endswith(KINETO.suffixes):
        return "trace", KINETO
    # Binary data has a zero byte, or more than a tenth of other control characters.
    controls = len(head) - len(head.translate(None, bytes(range(9)) + bytes(range(14, 27)) + bytes(range(28, 32))))
    if b"\0" in head or controls * 10 > len(head):
        raise InputError(f"{name}: binary data of an unknown kind; give a Kineto trace (.json), a run.json or a log")
    return "text", None
