"""Rows that only the name of their track tells to be a GPU's: XLA and rocprof write no categories."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from ringprof.trace.columns import Activities, Trace, distinct
from ringprof.trace.kineto.event_list import UNREADABLE, Event

_DEVICE = re.compile(r"(?P<xla>/device:)?GPU:?([0-9]{1,4})")
# Of XLA's tracks those of streams; the others repeat what ran there by module, operation and step.
_STREAM = re.compile(r"Stream #([0-9]{1,9})")
_HOST_OR_REPEATED = re.compile(r"/device:GPU|/host:|CPU |Python$|Overlap Analysis$")
_COPY_OR_SET = re.compile(r"mem(cpy|set)", re.IGNORECASE)
_MOST_TRACKS, _LONGEST_TEXT = 1 << 14, 200

ON_DEVICE = re.compile(r"gpu|cuda|hip|npu|hpu|mtia|tpu|xpu|xla|device|kernel|ascend|accelerator", re.IGNORECASE)
"""What the category or the process of rows is called that ran on a device of any maker."""


class _Named(msgspec.Struct):
    name: str = ""


class Tracks:
    """The processes and threads of one trace, and where rows without a known category belong."""

    def __init__(self) -> None:
        self._processes: dict[object, str] = {}
        self._streams: dict[tuple[object, object], int] = {}

    def note(self, events: Iterable[Event]) -> None:
        """Remember what metadata events call processes and threads."""
        for event in events:
            full = max(len(self._processes), len(self._streams)) >= _MOST_TRACKS
            long = any(isinstance(one, str) and len(one) > _LONGEST_TEXT for one in (event.pid, event.tid))
            if event.name not in ("process_name", "thread_name") or full or long:
                continue
            try:
                text = msgspec.json.decode(event.args, type=_Named).name[:_LONGEST_TEXT]
            except UNREADABLE:
                continue
            if event.name == "process_name":
                self._processes[event.pid] = text
            elif stream := _STREAM.match(text):
                self._streams[event.pid, event.tid] = int(stream[1])

    def placed(self, event: Event) -> Event | None:
        """A row of a GPU with its category, device and stream; None for any other."""
        device = _DEVICE.fullmatch(self._processes.get(event.pid, ""))
        stream = self._streams.get((event.pid, event.tid)) if device and device["xla"] else event.tid
        if device is None or stream is None:
            return None
        copied = _COPY_OR_SET.match(event.name or "")
        category = copied[0].lower() if copied else "kernel"
        return msgspec.structs.replace(event, cat=category, pid=int(device[2]), tid=stream)

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
        return "" if _HOST_OR_REPEATED.match(process) else f"process {process[:40]!r}"


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
