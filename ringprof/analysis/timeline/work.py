"""FLOPs and time of attention and of matrix products in one rank's window, where the profiler recorded shapes.

Operators nest: an attention operator calls the one of its kernel, and an operator on DTensors, with global shapes, the
same one on the local shard. FLOPs are those of the innermost operators; kernels belong to the outermost.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.kinds import ATTENTION, COMPUTE_PARTS, are
from ringprof.analysis.timeline.cpu import outermost_operators, window_bounds
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.timeline.window import Window
from ringprof.trace.columns import FLOP_DTYPES, NONE, FlopRecords, Int8, Int64, Trace

RATED_PARTS = {"attention": ATTENTION, "matrix_products": COMPUTE_PARTS["matrix_products"]}
"""Parts of a step whose FLOPs can be known, and their kinds."""


class PartWork(msgspec.Struct, frozen=True):
    """One part of a step on one rank."""

    part: str
    """Key of `RATED_PARTS`."""
    time_ns: int
    """Union of its kernels, on CPU of its operators, within the window."""
    covered_ns: int
    """Union of those whose FLOPs are known."""
    flops: int
    """FLOPs of the operators that launched them."""
    dense_flops: int
    """FLOPs that are counted dense because the attention mask is not recorded: an upper bound."""
    flops_by_dtype: dict[str, int]
    """FLOPs by `FLOP_DTYPES`; those whose data type is not recorded are left out."""


class _Nesting(NamedTuple):
    """How the operators with FLOPs nest."""

    root: Int64
    """Number of the outermost operator around each record, its own where there is none around it."""
    innermost: npt.NDArray[np.bool_]
    """Whether no other record lies in it."""
    root_row: Int64
    """Row of each outermost operator, by number: ascending by thread, then by start."""


def device_work(classified: Classified, rows: TimedActivities) -> tuple[PartWork, ...]:
    """Return the work that launched ``rows``, the window's activities on one device; empty without shapes."""
    records = classified.trace.flop_records
    if not len(records.start_ns):
        return ()
    nesting, part = _nest(records), _part_of(rows.kind)
    root = _root_of_activities(classified, rows.activity, nesting)
    # The last place stands for activities outside of all operators.
    part_of_root = np.full(len(nesting.root_row) + 1, NONE, np.int64)
    # Attention comes last: matrix products inside an attention operator are part of it.
    for number in reversed(range(len(RATED_PARTS))):
        part_of_root[root[(root != NONE) & (part == number)]] = number
    covered = (part != NONE) & (part_of_root[root] == part)
    return _parts(records, nesting, part_of_root, (rows.start_ns, rows.end_ns, part, covered))


def cpu_work(trace: Trace, window: Window) -> tuple[PartWork, ...]:
    """Return the work of the window's operators on a CPU rank; empty without shapes."""
    records = trace.flop_records
    if not len(records.start_ns):
        return ()
    nesting = _nest(records)
    first, last = window_bounds(trace, window, None)
    start, end, kind, thread = outermost_operators(trace)
    part, covered = _part_of(kind), np.zeros(len(kind), np.bool_)
    begins = records.start_ns[nesting.root_row]
    holder = _holders((start, end, thread), begins, records.thread[nesting.root_row])
    holder[(begins < first) | (begins >= last)] = NONE
    part_of_root = np.append(part, NONE)[holder]
    covered[holder[holder != NONE]] = True
    clipped = np.clip(start, first, last), np.clip(end, first, last)
    return _parts(records, nesting, part_of_root, (*clipped, part, covered))


def _part_of(kind: Int8) -> Int64:
    """Return the number of each row's part among `RATED_PARTS`, or `NONE`."""
    part = np.full(len(kind), NONE, np.int64)
    for number, kinds in enumerate(RATED_PARTS.values()):
        part[are(kind, *kinds)] = number
    return part


_Rows = tuple[Int64, Int64, Int64, npt.NDArray[np.bool_]]
"""Start, end and part of the timed activities or operators, and whether their FLOPs are known."""


