"""What was odd in the input, and what could not be told."""

from __future__ import annotations

from ringprof.analysis.findings.findings import Findings
from ringprof.report.page.document import Content, PageContext, PageTable, number, text
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, clean


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """A line a warning, with its code."""
    lines = []
    for warning in found.attribution.warnings:
        times = f" ({warning.count} times)" if warning.count > 1 else ""
        where = f"rank {warning.rank}: " if warning.rank is not None else ""
        lines.append(f"{where}{clean(warning.message)}{times} [{clean(warning.code)}]")
    if not lines:
        return []
    return [style.paint("warnings", "bold yellow") + "\n" + style.wrap("\n".join(lines), "yellow", indent=2)]


def html(found: Findings, page: PageContext) -> Content | None:
    """A row a warning."""
    rows = [
        [text("all" if one.rank is None else one.rank), text(one.code), text(one.message), number(one.count, 0)]
        for one in found.attribution.warnings
    ]  # fmt: skip
    return Content(tables=[PageTable(["rank", "code", "what", "times"], rows)]) if rows else None
