"""Clock offsets between hosts, estimated from the transfers between them.

Two facts hold for a transfer between two hosts, whatever their clocks show:

* A transfer cannot end at its receiver before it began at its sender. If it is too large for NCCL's buffers, it also
  cannot end at its sender before its receiver began. Traffic both ways bounds the offset from both sides.
* No kernel outlives all its partners. A kernel ends with its last message, and so does the partner of that message, a
  little later if messages lag. So a kernel that ends after its partners on its own host was held by its partner on the
  other host: both ended then. Collectives end everywhere at about the same time.

The second fact gives much tighter bounds. The remaining uncertainty is half the width of the interval that both facts
allow. Where messages go one way only, as around a ring of hosts, the circle separates offset from lag: all hosts are
fitted together with one common lag, because the offsets around the circle sum to zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis.transfers.matching import Matches
from ringprof.trace.columns import Int64

UNBUFFERED_BYTES = 64 << 20
"""Size from which a message cannot sit in NCCL's buffers: its sender cannot end before its receiver began."""

UNKNOWN_NS = 1 << 62
"""Residual of a pair of hosts whose offset is unknown."""

END_TOGETHER_NS = 50_000
"""Longest time by which a kernel outlasts its last partner. On NVLink, 99 of 100 kernels end within 25 us of it, and
most others within 50 us (`tests/analysis/transfers/test_clocks.py` checks this against recorded runs)."""

# Smallest error assumed for an estimate.
_SMALLEST_ERROR_NS = 1_000.0
# Fewer differences than this do not show their own spread.
_MIN_DIFFERENCES = 3
# Differences further apart than this do not show where between them the true offset lies.
_MAX_HALF_WIDTH_NS = 1_000_000
_NEVER = np.iinfo(np.int64).min // 2
# Each member of these collectives needs data of every other, so none can end before the last has begun.
SYNCHRONISING = ("all_gather", "all_reduce", "reduce_scatter")
"""Collectives of which no kernel ends before all its ranks have begun, even if they move few bytes."""
_LIMITING = (*SYNCHRONISING, "all_to_all")


class Pair(msgspec.Struct, frozen=True):
    """Two hosts that exchange data."""

    hosts: tuple[str, str]
    residual_ns: int
    """Largest possible error of the fitted offset between the two; `UNKNOWN_NS` where it is unknown."""
    transfers: int
    """Number of transfers between the two."""


class Clocks(msgspec.Struct, frozen=True):
    """Offsets that bring every rank's times to one common clock."""

    offset_ns: dict[int, int]
    """Rank -> offset to add to its times; 0 on the host of the lowest rank and on hosts that never exchange with it."""
    host: dict[int, str]
    """Rank -> host; ranks of one host share a clock."""
    residual_ns: int = 0
    """Largest possible error of the offset between any two hosts that exchange data."""
    lag_ns: int = 0
    """How much later a message between hosts ends at its receiver than at its sender."""
    pairs: tuple[Pair, ...] = ()

    @property
    def several(self) -> bool:
        """Whether the ranks read more than one clock."""
        return len(set(self.host.values())) > 1

    def residuals(self) -> tuple[Int64, dict[str, int]]:
        """Return the largest clock error between any two hosts, shape (hosts, hosts), and each host's index."""
        number = {name: index for index, name in enumerate(dict.fromkeys(self.host.values()))}
        between = np.full((len(number), len(number)), UNKNOWN_NS, np.int64)
        np.fill_diagonal(between, 0)
        for pair in self.pairs:
            a, b = (number[name] for name in pair.hosts)
            between[a, b] = between[b, a] = pair.residual_ns
        return between, number


def one_clock(ranks: Sequence[int]) -> Clocks:
    """Return the clocks of ranks that share one clock."""
    return Clocks(dict.fromkeys(ranks, 0), dict.fromkeys(ranks, ""))


def hosts_in_order(host: Mapping[int, str]) -> list[str]:
    """Return the hosts ordered by their lowest rank; a host's number is its index here."""
    return list(dict.fromkeys(host[rank] for rank in sorted(host)))


