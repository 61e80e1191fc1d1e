"""FLOPs and time of attention and of matrix products in one rank's window, where the profiler recorded shapes.

Operators nest: an attention operator calls the operator of its kernel, and an operator on DTensors, with global shapes,
calls the same operator on the local shard. FLOPs are those of the innermost operators; kernels belong to the outermost.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.kinds import ATTENTION, COMPUTE_PARTS, is_kind
from ringprof.analysis.timeline.cpu import outermost_operators, window_bounds
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.timeline.window import Window
from ringprof.trace.columns import FLOP_DTYPES, NONE, FlopRecords, Int8, Int64, Trace, enclosing_rows

RATED_PARTS = {"attention": ATTENTION, "matrix_products": COMPUTE_PARTS["matrix_products"]}
"""Parts of a step whose FLOPs can be known, with their kinds."""


class PartWork(msgspec.Struct, frozen=True):
    """FLOPs and time of one part of a step on one rank."""

    part: str
    """Key of `RATED_PARTS`."""
    time_ns: int
    """Union of the part's kernels (on CPU: operators) within the window."""
    covered_ns: int
    """Union of those kernels whose FLOPs are known."""
    flops: int
    """FLOPs of the operators that launched the kernels."""
    dense_flops: int
    """FLOPs of attention without a recorded mask, counted as dense: an upper bound."""
    flops_by_dtype: dict[str, int]
    """FLOPs by `FLOP_DTYPES`, without operators whose data type is not recorded."""


def device_work(classified: Classified, rows: TimedActivities) -> tuple[PartWork, ...]:
    """Return the work that launched ``rows``, the window's activities on one device; empty without recorded shapes."""
    records = classified.trace.flop_records
    if not len(records.start_ns):
        return ()
    (root_of_record, innermost, root_row), part = find_nesting(records), _part_numbers(rows.kind)
    root = owners_of_activities(classified, rows.activity, root_row, root_of_record)
    # The last element stands for activities outside of all operators.
    part_of_root = np.full(len(root_row) + 1, NONE, np.int64)
    # Attention is assigned last: matrix products inside an attention operator are part of it.
    for number in reversed(range(len(RATED_PARTS))):
        part_of_root[root[(root != NONE) & (part == number)]] = number
    covered = (part != NONE) & (part_of_root[root] == part)
    return _work_of_parts(
        records, np.where(innermost, part_of_root[root_of_record], NONE), (rows.start_ns, rows.end_ns, part, covered)
    )


def cpu_work(trace: Trace, window: Window) -> tuple[PartWork, ...]:
    """Return the work of the window's operators on a CPU rank; empty without recorded shapes."""
    records = trace.flop_records
    if not len(records.start_ns):
        return ()
    root, innermost, root_row = find_nesting(records)
    window_start, window_end = window_bounds(trace, window, None)
    start, end, kind, thread = outermost_operators(trace)
    part, covered = _part_numbers(kind), np.zeros(len(kind), np.bool_)
    begins = records.start_ns[root_row]
    enclosing = enclosing_rows((start, end, thread), begins, records.thread[root_row])
    enclosing[(begins < window_start) | (begins >= window_end)] = NONE
    part_of_root = np.append(part, NONE)[enclosing]
    covered[enclosing[enclosing != NONE]] = True
    clipped = np.clip(start, window_start, window_end), np.clip(end, window_start, window_end)
    return _work_of_parts(records, np.where(innermost, part_of_root[root], NONE), (*clipped, part, covered))


def _part_numbers(kind: Int8) -> Int64:
    """Return the index of each row's part in `RATED_PARTS`, or `NONE`."""
    part = np.full(len(kind), NONE, np.int64)
    for number, kinds in enumerate(RATED_PARTS.values()):
        part[is_kind(kind, *kinds)] = number
    return part


_Rows = tuple[Int64, Int64, Int64, npt.NDArray[np.bool_]]
"""Start, end and part of the timed activities or operators, and whether their FLOPs are known."""


