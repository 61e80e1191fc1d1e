"""The columns of one rank's trace (`Trace`), which are all that the analysis sees of a file.

All times are int64 nanoseconds of Unix time (the trace's base time is already added). Each name is stored once and
referred to by index. Readers fill these types; this module neither reads files nor interprets their content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int8 = npt.NDArray[np.int8]

KERNEL, MEMCPY, MEMSET = 0, 1, 2
"""Values of `Activities.category`."""

OPERATOR, RANGE, RUNTIME_CALL = 0, 1, 2
"""Values of `HostEvents.category`."""

NONE = -1
"""Value of an integer column that means "not given"."""


PAGE_MIGRATION = "Page migration"
"""Start of the names of copies that CUDA makes of managed memory when it is touched; no call launches them."""

NOTES = frozenset({"clocks_fitted", "cpu_no_transfer_times", "cpu_no_wait_marks", "matched_by_ends"})
"""Codes of warnings that an intact trace may have: on CPU ranks, and with several hosts."""

CUT_OFF = frozenset({"truncated", "damaged_compression"})
"""Codes of warnings which say that the end of a trace is missing."""
NO_HOST_EVENTS = "host_events_dropped"
"""Code of the warning that the host events during idle time of the device are not known."""
NO_DEVICE_ACTIVITIES = "no_device_activities"
"""Code of the warning that a run used a GPU but its trace has no device activities."""


class Notice(msgspec.Struct, frozen=True):
    """Warning about an oddity in the input that did not prevent reading it."""

    code: str
    """Stable identifier for scripts, such as ``truncated``, ``negative_duration`` or ``cpu_no_transfer_times``."""
    message: str
    rank: int | None = None
    count: int = 1
    byte_offset: int | None = None


class Activities(msgspec.Struct, frozen=True):
    """Device activities: kernels, copies and memory sets, sorted by start. All columns have equal length."""

    start_ns: Int64
    end_ns: Int64
    name: Int32
    """Index into `Trace.names`."""
    category: Int8
    """`KERNEL`, `MEMCPY` or `MEMSET`."""
    device: Int32
    stream: Int32
    correlation: Int64
    """Number that an activity shares with its launch. `NONE`, or 0 on several, where the writer knows no launch: some
    versions of ROCm give 0 to all RCCL kernels."""
    external_id: Int64
    """Number that an activity shares with the CPU operator that caused it; `NONE` where absent."""
    size_bytes: Int64
    """Bytes of a copy or a memory set; `NONE` where not given."""
    collective: Int32
    """Index into `Trace.collectives` of the metadata that the kernel itself carries, or `NONE`."""
    graph_node: Int64
    """CUDA graph node, or `NONE`."""
    target_device: Int32
    """Device that a peer-to-peer copy writes to, in the numbering of its own process; `NONE` where not given."""

    def busy_ns(self, rows: Int64 | None = None) -> dict[int, int]:
        """Sum the durations of the activities (of those in ``rows``) by device, in the order of devices."""
        device, time_ns = self.device, self.end_ns - self.start_ns
        if rows is not None:
            device, time_ns = device[rows], time_ns[rows]
        return {number: int(time_ns[device == number].sum()) for number in distinct(device).tolist()}


class Launches(msgspec.Struct, frozen=True):
    """CPU calls that launched device work (cuda_runtime and cuda_driver rows with a correlation), sorted by start."""

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    correlation: Int64


class Ranges(msgspec.Struct, frozen=True):
    """Named intervals, sorted by start: annotations, or the CPU operators that the analysis uses."""

    start_ns: Int64
    end_ns: Int64
    name: Int32
    """Index into `Trace.names`."""
    thread: Int64
    """CPU thread; the stream for device annotations."""
    device: Int32
    """Device of a device annotation; `NONE` on the CPU side."""
    external_id: Int64


class CommRecord(msgspec.Struct, frozen=True):
    """One communication record, from ``record_param_comms`` or from a kernel's own metadata."""

    name: str
    """Recorded name in lower case: ``send``, ``recv``, ``all_to_all``, ``_allgather_base``, ``allreduce`` ..."""
    group: str | None
    """Process group name (unique within the process)."""
    group_description: str | None
    group_ranks: tuple[int, ...] | None
    group_size: int | None
    in_elements: int | None
    out_elements: int | None
    dtype: str | None
    source_rank: int | None
    """Global rank received from (recv)."""
    destination_rank: int | None
    """Global rank sent to (send)."""
    in_split: tuple[int, ...] = ()
    out_split: tuple[int, ...] = ()
    sequence: int | None = None
    comms_id: int | None = None


