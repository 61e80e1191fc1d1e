"""Typed events in, columns out: sorts events into tables as they come and keeps only what the analysis uses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.limits import MemoryLimitError
from ringprof.trace.columns import (
    KERNEL,
    MEMCPY,
    MEMSET,
    NONE,
    OPERATOR,
    RANGE,
    RUNTIME_CALL,
    TABLES,
    CommRecord,
    Int32,
    Int64,
    among,
    dtypes_of,
    table_of,
)
from ringprof.trace.kineto.collectives import (
    COMM_FIELDS,
    Args,
    CommArgs,
    DeviceArgs,
    JsonScalar,
    MemoryArgs,
    NumberLists,
    collective_of,
    whole_number,
)
from ringprof.trace.kineto.event_list import EMPTY, UNREADABLE, Event, decode_fields
from ringprof.trace.kineto.host_rows import HostRows
from ringprof.trace.kineto.shapes import ShapeReader, has_shapes
from ringprof.trace.kineto.times import NOT_A_TIME, to_ns
from ringprof.trace.kineto.tracks import Tracks
from ringprof.trace.memory import bytes_of_collectives, bytes_of_rows, bytes_of_text
from ringprof.trace.operator_flops import FORMULAS, OperatorFlops

_Columns = dict[str, npt.NDArray[Any]]

ABSURD_NS = 7 * 24 * 3600 * 10**9
"""No event lasts seven days, nor lies that far from the middle of its trace: such times are damage."""

UNIX_TIMES_NS = 10**18
"""Times beyond this (2001) are unix times, where 0 can only mean "not set"."""

MOST_SOURCES = 1 << 10
"""So many unknown categories are counted one by one: damaged files may have any number."""

COMM_RECORD = "record_param_comms"
MEMORY_EVENT = "[memory]"
_HOST_MEMORY = 0
"""Of torch's device types."""

_DEVICE_CATEGORY = re.compile(r"(?:(?:gpu|cuda|hip|device|concurrent)[ _])?(kernel|memcpy|memset)")
_DEVICE_CATEGORIES = {"kernel": KERNEL, "memcpy": MEMCPY, "memset": MEMSET}
_ANNOTATIONS = {"user_annotation": "annotations", "gpu_user_annotation": "device_annotations", "nvtx": "annotations"}
_PASSED_OVER = re.compile(
    r"python_function|overhead|trace|(en|de)queue|ac2g|fwdbwd|async_cpu_to_gpu|cpu_instant_event|external_correlation|collective_comm|fee"
    r"|\w+_(sync|event|profiler_range)"
)
"""Categories of rows that repeat others or cost nothing of their own: Kineto's, and VizTracer's of Python functions."""
# Those that tell what runs in them where the kernels' own names do not (`ringprof.analysis.kinds.operators`).
_OPERATORS_THAT_TELL = re.compile(
    "attention|attn|flash|sdpa|scaled_dot|fmha|nccl|rccl|c10d|gloo|nvshmem|symm_mem|vllm_fa|sgl_kernel"
    "|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|deep_ep|pplx::|mori::|uccl"
    "|embedding|fbgemm::|cppnode<split|norm|softmax|conv|aten::(?:add|b|baddb|addb)?(?:mm|mv)_?$|_mm$|aten::_fused_"
    "|aten::_addmm_activation$"
    "|optimizer.step|index_put_impl|aten::(?:sort|topk|dot)$",
    re.IGNORECASE,
)
_CALLS_THAT_LAUNCH_NOTHING = re.compile(
    r"^(?!.*(?:Launch|Memcpy|Memset|Copy)).*(?:Event|Query|Captur|Synchronize|Get|Attribute|Occupancy)"
)
"""Most CUDA calls of a trace; their correlation belongs to no device activity."""

_PIECES_TOGETHER = 8
"""So many pieces' events become columns at once: of few rows at a time most of the work is NumPy's calls."""

_PROBED = 16
"""Operators of one piece that are looked at for shapes: the profiler records those of all operators or of none."""

_SEVERAL = 20
"""Of one process all rows are but a few damaged ones: fewer than one of so many."""

_NO_ARGS = msgspec.Raw(b"{}")
_TRITON_FILE = re.compile(rb'"kernel_file"\s*:\s*"(?:[^"\\]*/)?([\w.-]{1,200})"')

_ARGS: dict[str, type[Args]] = {
    "activities": DeviceArgs,
    "launches": Args,
    "annotations": Args,
    "device_annotations": DeviceArgs,
    "operators": Args,
    "comm_records": CommArgs,
    "memory": MemoryArgs,
}


