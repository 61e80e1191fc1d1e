"""Collection of decoded events into the columns of a `Trace`; keeps only the events that the analysis uses."""

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

from ringprof.common.limits import MemoryLimitError
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
from ringprof.trace.kineto.host_rows import FORWARD_ARROW, ForwardArrows, HostRows
from ringprof.trace.kineto.times import NOT_A_TIME, to_ns
from ringprof.trace.kineto.tracks import HOST_TO_DEVICE, Tracks, launch_of_arrow
from ringprof.trace.memory import bytes_of_collectives, bytes_of_rows, bytes_of_text
from ringprof.trace.operator_flops import FORMULAS, Call, OperatorFlops, Sizes, flops_of

_Columns = dict[str, npt.NDArray[Any]]

ABSURD_NS = 7 * 24 * 3600 * 10**9
"""Nanoseconds of seven days. A longer event, or one further from the middle of its trace, is damage."""

UNIX_TIMES_NS = 10**18
"""Nanoseconds (2001) from which times are Unix times, where 0 can only mean "not set"."""

MOST_SOURCES = 1 << 10
"""Largest number of unknown categories that are counted separately; damaged files may have any number."""

COMM_RECORD = "record_param_comms"
MEMORY_EVENT = "[memory]"
MODULE = "nn.Module: "
"""Start of the name of a ``python_function`` event that is a call of a module."""
_HOST_MEMORY = 0
"""Device type of host memory in torch."""

_DEVICE_CATEGORY = re.compile(r"(?:(?:gpu|cuda|hip|device|concurrent)[ _])?(kernel|memcpy|memset)")
_DEVICE_CATEGORIES = {"kernel": KERNEL, "memcpy": MEMCPY, "memset": MEMSET}
_ANNOTATIONS = {"user_annotation": "annotations", "gpu_user_annotation": "device_annotations", "nvtx": "annotations"}
_IGNORED = re.compile(
    r"overhead|trace|(en|de)queue|ac2g|fwdbwd|async_cpu_to_gpu|cpu_instant_event|external_correlation|collective_comm|fee"
    r"|\w+_(sync|event|profiler_range)"
)
"""Categories of rows that repeat others or take no time of their own: from Kineto, and from VizTracer (``fee``)."""
# Operators whose name classifies the kernels in them where kernel names do not (`ringprof.analysis.kinds.operators`).
_CLASSIFYING_OPERATORS = re.compile(
    "attention|attn|flash|sdpa|scaled_dot|fmha|nccl|rccl|c10d|gloo|nvshmem|symm_mem|vllm_fa|sgl_kernel"
    "|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|deep_ep|pplx::|mori::|uccl"
    "|embedding|fbgemm::|cppnode<split|norm|softmax|conv|aten::(?:add|b|baddb|addb)?(?:mm|mv)_?$|_mm$|aten::_fused_"
    "|aten::_addmm_activation$"
    "|optimizer.step|index_put_impl|aten::(?:sort|topk|dot)$",
    re.IGNORECASE,
)
_NON_LAUNCHING_CALLS = re.compile(
    r"^(?!.*(?:Launch|Memcpy|Memset|Copy)).*(?:Event|Query|Captur|Synchronize|Get|Attribute|Occupancy)"
)
"""Pattern of CUDA calls that launch no device activity; they are most of the calls in a trace."""

_PIECES_PER_FLUSH = 8
"""Number of pieces whose events are converted to columns together; with few rows, the overhead of NumPy dominates."""

_SHAPE_PROBES = 16
"""Number of operators per piece that are checked for shapes: the profiler records those of all operators or of none."""

_LONGEST_ARGUMENTS = 1 << 14
"""Largest size in bytes of the arguments of one operator that are read for its shapes; PyTorch writes hundreds of
bytes."""
_MOST_SHAPES = 1 << 12
"""Number of operators with their arguments whose FLOPs are cached."""

_MERGED_SHARE = 20
"""Inverse of the share of rows from a second process that shows several merged ranks; damage gives a smaller share."""

