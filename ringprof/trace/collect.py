"""Typed events in, columns out: sorts events into tables as they come and keeps only what the analysis uses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.trace.collectives import (
    COMM_FIELDS,
    Args,
    CommArgs,
    DeviceArgs,
    GroupLists,
    Number,
    collective_of,
    whole_number,
)
from ringprof.trace.columns import (
    KERNEL,
    MEMCPY,
    MEMSET,
    NONE,
    Activities,
    Collective,
    CommRecords,
    Int32,
    Int64,
    Launches,
    Ranges,
)
from ringprof.trace.events import EMPTY, UNREADABLE, Event, decode_fields
from ringprof.trace.times import MISSING, to_ns

Columns = dict[str, npt.NDArray[Any]]
A = TypeVar("A", bound=Args)

ABSURD_NS = 7 * 24 * 3600 * 10**9
"""No event lasts seven days, nor lies that far from the middle of its trace: such times are damage."""

UNIX_TIMES_NS = 10**18
"""Times beyond this (2001) are unix times, where 0 can only mean "not set"."""

COMM_RECORD = "record_param_comms"

_DEVICE_CATEGORIES = {
    "kernel": KERNEL,
    "gpu_memcpy": MEMCPY,
    "memcpy": MEMCPY,
    "gpu_memset": MEMSET,
    "memset": MEMSET,
}
# Those that tell what runs in them where the kernels' own names do not (`ringprof.analysis.kinds.operators`).
_OPERATORS_THAT_TELL = re.compile(
    "attention|attn|flash|sdpa|scaled_dot|fmha|nccl|rccl|c10d|gloo|nvshmem|symm_mem|vllm_fa|sgl_kernel"
    "|embedding|fbgemm::|cppnode<split|norm|softmax|conv|aten::(?:add|ba?d?d?)?(?:mm|mv)$|_mm$|aten::_fused_"
    "|optimizer.step|index_put_impl|aten::(?:sort|topk|dot)$",
    re.IGNORECASE,
)
_CALLS_THAT_LAUNCH_NOTHING = re.compile(
    r"^(?!.*(?:Launch|Memcpy|Memset|Copy)).*(?:Event|Query|Captur|Synchronize|Get|Attribute|Occupancy)"
)
"""Most CUDA calls of a trace; their correlation belongs to no device activity."""

_NO_ARGS = msgspec.Raw(b"{}")
_TRITON_FILE = re.compile(rb'"kernel_file"\s*:\s*"(?:[^"\\]*/)?([\w.-]{1,200})"')


def _names_its_file(event: Event) -> bool:
    """Whether an operator is a Triton kernel, whose arguments name the file that it was compiled from."""
    return "::" not in (event.name or "::") and b'"kernel_file"' in bytes(event.args)


class _Tables(dict[str | None, str | None]):
    """Category -> table. Categories compare without case: old files capitalise them."""

    def __missing__(self, category: str | None) -> str | None:
        key = (category or "").lower()
        table = None
        if key in _DEVICE_CATEGORIES:
            table = "device"
        elif key in ("runtime", "driver") or key.endswith(("_runtime", "_driver")):
            table = "launch"
        elif key in ("cpu_op", "operator"):
            table = "operator"
        elif key in ("user_annotation", "gpu_user_annotation"):
            table = key
        # A damaged file can hold any number of categories; the known ones are few.
        if len(self) < 1000:
            self[category] = table
        return table


class _Matches(dict[str | None, bool]):
    """Name -> whether a pattern occurs in it; names are few and repeat."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        super().__init__()
        self._pattern = pattern

    def __missing__(self, name: str | None) -> bool:
        found = self._pattern.search(name or "") is not None
        if len(self) < 100_000:
            self[name] = found
        return found