# A large trace holds hundreds of thousands of these. Structs are created several times faster than data classes, and
# the garbage collector need not visit them, since they cannot refer to themselves.
class Message(msgspec.Struct, frozen=True, gc=False):
    """One send or one receive within a kernel, or of a hop."""

    peer: int
    """Global rank of the other end; -1 where it is not known."""
    size_bytes: int | None
    """None where the size is not known."""


class CommRecords(msgspec.Struct, frozen=True):
    """CPU records of communication calls (``record_param_comms``), sorted by start."""

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    external_id: Int64
    collective: Int32
    """Index into `Trace.collectives`."""


class MemoryEvents(msgspec.Struct, frozen=True):
    """Bytes held by an allocator after each allocation and release, by time; ``profile_memory=True`` records them."""

    start_ns: Int64
    end_ns: Int64
    """Equal to ``start_ns``."""
    device: Int32
    """`NONE` for the host's memory."""
    allocated_bytes: Int64
    reserved_bytes: Int64
    """Allocated bytes plus cached ones; `NONE` where not given."""


class HostEvents(msgspec.Struct, frozen=True):
    """CPU operators, ranges and CUDA calls that are open while the device idles, sorted by start.

    Only events on a thread that makes the next launch are kept (`ringprof.trace.host_events`).
    """

    start_ns: Int64
    end_ns: Int64
    name: Int32
    """Index into `Trace.names`."""
    thread: Int64
    category: Int8
    """`OPERATOR`, `RANGE` or `RUNTIME_CALL`."""


FLOP_DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8", "int8")
"""Values of `FlopRecords.dtype` are indices into this tuple."""
FLOPS_LIMIT = 1 << 60
"""Upper bound on the FLOPs of one operator; a larger number in a file is damage."""


class FlopRecords(msgspec.Struct, frozen=True):
    """CPU operators whose FLOPs follow from their recorded shapes, sorted by start; nested operators included."""

    start_ns: Int64
    end_ns: Int64
    name: Int32
    """Index into `Trace.names`."""
    thread: Int64
    external_id: Int64
    flops: Int64
    """Floating-point operations of the call (`ringprof.trace.operator_flops`)."""
    dtype: Int8
    """Index into `FLOP_DTYPES`, or `NONE` where the input types are not recorded."""
    causal: Int8
    """1 where the count excludes what a causal mask or a window hides; 0 where nothing is hidden. `NONE` for an
    attention operator whose mask is not recorded: its count is dense."""
    batch: Int64
    """Number of products of matrices (m, k) and (k, n); `NONE` for other operators, like ``m``, ``n`` and ``k``."""
    m: Int64
    n: Int64
    k: Int64


class BackwardCalls(msgspec.Struct, frozen=True):
    """Calls of autograd nodes in a backward pass, sorted by start, each with the forward operator that created it."""

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    forward_ns: Int64
    """Start of the forward operator, from the profiler's ``fwdbwd`` arrows; `NONE` where no arrow ends in the call."""
    forward_thread: Int64


class Device(msgspec.Struct, frozen=True):
    """One device as the trace describes it."""

    index: int
    name: str


TABLES: dict[str, type[Any]] = {
    "activities": Activities, "launches": Launches, "annotations": Ranges, "device_annotations": Ranges,
    "operators": Ranges, "comm_records": CommRecords, "memory": MemoryEvents, "host_events": HostEvents,
    "flop_records": FlopRecords, "modules": Ranges, "backward_calls": BackwardCalls,
}  # fmt: skip
"""Fields of `Trace` that hold columns, with the type of each table."""

_DTYPES: dict[str, type[Any]] = {"Int64": np.int64, "Int32": np.int32, "Int8": np.int8}
_Table = TypeVar("_Table")
_Number = TypeVar("_Number", bound=np.generic)


