"""Where ranks on CPU processes are blocked: in hops that cross hosts, or in those within one.

gloo records no transfer's own time, so a link's rate is not known. What is known: how long each rank was blocked in
each channel, which channels cross hosts, and how many bytes did.
"""

from __future__ import annotations

from statistics import fmean

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.transfers.hops import OTHER_HOST


class BlockedOnLinks(msgspec.Struct, frozen=True):
    """Means over ranks, of the marked iterations together."""

    between_hosts_ns: float
    within_host_ns: float
    channels: tuple[str, ...]
    """Those that cross hosts, longest blocked first."""
    leaving_bytes: float
    """What one host sends to others in one iteration; mean over hosts."""


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
    iterations = fmean(len(rank.iteration_ns) or 1 for rank in attribution.ranks)
    between, within = links.between_hosts_ns / fmean(walls), links.within_host_ns / fmean(walls)
    sent_mb, each_s = links.leaving_bytes / 1e6, fmean(walls) / iterations / 1e9
    return (
        f"{between:.1%} of the time ranks are blocked in hops between hosts ({', '.join(links.channels)}), {within:.1%}"
        f" in hops within a host; {sent_mb:.3g} MB leave each host an iteration, {sent_mb / each_s:.3g} MB/s."
    ).replace("%", " %")
