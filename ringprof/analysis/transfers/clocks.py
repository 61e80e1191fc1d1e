"""How far apart the clocks of several hosts are, from the transfers between them.

Two things are known of a transfer between two hosts, whatever their clocks say:

* It cannot end at its receiver before it began at its sender, nor, where it is too large for NCCL's buffers, at its
  sender before its receiver was there. Traffic both ways bounds the offset from both sides.
* No kernel outlives all its partners: it ends with its last message, and so does the partner of that message, a little
  later where messages lag on the way. A kernel that ends after its partners on its own host was held by its partner on
  the other: both ended then. Collectives end everywhere at about the same time.

The second is much the sharper, and what is left unknown is half the width of what all of it allows. Where messages go
one way only, as around a ring of hosts, offset and lag are told apart by the circle: all hosts are fitted together,
with one lag for all, since the offsets around it sum to nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis.transfers.matching import Matches
from ringprof.trace.columns import Int64

UNBUFFERED_BYTES = 64 << 20
"""A message this large cannot sit in NCCL's buffers: its sender cannot end before its receiver began."""

UNKNOWN_NS = 1 << 62
"""A residual: nothing is known."""

END_TOGETHER_NS = 50_000
"""A kernel ends at most this much after the last of its partners. On NVLink 99 of 100 do within 25 us, the rest mostly
within 50 (`tests/analysis/transfers/test_clocks.py` holds it against recorded runs)."""

# No reading is surer than this.
_SUREST_NS = 1_000.0
# Fewer differences than these say nothing about their own spread.
_FEWEST = 3
# Differences that lie farther apart than this do not tell where between them the truth is.
_TELLING_NS = 1_000_000
_NEVER = np.iinfo(np.int64).min // 2
# Every member of these needs what every other has: none can end before the last has begun.
NEED_ALL = ("all_gather", "all_reduce", "reduce_scatter")
"""Collectives of which no kernel ends before all its ranks have begun, however few bytes there are."""
_NEED_ALL = (*NEED_ALL, "all_to_all")


class Pair(msgspec.Struct, frozen=True):
    """Two hosts that exchange something."""

    hosts: tuple[str, str]
    residual_ns: int
    """How far the fitted offset between the two may be off; `UNKNOWN_NS` where nothing tells."""
    transfers: int
    """Transfers between the two that it rests on."""


class Clocks(msgspec.Struct, frozen=True):
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


def hosts_in_order(host: Mapping[int, str]) -> list[str]:
    """The hosts in the order of their lowest ranks: a host's number is its place in here."""
    return list(dict.fromkeys(host[rank] for rank in sorted(host)))


def fit_ways(found: Mapping[tuple[int, int], TrafficSummary], host: Mapping[int, str]) -> Clocks:
    """Fit the clocks of the hosts from what is known of the traffic between them, both ways for every two.

    ``host`` names the host of every rank.
    """
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


class Spread(NamedTuple):
    """Differences between the ends of what two hosts exchanged, in ns."""

    low: float
    high: float
    number: int


class TrafficSummary(msgspec.Struct, frozen=True):
    """What is known of the clocks of two hosts from what went from the first to the second, in ns."""

    ends: Spread | None = None
    """Of messages: end at the receiver less end at the sender."""
    together: Spread | None = None
    """Of collectives: end on the second host less end on the first."""
    outlived: int | None = None
    """The most that a kernel of the second host outlived its partners on the first, where these alone held it."""
    limit: int | None = None
    """What the second clock shows less what the first shows cannot be less than this."""
    count: int = 0


class TrafficSamples(msgspec.Struct):
    """What travelled from one host to another, as differences between their own clocks, in ns."""

    ends: list[Int64] = msgspec.field(default_factory=list)
    together: list[Int64] = msgspec.field(default_factory=list)
    outlived: list[int] = msgspec.field(default_factory=list)
    limits: list[int] = msgspec.field(default_factory=list)
    count: int = 0

    def summed(self) -> TrafficSummary:
        """What the fit needs of it."""
        return TrafficSummary(
            ends=_spread(self.ends) if self.ends else None,
            together=_spread(self.together) if self.together else None,
            outlived=max(self.outlived, default=None),
            limit=max(self.limits, default=None),
            count=self.count,
        )


class CollectiveMatches(msgspec.Struct, frozen=True):
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
    _collect_outlived(matches, place, end, found)
    for meeting in matches.meetings:
        where = place[meeting[:, 0]]
        rows_of = {one: meeting[where == one] for one in np.unique(where).tolist()}
        on_host = {
            one: CollectiveMatches(start[rows].max(axis=0), end[rows].min(axis=0), end[rows].max(axis=0))
            for one, rows in rows_of.items()
        }
        collect_matches(on_host, transfers[int(meeting[0, 0])].kind, found)
    return found


