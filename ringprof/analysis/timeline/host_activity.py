"""What the host did on a thread at each moment: the innermost host event that is open, and its class."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from ringprof.trace.columns import RANGE, RUNTIME_CALL, Int64, Trace, distinct

LAUNCH_CALL = "launch call"
MEMORY_CALL = "allocation or free"
SYNCHRONISATION = "synchronisation"
DATA_LOADER = "data loader"
COMPILATION = "compile or graph capture"
USER_RANGE = "user range"
OPERATOR_CLASS = "operator"
NOTHING_RECORDED = "nothing recorded"
NOT_KEPT = "host events not kept"
HOST_CLASSES = (
    LAUNCH_CALL, MEMORY_CALL, SYNCHRONISATION, DATA_LOADER, COMPILATION, USER_RANGE, OPERATOR_CLASS, NOTHING_RECORDED,
    NOT_KEPT,
)  # fmt: skip
"""Classes of host time, in the order of their codes. ``host events not kept`` stands for all host time of a trace
without host events: of reduced traces of older versions, and where memory was too small for them."""
_NO_CLASS = -1

# Marks of whole iterations and of communication calls: they are open around everything, and tell nothing.
_MARK = re.compile(r"ProfilerStep#[0-9]+|ringprof::iteration\b.*|PyTorch Profiler \([0-9]+\)|record_param_comms")
_CALLS = (
    (MEMORY_CALL, re.compile(r"Malloc|Free|Host(?:Alloc|Register|Unregister)|Mem(?:Create|Map|Unmap|Release|Alloc)")),
    (MEMORY_CALL, re.compile(r"MemAddress|MemSetAccess|MemPool|ArrayCreate|ArrayDestroy")),
    (
        COMPILATION,
        re.compile(r"Capture(?!Status|Mode|Info)|Graph(?:Instantiate|ExecUpdate)|(?:Module|Library)Load|nvrtc"),
    ),
    (SYNCHRONISATION, re.compile(r"Synchronize")),
    # A query of how many blocks fit is made for the launch that follows, and loads its kernel as that would.
    (LAUNCH_CALL, re.compile(r"Launch|Memcpy|Memset|Occupancy")),
)
_RANGES = (
    (DATA_LOADER, re.compile(r"enumerate\(DataLoader\)|DataLoaderIter")),
    (COMPILATION, re.compile(r"CUDAGraphNode\.record|cudagraphify|dynamo_timed|compile_fx|compile_inner|TorchDynamo")),
)


def class_of_name(name: str, category: int) -> int:
    """Return the index into `HOST_CLASSES` that an event's own name tells, or -1 where only what is around it does."""
    for label, pattern in _CALLS if category == RUNTIME_CALL else _RANGES:
        if pattern.search(name):
            return HOST_CLASSES.index(label)
    return HOST_CLASSES.index(USER_RANGE) if category == RANGE else _NO_CLASS


class HostThread:
    """The host events of one thread, for asking which is innermost at a time."""

    def __init__(self, trace: Trace, thread: int) -> None:
        events = trace.host_events
        marks = trace.names_that(_MARK.fullmatch)
        rows = np.flatnonzero((events.thread == thread) & ~marks[events.name])
        # Of events that start together the longest is around the others.
        rows = rows[np.lexsort((-events.end_ns[rows], events.start_ns[rows]))]
        self.start_ns, self.end_ns, self.name = events.start_ns[rows], events.end_ns[rows], events.name[rows]
        self._around = self._enclosing()
        self._own_class = self._classes_of_names(trace, events.category[rows])

    def _enclosing(self) -> Int64:
        """For each event the latest that began before it and is still open when it begins, or -1."""
        around = np.arange(-1, len(self.start_ns) - 1, dtype=np.int64)
        open_rows = np.flatnonzero((around >= 0) & (self.end_ns[around] <= self.start_ns))
        # What has ended is replaced by what was open around it. The distance doubles with every turn.
        while len(open_rows):
            around[open_rows] = around[around[open_rows]]
            ended = (around[open_rows] >= 0) & (self.end_ns[around[open_rows]] <= self.start_ns[open_rows])
            open_rows = open_rows[ended]
        return around

    def _classes_of_names(self, trace: Trace, category: npt.NDArray[np.int8]) -> Int64:
        """Return for each event the index into `HOST_CLASSES` that its own name tells, or -1."""
        key = self.name.astype(np.int64) * 4 + category
        known = {one: class_of_name(trace.names[one // 4], one % 4) for one in distinct(key).tolist()}
        return np.array([known[one] for one in key.tolist()], np.int64)

    def classes(self, times_ns: Int64, events: Int64) -> Int64:
        """Return the index into `HOST_CLASSES` of the innermost open event that has a class, at each time.

        ``events`` is what `innermost` says of the same times. Events may overlap in part: one that has ended by then
        gives its class to nothing.
        """
        place = events.copy()
        rows = np.flatnonzero(place >= 0)
        rows = rows[self._own_class[place[rows]] == _NO_CLASS]
        while len(rows):
            place[rows] = self._around[place[rows]]
            rows = rows[place[rows] >= 0]
            ended = self.end_ns[place[rows]] <= times_ns[rows]
            rows = rows[ended | (self._own_class[place[rows]] == _NO_CLASS)]
        result = np.full(len(events), HOST_CLASSES.index(NOTHING_RECORDED), np.int64)
        result[events >= 0] = HOST_CLASSES.index(OPERATOR_CLASS)
        result[place >= 0] = self._own_class[place[place >= 0]]
        return result

    def innermost(self, times_ns: Int64) -> Int64:
        """For each time the event that is open and began last, or -1."""
        if not len(self.start_ns):
            return np.full(len(times_ns), -1, np.int64)
        place = np.searchsorted(self.start_ns, times_ns, side="right").astype(np.int64) - 1
        rows = np.flatnonzero((place >= 0) & (self.end_ns[place] <= times_ns))
        while len(rows):
            place[rows] = self._around[place[rows]]
            rows = rows[(place[rows] >= 0) & (self.end_ns[place[rows]] <= times_ns[rows])]
        return place
