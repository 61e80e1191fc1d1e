"""What part of the traces is looked at, as the user chose it."""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

from ringprof.analysis.kinds.rules import Rule
from ringprof.errors import UsageError

_UNITS_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ns|us|µs|ms|s)\s*")


class Focus(msgspec.Struct, frozen=True):
    """Which activities count, and as what; every field left out leaves it to the traces."""

    window: str | None = None
    """Name of the ranges that are looked at, with ``*`` and ``?`` as wildcards; ``trace`` for all of the trace."""
    between_ns: tuple[int, int] | None = None
    """Times from the start of the earliest trace; activities are cut at both."""
    group: str | None = None
    """The process group whose communication is the ring's: its name, description or ranks (``0,1,2,3``)."""
    rules: tuple[Rule, ...] = ()
    """Rules of the user's own, asked before the built-in ones."""
    mixed_runs: bool = False
    """Whether traces are taken together though they have no moment in common."""


EVERYTHING = Focus()
"""What is looked at where nobody chose."""


def parse_between(text: str) -> tuple[int, int]:
    """Two times with units, such as ``10ms,20.5ms``, as nanoseconds. Raises `UsageError`."""
    times = [_TIME.fullmatch(part) for part in text.split(",")]
    if len(times) != 2 or times[0] is None or times[1] is None:
        raise UsageError(f"--between {text!r}: write two times with units (ns, us, ms, s), such as 10ms,20ms")
    first, last = (int(Fraction(time[1]) * _UNITS_NS[time[2]]) for time in times if time)
    if last <= first:
        raise UsageError(f"--between {text!r}: the second time must be after the first")
    return first, last
