"""Exact conversion of decimal text in microseconds to int64 nanoseconds.

Kineto writes times as decimal text with three digits after the point. float64 cannot represent them all: near
4.4e12 µs, where a trace lies some fifty days into a quarter, its values are 1 ns apart, and Unix time in
microseconds is larger than that. The digits are therefore read as integers, and only the point is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation

import msgspec
import numpy as np

from ringprof.trace.checks import LARGEST_NS
from ringprof.trace.columns import Int64

NOT_A_TIME = int(np.iinfo(np.int64).min)
"""Value of a time that is absent or is not a number."""

Text = bytes | msgspec.Raw

_LONGEST_FAST = 19
_LONGEST_TEXT = 60
_EXACT = Context(prec=_LONGEST_TEXT + 10, rounding=ROUND_HALF_EVEN)


def to_ns(texts: Sequence[Text]) -> Int64:
    """Convert decimal texts in microseconds to nanoseconds; `NOT_A_TIME` where a text is empty or not a number.

    A text may be quoted, and have an exponent or any number of decimals. Fractions of a nanosecond are rounded half
    to even. Times beyond `LARGEST_NS` are clamped to it.
    """
    if not texts:
        return np.empty(0, np.int64)
    joined = b",".join(texts)
    if not joined.translate(None, b"0123456789.,"):
        fast = _uniform_to_ns(joined, len(texts))
        if fast is not None:
            return fast
    return np.fromiter((text_to_ns(bytes(text)) for text in texts), np.int64, len(texts))


def _uniform_to_ns(joined: bytes, count: int) -> Int64 | None:
    """Convert comma-separated texts that all have three decimals, or all none; None for any other format."""
    text = np.frombuffer(joined, np.uint8)
    ends = np.append(np.flatnonzero(text == ord(",")), len(text))
    lengths = np.diff(ends, prepend=-1) - 1
    points = np.flatnonzero(text == ord("."))
    if len(ends) != count or lengths.min() < 1 or lengths.max() > _LONGEST_FAST:
        return None
    if len(points) == 0 and lengths.max() <= _LONGEST_FAST - 4:
        return np.fromstring(joined.decode("ascii"), np.int64, sep=",") * 1000
    if len(points) == count and lengths.min() >= 5 and bool((points + 4 == ends).all()):
        return np.fromstring(joined.replace(b".", b"").decode("ascii"), np.int64, sep=",")
    return None


def text_to_ns(text: bytes) -> int:
    """Convert one decimal text in microseconds to nanoseconds; `NOT_A_TIME` if it is empty or not a number."""
    text = text.strip(b'" \t\r\n')
    whole, _, fraction = text.partition(b".")
    if whole.isdigit() and len(whole) < _LONGEST_FAST - 3 and len(fraction) <= 3:
        if not fraction or fraction.isdigit():
            return int(whole) * 1000 + int(fraction.ljust(3, b"0"))
    return _decimal_to_ns(text)


def _decimal_to_ns(text: bytes) -> int:
    if not text or len(text) > _LONGEST_TEXT or b"_" in text:
        return NOT_A_TIME
    try:
        value = Decimal(text.decode("ascii"))
    except (InvalidOperation, UnicodeDecodeError):
        return NOT_A_TIME
    # Check the size before expanding the number: 1e999999 is a short text.
    if not value.is_finite():
        return NOT_A_TIME
    if value.adjusted() > 18:
        return LARGEST_NS if value > 0 else -LARGEST_NS
    if value.adjusted() < -_LONGEST_TEXT:
        return 0
    ns = int(value.scaleb(3, _EXACT).to_integral_value(ROUND_HALF_EVEN, _EXACT))
    return max(-LARGEST_NS, min(ns, LARGEST_NS))
