"""Sentences of the verdict: what is missing, what computes and what is exposed, and where CPU ranks are blocked.

gloo records no transfer's own time, so of ranks on CPU processes a link's rate is not known. What is known: how long
each was blocked in each channel, which channels cross hosts, and how many bytes did.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.kinds.kinds import KIND
from ringprof.analysis.transfers.hops import OTHER_HOST
from ringprof.formatting import percent, three_digits
from ringprof.trace.columns import CUT_OFF

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


def missing_in_words(attribution: Attribution) -> str:
    """One line; empty where the traces hold what the figures are of."""
    if attribution.lacks_device:
        return (
            "Missing: all that ran on the GPU. The times are the CPU's, which launches it and waits for it "
            "(no_device_activities)."
        )
    codes = {warning.code for warning in attribution.warnings}
    known = {rank.rank for rank in attribution.ranks}
    cut = [warning for warning in attribution.warnings if warning.code in CUT_OFF]
    said = []
    if any(warning.rank is None or warning.rank in known for warning in cut):
        said.append("the end of what is cut off, so that all figures are of what comes before")
    said += [words for code, words in _SAID.items() if code in codes]
    return f"Missing: {'; '.join(said)} (see warnings)." if said else ""


_SAID = {
    "left_out": "traces that are left out",
    "mixed_runs": "a moment that all traces have in common",
    "window_empty": "anything launched in the marked iterations; the whole trace is shown",
}


class BlockedOnLinks(msgspec.Struct, frozen=True):
    """Means over ranks, of the marked iterations together."""

    between_hosts_ns: float
    within_host_ns: float
    channels: tuple[str, ...]
    """Those that cross hosts, longest blocked first."""
    leaving_bytes: float
    """What one host sends to others in one iteration, or in a captured block; mean over hosts."""


def blocked_on_links(attribution: Attribution) -> BlockedOnLinks | None:
    """None where one host holds all ranks, or neither run nor traces name channels and links."""
    run, ranks = attribution.run, attribution.ranks
    hosts = {rank.host for rank in ranks}
    if run is None or run.work is None or not attribution.on_cpu or len(hosts) < 2:
        return None
    sent = [entry for work in run.work for entry in work.sent or ()]
    # Every rank of a ring that crosses hosts is held up by the crossing, wherever its own neighbours are.
    crossing = {entry.channel for entry in sent if entry.link == OTHER_HOST}
    blocked: dict[str, int] = {}
    for rank in ranks:
        for channel, time_ns in rank.blocked_ns.items():
            blocked[channel] = blocked.get(channel, 0) + time_ns
    between = {channel: time_ns for channel, time_ns in blocked.items() if channel in crossing}
    if not between:
        return None
    return BlockedOnLinks(
        between_hosts_ns=sum(between.values()) / len(ranks),
        within_host_ns=(sum(blocked.values()) - sum(between.values())) / len(ranks),
        channels=tuple(sorted(between, key=lambda channel: -between[channel])),
        leaving_bytes=sum(entry.sent_bytes for entry in sent if entry.link == OTHER_HOST) / len(hosts),
    )


def blocked_in_words(attribution: Attribution) -> str:
    """The slow link of a run on CPU processes of several hosts; empty where that is not known."""
    links = blocked_on_links(attribution)
    if links is None:
        return ""
    walls = [rank.breakdown.wall_ns for rank in attribution.ranks]
    marked = fmean(len(rank.iteration_ns) or 1 for rank in attribution.ranks)
    each = "in the captured block" if attribution.run and attribution.run.captured else "an iteration"
    between, within = links.between_hosts_ns / fmean(walls), links.within_host_ns / fmean(walls)
    sent_mb, each_s = links.leaving_bytes / 1e6, fmean(walls) / marked / 1e9
    return (
        f"{percent(between)} of the time ranks are blocked in hops between hosts ({', '.join(links.channels)}),"
        f" {percent(within)} in hops within a host;"
        f" {three_digits(sent_mb)} MB leave each host {each},"
        f" {three_digits(sent_mb / each_s)} MB/s."
    )
