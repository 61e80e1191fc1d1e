"""The user's own ranges by name: time, and what of their communication was exposed and hidden."""

from __future__ import annotations

from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.json_object import JsonObject
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.text import TextStyle

_MOST_LISTED = 25

COLUMNS = (
    Column("annotation", folds=True), Column("busy", "time"), Column("compute", "time", 3),
    Column("comm", "time"), Column("exposed", "time"), Column("hidden", "rough share"),
    Column("calls", "rough count", 2),
)  # fmt: skip


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """The longest, means over ranks."""
    if not found.annotations:
        return [style.wrap(_NONE)]
    count = len(found.attribution.ranks)
    title = "annotations" + (f", mean of {count} ranks" if count > 1 else "")
    return [Table(title, COLUMNS, _rows(found), "--all").listed(style, listing, _MOST_LISTED)]


_NONE = "annotations: nothing on the device was launched in a range of the user's"


def _rows(found: Findings) -> list[list[Any]]:
    count = len(found.attribution.ranks)
    return [
        [one.name, one.busy_ns / count, one.compute_ns / count, one.communication_ns / count, one.exposed_ns / count,
         one.hidden, one.calls / count]
        for one in found.annotations
    ]  # fmt: skip


def items(found: Findings) -> list[JsonObject]:
    """For JSON: a name an item, sums over all ranks; of very many ranks none, since it reads all again."""
    if not found.lists_steps:
        return []
    return [{**one._asdict(), "hidden_share": one.hidden} for one in found.annotations]


def html(found: Findings, page: PageContext) -> Content | None:
    """A row a name, means over ranks; None where there are none, or very many ranks."""
    if not found.lists_steps or not found.annotations:
        return None
    return Content(tables=[Table("", COLUMNS, _rows(found), "run.annotations()").page()])
