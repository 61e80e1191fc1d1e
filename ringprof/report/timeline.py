"""Bars of a drawn timeline: each rank's activities, one lane per stream, joined where there are too many to see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.stretches import Stretch, stretches_of
from ringprof.analysis.kinds.kinds import COMMUNICATION, KIND, KINDS
from ringprof.analysis.rank import Detail, Rank
from ringprof.analysis.steps.blocks import StepKey
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.timeline.idle import IdleParts, cause_text
from ringprof.analysis.transfers.hops import gbps
from ringprof.common.formatting import three_digits
from ringprof.report import palette
from ringprof.report.page.document import Content, PageContext, PageTable, TimeSpan
from ringprof.report.tables import Column, Table
from ringprof.report.terms import LABELS
from ringprof.trace.columns import Message

MAX_BARS = 12_000
"""Number of bars above which short bars are joined: a screen has a few thousand columns, and a page must stay fast."""
_PIXEL_COLUMNS = 2_000
MAX_LANES, MAX_LANES_PER_RANK = 96, 8
"""Largest number of lanes for which each stream has its own: of all ranks together, and of one rank."""


class Bar(NamedTuple):
    """A time span of a timeline, in nanoseconds from the first activity of any rank."""

    rank: int
    lane: str
    """``compute`` or ``communication``."""
    category: str
    """A kind of computation or memory operation; ``wait``, ``wire`` or ``unsplit``; or ``idle``."""
    kind: str
    """Kind of the activity; ``blocked_on_peer`` where nothing ran because of a peer's copy; or ``idle``."""
    start_ns: int
    end_ns: int
    name: str
    """Name of the activity, or of the first of several; for idle time its cause."""
    stream: int = 0
    step: str = ""
    """Ring step that the activity belongs to; empty where it is not known."""
    sent: str = ""
    """Peers, bytes and rate of communication, as far as they are known."""
    activities: int = 1
    """Number of activities, or of parts of an idle stretch, that the bar stands for."""


IDLE, BLOCKED_ON_PEER = "idle", "blocked_on_peer"
CATEGORY_ORDER = (IDLE, *KINDS, "wait", "wire", "unsplit")
"""Order of categories in every drawing: idle time is drawn first; waiting and wire are drawn last, on top."""


def label_and_colour(category: str) -> tuple[str, str]:
    """Return the label and the colour of a category of bars."""
    categories = {"wait": ("waiting for a peer", palette.WAIT), "wire": ("on the wire", palette.WIRE),
             "unsplit": ("communication", palette.UNSPLIT), IDLE: (LABELS[IDLE], palette.IDLE)}  # fmt: skip
    return categories.get(category) or (LABELS[category], KIND[category].colour)


class DrawnTimeline(NamedTuple):
    """Bars of all ranks, and whether some of them stand for several activities."""

    bars: list[Bar]
    steps: list[Step]
    origin_ns: dict[int, int]
    """Time to subtract from a rank's times, by rank."""
    thinned: bool


class Activity(NamedTuple):
    """An activity that a rank's breakdown counts; times are by the rank's own clock and cut at the window."""

    row: int
    """Row in ``trace.activities``."""
    kind: str
    name: str
    stream: int
    start_ns: int
    end_ns: int


def activities_of(detail: Detail) -> Iterator[Activity]:
    """Generate the activities in a rank's window on the reported device, by start; none on CPU.

    Everything that draws or lists activities takes them from here, so that it shows what the figures are based on.
    """
    rows, trace = detail.rows(), detail.classified.trace
    columns = trace.activities
    stream, name = columns.stream[rows.activity], columns.name[rows.activity]
    for row, kind, name_index, stream_number, start, end in zip(
        *(column.tolist() for column in (rows.activity, rows.kind, name, stream, rows.start_ns, rows.end_ns)),
        strict=True,
    ):
        yield Activity(row, KINDS[kind], trace.names[name_index], max(stream_number, 0), start, end)