def fit_clocks(traffic: Mapping[tuple[int, int], TrafficEvidence], host: Mapping[int, str]) -> Clocks:
    """Fit the clocks of the hosts to the traffic between them.

    ``traffic`` has both directions of every pair of hosts; ``host`` names the host of every rank.
    """
    names = hosts_in_order(host)
    offsets, lag_ns, residual = _fit_offsets(
        [
            estimate
            for (a, b), summary in traffic.items()
            for estimate in _offset_estimates(a, b, summary, traffic[b, a])
        ],
        len(names),
    )
    pairs = []
    for a, b in sorted((a, b) for a, b in traffic if a < b):
        low, high = _causal_interval(traffic[a, b], traffic[b, a])
        offset_ns = offsets[b] - offsets[a]
        # How far the offset lies outside the interval that causality allows.
        outside = float(max(low + offset_ns, -offset_ns - high, 0.0))
        pairs.append(
            Pair(
                hosts=(names[a], names[b]),
                residual_ns=round(min(residual(a, b) + outside, UNKNOWN_NS)),
                transfers=traffic[a, b].count + traffic[b, a].count,
            )
        )
    number_of_host = {name: index for index, name in enumerate(names)}
    return Clocks(
        offset_ns={rank: round(offsets[number_of_host[name]]) for rank, name in host.items()},
        host=dict(host),
        residual_ns=max((pair.residual_ns for pair in pairs), default=0),
        lag_ns=round(lag_ns),
        pairs=tuple(pairs),
    )


# --- evidence from the transfers between two hosts ------------------------------------------------------


Ends = tuple[float, float, int]
"""Least, largest and number of the differences between the ends of what two hosts exchanged, in ns."""


class TrafficEvidence(msgspec.Struct):
    """Evidence about two hosts' clocks from traffic from the first to the second, in ns of their own clocks."""

    message_ends: Ends | None = None
    """Messages: end at the receiver minus end at the sender."""
    collective_ends: Ends | None = None
    """Collectives: end on the second host minus end on the first."""
    outlived: int | None = None
    """Longest time by which a kernel of the second host outlived its partners on the first, where only these held
    it."""
    lower_bound: int | None = None
    """Lower bound of the second clock minus the first."""
    count: int = 0

    def add_bound(self, bound: Int64) -> None:
        """Add lower bounds."""
        self.lower_bound = int(bound.max() if self.lower_bound is None else max(self.lower_bound, bound.max()))


def _with_ends(ends: Ends | None, differences: Int64) -> Ends:
    """Return ``ends`` with more differences."""
    low, high, count = ends or (np.inf, -np.inf, 0)
    return min(low, float(differences.min())), max(high, float(differences.max())), count + len(differences)


CollectiveTimes = tuple[Int64, Int64, Int64]
"""Last start, first end and last end of one collective on the ranks of one host: per call, by that host's clock."""

MAX_COMPARED_HOSTS = 32
"""Number of hosts of a collective up to which every pair is compared."""

Traffic = dict[tuple[int, int], TrafficEvidence]
"""(host, other host) -> evidence; both directions of every pair that exchanges data."""


