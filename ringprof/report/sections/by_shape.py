"""Matrix products by shape, and communication by kind, group and size."""

from __future__ import annotations

from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.common.json_object import JsonObject
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle

_MAX_LISTED = 25

GEMM_COLUMNS = (
    Column("m", "count"), Column("n", "count"), Column("k", "count"), Column("batch", "count", 1), Column("dtype"),
    Column("calls", "rough count"), Column("time", "time"), Column("of all", "share", on_page="% of products"),
    Column("mean", "short time", 2, on_page="mean µs"), Column("TFLOP/s", "rate"),
    Column("of peak", "share", on_page="% of peak"),
)  # fmt: skip
COLLECTIVE_COLUMNS = (
    Column("kind"), Column("group"), Column("ranks", "count"), Column("MB", "bytes"), Column("link", drop=2),
    Column("calls", "rough count"), Column("time", "time"), Column("waiting", "time", 1),
    Column("busbw\nGB/s", "rate"), Column("with\nwaiting", "rate", 3, on_page="GB/s with waiting"),
)  # fmt: skip


def gemms_terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List matrix products by shape, as means over ranks."""
    if not findings.gemms:
        text = "no shapes are recorded (torch.profiler's record_shapes=True records them), or nothing multiplies"
        return [style.wrap(f"matrix products: {text}")]
    count = len(findings.attribution.ranks)
    title = "matrix products" + (f", mean of {count} ranks" if count > 1 else "")
    return [Table(title, GEMM_COLUMNS, _gemm_rows(findings, count), "--all").listed(style, listing, _MAX_LISTED)]


def gemms_html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table with one row per shape, means over ranks; None without recorded shapes."""
    rows = _gemm_rows(findings, len(findings.attribution.ranks))
    return Content(tables=[Table("", GEMM_COLUMNS, rows, "run.gemms()").page()]) if rows else None


def _gemm_rows(findings: Findings, count: int) -> list[list[Any]]:
    """Build the rows; calls and times are divided by ``count``."""
    return [
        [row.shape.m, row.shape.n, row.shape.k, row.shape.batch,
         row.shape.dtype or "-", row.calls / count, row.time_ns / count, row.share, row.mean_ns, row.tflops,
         row.of_peak]
        for row in findings.gemms
    ]  # fmt: skip


def collectives_terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List communication by kind, group and size, as means over ranks."""
    if not findings.collectives:
        why = "a CPU trace does not tell when a transfer ran" if findings.attribution.on_cpu else "none in these traces"
        return [style.wrap(f"collectives: {why}")]
    count = len(findings.attribution.ranks)
    title = "communication" + (f", mean of {count} ranks" if count > 1 else "")
    table = Table(title, COLLECTIVE_COLUMNS, _collective_rows(findings, count), "--all")
    return [table.listed(style, listing, _MAX_LISTED) + "\n" + style.wrap(_BUSBW_NOTE, "dim")]


_BUSBW_NOTE = "busbw: bus bandwidth as nccl-tests define it, without waiting for peers where that is known"


def collectives_html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table with one row per kind, group and size, means over ranks; None without communication."""
    rows = _collective_rows(findings, len(findings.attribution.ranks))
    return Content(tables=[Table("", COLLECTIVE_COLUMNS, rows, "run.collectives()").page("kind")]) if rows else None


def _collective_rows(findings: Findings, count: int) -> list[list[Any]]:
    """Build the rows; calls and times are divided by ``count``."""
    return [
        [LABELS[row.key.kind], row.key.group or "-", row.key.ranks, row.key.size_bytes, row.key.link,
         row.calls / count, row.time_ns / count, None if row.wait_ns is None else row.wait_ns / count,
         row.wire_busbw_gbps, row.busbw_gbps]
        for row in findings.collectives
    ]  # fmt: skip


# --- data ---------------------------------------------------------------------------------------------


def gemm_items(findings: Findings) -> list[JsonObject]:
    """Build one item per shape, summed over all ranks, for JSON and the data frame."""
    return [
        {**row.shape._asdict(), "calls": row.calls, "time_ns": row.time_ns, "share": row.share, "flops": row.flops,
         "tflops": row.tflops, "peak_share": row.of_peak}
        for row in findings.gemms
    ]  # fmt: skip


def collective_items(findings: Findings) -> list[JsonObject]:
    """Build one item per kind, group, size and link, summed over all ranks, for JSON and the data frame."""
    return [
        {**row.key._asdict(), "calls": row.calls, "time_ns": row.time_ns, "wait_ns": row.wait_ns,
         "busbw_gbps": row.busbw_gbps, "wire_busbw_gbps": row.wire_busbw_gbps}
        for row in findings.collectives
    ]  # fmt: skip
