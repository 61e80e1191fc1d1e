"""Warnings: oddities of the input, and figures that could not be determined."""

from __future__ import annotations

from ringprof.analysis.findings.findings import Findings
from ringprof.report.page.document import Content, PageContext, PageTable, number, text
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, clean


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List one warning per line, with its code."""
    lines = []
    for warning in findings.attribution.warnings:
        counted = warning.message.startswith(f"{warning.count} ")
        times = f" ({warning.count} times)" if warning.count > 1 and not counted else ""
        where = f"rank {warning.rank}: " if warning.rank is not None else ""
        lines.append(f"{where}{clean(warning.message)}{times} [{clean(warning.code)}]")
    if not lines:
        return []
    return [style.paint("warnings", "bold yellow") + "\n" + style.wrap("\n".join(lines), "yellow", indent=2)]


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table with one row per warning; None where there are none."""
    rows = [
        [text("all" if warning.rank is None else warning.rank), text(warning.code),
         text(warning.message), number(warning.count)]
        for warning in findings.attribution.warnings
    ]  # fmt: skip
    return Content(tables=[PageTable(["rank", "code", "what", "times"], rows)]) if rows else None