class Collector:
    """Takes events piece by piece; `tables` then gives the columns.

    ``every_operator``: keep all CPU operators, as a trace without device activities needs.
    """

    def __init__(self, every_operator: bool) -> None:
        self.every_operator = every_operator
        self.names: dict[str, int] = {}
        self.collectives: dict[Collective, int] = {}
        self.total = 0
        self.has_operators = False
        """Whether there were any CPU operators, kept or not."""
        self.oddities: Counter[str] = Counter()
        """How often each oddity of a single event was met; keys are warning codes."""
        self._base_ns = self._middle_ns = 0
        self._seen_collectives: dict[tuple[Any, ...], int] = {}
        self._group_lists = GroupLists()
        self._tables = _Tables()
        self._operator_tells = _Matches(_OPERATORS_THAT_TELL)
        self._launches_nothing = _Matches(_CALLS_THAT_LAUNCH_NOTHING)
        self._chunks: dict[str, list[Columns]] = {
            table: [] for table in ("device", "launch", "operator", "comm", "user_annotation", "gpu_user_annotation")
        }

    @property
    def has_device_activities(self) -> bool:
        """Whether any kernel, copy or set was kept."""
        return bool(self._chunks["device"])

    @property
    def calls_a_device(self) -> bool:
        """Whether a device's runtime was called to do anything."""
        return bool(self._chunks["launch"])

    def add(self, events: list[Event]) -> None:
        """Keep what matters of the next events."""
        self.total += len(events)
        sorted_events = self._sort(events)
        operators = sorted_events.pop("operator")
        records = [event for event in operators if event.name == COMM_RECORD]
        if not self.every_operator:
            self.has_operators |= bool(operators)
            tells = self._operator_tells
            operators = [event for event in operators if tells[event.name] or _names_its_file(event)]
        else:
            operators = [event for event in operators if event.name != COMM_RECORD]
        self._keep("operator", operators, self._operator)
        self._keep("comm", records, self._comm)
        self._keep("device", sorted_events["device"], self._device)
        idle = self._launches_nothing
        self._keep("launch", [event for event in sorted_events["launch"] if not idle[event.name]], self._launch)
        self._keep("user_annotation", sorted_events["user_annotation"], self._range)
        self._keep("gpu_user_annotation", sorted_events["gpu_user_annotation"], self._device_range)

    def _sort(self, events: list[Event]) -> dict[str, list[Event]]:
        tables: dict[str, list[Event]] = {
            name: [] for name in ("device", "launch", "operator", "user_annotation", "gpu_user_annotation")
        }
        table_of = self._tables
        odd = 0
        for event in events:
            if event.ph == "X":
                table = table_of[event.cat]
                if table is not None:
                    tables[table].append(event)
            elif event.ph == "B" or event.ph == "E":
                odd += 1
        if odd:
            self.oddities["begin_end_events"] += odd
        return tables

    def _keep(self, table: str, events: list[Event], columns: Callable[[list[Event]], Columns]) -> None:
        if not events:
            return
        start, end, sound = self._times(events, counted=table == "device")
        if not sound.all():
            events = [event for event, keep in zip(events, sound.tolist(), strict=True) if keep]
            if not events:
                return
            start, end = start[sound], end[sound]
        chunk = columns(events)
        chunk["start_ns"], chunk["end_ns"] = start, end
        self._chunks[table].append(chunk)

    def _times(self, events: list[Event], counted: bool) -> tuple[Int64, Int64, npt.NDArray[np.bool_]]:
        """Start and end (without the base time) and which events have usable ones."""
        start = to_ns([event.ts for event in events])
        duration = to_ns([event.dur for event in events])
        no_duration = duration == MISSING
        duration[no_duration] = 0
        negative, absurd = duration < 0, duration > ABSURD_NS
        duration[negative] = 0
        sound = (start != MISSING) & ~absurd
        self._count("missing_time", start == MISSING)
        self._count("absurd_duration", absurd)
        self._count("negative_duration", negative)
        if counted:
            self._count("missing_duration", no_duration)
            self._count("zero_duration", (duration == 0) & ~no_duration & ~negative)
        end = np.where(sound, start, 0) + duration
        return start, end, sound

    def _count(self, code: str, mask: npt.NDArray[np.bool_]) -> None:
        count = int(np.count_nonzero(mask))
        if count:
            self.oddities[code] += count

    def _name_indices(self, events: list[Event]) -> Int32:
        names = self.names
        indices = [names.setdefault(event.name or "", len(names)) for event in events]
        return np.array(indices, np.int32)

    def _args(self, events: list[Event], kind: type[A]) -> list[A]:
        """The arguments of each event, decoded together; defaults where they are no object or hold nonsense."""
        texts = [_NO_ARGS if event.args is EMPTY else event.args for event in events]
        try:
            return msgspec.json.decode(b"[" + b",".join(texts) + b"]", type=list[kind])  # type: ignore[valid-type]
        except UNREADABLE:
            return [self._one_args(text, kind) for text in texts]

    def _one_args(self, text: msgspec.Raw, kind: type[A]) -> A:
        try:
            return msgspec.json.decode(text, type=kind)
        except UNREADABLE:
            pass
        args = kind()
        if bytes(text) != b"null" and not _fill(args, text):
            self.oddities["unreadable_arguments"] += 1
        return args

    def _device(self, events: list[Event]) -> Columns:
        args = self._args(events, DeviceArgs)
        return {
            "name": self._name_indices(events),
            "category": np.array([_DEVICE_CATEGORIES[(e.cat or "").lower()] for e in events], np.int8),
            "device": _small([e.pid if a.device is None else a.device for e, a in zip(events, args, strict=True)]),
            "stream": _small([e.tid if a.stream is None else a.stream for e, a in zip(events, args, strict=True)]),
            "correlation": integers([a.correlation for a in args]),
            "external_id": _external_ids(args),
            "size_bytes": integers([a.bytes for a in args]),
            "collective": self._collective_indices(args),
            "graph_node": integers([a.graph_node for a in args]),
        }

    def _launch(self, events: list[Event]) -> Columns:
        args = self._args(events, Args)
        return {"thread": _threads(events), "correlation": integers([a.correlation for a in args])}

    def _range(self, events: list[Event]) -> Columns:
        return {
            "name": self._name_indices(events),
            "thread": _threads(events),
            "device": np.full(len(events), NONE, np.int32),
            "external_id": _external_ids(self._args(events, Args)),
        }

    def _operator(self, events: list[Event]) -> Columns:
        """As a range, but for its identity, which nothing asks for; a Triton kernel's goes by its file."""
        names, index = self.names, self._name_indices(events)
        for place, event in enumerate(events):
            if _names_its_file(event) and (file := _TRITON_FILE.search(bytes(event.args))):
                index[place] = names.setdefault("kernel_file " + file[1].decode(errors="replace"), len(names))
        count = len(events)
        return {
            "name": index,
            "thread": _threads(events),
            "device": np.full(count, NONE, np.int32),
            "external_id": np.full(count, NONE, np.int64),
        }

    def _device_range(self, events: list[Event]) -> Columns:
        args = self._args(events, DeviceArgs)
        return {
            "name": self._name_indices(events),
            "thread": integers([e.tid if a.stream is None else a.stream for e, a in zip(events, args, strict=True)]),
            "device": _small([e.pid if a.device is None else a.device for e, a in zip(events, args, strict=True)]),
            "external_id": _external_ids(args),
        }

    def _comm(self, events: list[Event]) -> Columns:
        args = self._args(events, CommArgs)
        return {
            "thread": _threads(events),
            "external_id": _external_ids(args),
            "collective": self._collective_indices(args),
        }

    def _collective_indices(self, args: Sequence[CommArgs]) -> Int32:
        indices = [NONE if one.collective is None else self._collective_index(one) for one in args]
        return np.array(indices, np.int32)

    def _collective_index(self, args: CommArgs) -> int:
        try:
            # Most records repeat an earlier one but for their ids, which come first among the fields.
            key = msgspec.structs.astuple(args)[COMM_FIELDS]
            if key in self._seen_collectives:
                return self._seen_collectives[key]
        except TypeError:
            key = None  # A list among the values has no hash.
        collective = collective_of(args, self._group_lists)
        index = NONE if collective is None else self.collectives.setdefault(collective, len(self.collectives))
        if key is not None:
            self._seen_collectives[key] = index
        return index

    # --- the finished columns ---------------------------------------------------------------------

    def set_base(self, base_ns: int) -> None:
        """Tell the base time once it is known: it may stand behind the events."""
        self._base_ns = base_ns
        for table in ("device", "operator", "user_annotation"):
            starts = [chunk["start_ns"] for chunk in self._chunks[table]]
            if starts:
                joined = np.concatenate(starts)
                self._middle_ns = int(np.partition(joined, len(joined) // 2)[len(joined) // 2])
                return

    def _columns(self, table: str) -> Columns:
        """One table's columns, all pieces together, sorted by start, with the base time added."""
        chunks = self._chunks.pop(table)
        if not chunks:
            return {}
        joined = {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}
        start = joined["start_ns"]
        unset = (start == 0) & (self._base_ns > 0 or self._middle_ns > UNIX_TIMES_NS)
        stray = ~unset & (abs(start - self._middle_ns) > ABSURD_NS)
        self._count("zero_timestamp", unset)
        self._count("absurd_timestamp", stray)
        kept = np.flatnonzero(~(unset | stray))
        order = kept[np.argsort(start[kept], kind="stable")]
        joined = {key: values[order] for key, values in joined.items()}
        joined["start_ns"] += self._base_ns
        joined["end_ns"] += self._base_ns
        return joined

    def activities(self) -> Activities:
        """Kernels, copies and sets."""
        return Activities(**_filled(self._columns("device"), Activities))

    def launches(self, activities: Activities) -> Launches:
        """The calls whose correlation belongs to a device activity."""
        columns = self._columns("launch")
        if columns:
            correlation = columns["correlation"]
            useful = (correlation != NONE) & np.isin(correlation, activities.correlation)
            columns = {key: values[useful] for key, values in columns.items()}
        return Launches(**_filled(columns, Launches))

    def ranges(self, table: str) -> Ranges:
        """One kind of named spans: ``user_annotation``, ``gpu_user_annotation`` or ``operator``."""
        return Ranges(**_filled(self._columns(table), Ranges))

    def comm_records(self) -> CommRecords:
        """The communication records that say what they are."""
        columns = self._columns("comm")
        if columns:
            named = columns["collective"] != NONE
            columns = {key: values[named] for key, values in columns.items()}
        return CommRecords(**_filled(columns, CommRecords))


def _fill(args: Args, text: msgspec.Raw) -> bool:
    """Set what can be read of ``args``, field by field; whether all of it could."""
    try:
        given = decode_fields(text)
    except UNREADABLE:
        return False
    sound = True
    for field, key in zip(args.__struct_fields__, args.__struct_encode_fields__, strict=True):
        if key in given:
            try:
                setattr(args, field, msgspec.json.decode(given[key], type=int | str | float | None))
            except UNREADABLE:
                sound = False
    return sound


_DTYPES = {"Int64": np.int64, "Int32": np.int32, "Int8": np.int8}


def _filled(columns: Columns, kind: type) -> Columns:
    """The columns of a table; empty ones of the right type where nothing was kept."""
    if columns:
        return columns
    return {field.name: np.empty(0, _DTYPES[str(field.type)]) for field in fields(kind)}


def integers(values: Sequence[Number]) -> Int64:
    """A column of integers; `NONE` where a value is absent, no number, or beyond 64 bits."""
    try:
        return np.array([NONE if value is None else value for value in values], np.int64)
    except (ValueError, OverflowError, TypeError):
        return np.array([_int64(value) for value in values], np.int64)


def _int64(value: Number) -> int:
    number = whole_number(value)
    return number if number is not None and -(2**63) < number < 2**63 else NONE


def _small(values: Sequence[Number]) -> Int32:
    wide = integers(values)
    return np.where(abs(wide) < 2**31, wide, NONE).astype(np.int32)


def _threads(events: Sequence[Event]) -> Int64:
    return integers([event.tid for event in events])


def _external_ids(args: Sequence[Args]) -> Int64:
    return integers([one.old_external_id if one.external_id is None else one.external_id for one in args])