def distinct(column: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Return the distinct values of a column, ascending."""
    # Without `return_counts`, NumPy imports its masked arrays, which takes longer than reading a small trace.
    values: npt.NDArray[_Number] = np.unique(column, return_counts=True)[0]
    return values


def among(values: npt.NDArray[_Number], others: npt.NDArray[_Number]) -> npt.NDArray[np.bool_]:
    """Mark the values that are also in ``others``; unlike ``np.isin``, this does not import masked arrays."""
    sorted_others = distinct(others)
    end = np.searchsorted(sorted_others, values, side="right")
    return (end > 0) & (sorted_others[end - 1] == values) if len(sorted_others) else np.zeros(len(values), np.bool_)


def has_launch_id(correlations: Int64) -> npt.NDArray[np.bool_]:
    """Mark the activities that name their launch; a 0 that several share names none."""
    named: npt.NDArray[np.bool_] = correlations != NONE
    return named & (correlations != 0) if np.count_nonzero(correlations == 0) > 1 else named


def launch_rows(correlations: Int64, launch_correlations: Int64) -> Int64:
    """Find the launch of each activity: the index in ``launch_correlations`` of each of ``correlations``, or `NONE`."""
    if not len(launch_correlations):
        return np.full(len(correlations), NONE, np.int64)
    order = np.argsort(launch_correlations, kind="stable")
    position = np.minimum(
        np.searchsorted(launch_correlations, correlations, sorter=order), len(launch_correlations) - 1
    )
    row = order[position]
    return np.where((launch_correlations[row] == correlations) & has_launch_id(correlations), row, NONE).astype(
        np.int64
    )


def enclosing_rows(rows: tuple[Int64, Int64, Int64], points_ns: Int64, thread: Int64) -> Int64:
    """Return the row that began last before each point on its thread and contains it, or `NONE`.

    ``rows`` are start, end and thread of intervals, in any order; if those of a thread are disjoint, no other contains
    the point.
    """
    start, end, row_thread = rows
    threads, times = np.append(row_thread, thread), np.append(start, points_ns)
    is_point = np.arange(len(times)) >= len(start)
    order = np.lexsort((is_point, times, threads))
    # Position of the last interval that begins at or before each position in this order.
    last_start = np.maximum.accumulate(np.where(is_point[order], NONE, np.arange(len(order))))
    row_before = np.full(len(times), NONE, np.int64)
    row_before[order] = np.where(last_start == NONE, NONE, order[last_start])
    row = row_before[len(start) :]
    is_inside = row != NONE
    is_inside[is_inside] = (row_thread[row[is_inside]] == thread[is_inside]) & (
        points_ns[is_inside] < end[row[is_inside]]
    )
    return np.where(is_inside, row, NONE)


def dtypes_of(kind: type[Any]) -> dict[str, type[Any]]:
    """Return the NumPy type of each column of a table."""
    return {name: _DTYPES[type_name] for name, type_name in kind.__annotations__.items()}


def table_of(kind: type[_Table], columns: Mapping[str, npt.NDArray[Any]]) -> _Table:
    """Build a table from columns of equal length, converted to its types; a missing column is filled with `NONE`."""
    count = len(columns["start_ns"]) if columns else 0
    return kind(
        **{
            name: columns[name].astype(dtype, copy=False) if name in columns else np.full(count, NONE, dtype)
            for name, dtype in dtypes_of(kind).items()
        }
    )


def _empty(kind: type[_Table]) -> Any:
    """Return a field whose default is a table without rows."""
    return msgspec.field(default_factory=lambda: table_of(kind, {}))


class Trace(msgspec.Struct, frozen=True):
    """One rank's trace: device activities, host calls, communication records and metadata of the file."""

    path: str
    names: list[str]
    """Distinct names, as in the file (untrusted text)."""
    activities: Activities
    launches: Launches = _empty(Launches)
    annotations: Ranges = _empty(Ranges)
    """CPU-side ``user_annotation`` ranges."""
    device_annotations: Ranges = _empty(Ranges)
    """Device-side ``gpu_user_annotation`` ranges."""
    operators: Ranges = _empty(Ranges)
    """CPU operators that help classify attention or communication; on a CPU trace, all operators."""
    comm_records: CommRecords = _empty(CommRecords)
    collectives: list[CommRecord] = []
    devices: list[Device] = []
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    groups: dict[str, tuple[int, ...]] = {}
    """Global ranks by process group name, from ``distributedInfo``."""
    base_ns: int = 0
    """``baseTimeNanoseconds`` of the file (already added to every time); 0 where absent."""
    producer: str = "torch"
    """Program that wrote the trace: a key of `ringprof.trace.producers.PRODUCERS`."""
    events_total: int = 0
    events_skipped: int = 0
    """Number of events that could not be read."""
    warnings: list[Notice] = []
    memory: MemoryEvents = _empty(MemoryEvents)
    host_events: HostEvents = _empty(HostEvents)
    flop_records: FlopRecords = _empty(FlopRecords)
    """Matrix products, convolutions and attention of known shape; empty where the profiler recorded no shapes."""
    modules: Ranges = _empty(Ranges)
    """Calls of ``torch.nn`` modules, which torch.profiler records with its option ``with_stack``."""
    backward_calls: BackwardCalls = _empty(BackwardCalls)

    @property
    def lacks_device(self) -> bool:
        """Whether the run used a GPU but the trace has no device activities."""
        return any(warning.code == NO_DEVICE_ACTIVITIES for warning in self.warnings)

    def names_that(self, predicate: Callable[[str], object]) -> npt.NDArray[np.bool_]:
        """Mark the `names` for which ``predicate`` is true; the mask is never empty, so that names can index it."""
        return np.array([bool(predicate(name)) for name in self.names] or [False], np.bool_)
