"""Matrix products of one rank by shape: calls, time of their kernels and FLOPs, where the profiler recorded shapes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.kinds import is_kind
from ringprof.analysis.timeline.cpu import outermost_operators, window_bounds
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.timeline.window import Window
from ringprof.analysis.timeline.work import find_nesting, owners_of_activities
from ringprof.trace.columns import FLOP_DTYPES, NONE, FlopRecords, Int64, Trace, distinct, enclosing_rows

GEMM = "gemm"


class ProductShape(NamedTuple):
    """Shape and data type of a matrix product: ``batch`` products of (m, k) by (k, n); None where not recorded."""

    batch: int | None
    m: int | None
    n: int | None
    k: int | None
    dtype: str | None


UNKNOWN_SHAPE = ProductShape(None, None, None, None, None)


class Product(NamedTuple):
    """Matrix products of one shape on one rank."""

    shape: ProductShape
    calls: int
    """Number of operator calls; of kernels, where the shape is not known."""
    time_ns: int
    """Sum of the durations of the matrix-product kernels that the calls launched; on CPU, of the calls."""
    flops: int
    """FLOPs of the calls; 0 where the shape is not known."""


def device_products(classified: Classified, rows: TimedActivities) -> tuple[Product, ...]:
    """Return the products among ``rows``, the window's activities on one device; their times sum to the kind's.

    A kernel belongs to the innermost product whose operator launched it. Empty without recorded shapes.
    """
    records = classified.trace.flop_records
    if not len(records.start_ns):
        return ()
    gemm = rows.of(GEMM)
    time_ns = (rows.end_ns - rows.start_ns)[gemm]
    chosen = np.flatnonzero(_innermost_products(records))
    number_of = np.full(len(records.start_ns), NONE, np.int64)
    number_of[chosen] = np.arange(len(chosen))
    owner = owners_of_activities(classified, rows.activity[gemm], chosen, number_of)
    owned = owner != NONE
    time_of_record = np.zeros(len(chosen), np.int64)
    np.add.at(time_of_record, owner[owned], time_ns[owned])
    launching = distinct(owner[owned])
    products = _by_shape(records, chosen[launching], time_of_record[launching])
    unknown = int(np.count_nonzero(~owned))
    return (*products, Product(UNKNOWN_SHAPE, unknown, int(time_ns[~owned].sum()), 0)) if unknown else products


def cpu_products(trace: Trace, window: Window) -> tuple[Product, ...]:
    """Return the products of a CPU rank's window by shape; empty without recorded shapes."""
    records = trace.flop_records
    if not len(records.start_ns):
        return ()
    window_start, window_end = window_bounds(trace, window, None)
    start, end, kind, thread = outermost_operators(trace)
    chosen = np.flatnonzero(
        _innermost_products(records) & (records.start_ns >= window_start) & (records.start_ns < window_end)
    )
    outer = enclosing_rows((start, end, thread), records.start_ns[chosen], records.thread[chosen])
    # Products inside an attention operator are attention.
    chosen = chosen[(outer != NONE) & is_kind(np.append(kind, NONE).astype(np.int8)[outer], GEMM)]
    time_ns = np.minimum(records.end_ns[chosen], window_end) - records.start_ns[chosen]
    return _by_shape(records, chosen, time_ns)


def _innermost_products(records: FlopRecords) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = find_nesting(records)[1] & (records.m != NONE)
    return mask


def _by_shape(records: FlopRecords, chosen: Int64, time_ns: Int64) -> tuple[Product, ...]:
    """Sum up the chosen records by shape and data type."""
    columns = (records.batch, records.m, records.n, records.k, records.dtype, records.flops)
    sums: dict[ProductShape, Product] = {}
    for batch, m, n, k, dtype, flops, time in zip(
        *(column[chosen].tolist() for column in columns), time_ns.tolist(), strict=True
    ):
        shape = ProductShape(batch, m, n, k, FLOP_DTYPES[dtype] if dtype != NONE else None)
        before = sums.get(shape, Product(shape, 0, 0, 0))
        sums[shape] = Product(shape, before.calls + 1, before.time_ns + time, before.flops + flops)
    return tuple(sums.values())
