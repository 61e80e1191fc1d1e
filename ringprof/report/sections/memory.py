"""Memory over time on the page, where the traces hold allocator events."""

from __future__ import annotations

import numpy as np

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.memory import MemoryTimeline, memory_timelines
from ringprof.report.listing import RANK, Field, FieldTable
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Table
from ringprof.report.timeline import origins_of
from ringprof.trace.columns import NONE, Int64

MAX_POINTS = 2_000
"""Largest number of points per line: a screen has no more columns."""
_COLUMNS = (
    Column("rank", "count"), Column("memory"), Column("most allocated", "MiB"), Column("at", "time"),
    Column("most reserved", "MiB"), Column("allocations and releases", "count"),
)  # fmt: skip


MEMORY = FieldTable(
    "memory",
    lambda findings: [
        {"rank": pool.rank, "memory": pool.memory, "time_ns": time, "allocated_bytes": allocated,
         "reserved_bytes": None if reserved == NONE else reserved}
        for pool in memory_timelines(findings.attribution)
        for time, allocated, reserved in zip(
            pool.time_ns.tolist(), pool.allocated_bytes.tolist(), pool.reserved_bytes.tolist(), strict=True
        )
    ],
    (
        RANK,
        Field("memory", "memory pool: cuda and the device's number, or host"),
        Field("time_ns", "unix time by the rank's own clock, from which on the values hold"),
        Field("allocated_bytes", "bytes in use"),
        Field("reserved_bytes", "bytes in use or kept for later use; missing for the host"),
    ),
)  # fmt: skip


def html(findings: Findings, page: PageContext) -> Content | None:
    """Draw one line per rank and memory, with a table of peaks; None without recorded memory or for very many ranks."""
    pools = list(memory_timelines(findings.attribution)) if findings.lists_steps or findings.attribution.on_cpu else []
    if not pools:
        return None
    origin = origins_of(findings.attribution)
    lines = {line_name(pool, pools): _points(pool, origin[pool.rank]) for pool in pools}
    rows = [
        [pool.rank, pool.memory, int(pool.allocated_bytes[pool.peak()]),
         int(pool.time_ns[pool.peak()]) - origin[pool.rank],
         most if (most := int(pool.reserved_bytes.max())) != NONE else None, len(pool.time_ns)]
        for pool in pools
    ]  # fmt: skip
    return Content(page.figures.memory(lines), [Table("", _COLUMNS, rows, "run.memory()").page()])


def line_name(pool: MemoryTimeline, pools: list[MemoryTimeline]) -> str:
    """Return the name of a line: the rank, and the memory if the rank has several."""
    several = len({other.memory for other in pools if other.rank == pool.rank}) > 1
    return f"rank {pool.rank}" + (f", {pool.memory}" if several else "")


def _points(pool: MemoryTimeline, origin: int) -> list[tuple[float, float]]:
    """Build the points (ms, MiB) of a line; of many, only the largest of each stretch and the stretches' starts."""
    kept = thinned_indices(pool.allocated_bytes, MAX_POINTS)
    times, sizes = (pool.time_ns[kept] - origin) / 1e6, pool.allocated_bytes[kept] / 2**20
    return list(zip(times.tolist(), sizes.tolist(), strict=True))


def thinned_indices(values: Int64, max_count: int) -> Int64:
    """Return the indices of at most ``max_count`` values: the first and the largest of each stretch of neighbours."""
    if len(values) <= max_count:
        return np.arange(len(values))
    bounds = np.linspace(0, len(values), max_count // 2 + 1).astype(np.int64)[:-1]
    ends = [*bounds[1:].tolist(), len(values)]
    largest = [start + int(np.argmax(values[start:end])) for start, end in zip(bounds.tolist(), ends, strict=True)]
    return np.array(sorted({*bounds.tolist(), *largest}), np.int64)