def origins_of(attribution: Attribution) -> dict[int, int]:
    """Return for each rank the time to subtract, so that the first activity of all is at 0 on one clock."""
    offset = attribution.clocks.offset_ns
    first = min(rank.breakdown.start_ns + offset[rank.rank] for rank in attribution.ranks)
    return {rank.rank: first - offset[rank.rank] for rank in attribution.ranks}


StepsByActivity = Mapping[int, Mapping[int, StepKey]]
"""Rank -> row in its trace -> ring step that the activity belongs to."""


def timeline_of(
    attribution: Attribution, steps: Sequence[Step], by_activity: StepsByActivity | None = None
) -> DrawnTimeline:
    """Build the bars of all ranks on one clock; none for ranks on CPU, whose traces hold no device activities."""
    origin, steps_of_ranks = origins_of(attribution), by_activity or {}
    ranks = [rank for rank in attribution.ranks if not rank.on_cpu]
    column_ns = max((rank.breakdown.end_ns - origin[rank.rank] for rank in ranks), default=0) // _PIXEL_COLUMNS
    bars = [
        bar for rank in ranks for bar in _bars(rank, origin[rank.rank], steps_of_ranks.get(rank.rank, {}), column_ns)
    ]
    thinned = len(bars) > MAX_BARS
    if thinned:
        bars = list(_joined_bars(bars, max(1, column_ns)))
    return DrawnTimeline(bars, list(steps), origin, thinned)


def lanes_of(bars: Iterable[Bar]) -> dict[tuple[int, str, int], int]:
    """Number the lanes of each rank from 0: (rank, lane, stream) -> number, computation first, then by stream.

    Where ranks have more streams than can be drawn, one lane holds all computation, and one all communication.
    """
    streams = sorted({(bar.rank, bar.lane != "compute", bar.stream) for bar in bars})
    separate_lanes = (
        len(streams) <= MAX_LANES
        and max(Counter(rank for rank, *_ in streams).values(), default=0) <= MAX_LANES_PER_RANK
    )
    lanes: dict[tuple[int, str, int], int] = {}
    last_lane: dict[int, int] = {}
    for rank, communicates, stream in streams:
        if separate_lanes:
            lane = last_lane[rank] = last_lane.get(rank, -1) + 1
        else:
            lane = int(communicates)
        lanes[rank, "communication" if communicates else "compute", stream] = lane
    return lanes


def _bars(rank: Rank, origin: int, steps: Mapping[int, StepKey], column_ns: int) -> Iterator[Bar]:
    """Generate the bars of one rank: its activities, time blocked on peers, and visible idle stretches."""
    detail, streams = rank.detail, set[int]()
    for bar in _activity_bars(rank.rank, detail, origin, steps):
        if bar.lane == "compute":
            streams.add(bar.stream)
        yield bar
    columns, names = detail.classified.trace.activities, detail.classified.trace.names
    for block in detail.blocks:
        stream, name = max(int(columns.stream[block.hop]), 0), names[columns.name[block.hop]]
        start, end = block.start_ns - origin, block.end_ns - origin
        peer = "peer not known" if block.peer is None else f"peer: rank {block.peer}"
        yield Bar(rank.rank, "communication", block.part, BLOCKED_ON_PEER, start, end, name, stream, sent=peer)
    # Idle means that no stream runs anything, so the first lane is free.
    stream = min(streams, default=0)
    parts = detail.idle_parts()
    for group in idle_groups(parts, column_ns):
        start, end = int(parts.start_ns[group[0]]) - origin, int(parts.end_ns[group[-1]]) - origin
        label = cause_text(*parts.main_label(group, names))
        yield Bar(rank.rank, "compute", IDLE, IDLE, start, end, label, stream, activities=len(group))


