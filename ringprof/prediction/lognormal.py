"""Distribution of max(device time, host time), both lognormal.

A host issues an iteration while the devices compute the previous one, so an iteration takes the maximum of the two
times. Both are lognormal and independent, so P(max < t) is the product of both probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

_NORMAL = NormalDist()
_HALVINGS = 40


@dataclass(frozen=True)
class Lognormal:
    """A lognormal time; ``spread`` is the standard deviation of its logarithm."""

    median_ns: float
    spread: float

    def below(self, ns: float) -> float:
        """Return the probability that the time is at most ``ns``."""
        if not self.median_ns or not self.spread:
            return float(ns >= self.median_ns)
        return _NORMAL.cdf(math.log(ns / self.median_ns) / self.spread)

    def quantile_ns(self, share: float) -> float:
        """Return the time that is not exceeded with probability ``share``."""
        return self.median_ns * math.exp(_NORMAL.inv_cdf(share) * self.spread)


NO_TIME = Lognormal(0.0, 0.0)


@dataclass(frozen=True)
class MaxLognormal:
    """Time of an iteration: the maximum of device time and host time."""

    device: Lognormal
    host: Lognormal = NO_TIME

    def quantile_ns(self, share: float) -> float:
        """Return the time that is not exceeded with probability ``share``, by bisection.

        The quantile is at least each time's own quantile of ``share``, and at most the larger quantile of
        sqrt(``share``).
        """
        times = (self.device, self.host)
        low = max(time.quantile_ns(share) for time in times)
        high = max(time.quantile_ns(math.sqrt(share)) for time in times)
        for _ in range(_HALVINGS if high > low else 0):
            middle = (low + high) / 2
            if self.device.below(middle) * self.host.below(middle) < share:
                low = middle
            else:
                high = middle
        return high

    def scaled(self, by: MaxLognormal, over: MaxLognormal) -> MaxLognormal:
        """Return the time with both medians multiplied by the ratio of those of ``by`` and ``over``."""
        device, host = (
            replace(time, median_ns=time.median_ns * (a.median_ns / b.median_ns if b.median_ns else 1.0))
            for time, a, b in ((self.device, by.device, over.device), (self.host, by.host, over.host))
        )
        return MaxLognormal(device, host)

    @cached_property
    def median_ns(self) -> float:
        """Median of the iteration's time."""
        return self.quantile_ns(0.5)

    @cached_property
    def host_share(self) -> float:
        """Probability that the host is the bound."""
        if not self.host.median_ns:
            return 0.0
        spread = math.hypot(self.device.spread, self.host.spread)
        log_ratio = math.log(self.host.median_ns / self.device.median_ns)
        return _NORMAL.cdf(log_ratio / spread) if spread else float(log_ratio > 0)
