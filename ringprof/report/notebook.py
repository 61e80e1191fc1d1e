"""How objects show themselves in a notebook: tables as plain HTML, in which every name is text; and pages in a cell."""

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

_MOST_ROWS = 16


_HEAD, _HEADING, _ROW, _TALLEST_TABLE = 150, 130, 31, 590
"""Pixels of a page's head, of a section's heading, of a row, and of a table at most."""


class View:
    """A page in a cell, with its figures to zoom and to hover over.

    It stands in a frame of its own, which holds all that it needs and may fetch nothing: it works offline, in every
    notebook, beside whatever else the notebook has loaded.
    """

    def __init__(self, document: Document, height: int | None = None) -> None:
        self.html = render(document)
        """The page, as `to_html` returns pages."""
        self._height = height or _HEAD + sum(map(_height, document.sections))
        self._shows = ", ".join(section.title.lower() for section in document.sections)

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {self._height}px; border: 0"
        return f'<iframe sandbox="allow-scripts allow-downloads" style="{style}" srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        return f"<ringprof view of {self._shows}: a notebook shows it; .html is the page>"


def _height(section: PageSection) -> int:
    content = section.content
    figure = getattr(content.figure, "height", None) or 0
    if figure == 0 and content.figure is not None:
        figure = sum(child.height for child in content.figure.children)
    tables = sum(min(_TALLEST_TABLE, _ROW * (len(table.rows) + 3)) for table in content.tables)
    return _HEADING + figure + tables + _ROW * len(content.lines)


def findings_html(found: Findings) -> str:
    """Header, verdict, and a row a rank."""
    table = breakdown.rank_table(breakdown.json(found)["ranks"], found.summary.communication)
    verdict = "".join(f"<li>{_text(line)}</li>" for line in found.verdict)
    if found.next_step:
        verdict += f"<li><b>{_text(found.next_step.text)}</b></li>"
    header = _text(header_of(found.attribution, found.summary))
    left = len(table.rows) - _MOST_ROWS
    more = f"and {left} more ranks: run.breakdown() has all" if left > 0 else ""
    hint = "<small>run.view(): timeline and waterfall to zoom into</small>"
    return f"<div><b>{header}</b><ul>{verdict}</ul>{_table(table, _MOST_ROWS)}{more}{hint}</div>"


def comparison_html(found: Comparison) -> str:
    """Show what is not compared and why, then a row per figure and a column per entry with its ratio to the first."""
    notices = "".join(f"<p>{_text(line)}</p>" for line in work_notices(found))
    return f"<div>{notices}{_table(figure_table(found))}</div>"


def _text(value: str) -> str:
    return escape(clean(value))


def _table(table: PageTable, most: int | None = None) -> str:
    def cells(tag: str, texts: Iterable[str]) -> str:
        return "".join(f'<{tag} style="text-align: right">{_text(text)}</{tag}>' for text in texts)

    body = "".join(f"<tr>{cells('td', [cell.text for cell in row])}</tr>" for row in table.rows[:most])
    return f"<table><thead><tr>{cells('th', table.titles)}</tr></thead><tbody>{body}</tbody></table>"
