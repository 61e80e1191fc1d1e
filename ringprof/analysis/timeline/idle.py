"""Causes of a device's idle time: what the next activity waited for.

The part of an idle stretch before the launch call of the next activity returns is *host* time: the activity was not
launched in time. Each nanosecond of it counts for the innermost host event open on the launching thread. The rest is
*gap* where it is shorter than `GAP_NS`, else *blocked*. Time blocked on a peer is exposed communication and not part of
idle (`ringprof.analysis.copy_waits`).
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
from ringprof.trace.columns import MEMCPY, NO_HOST_EVENTS, NONE, PAGE_MIGRATION, Int64, distinct
from ringprof.trace.host_events import idle_gaps

GAP_NS = 5_000
"""A launched activity that starts later than this after the device became idle counts as blocked."""
HOST, GAP, BLOCKED = "host", "gap", "blocked"
CAUSES = (HOST, GAP, BLOCKED)
NO_LAUNCH, HOST_COPY, OTHER_STREAM, UNKNOWN = "no launch record", "host-side copy", "another stream", "unknown"
MANAGED = "managed memory"
BLOCKED_NAMES = (NO_LAUNCH, HOST_COPY, OTHER_STREAM, UNKNOWN, MANAGED)
"""Possible causes of a blocked activity."""
_WAKE_UP_NS = 20_000
"""A kernel that waited for an event of another stream starts within this time after the event."""
LONG_NS = 100_000
"""A host event that keeps a device idle for this long at once is not a matter of slow launching."""


class IdleStretches(msgspec.Struct, frozen=True):
    """Intervals in which nothing runs on one device, by start; arrays of one length."""

    start_ns: Int64
    end_ns: Int64
    activity: Int64
    """Index into the trace's activities: the activity that ends the stretch."""
    launch: Int64
    """Index into the trace's launches: the launch of that activity, or `NONE`."""
    launched_ns: Int64
    """Time at which that launch call returned, clipped to the stretch; the time before is host time."""

    def __len__(self) -> int:
        return len(self.start_ns)


def idle_stretches(classified: Classified, rows: TimedActivities, background: TimedActivities) -> IdleStretches:
    """Find the intervals in which nothing runs on a device, between the first and last of its selected activities."""
    start = np.concatenate((rows.start_ns, background.start_ns))
    end = np.concatenate((rows.end_ns, background.end_ns))
    activity = np.concatenate((rows.activity, background.activity))
    order = np.lexsort((activity, start))
    stretch_start, stretch_end, ending_row = idle_gaps(start[order], end[order])
    ending_activity = activity[order][ending_row]
    launch = classified.launch[ending_activity]
    call_returned = classified.trace.launches.end_ns[launch] if len(classified.trace.launches.end_ns) else stretch_start
    launched = np.where(launch == NONE, stretch_start, np.clip(call_returned, stretch_start, stretch_end))
    return IdleStretches(stretch_start, stretch_end, ending_activity, launch, launched)


class IdleParts(msgspec.Struct, frozen=True):
    """Parts of all idle stretches of one device, each with one cause; arrays of one length."""

    start_ns: Int64
    end_ns: Int64
    cause: Int64
    """Index into `CAUSES`."""
    event_class: Int64
    """Index into `HOST_CLASSES` for host time; otherwise -1."""
    name: Int64
    """For host time, index into the trace's names: the innermost host event. For blocked time, index into
    `BLOCKED_NAMES`. Otherwise -1."""

    def label(self, row: int, names: Sequence[str]) -> tuple[str, str, str]:
        """Return the cause, class and event name of one part; ``names`` are the trace's."""
        cause, name_index = CAUSES[self.cause[row]], int(self.name[row])
        if cause == HOST:
            return cause, HOST_CLASSES[self.event_class[row]], names[name_index] if name_index >= 0 else ""
        return cause, cause, BLOCKED_NAMES[name_index] if cause == BLOCKED else ""

    def main_label(self, rows: Iterable[int], names: Sequence[str]) -> tuple[str, str, str]:
        """Return the `label` with most of the time of some parts."""
        times: dict[tuple[str, str, str], int] = defaultdict(int)
        for row in rows:
            times[self.label(row, names)] += int(self.end_ns[row] - self.start_ns[row])
        return max(times, key=lambda label: times[label])