_NO_ARGS = msgspec.Raw(b"{}")
_TRITON_FILE = re.compile(rb'"kernel_file"\s*:\s*"(?:[^"\\]*/)?([\w.-]{1,200})"')

_ARGS: dict[str, type[Args]] = {
    "activities": DeviceArgs, "launches": Args, "annotations": Args, "device_annotations": DeviceArgs,
    "operators": Args, "comm_records": CommArgs, "memory": MemoryArgs, "modules": Args, "backward_calls": Args,
}  # fmt: skip


_CLASSIFIES, _MAY_NAME_A_FILE, _RECORDS, _RUNS_A_NODE = 1, 2, 4, 8
"""Flags in the result of `_operator_use`; 0 stands for an operator without use."""


def _operator_use(name: str | None, *, every_operator: bool) -> int:
    """Return the uses of an operator, by name, as a sum of flags.

    An operator classifies kernels, may name a file, records a call, or runs a node of the autograd graph.
    """
    if name == COMM_RECORD:
        return _RECORDS
    runs_a_node = _RUNS_A_NODE * (name or "").startswith("autograd::engine::evaluate_function")
    if every_operator or _CLASSIFYING_OPERATORS.search(name or ""):
        return _CLASSIFIES | runs_a_node
    return runs_a_node if "::" in (name or "::") else _MAY_NAME_A_FILE


def _name_by_file(event: Event) -> Event | None:
    """Rename a Triton kernel to the file in its arguments, from which it was compiled; None for other operators."""
    file = _TRITON_FILE.search(bytes(event.args))
    return msgspec.structs.replace(event, name="kernel_file " + file[1].decode(errors="replace")) if file else None


class _Cache(dict[str | None, Any]):
    """Bounded cache of a function of a category or a name. These repeat, but a damaged file may have any number."""

    def __init__(self, function: Callable[[str | None], Any]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, key: str | None) -> Any:
        answer = self._function(key)
        if len(self) < 100_000 and len(key or "") < 1000:
            self[key] = answer
        return answer


def _table_for(category: str | None) -> str | None:
    """Return the table for events of a category; empty to ignore them, None for an unknown category.

    Case is ignored: old files capitalise categories.
    """
    key = (category or "").lower()
    if _DEVICE_CATEGORY.fullmatch(key):
        return "activities"
    if _IGNORED.fullmatch(key):
        return ""
    if key in ("runtime", "driver") or key.endswith(("_runtime", "_driver")):
        return "launches"
    if key in ("cpu_op", "operator"):
        return "operators"
    if key == "python_function":
        return "modules"
    return _ANNOTATIONS.get(key)


def _host_category(category: str | None) -> int:
    """Return the `HostEvents.category` for a category in the file."""
    return {"launches": RUNTIME_CALL, "operators": OPERATOR}.get(_table_for(category) or "", RANGE)


def _category(category: str | None) -> int:
    """Return the `Activities.category` for a category in the file."""
    match = _DEVICE_CATEGORY.fullmatch((category or "").lower())
    return _DEVICE_CATEGORIES[match[1]] if match else KERNEL


def _take_or_drop(take: Callable[[int], None], host_rows: HostRows, size: int) -> None:
    """Charge memory with ``take``; drop the host events if it runs out, because they only name causes of idle time."""
    try:
        take(size)
    except MemoryLimitError:
        if not host_rows.drop():
            raise


class _ShapeArgs(msgspec.Struct, gc=False):
    """Recorded arguments of an operator as raw text."""

    dims: msgspec.Raw = msgspec.field(default=EMPTY, name="Input Dims")
    old_dims: msgspec.Raw = msgspec.field(default=EMPTY, name="Input dims")
    types: msgspec.Raw = msgspec.field(default=EMPTY, name="Input type")
    values: msgspec.Raw = msgspec.field(default=EMPTY, name="Concrete Inputs")


_decode_shapes = msgspec.json.Decoder(_ShapeArgs).decode


