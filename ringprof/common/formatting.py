"""Formatting of times, shares and rates in sentences and tables."""

from __future__ import annotations

import math


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


def flops_in_words(tera: float, per: str = "") -> str:
    """Return FLOPs with a unit that fits: ``523 TFLOP/s``, ``41.2 GFLOP/s``."""
    unit, prefix = next(((unit, prefix) for unit, prefix in ((1e3, "P"), (1, "T")) if tera >= unit), (1e-3, "G"))
    return f"{three_digits(tera / unit)} {prefix}FLOP{per}"


_MOST_DECIMALS = 6
"""Decimals of the smallest numbers: a nanosecond in ms."""


def significant(value: float, digits: int = 4) -> str:
    """Format a number with so many significant digits, no exponent and all digits before the point.

    Numbers below 0.1 have no zeros at their end; a number that rounds to zero at six decimals is ``0``.
    """
    rounded = float(f"{value:.{digits - 1}e}") if math.isfinite(value) else value
    if not math.isfinite(rounded) or abs(rounded) < 0.5 / 10**_MOST_DECIMALS:
        return "0" if math.isfinite(rounded) else str(value)
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    text = f"{value:,.{min(max(decimals, 0), _MOST_DECIMALS)}f}"
    return text.rstrip("0") if abs(rounded) < 0.1 else text


def rounded_percent(share: float, digits: int = 3) -> str:
    """Format a share or a relative difference as a percentage with so many significant digits."""
    return f"{significant(100 * share, digits)} %"


def rounded_time(time_ns: float, digits: int = 3) -> str:
    """Format a time with so many significant digits: in ms, from 1 s up in seconds."""
    unit_ns, name = (1e9, "s") if abs(time_ns) >= 999_500_000 else (1e6, "ms")
    return f"{significant(time_ns / unit_ns, digits)} {name}"
