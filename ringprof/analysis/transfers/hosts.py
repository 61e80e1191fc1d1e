"""Which host each rank is on, who says so, and whose clock it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ringprof.analysis.transfers.hops import EMULATED, HostOfRank
from ringprof.run import Run
from ringprof.trace.checks import RANKS_LIMIT
from ringprof.trace.one_run import TraceFacts


def hosts_of(facts: Mapping[int, TraceFacts], run: Run | None, ranks_per_host: int | None) -> HostOfRank:
    """The host of each rank: as ``ranks_per_host`` groups them, else as the run names them, else the traces."""
    if ranks_per_host:
        size = min(max([*facts, *(one.largest_peer for one in facts.values())]) + 1, RANKS_LIMIT)
        return {rank: f"host{rank // ranks_per_host}" for rank in range(size)}
    if run and run.topology.hosts:
        return _hosts_of_run(run)
    return {rank: one.host for rank, one in facts.items()}


def _hosts_of_run(run: Run) -> HostOfRank:
    """The hosts as the strategy saw them: where ranks of one real host were told apart, ``name/0``, ``name/1`` ..."""
    names, per_host = run.topology.hosts, run.topology.ranks_per_host
    if max(Counter(names).values()) <= per_host:
        return dict(zip(run.ranks(), names, strict=True))
    return {
        rank: f"{name}{EMULATED}{place // per_host}"
        for place, (rank, name) in enumerate(zip(run.ranks(), names, strict=True))
    }


def clock_of(ranks: Iterable[int], hosts: HostOfRank) -> dict[int, str]:
    """The host whose clock each rank reads. Emulated hosts are one real host; no host named at all is taken as one."""
    named = {rank: (hosts.get(rank) or "").partition(EMULATED)[0] for rank in ranks}
    if not any(named.values()):
        return named
    return {rank: name or f"unknown host of rank {rank}" for rank, name in named.items()}
