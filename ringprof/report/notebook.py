"""Notebook representations of objects: tables as plain HTML with every name escaped, and pages inside a cell."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ringprof.analysis.findings.comparison import Comparison
from ringprof.analysis.findings.findings import Findings
from ringprof.report.comparison import work_notices
from ringprof.report.page.document import Document, PageSection, PageTable
from ringprof.report.page.html import render
from ringprof.report.page.pages import figure_table
from ringprof.report.sections import breakdown
from ringprof.report.terminal import header_of
from ringprof.report.text import clean

_MAX_ROWS = 16


_HEADER_PIXELS, _HEADING_PIXELS, _ROW_PIXELS, _MAX_TABLE_PIXELS = 150, 130, 31, 590
"""Heights in pixels: a page's header, a section's heading, a row, and the tallest table."""


class View:
    """A page inside a notebook cell, with interactive figures.

    The page is in an ``iframe`` that contains everything it needs and may fetch nothing. It works offline, in every
    notebook, whatever else the notebook has loaded.
    """

    def __init__(self, document: Document, height: int | None = None) -> None:
        self.html = render(document)
        """The page as text, the same as `to_html` returns."""
        self._height = height or _HEADER_PIXELS + sum(map(_section_height, document.sections))
        self._shows = ", ".join(section.title.lower() for section in document.sections)

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {self._height}px; border: 0"
        return f'<iframe sandbox="allow-scripts allow-downloads" style="{style}" srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        return f"<ringprof view of {self._shows}: a notebook shows it; .html is the page>"


def _section_height(section: PageSection) -> int:
    content = section.content
    figure = getattr(content.figure, "height", None) or 0
    if figure == 0 and content.figure is not None:
        figure = sum(child.height for child in content.figure.children)
    figure += sum(_ROW_PIXELS * (len(chart.rows) + 3) for chart in content.charts)
    tables = sum(min(_MAX_TABLE_PIXELS, _ROW_PIXELS * (len(table.rows) + 3)) for table in content.tables)
    return _HEADING_PIXELS + figure + tables + _ROW_PIXELS * len(content.lines)


def findings_html(findings: Findings) -> str:
    """Render the header, the verdict and a table with one row per rank."""
    table = breakdown.rank_table(breakdown.json(findings)["ranks"], findings.summary.communication)
    verdict = "".join(f"<li>{_escape(line)}</li>" for line in findings.verdict)
    if findings.next_step:
        verdict += f"<li><b>{_escape(findings.next_step.text)}</b></li>"
    header = _escape(header_of(findings.attribution, findings.summary))
    left_out = len(table.rows) - _MAX_ROWS
    more = f"and {left_out} more ranks: run.breakdown() has all" if left_out > 0 else ""
    hint = "<small>run.view(): timeline and waterfall to zoom into</small>"
    return f"<div><b>{header}</b><ul>{verdict}</ul>{_table(table, _MAX_ROWS)}{more}{hint}</div>"


def comparison_html(comparison: Comparison) -> str:
    """Render what is not compared and why, then one row per figure with each entry's ratio to the first."""
    notices = "".join(f"<p>{_escape(line)}</p>" for line in work_notices(comparison))
    return f"<div>{notices}{_table(figure_table(comparison))}</div>"


def _escape(value: str) -> str:
    return escape(clean(value))


def _table(table: PageTable, max_rows: int | None = None) -> str:
    def cells(tag: str, texts: Iterable[str]) -> str:
        return "".join(f'<{tag} style="text-align: right">{_escape(text)}</{tag}>' for text in texts)

    body = "".join(f"<tr>{cells('td', [cell.text for cell in row])}</tr>" for row in table.rows[:max_rows])
    return f"<table><thead><tr>{cells('th', table.titles)}</tr></thead><tbody>{body}</tbody></table>"
