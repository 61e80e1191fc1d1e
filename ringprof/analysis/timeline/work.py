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
from ringprof.trace.columns import FLOP_DTYPES, NONE, FlopRecords, Int8, Int64, Trace, distinct

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
    part_of_root = np.full(len(nesting.root_row), NONE, np.int64)
    for number in distinct(thread):
        mine = np.flatnonzero(thread == number)
        mine = mine[np.argsort(start[mine], kind="stable")]
        roots = np.flatnonzero(records.thread[nesting.root_row] == number)
        begins = records.start_ns[nesting.root_row[roots]]
        inside, place = _containing(start[mine], end[mine], begins)
        inside &= (begins >= first) & (begins < last)
        holders = mine[place[inside]]
        part_of_root[roots[inside]] = part[holders]
        covered[holders] = True
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
    outermost = np.ones(len(order), np.bool_)
    for number in distinct(thread):
        mine = np.flatnonzero(thread == number)
        outermost[mine[1:]] = start[mine[1:]] >= np.maximum.accumulate(end[mine])[:-1]
    holds_next = (thread[1:] == thread[:-1]) & (start[1:] < end[:-1])
    root, innermost = np.empty(len(order), np.int64), np.empty(len(order), np.bool_)
    root[order] = np.cumsum(outermost) - 1
    innermost[order] = ~np.append(holds_next, False)
    return _Nesting(root, innermost, order[outermost])


def _root_of_activities(classified: Classified, activities: Int64, nesting: _Nesting) -> Int64:
    """Return the outermost operator that each activity was launched in, else the one that it names; or `NONE`."""
    trace, records = classified.trace, classified.trace.flop_records
    root = np.full(len(activities), NONE, np.int64)
    launch = classified.launch[activities]
    joined = np.flatnonzero(launch != NONE)
    launched = trace.launches.start_ns[launch[joined]]
    on_thread = trace.launches.thread[launch[joined]]
    for thread in distinct(records.thread):
        mine = np.flatnonzero(on_thread == thread)
        roots = np.flatnonzero(records.thread[nesting.root_row] == thread)
        spans = nesting.root_row[roots]
        inside, place = _containing(records.start_ns[spans], records.end_ns[spans], launched[mine])
        root[joined[mine[inside]]] = roots[place[inside]]
    named = np.flatnonzero((launch == NONE) & (trace.activities.external_id[activities] != NONE))
    ids = np.flatnonzero(records.external_id != NONE)
    ids = ids[np.argsort(records.external_id[ids], kind="stable")]
    if len(named) and len(ids):
        wanted, known = trace.activities.external_id[activities[named]], records.external_id[ids]
        place = np.minimum(np.searchsorted(known, wanted), len(ids) - 1)
        equal = known[place] == wanted
        root[named[equal]] = nesting.root[ids[place[equal]]]
    return root


def _containing(start_ns: Int64, end_ns: Int64, points_ns: Int64) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Tell whether each point lies in one of disjoint intervals, ascending, and in which."""
    place = np.searchsorted(start_ns, points_ns, side="right") - 1
    if not len(start_ns):
        return np.zeros(len(points_ns), np.bool_), place
    return (place >= 0) & (points_ns < end_ns[place]), place
