"""How sentences and tables write times, shares and rates."""

from __future__ import annotations


def milliseconds(time_ns: float) -> str:
    """A time in ms, for a sentence: fewer digits than a table's, whose last one is rounded so that parts sum."""
    return f"{time_ns / 1e6:,.{1 if time_ns >= 1e7 else 2 if time_ns >= 1e6 else 3}f} ms"


def percent(share: float, digits: int = 1) -> str:
    """A share of 0..1 in percent."""
    return f"{100 * share:.{digits}f} %"


def three_digits(value: float) -> str:
    """Without an exponent: 4.1e+03 GB/s is read twice."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
