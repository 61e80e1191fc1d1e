"""Table of the times of a rank: names, meanings, labels and colours, in reports, frames and pages."""

from __future__ import annotations

from typing import NamedTuple

from ringprof.analysis.kinds.kinds import BLUE, GREY, ORANGE, PURPLE, SKY, YELLOW


class TimeRow(NamedTuple):
    """A time of a rank's breakdown: a field of `Breakdown`, which ends with ``_ns``."""

    name: str
    """Name of the field without ``_ns``: with ``_ns`` a column of frames, with ``_ms`` a metric of comparisons."""
    meaning: str
    """Meaning of the column."""
    label: str = ""
    """Label in reports, of the wall time and its parts."""
    colour: str = ""
    """Colour of a part; the parts sum to the wall time. Empty for other times."""
    optional: bool = False
    """Whether reports leave the time out of runs in which it cannot occur."""


TIMES = (
    TimeRow("wall", "from the start of the first activity to the end of the last", "wall"),
    TimeRow("compute", "time in which anything computes", "compute", BLUE),
    TimeRow("comm", "time in which any communication runs"),
    TimeRow("overlapped", "of comm_ns, with computation beside it; missing on CPU"),
    TimeRow("exposed_comm", "communication with no computation beside it", "exposed communication", ORANGE),
    TimeRow("exposed_other_groups", "exposed communication of process groups that were not asked for",
            "exposed, other groups", YELLOW, optional=True),
    TimeRow("exposed_memory", "copies and sets with neither computation nor communication beside them",
            "exposed memory", PURPLE),
    TimeRow("background", "only what is not of the chosen range runs", "background only", SKY, optional=True),
    TimeRow("idle", "nothing runs", "idle", GREY),
    TimeRow("blocked_on_peer", "of exposed_comm_ns: nothing runs because of a peer's copy", optional=True),
)  # fmt: skip

PARTS = (*(row.name for row in TIMES if row.colour), "wall")
"""Parts of a rank's time and, last, the wall time that they sum to.

``exposed_other_groups`` is present only where the user chose a process group, ``background`` only where more ran than
the window.
"""
USUAL_PARTS = tuple(row.name for row in TIMES if row.colour and not row.optional)
"""Parts that every breakdown has."""
IDLE_LABELS = {
    "idle_host": "idle: host",
    "idle_gap": "idle: gap",
    "idle_blocked": "idle: blocked",
    "blocked_on_peer": "blocked on a peer",
}
"""Causes of idle time, which sum to ``idle``, and last the part of ``exposed_comm`` blocked on a peer's copy."""