def collect_traffic(matches: Matches, host: Mapping[int, int]) -> Traffic:
    """Collect the differences that matched transfers show; ``host`` maps each rank to the number of its host."""
    transfers = matches.transfers
    start = np.array([t.start_ns for t in transfers], np.int64)
    end = np.array([t.end_ns for t in transfers], np.int64)
    host_of_transfer = np.array([host[t.rank] for t in transfers], np.int64)
    large = np.array([(t.sent_bytes or 0) >= UNBUFFERED_BYTES for t in transfers], np.bool_)
    traffic: Traffic = defaultdict(TrafficEvidence)
    crossing = host_of_transfer[matches.sender] != host_of_transfer[matches.receiver]
    sender, receiver = matches.sender[crossing], matches.receiver[crossing]
    host_pairs = np.unique(np.stack((host_of_transfer[sender], host_of_transfer[receiver]), axis=1), axis=0)
    for a, b in host_pairs.tolist():
        rows = (host_of_transfer[sender] == a) & (host_of_transfer[receiver] == b)
        sent, received = sender[rows], receiver[rows]
        a_to_b, b_to_a = traffic[a, b], traffic[b, a]
        a_to_b.message_ends = _with_ends(a_to_b.message_ends, end[received] - end[sent])
        a_to_b.count += len(sent)
        # No receiver ends before its sender has begun, and no sender of a large message before its receiver.
        b_to_a.add_bound(start[sent] - end[received])
        if (large_sends := large[sent]).any():
            a_to_b.add_bound(start[received[large_sends]] - end[sent[large_sends]])
    _collect_outlived(matches, host_of_transfer, end, traffic)
    for calls in matches.collective_matches:
        host_of_row = host_of_transfer[calls[:, 0]]
        rows_of = {number: calls[host_of_row == number] for number in np.unique(host_of_row).tolist()}
        on_host = {
            number: (start[rows].max(axis=0), end[rows].min(axis=0), end[rows].max(axis=0))
            for number, rows in rows_of.items()
        }
        collect_collectives(on_host, transfers[int(calls[0, 0])].kind, traffic)
    return traffic


def _collect_outlived(matches: Matches, host_of_transfer: Int64, end: Int64, traffic: Traffic) -> None:
    """Collect kernels that ended after all partners on their own host: their last message was with the other host."""
    kernel = np.concatenate((matches.sender, matches.receiver))
    partner = np.concatenate((matches.receiver, matches.sender))
    crossing = host_of_transfer[kernel] != host_of_transfer[partner]
    latest_local_end = np.full(len(host_of_transfer), _NEVER)
    np.maximum.at(
        latest_local_end,
        kernel[~crossing],
        end[partner[~crossing]] + _allowed_lag(matches, kernel[~crossing], partner[~crossing], end),
    )
    latest_remote_end, lowest_host, highest_host = (
        np.full(len(host_of_transfer), _NEVER),
        np.full(len(host_of_transfer), len(host_of_transfer)),
        np.full(len(host_of_transfer), -1),
    )
    np.maximum.at(latest_remote_end, kernel[crossing], end[partner[crossing]])
    np.minimum.at(lowest_host, kernel[crossing], host_of_transfer[partner[crossing]])
    np.maximum.at(highest_host, kernel[crossing], host_of_transfer[partner[crossing]])
    # With partners on several hosts, the host of the last message is unknown.
    held_by_one_host = (lowest_host == highest_host) & (end > latest_local_end + END_TOGETHER_NS)
    for row in np.flatnonzero(held_by_one_host).tolist():
        evidence = traffic[int(lowest_host[row]), int(host_of_transfer[row])]
        outlived = end[row] - latest_remote_end[row]
        evidence.outlived = int(outlived if evidence.outlived is None else max(evidence.outlived, outlived))


def _allowed_lag(matches: Matches, kernel: Int64, partner: Int64, end: Int64) -> Int64:
    """Return how much later than its partner a kernel may end: 0 on links where some kernels end together."""
    rank = np.array([transfer.rank for transfer in matches.transfers], np.int64)
    link_of = np.unique(rank[kernel] * (rank.max(initial=0) + 1) + rank[partner], return_inverse=True)[1]
    difference = np.abs(end[kernel] - end[partner])
    smallest, largest = np.full(len(link_of), -_NEVER), np.zeros(len(link_of), np.int64)
    np.minimum.at(smallest, link_of, difference)
    np.maximum.at(largest, link_of, difference)
    return np.where(smallest[link_of] <= END_TOGETHER_NS, 0, largest[link_of])


