"""Parts of a recurrence on one rank: local scan, states, output, halo and exchange of heads.

ringprof's strategies annotate them. In each pass, ``local`` computes what needs no state of other ranks, ``state``
combines states and passes them on, and ``output`` computes what needs the incoming state. ``halo`` sends a rank's last
tokens to the next one, before a convolution. ``heads`` exchanges heads for tokens by all-to-all. Computation and
transfers belong to the part that launched them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE, is_kind
from ringprof.analysis.timeline.cpu import marked_waits, outermost_operators, window_bounds
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.timeline.window import Window
from ringprof.analysis.transfers.hops import Split, total
from ringprof.trace.columns import NONE, Int64, Trace, enclosing_rows

_COMPUTED = re.compile(r"ringprof::(fwd|bwd)/step=0/(local|state|block)")
_SENT = re.compile(r"ringprof::(?:send|wait)/(halo|heads)")
_WAITED = re.compile(r"ringprof::wait/.*")


class RecurrencePart(NamedTuple):
    """One part of a recurrence on one rank, over the window; times in nanoseconds."""

    phase: str
    """``fwd`` or ``bwd``; empty for ``halo`` and ``heads``, which are of both passes."""
    part: str
    """``local``, ``state``, ``output``, ``halo`` or ``heads``."""
    compute_ns: int
    """Time in which computation of the part runs."""
    communication_ns: int
    """Time in which communication of the part runs; on CPU, time blocked in waiting for it."""
    exposed_ns: int
    """Part of ``communication_ns`` during which the device computes nothing at all; on CPU all of it."""
    transfers: int
    """Number of communication kernels; on CPU, number of waits."""
    sent_bytes: int | None
    """Bytes sent; None where they are not known."""
    wait_ns: int | None
    """Waiting for peers, hidden or exposed; None where it is not known."""
    wire_ns: int | None
    """Time with bytes on the wire, hidden or exposed; None where it is not known."""


def device_recurrence(
    classified: Classified, rows: TimedActivities, exposed: Spans, splits: Iterable[Split]
) -> tuple[RecurrencePart, ...]:
    """Return the parts of a recurrence on a GPU rank, in their order; empty where the trace has none.

    ``rows`` are the activities of the window, ``exposed`` is its exposed communication.
    """
    trace, launch = classified.trace, classified.launch[rows.activity]
    ranges = _ranges(trace)
    if not ranges:
        return ()
    launched = launch != NONE
    time = np.where(launched, np.append(trace.launches.start_ns, NONE)[launch], NONE)
    thread = np.where(launched, np.append(trace.launches.thread, NONE)[launch], NONE)
    computes, communicates = rows.of(*COMPUTE), rows.of(*COMMUNICATION)
    split_of = {split.transfer.activity: split for split in splits}
    parts = []
    for (phase, part), (start, end, range_thread) in ranges.items():
        inside = enclosing_rows((start, end, range_thread), time, thread) != NONE
        computing, sending = inside & computes, inside & communicates
        transfers = intervals.union(rows.start_ns[sending], rows.end_ns[sending])
        own = [split_of.get(activity) for activity in rows.activity[sending].tolist()]
        parts.append(RecurrencePart(
            phase, part, intervals.length_ns(intervals.union(rows.start_ns[computing], rows.end_ns[computing])),
            intervals.length_ns(transfers), intervals.length_ns(intervals.intersection(transfers, exposed)),
            len(own), total([None if split is None else split.transfer.sent_bytes for split in own]),
            total([None if split is None else split.wait_ns for split in own]),
            total([None if split is None else split.wire_ns for split in own]),
        ))  # fmt: skip
    return tuple(row for row in parts if row.compute_ns or row.transfers)


def cpu_recurrence(trace: Trace, window: Window) -> tuple[RecurrencePart, ...]:
    """Return the parts of a recurrence on a CPU rank, in their order; empty where the trace has none.

    Communication is the time that the rank was blocked in waiting for a transfer of the part.
    """
    ranges = _ranges(trace)
    if not ranges:
        return ()
    first, last = window_bounds(trace, window, None)
    start, end, kind, _ = outermost_operators(trace)
    start, end = np.clip(start, first, last), np.clip(end, first, last)
    computes = is_kind(kind, *COMPUTE) & (end > start)
    rows = np.flatnonzero(trace.names_that(_WAITED.fullmatch)[trace.annotations.name])
    waits = trace.annotations.start_ns[rows], trace.annotations.end_ns[rows]
    in_window = (waits[0] >= first) & (waits[1] <= last)
    waits = waits[0][in_window], waits[1][in_window]
    blocked = marked_waits(trace)
    computing = intervals.subtraction(intervals.union(start[computes], end[computes]), blocked)
    parts = []
    for (phase, part), (range_start, range_end, _) in ranges.items():
        spans = intervals.union(np.clip(range_start, first, last), np.clip(range_end, first, last))
        count = int(np.count_nonzero(intervals.contains(spans, waits[0])))
        blocked_ns = intervals.length_ns(intervals.intersection(blocked, spans))
        compute_ns = intervals.length_ns(intervals.intersection(computing, spans))
        parts.append(RecurrencePart(phase, part, compute_ns, blocked_ns, blocked_ns, count, None, None, None))
    return tuple(row for row in parts if row.compute_ns or row.transfers)


def _ranges(trace: Trace) -> dict[tuple[str, str], tuple[Int64, Int64, Int64]]:
    """Return starts and ends (ns) and threads of the ranges of each (pass, part), in the order of `RecurrencePart`.

    Empty without a local scan.
    """
    annotations = trace.annotations
    keys: dict[tuple[str, str], list[int]] = {}
    for index, name in enumerate(trace.names):
        if match := _COMPUTED.fullmatch(name):
            keys.setdefault((match[1], "output" if match[2] == "block" else match[2]), []).append(index)
        elif match := _SENT.fullmatch(name):
            keys.setdefault(("", match[1]), []).append(index)
    order = [(phase, part) for phase in ("fwd", "bwd") for part in ("local", "state", "output")]
    order += [("", "halo"), ("", "heads")]
    if not any(part == "local" for _, part in keys):
        return {}
    result = {}
    for key in order:
        rows = np.flatnonzero(np.isin(annotations.name, keys.get(key, [])))
        if len(rows):
            result[key] = annotations.start_ns[rows], annotations.end_ns[rows], annotations.thread[rows]
    return result
