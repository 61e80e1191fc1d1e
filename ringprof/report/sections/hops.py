"""Hops: every exchange with neighbours, and the traffic of each link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.transfers.hops import gbps, mean, total
from ringprof.common.json_object import JsonObject
from ringprof.report.listing import RANK, SPAN, Field, FieldTable
from ringprof.report.page.document import Content, PageContext
from ringprof.report.sections.steps import WORST, most_exposed
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle
from ringprof.report.timeline import origins_of, span_of


def _rows(findings: Findings) -> list[JsonObject]:
    hops = [hop for rank in findings.attribution.ranks for hop in rank.hops]
    # From the first hop of any rank, by the clock that the ranks share.
    offset = findings.attribution.clocks.offset_ns
    first_ns = min((hop.start_ns + offset[hop.rank] for hop in hops), default=0)
    attributes, rows = ("rank", "start_ns", "end_ns", "wait_ns", "wire_ns", "exposed_ns", "wire_gbps"), []
    for hop in hops:
        first, ready = hop.parts[0], [part.ready_ns for part in hop.parts]
        rows.append({
            **{name: getattr(hop, name) for name in attributes},
            "hop": hop.number, "group": first.transfer.group[0], "link": first.link, "source": first.transfer.source,
            "send_to": hop.sent_to, "receive_from": hop.received_from, "bytes": hop.sent_bytes,
            "ready_ns": None if None in ready else max(moment for moment in ready if moment is not None),
            "from_first_ns": hop.start_ns + offset[hop.rank] - first_ns, "duration_ns": hop.end_ns - hop.start_ns,
        })  # fmt: skip
    return rows


HOPS = FieldTable(
    "hops", _rows,
    (
        RANK,
        Field("hop", "number among the rank's hops, by start", Column("hop", "count")),
        Field("group", "process group"),
        Field("send_to", "ranks that it sends to", Column("to"), shown=lambda ranks: ", ".join(map(str, ranks)) or "-"),
        Field("receive_from", "ranks that it receives from"),
        Field("bytes", "bytes sent", Column("MB", "bytes")),
        *SPAN,
        Field("ready_ns", "when the last rank that it depends on had started, by the rank's own clock"),
        Field("wait_ns", "until its peers had started; missing where that is not known", Column("wait", "time")),
        Field("wire_ns", "rest of its time; missing where that is not known", Column("wire", "time")),
        Field("exposed_ns", "part of its time with no computation beside it", Column("exposed", "time", 1)),
        Field("wire_gbps", "bytes / wire_ns, GB/s", Column("GB/s", "rate")),
        Field("link", "same_host, other_host or unknown"),
        Field("source", "where peers and bytes come from"),
        Field("from_first_ns", "", Column("start", "time", 3)),
        Field("duration_ns", "", Column("duration", "time", 2, on_page="ms")),
    ),
    ("rank", "hop", "send_to", "bytes", "from_first_ns", "duration_ns", "wait_ns", "wire_ns", "wire_gbps",
     "exposed_ns"),
    of_few_ranks=True,
)  # fmt: skip
_FIGURES, _FIGURE_COLUMNS = HOPS.order[3:], HOPS.columns[3:]
COLUMNS = (Column(""), Column("to", drop=4), Column("from", drop=5), *_FIGURE_COLUMNS)


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List the n-th hop of all ranks per row, with means and the rank that exposes most; or one hop per row."""
    hops = _rows(findings)
    if not hops and findings.attribution.on_cpu:
        text = "a CPU trace does not tell when a transfer ran; by kind, above, is what ranks waited for"
        return [style.wrap(f"hops: {text}")]
    if not hops:
        return [style.wrap("hops: none; these ranks exchange nothing with neighbours alone")]
    ranks = len({hop["rank"] for hop in hops})
    if listing.everything or ranks == 1:
        peers = [[",".join(map(str, hop[key])) or "-" for key in ("send_to", "receive_from")] for hop in hops]
        rows = [
            [f"rank {hop['rank']} hop {hop['hop']}", *names, *(hop[key] for key in _FIGURES)]
            for hop, names in zip(hops, peers, strict=True)
        ]
        return [Table("hops", COLUMNS, rows).listed(style, listing)]
    groups: dict[int, list[JsonObject]] = defaultdict(list)
    for hop in hops:
        groups[hop["hop"]].append(hop)
    rows = [[f"hop {number}", *_means(groups[number]), *most_exposed(groups[number])] for number in sorted(groups)]
    table = Table(f"hops, mean of {ranks} ranks", (COLUMNS[0], *_FIGURE_COLUMNS, *WORST), rows, "--all")
    note = style.wrap("a row is the mean of all ranks' n-th hops; --all lists every hop, with its peers", "dim")
    return [table.listed(style, listing) + "\n" + note]


def _means(hops: Sequence[JsonObject]) -> list[Any]:
    """Average the figures of hops; the rate is all bytes over all wire time."""
    values = {key: [hop[key] for hop in hops] for key in _FIGURES}
    rate = gbps(total(values["bytes"]), total(values["wire_ns"]))
    return [rate if key == "wire_gbps" else mean(values[key]) for key in _FIGURES]


_LINK_COLUMNS = (
    Column("kind"), Column("link"), Column("kernels", "count"), Column("MB sent", "bytes"),
    Column("waiting", "share", on_page="% waiting"), Column("GB/s", "rate"), Column("best GB/s", "rate"),
)  # fmt: skip


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table of links and a table of hops; None without hops and for very many ranks."""
    hops = [hop for rank in findings.attribution.ranks for hop in rank.hops] if findings.lists_steps else []
    if not hops:
        return None
    links = [
        [LABELS[row.kind], row.link, row.kernels, row.sent_bytes, row.wait_share, row.wire_gbps, row.best_gbps]
        for row in findings.summary.communication
    ]
    origin = origins_of(findings.attribution)
    spans = [span_of(hop.rank, hop.start_ns, hop.end_ns, origin) for hop in hops]
    table = HOPS.table(findings).page("span", spans)
    return Content(tables=[Table("", _LINK_COLUMNS, links).page(), table])