def _parts(records: FlopRecords, nesting: _Nesting, part_of_root: Int64, rows: _Rows) -> tuple[PartWork, ...]:
    """Sum up every part; ``part_of_root`` is `NONE` for outermost operators outside the window."""
    part_of_record = np.where(nesting.innermost, part_of_root[nesting.root], NONE)
    parts = []
    for number, name in enumerate(RATED_PARTS):
        start, end, part, known = rows
        mine, counted = part == number, part_of_record == number
        covered = mine & known
        by_dtype = {dtype: _total(records, counted & (records.dtype == code)) for code, dtype in enumerate(FLOP_DTYPES)}
        parts.append(
            PartWork(
                part=name,
                time_ns=intervals.length_ns(intervals.union(start[mine], end[mine])),
                covered_ns=intervals.length_ns(intervals.union(start[covered], end[covered])),
                flops=_total(records, counted),
                dense_flops=_total(records, counted & (records.causal == NONE)),
                flops_by_dtype={dtype: flops for dtype, flops in by_dtype.items() if flops},
            )
        )
    return tuple(parts)


def _total(records: FlopRecords, chosen: npt.NDArray[np.bool_]) -> int:
    # Python's integers: the sum of many counts may be beyond 64 bits.
    return sum(records.flops[chosen].tolist())


def _nest(records: FlopRecords) -> _Nesting:
    """Tell which records lie in others on their thread."""
    order = np.lexsort((-records.end_ns, records.start_ns, records.thread))
    start, end, thread = records.start_ns[order], records.end_ns[order], records.thread[order]
    # The latest end so far as its place among all ends by thread, so that earlier threads' are below.
    by_end = np.lexsort((end, thread))
    place = np.empty(len(order), np.int64)
    place[by_end] = np.arange(len(order))
    latest = by_end[np.maximum.accumulate(place)[:-1]]
    outermost = np.append(True, (thread[latest] != thread[1:]) | (end[latest] <= start[1:]))
    holds_next = np.append((thread[1:] == thread[:-1]) & (start[1:] < end[:-1]), False)
    root, innermost = np.empty(len(order), np.int64), np.empty(len(order), np.bool_)
    root[order], innermost[order] = np.cumsum(outermost) - 1, ~holds_next
    return _Nesting(root, innermost, order[outermost])


def _root_of_activities(classified: Classified, activities: Int64, nesting: _Nesting) -> Int64:
    """Return the outermost operator that each activity was launched in, else the one that it names; or `NONE`."""
    trace, records = classified.trace, classified.trace.flop_records
    root = np.full(len(activities), NONE, np.int64)
    launch = classified.launch[activities]
    joined = np.flatnonzero(launch != NONE)
    rows, launched = nesting.root_row, launch[joined]
    roots = records.start_ns[rows], records.end_ns[rows], records.thread[rows]
    root[joined] = _holders(roots, trace.launches.start_ns[launched], trace.launches.thread[launched])
    named = np.flatnonzero((launch == NONE) & (trace.activities.external_id[activities] != NONE))
    ids = np.flatnonzero(records.external_id != NONE)
    ids = ids[np.argsort(records.external_id[ids], kind="stable")]
    if len(named) and len(ids):
        wanted, known = trace.activities.external_id[activities[named]], records.external_id[ids]
        place = np.minimum(np.searchsorted(known, wanted), len(ids) - 1)
        equal = known[place] == wanted
        root[named[equal]] = nesting.root[ids[place[equal]]]
    return root


def _holders(rows: tuple[Int64, Int64, Int64], points_ns: Int64, thread: Int64) -> Int64:
    """Return the row that holds each point, or `NONE`; ``rows`` are start, end and thread of disjoint intervals."""
    start, end, row_thread = rows
    threads, times = np.append(row_thread, thread), np.append(start, points_ns)
    is_point = np.arange(len(times)) >= len(start)
    order = np.lexsort((is_point, times, threads))
    # The last interval that begins at or before each place in this order.
    last = np.maximum.accumulate(np.where(is_point[order], NONE, np.arange(len(order))))
    before = np.full(len(times), NONE, np.int64)
    before[order] = np.where(last == NONE, NONE, order[last])
    row = before[len(start) :]
    held = row != NONE
    held[held] = (row_thread[row[held]] == thread[held]) & (points_ns[held] < end[row[held]])
    return np.where(held, row, NONE)
