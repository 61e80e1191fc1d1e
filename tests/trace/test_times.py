"""Conversion of time text to nanoseconds, which must be exact on every code path."""

from decimal import ROUND_HALF_EVEN, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringprof.trace.checks import LARGEST_NS
from ringprof.trace.kineto.times import NOT_A_TIME, text_to_ns, to_ns


def slow(text: str) -> int:
    return int((Decimal(text) * 1000).to_integral_value(ROUND_HALF_EVEN))


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0", 0),
        ("12", 12_000),
        ("0.001", 1),
        ("4347463084898.731", 4_347_463_084_898_731),
        ("7889237999999.999", 7_889_237_999_999_999),
        ("1790857026000000.123", 1_790_857_026_000_000_123),
        ("1.5", 1_500),
        ("1.23456", 1_235),
        ("0.0005", 0),
        ("0.0015", 2),
        ("1e3", 1_000_000),
        ("1.5E-3", 2),
        ("-2.25", -2_250),
        ('"41.5"', 41_500),
        ("", NOT_A_TIME),
        ("null", NOT_A_TIME),
        ('"N/A"', NOT_A_TIME),
        ("NaN", NOT_A_TIME),
        ("9" * 5000, NOT_A_TIME),
        ("1." + "0" * 58, 1_000),
        ("1." + "0" * 59, NOT_A_TIME),
        ("1e999999999", LARGEST_NS),
        ("-1e40", -LARGEST_NS),
        ("1e-999999999", 0),
    ],
)
def test_decimal_microseconds_to_nanoseconds(text, ns):
    assert text_to_ns(text.encode()) == ns
    assert to_ns([text.encode()]).tolist() == [ns]
    # Together with other texts, the conversion uses another code path with the same result.
    assert to_ns([b"1.000", text.encode(), b"2"]).tolist() == [1000, ns, 2000]


@given(st.lists(st.integers(0, 7_889_238_000_000_000), min_size=1))
def test_three_decimals_as_kineto_writes_them(times):
    texts = [f"{ns // 1000}.{ns % 1000:03d}" for ns in times]
    assert to_ns([text.encode() for text in texts]).tolist() == times


@given(st.lists(st.integers(0, 2 * 10**15), min_size=1))
def test_whole_microseconds_as_old_kineto_wrote_them(times):
    assert to_ns([str(us).encode() for us in times]).tolist() == [us * 1000 for us in times]


decimals = st.integers(0, 12).flatmap(lambda places: st.decimals(-(10**15), 10**15, places=places))


@given(st.lists(decimals | st.floats(-1e15, 1e15), min_size=1))
def test_any_decimal_is_converted_exactly(values):
    texts = [str(value) for value in values]
    assert to_ns([text.encode() for text in texts]).tolist() == [slow(text) for text in texts]


@given(st.lists(st.binary(max_size=30), max_size=5))
def test_any_bytes_give_a_number_or_missing(texts):
    assert len(to_ns(texts)) == len(texts)


def test_float64_times_would_lose_nanoseconds():
    """Check a time whose nearest float64, multiplied by 1000, is off by a nanosecond."""
    text = "1790857026000000.123"
    assert round(float(text) * 1000) != slow(text)
    assert text_to_ns(text.encode()) == slow(text)
