"""Memory over time on the page, where the traces hold what the allocators did."""

from __future__ import annotations

import numpy as np

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.memory import MemoryTimeline, memory_timelines
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Table
from ringprof.report.timeline import origins_of
from ringprof.trace.columns import NONE, Int64

MOST_POINTS = 2_000
"""Of a line: a screen has no more columns."""
_COLUMNS = (
    Column("rank", "count"), Column("memory"), Column("most allocated", "MiB"), Column("at", "time"),
    Column("most reserved", "MiB"), Column("allocations and releases", "count"),
)  # fmt: skip


def html(found: Findings, page: PageContext) -> Content | None:
    """A line a rank and memory, and its peak; None where nothing was recorded, and of very many ranks."""
    held = list(memory_timelines(found.attribution)) if found.lists_steps or found.attribution.on_cpu else []
    if not held:
        return None
    origin = origins_of(found.attribution)
    lines = {name_of(one, held): _points(one, origin[one.rank]) for one in held}
    rows = [
        [one.rank, one.memory, int(one.allocated_bytes[one.peak()]), int(one.time_ns[one.peak()]) - origin[one.rank],
         most if (most := int(one.reserved_bytes.max())) != NONE else None, len(one.time_ns)]
        for one in held
    ]  # fmt: skip
    return Content(page.figures.memory(lines), [Table("", _COLUMNS, rows, "run.memory()").page()])


def name_of(one: MemoryTimeline, among: list[MemoryTimeline]) -> str:
    """Of its line: the memory is named where ranks have several."""
    several = len({other.memory for other in among if other.rank == one.rank}) > 1
    return f"rank {one.rank}" + (f", {one.memory}" if several else "")


def _points(one: MemoryTimeline, origin: int) -> list[tuple[float, float]]:
    """(ms, MiB) from each of which on it is so; of many the largest of each stretch, and the last."""
    kept = thinned(one.allocated_bytes, MOST_POINTS)
    times, sizes = (one.time_ns[kept] - origin) / 1e6, one.allocated_bytes[kept] / 2**20
    return list(zip(times.tolist(), sizes.tolist(), strict=True))


def thinned(values: Int64, most: int) -> Int64:
    """Places of at most ``most`` values, among them the first and the largest of each stretch of neighbours."""
    if len(values) <= most:
        return np.arange(len(values))
    bounds = np.linspace(0, len(values), most // 2 + 1).astype(np.int64)[:-1]
    ends = [*bounds[1:].tolist(), len(values)]
    largest = [at + int(np.argmax(values[at:end])) for at, end in zip(bounds.tolist(), ends, strict=True)]
    return np.array(sorted({*bounds.tolist(), *largest}), np.int64)