def collect_collectives(on_host: Mapping[int, CollectiveTimes], kind: str, traffic: Traffic) -> None:
    """Collect the differences that one collective's calls show.

    A collective ends on all its ranks together. Where all ranks need all data, none ends before the last begins. Above
    `MAX_COMPARED_HOSTS`, each host is compared only with the first and with its neighbours: that connects all hosts,
    while time and memory for all pairs would grow with the square of their number.
    """
    hosts = sorted(on_host)
    for index, other_index in combinations(range(len(hosts)), 2):
        a, b = hosts[index], hosts[other_index]
        (last_start_a, first_end_a, last_end_a), (last_start_b, first_end_b, last_end_b) = on_host[a], on_host[b]
        a_to_b, b_to_a = traffic[a, b], traffic[b, a]
        a_to_b.count += len(last_end_a)
        if len(hosts) > MAX_COMPARED_HOSTS and index != 0 and other_index != index + 1:
            continue
        a_to_b.collective_ends = _with_ends(a_to_b.collective_ends, last_end_b - last_end_a)
        if kind in _LIMITING:
            a_to_b.add_bound(last_start_b - first_end_a)
            b_to_a.add_bound(last_start_a - first_end_b)


class _OffsetEstimate(msgspec.Struct, frozen=True):
    """One estimate of the offset between two hosts: what to add to the times of ``b`` to get those of ``a``, in ns."""

    a: int
    b: int
    offset_ns: float
    width_ns: float
    """Largest possible error of the estimate."""
    lags: bool
    """Whether the estimate is too low by the lag of a message."""


def _offset_estimates(a: int, b: int, a_to_b: TrafficEvidence, b_to_a: TrafficEvidence) -> Iterator[_OffsetEstimate]:
    """Yield the estimates from the traffic between two hosts; two-sided bounds only once, for ``a < b``."""
    if a_to_b.message_ends and not b_to_a.message_ends:
        outlived_b, outlived_a = a_to_b.outlived, b_to_a.outlived
        if outlived_b is not None and outlived_a is not None:
            yield _OffsetEstimate(
                a, b, (outlived_a - outlived_b) / 2, abs(outlived_b + outlived_a) / 2 + END_TOGETHER_NS, lags=True
            )
        else:
            low, high, differences = a_to_b.message_ends
            half_width = (high - low) / 2
            if differences >= _MIN_DIFFERENCES and half_width <= _MAX_HALF_WIDTH_NS:
                yield _OffsetEstimate(a, b, -(low + high) / 2, half_width + END_TOGETHER_NS, lags=True)
    if a < b:
        low, high = _offset_interval(a_to_b, b_to_a)
        if np.isfinite(low) and np.isfinite(high):
            yield _OffsetEstimate(a, b, -(low + high) / 2, abs(high - low) / 2, lags=False)


def _offset_interval(a_to_b: TrafficEvidence, b_to_a: TrafficEvidence) -> tuple[float, float]:
    """Return the interval of second clock minus first; low exceeds high where the traffic contradicts itself."""
    causal = _causal_interval(a_to_b, b_to_a)
    low, high = causal
    if a_to_b.message_ends and b_to_a.message_ends:
        low, high = _intersection((low, high), _message_interval(a_to_b, b_to_a))
    if a_to_b.collective_ends and a_to_b.collective_ends[2] >= _MIN_DIFFERENCES:
        least, most, _ = a_to_b.collective_ends
        low, high = _intersection((low, high), (least - END_TOGETHER_NS, most + END_TOGETHER_NS))
    return causal if low > high else (low, high)


def _causal_interval(a_to_b: TrafficEvidence, b_to_a: TrafficEvidence) -> tuple[float, float]:
    """Return the interval that causality allows: no effect before its cause."""
    return (
        -np.inf if a_to_b.lower_bound is None else a_to_b.lower_bound,
        np.inf if b_to_a.lower_bound is None else -b_to_a.lower_bound,
    )


