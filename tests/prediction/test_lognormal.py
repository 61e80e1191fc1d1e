"""Distribution of the maximum of two lognormal times, against draws and against one of them alone."""

from __future__ import annotations

import math
import random
from statistics import quantiles

import pytest

from ringprof.prediction.predict import Lognormal, MaxLognormal


def test_quantiles_of_max_lognormal_equal_those_of_draws() -> None:
    chance = random.Random(1)
    for host_ns, host_spread in ((1e6, 0.2), (0.7e6, 0.3), (2e6, 0.05)):
        pairs = [
            (1e6 * math.exp(chance.gauss(0, 0.03)), host_ns * math.exp(chance.gauss(0, host_spread)))
            for _ in range(20_000)
        ]
        time = MaxLognormal(Lognormal(1e6, 0.03), Lognormal(host_ns, host_spread))
        tenths = quantiles(map(max, pairs), n=10)
        for share, expected in ((0.1, tenths[0]), (0.5, tenths[4]), (0.9, tenths[8])):
            assert time.quantile_ns(share) == pytest.approx(expected, rel=0.01)
        assert time.host_share == pytest.approx(sum(host > device for device, host in pairs) / len(pairs), abs=0.01)


def test_negligible_host_time_does_not_change_quantiles() -> None:
    alone, beside = MaxLognormal(Lognormal(5e6, 0.1)), MaxLognormal(Lognormal(5e6, 0.1), Lognormal(1e4, 0.2))
    for share in (0.1, 0.5, 0.9):
        # exp(±1.2816 · 0.1) of the median.
        assert alone.quantile_ns(share) == pytest.approx(5e6 * {0.1: 0.8797, 0.5: 1.0, 0.9: 1.1367}[share], rel=1e-4)
        assert beside.quantile_ns(share) == pytest.approx(alone.quantile_ns(share), rel=1e-9)
    assert alone.host_share == 0.0 and beside.host_share < 1e-9


def test_max_of_two_equal_lognormals_by_formula() -> None:
    both = MaxLognormal(Lognormal(1e6, 0.1), Lognormal(1e6, 0.1))
    assert both.host_share == pytest.approx(0.5)
    # F² = 1/2 where F = 0.7071: 0.5450 standard deviations above the middle.
    assert both.median_ns == pytest.approx(1e6 * math.exp(0.05450), rel=1e-4)
