"""Hops: every exchange with neighbours, and what each link carried."""

from __future__ import annotations

from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.transfers.hops import Hop
from ringprof.report.page.document import Content
from ringprof.report.tables import Column, Table
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle

MOST_HOPS_LISTED = 200


_COLUMNS = (
    Column("to"), Column("from", drop=4), Column("MB", "bytes"), Column("start", "time", 3),
    Column("duration", "time", 2), Column("wait", "time"), Column("wire", "time"), Column("GB/s", "rate"),
    Column("exposed", "time", 1),
)  # fmt: skip


def terminal(found: Findings, style: TextStyle) -> list[str]:
    """A row a hop, of the ranks' first ones where they are many."""
    attribution = found.attribution
    hops = [hop for rank in attribution.ranks for hop in rank.hops]
    if not hops and attribution.on_cpu:
        text = "a CPU trace does not tell when a transfer ran; by kind, above, is what ranks waited for"
        return [style.wrap(f"hops: {text}")]
    if not hops:
        return [style.wrap("hops: none; these ranks exchange nothing with neighbours alone")]
    start = min(hop.start_ns for hop in hops)
    rows = [[f"rank {hop.rank} hop {hop.number}", *_figures(hop, start)] for hop in hops[:MOST_HOPS_LISTED]]
    made = Table("hops", (Column(""), *_COLUMNS), rows).text(style)
    left = len(hops) - MOST_HOPS_LISTED
    more = f"and {left} more: --format json sums them, run.hops() lists them"
    return [f"{made}\n{style.wrap(more, 'dim')}" if left > 0 else made]


def _figures(hop: Hop, start_ns: int) -> list[Any]:
    return [
        ",".join(map(str, hop.sent_to)) or "-",
        ",".join(map(str, hop.received_from)) or "-",
        hop.sent_bytes,
        hop.start_ns - start_ns,
        hop.end_ns - hop.start_ns,
        hop.wait_ns,
        hop.wire_ns,
        hop.wire_gbps,
        hop.exposed_ns,
    ]


_LINKS = (
    Column("kind"), Column("link"), Column("kernels", "count"), Column("MB sent", "bytes"),
    Column("waiting", "share", on_page="% waiting"), Column("GB/s", "rate"), Column("best GB/s", "rate"),
)  # fmt: skip


def html(found: Findings, report: dict[str, Any], figures: Any) -> Content | None:
    """A row a link and a row a hop; None where there are none, and of very many ranks."""
    hops = [hop for rank in found.attribution.ranks for hop in rank.hops] if found.lists_steps else []
    if not hops:
        return None
    first = min(hop.start_ns for hop in hops)
    links = [
        [LABELS[row.kind], row.link, row.kernels, row.sent_bytes, row.wait_share, row.wire_gbps, row.best_gbps]
        for row in found.summary.communication
    ]
    columns = (
        Column("rank", "count"), Column("hop", "count"), Column("to"), Column("MB", "bytes"), Column("start", "time"),
        Column("", "time", on_page="ms"), Column("wait", "time"), Column("wire", "time"), Column("GB/s", "rate"),
        Column("exposed", "time"),
    )  # fmt: skip
    rows = [
        [hop.rank, hop.number, ", ".join(map(str, hop.sent_to)) or "-", hop.sent_bytes, hop.start_ns - first,
         hop.end_ns - hop.start_ns, hop.wait_ns, hop.wire_ns, hop.wire_gbps, hop.exposed_ns]
        for hop in hops
    ]  # fmt: skip
    return Content(tables=[Table("", _LINKS, links).page(), Table("", columns, rows).page("run.hops()")])