def _work_of_parts(records: FlopRecords, part_of_record: Int64, rows: _Rows) -> tuple[PartWork, ...]:
    """Compute `PartWork` for every part; ``part_of_record`` is `NONE` for operators that do not count."""
    parts = []
    for number, name in enumerate(RATED_PARTS):
        start, end, part, flops_known = rows
        in_part, records_of_part = part == number, part_of_record == number
        covered = in_part & flops_known
        by_dtype = {
            dtype: _sum_flops(records, records_of_part & (records.dtype == code))
            for code, dtype in enumerate(FLOP_DTYPES)
        }
        parts.append(
            PartWork(
                part=name,
                time_ns=intervals.length_ns(intervals.union(start[in_part], end[in_part])),
                covered_ns=intervals.length_ns(intervals.union(start[covered], end[covered])),
                flops=_sum_flops(records, records_of_part),
                dense_flops=_sum_flops(records, records_of_part & (records.causal == NONE)),
                flops_by_dtype={dtype: flops for dtype, flops in by_dtype.items() if flops},
            )
        )
    return tuple(parts)


def _sum_flops(records: FlopRecords, chosen: npt.NDArray[np.bool_]) -> int:
    """Sum the FLOPs of the chosen records."""
    # Python integers: the sum of many counts may exceed 64 bits.
    return sum(records.flops[chosen].tolist())


def find_nesting(records: FlopRecords) -> tuple[Int64, npt.NDArray[np.bool_], Int64]:
    """Find which records lie inside others on their thread.

    Return for each record the number of the outermost operator around it (its own if nothing encloses it) and whether
    it contains no other; then the row of each outermost operator, ascending by thread, then by start.
    """
    order = np.lexsort((-records.end_ns, records.start_ns, records.thread))
    start, end, thread = records.start_ns[order], records.end_ns[order], records.thread[order]
    # Find the latest end so far by its rank among all ends. Ranks go by thread first: earlier threads rank below.
    by_end = np.lexsort((end, thread))
    rank_of_end = np.empty(len(order), np.int64)
    rank_of_end[by_end] = np.arange(len(order))
    latest_ending = by_end[np.maximum.accumulate(rank_of_end)[:-1]]
    outermost = np.append(True, (thread[latest_ending] != thread[1:]) | (end[latest_ending] <= start[1:]))
    holds_next = np.append((thread[1:] == thread[:-1]) & (start[1:] < end[:-1]), False)
    root, innermost = np.empty(len(order), np.int64), np.empty(len(order), np.bool_)
    root[order], innermost[order] = np.cumsum(outermost) - 1, ~holds_next
    return root, innermost, order[outermost]


def owners_of_activities(classified: Classified, activities: Int64, chosen: Int64, number_of: Int64) -> Int64:
    """Return the operator that each activity was launched in, else the one that it names, else `NONE`.

    ``chosen``: rows of operators with FLOPs, disjoint on each thread; the result holds indices into it. ``number_of``:
    for each operator with FLOPs, the index that an activity which names it gets.
    """
    trace, records = classified.trace, classified.trace.flop_records
    owner = np.full(len(activities), NONE, np.int64)
    launch = classified.launch[activities]
    with_launch = np.flatnonzero(launch != NONE)
    launched = launch[with_launch]
    spans = records.start_ns[chosen], records.end_ns[chosen], records.thread[chosen]
    owner[with_launch] = enclosing_rows(spans, trace.launches.start_ns[launched], trace.launches.thread[launched])
    named = np.flatnonzero((launch == NONE) & (trace.activities.external_id[activities] != NONE))
    ids = np.flatnonzero(records.external_id != NONE)
    ids = ids[np.argsort(records.external_id[ids], kind="stable")]
    if len(named) and len(ids):
        wanted, known = trace.activities.external_id[activities[named]], records.external_id[ids]
        index = np.minimum(np.searchsorted(known, wanted), len(ids) - 1)
        equal = known[index] == wanted
        owner[named[equal]] = number_of[ids[index[equal]]]
    return owner
