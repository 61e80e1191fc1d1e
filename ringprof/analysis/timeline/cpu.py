"""Breakdown of a run on CPU processes: operators count as computation, ranges and marks as communication.

Where ``ringprof::wait`` marks when the rank's thread was blocked, that time is its exposed communication, and nothing
computes meanwhile. For other communication, the time that no computation overlaps is exposed. Ranges prove no overlap:
the range of a send or receive lasts until it is waited for.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.kinds import ATTENTION, CODE, COMMUNICATION, COMPUTE, KINDS, MEMORY, is_kind
from ringprof.analysis.kinds.operators import (
    ENCLOSING,
    kind_of_attention_operator,
    kind_of_collective,
    kind_of_enclosed_kernels,
    kind_of_own_kernel,
)
from ringprof.analysis.timeline.breakdown import Breakdown, KindTime, beside_attention
from ringprof.analysis.timeline.window import Window
from ringprof.trace.columns import NONE, Int8, Int64, Ranges, Trace, distinct

_WAIT_CHANNEL = re.compile(r"ringprof::wait(?:-for-all)?/(\S+)")
_MERGE = re.compile(r"ringprof::(.*/)?merge\b.*")
_OPTIMIZER = re.compile(ENCLOSING["optimizer"])
_COMM_OPERATOR = re.compile(
    r"c10d::|_?c10d_functional(_autograd)?::|(gloo|mpi|ucc|xccl|nccl):|record_param_comms|ringprof::|autograd::"
)
_FUNCTIONAL_WAIT = re.compile(r"_?c10d_functional::wait_tensor")
_COMPILED = re.compile(r"## Call CompiledFxGraph\b.*")
_KINDS = (
    (re.compile(r"aten::(_foreach_)?(copy_|clone|contiguous|to|_to_copy|narrow_copy)"), "memcpy"),
    (re.compile(r"aten::(zero_|zeros|zeros_like|fill_|full|full_like|ones|ones_like)"), "memset"),
    (re.compile(r"aten::(matmul|linear|einsum)"), "gemm"),
    (
        re.compile(r"aten::(cat|stack|index\w*|gather|scatter\w*|sort|topk|flip|roll|repeat|_unsafe_index\w*)"),
        "permute",
    ),
    (re.compile(r"aten::(sum|mean|amax|amin|max|min|argmax|cumsum|norm|linalg_vector_norm|nll_loss\w*)"), "reduction"),
    (re.compile(r"aten::_foreach_\w+"), "optimizer"),
    (
        re.compile(
            r"aten::(add|sub|rsub|mul|div|neg|exp|log|pow|sqrt|rsqrt|sin|cos|tanh|sigmoid|silu|gelu|relu|where|clamp\w*"
            r"|native_dropout|bernoulli|masked_fill|addcmul|addcdiv|threshold)(_|_backward)?"
        ),
        "elementwise",
    ),
)
_NO_WORK = re.compile(
    r"aten::(view|reshape|transpose|permute|slice|select|as_strided|detach|expand|t|unsqueeze|squeeze)"
)

# --- communication: ranges of gloo and similar backends, and time marked as blocked --------------


WAIT = re.compile(r"ringprof::wait\b.*")
_FOR_ALL = "ringprof::wait-for-all"
"""Prefix of waits before a transfer, until all ranks want it."""
_SEND = re.compile(r"ringprof::send\b.*")
_RANGE = re.compile(r"(?:gloo|mpi|ucc|xccl|nccl):(\w+)")
_POSTING = re.compile(r"c10d::(\w+)")


class CpuCommunication(msgspec.Struct, frozen=True):
    """Communication of one CPU rank within given times."""

    blocked: Spans
    """Time marked as blocked in communication."""
    blocked_of_kind: dict[str, tuple[Spans, int]]
    """Time marked as blocked, and number of transfers waited for, by the kind of what the marked channel carries."""
    start_ns: Int64
    """Starts of the ranges that no mark replaces."""
    end_ns: Int64
    kind: Int8
    """Index into `KINDS`."""

    @property
    def ranges(self) -> Spans:
        """Union of the ranges that no mark replaces."""
        return intervals.union(self.start_ns, self.end_ns)

    @property
    def everything(self) -> Spans:
        """Time that is marked as blocked or in a range."""
        return intervals.merged(self.blocked, self.ranges)

    def exposed_beside(self, compute: Spans) -> Spans:
        """Return the exposed part: blocked time, and time of ranges in which nothing computes."""
        return intervals.merged(self.blocked, intervals.subtraction(self.ranges, compute))

    def of(self, kind: str) -> Spans:
        """Return the union of these ranges of one kind."""
        rows = self.kind == CODE[kind]
        return intervals.union(self.start_ns[rows], self.end_ns[rows])


def find_communication(trace: Trace, start_ns: int, end_ns: int) -> CpuCommunication:
    """Return the communication between two times."""
    waits = marked_waits(trace)
    blocked_of_kind = {}
    for kind_name, names in _waits_by_kind(trace).items():
        spans = [_spans_named(trace, trace.annotations, re.compile(re.escape(name))) for name in names]
        spans = [_clipped(spans_of_name, start_ns, end_ns) for spans_of_name in spans]
        transfers = sum(len(waited) for name, waited in zip(names, spans, strict=True) if not name.startswith(_FOR_ALL))
        blocked_of_kind[kind_name] = intervals.merged(*spans), transfers
    blocked = _clipped(waits, start_ns, end_ns)
    tables = [_ranges_of(trace, trace.annotations, _RANGE), _ranges_of(trace, trace.operators, _RANGE)]
    if not len(waits) and not any(len(start) for start, _, _ in tables):
        tables.append(_ranges_of(trace, trace.operators, _POSTING))
    start, end, kind = (np.concatenate(columns) for columns in zip(*tables, strict=True))
    # A span contains its start but not its end.
    has_mark = intervals.contains(waits, end - 1) | _marked_when_posted(trace, start, kind)
    start, end = np.clip(start, start_ns, end_ns), np.clip(end, start_ns, end_ns)
    counted = ~has_mark & (end > start)
    return CpuCommunication(blocked, blocked_of_kind, start[counted], end[counted], kind[counted].astype(np.int8))


def _marked_when_posted(trace: Trace, start_ns: Int64, kind: Int64) -> npt.NDArray[np.bool_]:
    """Return which ranges were posted inside ``ringprof::send``, so that a mark shows when the rank waits for them.

    A worker of gloo runs them: a range may end before the wait begins, which then blocks the rank for no time. Ranges
    and posting calls of a kind are matched in order; where they are not equally many, none is.
    """
    sends = _spans_named(trace, trace.annotations, _SEND)
    posted_ns, _, posted_kind = _ranges_of(trace, trace.operators, _POSTING)
    marked = np.zeros(len(start_ns), np.bool_)
    for code in distinct(kind).tolist():
        rows, posts = np.flatnonzero(kind == code), np.sort(posted_ns[posted_kind == code])
        if len(rows) == len(posts):
            marked[rows[np.argsort(start_ns[rows], kind="stable")]] = intervals.contains(sends, posts)
    return marked


def _clipped(spans: Spans, start_ns: int, end_ns: int) -> Spans:
    return intervals.union(np.clip(spans.start_ns, start_ns, end_ns), np.clip(spans.end_ns, start_ns, end_ns))


def _waits_by_kind(trace: Trace) -> dict[str, list[str]]:
    """Return the names of marked waits by what is waited for: ``send_recv`` if that is not known, or several kinds."""
    posted_ns, _, posted_kind = _ranges_of(trace, trace.operators, _POSTING)
    names: dict[str, list[str]] = {}
    for name in filter(WAIT.fullmatch, trace.names):
        posts = name.replace("-for-all", "").replace("wait", "send", 1)
        sends = _spans_named(trace, trace.annotations, re.compile(re.escape(posts)))
        codes = distinct(posted_kind[intervals.contains(sends, posted_ns)]).tolist()
        names.setdefault(KINDS[codes[0]] if len(codes) == 1 else "send_recv", []).append(name)
    return names


def communication_bounds(trace: Trace) -> tuple[Int64, Int64]:
    """Return starts and ends of all communication and waiting ranges in a trace."""
    waits = marked_waits(trace)
    start, end, _ = _ranges_of(trace, trace.annotations, _RANGE)
    return np.append(start, waits.start_ns), np.append(end, waits.end_ns)


def marked_waits(trace: Trace) -> Spans:
    """Return the time that the trace marks as blocked in communication."""
    rows = trace.names_that(WAIT.fullmatch)[trace.annotations.name]
    return intervals.union(trace.annotations.start_ns[rows], trace.annotations.end_ns[rows])


def _ranges_of(trace: Trace, ranges: Ranges, pattern: re.Pattern[str]) -> tuple[Int64, Int64, Int64]:
    """Return start, end and kind of the ranges whose names match ``pattern`` and a communication call."""
    code = np.full(max(len(trace.names), 1), -1, np.int64)
    # In the trace of a GPU process without device activities, these calls only launch the communication.
    for index in distinct(ranges.name).tolist() if not trace.lacks_device else ():
        match = pattern.match(trace.names[index])
        if match and (kind := kind_of_collective(match[1])):
            code[index] = CODE[kind]
    kind_of_range = code[ranges.name]
    rows = np.flatnonzero(kind_of_range >= 0)
    return ranges.start_ns[rows], ranges.end_ns[rows], kind_of_range[rows]


def is_cpu_trace(trace: Trace) -> bool:
    """Return whether the trace has CPU operators or ranges but no device activity."""
    return not len(trace.activities.start_ns) and len(trace.operators.start_ns) + len(trace.annotations.start_ns) > 0


def marks_waiting(trace: Trace) -> bool:
    """Return whether the trace marks the time that the rank was blocked in communication."""
    return len(marked_waits(trace)) > 0


def exposed_ranges(trace: Trace, window: Window) -> dict[tuple[str, str], int]:
    """Return exposed communication of the marked iterations by kind, from ranges; marked blocking is excluded."""
    start_ns, end_ns = window_bounds(trace, window, None)
    start, end, kind, _ = outermost_operators(trace)
    computing = _spans_of_kinds(np.clip(start, start_ns, end_ns), np.clip(end, start_ns, end_ns), kind, COMPUTE)
    communication = find_communication(trace, start_ns, end_ns)
    exposed = {
        kind_name: intervals.length_ns(intervals.subtraction(communication.of(kind_name), computing))
        for kind_name in COMMUNICATION
    }
    return {(kind_name, ""): time for kind_name, time in exposed.items() if time}


def break_down_cpu(trace: Trace, window: Window, number: int | None = None) -> Breakdown | None:
    """Break down all marked iterations, or iteration ``number``; None where nothing ran."""
    window_start, window_end = window_bounds(trace, window, number)
    start, end, kind, _ = outermost_operators(trace)
    clipped = np.clip(start, window_start, window_end), np.clip(end, window_start, window_end)
    rows = clipped[1] > clipped[0]
    start, end, kind = clipped[0][rows], clipped[1][rows], kind[rows]
    if window_end <= window_start:
        return None
    communication = find_communication(trace, window_start, window_end)
    blocked = communication.blocked
    compute = intervals.subtraction(_spans_of_kinds(start, end, kind, COMPUTE), blocked)
    all_exposed = communication.exposed_beside(compute)
    memory = intervals.subtraction(_spans_of_kinds(start, end, kind, MEMORY), intervals.merged(compute, all_exposed))
    exposed = intervals.length_ns(all_exposed)
    busy = intervals.length_ns(compute) + exposed + intervals.length_ns(memory)
    return Breakdown(
        start_ns=window_start,
        end_ns=window_end,
        compute_ns=intervals.length_ns(compute),
        comm_ns=intervals.length_ns(communication.everything),
        overlapped_ns=None,
        exposed_comm_ns=exposed,
        exposed_memory_ns=intervals.length_ns(memory),
        idle_ns=window_end - window_start - busy,
        flash_ns=intervals.length_ns(_spans_of_kinds(start, end, kind, ATTENTION)),
        kinds=_kind_times(start, end, kind, communication),
        beside_ns=beside_attention(
            lambda kinds: intervals.subtraction(_spans_of_kinds(start, end, kind, kinds), blocked)
        ),
    )


def blocked_by_channel(trace: Trace, window: Window) -> dict[str, int]:
    """Return the time that the rank was blocked in each channel's transfers (``ringprof::wait/<channel>``), in ns.

    Only the marked iterations count. Channels that the trace does not name are left out.
    """
    start_ns, end_ns = window_bounds(trace, window, None)
    bounds = np.array([start_ns]), np.array([end_ns])
    pattern_of_channel = {
        match[1]: re.compile(rf"ringprof::wait(-for-all)?/{re.escape(match[1])}")
        for name in trace.names
        if (match := _WAIT_CHANNEL.fullmatch(name))
    }
    spans = {
        channel: _spans_named(trace, trace.annotations, pattern_of_channel[channel])
        for channel in sorted(pattern_of_channel)
    }
    return {channel: int(intervals.covered_ns(channel_spans, *bounds)[0]) for channel, channel_spans in spans.items()}


def window_bounds(trace: Trace, window: Window, number: int | None) -> tuple[int, int]:
    """Return start and end of the marked iterations, of iteration ``number``, or of the whole trace without marks."""
    if window.span_ns:
        spans = window.span_ns if number is None else (window.span_ns[number],)
        return spans[0][0], max(end for _, end in spans)
    ranges = trace.operators if len(trace.operators.start_ns) else trace.annotations
    # A gloo worker may communicate before the first operator and after the last.
    first, last = communication_bounds(trace)
    start, end = np.append(ranges.start_ns, first), np.append(ranges.end_ns, last)
    return int(start.min()), int(end.max())


def _spans_named(trace: Trace, ranges: Ranges, pattern: re.Pattern[str]) -> Spans:
    """Return the union of the ranges whose whole name matches ``pattern``."""
    rows = trace.names_that(pattern.fullmatch)[ranges.name]
    return intervals.union(ranges.start_ns[rows], ranges.end_ns[rows])


def outermost_operators(trace: Trace) -> tuple[Int64, Int64, Int8, Int64]:
    """Return start, end, kind and thread of the operators that count as work.

    These are attention operators at any depth, and other operators at the top level.

    Wrappers do not count themselves; the operators inside do. An autograd function wraps everything that its backward
    pass runs. An operator on DTensors waits inside for the collective that produces its input. Kernels that a compiled
    graph runs outside of operators have kind ``other`` and thread `NONE`.
    """
    operators = trace.operators
    code = np.array([_kind_of_operator(name) for name in trace.names] or [-1], np.int8)
    keep = _operators_to_count(trace, code)
    kind = code[operators.name].copy()
    merges = _spans_named(trace, trace.annotations, _MERGE)
    in_merge = intervals.contains(merges, operators.start_ns) & ~is_kind(kind, *ATTENTION)
    kind[in_merge & (kind >= 0)] = CODE["merge"]
    in_step = intervals.contains(_spans_named(trace, trace.annotations, _OPTIMIZER), operators.start_ns)
    kind[in_step & is_kind(kind, "elementwise", "reduction", "other")] = CODE["optimizer"]
    keep &= kind >= 0
    start, end, kind, thread = operators.start_ns[keep], operators.end_ns[keep], kind[keep], operators.thread[keep]
    waits = intervals.merged(marked_waits(trace), _spans_named(trace, operators, _FUNCTIONAL_WAIT))
    known_time = intervals.merged(intervals.union(start, end), waits)
    compiled_kernels = intervals.subtraction(_spans_named(trace, operators, _COMPILED), known_time)
    other = np.full(len(compiled_kernels.start_ns), CODE["other"], np.int8)
    start, end = np.append(start, compiled_kernels.start_ns), np.append(end, compiled_kernels.end_ns)
    return start, end, np.append(kind, other), np.append(thread, np.full(len(other), NONE))


def _operators_to_count(trace: Trace, code: Int8) -> npt.NDArray[np.bool_]:
    """Return a mask of the operators to count: outside of other counted operators, and not wrappers."""
    operators = trace.operators
    countable = (code >= 0) & ~trace.names_that(lambda name: "::" not in name)
    waiting = trace.names_that(_FUNCTIONAL_WAIT.fullmatch)[operators.name]
    keep = np.zeros(len(operators.start_ns), np.bool_)
    for thread in distinct(operators.thread):
        on_thread = operators.thread == thread
        waits = intervals.union(operators.start_ns[on_thread & waiting], operators.end_ns[on_thread & waiting])
        is_wrapper = intervals.covered_ns(waits, operators.start_ns, operators.end_ns) > 0
        rows = np.flatnonzero(on_thread & countable[operators.name] & ~is_wrapper)
        # Longest first at equal starts, so that a parent precedes its children.
        rows = rows[np.lexsort((-operators.end_ns[rows], operators.start_ns[rows]))]
        end = operators.end_ns[rows]
        latest_end = np.concatenate((np.full(1, np.iinfo(np.int64).min), np.maximum.accumulate(end)[:-1]))
        keep[rows[end > latest_end]] = True
    return keep


def _kind_of_operator(name: str) -> int:
    """Return the index into `KINDS`, or -1 for operators without work of their own (communication, views)."""
    attention = kind_of_attention_operator(name)
    if attention:
        return CODE[attention]
    if _COMM_OPERATOR.match(name) or _NO_WORK.fullmatch(name):
        return -1
    kind_by_name = kind_of_own_kernel(name) or kind_of_enclosed_kernels(name)
    return CODE[kind_by_name or next((kind for pattern, kind in _KINDS if pattern.fullmatch(name)), "other")]


def _spans_of_kinds(start: Int64, end: Int64, kind: Int8, kinds: tuple[str, ...]) -> Spans:
    """Return the union of the intervals with one of these kinds."""
    rows = is_kind(kind, *kinds)
    return intervals.union(start[rows], end[rows])


def _kind_times(start: Int64, end: Int64, kind: Int8, communication: CpuCommunication) -> dict[str, KindTime]:
    """Return the totals of each kind that occurs, with the time marked as blocked in it."""
    start, end = np.concatenate((start, communication.start_ns)), np.concatenate((end, communication.end_ns))
    kind = np.concatenate((kind, communication.kind))
    result = {}
    for name in KINDS:
        rows = kind == CODE[name]
        time, calls = int(np.sum(end[rows] - start[rows])), int(np.count_nonzero(rows))
        busy = intervals.union(start[rows], end[rows])
        if name in communication.blocked_of_kind:
            blocked, transfers = communication.blocked_of_kind[name]
            time, calls = time + intervals.length_ns(blocked), calls + transfers
            busy = intervals.merged(busy, blocked)
        if calls or time:
            result[name] = KindTime(time, calls, None, intervals.length_ns(busy))
    return result
