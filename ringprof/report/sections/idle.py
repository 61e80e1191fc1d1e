"""Idle time by cause: what each rank's device waited for while nothing ran on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import starmap
from statistics import fmean
from typing import Any

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import MOST_RANKS_LISTED
from ringprof.analysis.rank import Rank
from ringprof.analysis.timeline.host_activity import HOST_CLASSES
from ringprof.analysis.timeline.idle import BLOCKED, CAUSES, GAP, GAP_NS, HOST, IdleCauses, IdleEvent, causes_of_ranks
from ringprof.common.json_object import JsonObject
from ringprof.report import palette
from ringprof.report.listing import RANK, Field, FieldTable
from ringprof.report.page import bars
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column, Listing, Table, text_table
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle, clean, in_unit, rounded_to_sum, unit_for

CLASSES = (*HOST_CLASSES, GAP, BLOCKED)
"""Classes of idle time: the classes of host time, then the other causes."""
MAX_NAMES = 50
"""Number of idle events per rank in the JSON report; the rest of each class is one item."""
OTHERS = "(others)"
_MAX_LISTED = 15
_ON_CPU = "idle: a CPU trace records no device activity, so it cannot tell the causes of idle time"
_CAUSES_NOTE = (
    "host: the next activity was not launched yet; gap: launched, "
    f"starts within {GAP_NS // 1000} µs; blocked: launched, starts later"
)
_PEER_NOTE = "blocked on a peer: no activity because of a peer's copy; part of exposed communication, not of idle"
_DELAY_NOTE = "delay: from the start of the launch call to the start of the activity"

COLUMNS = (
    Column("name", folds=True), Column("class", drop=1), Column("time", "time"), Column("of idle", "share"),
)  # fmt: skip


KnownIdle = tuple[Rank, IdleCauses]
"""A rank whose trace shows the causes of its idle time, and these."""


def known_idle(findings: Findings) -> list[KnownIdle]:
    """List the ranks whose traces show the causes of idle time; none on CPU."""
    return [(rank, rank.idle) for rank in findings.attribution.ranks if rank.idle is not None]


def time_by_class(causes: IdleCauses) -> dict[str, int]:
    """Sum idle time by class, in the order of `CLASSES`; classes without time are left out."""
    times: dict[str, int] = defaultdict(int)
    for event in causes.events:
        times[event.event_class] += event.time_ns
    return {name: times[name] for name in CLASSES if name in times}


def class_label(name: str) -> str:
    """Return a class with its cause in front, such as ``host: data loader``; gap and blocked are causes themselves."""
    return name if name in CAUSES else f"{HOST}: {name}"


def stacked_parts(ranks: Sequence[KnownIdle]) -> dict[str, tuple[str, list[float]]]:
    """Return the parts of one bar per rank: label -> (colour, ms per rank).

    The last part is time blocked on a peer, where there is any; it is communication, not idle time.
    """
    times = [time_by_class(causes) for _, causes in ranks]
    parts = {
        class_label(name): (palette.IDLE_COLOURS[name], [times_of_rank.get(name, 0) / 1e6 for times_of_rank in times])
        for name in CLASSES
        if any(name in times_of_rank for times_of_rank in times)
    }
    blocked = [rank.breakdown.blocked_on_peer_ns / 1e6 for rank, _ in ranks]
    return {**parts, **({PEER_LABEL: (palette.WAIT, blocked)} if any(blocked) else {})}


PEER_LABEL = "blocked on a peer (communication)"


# --- terminal -------------------------------------------------------------------------------------------


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Show idle time by rank and cause, by class and by name, and how activities were launched."""
    ranks = known_idle(findings)
    if not ranks:
        return [style.wrap(_ON_CPU)]
    causes = causes_of_ranks([causes_of_rank for _, causes_of_rank in ranks])
    blocks = [_by_rank(ranks, style, listing)]
    if causes.total_ns:
        title = "idle by name" + (f", mean of {len(ranks)} ranks" if len(ranks) > 1 else "")
        names = Table(title, COLUMNS, _name_rows(causes, len(ranks)), "--all")
        blocks += [_by_class(causes, len(ranks), style), names.listed(style, listing, _MAX_LISTED)]
    launches = _launch_table(ranks, listing)
    return [*blocks, launches.text(style) + "\n" + style.wrap(_DELAY_NOTE, "dim")] if launches.rows else blocks


