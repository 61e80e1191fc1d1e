"""Colours of everything that is drawn, except kinds, whose colours are in `ringprof.analysis.kinds.kinds`."""

from __future__ import annotations

from ringprof.analysis.findings.stretches import EXPOSED
from ringprof.analysis.findings.stretches import IDLE as IDLE_STRETCH
from ringprof.analysis.findings.time_table import TIMES
from ringprof.analysis.kinds.kinds import BLUE as BLUE
from ringprof.analysis.kinds.kinds import GREEN, KIND, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from ringprof.analysis.kinds.kinds import GREY as GREY
from ringprof.analysis.timeline import host_activity
from ringprof.analysis.timeline.idle import BLOCKED, GAP

Interval = tuple[float, float, float]
"""Lower end, middle and upper end of a bar or a band."""

WIRE, WAIT, UNSPLIT = ORANGE, "#C9283E", "#A6761D"
"""Colours of communication on the wire, of waiting for a peer, and of communication that cannot be split."""

IDLE = "#B4BCC5"
"""Colour of idle time on a timeline: lighter than that of any activity."""

BUSY = "#BFD7EA"
"""Colour of computation in an overview, behind `STRETCH_COLOURS`."""
PART_COLOURS = {row.name: row.colour for row in TIMES if row.colour}
"""Colour of each part of a rank's time."""

STRETCH_COLOURS = {what: PART_COLOURS[what] for what in (EXPOSED, IDLE_STRETCH)}
"""Colour of stretches without computation in an overview."""

WATERFALL_COLOURS: dict[str, str] = {
    "peak": GREEN,
    "vendor_peak": "#B4BCC5",
    "kernel_limit": "#8FB3D9",
    "slower_kernel": BLUE,
    "kernel": BLUE,
    "repeated": SKY,
    "slowdown": SKY,
    "attention": BLUE,
    "imbalance": VERMILION,
    "exposed_wire": ORANGE,
    "peer_wait": WAIT,
    "exposed_unsplit": UNSPLIT,
    "other_groups": "#C7B8A3",
    "recurrence": KIND["recurrence"].colour,
    "matrix_products": KIND["gemm"].colour,
    "optimizer": KIND["optimizer"].colour,
    "other_compute": KIND["elementwise"].colour,
    "merge_and_copies": PURPLE,
    "background": SKY,
    "launch_gaps": GREY,
    "blocked": "#4D4D4D",
}

IDLE_COLOURS: dict[str, str] = {
    host_activity.LAUNCH_CALL: BLUE,
    host_activity.MEMORY_CALL: PURPLE,
    host_activity.SYNCHRONISATION: ORANGE,
    host_activity.DATA_LOADER: GREEN,
    host_activity.COMPILATION: YELLOW,
    host_activity.USER_RANGE: SKY,
    host_activity.OPERATOR_CLASS: "#4B4FC4",
    host_activity.NOTHING_RECORDED: IDLE,
    host_activity.NOT_KEPT: "#C2B5D6",
    GAP: GREY,
    BLOCKED: UNSPLIT,
}
"""Colour of each class of idle time."""

LINES = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY, UNSPLIT, YELLOW)
"""Colours of entries that are drawn together, in order; each is visible on white and on black."""