def cause_text(cause: str, event_class: str, name: str) -> str:
    """Return a label of idle time as text: ``host, launch call: cudaLaunchKernel``."""
    text = f"{cause}, {event_class}" if cause == HOST else cause
    return f"{text}: {name}" if name else text


class IdleEvent(msgspec.Struct, frozen=True):
    """Totals of idle time with one cause and name."""

    cause: str
    event_class: str
    name: str
    time_ns: int
    long_ns: int
    """Part of ``time_ns`` in single pieces of at least `LONG_NS`: one long call, not many short ones."""


class IdleCauses(msgspec.Struct, frozen=True):
    """Idle time by cause of one rank, or of several, in nanoseconds."""

    host_ns: int = 0
    gap_ns: int = 0
    blocked_ns: int = 0
    events: tuple[IdleEvent, ...] = ()
    """Idle time by cause and name, longest first; sums to the three totals."""

    @property
    def total_ns(self) -> int:
        """Sum of host, gap and blocked time."""
        return self.host_ns + self.gap_ns + self.blocked_ns


def idle_parts(
    classified: Classified, rows: TimedActivities, background: TimedActivities, on_peers: Spans = intervals.NOTHING
) -> IdleParts:
    """Split a device's idle time by cause, by start. ``on_peers`` is excluded: it is exposed communication."""
    stretches = idle_stretches(classified, rows, background)
    host = _host_parts(classified, stretches)
    launched = _launched_parts(classified, stretches, rows, background, on_peers)
    columns = [np.concatenate(pair) for pair in zip(host, launched, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return IdleParts(*(column[order] for column in columns))


def idle_causes(parts: IdleParts, names: Sequence[str]) -> IdleCauses:
    """Sum up parts by cause and by host event; ``names`` are the trace's."""
    key = np.stack((parts.cause, parts.event_class, parts.name), axis=1)
    first, group = np.unique(key, axis=0, return_index=True, return_inverse=True)[1:]
    duration = parts.end_ns - parts.start_ns
    total, in_long = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
    np.add.at(total, group.ravel(), duration)
    np.add.at(in_long, group.ravel(), np.where(duration >= LONG_NS, duration, 0))
    rows = zip(first.tolist(), total.tolist(), in_long.tolist(), strict=True)
    return _sum_causes((parts.label(row, names), time_ns, long_ns) for row, time_ns, long_ns in rows)


def causes_of_ranks(ranks: Iterable[IdleCauses]) -> IdleCauses:
    """Sum the causes of several ranks."""
    return _sum_causes(
        ((event.cause, event.event_class, event.name), event.time_ns, event.long_ns)
        for rank in ranks
        for event in rank.events
    )


def _sum_causes(rows: Iterable[tuple[tuple[str, str, str], int, int]]) -> IdleCauses:
    """Sum times and long times by (cause, class, name)."""
    times: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for key, time, long in rows:
        times[key][0] += time
        times[key][1] += long
    events = [IdleEvent(*key, *sums) for key, sums in times.items() if sums[0]]
    totals = {cause: sum(event.time_ns for event in events if event.cause == cause) for cause in CAUSES}
    longest = sorted(events, key=lambda event: (-event.time_ns, event.cause, event.event_class, event.name))
    return IdleCauses(totals[HOST], totals[GAP], totals[BLOCKED], tuple(longest))


# --- host time ----------------------------------------------------------------------------------------

_Columns = tuple[Int64, Int64, Int64, Int64, Int64]
"""The fields of `IdleParts`."""
_EMPTY = np.empty(0, np.int64)


def _host_parts(classified: Classified, stretches: IdleStretches) -> _Columns:
    """Attribute the time before each launch call's return to the innermost event on the launching thread."""
    trace = classified.trace
    host = np.flatnonzero(stretches.launched_ns > stretches.start_ns)
    threads = trace.launches.thread[stretches.launch[host]] if len(host) else host
    has_host_events = all(warning.code not in NO_HOST_EVENTS for warning in trace.warnings)
    parts: list[_Columns] = [(_EMPTY,) * 5]
    for thread_number in distinct(threads).tolist():
        of_thread = host[threads == thread_number]
        thread = HostThread(trace, thread_number)
        spans = intervals.union(stretches.start_ns[of_thread], stretches.launched_ns[of_thread])
        # Cut the spans at all edges of events inside them.
        edges = np.concatenate((thread.start_ns, thread.end_ns))
        edges = distinct(np.concatenate((spans.start_ns, spans.end_ns, edges[intervals.contains(spans, edges)])))
        inside = intervals.contains(spans, edges[:-1])
        start, end = edges[:-1][inside], edges[1:][inside]
        event = thread.innermost(start)
        has_event, event_class = event >= 0, thread.classes(start, event)
        event_class = event_class if has_host_events else np.full(len(start), HOST_CLASSES.index(NOT_KEPT), np.int64)
        name = np.full(len(start), NONE, np.int64)
        name[has_event] = thread.name[event[has_event]]
        parts.append((start, end, np.full(len(start), CAUSES.index(HOST), np.int64), event_class, name))
    joined = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    return joined[0], joined[1], joined[2], joined[3], joined[4]


# --- time after the launch call -----------------------------------------------------------------------


def _launched_parts(
    classified: Classified,
    stretches: IdleStretches,
    rows: TimedActivities,
    background: TimedActivities,
    on_peers: Spans,
) -> _Columns:
    """Split the time after the launch call's return into gap and blocked time, without time blocked on a peer."""
    launched_ns, until_ns = stretches.launched_ns, stretches.end_ns
    # No union here: two stretches touch where an activity of zero length lies between them.
    waiting = Spans(launched_ns[until_ns > launched_ns], until_ns[until_ns > launched_ns])
    edges = np.sort(np.concatenate((waiting.start_ns, waiting.end_ns, on_peers.start_ns, on_peers.end_ns)))
    start, end = edges[:-1], edges[1:]
    kept = (end > start) & intervals.contains(waiting, start) & ~intervals.contains(on_peers, start)
    start, end = start[kept], end[kept]
    stretch = np.searchsorted(stretches.start_ns, start, side="right") - 1
    blocked = end - start >= GAP_NS
    cause = np.where(blocked, CAUSES.index(BLOCKED), CAUSES.index(GAP))
    # The likely cause of blocking in each stretch, as index into `BLOCKED_NAMES`.
    trace, activities = classified.trace, classified.trace.activities
    ends = np.concatenate((rows.end_ns, background.end_ns))
    activity = np.concatenate((rows.activity, background.activity))
    order = np.argsort(ends, kind="stable")
    preceding = activity[order][np.maximum(np.searchsorted(ends[order], stretches.start_ns, side="right") - 1, 0)]
    pageable = trace.names_that(lambda name: "ageable" in name)[activities.name[stretches.activity]]
    is_host_copy = pageable & (activities.category[stretches.activity] == MEMCPY)
    other_stream = activities.stream[preceding] != activities.stream[stretches.activity]
    migrates = trace.names_that(lambda name: name.startswith(PAGE_MIGRATION))[activities.name[stretches.activity]]
    evidence = (
        (migrates, MANAGED),
        (stretches.launch == NONE, NO_LAUNCH),
        (is_host_copy, HOST_COPY),
        (other_stream, OTHER_STREAM),
    )
    names: Int64 = np.select(
        [mask for mask, _ in evidence],
        [BLOCKED_NAMES.index(name) for _, name in evidence],
        BLOCKED_NAMES.index(UNKNOWN),
    )
    name = names[stretch] if len(start) else _EMPTY
    # The kernel would have reacted sooner to an event of another stream that ended earlier.
    too_late = end > stretches.start_ns[stretch] + _WAKE_UP_NS if len(start) else blocked
    name = np.where(too_late & (name == BLOCKED_NAMES.index(OTHER_STREAM)), BLOCKED_NAMES.index(UNKNOWN), name)
    return start, end, cause, np.full(len(start), NONE, np.int64), np.where(blocked, name, NONE)
