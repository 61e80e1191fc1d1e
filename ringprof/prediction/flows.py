"""Flows over shared links: each has its own most, and what a link cannot carry is shared by max-min fairness.

Source of the filling: Bertsekas and Gallager, Data Networks, section 6.5.2: raise all rates together; a flow stops at
its own most, and all flows of a link stop when the link is full.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

At = Callable[[float, Callable[[float], None]], None]
"""Calls something at a time."""


@dataclass(eq=False)
class Flow:
    """Bytes on their way over ``links``, at most ``cap`` bytes a nanosecond."""

    left: float
    cap: float
    links: Sequence[Hashable]
    done: Callable[[float], None]
    rate: float = 0.0
    since: float = 0.0
    version: int = field(default=0)
    """An end that was planned for another version does not come."""


class Flows:
    """All flows under way; rates follow every flow that begins or ends."""

    def __init__(self, capacity: Callable[[Hashable], float], at: At) -> None:
        self._capacity, self._at = capacity, at
        self._on: dict[Hashable, dict[Flow, None]] = {}

    def begin(self, flow: Flow, now: float) -> None:
        """From here on the flow moves; ``flow.done`` is called when it has."""
        flow.since = now
        for link in flow.links:
            self._on.setdefault(link, {})[flow] = None
        self._share([flow], now)

    def _end(self, flow: Flow, version: int, now: float) -> None:
        if version != flow.version:
            return
        beside = [other for link in flow.links for other in self._on[link] if other is not flow]
        for link in flow.links:
            del self._on[link][flow]
        if beside:
            self._share(beside, now)
        flow.done(now)

    def _share(self, changed: Iterable[Flow], now: float) -> None:
        """New rates for all flows that share a link with a changed one, at however many removes."""
        found = dict.fromkeys(changed)
        queue = list(found)
        for flow in queue:
            for link in flow.links:
                for other in self._on[link]:
                    if other not in found:
                        found[other] = None
                        queue.append(other)
        for flow, rate in max_min(queue, self._capacity).items():
            if rate == flow.rate and flow.version:
                continue
            flow.left -= flow.rate * (now - flow.since)
            flow.since, flow.rate = now, rate
            flow.version += 1
            self._at(now + max(flow.left, 0.0) / rate, partial(self._end, flow, flow.version))


def max_min(flows: Sequence[Flow], capacity: Callable[[Hashable], float]) -> Mapping[Flow, float]:
    """The fair rate of each of ``flows``, which share links with no others."""
    if len(flows) == 1:
        return {flow: min([flow.cap, *map(capacity, flow.links)]) for flow in flows}
    room: dict[Hashable, float] = {}
    users: dict[Hashable, int] = {}
    for flow in flows:
        for link in flow.links:
            room.setdefault(link, capacity(link))
            users[link] = users.get(link, 0) + 1
    rates: dict[Flow, float] = {}
    open_flows = list(flows)
    while open_flows:
        fair = {flow: min((room[link] / users[link] for link in flow.links), default=flow.cap) for flow in open_flows}
        level = min(min(flow.cap, share) for flow, share in fair.items())
        still = []
        for flow in open_flows:
            if min(flow.cap, fair[flow]) > level * (1 + 1e-9):
                still.append(flow)
                continue
            rates[flow] = level
            for link in flow.links:
                room[link] = max(0.0, room[link] - level)
                users[link] -= 1
        open_flows = still
    return rates
