"""The waterfall: from the device's peak to the speed achieved, every loss named."""

from __future__ import annotations

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.waterfall import WATERFALL_LABELS, Waterfall
from ringprof.formatting import percent
from ringprof.report.page.document import Content, PageContext, ReportParts
from ringprof.report.tables import Column, Listing, Table, text_table
from ringprof.report.text import TextStyle, clean, duration, in_unit, rate, rounded_to_sum, unit_for


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """The parts from the peak down, each with the speed left after it, and the line that it rests on."""
    waterfall = found.waterfall
    unit_ns, unit = unit_for(waterfall.wall_ns)
    times = rounded_to_sum([part.time_ns / unit_ns for part in waterfall.parts], waterfall.wall_ns / unit_ns, 3)
    longest = max(0, min(20, style.width - 70))
    rows = [
        [WATERFALL_LABELS[part.part], f"{time:,.3f}", percent(part.share), *_speed(waterfall, part.tflops),
         style.bar(max(part.share, 0.0), longest)]
        for part, time in zip(waterfall.parts, times, strict=True)
    ]  # fmt: skip
    label = f"wall of rank {waterfall.slowest_rank}, the slowest"
    whole = [label, in_unit(waterfall.wall_ns, unit_ns), percent(1.0), *_speed(waterfall, waterfall.tflops), ""]
    titles = ["waterfall", unit, "of wall", *_speed(waterfall, None, "TFLOP/s\nafter it")]
    columns = [*map(Column, titles), Column("", left=True, paint="cyan")]
    lines = [f"{WATERFALL_LABELS[part.part]}: {clean(part.evidence)}" for part in waterfall.parts]
    lines.append(f"bounds: {_bounds(waterfall)}")
    return [text_table(columns, [*rows, whole], style, bold=[len(rows)]), style.wrap("\n".join(lines), "dim")]


def _speed(waterfall: Waterfall, tflops: float | None, unknown: str = "-") -> list[str]:
    """A cell with the speed; none where the waterfall tells of no speed."""
    if waterfall.tflops is None:
        return []
    if tflops is None:
        return [unknown]
    return [rate(tflops).split(" ")[0] if tflops >= 1 else f"{tflops:.3g}"]


def _bounds(waterfall: Waterfall) -> str:
    """Say what the wall could be; what would change nothing is left out."""
    bounds, wall = waterfall.bounds, duration(waterfall.wall_ns)
    named = [("if communication were free", bounds.free_ns), ("if ranks were balanced", bounds.balanced_ns)]
    if not waterfall.of("exposed_unsplit"):
        # How much of the communication can be hidden is known only where its time on the wire is.
        named.append(("if they were and all were hidden that can be", bounds.hidden_ns))
    lower = [f"{duration(bound)} {what}" for what, bound in named if duration(bound) != wall]
    return ", ".join(lower) or "neither free communication nor balanced ranks would shorten it"


def json(found: Findings) -> ReportParts:
    """A part an item."""
    return {"waterfall": [msgspec.structs.asdict(part) for part in found.waterfall.parts]}


def html(found: Findings, page: PageContext) -> Content:
    """The drawn waterfall, and a row a part."""
    waterfall = found.waterfall
    columns = (Column("part"), Column("ms", "time", on_page="ms"), Column("share", "share", on_page="% of wall"),
               Column("TFLOP/s after it", "rate"), Column("evidence"), Column("shorter by"))  # fmt: skip
    rows = [
        [WATERFALL_LABELS[one.part], one.time_ns, one.share, one.tflops, one.evidence, one.remedy or "-"]
        for one in waterfall.parts
    ]
    lines = [f"Bounds on the wall of {duration(waterfall.wall_ns)}: {_bounds(waterfall)}."]
    return Content(page.figures.waterfall(waterfall), [Table("", columns, rows).page()], lines)
