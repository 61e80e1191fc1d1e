"""How far apart the clocks of several hosts are, from the transfers between them.

Two things are known of a transfer between two hosts, whatever their clocks say:

* It cannot end at its receiver before it began at its sender, nor, where it is too large for NCCL's buffers, at its
  sender before its receiver was there. Traffic both ways bounds the offset from both sides.
* It ends on both at about the same time: a collective within microseconds, a message at its receiver later than at
  its sender by the time on the way. That lag is taken to be the same both ways, as network time protocols do.

Other work may hold a kernel up on one side, so only the densest half of the differences counts, and half its width
is what is left unknown. All hosts are fitted together, with one lag for all: around a ring of hosts, where messages
go one way, the offsets sum to nothing and the differences to the lags. How well the pairs agree with the fit is
reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ringprof.analysis.transfers.matching import Matches
from ringprof.trace.columns import Int64

UNBUFFERED_BYTES = 64 << 20
"""A message this large cannot sit in NCCL's buffers: its sender cannot end before its receiver began."""

UNKNOWN_NS = 1 << 62
"""A residual: nothing is known."""

# No reading is surer than this: device clocks of one host agree no better.
_SUREST_NS = 1_000.0
# A quarter of the differences that lies so many times closer together than half of them is a peak.
_PEAK = 10
# Fewer differences than these say nothing about their own spread.
_FEWEST = 3
# Every member of these needs what every other has: none can end before the last has begun.
_NEED_ALL = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


@dataclass(frozen=True)
class Pair:
    """Two hosts that exchange something."""

    hosts: tuple[str, str]
    residual_ns: int
    """How far the fitted offset between the two may be off; `UNKNOWN_NS` where nothing tells."""
    transfers: int
    """Transfers between the two that it rests on."""


@dataclass(frozen=True)
class Clocks:
    """What to add to each rank's times so that all are of one clock."""

    offset_ns: dict[int, int]
    """By rank; 0 on the host of the lowest rank, and on hosts that exchange nothing with it."""
    host: dict[int, str]
    """By rank: ranks of one host share a clock."""
    residual_ns: int = 0
    """How far the offset between any two hosts that exchange something may be off."""
    lag_ns: int = 0
    """How much later a message between hosts ends at its receiver than at its sender."""
    pairs: tuple[Pair, ...] = ()

    @property
    def several(self) -> bool:
        """Whether there is more than one clock."""
        return len(set(self.host.values())) > 1

    def residuals(self) -> tuple[Int64, dict[str, int]]:
        """How far the clocks of any two hosts may be off each other (hosts, hosts), and each host's number in it."""
        number = {name: at for at, name in enumerate(dict.fromkeys(self.host.values()))}
        between = np.full((len(number), len(number)), UNKNOWN_NS, np.int64)
        np.fill_diagonal(between, 0)
        for pair in self.pairs:
            a, b = (number[name] for name in pair.hosts)
            between[a, b] = between[b, a] = pair.residual_ns
        return between, number


def one_clock(ranks: Sequence[int]) -> Clocks:
    """The clocks of ranks that share one."""
    return Clocks(dict.fromkeys(ranks, 0), dict.fromkeys(ranks, ""))


def fit_clocks(matches: Matches, host: Mapping[int, str]) -> Clocks:
    """Fit the hosts' clocks from matched transfers; ``host`` names the host of every rank."""
    names = hosts_in_order(host)
    found = collect(matches, {rank: names.index(name) for rank, name in host.items()})
    return fit_ways({key: way.summed() for key, way in found.items()}, host)


def hosts_in_order(host: Mapping[int, str]) -> list[str]:
    """The hosts in the order of their lowest ranks: a host's number is its place in here."""
    return list(dict.fromkeys(host[rank] for rank in sorted(host)))


def fit_ways(found: Mapping[tuple[int, int], TrafficSummary], host: Mapping[int, str]) -> Clocks:
    """As `fit_clocks`, from what is known of the traffic from host to host, both ways for every two."""
    names = hosts_in_order(host)
    fit = _fit_together([r for (a, b), way in found.items() for r in _readings(a, b, way, found[b, a])], len(names))
    pairs = []
    for a, b in sorted((a, b) for a, b in found if a < b):
        beyond = _beyond(found[a, b], found[b, a], fit.offsets[b] - fit.offsets[a])
        pairs.append(
            Pair(
                hosts=(names[a], names[b]),
                residual_ns=round(min(fit.residual(a, b) + beyond, UNKNOWN_NS)),
                transfers=found[a, b].count + found[b, a].count,
            )
        )
    place = {name: number for number, name in enumerate(names)}
    return Clocks(
        offset_ns={rank: round(fit.offsets[place[name]]) for rank, name in host.items()},
        host=dict(host),
        residual_ns=max((pair.residual_ns for pair in pairs), default=0),
        lag_ns=round(fit.lag_ns),
        pairs=tuple(pairs),
    )


