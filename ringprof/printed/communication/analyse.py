"""Analysis of communication logs: figures by rank and by size, who came late, and where ranks stand in a hang.

Bounds on waiting, transfer and rate follow the definitions of reports of traces (docs/metrics.md): an operation is
*ready* when the last rank that it depends on has begun, *waits* until then and is on the *wire* from then to its end.
The host posts an operation before the device begins it, and sees its beginning and its end afterwards; every bound
follows from these two facts.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ringprof.common.formatting import milliseconds
from ringprof.printed.communication.match import Key, Match, MatchedOperations, match_operations
from ringprof.printed.communication.operations import COMPLETED, Operation, RankLog
from ringprof.trace.columns import Notice


class Bounds(msgspec.Struct, frozen=True):
    """Bounds on the times of one operation in ns, and on its rates in bytes per ns (GB/s); None: not bounded."""

    time_least_ns: int | None
    time_most_ns: int | None
    wait_least_ns: int | None
    wait_most_ns: int | None
    wire_least_ns: int | None
    wire_most_ns: int | None
    rate_least: float | None
    """Bytes over the largest time of the operation, waiting included."""
    rate_most: float | None
    """Bytes over its least time; None where no least time above 0 is known."""
    wire_rate_least: float | None
    """Bytes over the largest time on the wire."""
    wire_rate_most: float | None
    """Bytes over the least time on the wire."""


def bounds_of(operation: Operation, last_post_ns: int | None, all_begun_ns: int | None) -> Bounds:
    """Return bounds on the time, the waiting and the rates of an operation.

    ``last_post_ns`` is the latest time at which one of its peers was posted, of those that are known: the operations at
    the other ends of its messages, or the other members of its collective. ``all_begun_ns`` is a time by which all
    of these and their own peers have begun on their devices. Both are None where they are not known, or are not on
    this operation's clock.
    """
    least, most = operation.least_ns, operation.most_ns
    begun_by = begun_by_of(operation)
    wait_least = wait_most = None
    wire_most = most
    if last_post_ns is not None and begun_by is not None:
        wait_least = max(0, last_post_ns - begun_by)
        if operation.state == COMPLETED:
            wait_least = min(wait_least, least or 0)
    if all_begun_ns is not None and operation.posted_ns is not None:
        wait_most = max(0, all_begun_ns - operation.posted_ns)
    if most is not None:
        wait_most = most if wait_most is None else min(wait_most, most)
    if last_post_ns is not None and operation.completed_by_ns is not None and most is not None:
        after_post = operation.completed_by_ns - last_post_ns
        wire_most = min(most, after_post) if after_post > 0 else most
    wire_least = max(0, least - wait_most) if least is not None and wait_most is not None else None
    size = operation.counted_bytes
    rates = (size / time if size and time else None for time in (most, least, wire_most, wire_least))
    return Bounds(least, most, wait_least, wait_most, wire_least, wire_most, *rates)


def begun_by_of(operation: Operation) -> int | None:
    """Return a time by which an operation has begun on its device; None where none is known."""
    times = [operation.started_by_ns]
    if operation.completed_by_ns is not None:
        times.append(operation.completed_by_ns - (operation.least_ns or 0))
    known = [time for time in times if time is not None]
    return min(known) if known else None


def sum_if_known(values: Iterable[int | None]) -> int | None:
    """Return the sum of values; None if one of them is None, or there are none."""
    listed = [*values]
    return None if not listed or None in listed else sum(value for value in listed if value is not None)


BUS_FACTORS: Mapping[str, tuple[int, int]] = {
    "all_reduce": (2, -2), "all_gather": (1, -1), "reduce_scatter": (1, -1), "broadcast": (1, 0), "reduce": (1, 0),
}  # fmt: skip
"""Bus bandwidth over algorithmic bandwidth, as (a, b) of (a * ranks + b) / ranks, by nccl-tests' doc/PERFORMANCE.md.

