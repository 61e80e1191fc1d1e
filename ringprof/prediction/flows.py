"""Flows over shared links: each flow has a cap, and max-min fairness shares a link that cannot carry them all.

The progressive filling follows Bertsekas and Gallager, Data Networks, section 6.5.2: raise all rates together; a flow
stops at its own cap, and all flows of a link stop when the link is full.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

CallAt = Callable[[float, Callable[[float], None]], None]
"""Schedules a function call at a time."""


@dataclass(eq=False)
class Flow:
    """Bytes in transit over ``links``, at a rate of at most ``cap`` bytes per nanosecond."""

    left: float
    cap: float
    links: Sequence[Hashable]
    done: Callable[[float], None]
    rate: float = 0.0
    since: float = 0.0
    version: int = field(default=0)
    """Number of rate changes; an end that was scheduled for an earlier version is ignored."""


class Flows:
    """All active flows; rates are updated whenever a flow begins or ends."""

    def __init__(self, capacity: Callable[[Hashable], float], call_at: CallAt) -> None:
        self._capacity, self._call_at = capacity, call_at
        self._flows_on: dict[Hashable, dict[Flow, None]] = {}

    def begin(self, flow: Flow, now: float) -> None:
        """Start a flow; ``flow.done`` is called when all its bytes have arrived."""
        flow.since = now
        alone = True
        for link in flow.links:
            others = self._flows_on.setdefault(link, {})
            alone = alone and not others
            others[flow] = None
        if alone:
            # Most flows share no link.
            self._set_rate(flow, max_min([flow], self._capacity)[flow], now)
        else:
            self._share([flow], now)

    def _end(self, flow: Flow, version: int, now: float) -> None:
        if version != flow.version:
            return
        neighbours = [other for link in flow.links for other in self._flows_on[link] if other is not flow]
        for link in flow.links:
            del self._flows_on[link][flow]
        if neighbours:
            self._share(neighbours, now)
        flow.done(now)

    def _share(self, changed: Iterable[Flow], now: float) -> None:
        """Update the rates of all flows that share a link with a changed one, directly or through other flows."""
        reached = dict.fromkeys(changed)
        queue = list(reached)
        for flow in queue:
            for link in flow.links:
                for other in self._flows_on[link]:
                    if other not in reached:
                        reached[other] = None
                        queue.append(other)
        for flow, rate in max_min(queue, self._capacity).items():
            if rate != flow.rate or not flow.version:
                self._set_rate(flow, rate, now)

    def _set_rate(self, flow: Flow, rate: float, now: float) -> None:
        flow.left -= flow.rate * (now - flow.since)
        flow.since, flow.rate = now, rate
        flow.version += 1
        self._call_at(now + max(flow.left, 0.0) / rate, partial(self._end, flow, flow.version))


def max_min(flows: Sequence[Flow], capacity: Callable[[Hashable], float]) -> Mapping[Flow, float]:
    """Return the max-min fair rate of each of ``flows``, which share links with no other flows."""
    if len(flows) == 1:
        return {flow: min([flow.cap, *map(capacity, flow.links)]) for flow in flows}
    free: dict[Hashable, float] = {}
    flow_counts: dict[Hashable, int] = {}
    for flow in flows:
        for link in flow.links:
            free.setdefault(link, capacity(link))
            flow_counts[link] = flow_counts.get(link, 0) + 1
    rates: dict[Flow, float] = {}
    open_flows = list(flows)
    while open_flows:
        fair = {
            flow: min((free[link] / flow_counts[link] for link in flow.links), default=flow.cap) for flow in open_flows
        }
        rate = min(min(flow.cap, share) for flow, share in fair.items())
        unfinished = []
        for flow in open_flows:
            if min(flow.cap, fair[flow]) > rate * (1 + 1e-9):
                unfinished.append(flow)
                continue
            rates[flow] = rate
            for link in flow.links:
                free[link] = max(0.0, free[link] - rate)
                flow_counts[link] -= 1
        open_flows = unfinished
    return rates