def _listed_ranks(ranks: Sequence[KnownIdle], listing: Listing) -> Sequence[KnownIdle]:
    """Choose the ranks that get a row: all, or where there are many, the one that is idle longest."""
    if len(ranks) <= MOST_RANKS_LISTED or listing.everything:
        return ranks
    return [max(ranks, key=lambda known: known[1].total_ns)]


def _by_rank(ranks: Sequence[KnownIdle], style: TextStyle, listing: Listing) -> str:
    rows = [(f"rank {rank.rank}", _times_of(rank, causes)) for rank, causes in _listed_ranks(ranks, listing)]
    if len(ranks) > 1:
        means = tuple(map(fmean, zip(*starmap(_times_of, ranks), strict=True)))
        rows.append((f"mean of {len(ranks)} ranks", means))
    has_peers = any(times[-1] for _, times in rows)
    unit_ns, unit = unit_for(max(times[_IDLE_INDEX] for _, times in rows))
    columns = [Column(f"idle by cause\nin {unit}"), *map(Column, ("host", "gap", "blocked", "idle", "of wall"))]
    cells = [[name, *_format_row(times, unit_ns, has_peers=has_peers)] for name, times in rows]
    table = text_table([*columns, *([Column("blocked on\na peer")] if has_peers else [])], cells, style)
    return "\n".join([table, style.wrap(_CAUSES_NOTE, "dim"), *([style.wrap(_PEER_NOTE, "dim")] if has_peers else [])])


def _times_of(rank: Rank, causes: IdleCauses) -> tuple[float, ...]:
    """Return host, gap, blocked, idle, wall and time blocked on a peer, in nanoseconds."""
    breakdown = rank.breakdown
    parts = (causes.host_ns, causes.gap_ns, causes.blocked_ns, causes.total_ns)
    return *parts, breakdown.wall_ns, breakdown.blocked_on_peer_ns


_IDLE_INDEX = 3
"""Index of the idle time in `_times_of`."""


def _format_row(times: tuple[float, ...], unit_ns: float, *, has_peers: bool) -> list[str]:
    """Format one row so that the displayed causes sum to the displayed idle time."""
    *parts, idle, wall, blocked = times
    rounded = rounded_to_sum([part / unit_ns for part in parts], idle / unit_ns, 3)
    share = f"{100 * idle / wall:.1f} %" if wall else "-"
    shown = [*(f"{value:,.3f}" for value in rounded), in_unit(idle, unit_ns), share]
    return [*shown, *([in_unit(blocked, unit_ns)] if has_peers else [])]


def _by_class(causes: IdleCauses, count: int, style: TextStyle) -> str:
    times = time_by_class(causes)
    mean_idle_ns = causes.total_ns / count
    unit_ns, unit = unit_for(mean_idle_ns)
    shown = rounded_to_sum([time / count / unit_ns for time in times.values()], mean_idle_ns / unit_ns, 3)
    shares = rounded_to_sum([100 * time / causes.total_ns for time in times.values()], 100.0, 1)
    rows = [
        [class_label(name), f"{time:,.3f} {unit}", f"{share:.1f} %"]
        for name, time, share in zip(times, shown, shares, strict=True)
    ]
    rows.append([LABELS["idle"], f"{in_unit(mean_idle_ns, unit_ns)} {unit}", "100.0 %"])
    columns = [*map(Column, ("idle by class", "mean" if count > 1 else "time", "of idle"))]
    return text_table(columns, rows, style, bold=[len(times)])


def _name_rows(causes: IdleCauses, count: int) -> list[list[Any]]:
    """Build one row per class and name, longest first: name, class, mean time over ranks, share of idle time."""
    return [
        [name_shown(event), event.event_class, event.time_ns / count, event.time_ns / causes.total_ns]
        for event in causes.events
    ]


def name_shown(event: IdleEvent) -> str:
    """Return an event's name for display; events without a name get a description."""
    if event.event_class == GAP:
        return "(gaps between activities)"
    return clean(event.name) or f"({event.event_class})"


_LAUNCH_COLUMNS = (
    Column(""), Column("launched", "rough count"), Column("median\ndelay", "short time"),
    Column("longest\ndelay", "short time"), Column("shorter than\ntheir launch", "rough count", 1),
    Column("in launch\ncalls", "short time", 2),
)  # fmt: skip


