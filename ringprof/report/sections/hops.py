"""Hops: every exchange with neighbours, and the traffic of each link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.transfers.hops import TimedHop, hop_totals, mean
from ringprof.report.page.document import Content, PageContext
from ringprof.report.sections.steps import WORST
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle
from ringprof.report.timeline import origins_of, span_of

_FIGURE_COLUMNS = (
    Column("MB", "bytes"), Column("start", "time", 3), Column("duration", "time", 2), Column("wait", "time"),
    Column("wire", "time"), Column("GB/s", "rate"), Column("exposed", "time", 1),
)  # fmt: skip
COLUMNS = (Column(""), Column("to", drop=4), Column("from", drop=5), *_FIGURE_COLUMNS)


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List the n-th hop of all ranks per row, with means and the rank that exposes most; or one hop per row."""
    attribution = findings.attribution
    hops = [hop for rank in attribution.ranks for hop in rank.hops]
    if not hops and attribution.on_cpu:
        text = "a CPU trace does not tell when a transfer ran; by kind, above, is what ranks waited for"
        return [style.wrap(f"hops: {text}")]
    if not hops:
        return [style.wrap("hops: none; these ranks exchange nothing with neighbours alone")]
    starts = _first_hop_times(findings, hops)
    if listing.everything or len(starts) == 1:
        peers = [[",".join(map(str, ranks)) or "-" for ranks in (hop.sent_to, hop.received_from)] for hop in hops]
        rows = [
            [f"rank {hop.rank} hop {hop.number}", *names, *_hop_figures([hop], starts)]
            for hop, names in zip(hops, peers, strict=True)
        ]
        return [Table("hops", COLUMNS, rows).listed(style, listing)]
    groups: dict[int, list[TimedHop]] = defaultdict(list)
    for hop in hops:
        groups[hop.number].append(hop)
    rows = [
        [f"hop {number}", *_hop_figures(groups[number], starts), *_most_exposed(groups[number])]
        for number in sorted(groups)
    ]
    table = Table(f"hops, mean of {len(starts)} ranks", (COLUMNS[0], *_FIGURE_COLUMNS, *WORST), rows, "--all")
    note = style.wrap("a row is the mean of all ranks' n-th hops; --all lists every hop, with its peers", "dim")
    return [table.listed(style, listing) + "\n" + note]


def _first_hop_times(findings: Findings, hops: Sequence[TimedHop]) -> dict[int, int]:
    """Return for each rank the time when the first hop of all started, by that rank's own clock."""
    offset = findings.attribution.clocks.offset_ns
    first = min(hop.start_ns + offset[hop.rank] for hop in hops)
    return {hop.rank: first - offset[hop.rank] for hop in hops}


def _hop_figures(hops: Sequence[TimedHop], starts: Mapping[int, int]) -> list[Any]:
    """Average the figures of hops; the rate is all bytes over all wire time."""
    return [
        mean([hop.sent_bytes for hop in hops]),
        mean([hop.start_ns - starts[hop.rank] for hop in hops]),
        mean([hop.end_ns - hop.start_ns for hop in hops]),
        mean([hop.wait_ns for hop in hops]),
        mean([hop.wire_ns for hop in hops]),
        hop_totals(hops).wire_gbps,
        mean([hop.exposed_ns for hop in hops]),
    ]


def _most_exposed(hops: Sequence[TimedHop]) -> tuple[int, int]:
    worst = max(hops, key=lambda hop: hop.exposed_ns)
    return worst.rank, worst.exposed_ns


_LINK_COLUMNS = (
    Column("kind"), Column("link"), Column("kernels", "count"), Column("MB sent", "bytes"),
    Column("waiting", "share", on_page="% waiting"), Column("GB/s", "rate"), Column("best GB/s", "rate"),
)  # fmt: skip


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table of links and a table of hops; None without hops and for very many ranks."""
    hops = [hop for rank in findings.attribution.ranks for hop in rank.hops] if findings.lists_steps else []
    if not hops:
        return None
    starts = _first_hop_times(findings, hops)
    links = [
        [LABELS[row.kind], row.link, row.kernels, row.sent_bytes, row.wait_share, row.wire_gbps, row.best_gbps]
        for row in findings.summary.communication
    ]
    columns = (
        Column("rank", "count"), Column("hop", "count"), Column("to"), Column("MB", "bytes"), Column("start", "time"),
        Column("", "time", on_page="ms"), Column("wait", "time"), Column("wire", "time"), Column("GB/s", "rate"),
        Column("exposed", "time"),
    )  # fmt: skip
    rows = [
        [hop.rank, hop.number, ", ".join(map(str, hop.sent_to)) or "-", hop.sent_bytes, hop.start_ns - starts[hop.rank],
         hop.end_ns - hop.start_ns, hop.wait_ns, hop.wire_ns, hop.wire_gbps, hop.exposed_ns]
        for hop in hops
    ]  # fmt: skip
    origin = origins_of(findings.attribution)
    spans = [span_of(hop.rank, hop.start_ns, hop.end_ns, origin) for hop in hops]
    table = Table("", columns, rows, "run.hops()").page("span", spans)
    return Content(tables=[Table("", _LINK_COLUMNS, links).page(), table])
