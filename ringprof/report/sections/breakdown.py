"""Where the time went: by part, by kind and by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import Communication, Summary
from ringprof.analysis.kinds.kinds import OTHER_GROUPS
from ringprof.analysis.rank import Rank
from ringprof.formatting import percent
from ringprof.json_object import JsonObject
from ringprof.report.page.document import Content, PageContext, PageTable, ReportParts
from ringprof.report.sections import idle
from ringprof.report.tables import BETWEEN, Column, Listing, Table, text_table
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle, duration, in_unit, rounded_to_sum, short_name, unit_for

LONGEST_BAR = 20
WORTH_LISTING = 0.01
"""Share of the wall from which the terminal names what is left in other compute; JSON and page always do."""
_LEFT_OUT = (
    "Of so many ranks this page leaves out timeline, ring steps and hops: "
    "report on the files of a few ranks to see those."
)


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """A table by part, one by kind and, of several ranks, one by rank."""
    blocks = [_by_part(found.summary, style)]
    if found.summary.kinds:
        blocks.append(_by_kind(found, style))
    if found.summary.other_share >= WORTH_LISTING and found.attribution.kernels:
        blocks.append(_largest_of_other(found).text(style))
    return [*blocks, _by_rank(found.summary).text(style)] if len(found.attribution.ranks) > 1 else blocks


def _by_part(summary: Summary, style: TextStyle) -> str:
    *parts, wall = summary.parts
    unit_ns, unit = unit_for(wall.mean_ns)
    several = wall.min_ns != wall.max_ns
    times = rounded_to_sum([part.mean_ns / unit_ns for part in parts], wall.mean_ns / unit_ns, 3)
    # The verdict tells the others: what rounding leaves is computation's.
    shares = [round(100 * part.share, 1) for part in parts]
    shares[0] = max(0.0, 100 * wall.share - sum(shares[1:]))
    rows = []
    for part, time, share in zip(
        summary.parts, [*times, wall.mean_ns / unit_ns], [*shares, 100 * wall.share], strict=True
    ):
        ends = [in_unit(part.min_ns, unit_ns), in_unit(part.max_ns, unit_ns)] if several else []
        rows.append([LABELS[part.name], f"{time:,.3f} {unit}", *ends, f"{share:.1f} %"])
    taken = sum(max(map(len, column)) + BETWEEN for column in zip(*rows, strict=True))
    width = max(0, min(LONGEST_BAR, style.width - taken))
    drawn = [[*row, "" if part is wall else style.bar(part.share, width)]
             for row, part in zip(rows, summary.parts, strict=True)]  # fmt: skip
    titles = ["where the time went", *(["mean", "min", "max"] if several else ["time"]), ""]
    columns = [*map(Column, titles), Column("", left=True, paint="cyan")]
    return text_table(columns, drawn, style, bold=[len(parts)])


def _by_kind(found: Findings, style: TextStyle) -> str:
    kinds = found.summary.kinds
    unit_ns, unit = unit_for(max(row.time_ns for row in kinds))
    # A range lasts from posting a transfer to the end of its wait: only marks tell how long a rank was blocked.
    ranges = any(("send_recv", "") in rank.exposed.by_group for rank in found.attribution.ranks)
    on_cpu = "posting to end of wait" if ranges else "blocked in wait"
    transfer = on_cpu if found.attribution.on_cpu else ""
    rows = [
        [
            LABELS[row.kind],
            f"{in_unit(row.time_ns, unit_ns)} {unit}",
            percent(row.share),
            f"{row.calls:,.0f}" if row.calls == int(row.calls) else f"{row.calls:,.1f}",
            duration(row.average_ns, 1),
            f"{percent(row.hidden, 0)} hidden" if row.hidden is not None else transfer * (row.kind == "send_recv"),
        ]
        for row in kinds
    ]
    columns = [*map(Column, ("by kind", "time", "of wall", "calls", "average")), Column("", left=True)]
    return text_table(columns, rows, style)


def _largest_of_other(found: Findings) -> Table:
    count = len(found.attribution.ranks)
    columns = (
        Column("", folds=True),
        Column("time", "time"),
        Column("of wall", "share"),
        Column("calls", "rough count"),
    )
    rows = [
        [
            short_name(one.name),
            one.time_ns / count,
            one.time_ns / count / found.summary.parts[-1].mean_ns,
            one.calls / count,
        ]
        for one in found.attribution.largest_of_other
    ]
    return Table("largest of other compute", columns, rows)


def _by_rank(summary: Summary) -> Table:
    columns = [
        Column("by rank"), Column("wall", "time"), Column("compute", "time"), Column("exposed\ncomm", "time"),
        Column("exposed\nmemory", "time", 2), Column("idle", "time", 1), Column("overlap", "share"),
    ]  # fmt: skip
    timed = any(row.wait_share is not None for row in summary.ranks)
    if timed:
        columns.append(Column("waiting", "rough share"))
    rated = timed and len(_links(summary.communication)) == 1
    if rated:
        columns.append(Column("wire\nGB/s", "rate"))
    rows = [
        [row.label, row.wall_ns, row.compute_ns, row.exposed_comm_ns, row.exposed_memory_ns, row.idle_ns,
         row.overlap_ratio, *([row.wait_share] if timed else []), *([row.wire_gbps] if rated else [])]
        for row in summary.ranks
    ]  # fmt: skip
    return Table("by rank", columns, rows)


def _links(communication: Sequence[Communication]) -> set[str]:
    """Classes of links: over several of them a mean rate is that of none."""
    return {row.link for row in communication}


# --- data ---------------------------------------------------------------------------------------------


def json(found: Findings) -> ReportParts:
    """A rank an item."""
    return {"ranks": [_rank(rank) for rank in found.attribution.ranks]}


_FIRST = ("wall", "compute", "comm", "overlapped", "exposed_comm", "exposed_memory", "idle")


def _rank(rank: Rank) -> JsonObject:
    b = rank.breakdown
    others = {"exposed_other_groups_ns": b.exposed_other_groups_ns} if OTHER_GROUPS in b.kinds else {}
    others |= {"background_ns": b.background_ns} if b.background_ns else {}
    return {
        "rank": rank.rank,
        "host": rank.host,
        **{f"{name}_ns": getattr(b, f"{name}_ns") for name in _FIRST},
        **others,
        "overlap_ratio": b.overlap_ratio,
        "kinds_ns": {kind: figures.time_ns for kind, figures in b.kinds.items()},
        "waits": _waits(rank),
        "hops": _hops(rank),
        **idle.of_rank(rank),
    }


def _waits(rank: Rank) -> dict[str, dict[str, int]] | None:
    """Wait and wire by kind; kinds with a kernel whose split is not known are left out."""
    waits = {}
    for kind in dict.fromkeys(row.kind for row in rank.link_totals):
        rows = [row for row in rank.link_totals if row.kind == kind]
        if all(row.timed == row.kernels for row in rows):
            waits[kind] = {"wait_ns": sum(row.wait_ns for row in rows), "wire_ns": sum(row.wire_ns for row in rows)}
    return waits or None


def _hops(rank: Rank) -> JsonObject | None:
    totals = rank.hop_totals
    times = {name: getattr(totals, name) for name in ("wait_ns", "wire_ns", "wire_gbps")}
    return {"count": totals.count, "bytes": totals.sent_bytes, **times} if totals.count else None


# --- page ---------------------------------------------------------------------------------------------


def rank_table(ranks: Sequence[Mapping[str, Any]], communication: Sequence[Communication]) -> PageTable:
    """A row a rank; ``ranks`` are those of the JSON report. A rate over links of several classes is left out."""
    times = ("wall", "compute", "exposed_comm", "exposed_memory", "idle")
    columns = [
        Column("rank", "count"), Column("host"), *(Column(name.replace("_", " "), "time") for name in times),
        Column("overlap", "share"), Column("hop wait", "time"), Column("hop wire", "time"),
    ]  # fmt: skip
    figures = ["wait_ns", "wire_ns"]
    if len(_links(communication)) <= 1:
        columns.append(Column("wire GB/s", "rate"))
        figures.append("wire_gbps")
    rows = []
    for rank in ranks:
        hops = [(rank["hops"] or {}).get(name) for name in figures]
        spent = [rank[f"{name}_ns"] for name in times]
        rows.append([rank["rank"], rank["host"] or "unknown", *spent, rank["overlap_ratio"], *hops])
    return Table("", columns, rows, "run.breakdown()").page()


def html(found: Findings, page: PageContext) -> Content:
    """The drawn breakdown, and a row a rank."""
    ranks = json(found)["ranks"]
    return Content(
        page.figures.breakdown(ranks),
        [rank_table(ranks, found.summary.communication)],
        [] if found.lists_steps else [_LEFT_OUT],
    )


def kinds_html(found: Findings, page: PageContext) -> Content | None:
    """A row a kind, means over ranks."""
    columns = (Column("kind"), Column("mean", "time"), Column("of mean wall", "share"), Column("calls", "rough count"),
               Column("average", "short time"), Column("hidden", "share"))  # fmt: skip
    rows = [
        [LABELS[row.kind], row.time_ns, row.share, row.calls, row.average_ns, row.hidden] for row in found.summary.kinds
    ]
    return Content(tables=[Table("", columns, rows).page()]) if rows else None
