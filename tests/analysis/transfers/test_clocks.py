"""Clock offsets of hosts, recovered from rings and collectives with known times."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from ringprof.analysis.transfers.clocks import (
    Traffic,
    TrafficEvidence,
    _equations,
    _fit_offsets,
    _message_interval,
    _offset_estimates,
    _OffsetEstimate,
    collect_collectives,
    collect_traffic,
    fit_clocks,
    hosts_in_order,
)  # fmt: skip
from ringprof.analysis.transfers.hops import hop_totals
from ringprof.analysis.transfers.matching import match
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import Trace
from ringprof.trace.ranks import read_traces
from tests.analysis.build import NCCL, Builder, collective
from tests.loaded import analysis
from tests.paths import DATA, TRACES

MS, US = 1_000_000, 1_000


def ring(skews, per_host=2, hops=40, *, slow=10, lag=0, seed=0, elements=1 << 20):
    """Build traces of a ring over several hosts; each host's clock is off by its skew.

    Ranks reach each hop at random times. A message arrives its wire time after both ends are ready. Between hosts, the
    wire time is ``slow`` times longer and the receiver sees its end ``lag`` later. A kernel ends with its last message.
    """
    draw = np.random.default_rng(seed)
    world = len(skews) * per_host
    host = np.arange(world) // per_host
    builders = [Builder(rank=rank, world_size=world, host=f"node{host[rank]}") for rank in range(world)]
    crossing = host != np.roll(host, -1)
    for number in range(hops):
        arrival = 10 * MS * (number + 1) + draw.integers(0, 300 * US, world)
        sent = np.maximum(arrival, np.roll(arrival, -1)) + np.where(crossing, slow * 100 * US, 100 * US)
        arrived = np.roll(sent + np.where(crossing, lag, 0), 1)
        end = np.maximum(sent, arrived) + draw.integers(0, US, world)
        for rank, builder in enumerate(builders):
            builder.batch(
                1000 * (number + 1), int(arrival[rank] + skews[host[rank]]), int(end[rank] + skews[host[rank]]),
                to=(rank + 1) % world, source=(rank - 1) % world, tensors=1, elements=elements,
                group_ranks=tuple(range(world)), group_size=world,
            )  # fmt: skip
    return [builder.trace() for builder in builders]


def codes(attribution):
    return [warning.code for warning in attribution.warnings]


def recovered(attribution, skews, per_host=2):
    """Return the error of each host's offset, in ns, relative to the first host's clock."""
    return [attribution.clocks.offset_ns[index * per_host] + skew - skews[0] for index, skew in enumerate(skews)]


@pytest.mark.parametrize("skews", [(0, 5 * MS), (3 * MS, -2 * MS), (0, 700), (0, 5 * MS, -4 * MS), (1, 2, 5 * MS, 3)])
@pytest.mark.parametrize("slow", [1, 10])
def test_offsets_up_to_5_ms_are_recovered_to_5_us(skews, slow):
    attribution = attribute(ring(skews, slow=slow))
    errors = recovered(attribution, skews)
    assert max(map(abs, errors)) <= 5 * US
    # Real kernels end up to 50 us apart, so no fit claims a smaller error.
    assert 45 * US <= attribution.clocks.residual_ns <= 100 * US
    assert codes(attribution)[0] == "clocks_fitted"


def test_symmetric_lag_is_not_counted_as_clock_offset():
    skews = (0, 5 * MS)
    assert max(map(abs, recovered(attribute(ring(skews, lag=300 * US)), skews))) <= 5 * US


def test_waits_with_skewed_clocks_equal_waits_with_one_clock():
    skewed, together = attribute(ring((0, 5 * MS))), attribute(ring((0, 0)))
    for skewed_rank, expected_rank in zip(skewed.ranks, together.ranks, strict=True):
        totals, expected_totals = hop_totals(skewed_rank.hops), hop_totals(expected_rank.hops)
        assert totals.wait_ns == pytest.approx(expected_totals.wait_ns, abs=40 * 2 * US)
        assert totals.wait_share == pytest.approx(expected_totals.wait_share, abs=0.01)


def test_hops_keep_the_times_of_their_own_clock():
    for rank in attribute(ring((0, 5 * MS))).ranks:
        timed = [part for part in rank.splits if part.ready_ns is not None]
        assert len(timed) > len(rank.splits) // 2
        assert all(abs(part.transfer.end_ns - (part.ready_ns or 0)) < 2 * MS for part in timed)


def test_collectives_alone_suffice_to_align_clocks():
    skews, builders = (0, -5 * MS), []
    draw = np.random.default_rng(1)
    arrival = draw.integers(0, 300 * US, (10, 4)) + 10 * MS * np.arange(1, 11)[:, None]
    end = arrival.max(axis=1) + 200 * US
    for rank in range(4):
        builder, skew = Builder(rank=rank, host=f"node{rank // 2}"), skews[rank // 2]
        for number in range(10):
            own = collective("allreduce", elements=1 << 20)
            builder.run(
                NCCL, int(arrival[number, rank] + skew), int(end[number] + skew), launched=10 * number + 1, own=own
            )
        builders.append(builder)
    attribution = attribute([builder.trace() for builder in builders])
    assert recovered(attribution, skews) == [0, 0]
    assert attribution.ranks[0].splits[0].wire_ns == 200 * US


def test_waits_below_the_clock_error_are_not_reported():
    # The two directions disagree by 200 us from hop to hop, and no rank waits that long.
    builders = [Builder(rank=rank, world_size=2, host=f"node{rank}") for rank in range(2)]
    draw = np.random.default_rng(0)
    for number in range(20):
        start = 10 * MS * (number + 1)
        for rank, builder in enumerate(builders):
            builder.batch(
                1000 * (number + 1), start + 20 * US * rank, start + MS + int(draw.integers(0, 400 * US)),
                to=1 - rank, source=1 - rank, tensors=1, group_ranks=(0, 1), group_size=2,
            )  # fmt: skip
    attribution = attribute([builder.trace() for builder in builders])
    assert codes(attribution) == ["clocks_fitted", "clocks_inconclusive"]
    inconclusive = [part for rank in attribution.ranks for part in rank.splits if part.wait_ns is None]
    assert len(inconclusive) == attribution.warnings[1].count > 0
    assert hop_totals(attribution.ranks[0].hops).wait_ns is None


def test_ranks_of_one_host_need_no_clock_fit():
    builders = ring((0,), per_host=4)
    attribution = attribute(builders)
    assert (attribution.clocks.residual_ns, attribution.clocks.pairs, codes(attribution)) == (0, (), [])


def test_hosts_without_traffic_keep_their_times():
    traces = []
    for host in range(2):
        pair = (2 * host, 2 * host + 1)
        for rank in pair:
            builder = Builder(rank=rank, host=f"node{host}")
            builder.batch(100, 1000, 2000, to=sum(pair) - rank, source=sum(pair) - rank, group_ranks=pair, group_size=2)
            traces.append(builder.trace())
    attribution = attribute(traces)
    assert set(attribution.clocks.offset_ns.values()) == {0}
    assert codes(attribution) == []
    assert [part.wire_ns for rank in attribution.ranks for part in rank.splits] == [1000] * 4


# --- runs of one clock, split into made-up hosts --------------------------------------------------------


@cache
def one_clock_runs():
    """Return the matched transfers of the recorded runs on one host, where all ranks read one clock."""
    runs = [analysis(folder).attribution for folder in sorted(TRACES.glob("h200x4-*-262144"))]
    runs.append(attribute(read_traces(sorted((DATA / "h200x8-zigzag-131072").glob("rank*.json.gz")))))
    return [match({rank.rank: [part.transfer for part in rank.splits] for rank in run.ranks}) for run in runs]


def test_offset_bounds_contain_the_truth_on_random_host_splits():
    draw = random.Random(7)
    within_bounds, widths = [], []
    for _ in range(200):
        matches = draw.choice(one_clock_runs())
        ranks = sorted({transfer.rank for transfer in matches.transfers})
        hosts = draw.choice([2, 2, 3])
        host = {rank: f"host{draw.randrange(hosts)}" for rank in ranks}
        names = hosts_in_order(host)
        traffic = collect_traffic(matches, {rank: names.index(name) for rank, name in host.items()})
        clocks = fit_clocks(traffic, host)
        for pair in clocks.pairs:
            first, second = (
                clocks.offset_ns[next(rank for rank in ranks if host[rank] == name)] for name in pair.hosts
            )
            within_bounds.append(abs(second - first) <= pair.residual_ns)
            widths.append(pair.residual_ns)
    assert len(within_bounds) >= 200 and np.mean(within_bounds) >= 0.95
    assert np.median(widths) < 200 * US


# --- a run that was recorded as two hosts on one machine: the clocks agree -----------------------------


@cache
def recorded() -> list[Trace]:
    folder = DATA / "h200x8-zigzag-131072-two-hosts"
    return read_traces([folder / f"rank{rank}.json.gz" for rank in range(8)])


def shifted(trace: Trace, by: int) -> Trace:
    rows = replace(trace.activities, start_ns=trace.activities.start_ns + by, end_ns=trace.activities.end_ns + by)
    return replace(trace, activities=rows)


@pytest.mark.parametrize("skew", [0, 5 * MS, -3 * MS])
def test_recorded_hosts_are_aligned_and_keep_their_figures(skew):
    expected = attribute(recorded())
    shifted_run = attribute([shifted(t, skew if (t.rank or 0) >= 4 else 0) for t in recorded()], ranks_per_host=4)
    # Messages take 300 us here, at times more, which looks the same as an offset.
    assert abs(shifted_run.clocks.offset_ns[4] + skew) < 50 * US
    assert 300 * US < shifted_run.clocks.residual_ns < 600 * US
    for expected_rank, rank in zip(expected.ranks, shifted_run.ranks, strict=True):
        totals, expected_totals = hop_totals(rank.hops), hop_totals(expected_rank.hops)
        assert totals.wait_share == pytest.approx(expected_totals.wait_share, abs=0.001)
        assert totals.wire_gbps == pytest.approx(expected_totals.wire_gbps, rel=0.001)


@pytest.mark.parametrize("hosts", [3, 33, 100])
def test_collective_of_many_hosts_aligns_all_clocks(hosts):
    draw = np.random.default_rng(hosts)
    true_offset = np.concatenate([[0], draw.integers(-(10**9), 10**9, hosts - 1)])
    begin = np.arange(40) * 1_000_000
    on_host = {
        host: (
            begin + draw.integers(0, 1_000, 40) + true_offset[host],
            begin + 5_000 + draw.integers(0, 300, 40) + true_offset[host],
            begin + 5_300 + draw.integers(0, 300, 40) + true_offset[host],
        )
        for host in range(hosts)
    }
    traffic: Traffic = defaultdict(TrafficEvidence)
    collect_collectives(on_host, "all_reduce", traffic)
    clocks = fit_clocks(traffic, {rank: f"host{rank // 8}" for rank in range(8 * hosts)})
    assert len(clocks.pairs) == hosts * (hosts - 1) // 2
    for rank, offset in clocks.offset_ns.items():
        assert abs(offset + true_offset[rank // 8]) <= clocks.residual_ns < 200_000


def test_many_hosts_are_compared_with_the_first_and_neighbours():
    traffic: Traffic = defaultdict(TrafficEvidence)
    time = np.array([0])
    collect_collectives({host: (time, time + 1, time + 2) for host in range(40)}, "all_reduce", traffic)
    compared = {pair for pair, samples in traffic.items() if samples.collective_ends}
    assert compared == {(0, other) for other in range(1, 40)} | {(host, host + 1) for host in range(39)}


# --- estimates and their weights -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "read"),
    [
        ((10, 30, 3), [(-20.0, 10.0 + 50_000)]),
        ((10, 30, 2), []),
        ((0, 4_000_000, 3), []),
    ],
)
def test_one_way_ends_give_an_offset_if_three_agree_within_2_ms(ends, read):
    estimates = _offset_estimates(0, 1, TrafficEvidence(message_ends=ends), TrafficEvidence())
    assert [(estimate.offset_ns, estimate.width_ns) for estimate in estimates] == read


@pytest.mark.parametrize(("number", "between"), [(3, (-50_000, 50_020)), (2, (-np.inf, np.inf))])
def test_two_way_ends_give_an_offset_interval_from_three_on(number, between):
    a_to_b, b_to_a = (TrafficEvidence(message_ends=(*ends, number)) for ends in ((0, 10), (-20, -5)))
    assert _message_interval(a_to_b, b_to_a) == between


def test_more_certain_estimate_has_more_weight():
    """Check weights 1 and 1/2, squared in least squares: (100 + 400 / 4) / (1 + 1/4)."""
    estimates = [_OffsetEstimate(0, 1, 100.0, 1_000.0, lags=False), _OffsetEstimate(0, 1, 400.0, 2_000.0, lags=False)]
    assert _fit_offsets(estimates, 2)[0] == pytest.approx([0.0, 160.0])
    assert [array.tolist() for array in _equations(estimates, 2)] == [[[-1.0, 1.0, 0.0], [-0.5, 0.5, 0.0]], [1.0, 0.5]]


def _lagging(a: int, b: int, offset_ns: float) -> _OffsetEstimate:
    return _OffsetEstimate(a, b, offset_ns, 1_000.0, lags=True)


def test_cycle_of_hosts_separates_lag_from_offsets():
    """Check clocks at 0, 10 and 20 with a lag of 5: 10 - 5, 10 - 5 and -20 - 5."""
    offsets, lag_ns, _ = _fit_offsets([_lagging(0, 1, 5.0), _lagging(1, 2, 5.0), _lagging(2, 0, -25.0)], 3)
    assert offsets == pytest.approx([0.0, 10.0, 20.0]) and lag_ns == pytest.approx(5.0)


def test_chain_of_hosts_ignores_estimates_with_lag():
    chain = [_lagging(0, 1, 5.0), _lagging(1, 2, 5.0)]
    offsets, lag_ns, residual = _fit_offsets(chain, 3)
    assert (offsets, lag_ns, residual(0, 2)) == ([0.0, 0.0, 0.0], 0.0, math.inf)
    # The third host has another estimate of 16, without lag: 16 = 5 + 5 + 2 x 3 of lag.
    offsets, lag_ns, _ = _fit_offsets([*chain, _OffsetEstimate(0, 2, 16.0, 1_000.0, lags=False)], 3)
    assert offsets == pytest.approx([0.0, 8.0, 16.0]) and lag_ns == pytest.approx(3.0)