def _activity_bars(rank: int, detail: Detail, origin: int, steps: Mapping[int, StepKey]) -> Iterator[Bar]:
    split = {part.transfer.activity: part for part in detail.splits}
    for activity in activities_of(detail):
        part, key = split.get(activity.row), steps.get(activity.row)
        start, end = activity.start_ns - origin, activity.end_ns - origin
        kind, step = activity.kind, step_name(key) if key else ""
        bar = Bar(rank, "compute", kind, kind, start, end, activity.name, activity.stream, step)
        if kind in COMMUNICATION:
            bar = bar._replace(lane="communication", category="unsplit")
        if kind not in COMMUNICATION or part is None:
            yield bar
            continue
        transfer, rate_gbps = part.transfer, gbps(part.transfer.sent_bytes, part.wire_ns)
        receivers, senders = peers_of(transfer.sends), peers_of(transfer.receives)
        sent = [f"to {receivers}" if receivers else "", f"from {senders}" if senders else ""]
        sent += [f"{transfer.sent_bytes / 1e6:,.1f} MB" if transfer.sent_bytes is not None else ""]
        sent += [f"{three_digits(rate_gbps)} GB/s" if rate_gbps is not None else ""]
        bar = bar._replace(sent=", ".join(filter(None, sent)))
        if part.wire_ns is None:
            yield bar
            continue
        ready = min(max(part.transfer.end_ns - part.wire_ns - origin, start), end)
        for category, part_start, part_end in (("wait", start, ready), ("wire", ready, end)):
            if part_end > part_start or category == "wire":
                yield bar._replace(category=category, start_ns=part_start, end_ns=part_end)


# --- idle time ----------------------------------------------------------------------------------------


def idle_groups(parts: IdleParts, shortest_ns: int = 0) -> Iterator[list[int]]:
    """Yield the rows of ``parts`` that are drawn as one bar, for the idle stretches of at least ``shortest_ns``.

    Touching parts with the same cause, class and name form one bar. Touching parts that are each shorter than
    ``shortest_ns`` also form one bar.
    """
    stretches = intervals.union(parts.start_ns, parts.end_ns)
    is_long = stretches.end_ns - stretches.start_ns >= shortest_ns
    visible = intervals.Spans(stretches.start_ns[is_long], stretches.end_ns[is_long])
    rows = np.flatnonzero(intervals.contains(visible, parts.start_ns))
    group: list[int] = []
    for row in rows.tolist():
        if group:
            previous = group[-1]
            same_cause = all(column[row] == column[previous] for column in (parts.cause, parts.event_class, parts.name))
            both_short = all(parts.end_ns[index] - parts.start_ns[index] < shortest_ns for index in (previous, row))
            if parts.start_ns[row] != parts.end_ns[previous] or not (same_cause or both_short):
                yield group
                group = []
        group.append(row)
    if group:
        yield group


# --- names, and bars that are too short to be seen ----------------------------------------------------


def step_name(key: StepKey) -> str:
    """Return a ring step's name, such as ``fwd 2 of call 1``."""
    return f"{key.phase} {key.step}" + (f" of call {key.call}" if key.call else "")


def peers_of(messages: Iterable[Message]) -> str | None:
    """Return the ranks that messages go to or come from, as text; None where there are none."""
    return ", ".join(dict.fromkeys(f"rank {message.peer}" for message in messages)) or None


def _joined_bars(bars: Iterable[Bar], gap_ns: int) -> Iterable[Bar]:
    """Join short bars of the same rank, lane, category and stream.

    A bar shorter than ``gap_ns`` joins the previous bar if the gap between them is shorter than ``gap_ns`` too.
    """
    open_bars: dict[tuple[int, str, str, int], Bar] = {}
    for bar in sorted(bars, key=lambda bar: bar.start_ns):
        key = bar.rank, bar.lane, bar.category, bar.stream
        previous = open_bars.get(key)
        is_short = bar.end_ns - bar.start_ns < gap_ns
        if previous is not None and is_short and bar.start_ns - previous.end_ns < gap_ns:
            end = max(previous.end_ns, bar.end_ns)
            open_bars[key] = previous._replace(end_ns=end, activities=previous.activities + bar.activities)
            continue
        if previous is not None:
            yield previous
        open_bars[key] = bar
    yield from open_bars.values()


