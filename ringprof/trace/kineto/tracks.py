"""Rows that only the name of their track tells to be a device's: XLA, rocprof and CANN write no categories."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from ringprof.trace.columns import NONE, Activities, Trace, distinct
from ringprof.trace.kineto.event_list import UNREADABLE, Event

_DEVICE = re.compile(r"(?P<xla>/device:)?GPU:?([0-9]{1,4})")
# Of XLA's tracks those of streams; the others repeat what ran there by module, operation and step.
_STREAM = re.compile(r"Stream #([0-9]{1,9})")
_HOST_OR_REPEATED = re.compile(r"/device:GPU|/host:|CPU |(Python|CANN|MindSpore|PTA|Overlap Analysis)$")
# CANN's (Huawei's) processes. A task says what it runs on; a communicator has a track of its own beside its planes,
# which show the parts of its operations.
_TASKS, _COMMUNICATION = "Ascend Hardware", re.compile(r"Communication|HCCL")
_COMMUNICATOR = re.compile(r"(Group [0-9]{1,9} )?Communication|(?P<plane>Plane) [0-9]{1,9}")
_UNTYPED = "Other"
_ON_CORES = re.compile(rf"(KERNEL_)?(MIX_)?AI[CV]?_?(CORE|CPU|VECTOR_CORE|VEC|SQE)?|DSA_SQE|{_UNTYPED}")
_COPIES = re.compile(r"MEMCPY_ASYNC|(S|PCIE_)DMA(_SQE)?")
_RUNS_NOTHING = re.compile(r"WAIT|RECORD|NOTIFY|EVENT|HOLDER|VALUE|PROFIL|MODEL|LABEL|STREAM|FFTS|^N/A$")
_COPY_OR_SET = re.compile(r"mem(cpy|set)", re.IGNORECASE)
_MOST_TRACKS, _LONGEST_TEXT = 1 << 14, 200

ON_DEVICE = re.compile(r"gpu|cuda|hip|npu|hpu|mtia|tpu|xpu|xla|device|kernel|ascend|accelerator", re.IGNORECASE)
"""What the category or the process of rows is called that ran on a device of any maker."""


class _Named(msgspec.Struct):
    name: str = ""


_decode_name = msgspec.json.Decoder(_Named).decode


class _Task(msgspec.Struct):
    kind: str = msgspec.field(default="", name="Task Type")


def _task(event: Event) -> str:
    """Return the type of a CANN task. Where CANN says "Other", copies and waits are named after their type."""
    try:
        kind = msgspec.json.decode(event.args, type=_Task).kind
    except UNREADABLE:
        return ""
    name = event.name or ""
    named_by_type = _COPIES.fullmatch(name) or (name.isupper() and _RUNS_NOTHING.search(name))
    return name if kind == _UNTYPED and named_by_type else kind


class Tracks:
    """The processes and threads of one trace, and where rows without a known category belong."""

    def __init__(self) -> None:
        self._processes: dict[object, str] = {}
        self._streams: dict[tuple[object, object], int] = {}
        self._npu: object = None
        """The process of CANN's tasks; of several, only the first is read."""

    def note(self, events: Iterable[Event]) -> None:
        """Remember what metadata events call processes and threads."""
        for event in events:
            if event.name not in ("process_name", "thread_name"):
                continue
            full = max(len(self._processes), len(self._streams)) >= _MOST_TRACKS
            if full or any(isinstance(one, str) and len(one) > _LONGEST_TEXT for one in (event.pid, event.tid)):
                continue
            try:
                text = _decode_name(event.args).name[:_LONGEST_TEXT]
            except UNREADABLE:
                continue
            if event.name == "process_name":
                self._processes[event.pid] = text
                self._npu = event.pid if text == _TASKS and self._npu is None else self._npu
            elif stream := _STREAM.match(text):
                self._streams[event.pid, event.tid] = int(stream[1])
            elif track := _COMMUNICATOR.fullmatch(text):
                self._streams[event.pid, event.tid] = NONE if track["plane"] else 0

    def placed(self, event: Event) -> Event | None:
        """A row of a device with its category, device and stream; None for any other."""
        process = self._processes.get(event.pid, "")
        device = _DEVICE.fullmatch(process)
        if device is None:
            category = self._category_on_npu(event, process)
            return msgspec.structs.replace(event, cat=category, pid=0) if category else None
        stream = self._streams.get((event.pid, event.tid)) if device["xla"] else event.tid
        if stream is None:
            return None
        copied = _COPY_OR_SET.match(event.name or "")
        category = copied[0].lower() if copied else "kernel"
        return msgspec.structs.replace(event, cat=category, pid=int(device[2]), tid=stream)

    def _category_on_npu(self, event: Event, process: str) -> str | None:
        if event.pid == self._npu:
            task = _task(event)
            return "kernel" if _ON_CORES.fullmatch(task) else "memcpy" if _COPIES.fullmatch(task) else None
        communicates = _COMMUNICATION.fullmatch(process) and self._streams.get((event.pid, event.tid)) == 0
        return "kernel" if communicates else None

    def source_of(self, event: Event) -> str | None:
        """Of rows that are not `placed`: their unknown category, else their process; None where they have neither.

        Empty for the host's, and for tracks that repeat what others hold.
        """
        if event.cat:
            return f"category {event.cat[:40]!r}"
        # Before Kineto the name of a process stood for its number.
        process = self._processes.get(event.pid, event.pid)
        if not isinstance(process, str):
            return None
        task = _task(event) if process == _TASKS else ""
        of_plane = self._streams.get((event.pid, event.tid)) == NONE
        if _HOST_OR_REPEATED.match(process) or of_plane or _RUNS_NOTHING.search(task):
            return ""
        return f"task {task[:40]!r}" if task else f"process {process[:40]!r}"


def by_device(trace: Trace) -> list[Trace]:
    """A trace for each of the devices in one, whose process drives them all: each is a rank."""
    devices = distinct(trace.activities.device).tolist()
    if len(devices) < 2:
        return [trace]
    columns = msgspec.structs.asdict(trace.activities)
    traces = []
    for device in devices:
        own = Activities(**{name: column[trace.activities.device == device] for name, column in columns.items()})
        named = {"rank": None, "world_size": len(devices), "warnings": list(trace.warnings)}
        traces.append(msgspec.structs.replace(trace, activities=own, **named))
    return traces