# --- what the transfers between two hosts say -----------------------------------------------------------


@dataclass(frozen=True)
class TrafficSummary:
    """What is known of the clocks of two hosts from what went from the first to the second, in ns."""

    ends: tuple[float, float] | None = None
    """Of messages: end at the receiver less end at the sender, the densest half's middle and half width."""
    together: tuple[float, float] | None = None
    """Of collectives: end on the second host less end on the first, the same."""
    limit: int | None = None
    """What the second clock shows less what the first shows cannot be less than this."""
    count: int = 0


@dataclass
class TrafficSamples:
    """What travelled from one host to another, as differences between their own clocks, in ns."""

    ends: list[Int64] = field(default_factory=list)
    together: list[Int64] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    count: int = 0

    def summed(self) -> TrafficSummary:
        """What the fit needs of it."""
        return TrafficSummary(
            ends=_densest(self.ends) if self.ends else None,
            together=_densest(self.together) if self.together else None,
            limit=max(self.limits, default=None),
            count=self.count,
        )


@dataclass(frozen=True)
class Meetings:
    """The calls of one collective on the ranks of one host: a figure a call, by that host's clock."""

    last_start: Int64
    first_end: Int64
    last_end: Int64


MOST_COMPARED = 32
"""HostOfRank of a collective, up to which every two are compared."""

Traffic = dict[tuple[int, int], TrafficSamples]
"""By (host, other host), both ways for every two that exchange something."""


def collect(matches: Matches, host: Mapping[int, int]) -> Traffic:
    """What the matched transfers say; ``host`` is the number of every rank's host."""
    transfers = matches.transfers
    start = np.array([t.start_ns for t in transfers], np.int64)
    end = np.array([t.end_ns for t in transfers], np.int64)
    place = np.array([host[t.rank] for t in transfers], np.int64)
    large = np.array([(t.sent_bytes or 0) >= UNBUFFERED_BYTES for t in transfers], np.bool_)
    found: Traffic = defaultdict(TrafficSamples)
    crossing = place[matches.sender] != place[matches.receiver]
    sender, receiver = matches.sender[crossing], matches.receiver[crossing]
    ways = np.unique(np.stack((place[sender], place[receiver]), axis=1), axis=0)
    for a, b in ways.tolist():
        rows = (place[sender] == a) & (place[receiver] == b)
        out, into = sender[rows], receiver[rows]
        there, back = found[a, b], found[b, a]
        there.ends.append(end[into] - end[out])
        there.count += len(out)
        # The receiver does not end before the sender has begun, nor the sender before the receiver where it must wait.
        back.limits.append(int((start[out] - end[into]).max()))
        if (big := large[out]).any():
            there.limits.append(int((start[into[big]] - end[out[big]]).max()))
    for meeting in matches.meetings:
        where = place[meeting[:, 0]]
        rows_of = {one: meeting[where == one] for one in np.unique(where).tolist()}
        on_host = {
            one: Meetings(start[rows].max(axis=0), end[rows].min(axis=0), end[rows].max(axis=0))
            for one, rows in rows_of.items()
        }
        collect_meetings(on_host, transfers[int(meeting[0, 0])].kind, found)
    return found


def collect_meetings(on_host: Mapping[int, Meetings], kind: str, found: Traffic) -> None:
    """A collective ends on all its ranks together, and where all need all, on none before the last begins.

    Of very many hosts each is compared with the first and with its neighbours: that ties all of them, where all pairs
    would say the same again in time and memory that grow with their square.
    """
    hosts = sorted(on_host)
    for at, other in combinations(range(len(hosts)), 2):
        a, b = hosts[at], hosts[other]
        first, second = on_host[a], on_host[b]
        there, back = found[a, b], found[b, a]
        there.count += len(first.last_end)
        if len(hosts) > MOST_COMPARED and at != 0 and other != at + 1:
            continue
        there.together.append(second.last_end - first.last_end)
        if kind in _NEED_ALL:
            there.limits.append(int((second.last_start - first.first_end).max()))
            back.limits.append(int((first.last_start - second.first_end).max()))


@dataclass(frozen=True)
class _Reading:
    """One figure for the offset between two hosts: what to add to the second's times to get the first's, in ns."""

    a: int
    b: int
    offset_ns: float
    width_ns: float
    """How far it may be off."""
    lags: bool
    """Whether it is short by the time that a message is on the way."""


