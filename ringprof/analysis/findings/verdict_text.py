"""Sentences of the verdict about missing data, exposed communication and blocked CPU ranks.

gloo does not record the time of a transfer, so the rates of links between CPU ranks are not known. Known are the time
each rank is blocked in each channel, the channels that cross hosts, and the bytes that cross hosts.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.kinds.kinds import KIND
from ringprof.analysis.transfers.hops import OTHER_HOST
from ringprof.common.formatting import percent, three_digits
from ringprof.trace.columns import CUT_OFF

MAX_NAMED = 2
"""Largest number of kinds that a sentence names, largest first."""
MIN_SHARE = 0.001
"""Smallest share of the wall time that is named."""


def is_attention(attribution: Attribution) -> bool:
    """Return whether the job is attention: a recorded strategy, or attention for at least half of the computation."""
    run = attribution.run
    if attribution.recurrent:
        return False
    if run is not None and run.strategy is not None and (run.workload is None or run.workload.layer is None):
        return True
    flash = sum(rank.breakdown.flash_ns for rank in attribution.ranks)
    return 0 < flash >= sum(rank.breakdown.compute_ns for rank in attribution.ranks) / 2


def exposed_shares(attribution: Attribution) -> str:
    """List the largest exposed communication by kind and process group, as shares of the mean wall time.

    Empty where nothing reaches `MIN_SHARE`. Kinds and groups may overlap in time; the text says so where it shows.
    """
    exposed: dict[str, int] = defaultdict(int)
    for rank in attribution.ranks:
        for (kind, group), time in rank.exposed.by_group.items():
            exposed[KIND[kind].label + (f" of group {group}" if group else "")] += time
        exposed["blocked in waiting for a transfer"] += sum(rank.blocked_ns.values())
    wall = sum(rank.breakdown.wall_ns for rank in attribution.ranks)
    largest = sorted(exposed.items(), key=lambda item: -item[1])[:MAX_NAMED]
    named = [(label, time) for label, time in largest if wall and time >= MIN_SHARE * wall]
    texts = [f"{100 * time / wall:.1f} % {label}" for label, time in named]
    total = sum(rank.breakdown.exposed_comm_ns for rank in attribution.ranks)
    at_once = ", partly at the same time" if len(named) > 1 and sum(time for _, time in named) > total else ""
    return ", ".join(texts) + at_once if texts else ""


def missing_sentence(attribution: Attribution) -> str:
    """Say in one line which data the traces lack; empty where they are complete."""
    if attribution.lacks_device:
        return (
            "Missing: all that ran on the GPU. The times are the CPU's, which launches it and waits for it "
            "(no_device_activities)."
        )
    codes = {warning.code for warning in attribution.warnings}
    ranks = {rank.rank for rank in attribution.ranks}
    cut_off = [warning for warning in attribution.warnings if warning.code in CUT_OFF]
    missing = []
    if any(warning.rank is None or warning.rank in ranks for warning in cut_off):
        missing.append("the end of what is cut off, so that all figures are of what comes before")
    missing += [text for code, text in _MISSING.items() if code in codes]
    return f"Missing: {'; '.join(missing)} (see warnings)." if missing else ""


_MISSING = {
    "left_out": "traces that are left out",
    "mixed_runs": "a moment that all traces have in common",
    "window_empty": "anything launched in the marked iterations; the whole trace is shown",
}


class BlockedByLink(msgspec.Struct, frozen=True):
    """Blocked time of CPU ranks by class of link: means over ranks, over all marked iterations."""

    between_hosts_ns: float
    """Time blocked in channels that cross hosts."""
    within_host_ns: float
    """Time blocked in the other channels."""
    channels: tuple[str, ...]
    """Channels that cross hosts, longest blocked first."""
    leaving_bytes: float
    """Bytes that one host sends to others in one iteration, or in a captured block; mean over hosts."""


def blocked_by_link(attribution: Attribution) -> BlockedByLink | None:
    """Split the blocked time of CPU ranks by class of link.

    None where all ranks are on one host, or the run does not state its channels and links.
    """
    run, ranks = attribution.run, attribution.ranks
    hosts = {rank.host for rank in ranks}
    if run is None or run.work is None or not attribution.on_cpu or len(hosts) < 2:
        return None
    sends = [entry for work in run.work for entry in work.sent or ()]
    # Every rank of a ring that crosses hosts is delayed by the crossing, wherever its own neighbours are.
    crossing = {entry.channel for entry in sends if entry.link == OTHER_HOST}
    blocked_ns: dict[str, int] = {}
    for rank in ranks:
        for channel, time_ns in rank.blocked_ns.items():
            blocked_ns[channel] = blocked_ns.get(channel, 0) + time_ns
    between_hosts = {channel: time_ns for channel, time_ns in blocked_ns.items() if channel in crossing}
    if not between_hosts:
        return None
    return BlockedByLink(
        between_hosts_ns=sum(between_hosts.values()) / len(ranks),
        within_host_ns=(sum(blocked_ns.values()) - sum(between_hosts.values())) / len(ranks),
        channels=tuple(sorted(between_hosts, key=lambda channel: -between_hosts[channel])),
        leaving_bytes=sum(entry.sent_bytes for entry in sends if entry.link == OTHER_HOST) / len(hosts),
    )


def cpu_blocked_sentence(attribution: Attribution) -> str:
    """Say how long CPU ranks of several hosts are blocked between and within hosts; empty where it is not known."""
    links = blocked_by_link(attribution)
    if links is None:
        return ""
    walls = [rank.breakdown.wall_ns for rank in attribution.ranks]
    iterations = fmean(len(rank.iteration_ns) or 1 for rank in attribution.ranks)
    period = "in the captured block" if attribution.run and attribution.run.captured else "per iteration"
    between_share, within_share = links.between_hosts_ns / fmean(walls), links.within_host_ns / fmean(walls)
    sent_mb, period_s = links.leaving_bytes / 1e6, fmean(walls) / iterations / 1e9
    return (
        f"{percent(between_share)} of the time ranks are blocked in channels that cross hosts"
        f" ({', '.join(links.channels)}), {percent(within_share)} in channels within a host;"
        f" {three_digits(sent_mb)} MB leave each host {period},"
        f" {three_digits(sent_mb / period_s)} MB/s."
    )