_TELLS, _MAY_NAME_A_FILE, _RECORDS = 1, 2, 3


def _told_by(name: str | None, *, every_operator: bool) -> int:
    """What an operator's name says: that it tells, that its arguments might, that it records a call, or (0) nothing."""
    if name == COMM_RECORD:
        return _RECORDS
    if every_operator or _OPERATORS_THAT_TELL.search(name or ""):
        return _TELLS
    return 0 if "::" in (name or "::") else _MAY_NAME_A_FILE


def _named_by_file(event: Event) -> Event | None:
    """A Triton kernel by the file that it was compiled from, which its arguments name; None for all else."""
    file = _TRITON_FILE.search(bytes(event.args))
    return msgspec.structs.replace(event, name="kernel_file " + file[1].decode(errors="replace")) if file else None


class _Remembered(dict[str | None, Any]):
    """A function's answers: categories and names are few and repeat, but in a damaged file they may be any number."""

    def __init__(self, function: Callable[[str | None], Any]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, key: str | None) -> Any:
        answer = self._function(key)
        if len(self) < 100_000 and len(key or "") < 1000:
            self[key] = answer
        return answer


def _table_for(category: str | None) -> str | None:
    """The table of a category's events, empty for none, and None for an unknown category.

    Categories compare without case: old files capitalise them.
    """
    key = (category or "").lower()
    if _DEVICE_CATEGORY.fullmatch(key):
        return "activities"
    if _PASSED_OVER.fullmatch(key):
        return ""
    if key in ("runtime", "driver") or key.endswith(("_runtime", "_driver")):
        return "launches"
    if key in ("cpu_op", "operator"):
        return "operators"
    return _ANNOTATIONS.get(key)


def _host_category(category: str | None) -> int:
    """The `HostEvents.category` of a host event's category in the file."""
    return {"launches": RUNTIME_CALL, "operators": OPERATOR}.get(_table_for(category) or "", RANGE)


def _category(category: str | None) -> int:
    known = _DEVICE_CATEGORY.fullmatch((category or "").lower())
    return _DEVICE_CATEGORIES[known[1]] if known else KERNEL


def _take_or_drop(take: Callable[[int], None], host_rows: HostRows, size: int) -> None:
    """Count memory with ``take``; host events, which only name the causes of idle time, make room for all else."""
    try:
        take(size)
    except MemoryLimitError:
        if not host_rows.drop():
            raise


