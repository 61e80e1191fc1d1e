"""The breakdown of time by part, by kind and by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import Communication, Summary
from ringprof.analysis.findings.time_table import TIMES, USUAL_PARTS
from ringprof.analysis.kinds.kinds import OTHER_GROUPS
from ringprof.analysis.rank import Rank
from ringprof.common.formatting import percent
from ringprof.common.json_object import JsonObject
from ringprof.report.page import bars
from ringprof.report.page.document import Content, PageContext, PageTable, ReportParts
from ringprof.report.sections import idle
from ringprof.report.tables import COLUMN_GAP, Column, Listing, Table, text_table
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle, duration, in_unit, rounded_to_sum, short_name, unit_for

MAX_BAR_WIDTH = 20
MIN_OTHER_SHARE = 0.01
"""Share of the wall from which the terminal lists the kernels of other compute; JSON and page always do."""
_MANY_RANKS_NOTE = (
    "Of so many ranks this page leaves out timeline, ring steps and hops: "
    "report on the files of a few ranks to see those."
)


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Return a table by part, one by kind and, with several ranks, one by rank."""
    blocks = [_by_part(findings.summary, style)]
    if findings.summary.kinds:
        blocks.append(_by_kind(findings, style))
    if findings.summary.other_share >= MIN_OTHER_SHARE and findings.attribution.kernels:
        blocks.append(_largest_of_other(findings).text(style))
    return [*blocks, _by_rank(findings.summary).text(style)] if len(findings.attribution.ranks) > 1 else blocks


def _by_part(summary: Summary, style: TextStyle) -> str:
    *parts, wall = summary.parts
    unit_ns, unit = unit_for(wall.mean_ns)
    ranks_differ = any(part.min_ns != part.max_ns for part in summary.parts)
    times = rounded_to_sum([part.mean_ns / unit_ns for part in parts], wall.mean_ns / unit_ns, 3)
    # The verdict states the other shares, so computation absorbs the rounding error.
    shares = [round(100 * part.share, 1) for part in parts]
    shares[0] = max(0.0, 100 * wall.share - sum(shares[1:]))
    ends_ns: dict[str, tuple[float, float]] = {part.name: (part.min_ns, part.max_ns) for part in summary.parts}
    if summary.ranks[0].label.startswith("rank "):
        # The same numbers as in the table by rank.
        ends_ns |= {name: (min(times), max(times)) for name, times in _printed_ns(summary).items()}
    rows = []
    for part, time, share in zip(
        summary.parts, [*times, wall.mean_ns / unit_ns], [*shares, 100 * wall.share], strict=True
    ):
        ends = [in_unit(time_ns, unit_ns) for time_ns in ends_ns[part.name]] if ranks_differ else []
        rows.append([LABELS[part.name], f"{time:,.3f} {unit}", *ends, f"{share:.1f} %"])
    columns_width = sum(max(map(len, column)) + COLUMN_GAP for column in zip(*rows, strict=True))
    width = max(0, min(MAX_BAR_WIDTH, style.width - columns_width))
    rows_with_bars = [[*row, "" if part is wall else style.bar(part.share, width)]
             for row, part in zip(rows, summary.parts, strict=True)]  # fmt: skip
    titles = ["where the time went", *(["mean", "min", "max"] if ranks_differ else ["time"]), ""]
    columns = [*map(Column, titles), Column("", left=True, paint="cyan")]
    return text_table(columns, rows_with_bars, style, bold=[len(parts)])


def _by_kind(findings: Findings, style: TextStyle) -> str:
    kinds = findings.summary.kinds
    unit_ns, unit = unit_for(max(row.time_ns for row in kinds))
    # A range lasts from posting a transfer to the end of its wait; only marks show how long a rank was blocked.
    ranges = any(("send_recv", "") in rank.exposed.by_group for rank in findings.attribution.ranks)
    on_cpu = "posting to end of wait" if ranges else "blocked in wait"
    cpu_note = on_cpu if findings.attribution.on_cpu else ""
    rows = [
        [
            LABELS[row.kind],
            f"{in_unit(row.time_ns, unit_ns)} {unit}",
            percent(row.share),
            f"{row.calls:,.0f}" if row.calls == int(row.calls) else f"{row.calls:,.1f}",
            duration(row.average_ns, 1),
            f"{percent(row.hidden, 0)} hidden" if row.hidden is not None else cpu_note * (row.kind == "send_recv"),
        ]
        for row in kinds
    ]
    columns = [*map(Column, ("by kind", "time", "of wall", "calls", "average")), Column("", left=True)]
    return text_table(columns, rows, style)


def _largest_of_other(findings: Findings) -> Table:
    count = len(findings.attribution.ranks)
    columns = (
        Column("", folds=True),
        Column("time", "time"),
        Column("of wall", "share"),
        Column("calls", "rough count"),
    )
    rows = [
        [
            short_name(kernel.name),
            kernel.time_ns / count,
            kernel.time_ns / count / findings.summary.parts[-1].mean_ns,
            kernel.calls / count,
        ]
        for kernel in findings.attribution.largest_of_other
    ]
    return Table("largest of other compute", columns, rows)