An all-to-all has none: the logs do not say how much of it goes to whom."""


def bus_factor(name: str, ranks: int) -> float | None:
    """Return bus bandwidth over algorithmic bandwidth of a collective, named as in `Operation`, on ``ranks`` ranks.

    Returns None for hops, all-to-alls and other names without a factor in `BUS_FACTORS`.
    """
    if name not in BUS_FACTORS or ranks < 1:
        return None
    scale, shift = BUS_FACTORS[name]
    return (scale * ranks + shift) / ranks


class OperationRow(msgspec.Struct, frozen=True):
    """One operation of one rank with its bounds."""

    operation: Operation
    number: int
    """Position among the operations of its group in its rank's log, from 1; a log may begin late."""
    step: int | None
    """Position in the sequence of operations that the group repeats, from 1; None without one, and if the log begins
    late."""
    steps: int | None
    """Number of operations in the sequence that the group repeats."""
    bounds: Bounds


class Lateness(msgspec.Struct, frozen=True):
    """Operation of several ranks, and which of them came last, by the measure `CommLogFindings.late_by`."""

    rank: int
    """Rank that posted its part last, or else the rank with the shortest time on the device."""
    late_ns: int
    """Time from the first rank's posting to the last rank's, or else the longest time minus the shortest."""
    operation: Operation
    """Part of that rank."""


class RankOperations(msgspec.Struct, frozen=True):
    """Figures of one rank, summed over its operations."""

    rank: int
    operations: int
    """Number of operations in the log, hops included."""
    hops: int
    """Number of hops: batches of sends and receives, and single ones."""
    sent_bytes: int | None
    """Bytes sent in hops; None where the size of a message is unknown."""
    unfinished: int
    """Number of operations that had not ended when the log was written."""
    compared: int
    """Number of operations of the job of which it is known which rank came last; equal on all ranks."""
    last: int
    """Number of operations in which this rank came last."""
    late_median_ns: int | None
    """Median of `Lateness.late_ns` where this rank came last; None where it never did."""
    late_most_ns: int | None
    """Largest `Lateness.late_ns` where this rank came last; None where it never did."""
    wait_least_ns: int | None
    """Sum of the lower bounds on waiting; None where no operation has one."""
    excess_ns: int | None
    """Time on the device beyond that of the shortest rank in the same operation: waiting, if operations end on all
    ranks together. None where no times on the device are known."""


class SizeRow(msgspec.Struct, frozen=True):
    """Medians of the bounds of all operations of one group with the same name and size, over all ranks."""

    group: str
    """Label of the group."""
    name: str
    """Name as in `Operation.name`."""
    size_bytes: int | None
    """Size as in `Operation.counted_bytes`."""
    ranks: int
    """Number of ranks of the group."""
    count: int
    """Number of operations, those that have not ended included."""
    bounds: Mapping[str, float | None]
    """Bounds on the medians of the operations that have ended, by field of `Bounds`; None: not bounded."""
    bus_factor: float | None
    """Bus bandwidth over algorithmic bandwidth, as in `bus_factor`."""


class Standing(msgspec.Struct, frozen=True):
    """Where one rank stands in a group in which an operation is not complete."""

    rank: int
    group: str
    """Label of the group."""
    row: OperationRow
    """First operation that is not complete; the newest one where all of this rank's are complete."""
    unfinished: int
    """Number of this rank's operations in the group that are not complete."""
    waits_for: tuple[int, ...]
    """Other ranks that have not posted their part of ``row``."""


class CommLogFindings(msgspec.Struct, frozen=True):
    """Results of the analysis of the logs of one job. The figures are those of the JSON report."""

    source: str
    versions: tuple[str, ...]
    logs: tuple[RankLog, ...]
    rows: tuple[OperationRow, ...]
    ranks: tuple[RankOperations, ...]
    sizes: tuple[SizeRow, ...]
    late: tuple[Lateness, ...]
    late_by: str
    """How ``late`` compares ranks: ``posted``: when they posted; ``time``: time on the device; empty: not at all."""
    standings: tuple[Standing, ...]
    verdict: tuple[str, ...]
    warnings: tuple[Notice, ...]