def _message_interval(a_to_b: TrafficEvidence, b_to_a: TrafficEvidence) -> tuple[float, float]:
    """Return the interval that messages in both directions allow.

    The times by which kernels outlive their partners bound it. Where messages lag, each direction contradicts the other
    by its own lag, and the true offset lies between the two. Without such kernels on both sides, the offset lies among
    the differences of the ends: at times one side is held up by other ranks, at times the other.
    """
    if a_to_b.outlived is not None and b_to_a.outlived is not None:
        least, most = a_to_b.outlived - END_TOGETHER_NS, END_TOGETHER_NS - b_to_a.outlived
        return (least, most) if least <= most else (most - END_TOGETHER_NS, least + END_TOGETHER_NS)
    assert a_to_b.message_ends and b_to_a.message_ends
    (low, high, there), (least_back, most_back, back) = a_to_b.message_ends, b_to_a.message_ends
    low, high = min(low, -most_back), max(high, -least_back)
    conclusive = min(there, back) >= _MIN_DIFFERENCES and high - low <= 2 * _MAX_HALF_WIDTH_NS
    return (low - END_TOGETHER_NS, high + END_TOGETHER_NS) if conclusive else (-np.inf, np.inf)


def _intersection(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Return the intersection of two intervals; low exceeds high where they are disjoint."""
    return max(first[0], second[0]), min(first[1], second[1])


# --- all hosts together ------------------------------------------------------------------------------


def _fit_offsets(
    estimates: Sequence[_OffsetEstimate], count: int
) -> tuple[list[float], float, Callable[[int, int], float]]:
    """Fit the offset of each host and one common lag by least squares, weighted by the estimates' certainty.

    Around a ring of hosts each message goes one way only, and the offsets sum to zero. Where the traffic closes no
    circle, lag and offset cannot be separated: then only estimates without lag are used.

    Return the offsets, the lag, and a function that returns the error of the offset between two hosts if every estimate
    were off by its width, widened by its distance from the fit.
    """
    usable = tuple(estimate for estimate in estimates if np.isfinite(estimate.width_ns))
    # For each host, the lowest-numbered host that estimates connect it to.
    first_connected = list(range(count))
    for _ in range(count):
        previous = list(first_connected)
        for estimate in usable:
            first_connected[estimate.a] = first_connected[estimate.b] = min(
                first_connected[estimate.a], first_connected[estimate.b]
            )
        if first_connected == previous:
            break
    rows, weights = _equations(usable, count)
    lags = any(estimate.lags for estimate in usable)
    if lags and np.linalg.matrix_rank(rows / weights[:, None]) < count + 1 - len(set(first_connected)):
        return _fit_offsets([estimate for estimate in usable if not estimate.lags], count)
    influence = np.linalg.pinv(rows) * weights
    solution = influence @ np.array([estimate.offset_ns for estimate in usable])
    offsets = [float(solution[number] - solution[first_connected[number]]) for number in range(count)]
    lag_ns = float(solution[count]) if lags else 0.0
    fitted = (offsets[estimate.b] - offsets[estimate.a] - estimate.lags * lag_ns for estimate in usable)
    widths = [
        estimate.width_ns + max(abs(estimate.offset_ns - offset_ns) - estimate.width_ns, 0.0)
        for estimate, offset_ns in zip(usable, fitted, strict=True)
    ]

    def residual(a: int, b: int) -> float:
        if first_connected[a] != first_connected[b]:
            return float(np.inf)
        return float(np.abs(influence[b] - influence[a]) @ np.array(widths))

    return offsets, lag_ns, residual


def _equations(
    estimates: Sequence[_OffsetEstimate], count: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return one weighted row per estimate over the hosts' offsets and the lag, and the weights."""
    rows, weights = np.zeros((len(estimates), count + 1)), np.zeros(len(estimates))
    for row, estimate in enumerate(estimates):
        weights[row] = _SMALLEST_ERROR_NS / max(estimate.width_ns, _SMALLEST_ERROR_NS)
        rows[row, [estimate.a, estimate.b, count]] = -1, 1, -float(estimate.lags)
    return rows * weights[:, None], weights
