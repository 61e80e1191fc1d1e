"""The user's own ranges by name: time, and how much of their communication was exposed or hidden."""

from __future__ import annotations

from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.common.json_object import JsonObject
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.text import TextStyle

_MAX_LISTED = 25

COLUMNS = (
    Column("annotation", folds=True), Column("busy", "time"), Column("compute", "time", 3),
    Column("comm", "time"), Column("exposed", "time"), Column("hidden", "rough share"),
    Column("calls", "rough count", 2),
)  # fmt: skip


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List the longest ranges, as means over ranks."""
    if not findings.annotations:
        return [style.wrap(_NOT_ON_CPU if findings.attribution.on_cpu else _NO_ANNOTATIONS)]
    count = len(findings.attribution.ranks)
    title = "annotations" + (f", mean of {count} ranks" if count > 1 else "")
    return [Table(title, COLUMNS, _rows(findings), "--all").listed(style, listing, _MAX_LISTED)]


_NO_ANNOTATIONS = "annotations: nothing on the device was launched in a range of the user's"
_NOT_ON_CPU = "annotations: not on CPU: they are the times of ranges on a device, and a CPU run records none"


def _rows(findings: Findings) -> list[list[Any]]:
    count = len(findings.attribution.ranks)
    return [
        [annotation.name, annotation.busy_ns / count, annotation.compute_ns / count,
         annotation.communication_ns / count, annotation.exposed_ns / count, annotation.hidden,
         annotation.calls / count]
        for annotation in findings.annotations
    ]  # fmt: skip


def items(findings: Findings) -> list[JsonObject]:
    """Build the JSON items, one per name, summed over all ranks.

    The list is empty for very many ranks, whose traces would have to be read again.
    """
    if not findings.lists_steps:
        return []
    return [{**annotation._asdict(), "hidden_share": annotation.hidden} for annotation in findings.annotations]


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table with one row per name, means over ranks; None without ranges or for very many ranks."""
    if not findings.lists_steps or not findings.annotations:
        return None
    return Content(tables=[Table("", COLUMNS, _rows(findings), "run.annotations()").page()])