def _launch_table(ranks: Sequence[KnownIdle], listing: Listing) -> Table:
    """Build one row per rank whose launches are recorded, and the mean of several."""
    timed = [known for known in ranks if known[0].launches is not None]
    figures = {rank.rank: msgspec.structs.astuple(rank.launches) for rank, _ in timed if rank.launches is not None}
    rows = [[f"rank {rank.rank}", *figures[rank.rank]] for rank, _ in _listed_ranks(timed, listing)]
    if len(timed) > 1:
        rows.append([f"mean of {len(timed)} ranks", *map(fmean, zip(*figures.values(), strict=True))])
    return Table("launches", _LAUNCH_COLUMNS, rows)


# --- data -----------------------------------------------------------------------------------------------


def rank_fields(rank: Rank) -> JsonObject:
    """Build a rank's idle fields for the JSON report; null where the trace is of a CPU."""
    causes = rank.idle
    return {
        "idle_causes_ns": {cause: getattr(causes, f"{cause}_ns") for cause in CAUSES} if causes else None,
        "blocked_on_peer_ns": rank.breakdown.blocked_on_peer_ns,
        "idle_events": _event_items(causes) if causes else None,
        "launches": msgspec.to_builtins(rank.launches),
    }


def _event_items(causes: IdleCauses) -> list[JsonObject]:
    """List the longest events, then the rest of each class; together they sum to the idle time."""
    rest: dict[str, int] = defaultdict(int)
    for event in causes.events[MAX_NAMES:]:
        rest[event.event_class] += event.time_ns
    kept = [(event.event_class, event.name, event.time_ns) for event in causes.events[:MAX_NAMES]]
    left = [(name, OTHERS, time) for name, time in rest.items()]
    return [dict(zip(("class", "name", "time_ns"), item, strict=True)) for item in (*kept, *left)]


IDLE = FieldTable(
    "idle",
    lambda findings: [
        {**msgspec.structs.asdict(event), "rank": rank.rank, "class": event.event_class,
         "share": event.time_ns / causes.total_ns}
        for rank, causes in known_idle(findings)
        for event in causes.events
    ],
    (
        RANK,
        Field("cause", "host: next activity not launched yet; gap: launched, starts within 5 µs; blocked: starts "
              "later"),
        Field("class", "for host time, what the launching thread did; else the cause"),
        Field("name", "innermost host event; for blocked time, what it waited for, if known; may be empty"),
        Field("time_ns", "idle time with this cause, class and name; all rows of a rank sum to its idle_ns"),
        Field("share", "share of the rank's idle_ns, 0..1"),
    ),
)  # fmt: skip


# --- page -----------------------------------------------------------------------------------------------

_RANK_COLUMNS = (
    Column("rank", "count"), *(Column(name, "time") for name in ("host", "gap", "blocked", "idle")),
    Column("of wall", "share"), Column("blocked on a peer", "time"), Column("launched", "count"),
    Column("median delay", "short time", on_page="median delay µs"), Column("shorter than launch", "count"),
)  # fmt: skip


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build one bar per rank, a table by rank and one by name; None on CPU and where there is no idle time."""
    ranks = known_idle(findings)
    causes = causes_of_ranks([causes_of_rank for _, causes_of_rank in ranks])
    if not causes.total_ns and not any(rank.breakdown.blocked_on_peer_ns for rank, _ in ranks):
        return None
    labels = [f"rank {rank.rank}" for rank, _ in ranks]
    by_rank = Table("", _RANK_COLUMNS, [*starmap(_page_row, ranks)], "report --format json").page()
    by_name = Table("", COLUMNS, _name_rows(causes, len(ranks)), "run.idle()").page()
    note = ["By name: means over ranks."] if len(ranks) > 1 else []
    return Content(tables=[by_rank, by_name], lines=note, charts=[bars.stacked(labels, stacked_parts(ranks), "ms")])


def _page_row(rank: Rank, causes: IdleCauses) -> list[Any]:
    host, gap, blocked, idle, wall, blocked_on_peer = _times_of(rank, causes)
    launches = rank.launches
    figures = (launches.count, launches.median_delay_ns, launches.shorter_than_launch) if launches else (None,) * 3
    return [rank.rank, host, gap, blocked, idle, idle / wall if wall else None, blocked_on_peer, *figures]