def _collect_outlived(matches: Matches, place: Int64, end: Int64, found: Traffic) -> None:
    """Kernels that ended after all their partners on their own host: the last message was one with the other host."""
    kernel = np.concatenate((matches.sender, matches.receiver))
    partner = np.concatenate((matches.receiver, matches.sender))
    away = place[kernel] != place[partner]
    latest_here = np.full(len(place), _NEVER)
    np.maximum.at(latest_here, kernel[~away], end[partner[~away]] + _lags(matches, kernel[~away], partner[~away], end))
    latest_away, nearest, farthest = (
        np.full(len(place), _NEVER),
        np.full(len(place), len(place)),
        np.full(len(place), -1),
    )
    np.maximum.at(latest_away, kernel[away], end[partner[away]])
    np.minimum.at(nearest, kernel[away], place[partner[away]])
    np.maximum.at(farthest, kernel[away], place[partner[away]])
    # With partners on several hosts nobody knows whose message was the last.
    held = (nearest == farthest) & (end > latest_here + END_TOGETHER_NS)
    for row in np.flatnonzero(held).tolist():
        found[int(nearest[row]), int(place[row])].outlived.append(int(end[row] - latest_away[row]))


def _lags(matches: Matches, kernel: Int64, partner: Int64, end: Int64) -> Int64:
    """How much later than its partner a kernel may end: nothing on links on which some kernels do end together."""
    rank = np.array([transfer.rank for transfer in matches.transfers], np.int64)
    link = np.unique(rank[kernel] * (rank.max(initial=0) + 1) + rank[partner], return_inverse=True)[1]
    apart = np.abs(end[kernel] - end[partner])
    least, most = np.full(len(link), -_NEVER), np.zeros(len(link), np.int64)
    np.minimum.at(least, link, apart)
    np.maximum.at(most, link, apart)
    return np.where(least[link] <= END_TOGETHER_NS, 0, most[link])


def collect_matches(on_host: Mapping[int, CollectiveMatches], kind: str, found: Traffic) -> None:
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


class _Reading(msgspec.Struct, frozen=True):
    """One figure for the offset between two hosts: what to add to the second's times to get the first's, in ns."""

    a: int
    b: int
    offset_ns: float
    width_ns: float
    """How far it may be off."""
    lags: bool
    """Whether it is short by the time that a message is on the way."""


class _Fit(msgspec.Struct, dict=True):
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
    """What is read off the traffic between two hosts; what bounds the offset from both sides, once for both ways."""
    if there.ends and not back.ends:
        low, high = there.outlived, back.outlived
        if low is not None and high is not None:
            yield _Reading(a, b, (high - low) / 2, abs(low + high) / 2 + END_TOGETHER_NS, lags=True)
        else:
            middle, half = (there.ends.low + there.ends.high) / 2, (there.ends.high - there.ends.low) / 2
            if there.ends.number >= _FEWEST and half <= _TELLING_NS:
                yield _Reading(a, b, -middle, half + END_TOGETHER_NS, lags=True)
    if a < b:
        low_ns, high_ns = _interval(there, back)
        if np.isfinite(low_ns) and np.isfinite(high_ns):
            yield _Reading(a, b, -(low_ns + high_ns) / 2, abs(high_ns - low_ns) / 2, lags=False)


def _interval(there: TrafficSummary, back: TrafficSummary) -> tuple[float, float]:
    """Between what the second clock less the first must lie; the first is the larger where the traffic contradicts."""
    causal = _causal(there, back)
    low, high = causal
    if there.ends and back.ends:
        low, high = _within((low, high), _by_messages(there, back))
    if there.together and there.together.number >= _FEWEST:
        spread = there.together
        low, high = _within((low, high), (spread.low - END_TOGETHER_NS, spread.high + END_TOGETHER_NS))
    return causal if low > high else (low, high)


def _causal(there: TrafficSummary, back: TrafficSummary) -> tuple[float, float]:
    """The interval that the order of cause and effect allows."""
    return -np.inf if there.limit is None else there.limit, np.inf if back.limit is None else -back.limit


def _by_messages(there: TrafficSummary, back: TrafficSummary) -> tuple[float, float]:
    """The interval that messages both ways leave.

    Who outlives whom bounds it. Where messages lag on the way, each way contradicts the other by its own lag, and the
    truth lies between the two. Without such kernels on both sides it lies among the differences of the ends: now one
    side is held up by others, now the other.
    """
    if there.outlived is not None and back.outlived is not None:
        least, most = there.outlived - END_TOGETHER_NS, END_TOGETHER_NS - back.outlived
        return (least, most) if least <= most else (most - END_TOGETHER_NS, least + END_TOGETHER_NS)
    assert there.ends and back.ends
    low, high = min(there.ends.low, -back.ends.high), max(there.ends.high, -back.ends.low)
    told = min(there.ends.number, back.ends.number) >= _FEWEST and high - low <= 2 * _TELLING_NS
    return (low - END_TOGETHER_NS, high + END_TOGETHER_NS) if told else (-np.inf, np.inf)


def _within(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return max(one[0], other[0]), min(one[1], other[1])


def _beyond(there: TrafficSummary, back: TrafficSummary, offset_ns: float) -> float:
    """How far the offset lies outside the interval that causality allows; 0 inside."""
    low, high = _causal(there, back)
    return float(max(low + offset_ns, -offset_ns - high, 0.0))


def _spread(differences: Sequence[Int64]) -> Spread:
    everything = np.concatenate(differences)
    return Spread(float(everything.min()), float(everything.max()), len(everything))


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
