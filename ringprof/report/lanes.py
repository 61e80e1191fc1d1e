"""What a drawn timeline shows: each rank's activities as bars in two lanes, thinned to what can be seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.kinds.kinds import COMMUNICATION, KINDS
from ringprof.analysis.rank import Rank
from ringprof.analysis.steps.steps import Step

MOST_BARS = 12_000
"""More are joined: a screen has some thousand columns, and a page must stay quick."""
COLUMNS = 2_000


class Bar(NamedTuple):
    """Something that ran from one time to another, in nanoseconds from the first activity of any rank."""

    rank: int
    lane: str
    """``compute`` or ``communication``."""
    what: str
    """A kind of computation or memory operation; or ``wait``, ``wire`` or ``unsplit``."""
    kind: str
    start_ns: int
    end_ns: int
    name: str
    """Of the activity; of the first of several."""
    activities: int = 1


class Timeline(NamedTuple):
    """All bars, and whether some stand for several activities."""

    bars: list[Bar]
    steps: list[Step]
    origin_ns: dict[int, int]
    """By rank: what to take from its times."""
    thinned: bool


def timeline_of(attribution: Attribution, steps: Sequence[Step]) -> Timeline:
    """The bars of all ranks on one clock; none for ranks on CPU, whose traces hold no device activities."""
    ranks = [rank for rank in attribution.ranks if not rank.on_cpu]
    offset = attribution.clocks.offset_ns
    first = min((rank.breakdown.start_ns + offset[rank.rank] for rank in ranks), default=0)
    origin = {rank.rank: first - offset[rank.rank] for rank in ranks}
    bars = [bar for rank in ranks for bar in _bars(rank, origin[rank.rank])]
    thinned = len(bars) > MOST_BARS
    if thinned:
        span = max(bar.end_ns for bar in bars)
        bars = list(_joined(bars, max(1, span // COLUMNS)))
    return Timeline(bars, list(steps), origin, thinned)


def _bars(rank: Rank, origin: int) -> Iterable[Bar]:
    trace, kinds = rank.classified.trace, rank.classified.kind
    columns = trace.activities
    split = {part.transfer.activity: part for part in rank.splits}
    for at in rank.window.activities().tolist():
        kind, name = KINDS[kinds[at]], trace.names[columns.name[at]]
        start, end = int(columns.start_ns[at]) - origin, int(columns.end_ns[at]) - origin
        if kind not in COMMUNICATION:
            yield Bar(rank.rank, "compute", kind, kind, start, end, name)
            continue
        part = split.get(at)
        if part is None or part.wire_ns is None:
            yield Bar(rank.rank, "communication", "unsplit", kind, start, end, name)
            continue
        ready = end - part.wire_ns
        if ready > start:
            yield Bar(rank.rank, "communication", "wait", kind, start, ready, name)
        yield Bar(rank.rank, "communication", "wire", kind, ready, end, name)


def _joined(bars: Iterable[Bar], gap_ns: int) -> Iterable[Bar]:
    """Bars of one rank, lane and sort, joined where less than ``gap_ns`` lies between two that are no longer."""
    open_bars: dict[tuple[int, str, str], Bar] = {}
    for bar in sorted(bars, key=lambda bar: bar.start_ns):
        key = bar.rank, bar.lane, bar.what
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
