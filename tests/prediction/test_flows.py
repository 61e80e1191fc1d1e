"""Max-min fair rates against their definition, and the times of flows against sums done by hand."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count

import pytest

from ringprof.prediction.simulator import Flow, Flows, max_min


def nothing(now: float) -> None:
    pass


def flow(size: float, cap: float, *links: Hashable, done: Callable[[float], None] = nothing) -> Flow:
    return Flow(size, cap, links, done)


def test_two_flows_share_a_link_beside_a_capped_third() -> None:
    """A link of 10: one flow can do 2, the others share the 8 that are left."""
    slow, first, second = flow(1, 2, "a"), flow(1, 99, "a"), flow(1, 99, "a", "wide")
    rates = max_min([slow, first, second], lambda link: {"a": 10.0, "wide": 100.0}[str(link)])
    assert rates == {slow: 2, first: 4, second: 4}


def test_flow_over_two_links_leaves_bandwidth_on_the_wider() -> None:
    """Example of Bertsekas and Gallager: x over both, y on a (10), z on b (4); x and z get 2, y the other 8."""
    x, y, z = flow(1, 99, "a", "b"), flow(1, 99, "a"), flow(1, 99, "b")
    assert max_min([x, y, z], lambda link: {"a": 10.0, "b": 4.0}[str(link)]) == {x: 2, y: 8, z: 2}


@pytest.mark.parametrize("seed", range(30))
def test_rates_are_max_min_fair(seed: int) -> None:
    """No link carries too much, and a flow below its cap has a full link on which no other is faster."""
    chance = random.Random(seed)
    capacity: Mapping[Hashable, float] = {link: chance.uniform(1, 10) for link in range(6)}
    flows = [flow(1, chance.uniform(0.2, 8), *chance.sample(range(6), chance.randint(1, 3))) for _ in range(12)]
    rates = max_min(flows, capacity.__getitem__)
    load = {link: sum(rates[current] for current in flows if link in current.links) for link in capacity}
    assert all(load[link] <= capacity[link] * (1 + 1e-6) for link in capacity)
    for current in flows:
        fastest = [
            rates[current] >= max(rates[other] for other in flows if link in other.links) * (1 - 1e-6)
            for link in current.links
            if load[link] > capacity[link] * (1 - 1e-6)
        ]
        assert rates[current] == pytest.approx(current.cap) or any(fastest)


def ends(begins: Sequence[tuple[float, float, float]], capacity: float) -> list[float]:
    """Return the end times of flows of (begin, size, cap) on one link."""
    events: list[tuple[float, int, Callable[[float], None]]] = []
    numbers, end_times = count(), [0.0] * len(begins)
    flows = Flows(
        lambda link: capacity, lambda time_ns, callback: heapq.heappush(events, (time_ns, next(numbers), callback))
    )

    def ended(number: int) -> Callable[[float], None]:
        return lambda now: end_times.__setitem__(number, now)

    for number, (begin, size, cap) in enumerate(begins):
        new_flow = flow(size, cap, "a", done=ended(number))
        heapq.heappush(events, (begin, next(numbers), lambda now, new_flow=new_flow: flows.begin(new_flow, now)))  # type: ignore[misc]
    while events:
        time_ns, _, callback = heapq.heappop(events)
        callback(time_ns)
    return end_times


def test_flow_rates_change_as_flows_begin_and_end() -> None:
    """A link of 4: the first flow has it alone until 10 (40 of 100 done), then half of it.

    The second flow's 40 take 20, until 30. The first then has 20 left, for which it needs 5 more.
    """
    assert ends([(0, 100, 99), (10, 40, 99)], 4.0) == [35, 30]


def test_flows_deliver_all_bytes_within_rate_limits() -> None:
    chance = random.Random(3)
    begins = [(chance.uniform(0, 50), chance.uniform(1, 90), chance.uniform(0.5, 3)) for _ in range(20)]
    end_times = ends(begins, 4.0)
    assert all(end >= begin + size / cap - 1e-9 for end, (begin, size, cap) in zip(end_times, begins, strict=True))
    assert max(end_times) >= sum(size for _, size, _ in begins) / 4.0
