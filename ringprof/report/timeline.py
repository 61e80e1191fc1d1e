"""What a drawn timeline shows: each rank's activities as bars, a lane a stream, thinned to what can be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.kinds.kinds import COMMUNICATION, KIND, KINDS
from ringprof.analysis.rank import Detail, Rank
from ringprof.analysis.steps.blocks import StepKey
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.transfers.hops import PeerBlock, Split, gbps
from ringprof.analysis.transfers.transfers import Message
from ringprof.formatting import three_digits
from ringprof.report import palette
from ringprof.report.idle_bars import idle_bars
from ringprof.report.page.document import Content, PageContext
from ringprof.report.terms import LABELS

MOST_BARS = 12_000
"""More are joined: a screen has some thousand columns, and a page must stay quick."""
_COLUMNS = 2_000
MOST_LANES, OF_A_RANK = 96, 8
"""Of all ranks together, and of each."""


class Bar(NamedTuple):
    """Something that ran from one time to another, in nanoseconds from the first activity of any rank."""

    rank: int
    lane: str
    """``compute`` or ``communication``."""
    what: str
    """A kind of computation or memory operation; ``wait``, ``wire`` or ``unsplit``; or ``idle``."""
    kind: str
    """Of the activity; ``blocked_on_peer`` where nothing ran because of a peer's copy; or ``idle``."""
    start_ns: int
    end_ns: int
    name: str
    """Of the activity; of the first of several. Of idle time its cause."""
    stream: int = 0
    step: str = ""
    """The ring step that it belongs to, where that is known."""
    sent: str = ""
    """Of communication: peers, bytes and rate, as far as they are known."""
    activities: int = 1
    """How many activities, or parts of an idle stretch, the bar stands for."""


IDLE, BLOCKED_ON_PEER = "idle", "blocked_on_peer"
ORDER = (IDLE, *KINDS, "wait", "wire", "unsplit")
"""Of a timeline's sorts, in every drawing: idle below all, waiting and wire last, which are what one looks for."""


def drawn_as(what: str) -> tuple[str, str]:
    """What a bar of this sort is called, and its colour."""
    sorts = {"wait": ("waiting for a peer", palette.WAIT), "wire": ("on the wire", palette.WIRE),
             "unsplit": ("communication", palette.UNSPLIT), IDLE: (LABELS[IDLE], palette.IDLE)}  # fmt: skip
    return sorts.get(what) or (LABELS[what], KIND[what].colour)


class DrawnTimeline(NamedTuple):
    """All bars, and whether some stand for several activities."""

    bars: list[Bar]
    steps: list[Step]
    origin_ns: dict[int, int]
    """By rank: what to take from its times."""
    thinned: bool


class Activity(NamedTuple):
    """One activity that a rank's breakdown counts; times by the rank's own clock, cut where the window is."""

    row: int
    """In ``trace.activities``."""
    kind: str
    name: str
    stream: int
    start_ns: int
    end_ns: int


def activities_of(detail: Detail) -> Iterator[Activity]:
    """What ran in a rank's window on the device that is reported, by start; nothing on CPU.

    Whatever draws or lists activities takes them from here, so that it shows what the figures are of.
    """
    rows, trace = detail.rows(), detail.classified.trace
    columns = trace.activities
    stream, name = columns.stream[rows.activity], columns.name[rows.activity]
    for row, kind, at, on, start, end in zip(
        *(column.tolist() for column in (rows.activity, rows.kind, name, stream, rows.start_ns, rows.end_ns)),
        strict=True,
    ):
        yield Activity(row, KINDS[kind], trace.names[at], max(on, 0), start, end)


def origins_of(attribution: Attribution) -> dict[int, int]:
    """By rank: what to take from its times, so that the first activity of all is at 0 on one clock."""
    offset = attribution.clocks.offset_ns
    first = min(rank.breakdown.start_ns + offset[rank.rank] for rank in attribution.ranks)
    return {rank.rank: first - offset[rank.rank] for rank in attribution.ranks}


StepsByActivity = Mapping[int, Mapping[int, StepKey]]
"""Rank -> row in its trace -> the ring step that the activity belongs to."""


def timeline_of(
    attribution: Attribution, steps: Sequence[Step], by_activity: StepsByActivity | None = None
) -> DrawnTimeline:
    """The bars of all ranks on one clock; none for ranks on CPU, whose traces hold no device activities."""
    origin, known = origins_of(attribution), by_activity or {}
    ranks = [rank for rank in attribution.ranks if not rank.on_cpu]
    column_ns = max((rank.breakdown.end_ns - origin[rank.rank] for rank in ranks), default=0) // _COLUMNS
    bars = [bar for rank in ranks for bar in _bars(rank, origin[rank.rank], known.get(rank.rank, {}), column_ns)]
    thinned = len(bars) > MOST_BARS
    if thinned:
        bars = list(_joined(bars, max(1, column_ns)))
    return DrawnTimeline(bars, list(steps), origin, thinned)


