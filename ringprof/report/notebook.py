"""How objects show themselves in a notebook: a little HTML, in which every name is text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ringprof.analysis.findings.comparison import Comparison
from ringprof.analysis.findings.findings import Findings
from ringprof.report.terminal import header_of
from ringprof.report.text import clean, percent

MOST_ROWS = 16


def findings_html(found: Findings) -> str:
    """Header, verdict, and a row a rank; times in ms."""
    titles = ["rank", "wall ms", "compute ms", "exposed comm ms", "exposed memory ms", "idle ms", "overlap"]
    rows = []
    for rank in found.attribution.ranks[:MOST_ROWS]:
        b = rank.breakdown
        times = (b.wall_ns, b.compute_ns, b.exposed_comm_ns, b.exposed_memory_ns, b.idle_ns)
        overlap = "-" if b.overlap_ratio is None else percent(b.overlap_ratio)
        rows.append([str(rank.rank), *(f"{time / 1e6:,.3f}" for time in times), overlap])
    left = len(found.attribution.ranks) - MOST_ROWS
    more = [f"and {left} more ranks: run.breakdown() has all"] if left > 0 else []
    verdict = "".join(f"<li>{_text(line)}</li>" for line in found.verdict)
    header = _text(header_of(found.attribution, found.summary))
    return f"<div><b>{header}</b><ul>{verdict}</ul>{_table(titles, rows)}{''.join(map(_text, more))}</div>"


def comparison_html(found: Comparison) -> str:
    """A row a figure, a column an entry, each with its ratio to the first."""
    ratio = {(one.figure, one.entry): one for one in found.differences}
    rows = []
    for name in found.figures:
        cells = []
        for place, entry in enumerate(found.entries):
            figure, against = entry.figures.get(name), ratio.get((name, place))
            value = "-" if figure is None else f"{figure.value:,.3f}"
            known = against is not None and against.ratio is not None
            cells.append(f"{value} ({against.ratio:.2f}x {against.verdict})" if against and known else value)
        rows.append([name.replace("_", " "), *cells])
    return f"<div>{_table(['figure', *(entry.label for entry in found.entries)], rows)}</div>"


def _text(value: str) -> str:
    return escape(clean(value))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th style="text-align: right">{_text(title)}</th>' for title in titles)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align: right">{_text(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
