"""How objects show themselves in a notebook: the page's tables as plain HTML, in which every name is text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ringprof.analysis.findings.comparison import Comparison
from ringprof.analysis.findings.findings import Findings
from ringprof.report.page.document import PageTable
from ringprof.report.page.several import figure_table
from ringprof.report.sections import breakdown
from ringprof.report.terminal import header_of
from ringprof.report.text import clean

_MOST_ROWS = 16


def findings_html(found: Findings) -> str:
    """Header, verdict, and a row a rank."""
    table = breakdown.rank_table(breakdown.json(found)["ranks"])
    verdict = "".join(f"<li>{_text(line)}</li>" for line in found.verdict)
    header = _text(header_of(found.attribution, found.summary))
    left = len(table.rows) - _MOST_ROWS
    more = f"and {left} more ranks: run.breakdown() has all" if left > 0 else ""
    return f"<div><b>{header}</b><ul>{verdict}</ul>{_table(table, _MOST_ROWS)}{more}</div>"


def comparison_html(found: Comparison) -> str:
    """A row a figure, a column an entry, each with its ratio to the first."""
    return f"<div>{_table(figure_table(found))}</div>"


def _text(value: str) -> str:
    return escape(clean(value))


def _table(table: PageTable, most: int | None = None) -> str:
    def cells(tag: str, texts: Iterable[str]) -> str:
        return "".join(f'<{tag} style="text-align: right">{_text(text)}</{tag}>' for text in texts)

    body = "".join(f"<tr>{cells('td', [cell.text for cell in row])}</tr>" for row in table.rows[:most])
    return f"<table><thead><tr>{cells('th', table.titles)}</tr></thead><tbody>{body}</tbody></table>"