def lanes_of(bars: Iterable[Bar]) -> dict[tuple[int, str, int], int]:
    """(Rank, lane, stream) -> its place among the rank's lanes, from 0: computation first, each by stream.

    Where ranks have more streams than can be drawn, one lane holds all computation, and one all communication.
    """
    streams = sorted({(bar.rank, bar.lane != "compute", bar.stream) for bar in bars})
    several = len(streams) <= MOST_LANES and max(Counter(rank for rank, *_ in streams).values(), default=0) <= OF_A_RANK
    places: dict[tuple[int, str, int], int] = {}
    used: dict[int, int] = {}
    for rank, sends, stream in streams:
        if several:
            place = used[rank] = used.get(rank, -1) + 1
        else:
            place = int(sends)
        places[rank, "communication" if sends else "compute", stream] = place
    return places


def _bars(rank: Rank, origin: int, steps: Mapping[int, StepKey], column_ns: int) -> Iterator[Bar]:
    """Draw one rank: what ran, what it was blocked on, and idle stretches that are wide enough to be seen."""
    detail, streams = rank.detail, set[int]()
    for bar in _of_activities(rank.rank, detail, origin, steps):
        if bar.lane == "compute":
            streams.add(bar.stream)
        yield bar
    columns, names = detail.classified.trace.activities, detail.classified.trace.names
    for block in detail.blocks:
        stream, name = max(int(columns.stream[block.hop]), 0), names[columns.name[block.hop]]
        start, end = block.start_ns - origin, block.end_ns - origin
        yield Bar(rank.rank, "communication", block.part, BLOCKED_ON_PEER, start, end, name, stream, sent=_peer(block))
    # Nothing runs on any stream then: the first lane has room.
    stream = min(streams, default=0)
    for idle in idle_bars(detail.idle_parts(), names, column_ns):
        start, end = idle.start_ns - origin, idle.end_ns - origin
        yield Bar(rank.rank, "compute", IDLE, IDLE, start, end, idle.label, stream, activities=idle.parts)


def _peer(block: PeerBlock) -> str:
    return "peer not known" if block.peer is None else f"peer: rank {block.peer}"


def _of_activities(rank: int, detail: Detail, origin: int, steps: Mapping[int, StepKey]) -> Iterator[Bar]:
    split = {part.transfer.activity: part for part in detail.splits}
    for one in activities_of(detail):
        part, key = split.get(one.row), steps.get(one.row)
        start, end = one.start_ns - origin, one.end_ns - origin
        bar = Bar(rank, "compute", one.kind, one.kind, start, end, one.name, one.stream, step_name(key) if key else "")
        if one.kind not in COMMUNICATION:
            yield bar
            continue
        bar = bar._replace(lane="communication", what="unsplit", sent=_sent(part) if part else "")
        if part is None or part.wire_ns is None:
            yield bar
            continue
        ready = min(max(part.transfer.end_ns - part.wire_ns - origin, start), end)
        for what, since, until in (("wait", start, ready), ("wire", ready, end)):
            if until > since or what == "wire":
                yield bar._replace(what=what, start_ns=since, end_ns=until)


def step_name(key: StepKey) -> str:
    """A ring step in words."""
    return f"{key.phase} {key.step}" + (f" of call {key.call}" if key.call else "")


def peers_of(messages: Iterable[Message]) -> str | None:
    """The ranks that messages go to or come from; None where there are none."""
    return ", ".join(dict.fromkeys(f"rank {one.peer}" for one in messages)) or None


def _sent(part: Split) -> str:
    transfer = part.transfer
    to, of, speed = peers_of(transfer.sends), peers_of(transfer.receives), gbps(transfer.sent_bytes, part.wire_ns)
    parts = [f"to {to}" if to else "", f"from {of}" if of else ""]
    parts += [f"{transfer.sent_bytes / 1e6:,.1f} MB" if transfer.sent_bytes is not None else ""]
    parts += [f"{three_digits(speed)} GB/s" if speed is not None else ""]
    return ", ".join(filter(None, parts))


def _joined(bars: Iterable[Bar], gap_ns: int) -> Iterable[Bar]:
    """Bars of one rank, lane and sort, joined where less than ``gap_ns`` lies between two that are no longer."""
    open_bars: dict[tuple[int, str, str, int], Bar] = {}
    for bar in sorted(bars, key=lambda bar: bar.start_ns):
        key = bar.rank, bar.lane, bar.what, bar.stream
        before = open_bars.get(key)
        short = bar.end_ns - bar.start_ns < gap_ns
        if before is not None and short and bar.start_ns - before.end_ns < gap_ns:
            end = max(before.end_ns, bar.end_ns)
            open_bars[key] = before._replace(end_ns=end, activities=before.activities + bar.activities)
            continue
        if before is not None:
            yield before
        open_bars[key] = bar
    yield from open_bars.values()


_THINNED = "Neighbouring short activities are drawn as one bar, so that the page stays quick."


def html(found: Findings, page: PageContext) -> Content | None:
    """None on CPU, whose traces hold no device activities, and of very many ranks."""
    attribution = found.attribution
    if attribution.on_cpu or not found.lists_steps:
        return None
    drawn = timeline_of(attribution, found.steps, found.finder.by_activity)
    ranks = [rank.rank for rank in attribution.ranks]
    return Content(page.figures.timeline(drawn, ranks), lines=[_THINNED] if drawn.thinned else [])
