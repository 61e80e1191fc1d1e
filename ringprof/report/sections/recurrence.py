"""Section of the report: the parts of a recurrence over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.timeline.recurrence import RecurrencePart
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.text import TextStyle

COLUMNS = (
    Column("", on_page="part"), Column("computing", "time"), Column("communicating", "time"),
    Column("exposed", "time"), Column("transfers", "rough count", 2), Column("MB", "bytes", 1),
    Column("wait", "time", 3), Column("wire", "time", 3), Column("worst\nrank", "count", 4),
    Column("its\nexposed", "time", 4),
)  # fmt: skip
_PASSES = {"fwd": "forward ", "bwd": "backward ", "": ""}
_LABELS = {
    "local": "local scan", "state": "states of other ranks", "output": "output", "halo": "convolution halo",
    "heads": "exchange of heads",
}  # fmt: skip


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Build a table with one row per part, means over ranks; empty where the traces mark no recurrence."""
    rows = _rows(findings)
    if not rows:
        return []
    count = len(findings.attribution.ranks)
    title = "parts of the recurrence" + (f", mean of {count} ranks" if count > 1 else "")
    return [Table(title, COLUMNS, rows).listed(style, listing)]


def _rows(findings: Findings) -> list[list[Any]]:
    """Build one row per part: means over ranks, and the rank that exposes most."""
    ranks = findings.attribution.ranks
    by_part: dict[tuple[str, str], dict[int, RecurrencePart]] = {}
    for rank in ranks:
        for row in rank.recurrence:
            by_part.setdefault((row.phase, row.part), {})[rank.rank] = row
    order = [(phase, part) for phase in _PASSES for part in _LABELS]
    rows: list[list[Any]] = []
    for key in sorted(by_part, key=order.index):
        parts = by_part[key]
        worst = max(parts, key=lambda rank: parts[rank].exposed_ns)
        values = parts.values()

        def mean(numbers: Iterable[int | None]) -> float | None:
            known = list(numbers)
            return None if None in known else sum(filter(None, known)) / len(ranks)

        rows.append([
            f"{_PASSES[key[0]]}{_LABELS[key[1]]}", mean(row.compute_ns for row in values),
            mean(row.communication_ns for row in values), mean(row.exposed_ns for row in values),
            mean(row.transfers for row in values), mean(row.sent_bytes for row in values),
            mean(row.wait_ns for row in values), mean(row.wire_ns for row in values),
            *((worst, parts[worst].exposed_ns) if parts[worst].exposed_ns else (None, None)),
        ])  # fmt: skip
    return rows


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build the table for the page; None where the traces mark no recurrence."""
    rows = _rows(findings)
    return Content(tables=[Table("", COLUMNS, rows).page()]) if rows else None