class Collector:
    """Takes events piece by piece; `tables` then gives what is kept of them.

    ``every_operator``: keep all CPU operators, as a trace without device activities needs. ``take`` counts memory.
    """

    def __init__(self, take: Callable[[int], None], *, every_operator: bool) -> None:
        self.every_operator = every_operator
        self.host_rows = HostRows(take)
        self.take = partial(_take_or_drop, take, self.host_rows)
        self.names: dict[str, int] = {}
        self.collectives: dict[CommRecord, int] = {}
        self.total = 0
        self.oddities: Counter[str] = Counter()
        """How often each oddity of a single event was met; keys are warning codes."""
        self.unread: Counter[str] = Counter()
        """How many events are of a category, or of a process without categories, that nothing is known of."""
        self._tracks = Tracks()
        self._ran = Counter[tuple[object, object]]()
        """Rows by their device and process, which in one rank's trace stands for the device."""
        self._launched = Counter[object]()
        """Launches by their process."""
        self._base_ns = self._middle_ns = 0
        self._seen_collectives: dict[tuple[Any, ...], int] = {}
        self.number_lists = NumberLists(self.take)
        self._shapes = ShapeReader(self.take)
        self._table_for = _Remembered(_table_for)
        self._category = _Remembered(_category)
        self._host_category = _Remembered(_host_category)
        self._told_by = _Remembered(partial(_told_by, every_operator=every_operator))
        self._idle = _Remembered(lambda name: _CALLS_THAT_LAUNCH_NOTHING.search(name or "") is not None)
        self._chunks: dict[str, list[_Columns]] = {table: [] for table in TABLES}
        self._waiting: dict[str, list[Event]] = {table: [] for table in TABLES}
        self._pieces = 0

    @property
    def has_operators(self) -> bool:
        """Whether there were any CPU operators, kept or not."""
        return bool(self._told_by)

    @property
    def has_device_activities(self) -> bool:
        """Whether any kernel, copy or set was kept."""
        return bool(self._chunks["activities"])

    @property
    def calls_a_device(self) -> bool:
        """Whether a device's runtime was called to do anything."""
        return bool(self._chunks["launches"])

    @property
    def is_merged(self) -> bool:
        """Whether the rows are of several ranks: many of one device by different processes, or launched so."""
        devices = {device for device, _ in self._ran if device is not None}
        shares = [[count for (device, _), count in self._ran.items() if device == one] for one in devices]
        if len(devices) > 1:
            shares.append(list(self._launched.values()))
        return any(_SEVERAL * sorted(counts)[-2] > sum(counts) for counts in shares if len(counts) > 1)

    def add(self, events: list[Event]) -> None:
        """Keep what matters of the next events."""
        self.total += len(events)
        others = self._sort(events)
        self._tracks.note(event for event in others if event.ph == "M")
        for event in others:
            if event.ph == "X":
                self._place(event)
        self._pieces += 1
        if self._pieces % _PIECES_TOGETHER == 0:
            self.flush()

    def _sort(self, events: list[Event]) -> list[Event]:
        """Put events where they wait; returns those that name tracks, and those of no known category."""
        waiting, table_for, told_by, idle = self._waiting, self._table_for, self._told_by, self._idle
        launches, operators, comm_records = (waiting[one] for one in ("launches", "operators", "comm_records"))
        # Of a CPU trace nothing idles that host events could explain.
        host_events = [] if self.every_operator else waiting["host_events"]
        others, odd = list[Event](), 0
        for event in events:
            phase = event.ph
            if phase == "X":
                table = table_for[event.cat]
                if table == "launches":
                    host_events.append(event)
                    if not idle[event.name]:
                        launches.append(event)
                elif table == "operators":
                    host_events.append(event)
                    told = told_by[event.name]
                    if told == _TELLS:
                        operators.append(event)
                    elif told == _RECORDS:
                        comm_records.append(event)
                    elif told and (named := _named_by_file(event)):
                        operators.append(named)
                elif table:
                    waiting[table].append(event)
                    if table == "annotations":
                        host_events.append(event)
                elif table is None:
                    others.append(event)
            elif phase == "M":
                others.append(event)
            elif phase == "i" and event.name == MEMORY_EVENT:
                waiting["memory"].append(event)
            elif phase == "B" or phase == "E":
                odd += 1
        if odd:
            self.oddities["begin_end_events"] += odd
        return others

    def flush(self) -> None:
        """Make columns of the events that wait for more."""
        for table, events in self._waiting.items():
            if table == "host_events":
                threads = integers([event.tid for event in events])
                self.host_rows.keep(events, threads, np.array([self._host_category[e.cat] for e in events], np.int8))
            else:
                self._keep(table, events)
            self._waiting[table] = []

    def _place(self, event: Event) -> None:
        """An event of no known category where its track tells that it is a GPU's; else it is counted."""
        placed = self._tracks.placed(event)
        if placed:
            self._waiting["activities"].append(placed)
            return
        source = self._tracks.source_of(event)
        if source is None:
            self.oddities["missing_category"] += 1
        elif source:
            self.unread[source if len(self.unread) < MOST_SOURCES else "others"] += 1

    def _keep(self, table: str, events: list[Event]) -> None:
        if not events:
            return
        start, end, sound = self._times(events, table)
        if not sound.all():
            events = [event for event, keep in zip(events, sound.tolist(), strict=True) if keep]
            if not events:
                return
            start, end = start[sound], end[sound]
        self.take(bytes_of_rows(table, len(events)))
        columns = {"start_ns": start, "end_ns": end, **self._columns_of(table, events)}
        if table == "operators":
            self._keep_flops(events, columns)
        self._chunks[table].append(columns)

    def _keep_flops(self, events: list[Event], columns: _Columns) -> None:
        """Keep the FLOPs of operators whose shapes are recorded, with the times of their rows in ``columns``."""
        known = [row for row, event in enumerate(events) if event.name in FORMULAS]
        if not any(has_shapes(events[row]) for row in known[:_PROBED]):
            return
        counted = [(row, work) for row in known if (work := self._shapes.flops_of(events[row]))]
        if not counted:
            return
        self.take(bytes_of_rows("flop_records", len(counted)))
        rows = np.array([row for row, _ in counted])
        kept = {name: columns[name][rows] for name in ("start_ns", "end_ns", "name", "thread", "external_id")}
        flops = {name: np.array([getattr(work, name) for _, work in counted]) for name in OperatorFlops._fields}
        self._chunks["flop_records"].append(kept | flops)

    def _times(self, events: list[Event], table: str) -> tuple[Int64, Int64, npt.NDArray[np.bool_]]:
        """Start and end (without the base time) and which events have usable ones."""
        start = to_ns([event.ts for event in events])
        # What an allocator did took no time.
        duration = to_ns([event.dur for event in events]) if table != "memory" else np.zeros(len(events), np.int64)
        no_duration = duration == NOT_A_TIME
        duration[no_duration] = 0
        negative, absurd = duration < 0, duration > ABSURD_NS
        duration[negative] = 0
        sound = (start != NOT_A_TIME) & ~absurd
        self._count("missing_time", start == NOT_A_TIME)
        self._count("absurd_duration", absurd)
        self._count("negative_duration", negative)
        self._count("missing_duration", no_duration)
        if table == "activities":
            self._count("zero_duration", (duration == 0) & ~no_duration & ~negative)
        end = np.where(sound, start, 0) + duration
        return start, end, sound

    def _count(self, code: str, mask: npt.NDArray[np.bool_]) -> None:
        count = int(np.count_nonzero(mask))
        if count:
            self.oddities[code] += count

    def _args(self, events: list[Event], kind: type[Args]) -> list[Any]:
        """The arguments of each event, decoded together; defaults where they are no object or hold nonsense."""
        texts = [_NO_ARGS if event.args is EMPTY else event.args for event in events]
        try:
            return msgspec.json.decode(b"[" + b",".join(texts) + b"]", type=list[kind])  # type: ignore[valid-type]
        except UNREADABLE:
            return [self._one_args(text, kind) for text in texts]

    def _one_args(self, text: msgspec.Raw, kind: type[Args]) -> Args:
        try:
            return msgspec.json.decode(text, type=kind)
        except UNREADABLE:
            pass
        args = kind()
        if bytes(text) != b"null" and not _fill(args, text):
            self.oddities["unreadable_arguments"] += 1
        return args

    def _columns_of(self, table: str, events: list[Event]) -> _Columns:
        """The columns of a table's events, but for their times and for what events of this table do not say."""
        args = self._args(events, _ARGS[table])
        if table == "activities" and len(self._ran) < MOST_SOURCES:
            self._ran.update(zip([one.device for one in args], [event.pid for event in events], strict=True))
        elif table == "launches" and len(self._launched) < MOST_SOURCES:
            self._launched.update(event.pid for event in events)
        on_device = _ARGS[table] is DeviceArgs
        unsaid = set() if on_device or table == "memory" else {"device"}
        names = dtypes_of(TABLES[table]).keys() - {"start_ns", "end_ns"} - unsaid
        return {name: self._column(name, events, args, on_device=on_device) for name in names}

    def _column(self, name: str, events: list[Event], args: list[Any], *, on_device: bool) -> npt.NDArray[Any]:
        match name:
            case "name":
                known, names = len(self.names), self.names
                numbers = [names.setdefault(e.name or "", len(names)) for e in events]
                self.take(sum(bytes_of_text(text) for text in islice(reversed(names), len(names) - known)))
                return np.array(numbers, np.int32)
            case "category":
                return np.array([self._category[e.cat] for e in events], np.int8)
            case "thread" if not on_device:
                return integers([e.tid for e in events])
            case "thread":
                return integers([_given(a.stream, e.tid) for e, a in zip(events, args, strict=True)])
            case "stream":
                wide = self._column("thread", events, args, on_device=on_device)
                # ROCm's are pointers: their lower bits tell them apart.
                return np.where(abs(wide) < 2**31, wide, wide & (2**31 - 1)).astype(np.int32)
            case "target_device":
                return _narrow(integers([a.target_device for a in args]))
            case "device" if not on_device:
                return _narrow(integers([NONE if a.kind == _HOST_MEMORY else a.device for a in args]))
            case "device":
                return _narrow(integers([_given(a.device, e.pid) for e, a in zip(events, args, strict=True)]))
            case "external_id":
                return integers([_given(a.external_id, a.old_external_id) for a in args])
            case "collective":
                return np.array([NONE if a.collective is None else self._collective_index(a) for a in args], np.int32)
        return integers([getattr(a, name) for a in args])

    def _number(self, name: str) -> int:
        """The place of a name among the trace's names."""
        if name not in self.names:
            self.take(bytes_of_text(name))
            self.names[name] = len(self.names)
        return self.names[name]

    def _collective_index(self, args: CommArgs) -> int:
        try:
            # Most records repeat an earlier one but for their ids, which come first among the fields.
            key = msgspec.structs.astuple(args)[COMM_FIELDS]
            if key in self._seen_collectives:
                return self._seen_collectives[key]
        except TypeError:
            key = None  # A list among the values has no hash.
        collective = collective_of(args, self.number_lists)
        index = NONE if collective is None else self.collectives.setdefault(collective, len(self.collectives))
        if key is not None:
            self._seen_collectives[key] = index
            texts = sum(bytes_of_text(part) for part in key if isinstance(part, str))
            self.take(bytes_of_collectives(1) + texts)
        return index

    # --- the finished columns ---------------------------------------------------------------------

    def _middle(self) -> int:
        """The median time of what matters most; others lie around it."""
        for table in ("activities", "operators", "annotations"):
            starts = [chunk["start_ns"] for chunk in self._chunks[table]]
            if starts:
                joined = np.concatenate(starts)
                return int(np.partition(joined, len(joined) // 2)[len(joined) // 2])
        return 0

    def _columns(self, table: str) -> _Columns:
        """One table's columns, all pieces together, sorted by start, with the base time added."""
        chunks = self._chunks.pop(table)
        if not chunks:
            return {}
        start = np.concatenate([chunk["start_ns"] for chunk in chunks])
        unset = (start == 0) & (self._base_ns > 0 or self._middle_ns > UNIX_TIMES_NS)
        stray = ~unset & (abs(start - self._middle_ns) > ABSURD_NS)
        if table in _ARGS:  # other tables repeat rows of these
            self._count("zero_timestamp", unset)
            self._count("absurd_timestamp", stray)
        kept = np.flatnonzero(~(unset | stray))
        order = kept[np.argsort(start[kept], kind="stable")]
        # One column after the other, so that only one is there twice.
        joined = {key: np.concatenate([chunk.pop(key) for chunk in chunks])[order] for key in tuple(chunks[0])}
        joined["start_ns"] += self._base_ns
        joined["end_ns"] += self._base_ns
        return joined

    def _host_events(self, rows: dict[str, _Columns]) -> _Columns:
        """The host events that explain idle time; none where nothing tells what launched the device's work."""
        if not (rows["activities"] and rows["launches"]):
            return {}
        return self.host_rows.columns(self._base_ns, rows["activities"], rows["launches"], self._number)

    def tables(self, base_ns: int) -> dict[str, Any]:
        """The tables of a `Trace`, by its fields; ``base_ns`` is added to all times."""
        self._base_ns = base_ns
        self._middle_ns = self._middle()
        rows = {table: self._columns(table) for table in TABLES}
        if rows["activities"]:
            self._count("missing_name", rows["activities"]["name"] == self.names.get("", NONE))
            unlaunched = rows["activities"]["correlation"] == NONE
            # Other writers than PyTorch give none at all.
            self._count("missing_correlation", unlaunched & ~unlaunched.all())
        if rows["launches"]:
            correlation = rows["launches"]["correlation"]
            known = rows["activities"].get("correlation", np.empty(0, np.int64))
            rows["launches"] = _chosen(rows["launches"], (correlation != NONE) & among(correlation, known))
        rows["host_events"] = self._host_events(rows)
        if rows["memory"]:
            rows["memory"] = _chosen(rows["memory"], rows["memory"]["allocated_bytes"] >= 0)
        if rows["comm_records"]:
            rows["comm_records"] = _chosen(rows["comm_records"], rows["comm_records"]["collective"] != NONE)
        return {table: table_of(kind, rows[table]) for table, kind in TABLES.items()}


def _chosen(columns: _Columns, mask: npt.NDArray[np.bool_]) -> _Columns:
    return {name: values[mask] for name, values in columns.items()}


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


def integers(values: Sequence[JsonScalar]) -> Int64:
    """A column of integers; `NONE` where a value is absent, no number, or beyond 64 bits."""
    # Anything but an integer goes the slow way: numpy reads "1_000" as one.
    kinds = set(map(type, values))
    try:
        if kinds == {int}:
            return np.array(values, np.int64)
        if kinds == {type(None)}:
            return np.full(len(values), NONE, np.int64)
        if kinds <= {int, type(None)}:
            return np.array([NONE if value is None else value for value in values], np.int64)
    except OverflowError:
        pass
    return np.array([_int64(value) for value in values], np.int64)


def _int64(value: JsonScalar) -> int:
    number = whole_number(value)
    return number if number is not None and -(2**63) < number < 2**63 else NONE


def _given(value: JsonScalar, other: JsonScalar) -> JsonScalar:
    return other if value is None else value


def _narrow(wide: Int64) -> Int32:
    return np.where(abs(wide) < 2**31, wide, NONE).astype(np.int32)
