"""Formatting of times, shares and rates in sentences and tables."""

from __future__ import annotations


def milliseconds(time_ns: float) -> str:
    """Format a time for a sentence: in ms, from 1 s up in seconds with as many digits as ms have below.

    Tables show more digits, so that rounded parts sum to their total.
    """
    if time_ns >= 999_950_000:  # 1,000.0 ms when rounded
        return f"{time_ns / 1e9:,.3f} s"
    return f"{time_ns / 1e6:,.{1 if time_ns >= 1e7 else 2 if time_ns >= 1e6 else 3}f} ms"


def percent(share: float, digits: int = 1) -> str:
    """Format a share in the range 0..1 as a percentage."""
    return f"{100 * share:.{digits}f} %"


def three_digits(value: float) -> str:
    """Format a number with three significant digits and no exponent (``4,100``, not ``4.1e+03``)."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
