"""Kernels, copies and memory sets by name: time, calls, and how much of it was hidden."""

from __future__ import annotations

from ringprof.analysis.findings.findings import Findings
from ringprof.common.json_object import JsonObject
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle, duration, short_name

MAX_KERNELS_LISTED = 25

COLUMNS = (
    Column("kernel", folds=True), Column("kind", drop=3), Column("time", "time"), Column("of all", "share"),
    Column("calls", "rough count"), Column("mean", "short time", 1), Column("hidden", "rough share"),
    Column("exposed", "time", 2),
)  # fmt: skip
_PAGE_COLUMNS = (
    Column("name", "name"), Column("kind"), Column("calls", "count"), Column("", "time", on_page="ms"),
    Column("mean", "short time", on_page="mean µs"), Column("share", "share", on_page="% of all"),
    Column("hidden", "share", on_page="% hidden"), Column("exposed", "time"),
)  # fmt: skip


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List the longest kernels, as means over ranks."""
    kernels, count = findings.attribution.kernels, len(findings.attribution.ranks)
    if not kernels:
        return [style.wrap("kernels: a CPU trace holds no activities of a device")]
    total_ns = sum(kernel.time_ns for kernel in kernels) or 1
    rows = [
        [short_name(kernel.name), LABELS[kernel.kind], kernel.time_ns / count, kernel.time_ns / total_ns,
         kernel.calls / count, kernel.mean_ns, kernel.hidden,
         None if kernel.exposed_ns is None else kernel.exposed_ns / count]
        for kernel in kernels
    ]  # fmt: skip
    title = "kernels" + (f", mean of {count} ranks" if count > 1 else "")
    return [Table(title, COLUMNS, rows, "--all").listed(style, listing, MAX_KERNELS_LISTED)]


def items(findings: Findings) -> list[JsonObject]:
    """Build the JSON items, one per name and kind, over all ranks."""
    return [
        {"name": kernel.name, "kind": kernel.kind, "calls": kernel.calls, "time_ns": kernel.time_ns,
         "hidden_share": kernel.hidden, "exposed_ns": kernel.exposed_ns, "worst_rank": kernel.worst_rank,
         "worst_ns": kernel.worst_ns}
        for kernel in findings.attribution.kernels
    ]  # fmt: skip


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table with one row per name and kind, over all ranks; None on CPU."""
    kernels = findings.attribution.kernels
    if not kernels:
        return None
    total_ns = sum(kernel.time_ns for kernel in kernels) or 1
    rows = [
        [kernel.name, LABELS[kernel.kind], kernel.calls, kernel.time_ns, kernel.mean_ns, kernel.time_ns / total_ns,
         kernel.hidden, kernel.exposed_ns]
        for kernel in kernels
    ]  # fmt: skip
    largest_of_other = [
        f"{short_name(kernel.name)} {duration(kernel.time_ns)}" for kernel in findings.attribution.largest_of_other
    ]
    lines = [f"Largest of {LABELS['other']}: {'; '.join(largest_of_other)}."] if largest_of_other else []
    return Content(tables=[Table("", _PAGE_COLUMNS, rows, "run.kernels()").page("name")], lines=lines)
