"""Hosts of ranks: the host of each rank, the source of its name, and the clock that each rank reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ringprof.analysis.transfers.hops import EMULATED, HostOfRank
from ringprof.run import Run
from ringprof.trace.checks import RANKS_LIMIT
from ringprof.trace.one_run import TraceFacts


def hosts_of(facts: Mapping[int, TraceFacts], run: Run | None, ranks_per_host: int | None) -> HostOfRank:
    """Return each rank's host: grouped by ``ranks_per_host``, else named by the run, else named by the traces."""
    if ranks_per_host:
        size = min(max([*facts, *(rank_facts.largest_peer for rank_facts in facts.values())]) + 1, RANKS_LIMIT)
        return {rank: f"host{rank // ranks_per_host}" for rank in range(size)}
    if run and run.topology.hosts:
        return _hosts_of_run(run)
    return {rank: rank_facts.host for rank, rank_facts in facts.items()}


def _hosts_of_run(run: Run) -> HostOfRank:
    """Return the hosts as the strategy saw them: ``name/0``, ``name/1`` ... where one real host emulated several."""
    names, per_host = run.topology.hosts, run.topology.ranks_per_host
    if max(Counter(names).values()) <= per_host:
        return dict(zip(run.ranks(), names, strict=True))
    return {
        rank: f"{name}{EMULATED}{index // per_host}"
        for index, (rank, name) in enumerate(zip(run.ranks(), names, strict=True))
    }


def clock_of(ranks: Iterable[int], hosts: HostOfRank) -> dict[int, str]:
    """Return the host whose clock each rank reads.

    Hosts emulated on one real host share its clock. Where no host has a name, all ranks count as one host.
    """
    named = {rank: (hosts.get(rank) or "").partition(EMULATED)[0] for rank in ranks}
    if not any(named.values()):
        return named
    return {rank: name or f"unknown host of rank {rank}" for rank, name in named.items()}