@dataclass
class _Fit:
    """All hosts fitted together."""

    readings: tuple[_Reading, ...]
    """Those that it rests on."""
    offsets: list[float]
    """By host."""
    lag_ns: float
    first: list[int]
    """For each host the first of those that it is tied to, over however many others."""
    influence: npt.NDArray[np.floating]
    """How much an offset (row) follows a reading (column)."""

    def misfit(self, reading: _Reading) -> float:
        """How far a reading is from the fit, beyond its own width."""
        fitted = self.offsets[reading.b] - self.offsets[reading.a] - reading.lags * self.lag_ns
        return max(abs(reading.offset_ns - fitted) - reading.width_ns, 0.0)

    def residual(self, a: int, b: int) -> float:
        """How far the offset between two hosts may be off, were each reading off by its width."""
        if self.first[a] != self.first[b]:
            return float(np.inf)
        return float(np.abs(self.influence[b] - self.influence[a]) @ self._widths)

    @cached_property
    def _widths(self) -> npt.NDArray[np.float64]:
        return np.array([reading.width_ns + self.misfit(reading) for reading in self.readings])


def _readings(a: int, b: int, there: TrafficSummary, back: TrafficSummary) -> Iterator[_Reading]:
    """What is read off the traffic from one host to another; bounds from both sides count once for both ways."""
    if there.ends:
        yield _Reading(a, b, -there.ends[0], there.ends[1], lags=True)
    if there.together:
        yield _Reading(a, b, -there.together[0], there.together[1], lags=False)
    if a < b and there.limit is not None and back.limit is not None:
        low, high = back.limit, -there.limit
        yield _Reading(a, b, (low + high) / 2, max(high - low, 0) / 2, lags=False)


def _beyond(there: TrafficSummary, back: TrafficSummary, offset_ns: float) -> float:
    """How far the offset lies outside the interval that causality allows; 0 inside."""
    low = -np.inf if back.limit is None else back.limit
    high = np.inf if there.limit is None else -there.limit
    return float(max(low - offset_ns, offset_ns - high, 0.0))


def _densest(differences: Sequence[Int64]) -> tuple[float, float]:
    """Middle and half the width of the shortest span that holds half of them; infinitely wide where they are too few.

    Of a quarter where that is a peak: messages as fast as those within hosts often end a kernel on one side only.
    """
    ordered = np.sort(np.concatenate(differences)).astype(np.float64)
    half, quarter = (_shortest_span(ordered, len(ordered) // parts + 1) for parts in (2, 4))
    return quarter if quarter[1] < half[1] / _PEAK else half


def _shortest_span(ordered: npt.NDArray[np.float64], count: int) -> tuple[float, float]:
    if count < _FEWEST:
        return float(np.median(ordered)), np.inf
    widths = ordered[count - 1 :] - ordered[: len(ordered) - count + 1]
    at = int(np.argmin(widths))
    return float(ordered[at] + ordered[at + count - 1]) / 2, float(widths[at]) / 2


# --- all hosts together ------------------------------------------------------------------------------


def _fit_together(readings: Sequence[_Reading], count: int) -> _Fit:
    """The offset of each host, and the lag of a message; least squares over the readings, the surer counting more.

    The lag is one for all: around a ring of hosts each message goes one way only, and offsets sum to nothing. Where
    the traffic does not close a circle, lag and offset cannot be told apart: then only what does not lag is used.
    """
    known = tuple(reading for reading in readings if np.isfinite(reading.width_ns))
    first = _sets(known, count)
    rows, weights = _equations(known, count)
    lags = any(reading.lags for reading in known)
    if lags and np.linalg.matrix_rank(rows / weights[:, None]) < count + 1 - len(set(first)):
        return _fit_together([reading for reading in known if not reading.lags], count)
    influence = np.linalg.pinv(rows) * weights
    solution = influence @ np.array([reading.offset_ns for reading in known])
    offsets = [float(solution[number] - solution[first[number]]) for number in range(count)]
    return _Fit(known, offsets, float(solution[count]) if lags else 0.0, first, influence)


def _equations(readings: Sequence[_Reading], count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A row a reading over the hosts' offsets and the lag, weighted; and the weights."""
    rows, weights = np.zeros((len(readings), count + 1)), np.zeros(len(readings))
    for row, reading in enumerate(readings):
        weights[row] = _SUREST_NS / max(reading.width_ns, _SUREST_NS)
        rows[row, [reading.a, reading.b, count]] = -1, 1, -float(reading.lags)
    return rows * weights[:, None], weights


def _sets(readings: Sequence[_Reading], count: int) -> list[int]:
    first = list(range(count))
    for _ in range(count):
        before = list(first)
        for reading in readings:
            first[reading.a] = first[reading.b] = min(first[reading.a], first[reading.b])
        if first == before:
            break
    return first
