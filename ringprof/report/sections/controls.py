"""The controls of a recording: what overlap is worth, and how near the run is to its blocks alone."""

from __future__ import annotations

from ringprof.analysis.findings.controls import ControlFigures
from ringprof.analysis.findings.findings import Findings
from ringprof.report.page.document import PageTable
from ringprof.report.tables import Column, Listing, Table, text_table
from ringprof.report.text import TextStyle, in_unit, percent, rate, slower_or_faster, unit_for


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """A row a control, each with its share of an ordinary iteration, and what follows from them."""
    c = found.summary.rates.controls
    if c is None:
        return []
    unit_ns, unit = unit_for(c.iteration_ns)
    rows = _rows(c)
    cells = [
        [name, f"{in_unit(time, unit_ns)} {unit}", percent(time / c.iteration_ns), note] for name, time, note in rows
    ]
    columns = [Column("controls"), Column("time"), Column("of an\niteration"), Column("", left=True)]
    times = f"{c.iterations} of each in {c.rounds} round{'s' if c.rounds > 1 else ''}"
    ideal = f"{percent(c.ideal_efficiency)} of its ideal and " if c.ideal_efficiency is not None else ""
    lines = [f"The run reaches {ideal}{percent(c.of_solo)} of the solo rate"]
    if c.flash_slowdown is not None:
        lines.append(f"its attention kernels are {slower_or_faster(c.flash_slowdown)} beside communication than alone")
    return [text_table(columns, cells, style), style.wrap("; ".join(lines) + f" ({times}).")]


def _rows(c: ControlFigures) -> list[tuple[str, float, str]]:
    on = "compute only" if c.ideal_ns == c.compute_only_ns else "communication only"
    rows = (
        ("an iteration, in turns with these", c.iteration_ns, ""),
        ("compute only: nothing sent", c.compute_only_ns, ""),
        ("communication only: nothing computed", c.communication_only_ns, ""),
        ("ideal: the larger of the two", c.ideal_ns, on),
        ("the same blocks alone", c.solo_ns, rate(c.solo_tflops)),
    )
    return [(name, time, note) for name, time, note in rows if time is not None]


def page_tables(found: Findings) -> list[PageTable]:
    """For the page: none where nothing was controlled."""
    c = found.summary.rates.controls
    if c is None:
        return []
    columns = (Column("controls"), Column("", "time", on_page="ms"), Column("of an iteration", "share"), Column("note"))
    rows = [[name, time, time / c.iteration_ns, note] for name, time, note in _rows(c)]
    return [Table("", columns, rows).page()]
