"""Formatting of figures in sentences."""

import random
from decimal import Decimal

import pytest

from ringprof.common.formatting import milliseconds, percent, significant, three_digits


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
