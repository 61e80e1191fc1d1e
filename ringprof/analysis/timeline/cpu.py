"""The breakdown of a run on CPU processes, where operators compute, and ranges and marks tell what is communicated.

Where ``ringprof::wait`` marks when the rank's thread was blocked, that is its exposed communication, and nothing is
computed meanwhile. Of other communication, the time with nothing computing beside it is exposed. Ranges prove no
overlap: a send's or receive's runs until it is waited for.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.kinds import ATTENTION, CODE, COMMUNICATION, COMPUTE, KINDS, MEMORY, are
from ringprof.analysis.kinds.operators import ENCLOSING, kind_enclosing, kind_of_attention_operator, kind_of_its_kernel
from ringprof.analysis.timeline.breakdown import Breakdown, KindTime, beside_attention
from ringprof.analysis.timeline.cpu_communication import (
    CpuCommunication,
    communication_bounds,
    find_communication,
    marked_waits,
)
from ringprof.analysis.timeline.window import Window
from ringprof.trace.columns import NONE, Int8, Int64, Ranges, Trace, distinct

_WAIT_CHANNEL = re.compile(r"ringprof::wait/(\S+)")
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
_FREE = re.compile(r"aten::(view|reshape|transpose|permute|slice|select|as_strided|detach|expand|t|unsqueeze|squeeze)")


def is_cpu_trace(trace: Trace) -> bool:
    """Whether the trace has no device activity but CPU operators or ranges to analyse instead."""
    return not len(trace.activities.start_ns) and len(trace.operators.start_ns) + len(trace.annotations.start_ns) > 0


def marks_waiting(trace: Trace) -> bool:
    """Whether the trace marks the time that the rank was blocked in communication."""
    return len(marked_waits(trace)) > 0


def exposed_ranges(trace: Trace, window: Window) -> dict[tuple[str, str], int]:
    """Exposed communication of the marked iterations by kind, of ranges; marked blocking is not among it."""
    first, last = window_bounds(trace, window, None)
    start, end, kind, _ = outermost_operators(trace)
    computing = _of(np.clip(start, first, last), np.clip(end, first, last), kind, COMPUTE)
    found = find_communication(trace, first, last)
    exposed = {one: intervals.length_ns(intervals.subtraction(found.of(one), computing)) for one in COMMUNICATION}
    return {(one, ""): time for one, time in exposed.items() if time}


def break_down_cpu(trace: Trace, window: Window, number: int | None = None) -> Breakdown | None:
    """The breakdown over all marked iterations, or over iteration ``number``; None where nothing ran in it."""
    first, last = window_bounds(trace, window, number)
    start, end, kind, _ = outermost_operators(trace)
    clipped = np.clip(start, first, last), np.clip(end, first, last)
    rows = clipped[1] > clipped[0]
    start, end, kind = clipped[0][rows], clipped[1][rows], kind[rows]
    if last <= first:
        return None
    communication = find_communication(trace, first, last)
    blocked = communication.blocked
    compute = intervals.subtraction(_of(start, end, kind, COMPUTE), blocked)
    all_exposed = intervals.merged(blocked, intervals.subtraction(communication.ranges, compute))
    memory = intervals.subtraction(_of(start, end, kind, MEMORY), intervals.merged(compute, all_exposed))
    exposed = intervals.length_ns(all_exposed)
    busy = intervals.length_ns(compute) + exposed + intervals.length_ns(memory)
    return Breakdown(
        start_ns=first,
        end_ns=last,
        compute_ns=intervals.length_ns(compute),
        comm_ns=intervals.length_ns(intervals.merged(blocked, communication.ranges)),
        overlapped_ns=None,
        exposed_comm_ns=exposed,
        exposed_memory_ns=intervals.length_ns(memory),
        idle_ns=last - first - busy,
        flash_ns=intervals.length_ns(_of(start, end, kind, ATTENTION)),
        kinds=_kind_times(start, end, kind, communication),
        beside_ns=beside_attention(lambda kinds: intervals.subtraction(_of(start, end, kind, kinds), blocked)),
    )


def blocked_by_channel(trace: Trace, window: Window) -> dict[str, int]:
    """Nanoseconds that the rank was blocked in each channel's transfers (``ringprof::wait/<channel>``), within the
    marked iterations; channels that the trace does not name are left out."""
    first, last = window_bounds(trace, window, None)
    within = np.array([first]), np.array([last])
    named = {match[1]: re.compile(re.escape(name)) for name in trace.names if (match := _WAIT_CHANNEL.fullmatch(name))}
    spans = {channel: _named(trace, trace.annotations, named[channel]) for channel in sorted(named)}
    return {channel: int(intervals.covered_ns(one, *within)[0]) for channel, one in spans.items()}


def window_bounds(trace: Trace, window: Window, number: int | None) -> tuple[int, int]:
    """Return start and end of the marked iterations, of one by ``number``, or of all that the trace holds."""
    if window.span_ns:
        spans = window.span_ns if number is None else (window.span_ns[number],)
        return spans[0][0], max(end for _, end in spans)
    found = trace.operators if len(trace.operators.start_ns) else trace.annotations
    # A worker of gloo communicates on after the last operator, and before the first.
    first, last = communication_bounds(trace)
    start, end = np.append(found.start_ns, first), np.append(found.end_ns, last)
    return int(start.min()), int(end.max())


def _named(trace: Trace, ranges: Ranges, pattern: re.Pattern[str]) -> Spans:
    rows = trace.names_that(pattern.fullmatch)[ranges.name]
    return intervals.union(ranges.start_ns[rows], ranges.end_ns[rows])


def outermost_operators(trace: Trace) -> tuple[Int64, Int64, Int8, Int64]:
    """Return start, end, kind and thread of the outermost operators that are one thing.

    These are attention at any depth, else the top level.

    An autograd function is an operator around everything its backward pass runs, and an operator on DTensors waits in
    itself for the collective that its input comes from: both are looked into and not counted themselves. What a
    compiled graph runs outside of operators, its own kernels, is ``other``; its thread is `NONE`.
    """
    operators = trace.operators
    code = np.array([_kind_of_operator(name) for name in trace.names] or [-1], np.int8)
    keep = _leaf_or_known(trace, code)
    kind = code[operators.name].copy()
    merges = _named(trace, trace.annotations, _MERGE)
    in_merge = intervals.contains(merges, operators.start_ns) & ~are(kind, *ATTENTION)
    kind[in_merge & (kind >= 0)] = CODE["merge"]
    in_step = intervals.contains(_named(trace, trace.annotations, _OPTIMIZER), operators.start_ns)
    kind[in_step & are(kind, "elementwise", "reduction", "other")] = CODE["optimizer"]
    keep &= kind >= 0
    start, end, kind, thread = operators.start_ns[keep], operators.end_ns[keep], kind[keep], operators.thread[keep]
    waits = intervals.merged(marked_waits(trace), _named(trace, operators, _FUNCTIONAL_WAIT))
    told = intervals.merged(intervals.union(start, end), waits)
    fused = intervals.subtraction(_named(trace, operators, _COMPILED), told)
    other = np.full(len(fused.start_ns), CODE["other"], np.int8)
    start, end = np.append(start, fused.start_ns), np.append(end, fused.end_ns)
    return start, end, np.append(kind, other), np.append(thread, np.full(len(other), NONE))


def _leaf_or_known(trace: Trace, code: Int8) -> npt.NDArray[np.bool_]:
    """Operators to count: not inside one that is counted, and not a wrapper around what is told apart."""
    operators = trace.operators
    counted = (code >= 0) & ~trace.names_that(lambda name: "::" not in name)
    waiting = trace.names_that(_FUNCTIONAL_WAIT.fullmatch)[operators.name]
    keep = np.zeros(len(operators.start_ns), np.bool_)
    for thread in distinct(operators.thread):
        here = operators.thread == thread
        waits = intervals.union(operators.start_ns[here & waiting], operators.end_ns[here & waiting])
        around = intervals.covered_ns(waits, operators.start_ns, operators.end_ns) > 0
        rows = np.flatnonzero(here & counted[operators.name] & ~around)
        # Longest first at equal starts, so that a parent precedes its children.
        rows = rows[np.lexsort((-operators.end_ns[rows], operators.start_ns[rows]))]
        end = operators.end_ns[rows]
        reached = np.concatenate((np.full(1, np.iinfo(np.int64).min), np.maximum.accumulate(end)[:-1]))
        keep[rows[end > reached]] = True
    return keep


def _kind_of_operator(name: str) -> int:
    """Index into `KINDS`, or -1 for what is not work of its own (communication, views)."""
    attention = kind_of_attention_operator(name)
    if attention:
        return CODE[attention]
    if _COMM_OPERATOR.match(name) or _FREE.fullmatch(name):
        return -1
    known = kind_of_its_kernel(name) or kind_enclosing(name)
    return CODE[known or next((kind for pattern, kind in _KINDS if pattern.fullmatch(name)), "other")]


def _of(start: Int64, end: Int64, kind: Int8, kinds: tuple[str, ...]) -> Spans:
    rows = are(kind, *kinds)
    return intervals.union(start[rows], end[rows])


def _kind_times(start: Int64, end: Int64, kind: Int8, found: CpuCommunication) -> dict[str, KindTime]:
    start, end = np.concatenate((start, found.start_ns)), np.concatenate((end, found.end_ns))
    kind = np.concatenate((kind, found.kind))
    result = {}
    for name in KINDS:
        rows = kind == CODE[name]
        time, calls = int(np.sum(end[rows] - start[rows])), int(np.count_nonzero(rows))
        busy = intervals.union(start[rows], end[rows])
        if name == "send_recv" and len(found.blocked):
            time, calls = time + intervals.length_ns(found.blocked), calls + found.marks
            busy = intervals.merged(busy, found.blocked)
        if calls:
            result[name] = KindTime(time, calls, None, intervals.length_ns(busy))
    return result