def _by_rank(summary: Summary) -> Table:
    columns = [
        Column("by rank"), Column("wall", "time"), Column("compute", "time"), Column("exposed\ncomm", "time"),
        Column("exposed\nmemory", "time", 2), Column("idle", "time", 1), Column("overlap", "share"),
    ]  # fmt: skip
    has_waits = any(row.wait_share is not None for row in summary.ranks)
    if has_waits:
        columns.append(Column("waiting", "rough share"))
    has_one_link = has_waits and len(_links(summary.communication)) == 1
    if has_one_link:
        columns.append(Column("wire\nGB/s", "rate"))
    rows = [
        [row.label, row.wall_ns, *times_ns, row.overlap_ratio,
         *([row.wait_share] if has_waits else []), *([row.wire_gbps] if has_one_link else [])]
        for row, *times_ns in zip(summary.ranks, *_printed_ns(summary).values(), strict=True)
    ]  # fmt: skip
    return Table("by rank", columns, rows)


def _printed_ns(summary: Summary) -> dict[str, list[float]]:
    """Return the rows' ns by part, rounded so that a rank's printed parts add up; statistics are not rounded."""
    names = USUAL_PARTS
    rows = [[getattr(row, f"{name}_ns") for name in names] for row in summary.ranks]
    unit_ns, _ = unit_for(max(row.wall_ns for row in summary.ranks))
    if summary.ranks[0].label.startswith("rank "):
        rows = [
            [time * unit_ns for time in rounded_to_sum([part / unit_ns for part in parts], sum(parts) / unit_ns, 3)]
            for parts in rows
        ]
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _links(communication: Sequence[Communication]) -> set[str]:
    """Return the classes of links; a mean rate over several classes would describe none of them."""
    return {row.link for row in communication}


# --- data ---------------------------------------------------------------------------------------------


def json(findings: Findings) -> ReportParts:
    """Build the ``ranks`` of the JSON report, one item per rank."""
    return {"ranks": [_rank(rank) for rank in findings.attribution.ranks]}


def _rank(rank: Rank) -> JsonObject:
    breakdown, hops = rank.breakdown, rank.hop_totals
    others = {"exposed_other_groups_ns": breakdown.exposed_other_groups_ns} if OTHER_GROUPS in breakdown.kinds else {}
    others |= {"background_ns": breakdown.background_ns} if breakdown.background_ns else {}
    return {
        "rank": rank.rank,
        "host": rank.host,
        **{f"{row.name}_ns": getattr(breakdown, f"{row.name}_ns") for row in TIMES if not row.optional},
        **others,
        "overlap_ratio": breakdown.overlap_ratio,
        "kinds_ns": {kind: figures.time_ns for kind, figures in breakdown.kinds.items()},
        "waits": _waits(rank),
        "hops": {"count": hops.count, "bytes": hops.sent_bytes, "wait_ns": hops.wait_ns, "wire_ns": hops.wire_ns,
                 "wire_gbps": hops.wire_gbps} if hops.count else None,
        **idle.rank_fields(rank),
        "recurrence": [part._asdict() for part in rank.recurrence] or None,
    }  # fmt: skip


def _waits(rank: Rank) -> dict[str, dict[str, int]] | None:
    """Sum waiting and wire time by kind; kinds with a kernel whose split is not known are left out."""
    waits = {}
    for kind in dict.fromkeys(row.kind for row in rank.link_totals):
        rows = [row for row in rank.link_totals if row.kind == kind]
        if all(row.timed == row.kernels for row in rows):
            waits[kind] = {"wait_ns": sum(row.wait_ns for row in rows), "wire_ns": sum(row.wire_ns for row in rows)}
    return waits or None


# --- page ---------------------------------------------------------------------------------------------


def rank_table(ranks: Sequence[Mapping[str, Any]], communication: Sequence[Communication]) -> PageTable:
    """Build a table with one row per rank; ``ranks`` are those of the JSON report.

    The rate is left out where links of several classes were used.
    """
    times = ("wall", *USUAL_PARTS)
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


def html(findings: Findings, page: PageContext) -> Content:
    """Build the chart of the breakdown and a table with one row per rank."""
    ranks = json(findings)["ranks"]
    return Content(
        tables=[rank_table(ranks, findings.summary.communication)],
        lines=[] if findings.lists_steps else [_MANY_RANKS_NOTE],
        charts=[bars.breakdown(ranks)],
        folds_tables=True,
    )


def kinds_html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table with one row per kind, means over ranks."""
    columns = (Column("kind"), Column("mean", "time"), Column("of mean wall", "share"), Column("calls", "rough count"),
               Column("average", "short time"), Column("hidden", "share"))  # fmt: skip
    rows = [
        [LABELS[row.kind], row.time_ns, row.share, row.calls, row.average_ns, row.hidden]
        for row in findings.summary.kinds
    ]
    return Content(tables=[Table("", columns, rows).page("kind")]) if rows else None
