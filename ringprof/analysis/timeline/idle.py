"""Why a device idled: for each moment without activity, what the next activity waited for.

The part of an idle stretch before the launch call of the next activity returns is *host* time: the activity was not
launched in time. Each nanosecond of it goes to the innermost host event open on the launching thread. What is left had
been launched: *gap* where it is shorter than `GAP_NS`, else *blocked*. Time blocked on a peer is exposed communication
and no part of idle (`ringprof.analysis.copy_waits`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.timeline.host_activity import HOST_CLASSES, NOT_KEPT, HostThread
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.trace.columns import MEMCPY, NO_HOST_EVENTS, NONE, Int64, distinct
from ringprof.trace.host_events import idle_gaps

GAP_NS = 5_000
"""A launched activity that starts later than this after the device became idle was blocked."""
HOST, GAP, BLOCKED = "host", "gap", "blocked"
CAUSES = (HOST, GAP, BLOCKED)
NO_LAUNCH, HOST_COPY, OTHER_STREAM, UNKNOWN = "no launch record", "host-side copy", "another stream", "unknown"
BLOCKED_NAMES = (NO_LAUNCH, HOST_COPY, OTHER_STREAM, UNKNOWN)
"""What a blocked activity may have waited for."""
_SOON_NS = 20_000
LONG_NS = 100_000
"""A host event that keeps a device idle for this long at once is no matter of launching too slowly."""
"""A kernel that waited for an event of another stream starts within this time of it."""


class IdleStretches(msgspec.Struct, frozen=True):
    """Stretches in which nothing runs on one device, by start; arrays of one length."""

    start_ns: Int64
    end_ns: Int64
    activity: Int64
    """Index into the trace's activities of the one that ends the stretch."""
    launch: Int64
    """Index into the trace's launches of its launch, or `NONE`."""
    launched_ns: Int64
    """When that launch call returned, clipped to the stretch: what lies before is host time."""

    def __len__(self) -> int:
        return len(self.start_ns)


def idle_stretches(classified: Classified, rows: TimedActivities, background: TimedActivities) -> IdleStretches:
    """Find when nothing runs on a device, between the first and the last of its selected activities."""
    start = np.concatenate((rows.start_ns, background.start_ns))
    end = np.concatenate((rows.end_ns, background.end_ns))
    activity = np.concatenate((rows.activity, background.activity))
    order = np.lexsort((activity, start))
    first, last, ender = idle_gaps(start[order], end[order])
    following = activity[order][ender]
    launch = classified.launch[following]
    returned = classified.trace.launches.end_ns[launch] if len(classified.trace.launches.end_ns) else first
    launched = np.where(launch == NONE, first, np.clip(returned, first, last))
    return IdleStretches(first, last, following, launch, launched)


class IdleParts(msgspec.Struct, frozen=True):
    """The parts of all idle stretches of one device, each with one cause; arrays of one length."""

    start_ns: Int64
    end_ns: Int64
    cause: Int64
    """Index into `CAUSES`."""
    event_class: Int64
    """Index into `HOST_CLASSES` for host time; else -1."""
    name: Int64
    """Index into the trace's names of the innermost host event; for blocked time into `BLOCKED_NAMES`; -1 for none."""

    def label(self, place: int, names: Sequence[str]) -> tuple[str, str, str]:
        """Name the cause, the class and the event of one part; ``names`` are the trace's."""
        cause, number = CAUSES[self.cause[place]], int(self.name[place])
        if cause == HOST:
            return cause, HOST_CLASSES[self.event_class[place]], names[number] if number >= 0 else ""
        return cause, cause, BLOCKED_NAMES[number] if cause == BLOCKED else ""


class IdleEvent(msgspec.Struct, frozen=True):
    """All idle time with one cause and name."""

    cause: str
    event_class: str
    name: str
    time_ns: int
    long_ns: int
    """Of it, in single pieces of at least `LONG_NS`: one long call, not many short ones."""


class IdleCauses(msgspec.Struct, frozen=True):
    """Causes of the idle time of one rank, or of several, in nanoseconds."""

    host_ns: int = 0
    gap_ns: int = 0
    blocked_ns: int = 0
    events: tuple[IdleEvent, ...] = ()
    """Longest first; they sum to the three."""

    @property
    def total_ns(self) -> int:
        return self.host_ns + self.gap_ns + self.blocked_ns


