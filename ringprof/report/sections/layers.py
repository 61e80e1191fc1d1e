"""Section of the report: attention and communication by layer of the model."""

from __future__ import annotations

from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.common.json_object import JsonObject
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.text import TextStyle

_MAX_LISTED = 100

COLUMNS = (
    Column("layer", folds=True), Column("compute", "time", 2), Column("attention", "time", 2),
    Column("comm", "time", 1), Column("exposed", "time"),
    Column("of all", "share", on_page="% of exposed"), Column("in backward", "time", 4), Column("waiting", "time", 3),
    Column("wire", "time", 3), Column("worst\nrank", "count", 5), Column("its\nexposed", "time", 5),
)  # fmt: skip


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Build the terminal table of the layers, as means over ranks, or a hint where the traces name none."""
    if not findings.layers:
        return [style.wrap(_NO_LAYERS)]
    count = len(findings.attribution.ranks)
    title = "layers" + (f", mean of {count} ranks" if count > 1 else "")
    return [Table(title, COLUMNS, _rows(findings), "--all").listed(style, listing, _MAX_LISTED)]


_NO_LAYERS = (
    "layers: these traces name none around their attention; ringprof.capture(model=...), torch.profiler's "
    "with_stack=True, or record_function(f'layers.{i}') in the model does"
)
OUTSIDE_LAYERS = "outside of all layers"


def _label(layer: str, findings: Findings) -> str:
    """Return a layer's name, in a recorded hybrid model with the layer's operator."""
    run, number = findings.attribution.run, layer.rpartition(".")[2]
    pattern = run.workload.pattern if run and run.workload and run.workload.layer else ()
    if len(set(pattern)) < 2 or not (number.isascii() and number.isdecimal()):
        return layer or OUTSIDE_LAYERS
    return f"{layer} {pattern[int(number[:18]) % len(pattern)]}"


def _rows(findings: Findings) -> list[list[Any]]:
    count = len(findings.attribution.ranks)
    exposed_ns = sum(row.time.exposed_ns for row in findings.layers)
    return [
        [_label(row.time.layer, findings), row.time.compute_ns / count, row.time.attention_ns / count,
         row.time.communication_ns / count,
         row.time.exposed_ns / count, row.time.exposed_ns / exposed_ns if exposed_ns else None,
         row.time.exposed_backward_ns / count,
         *(None if part is None else part / count for part in (row.wait_ns, row.wire_ns)),
         row.worst_rank, row.worst_exposed_ns]
        for row in findings.layers
    ]  # fmt: skip


def items(findings: Findings) -> list[JsonObject]:
    """Build one item per layer for JSON: nanoseconds, summed over all ranks, and the rank that exposes most."""
    return [
        {**row.time._asdict(), "layer": row.time.layer or None, "wait_ns": row.wait_ns, "wire_ns": row.wire_ns,
         "worst_rank": row.worst_rank, "worst_exposed_ns": row.worst_exposed_ns}
        for row in findings.layers
    ]  # fmt: skip


def frame_rows(findings: Findings) -> list[JsonObject]:
    """Build one row per rank and layer for the data frame; times in nanoseconds, None where not known."""
    known = any(row.wait_ns is not None for row in findings.layers)
    unknown = {} if known else {"wait_ns": None, "wire_ns": None}
    return [
        {"rank": rank.rank, **time._asdict(), "layer": time.layer or None, **unknown}
        for rank in findings.attribution.ranks
        for time in rank.layers
    ]


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table with one row per layer, means over ranks; None where the traces name no layers."""
    if not findings.layers:
        return None
    return Content(tables=[Table("", COLUMNS, _rows(findings), "run.layers()").page()])
