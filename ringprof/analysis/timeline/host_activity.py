"""Host activity of a thread at each time: the innermost open host event, and its class."""

from __future__ import annotations

import re

import numpy as np

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
"""Classes of host time, in the order of their codes. ``host events not kept`` is all host time of a trace whose host
events did not fit into memory."""
_NO_CLASS = -1

# Ranges of whole iterations and of communication calls enclose everything and carry no information.
_IGNORED_RANGE = re.compile(
    r"ProfilerStep#[0-9]+|ringprof::iteration\b.*|PyTorch Profiler \([0-9]+\)|record_param_comms"
)
_CLASS_OF_CALL = (
    (MEMORY_CALL, re.compile(r"Malloc|Free|Host(?:Alloc|Register|Unregister)|Mem(?:Create|Map|Unmap|Release|Alloc)")),
    (MEMORY_CALL, re.compile(r"MemAddress|MemSetAccess|MemPool|ArrayCreate|ArrayDestroy")),
    (
        COMPILATION,
        re.compile(r"Capture(?!Status|Mode|Info)|Graph(?:Instantiate|ExecUpdate)|(?:Module|Library)Load|nvrtc"),
    ),
    (SYNCHRONISATION, re.compile(r"Synchronize")),
    # An occupancy query precedes a launch and loads the kernel, as the launch would.
    (LAUNCH_CALL, re.compile(r"Launch|Memcpy|Memset|Occupancy")),
)
_CLASS_OF_RANGE = (
    (DATA_LOADER, re.compile(r"enumerate\(DataLoader\)|DataLoaderIter")),
    (COMPILATION, re.compile(r"CUDAGraphNode\.record|cudagraphify|dynamo_timed|compile_fx|compile_inner|TorchDynamo")),
)


def class_of_name(name: str, category: int) -> int:
    """Return the index into `HOST_CLASSES` that an event's own name implies, or -1 where its context decides."""
    for label, pattern in _CLASS_OF_CALL if category == RUNTIME_CALL else _CLASS_OF_RANGE:
        if pattern.search(name):
            return HOST_CLASSES.index(label)
    return HOST_CLASSES.index(USER_RANGE) if category == RANGE else _NO_CLASS


class HostThread:
    """Host events of one thread, to look up the innermost event at a time."""

    def __init__(self, trace: Trace, thread: int) -> None:
        events = trace.host_events
        ignored = trace.names_that(_IGNORED_RANGE.fullmatch)
        rows = np.flatnonzero((events.thread == thread) & ~ignored[events.name])
        # Of events that start together, the longest encloses the others.
        rows = rows[np.lexsort((-events.end_ns[rows], events.start_ns[rows]))]
        self.start_ns, self.end_ns, self.name = events.start_ns[rows], events.end_ns[rows], events.name[rows]
        # For each event, find the latest that began before it and is still open when it begins, or -1.
        enclosing = np.arange(-1, len(self.start_ns) - 1, dtype=np.int64)
        open_rows = np.flatnonzero((enclosing >= 0) & (self.end_ns[enclosing] <= self.start_ns))
        # Replace an ended event by the event that enclosed it. The distance doubles with every pass.
        while len(open_rows):
            enclosing[open_rows] = enclosing[enclosing[open_rows]]
            has_ended = (enclosing[open_rows] >= 0) & (self.end_ns[enclosing[open_rows]] <= self.start_ns[open_rows])
            open_rows = open_rows[has_ended]
        self._enclosing_event = enclosing
        key = self.name.astype(np.int64) * 4 + events.category[rows]
        class_of = {code: class_of_name(trace.names[code // 4], code % 4) for code in distinct(key).tolist()}
        self._own_class = np.array([class_of[code] for code in key.tolist()], np.int64)

    def classes(self, times_ns: Int64, events: Int64) -> Int64:
        """Return the index into `HOST_CLASSES` of the innermost open event with a class, at each time.

        ``events`` holds the innermost event at each time, from `innermost`. Events may overlap partly: an event that
        has ended by then gives its class to nothing.
        """
        event = events.copy()
        rows = np.flatnonzero(event >= 0)
        rows = rows[self._own_class[event[rows]] == _NO_CLASS]
        while len(rows):
            event[rows] = self._enclosing_event[event[rows]]
            rows = rows[event[rows] >= 0]
            has_ended = self.end_ns[event[rows]] <= times_ns[rows]
            rows = rows[has_ended | (self._own_class[event[rows]] == _NO_CLASS)]
        result = np.full(len(events), HOST_CLASSES.index(NOTHING_RECORDED), np.int64)
        result[events >= 0] = HOST_CLASSES.index(OPERATOR_CLASS)
        result[event >= 0] = self._own_class[event[event >= 0]]
        return result

    def innermost(self, times_ns: Int64) -> Int64:
        """Return for each time the latest-started event that is still open, or -1."""
        if not len(self.start_ns):
            return np.full(len(times_ns), -1, np.int64)
        event = np.searchsorted(self.start_ns, times_ns, side="right").astype(np.int64) - 1
        rows = np.flatnonzero((event >= 0) & (self.end_ns[event] <= times_ns))
        while len(rows):
            event[rows] = self._enclosing_event[event[rows]]
            rows = rows[(event[rows] >= 0) & (self.end_ns[event[rows]] <= times_ns[rows])]
        return event