def analyse(logs: Sequence[RankLog], notices: Sequence[Notice] = ()) -> CommLogFindings:
    """Analyse the logs of the ranks of one job, at least one. ``notices`` are warnings to keep in the result."""
    matches = match_operations(logs)
    by_key = {(log.rank, index): operation for log in logs for index, operation in enumerate(log.operations)}
    hosts = {log.host for log in logs if log.host}
    same_clock = matches.clock_conflict is None
    peer_times = _peer_times(logs, by_key, matches) if same_clock else {}
    rows = {row_key: row for log in logs for row_key, row in _rows(log, peer_times)}
    two_jobs = _two_jobs_sentence(logs, matches)
    late, late_by = ([], "") if two_jobs else _lateness(matches, by_key, same_clock=same_clock)
    labels = {key: group.label for log in logs for key, group in log.groups.items()}
    warnings = [*notices, *(notice for log in logs for notice in log.notices), *matches.notices]
    absent = _missing_ranks(logs)
    warnings += absent
    if matches.clock_conflict is not None:
        first, second, excess = matches.clock_conflict
        text = f"the clocks of ranks {first} and {second} differ by at least {milliseconds(excess)}"
        if excess > _MOST_OFFSET_NS:
            text += ", or the logs are of different jobs"
        warnings.append(Notice("clocks_differ", f"{text}: who came late and how long ranks waited is left out"))
    elif len(hosts) > 1 and late_by == "posted":
        text = f"times of {len(hosts)} hosts are compared as their clocks give them: lateness is as exact as these"
        warnings.append(Notice("clocks_compared", text))
    untimed = sum(row.bounds.time_most_ns is None for row in rows.values() if row.operation.state == COMPLETED)
    if untimed:
        text = f"{untimed:,} of {len(rows):,} operations have no time on the device"
        if not any("NCCL" in version for log in logs for version in log.versions):
            why = "gloo records none"
        elif logs[0].source == "nccl_inspector":
            why = "the host timed them (kernel_cpu, collective_cpu), which bounds nothing"
        else:
            why = "the dump does not say when they ended"
        warnings.append(Notice("untimed", f"{text}: {why}", count=untimed))
    ordered = tuple(rows.values())
    excess_ns = {} if two_jobs else _excess(matches, by_key)
    of_rank: dict[int, list[OperationRow]] = defaultdict(list)
    for row in ordered:
        of_rank[row.operation.rank].append(row)
    ranks = tuple(_rank_row(log.rank, of_rank[log.rank], late, excess_ns) for log in logs)
    standings = _standings(logs, rows, matches, labels, one_job=not two_jobs)
    verdict = (two_jobs,) if two_jobs else tuple(_verdict(standings, matches, rows, late, late_by, labels, ranks))
    groups = {key: group.ranks for log in logs for key, group in log.groups.items()}
    present = {log.rank for log in logs}
    whole_groups = {key for key, members in groups.items() if members and present.issuperset(members)}
    unfinished = any(row.operation.state != COMPLETED and row.operation.group not in whole_groups for row in ordered)
    if absent and unfinished and not two_jobs and not any(standing.waits_for for standing in standings):
        verdict += (f"Which rank is waited for needs the dumps of all ranks: {absent[0].message}.",)
    return CommLogFindings(
        source=logs[0].source, versions=tuple(dict.fromkeys(version for log in logs for version in log.versions)),
        logs=tuple(logs), rows=ordered, ranks=ranks,
        sizes=_size_rows(ordered, logs, labels), late=tuple(late), late_by=late_by if late else "",
        standings=standings, verdict=verdict, warnings=tuple(warnings),
    )  # fmt: skip


_MOST_OFFSET_NS = 1_000_000_000
"""Difference of two clocks beyond which logs of two jobs are the likelier cause."""


def _two_jobs_sentence(logs: Sequence[RankLog], matches: MatchedOperations) -> str:
    """Return why no rank can be judged, where logs are of two jobs by the times that they state; else empty."""
    if matches.clock_conflict is None or matches.clock_conflict[2] <= _MOST_OFFSET_NS:
        return ""
    first, second, excess = matches.clock_conflict
    spans = []
    for log in logs:
        times = [
            time for operation in log.operations if log.rank in (first, second)
            for time in (operation.posted_ns, operation.started_by_ns, operation.completed_by_ns) if time is not None
        ]  # fmt: skip
        if times:
            spans.append((min(times), max(times)))
    if max(begin for begin, _ in spans) <= min(end for _, end in spans):
        return ""
    return (
        f"No rank is judged: the logs of ranks {min(first, second)} and {max(first, second)} do not overlap in time."
        f" They are of two jobs, or the clocks of these ranks are at least {milliseconds(excess)} apart."
    )


