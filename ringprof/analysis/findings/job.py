"""What kind of job the traces are of, and the words for a step that is more than attention."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.kinds import COMPUTE, KIND

MOST_NAMED = 2
"""Kinds that a sentence names, largest first."""
LEAST_NAMED = 0.001
"""The least share of the wall that is named."""


def is_attention(attribution: Attribution) -> bool:
    """Whether the job is attention: a recorded strategy, or attention for at least half of what computes."""
    run = attribution.run
    if run is not None and run.strategy is not None and (run.workload is None or run.workload.layer is None):
        return True
    flash = sum(rank.breakdown.flash_ns for rank in attribution.ranks)
    return 0 < flash >= sum(rank.breakdown.compute_ns for rank in attribution.ranks) / 2


def exposed_in_words(attribution: Attribution) -> str:
    """The largest exposed communication by kind and process group, as shares of the mean wall; empty where none is."""
    exposed: dict[str, int] = defaultdict(int)
    for rank in attribution.ranks:
        for (kind, group), time in rank.exposed.by_group.items():
            exposed[KIND[kind].label + (f" of group {group}" if group else "")] += time
        exposed["blocked in waiting for a transfer"] += sum(rank.blocked_ns.values())
    wall = sum(rank.breakdown.wall_ns for rank in attribution.ranks)
    named = [
        f"{100 * time / wall:.1f} % {label}"
        for label, time in sorted(exposed.items(), key=lambda item: -item[1])[:MOST_NAMED]
        if wall and time >= LEAST_NAMED * wall
    ]
    return ", ".join(named)


def computation_in_words(attribution: Attribution, summary: Summary) -> str:
    """The kinds that compute longest, as shares of the mean wall; empty where nothing computes."""
    wall = fmean(rank.breakdown.wall_ns for rank in attribution.ranks)
    rows = [row for row in summary.kinds if row.kind in COMPUTE and row.time_ns][:MOST_NAMED]
    named = [f"{KIND[row.kind].label} {100 * row.time_ns / wall:.1f} %" for row in rows if wall]
    if not named:
        return ""
    return f"what computes longest is {', then '.join(named)} of the time"
