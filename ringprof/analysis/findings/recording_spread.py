"""Spread between recordings of one program, assumed where a side of a comparison is a single recording.

Recordings of one program differ by more than their iterations show: GPUs start hot or cool, hosts launch faster or
slower, other jobs share the machine. A single recording cannot show by how much. The assumed spread comes from programs
of this repository that were timed twice, all on H200. The spread has two parts: a share of the time, and a fixed time
by which hosts vary, so that short iterations differ by a larger share. Both are the upper ends of their 95 % intervals,
which `dev/benchmarks/recording_spread.py` derives. On a busy CPU the scatter of the iterations shows more
(`ringprof.analysis.findings.uncertainty`); a quiet CPU was not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from math import hypot

import msgspec

SESSION = timedelta(hours=1)
"""Longest time between two recordings of one session."""
MOST_RECORDINGS = 30
"""Largest number of recordings per side that is worth recommending."""


class Spread(msgspec.Struct, frozen=True):
    """Standard deviation between recordings of one program, as a function of the iteration time."""

    share: float
    """Part that grows with the time, as a share of it."""
    fixed_ms: float
    """Part that does not grow, in milliseconds."""
    source: str
    """Measurements that the spread comes from, in words."""

    def share_of(self, iteration_ms: float | None) -> float:
        """Return the spread of iterations of this length as a share of their time; None stands for a long one."""
        return hypot(self.share, self.fixed_ms / iteration_ms) if iteration_ms else self.share


SAME_SESSION = Spread(0.010, 0.24, "from 70 programs timed twice in one session on H200")
OTHER_SESSION = Spread(0.026, 0.44, "from 54 programs timed in two sessions on H200")


def session_spread(created: Sequence[str]) -> Spread:
    """Return the spread between recordings made at these times (ISO 8601); unreadable ones count as two sessions."""
    try:
        times = [datetime.fromisoformat(time.replace("Z", "+00:00")) for time in created]
        span = max(times) - min(times)
    except (TypeError, ValueError):
        return OTHER_SESSION
    return SAME_SESSION if span <= SESSION else OTHER_SESSION