def _missing_ranks(logs: Sequence[RankLog]) -> list[Notice]:
    """Warn of ranks that are members of a group and have no log."""
    present = {log.rank for log in logs}
    members = {rank for log in logs for group in log.groups.values() for rank in group.ranks}
    size = max([len(present | members), *(group.size for log in logs for group in log.groups.values())])
    absent = size - len(present)
    if absent <= 0:
        return []
    named = sorted(members - present)[:8]
    listed = f": {', '.join(map(str, named))}{', ...' if absent > len(named) else ''}" if named else ""
    return [Notice("missing_ranks", f"{absent} of {size} ranks have no log here{listed}", count=absent)]


# --- rows ---------------------------------------------------------------------------------------------


class _Latest:
    """Latest of the times of several operations, with any one of them left out."""

    def __init__(self, times: Mapping[Key, int | None]) -> None:
        known = ((time, key) for key, time in times.items() if time is not None)
        self._two = heapq.nlargest(2, known)
        self._unknown = {key for key, time in times.items() if time is None}

    def without(self, key: Key) -> int | None:
        """Return the latest known time of the others; None where no time is known."""
        return next((time for time, other in self._two if other != key), None)

    def all_known_without(self, key: Key) -> bool:
        """Return whether the times of all others are known."""
        return not self._unknown or self._unknown == {key}


def _peer_times(
    logs: Sequence[RankLog], by_key: dict[Key, Operation], matches: MatchedOperations
) -> dict[Key, tuple[int | None, int | None]]:
    """Return two times of other ranks for each operation, as `bounds_of` takes them.

    The two are the latest known posting of a peer, and a time by which all that the operation waits for have begun, in
    nanoseconds on the ranks' common clock. Takes time linear in the number of operations and messages: each collective
    is gone through once, not once per member.
    """
    sources = {log.rank: log.source for log in logs}
    posted = {key: operation.posted_ns for key, operation in by_key.items()}
    begun = {key: begun_by_of(operation) for key, operation in by_key.items()}
    peer_times: dict[Key, tuple[int | None, int | None]] = {}
    for match in matches.matched:
        if match.is_collective:
            posts = _Latest({key: posted[key] for key in match.members})
            begins = _Latest({key: begun[key] for key in match.members})
            for key in match.members:
                known = match.complete and begins.all_known_without(key)
                peer_times[key] = posts.without(key), begins.without(key) if known else None
    # Waiting for a peer of a hop includes waiting for the peers that it waits for.
    near = {key: _Latest({other: begun[other] for other in others}) for key, others in matches.hop_peers.items()}
    for key, others in matches.hop_peers.items():
        peer_posts = [time for other in others if (time := posted[other]) is not None]
        # NCCL Inspector does not say which other messages a kernel carries, and so not for whom it waits.
        known = sources[key[0]] == "flight_recorder" and matches.match_of[key].complete
        known = known and all(begun[other] is not None and near[other].all_known_without(key) for other in others)
        times = [time for other in others for time in (begun[other], near[other].without(key)) if time is not None]
        peer_times[key] = max(peer_posts, default=None), max(times, default=None) if known else None
    return peer_times


def _rows(log: RankLog, peer_times: Mapping[Key, tuple[int | None, int | None]]) -> Iterable[tuple[Key, OperationRow]]:
    """Yield the operations of a rank with their bounds and their places in their groups.

    ``peer_times`` has two times of other ranks for each operation, as `bounds_of` takes them; none where it lacks one.
    """
    of_group: dict[str, list[int]] = defaultdict(list)
    for index, operation in enumerate(log.operations):
        of_group[operation.group].append(index)
    places: dict[int, tuple[int, int | None, int | None]] = {}
    for indices in of_group.values():
        of_indices = [log.operations[index] for index in indices]
        first, period = _repetition([(item.name, item.sends, item.receives, item.size_bytes) for item in of_indices])
        for number, index in enumerate(indices):
            regular = period and number >= first and log.from_start
            step = (number - first) % period + 1 if regular and period else None
            places[index] = number + 1, step, period if regular else None
    for index, operation in enumerate(log.operations):
        key = (log.rank, index)
        yield key, OperationRow(operation, *places[index], bounds_of(operation, *peer_times.get(key, (None, None))))