# --- page ---------------------------------------------------------------------------------------------

_THINNED_NOTE = (
    "Neighbouring short activities are drawn as one bar, so that the page stays quick; sums over an area count the "
    "gaps between them."
)
_MARKED_PER_RANK, MOST_STRETCHES = 400, 50
"""Number of stretches of a rank that the overview marks, and of rows in the table of stretches."""
_STEP_COLUMN = Column("ring step")
_STRETCH_COLUMNS = (
    Column("rank", "count"), Column("what"), Column("start", "time"), Column("length", "time"),
    Column("of wall", "share"), Column("waiting", "time"), Column("wire", "time"), _STEP_COLUMN, Column("cause"),
)  # fmt: skip


def legend_of(bars: Iterable[Bar]) -> list[tuple[str, str]]:
    """Return label and colour of the categories that occur, in drawing order."""
    return [label_and_colour(category) for category in CATEGORY_ORDER if category in {bar.category for bar in bars}]


def span_of(rank: int, start_ns: int, end_ns: int, origin_ns: Mapping[int, int]) -> TimeSpan:
    """Return a time of one rank on the axis of the timeline."""
    return TimeSpan(rank, (start_ns - origin_ns[rank]) / 1e6, (end_ns - origin_ns[rank]) / 1e6)


def html(findings: Findings, page: PageContext) -> Content | None:
    """Draw overview and timeline, and list the longest stretches without computation.

    None on CPU, whose traces hold no device activities, and for very many ranks.
    """
    attribution = findings.attribution
    if attribution.on_cpu or not findings.lists_steps:
        return None
    drawn = timeline_of(attribution, findings.steps, findings.finder.by_activity)
    ranks = [rank.rank for rank in attribution.ranks]
    stretches = stretches_of(attribution.ranks, _MARKED_PER_RANK)
    marks = [(stretch.what, span_of(*stretch[:1], *stretch[2:4], drawn.origin_ns)) for stretch in stretches]
    table = _stretch_table(findings, stretches[:MOST_STRETCHES], [span for _, span in marks[:MOST_STRETCHES]])
    return Content(
        page.figures.timeline(drawn, ranks, marks),
        [table] if stretches else [],
        [_THINNED_NOTE] if drawn.thinned else [],
        legend=legend_of(drawn.bars),
        key=[
            ("computation", palette.BUSY),
            *((LABELS[what], colour) for what, colour in palette.STRETCH_COLOURS.items()),
        ],
    )


def _stretch_table(findings: Findings, stretches: Sequence[Stretch], spans: Sequence[TimeSpan]) -> PageTable:
    """Build the table of the longest stretches of exposed communication and idle time."""
    wall_ns = findings.summary.slowest_wall_ns or 1
    rows = []
    for stretch, span in zip(stretches, spans, strict=True):
        split = stretch.wait_ns + stretch.wire_ns > 0
        rows.append([
            stretch.rank, LABELS[stretch.what], round(1e6 * span.start_ms), stretch.time_ns, stretch.time_ns / wall_ns,
            stretch.wait_ns if split else None, stretch.wire_ns if split else None,
            *([_step_around(findings.steps, stretch) or "-"] if findings.steps else []), stretch.cause or "-",
        ])  # fmt: skip
    columns = [column for column in _STRETCH_COLUMNS if findings.steps or column is not _STEP_COLUMN]
    return Table("", columns, rows).page("span", spans)


def _step_around(steps: Sequence[Step], stretch: Stretch) -> str:
    """Return the name of the rank's ring step that overlaps most of a stretch; empty where none does."""
    overlaps = {
        min(step.end_ns, stretch.end_ns) - max(step.start_ns, stretch.start_ns): step
        for step in steps if step.rank == stretch.rank
    }  # fmt: skip
    longest = max(overlaps, default=0)
    if longest <= 0:
        return ""
    step = overlaps[longest]
    return step_name(StepKey(step.iteration, step.phase, step.call, step.step))
