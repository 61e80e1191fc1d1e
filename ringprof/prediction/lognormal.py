"""The longer of two times of which only the likely size is known: what the devices need, and what the hosts do.

A host issues an iteration while the devices compute the one before, so an iteration takes as long as the longer of
both. Each is lognormal, and they are independent, so the chance that both are over is the product of the chances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

_NORMAL = NormalDist()
_HALVINGS = 40


@dataclass(frozen=True)
class Lognormal:
    """A time by its median; ``spread`` is the standard deviation of its logarithm."""

    median_ns: float
    spread: float

    def below(self, ns: float) -> float:
        """The chance that it is no longer."""
        if not self.median_ns or not self.spread:
            return float(ns >= self.median_ns)
        return _NORMAL.cdf(math.log(ns / self.median_ns) / self.spread)

    def quantile_ns(self, share: float) -> float:
        return self.median_ns * math.exp(_NORMAL.inv_cdf(share) * self.spread)


NO_TIME = Lognormal(0.0, 0.0)


@dataclass(frozen=True)
class Longer:
    """What an iteration takes."""

    device: Lognormal
    host: Lognormal = NO_TIME

    def quantile_ns(self, share: float) -> float:
        """Neither alone can be over it more often than ``share``; both are where each is as often as the root of it."""
        both = (self.device, self.host)
        low = max(one.quantile_ns(share) for one in both)
        high = max(one.quantile_ns(math.sqrt(share)) for one in both)
        for _ in range(_HALVINGS if high > low else 0):
            middle = (low + high) / 2
            if self.device.below(middle) * self.host.below(middle) < share:
                low = middle
            else:
                high = middle
        return high

    @cached_property
    def median_ns(self) -> float:
        return self.quantile_ns(0.5)

    @cached_property
    def host_share(self) -> float:
        """How likely it is that the host is the bound."""
        if not self.host.median_ns:
            return 0.0
        apart = math.hypot(self.device.spread, self.host.spread)
        ahead = math.log(self.host.median_ns / self.device.median_ns)
        return _NORMAL.cdf(ahead / apart) if apart else float(ahead > 0)
