"""Formatting of figures in sentences."""

import random
from decimal import Decimal

import pytest

from ringprof.common.formatting import (
    milliseconds,
    percent,
    rounded_percent,
    rounded_time,
    significant,
    three_digits,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.01234, "0.0123"), (399.4, "399"), (999.4, "999"), (999.6, "1,000"), (4123.4, "4,123"), (-1500, "-1,500")],
)
def test_a_rate_has_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert three_digits(value) == shown


@pytest.mark.parametrize(
    ("time_ns", "shown"),
    [
        (123_456, "0.123 ms"),
        (1_234_567, "1.23 ms"),
        (12_345_678, "12.3 ms"),
        (999_949_999, "999.9 ms"),
        (999_950_000, "1.000 s"),
        (1_186_190_000, "1.186 s"),
        (12_345_678_901, "12.346 s"),
    ],
)
def test_a_time_has_fewer_digits_the_longer_it_is(time_ns: int, shown: str) -> None:
    assert milliseconds(time_ns) == shown


def test_a_share_is_in_percent() -> None:
    assert (percent(0.1234), percent(0.126, 0), percent(1.0)) == ("12.3 %", "13 %", "100.0 %")


@pytest.mark.parametrize("digits", [3, 4])
def test_significant_digits_are_those_of_the_rounded_decimal(digits: int) -> None:
    rng = random.Random(digits)
    for _ in range(2_000):
        value = rng.choice((-1, 1)) * rng.uniform(1, 10) * 10 ** rng.randint(-6, 8)
        text = significant(value, digits)
        exact = Decimal(value)
        # Whole numbers are shown in full; nothing has more than six decimals.
        exponent = max(-6, min(0, exact.adjusted() - digits + 1))
        assert abs(Decimal(text.replace(",", "")) - exact) <= Decimal(10) ** exponent / 2 * Decimal("1.001")
        assert "e" not in text and len(text.partition(".")[2]) <= 6
    assert [significant(value) for value in (0, 0.003, 9.9996, 1186.187)] == ["0", "0.003", "10.00", "1,186"]


def test_rounded_times_and_percentages() -> None:
    """Three significant digits; seconds from 1 s up, also where rounding makes one of 999.5 ms."""
    assert [rounded_time(ns) for ns in (48_540_000, -9.36e6, 999.4e6, 999.6e6, -2.5e9)] == [
        "48.5 ms", "-9.36 ms", "999 ms", "1.00 s", "-2.50 s",
    ]  # fmt: skip
    assert [rounded_percent(share) for share in (0.1, 0.00909, 12.345)] == ["10.0 %", "0.909 %", "1,234 %"]