def idle_parts(
    classified: Classified, rows: TimedActivities, background: TimedActivities, on_peers: Spans = intervals.NOTHING
) -> IdleParts:
    """Split a device's idle time by cause, by start. ``on_peers`` is left out: it is exposed communication."""
    stretches = idle_stretches(classified, rows, background)
    host = _host_parts(classified, stretches)
    launched = _launched_parts(classified, stretches, rows, background, on_peers)
    columns = [np.concatenate(pair) for pair in zip(host, launched, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return IdleParts(*(column[order] for column in columns))


def idle_causes(parts: IdleParts, names: Sequence[str]) -> IdleCauses:
    """Sum up parts by cause, and by the name of what the host did; ``names`` are the trace's."""
    key = np.stack((parts.cause, parts.event_class, parts.name), axis=1)
    first, group = np.unique(key, axis=0, return_index=True, return_inverse=True)[1:]
    took = parts.end_ns - parts.start_ns
    spent, in_long = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
    np.add.at(spent, group.ravel(), took)
    np.add.at(in_long, group.ravel(), np.where(took >= LONG_NS, took, 0))
    rows = zip(first.tolist(), spent.tolist(), in_long.tolist(), strict=True)
    return _summed((parts.label(place, names), time, long) for place, time, long in rows)


def causes_of_ranks(ranks: Iterable[IdleCauses]) -> IdleCauses:
    """Sum the causes of several ranks."""
    return _summed(
        ((event.cause, event.event_class, event.name), event.time_ns, event.long_ns)
        for rank in ranks
        for event in rank.events
    )


def _summed(rows: Iterable[tuple[tuple[str, str, str], int, int]]) -> IdleCauses:
    """Sum times and long times by (cause, class, name)."""
    times: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for key, time, long in rows:
        times[key][0] += time
        times[key][1] += long
    events = [IdleEvent(*key, *sums) for key, sums in times.items() if sums[0]]
    totals = {cause: sum(event.time_ns for event in events if event.cause == cause) for cause in CAUSES}
    longest = sorted(events, key=lambda event: (-event.time_ns, event.cause, event.event_class, event.name))
    return IdleCauses(totals[HOST], totals[GAP], totals[BLOCKED], tuple(longest))


# --- the host's part ----------------------------------------------------------------------------------

_Columns = tuple[Int64, Int64, Int64, Int64, Int64]
"""The fields of `IdleParts`."""


def _host_parts(classified: Classified, stretches: IdleStretches) -> _Columns:
    """Each moment before the next launch call returned, by the innermost event on the launching thread."""
    trace = classified.trace
    host = np.flatnonzero(stretches.launched_ns > stretches.start_ns)
    threads = trace.launches.thread[stretches.launch[host]] if len(host) else host
    kept = all(warning.code not in NO_HOST_EVENTS for warning in trace.warnings)
    parts: list[_Columns] = [(_NO_PARTS,) * 5]
    for number in distinct(threads).tolist():
        mine = host[threads == number]
        thread = HostThread(trace, number)
        spans = intervals.union(stretches.start_ns[mine], stretches.launched_ns[mine])
        start, end = _pieces(spans, np.concatenate((thread.start_ns, thread.end_ns)))
        event = thread.innermost(start)
        known, kind = event >= 0, thread.classes(start, event)
        kind = kind if kept else np.full(len(start), HOST_CLASSES.index(NOT_KEPT), np.int64)
        name = np.full(len(start), NONE, np.int64)
        name[known] = thread.name[event[known]]
        parts.append((start, end, np.full(len(start), CAUSES.index(HOST), np.int64), kind, name))
    joined = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    return joined[0], joined[1], joined[2], joined[3], joined[4]


_NO_PARTS = np.empty(0, np.int64)


def _pieces(spans: Spans, edges: Int64) -> tuple[Int64, Int64]:
    """Cut spans at all edges that lie in them; start and end of each piece."""
    edges = distinct(np.concatenate((spans.start_ns, spans.end_ns, edges[intervals.contains(spans, edges)])))
    inside = intervals.contains(spans, edges[:-1])
    return edges[:-1][inside], edges[1:][inside]


# --- what had been launched ---------------------------------------------------------------------------


def _launched_parts(
    classified: Classified,
    stretches: IdleStretches,
    rows: TimedActivities,
    background: TimedActivities,
    on_peers: Spans,
) -> _Columns:
    """Split what follows the return of the launch call, without the time that is blocked on a peer."""
    start, end = stretches.launched_ns, stretches.end_ns
    # Not their union: two stretches touch where an activity of no length stands between them.
    waiting = Spans(start[end > start], end[end > start])
    edges = np.sort(np.concatenate((waiting.start_ns, waiting.end_ns, on_peers.start_ns, on_peers.end_ns)))
    first, last = edges[:-1], edges[1:]
    kept = (last > first) & intervals.contains(waiting, first) & ~intervals.contains(on_peers, first)
    first, last = first[kept], last[kept]
    stretch = np.searchsorted(stretches.start_ns, first, side="right") - 1
    blocked = last - first >= GAP_NS
    cause = np.where(blocked, CAUSES.index(BLOCKED), CAUSES.index(GAP))
    name = _blocked_names(classified, stretches, rows, background)[stretch] if len(first) else _NO_PARTS
    # An event of another stream that ended earlier would have been seen earlier.
    late = last > stretches.start_ns[stretch] + _SOON_NS if len(first) else blocked
    name = np.where(late & (name == BLOCKED_NAMES.index(OTHER_STREAM)), BLOCKED_NAMES.index(UNKNOWN), name)
    return first, last, cause, np.full(len(first), NONE, np.int64), np.where(blocked, name, NONE)


def _blocked_names(
    classified: Classified, stretches: IdleStretches, rows: TimedActivities, background: TimedActivities
) -> Int64:
    """For each stretch what evidence there is of what a launched activity waited for: indices into `BLOCKED_NAMES`."""
    trace, activities = classified.trace, classified.trace.activities
    ends = np.concatenate((rows.end_ns, background.end_ns))
    ran = np.concatenate((rows.activity, background.activity))
    order = np.argsort(ends, kind="stable")
    before = ran[order][np.maximum(np.searchsorted(ends[order], stretches.start_ns, side="right") - 1, 0)]
    pageable = trace.names_that(lambda name: "ageable" in name)[activities.name[stretches.activity]]
    copied = pageable & (activities.category[stretches.activity] == MEMCPY)
    elsewhere = activities.stream[before] != activities.stream[stretches.activity]
    named = ((stretches.launch == NONE, NO_LAUNCH), (copied, HOST_COPY), (elsewhere, OTHER_STREAM))
    found: Int64 = np.select(
        [rows_named for rows_named, _ in named],
        [BLOCKED_NAMES.index(name) for _, name in named],
        BLOCKED_NAMES.index(UNKNOWN),
    )
    return found