class Collector:
    """Collector of events, piece by piece; `tables` returns the columns of those that are kept.

    ``every_operator``: keep all CPU operators, as a trace without device activities needs.
    ``take``: charges bytes to the memory budget.
    """

    def __init__(self, take: Callable[[int], None], *, every_operator: bool) -> None:
        self.every_operator = every_operator
        self.host_rows = HostRows(take)
        self._forward_arrows = ForwardArrows(take)
        self.take = partial(_take_or_drop, take, self.host_rows)
        self.names: dict[str, int] = {}
        self.collectives: dict[CommRecord, int] = {}
        self.total = 0
        self.oddities: Counter[str] = Counter()
        """Number of events with each oddity; keys are warning codes."""
        self.unread: Counter[str] = Counter()
        """Number of events of each unknown category, or of each process without categories."""
        self.tracks = Tracks()
        self._rows_by_process = Counter[tuple[object, object]]()
        """Number of activities by device and process. In one rank's trace, each device has one process."""
        self._launches_by_process = Counter[object]()
        """Number of launches by process."""
        self._base_ns = self._middle_ns = 0
        self._seen_collectives: dict[tuple[Any, ...], int] = {}
        self.number_lists = NumberLists(self.take)
        self._flops: dict[tuple[str, bytes, bytes, bytes], OperatorFlops | None] = {}
        """FLOPs by operator and text of its arguments: most calls repeat those of an earlier one."""
        self._table_for = _Cache(_table_for)
        self._category = _Cache(_category)
        self._host_category = _Cache(_host_category)
        self._operator_use = _Cache(partial(_operator_use, every_operator=every_operator))
        self._launches_nothing = _Cache(lambda name: _NON_LAUNCHING_CALLS.search(name or "") is not None)
        self._chunks: dict[str, list[_Columns]] = {table: [] for table in TABLES}
        self._queued: dict[str, list[Event]] = {table: [] for table in TABLES}
        self._pieces = 0

    @property
    def has_operators(self) -> bool:
        """Whether there were any CPU operators, kept or not."""
        return bool(self._operator_use)

    @property
    def has_device_activities(self) -> bool:
        """Whether any kernel, copy or set was kept."""
        return bool(self._chunks["activities"])

    @property
    def calls_a_device(self) -> bool:
        """Whether a call of a device runtime launched work."""
        return bool(self._chunks["launches"])

    @property
    def is_merged(self) -> bool:
        """Whether the rows are of several ranks: several processes have many rows of one device, or many launches."""
        counts_of: dict[object, list[int]] = {}
        for (device, _), count in self._rows_by_process.items():
            if device is not None:
                counts_of.setdefault(device, []).append(count)
        shares = list(counts_of.values())
        if len(counts_of) > 1:
            shares.append(list(self._launches_by_process.values()))
        return any(_MERGED_SHARE * sorted(counts)[-2] > sum(counts) for counts in shares if len(counts) > 1)

    def add(self, events: list[Event]) -> None:
        """Add the next events; those without use for the analysis are dropped."""
        self.total += len(events)
        others = self._sort(events)
        self.tracks.add_names(event for event in others if event.ph == "M")
        for event in others:
            if event.ph == "X":
                self._add_uncategorized(event)
        self._pieces += 1
        if self._pieces % _PIECES_PER_FLUSH == 0:
            self.flush()

    def _sort(self, events: list[Event]) -> list[Event]:
        """Queue events by table. Returns events that name tracks, and events of unknown category."""
        queued, table_for = self._queued, self._table_for
        operator_use, launches_nothing = self._operator_use, self._launches_nothing
        launches, operators, comm_records = (queued[table] for table in ("launches", "operators", "comm_records"))
        # A CPU trace has no idle device, so it needs no host events.
        host_events = [] if self.every_operator else queued["host_events"]
        modules, backward_calls, arrows = queued["modules"], queued["backward_calls"], list[Event]()
        others, begin_end_count = list[Event](), 0
        for event in events:
            phase = event.ph
            if phase == "X":
                table = table_for[event.cat]
                if table == "launches":
                    host_events.append(event)
                    if not launches_nothing[event.name]:
                        launches.append(event)
                elif table == "operators":
                    host_events.append(event)
                    use = operator_use[event.name]
                    if use & _CLASSIFIES:
                        operators.append(event)
                    elif use == _RECORDS:
                        comm_records.append(event)
                    elif use == _MAY_NAME_A_FILE and (renamed := _name_by_file(event)):
                        operators.append(renamed)
                    if use & _RUNS_A_NODE:
                        backward_calls.append(event)
                elif table == "modules":
                    if event.name and event.name.startswith(MODULE):
                        modules.append(event)
                elif table:
                    queued[table].append(event)
                    if table == "annotations":
                        host_events.append(event)
                elif table is None:
                    others.append(event)
            elif phase == "s" or phase == "f":
                if event.cat == FORWARD_ARROW:
                    arrows.append(event)
                elif phase == "s" and event.cat == HOST_TO_DEVICE and (launch := launch_of_arrow(event)):
                    launches.append(launch)
            elif phase == "M":
                others.append(event)
            elif phase == "i" and event.name == MEMORY_EVENT:
                queued["memory"].append(event)
            elif phase == "B" or phase == "E":
                begin_end_count += 1
        if begin_end_count:
            self.oddities["begin_end_events"] += begin_end_count
        self._forward_arrows.keep(arrows)
        return others

    def flush(self) -> None:
        """Convert the queued events to columns."""
        for table, events in self._queued.items():
            if table == "host_events":
                threads = integers([event.tid for event in events])
                self.host_rows.keep(events, threads, np.array([self._host_category[e.cat] for e in events], np.int8))
            else:
                self._keep(table, events)
            self._queued[table] = []

    def _add_uncategorized(self, event: Event) -> None:
        """Queue an event of unknown category if its track is a device's; else count its category as unread."""
        activity = self.tracks.device_event(event)
        if activity:
            self._queued["activities"].append(activity)
            return
        source = self.tracks.unread_source(event)
        if source is None:
            self.oddities["missing_category"] += 1
        elif source:
            self.unread[source if len(self.unread) < MOST_SOURCES else "others"] += 1

    def _keep(self, table: str, events: list[Event]) -> None:
        """Convert events of one table to columns, without those that have no usable times."""
        if not events:
            return
        start, end, valid = self._times(events, table)
        if not valid.all():
            events = [event for event, is_valid in zip(events, valid.tolist(), strict=True) if is_valid]
            if not events:
                return
            start, end = start[valid], end[valid]
        self.take(bytes_of_rows(table, len(events)))
        columns = {"start_ns": start, "end_ns": end, **self._columns_of(table, events)}
        if table == "operators":
            self._keep_flops(events, columns)
        self._chunks[table].append(columns)

    def _keep_flops(self, events: list[Event], columns: _Columns) -> None:
        """Store the FLOPs of operators whose shapes are recorded; their times are taken from ``columns``."""
        candidates = [row for row, event in enumerate(events) if event.name in FORMULAS]
        if not any(b'"Input ' in bytes(events[row].args) for row in candidates[:_SHAPE_PROBES]):
            return
        counted = [(row, work) for row in candidates if (work := self._flops_of(events[row]))]
        if not counted:
            return
        self.take(bytes_of_rows("flop_records", len(counted)))
        rows = np.array([row for row, _ in counted])
        times_and_ids = {name: columns[name][rows] for name in ("start_ns", "end_ns", "name", "thread", "external_id")}
        flops = {name: np.array([getattr(work, name) for _, work in counted]) for name in OperatorFlops._fields}
        self._chunks["flop_records"].append(times_and_ids | flops)

    def _flops_of(self, event: Event) -> OperatorFlops | None:
        """Count the FLOPs of an operator; None if its shapes are not recorded or do not determine them."""
        if event.args is EMPTY:
            return None
        try:
            args = _decode_shapes(event.args)
        except UNREADABLE:
            return None
        dims = args.dims if args.dims is not EMPTY else args.old_dims
        texts = (bytes(dims), bytes(args.types), bytes(args.values))
        if not texts[0] or sum(map(len, texts)) > _LONGEST_ARGUMENTS:
            return None
        key = event.name or "", *texts
        if key in self._flops:
            return self._flops[key]
        dimensions, types, values = map(_list, texts)
        call = Call([*map(_sizes, dimensions)], [*map(_text, types)], [*map(_text, values)])
        flops = flops_of(key[0], call)
        if len(self._flops) < _MOST_SHAPES:
            self.take(sum(bytes_of_text(text.decode("latin-1")) for text in texts))
            self._flops[key] = flops
        return flops

    def _times(self, events: list[Event], table: str) -> tuple[Int64, Int64, npt.NDArray[np.bool_]]:
        """Return start and end (without the base time) of events, and a mask of the events with usable times."""
        start = to_ns([event.ts for event in events])
        # Memory events have no duration.
        duration = to_ns([event.dur for event in events]) if table != "memory" else np.zeros(len(events), np.int64)
        no_duration = duration == NOT_A_TIME
        duration[no_duration] = 0
        negative, absurd = duration < 0, duration > ABSURD_NS
        duration[negative] = 0
        valid = (start != NOT_A_TIME) & ~absurd
        self._count("missing_time", start == NOT_A_TIME)
        self._count("absurd_duration", absurd)
        self._count("negative_duration", negative)
        self._count("missing_duration", no_duration)
        if table == "activities":
            self._count("zero_duration", (duration == 0) & ~no_duration & ~negative)
        end = np.where(valid, start, 0) + duration
        return start, end, valid

    def _count(self, code: str, mask: npt.NDArray[np.bool_]) -> None:
        """Count the marked events as an oddity."""
        count = int(np.count_nonzero(mask))
        if count:
            self.oddities[code] += count

    def _args(self, events: list[Event], kind: type[Args]) -> list[Any]:
        """Decode the arguments of all events at once; unreadable arguments get default values."""
        texts = [_NO_ARGS if event.args is EMPTY else event.args for event in events]
        try:
            return msgspec.json.decode(b"[" + b",".join(texts) + b"]", type=list[kind])  # type: ignore[valid-type]
        except UNREADABLE:
            return [self._decode_args(text, kind) for text in texts]

    def _decode_args(self, text: msgspec.Raw, kind: type[Args]) -> Args:
        """Decode the arguments of one event, field by field if they are not valid as a whole."""
        try:
            return msgspec.json.decode(text, type=kind)
        except UNREADABLE:
            pass
        args = kind()
        if bytes(text) != b"null" and not _fill(args, text):
            self.oddities["unreadable_arguments"] += 1
        return args

    def _columns_of(self, table: str, events: list[Event]) -> _Columns:
        """Build the columns of a table's events, except for times and for columns that its events never have."""
        args = self._args(events, _ARGS[table])
        if table == "activities" and len(self._rows_by_process) < MOST_SOURCES:
            self._rows_by_process.update((a.device, event.pid) for a, event in zip(args, events, strict=True))
        elif table == "launches" and len(self._launches_by_process) < MOST_SOURCES:
            self._launches_by_process.update(event.pid for event in events)
        on_device = _ARGS[table] is DeviceArgs
        absent = set() if on_device or table == "memory" else {"device"}
        names = dtypes_of(TABLES[table]).keys() - {"start_ns", "end_ns", "forward_ns", "forward_thread"} - absent
        return {name: self._column(name, events, args, on_device=on_device) for name in names}

    def _column(self, name: str, events: list[Event], args: list[Any], *, on_device: bool) -> npt.NDArray[Any]:
        """Build one column; ``on_device``: whether an event's process and thread stand for its device and stream."""
        match name:
            case "name":
                names_before, names = len(self.names), self.names
                numbers = [names.setdefault(e.name or "", len(names)) for e in events]
                self.take(sum(bytes_of_text(text) for text in islice(reversed(names), len(names) - names_before)))
                return np.array(numbers, np.int32)
            case "category":
                return np.array([self._category[e.cat] for e in events], np.int8)
            case "thread" if not on_device:
                return integers([e.tid for e in events])
            case "thread":
                return integers([_first_known(a.stream, e.tid) for e, a in zip(events, args, strict=True)])
            case "stream":
                wide = self._column("thread", events, args, on_device=on_device)
                # Streams of ROCm are pointers, which differ in their lower bits.
                return np.where(abs(wide) < 2**31, wide, wide & (2**31 - 1)).astype(np.int32)
            case "target_device":
                return _to_int32(integers([a.target_device for a in args]))
            case "device" if not on_device:
                return _to_int32(integers([NONE if a.kind == _HOST_MEMORY else a.device for a in args]))
            case "device":
                return _to_int32(integers([_first_known(a.device, e.pid) for e, a in zip(events, args, strict=True)]))
            case "external_id":
                return integers([_first_known(a.external_id, a.old_external_id) for a in args])
            case "collective":
                return np.array([NONE if a.collective is None else self._collective_index(a) for a in args], np.int32)
        if name == "correlation" and on_device:
            return integers([_first_known(a.correlation, a.connection) for a in args])
        if name == "correlation":
            return integers([_launch_id(a) for a in args])
        return integers([getattr(a, name) for a in args])

    def _name_index(self, name: str) -> int:
        """Return the index of a name in the trace's names; add the name if it is new."""
        if name not in self.names:
            self.take(bytes_of_text(name))
            self.names[name] = len(self.names)
        return self.names[name]

    def _collective_index(self, args: CommArgs) -> int:
        """Return the index of the communication record in ``args``; `NONE` if there is none."""
        try:
            # Most records equal an earlier one except for their ids, which come first among the fields.
            key = msgspec.structs.astuple(args)[COMM_FIELDS]
            if key in self._seen_collectives:
                return self._seen_collectives[key]
        except TypeError:
            key = None  # A list among the values is not hashable.
        collective = collective_of(args, self.number_lists)
        index = NONE if collective is None else self.collectives.setdefault(collective, len(self.collectives))
        if key is not None:
            self._seen_collectives[key] = index
            self.take(bytes_of_collectives(1) + sum(bytes_of_text(part) for part in key if isinstance(part, str)))
        return index

    # --- the finished columns ---------------------------------------------------------------------

    def _middle(self) -> int:
        """Return the median start of the activities, else of operators or annotations; valid times lie around it."""
        for table in ("activities", "operators", "annotations"):
            starts = [chunk["start_ns"] for chunk in self._chunks[table]]
            if starts:
                joined = np.concatenate(starts)
                return int(np.partition(joined, len(joined) // 2)[len(joined) // 2])
        return 0

    def _columns(self, table: str) -> _Columns:
        """Return the columns of one table from all pieces, sorted by start, with the base time added."""
        chunks = self._chunks.pop(table)
        if not chunks:
            return {}
        start = np.concatenate([chunk["start_ns"] for chunk in chunks])
        unset = (start == 0) & (self._base_ns > 0 or self._middle_ns > UNIX_TIMES_NS)
        stray = ~unset & (abs(start - self._middle_ns) > ABSURD_NS)
        if table in _ARGS:  # the other tables repeat rows of these
            self._count("zero_timestamp", unset)
            self._count("absurd_timestamp", stray)
        valid_rows = np.flatnonzero(~(unset | stray))
        order = valid_rows[np.argsort(start[valid_rows], kind="stable")]
        # Join one column after the other, so that only one exists twice at any time.
        joined = {key: np.concatenate([chunk.pop(key) for chunk in chunks])[order] for key in tuple(chunks[0])}
        joined["start_ns"] += self._base_ns
        joined["end_ns"] += self._base_ns
        return joined

    def tables(self, base_ns: int) -> dict[str, Any]:
        """Build the tables of a `Trace`, by field; ``base_ns`` is added to all times."""
        self._base_ns = base_ns
        self._middle_ns = self._middle()
        rows = {table: self._columns(table) for table in TABLES}
        if rows["activities"]:
            self._count("missing_name", rows["activities"]["name"] == self.names.get("", NONE))
        if rows["launches"] and rows["activities"]:
            _join_by_external_id(rows["activities"], rows["launches"]["correlation"])
        if rows["launches"]:
            correlation = rows["launches"]["correlation"]
            known = rows["activities"].get("correlation", np.empty(0, np.int64))
            rows["launches"] = _select(rows["launches"], (correlation != NONE) & among(correlation, known))
        activities, launches = rows["activities"], rows["launches"]
        if activities and launches:
            rows["host_events"] = self.host_rows.columns(self._base_ns, activities, launches, self._name_index)
        if rows["backward_calls"]:
            rows["backward_calls"] |= self._forward_arrows.columns(self._base_ns, rows["backward_calls"])
        if rows["memory"]:
            rows["memory"] = _select(rows["memory"], rows["memory"]["allocated_bytes"] >= 0)
        if rows["comm_records"]:
            rows["comm_records"] = _select(rows["comm_records"], rows["comm_records"]["collective"] != NONE)
        return {table: table_of(kind, rows[table]) for table, kind in TABLES.items()}


def _launch_id(args: Args) -> JsonScalar:
    """Return the correlation of a launch; without one, a number below `NONE` that stands for its external id."""
    external = whole_number(_first_known(args.external_id, args.old_external_id))
    return args.correlation if args.correlation is not None or external is None else NONE - 1 - external


def _join_by_external_id(activities: _Columns, launches: Int64) -> None:
    """Give activities without a correlation the number of the only launch with their external id."""
    numbers, counts = np.unique(launches[launches < NONE], return_counts=True)
    number = NONE - 1 - activities["external_id"]
    joined = (activities["correlation"] == NONE) & (number < NONE) & among(number, numbers[counts == 1])
    activities["correlation"][joined] = number[joined]


def _select(columns: _Columns, mask: npt.NDArray[np.bool_]) -> _Columns:
    return {name: values[mask] for name, values in columns.items()}


def _fill(args: Args, text: msgspec.Raw) -> bool:
    """Set the readable fields of ``args``; return whether all were readable."""
    try:
        raw_fields = decode_fields(text)
    except UNREADABLE:
        return False
    complete = True
    for field, key in zip(args.__struct_fields__, args.__struct_encode_fields__, strict=True):
        if key in raw_fields:
            try:
                setattr(args, field, msgspec.json.decode(raw_fields[key], type=int | str | float | None))
            except UNREADABLE:
                complete = False
    return complete


def integers(values: Sequence[JsonScalar]) -> Int64:
    """Convert values to a column of integers; `NONE` where a value is absent, not a number, or beyond 64 bits."""
    # Other types are converted one by one, because NumPy would accept "1_000".
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
    numbers = map(whole_number, values)
    return np.array([NONE if n is None or not -(2**63) < n < 2**63 else n for n in numbers], np.int64)


def _first_known(value: JsonScalar, other: JsonScalar) -> JsonScalar:
    return other if value is None else value


def _to_int32(wide: Int64) -> Int32:
    return np.where(abs(wide) < 2**31, wide, NONE).astype(np.int32)


def _list(text: bytes) -> list[Any]:
    """Decode a JSON list; empty if the text is not one."""
    try:
        return msgspec.json.decode(text, type=list[Any]) if text else []
    except UNREADABLE:
        return []


def _sizes(value: object) -> Sizes:
    """Return the shape of a tensor; empty for a list of tensors and for any other value."""
    is_shape = isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
    return tuple(value) if is_shape else ()  # type: ignore[arg-type]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
