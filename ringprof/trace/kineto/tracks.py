"""Device rows identified by the name of their track, because XLA, rocprof and CANN write no categories."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from ringprof.trace.columns import NONE, Activities, Device, Trace
from ringprof.trace.kineto.collectives import whole_number
from ringprof.trace.kineto.event_list import UNREADABLE, Event

_DEVICE = re.compile(r"(?P<xla>/device:)?GPU:?([0-9]{1,4})")
# XLA's tracks of streams; its other tracks repeat the same work by module, operation and step.
_STREAM = re.compile(r"Stream #([0-9]{1,9})")
_HOST_OR_REPEATED = re.compile(r"/device:GPU|/host:|CPU |(Python|CANN|MindSpore|PTA|Overlap Analysis)$")
# Processes of CANN (Huawei). A task names the unit it runs on. A communicator has a track of its own and tracks for its
# planes, which show the parts of its operations.
_TASKS, _COMMUNICATION = "Ascend Hardware", re.compile(r"Communication|HCCL")
_COMMUNICATOR = re.compile(r"(Group [0-9]{1,9} )?Communication|(?P<plane>Plane) [0-9]{1,9}")
_UNTYPED = "Other"
_ON_CORES = re.compile(rf"(KERNEL_)?(MIX_)?AI[CV]?_?(CORE|CPU|VECTOR_CORE|VEC|SQE)?|DSA_SQE|{_UNTYPED}")
_COPIES = re.compile(r"MEMCPY_ASYNC|(S|PCIE_)DMA(_SQE)?")
_RUNS_NOTHING = re.compile(r"WAIT|RECORD|NOTIFY|EVENT|HOLDER|VALUE|PROFIL|MODEL|LABEL|STREAM|FFTS|^N/A$")
_COPY_OR_SET = re.compile(r"mem(cpy|set)", re.IGNORECASE)
_MOST_TRACKS, _LONGEST_TEXT = 1 << 14, 200

ON_DEVICE = re.compile(r"gpu|cuda|hip|npu|hpu|mtia|tpu|xpu|xla|device|kernel|ascend|accelerator", re.IGNORECASE)
"""Pattern of categories and processes whose rows ran on a device of any vendor."""


class _Named(msgspec.Struct):
    name: str = ""


_decode_name = msgspec.json.Decoder(_Named).decode


class _Task(msgspec.Struct):
    kind: str = msgspec.field(default="", name="Task Type")


def _task(event: Event) -> str:
    """Return the type of a CANN task. If that is "Other", return the name of a copy or a wait, which is its type."""
    try:
        kind = msgspec.json.decode(event.args, type=_Task).kind
    except UNREADABLE:
        return ""
    name = event.name or ""
    named_by_type = _COPIES.fullmatch(name) or (name.isupper() and _RUNS_NOTHING.search(name))
    return name if kind == _UNTYPED and named_by_type else kind


HOST_TO_DEVICE = "HostToDevice"
"""Category of CANN's arrows from launches to tasks. The upper half of an arrow's number is the task's connection."""
_CONNECTION_BITS = 32


def launch_of_arrow(arrow: Event) -> Event | None:
    """Return the launch, without duration, from which an arrow of CANN starts; None if its number is unreadable."""
    number = whole_number(arrow.id)
    if number is None:
        return None
    args = msgspec.Raw(b'{"correlation": %d}' % (number >> _CONNECTION_BITS))
    return Event(cat="cann_runtime", ts=arrow.ts, dur=msgspec.Raw(b"0"), tid=arrow.tid, args=args, ph="X")


class Tracks:
    """Names of the processes and threads of one trace, which assign rows of unknown category to devices."""

    def __init__(self) -> None:
        self._processes: dict[object, str] = {}
        self._streams: dict[tuple[object, object], int] = {}
        self.producer = "torch"
        """Program that wrote the trace, as in `Trace.producer`."""
        self._npu: object = None
        """Process of CANN's tasks; only the first of several is read."""

    def add_names(self, events: Iterable[Event]) -> None:
        """Store the names that metadata events give to processes and threads."""
        for event in events:
            if event.name not in ("process_name", "thread_name"):
                continue
            full = max(len(self._processes), len(self._streams)) >= _MOST_TRACKS
            if full or any(isinstance(key, str) and len(key) > _LONGEST_TEXT for key in (event.pid, event.tid)):
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

    @property
    def devices(self) -> list[Device]:
        """Device that the names of the tracks tell, where the trace describes none: an NPU."""
        return [] if self._npu is None else [Device(0, "Ascend NPU")]

    def device_event(self, event: Event) -> Event | None:
        """Return the event of a device track with its category, device and stream set; None for any other event."""
        process = self._processes.get(event.pid, "")
        device = _DEVICE.fullmatch(process)
        if device is None:
            category = self._category_on_npu(event, process)
            self.producer = "ascend" if category else self.producer
            return msgspec.structs.replace(event, cat=category, pid=0) if category else None
        stream = self._streams.get((event.pid, event.tid)) if device["xla"] else event.tid
        if stream is None:
            return None
        self.producer = "xla" if device["xla"] else "rocprof"
        copied = _COPY_OR_SET.match(event.name or "")
        category = copied[0].lower() if copied else "kernel"
        return msgspec.structs.replace(event, cat=category, pid=int(device[2]), tid=stream)

    def _category_on_npu(self, event: Event, process: str) -> str | None:
        """Return the category of an event on an NPU (CANN); None for any other event."""
        if event.pid == self._npu:
            task = _task(event)
            return "kernel" if _ON_CORES.fullmatch(task) else "memcpy" if _COPIES.fullmatch(task) else None
        communicates = _COMMUNICATION.fullmatch(process) and self._streams.get((event.pid, event.tid)) == 0
        return "kernel" if communicates else None

    def unread_source(self, event: Event) -> str | None:
        """Describe where an event that is not a `device_event` comes from: its category, else its process.

        None if the event has neither; empty for the host, and for tracks that repeat the rows of others.
        """
        if event.cat:
            return f"category {event.cat[:40]!r}"
        # Writers before Kineto use the name of a process as its number.
        process = self._processes.get(event.pid, event.pid)
        if not isinstance(process, str):
            return None
        task = _task(event) if process == _TASKS else ""
        is_plane = self._streams.get((event.pid, event.tid)) == NONE
        if _HOST_OR_REPEATED.match(process) or is_plane or _RUNS_NOTHING.search(task):
            return ""
        return f"task {task[:40]!r}" if task else f"process {process[:40]!r}"


def by_device(trace: Trace, least_share: float = 0.0) -> list[Trace]:
    """Split a trace of a process that drives several devices into one trace per device; each device is a rank.

    The trace stays whole where a device is busy for less than ``least_share`` of the time of the busiest.
    """
    busy_ns = trace.activities.busy_ns()
    devices = list(busy_ns)
    if (
        len(devices) < 2
        or (least_share and NONE in devices)
        or min(busy_ns.values()) < least_share * max(busy_ns.values())
    ):
        return [trace]
    columns = msgspec.structs.asdict(trace.activities)
    traces = []
    for device in devices:
        activities = Activities(**{name: column[trace.activities.device == device] for name, column in columns.items()})
        metadata = {"rank": None, "world_size": len(devices), "warnings": list(trace.warnings)}
        traces.append(msgspec.structs.replace(trace, activities=activities, **metadata))
    return traces