def _repetition(signatures: Sequence[object]) -> tuple[int, int | None]:
    """Return the start and the length of the shortest sequence that is repeated to the end.

    The repetition must hold at least two whole sequences and half of all operations; (0, None) without one, and where
    looking for it takes too many comparisons.
    """
    count = len(signatures)
    left = _MOST_COMPARISONS
    for period in range(1, min(count // 2, _LONGEST_PERIOD) + 1):
        start = count - period
        while start > 0 and signatures[start - 1] == signatures[start - 1 + period]:
            start -= 1
        left -= count - start
        if left < 0:
            break
        if count - start >= max(2 * period, count / 2):
            return start, period
    return 0, None


_LONGEST_PERIOD = 2_000
"""Length of sequences up to which a repetition is looked for: that of the Flight Recorder's own buffer."""
_MOST_COMPARISONS = 10_000_000


def _excess(matches: MatchedOperations, by_key: Mapping[Key, Operation]) -> dict[int, int]:
    """Return each rank's time on the device beyond that of the shortest rank in the same operation, summed."""
    excess: dict[int, int] = defaultdict(int)
    for match in matches.matched:
        times = {key: time for key in match.members if (time := by_key[key].shown_ns) is not None}
        if match.complete and len(times) == len(match.members):
            shortest = min(times.values())
            for (rank, _), time in times.items():
                excess[rank] += time - shortest
    return excess


def _rank_row(
    rank: int, own: Sequence[OperationRow], late: Sequence[Lateness], excess: Mapping[int, int]
) -> RankOperations:
    hops = [row.operation for row in own if row.operation.is_hop]
    sent = [sum_if_known([message.size_bytes for message in hop.sends]) for hop in hops if hop.sends]
    last = [item.late_ns for item in late if item.rank == rank]
    waits = [row.bounds.wait_least_ns for row in own if row.bounds.wait_least_ns is not None]
    return RankOperations(
        rank=rank, operations=len(own), hops=len(hops), sent_bytes=sum_if_known(sent) if sent else 0,
        unfinished=sum(row.operation.state != COMPLETED for row in own), compared=len(late), last=len(last),
        late_median_ns=round(statistics.median(last)) if last else None, late_most_ns=max(last, default=None),
        wait_least_ns=sum(waits) if waits else None, excess_ns=excess.get(rank),
    )  # fmt: skip


def _size_rows(rows: Sequence[OperationRow], logs: Sequence[RankLog], labels: dict[str, str]) -> tuple[SizeRow, ...]:
    """Gather operations of the same group, name and size, those that moved most bytes first."""
    sizes = {key: group.size for log in logs for key, group in log.groups.items()}
    gathered: list[SizeRow] = []
    alike: dict[tuple[str, str, int | None], list[OperationRow]] = defaultdict(list)
    for row in rows:
        alike[row.operation.group, row.operation.name, row.operation.counted_bytes].append(row)
    users: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        users[row.operation.group].add(row.operation.rank)
    for (group, name, size), members in alike.items():
        world = sizes.get(group, 0) or len(users[group])
        ended = [row.bounds for row in members if row.operation.state == COMPLETED]
        medians = {field: _median_bound(field, ended) for field in Bounds.__struct_fields__}
        label = labels.get(group, group)
        gathered.append(SizeRow(label, name, size, world, len(members), medians, bus_factor(name, world)))
    return tuple(sorted(gathered, key=lambda row: (-(row.size_bytes or 0) * row.count, row.group, row.name)))


def _median_bound(field: str, bounds: Sequence[Bounds]) -> float | None:
    """Return the median of bounds, with 0 for a missing lower one and infinity for a missing upper one."""
    values = [getattr(item, field) for item in bounds]
    if all(value is None for value in values):
        return None
    missing = 0 if "least" in field else math.inf
    median = statistics.median(missing if value is None else value for value in values)
    return median if math.isfinite(median) else None


# --- who came late ------------------------------------------------------------------------------------


def _lateness(
    matches: MatchedOperations, by_key: dict[Key, Operation], *, same_clock: bool
) -> tuple[list[Lateness], str]:
    """Return the rank that came last in each complete operation, and what shows it: ``posted`` or ``time``.

    ``posted``: the times of posting, where the ranks' clocks agree and these times are known. ``time``: the times on
    the device, because an operation that ends on all ranks together takes least time on the rank that began it last.
    """
    complete = [match for match in matches.matched if match.complete]
    posted = [item for match in complete if same_clock and (item := _last(match, by_key, "posted_ns", 1))]
    if posted:
        return posted, "posted"
    return [item for match in complete if (item := _last(match, by_key, "shown_ns", -1))], "time"


def _last(match: Match, by_key: dict[Key, Operation], field: str, sign: int) -> Lateness | None:
    operations = [by_key[key] for key in match.members]
    values = [getattr(operation, field) for operation in operations]
    if None in values or len({operation.rank for operation in operations}) < 2 or min(values) == max(values):
        return None
    last = max(range(len(values)), key=lambda index: sign * values[index])
    return Lateness(operations[last].rank, max(values) - min(values), operations[last])


# --- where the ranks stand ----------------------------------------------------------------------------


def _standings(
    logs: Sequence[RankLog],
    rows: dict[Key, OperationRow],
    matches: MatchedOperations,
    labels: dict[str, str],
    *,
    one_job: bool,
) -> tuple[Standing, ...]:
    """Return where every rank stands in each group that has an operation which is not complete.

    For whom it waits is left out where the logs may be of two jobs.
    """
    open_groups = dict.fromkeys(row.operation.group for row in rows.values() if row.operation.state != COMPLETED)
    members = {key: group.ranks for log in logs for key, group in log.groups.items() if group.ranks}
    standings = []
    used: dict[tuple[int, str], list[Key]] = defaultdict(list)
    for key, row in rows.items():
        if row.operation.group in open_groups:
            used[key[0], row.operation.group].append(key)
    for group in open_groups:
        for log in logs:
            if group in members and log.rank not in members[group]:
                continue
            own = used.get((log.rank, group), [])
            unfinished = [key for key in own if rows[key].operation.state != COMPLETED]
            if not own:
                continue
            key = unfinished[0] if unfinished else own[-1]
            waits_for = matches.match_of[key].missing if unfinished and one_job else ()
            others = tuple(rank for rank in waits_for if rank != log.rank)
            standings.append(Standing(log.rank, labels.get(group, group), rows[key], len(unfinished), others))
    return tuple(standings)


def words(name: str) -> str:
    """Return the name of an operation as reports print it: ``send/recv`` for ``send_recv``, else hyphens."""
    return "send/recv" if name == "send_recv" else name.replace("_", "-")


def place_of(row: OperationRow) -> str:
    """Return the name, sequence number and step of an operation, as in ``send/recv 6, step 2 of 4``."""
    step = f", step {row.step} of {row.steps}" if row.steps is not None and row.steps > 1 else ""
    return f"{words(row.operation.name)} {row.operation.sequence}{step}"


def _verdict(
    standings: Sequence[Standing], matches: MatchedOperations, rows: dict[Key, OperationRow], late: Sequence[Lateness],
    late_by: str, labels: dict[str, str], ranks: Sequence[RankOperations],
) -> Iterable[str]:  # fmt: skip
    """Yield the sentences of the report: what is not complete and for whom it waits, who waited, and who came late."""
    disagreeing = [match for match in matches.matched if match.sizes_differ]
    if disagreeing:
        first = [rows[key].operation for key in disagreeing[0].members]
        ranks_by_text: dict[str, list[int]] = defaultdict(list)
        for operation in first:
            ranks_by_text[_sized(operation)].append(operation.rank)
        listed = ", ".join(f"{_listed(named)} {text}" for text, named in [*ranks_by_text.items()][:4])
        yield (
            f"The ranks disagree in {len(disagreeing):,} operation{'s' * (len(disagreeing) > 1)}, first in number"
            f" {first[0].sequence} of group {labels.get(first[0].group, '')}: {listed}. Such an operation hangs, or"
            " gives wrong results."
        )
    unfinished = [key for key, row in rows.items() if row.operation.state != COMPLETED]
    if unfinished:
        yield from _unfinished_sentences(unfinished, standings, matches, rows, labels)
    longest = max(ranks, key=lambda row: row.excess_ns or 0)
    if longest.excess_ns:
        yield (
            f"Rank {longest.rank} spent {milliseconds(longest.excess_ns)} more on its device in these operations than"
            " the rank with the shortest time in each: waiting, where an operation ends on all ranks together."
        )
    if not late:
        return
    last = Counter(item.rank for item in late)
    often, times_last = last.most_common(1)[0]
    worst = max(late, key=lambda item: item.late_ns)
    label = labels.get(worst.operation.group, worst.operation.group)
    named = f"{words(worst.operation.name)} {worst.operation.sequence} of {label}"
    count = f"{times_last:,} of {len(late):,}"
    own = [item.late_ns for item in late if item.rank == often]
    if late_by == "posted":
        yield (
            f"Rank {often} posted its part last in {count} operations, {milliseconds(statistics.median(own))} after the"
            f" first rank in the median. The latest was rank {worst.rank} in {named}: {milliseconds(worst.late_ns)}"
            " after the first."
        )
    else:
        yield (
            f"Rank {often} has the shortest time in {count} operations. Where an operation ends on all ranks together,"
            f" the shortest began last. The largest difference is that of rank {worst.rank} in {named}:"
            f" {milliseconds(worst.late_ns)}, within 1 µs."
        )


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{', ...' * (len(ranks) > 4)}"


def _sized(operation: Operation) -> str:
    if operation.is_hop:
        sizes = [
            sum_if_known([message.size_bytes for message in ends]) for ends in (operation.sends, operation.receives)
        ]
        sent, received = (f"{size or 0:,} bytes" for size in sizes)
        return f"sends {sent} and receives {received}"
    if operation.equal:
        return f"{words(operation.name)} of {operation.equal}"
    size = operation.size_bytes
    return f"{words(operation.name)} of {'unknown size' if size is None else f'{size:,} bytes'}"


def _unfinished_sentences(
    unfinished: Sequence[Key], standings: Sequence[Standing], matches: MatchedOperations, rows: dict[Key, OperationRow],
    labels: dict[str, str],
) -> Iterable[str]:  # fmt: skip
    count = len(unfinished)
    timed_out = sum(rows[key].operation.timed_out for key in unfinished)
    gave_up = f" PyTorch gave up on {timed_out:,} of them." if timed_out else ""
    yield f"{count:,} operation{'s' * (count > 1)} had not ended when the dumps were written.{gave_up}"
    explained, recorded = set(), {standing.rank for standing in standings}
    by_place = {(standing.rank, standing.group): standing for standing in standings}
    for standing in sorted(standings, key=lambda item: item.row.operation.posted_ns or 0):
        operation = standing.row.operation
        for rank in standing.waits_for:
            if (rank, operation.group) in explained:
                continue
            explained.add((rank, operation.group))
            other = by_place.get((rank, standing.group))
            stands = f", and stands at {place_of(other.row)}" if other is not None else ""
            from_ = f" from {operation.location}" if operation.location else ""
            lacks = "had not posted" if rank in recorded else "has no record of"
            yield (
                f"Rank {rank} {lacks} its part of {place_of(standing.row)} of group {standing.group}, which rank"
                f" {operation.rank} posted{from_}{stands}."
            )
    # A group whose ranks disagree needs no other cause to hang.
    disagree = {rows[match.members[0]].operation.group for match in matches.matched if match.sizes_differ}
    together = [
        key for key in unfinished
        if (match := matches.match_of[key]).complete and not match.missing and rows[key].operation.group not in disagree
    ]  # fmt: skip
    if together and not explained:
        first = rows[together[0]]
        label = labels.get(first.operation.group, first.operation.group)
        yield (
            f"All ranks had posted {place_of(first)} of group {label}: it was running, or the network or a kernel"
            " before it hangs. Two dumps some seconds apart show which."
        )
