"""Kernels, copies and sets by name: time, calls, and what of it was hidden."""

from __future__ import annotations

from ringprof.analysis.findings.findings import Findings
from ringprof.json_object import JsonObject
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle, duration, short_name

MOST_KERNELS_LISTED = 25

COLUMNS = (
    Column("kernel", folds=True), Column("kind", drop=3), Column("time", "time"), Column("of all", "share"),
    Column("calls", "rough count"), Column("mean", "short time", 1), Column("hidden", "rough share"),
    Column("exposed", "time", 2),
)  # fmt: skip
_PAGE_COLUMNS = (
    Column("name"), Column("kind"), Column("calls", "count"), Column("", "time", on_page="ms"),
    Column("mean", "short time", on_page="mean µs"), Column("share", "share", on_page="% of all"),
    Column("hidden", "share", on_page="% hidden"), Column("exposed", "time"),
)  # fmt: skip


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """The longest kernels, means over ranks."""
    kernels, count = found.attribution.kernels, len(found.attribution.ranks)
    if not kernels:
        return [style.wrap("kernels: a CPU trace holds no activities of a device")]
    whole = sum(one.time_ns for one in kernels) or 1
    rows = [
        [short_name(one.name), LABELS[one.kind], one.time_ns / count, one.time_ns / whole, one.calls / count,
         one.mean_ns, one.hidden, None if one.exposed_ns is None else one.exposed_ns / count]
        for one in kernels
    ]  # fmt: skip
    title = "kernels" + (f", mean of {count} ranks" if count > 1 else "")
    return [Table(title, COLUMNS, rows, "--all").listed(style, listing, MOST_KERNELS_LISTED)]


def items(found: Findings) -> list[JsonObject]:
    """For JSON: a name and kind an item, over all ranks."""
    return [
        {"name": one.name, "kind": one.kind, "calls": one.calls, "time_ns": one.time_ns, "hidden_share": one.hidden,
         "exposed_ns": one.exposed_ns, "worst_rank": one.worst_rank, "worst_ns": one.worst_ns}
        for one in found.attribution.kernels
    ]  # fmt: skip


def html(found: Findings, page: PageContext) -> Content | None:
    """A row a name and kind, over all ranks; None on CPU."""
    kernels = found.attribution.kernels
    if not kernels:
        return None
    whole = sum(one.time_ns for one in kernels) or 1
    rows = [
        [one.name, LABELS[one.kind], one.calls, one.time_ns, one.mean_ns, one.time_ns / whole, one.hidden,
         one.exposed_ns]
        for one in kernels
    ]  # fmt: skip
    other = [f"{short_name(one.name)} {duration(one.time_ns)}" for one in found.attribution.largest_of_other]
    lines = [f"Largest of {LABELS['other']}: {'; '.join(other)}."] if other else []
    return Content(tables=[Table("", _PAGE_COLUMNS, rows, "run.kernels()").page()], lines=lines)
