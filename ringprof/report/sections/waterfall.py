"""The waterfall: from the device's peak to the achieved speed, with every loss named."""

from __future__ import annotations

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.parts import WATERFALL_LABELS
from ringprof.analysis.findings.waterfall import Waterfall
from ringprof.common.formatting import percent
from ringprof.report.listing import Field, FieldTable
from ringprof.report.page import bars
from ringprof.report.page.document import Content, PageContext, ReportParts
from ringprof.report.tables import Column, Listing, text_table
from ringprof.report.text import TextStyle, clean, duration, in_unit, rate, rounded_to_sum, unit_for


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List the parts from the peak down, each with the remaining speed, then the evidence for each part."""
    waterfall = findings.waterfall
    unit_ns, unit = unit_for(waterfall.wall_ns)
    times = rounded_to_sum([part.time_ns / unit_ns for part in waterfall.parts], waterfall.wall_ns / unit_ns, 3)
    bar_width = max(0, min(20, style.width - 70))
    rows = [
        [WATERFALL_LABELS[part.part], f"{time:,.3f}", percent(part.share), *_speed(waterfall, part.tflops),
         style.bar(max(part.share, 0.0), bar_width)]
        for part, time in zip(waterfall.parts, times, strict=True)
    ]  # fmt: skip
    label = f"wall of rank {waterfall.slowest_rank}, the slowest"
    total_row = [label, in_unit(waterfall.wall_ns, unit_ns), percent(1.0), *_speed(waterfall, waterfall.tflops), ""]
    titles = ["waterfall", unit, "of wall", *_speed(waterfall, None, "TFLOP/s\nafter it")]
    columns = [*map(Column, titles), Column("", left=True, paint="cyan")]
    lines = [f"{WATERFALL_LABELS[part.part]}: {clean(part.evidence)}" for part in waterfall.parts]
    lines.append(f"bounds: {_bounds(waterfall)}")
    return [text_table(columns, [*rows, total_row], style, bold=[len(rows)]), style.wrap("\n".join(lines), "dim")]


def _speed(waterfall: Waterfall, tflops: float | None, unknown: str = "-") -> list[str]:
    """Format the speed as a list of one cell; the list is empty where the waterfall has no speed."""
    if waterfall.tflops is None:
        return []
    if tflops is None:
        return [unknown]
    return [rate(tflops).split(" ")[0] if tflops >= 1 else f"{tflops:.3g}"]


def _bounds(waterfall: Waterfall) -> str:
    """State lower bounds on the wall; a bound that would change nothing is left out."""
    bounds, wall = waterfall.bounds, duration(waterfall.wall_ns)
    candidates = [("with free communication", bounds.free_ns), ("with perfect balance", bounds.balanced_ns)]
    if not waterfall.of("exposed_unsplit"):
        # How much communication can be hidden is known only if its time on the wire is known.
        candidates.append(("with perfect balance and overlap", bounds.hidden_ns))
    lower_bounds = [f"{duration(bound)} {condition}" for condition, bound in candidates if duration(bound) != wall]
    return ", ".join(lower_bounds) or "neither free communication nor perfect balance would shorten it"


WATERFALL = FieldTable(
    "waterfall", lambda findings: msgspec.to_builtins(findings.waterfall.parts, enc_hook=str),
    (
        Field("part", "part of the slowest rank's wall", Column("part"), shown=WATERFALL_LABELS.__getitem__),
        Field("time_ns", "mean over ranks; all parts sum to the wall", Column("ms", "time", on_page="ms")),
        Field("share", "share of the wall, 0..1", Column("share", "share", on_page="% of wall")),
        Field("tflops", "TFLOP/s per device if only this part and the parts before it took time",
              Column("TFLOP/s after it", "rate")),
        Field("evidence", "figures from which the part was computed, in words", Column("evidence")),
        Field("remedy", "change that would shorten it; empty where that is not known", Column("shorter by"),
              shown=lambda remedy: remedy or "-"),
    ),
)  # fmt: skip


def json(findings: Findings) -> ReportParts:
    """Build the ``waterfall`` of the JSON report, one item per part."""
    return {"waterfall": WATERFALL.items(findings)}


def html(findings: Findings, page: PageContext) -> Content:
    """Build the chart of the waterfall and a table with one row per part."""
    waterfall = findings.waterfall
    lines = [f"Bounds on the wall of {duration(waterfall.wall_ns)}: {_bounds(waterfall)}."]
    tables = [WATERFALL.table(findings).page()]
    return Content(tables=tables, lines=lines, charts=bars.waterfall(waterfall), folds_tables=True)
