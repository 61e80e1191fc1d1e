"""Kernels by name, on the page only."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.report.page.document import Content
from ringprof.report.tables import Column, Table
from ringprof.report.terms import LABELS
from ringprof.report.timeline import activities_of

_COLUMNS = (
    Column("name"), Column("kind"), Column("calls", "count"), Column("", "time", on_page="ms"),
    Column("mean", "short time", on_page="mean µs"), Column("share", "share", on_page="% of all"),
)  # fmt: skip


def html(found: Findings, report: dict[str, Any], figures: Any) -> Content | None:
    """A row a name and kind, over all ranks; None of very many ranks."""
    if not found.lists_steps:
        return None
    times: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in found.attribution.ranks:
        for one in activities_of(rank.detail):
            times[one.name, one.kind].append(one.end_ns - one.start_ns)
    whole = sum(map(sum, times.values())) or 1
    rows = [
        [name, LABELS[kind], len(spent), sum(spent), sum(spent) / len(spent), sum(spent) / whole]
        for (name, kind), spent in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]
    return Content(tables=[Table("", _COLUMNS, rows).page("--format json")])
