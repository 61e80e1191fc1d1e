"""What is done for one rank, or for a few that stand side by side; each a function that another process can carry out.

A rank's wait and wire hang on the ranks that it exchanges messages with, and on theirs. So a tile of ranks is split
with those two rings of neighbours around it by the very functions that split a whole run, and of what comes out only
the tile's part is kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ringprof.analysis.explain import explain, with_communication, with_splits
from ringprof.analysis.kinds.groups import group_names
from ringprof.analysis.rank import Detail, Rank, kept
from ringprof.analysis.steps.plan import Plan, Side, Survey, own_plan, survey
from ringprof.analysis.steps.steps import ExposedBySteps, Step, exposed_by_step, steps_of
from ringprof.analysis.timeline.focus import Focus
from ringprof.analysis.transfers import waiting
from ringprof.analysis.transfers.clocks import Clocks, Way, collect
from ringprof.analysis.transfers.from_run import fill
from ringprof.analysis.transfers.hops import Hosts
from ringprof.analysis.transfers.matching import Matches, match
from ringprof.analysis.transfers.waiting import Best, LinkClass
from ringprof.errors import InputError
from ringprof.files import is_url
from ringprof.run import Run, read_run
from ringprof.scale.gatherings import KnownGatherings
from ringprof.scale.store import Store
from ringprof.trace.columns import Caveat
from ringprof.trace.heads import Head, head_of
from ringprof.trace.ranks import starts_with, try_one
from ringprof.trace.reduced import MAGIC, reduce_trace


@dataclass(frozen=True)
class Scene:
    """What all ranks have in common; plain data, and little."""

    store: Store
    focus: Focus
    between_ns: Mapping[int, tuple[int, int] | None]
    """The chosen times by rank, as unix times of its clock; empty where none are chosen."""
    run_path: str | None

    def run(self) -> Run | None:
        return None if self.run_path is None else _run_at(self.run_path)


@lru_cache(maxsize=1)
def _run_at(path: str) -> Run:
    return read_run(path)


def reduce_at(path: str, limit_bytes: int | None) -> tuple[Head, bytes | None] | InputError:
    """The head of a trace, and its reduced form; None where a file of this machine is that already.

    Returns the error of a trace that cannot be read.
    """
    trace = try_one(path, limit_bytes)
    if isinstance(trace, InputError):
        return trace
    here = not is_url(path) and starts_with(path, MAGIC)
    return head_of(trace), None if here else reduce_trace(trace)


# --- one rank -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """What one trace says without the others."""

    rank: Rank
    warnings: tuple[Caveat, ...]
    in_group: bool
    group_names: frozenset[str]
    """Where the chosen group is not there: those that are."""
    peers: frozenset[int]
    """Ranks that it exchanges messages with."""
    communicates: bool
    gathers: bool
    """Whether it takes part in collectives."""


def explain_alone(scene: Scene, rank: int, host: str | None) -> Alone:
    """Explain one rank by itself and keep its transfers."""
    trace = scene.store.trace(rank)
    explained = explain(rank, host, trace, scene.focus, scene.between_ns.get(rank))
    transfers = fill(explained.transfers, scene.run(), rank)
    scene.store.put_transfers(rank, transfers)
    peers = {message.peer for one in transfers for message in (*one.sends, *one.receives)}
    return Alone(
        rank=explained.rank,
        warnings=explained.warnings,
        in_group=explained.in_group,
        group_names=frozenset() if explained.in_group else frozenset(group_names(trace)),
        peers=frozenset(peers - {rank}),
        communicates=bool(transfers),
        gathers=any(one.kind not in ("send_recv", "copy_engine") for one in transfers),
    )


@dataclass(frozen=True)
class Details:
    """Finds the detail of a rank again; for `ringprof.analysis.rank.Rank.read_detail`."""

    scene: Scene
    hosts: Hosts

    def __call__(self, rank: int) -> Detail:
        store = self.scene.store
        scene, host = self.scene, self.hosts.get(rank)
        explained = explain(rank, host, store.trace(rank), scene.focus, scene.between_ns.get(rank))
        return with_splits(explained.detail, store.splits(rank), rank)


def count_runs(details: Details, rank: Rank, ring_size: int) -> int:
    """How many runs of attention between hops a rank has."""
    return len(Side(replace(rank, read_detail=details)).runs(ring_size).phase)


def exposed_steps(details: Details, rank: Rank, plan: Plan) -> ExposedBySteps:
    """What each step of one rank exposes."""
    return exposed_by_step(steps_at(details, rank, plan))


def steps_at(details: Details, rank: Rank, plan: Plan) -> list[Step]:
    """The steps of one rank."""
    return steps_of(Side(replace(rank, read_detail=details)), plan)


# --- a tile of ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """Ranks that are looked at together, and what must be known of others."""

    ranks: tuple[int, ...]
    around: tuple[int, ...]
    """These and their neighbours and theirs."""
    gathered: KnownGatherings = field(default_factory=lambda: KnownGatherings({}))


def _matched(store: Store, tile: Tile) -> Matches:
    mine = set(tile.ranks)
    transfers = {
        rank: [one for one in store.transfers(rank) if rank in mine or one.kind == "send_recv"] for rank in tile.around
    }
    return match(transfers, tile.gathered)


def traffic_of(store: Store, tile: Tile, host: Mapping[int, int]) -> dict[tuple[int, int], Way]:
    """What the messages of the tile's hosts with others say of their clocks; the tile holds whole hosts."""
    hosts = {host[rank] for rank in tile.ranks}
    found = collect(_matched(store, replace(tile, gathered=KnownGatherings({}))), host)
    return {key: way.summed() for key, way in found.items() if hosts & set(key)}


@dataclass(frozen=True)
class Judged:
    """What the matching of one tile says for the whole run."""

    best: dict[LinkClass, Best]
    unmatched: dict[str, int]
    disagree: bool


def judge_tile(store: Store, tile: Tile, hosts: Hosts, clocks: Clocks) -> Judged:
    """The best rates seen, and what does not match."""
    matches = _matched(store, tile)
    return Judged(
        best=waiting.best_rates(matches, hosts, clocks),
        unmatched=matches.unmatched(set(tile.ranks)),
        disagree=waiting.clocks_disagree(matches, clocks),
    )


@dataclass(frozen=True)
class Surveyed:
    """One rank's steps as it tells them alone: in most runs all ranks tell the same."""

    survey: Survey
    plan: str | None
    """The plan's mark; None where it tells none."""
    exposed: ExposedBySteps


@dataclass(frozen=True)
class Together:
    """The ranks of one tile with their communication."""

    ranks: list[Rank]
    surveyed: list[Surveyed | None]
    """None on CPU."""
    inconclusive: int


def split_tile(
    details: Details, tile: Tile, ranks: list[Rank], clocks: Clocks, best: dict[LinkClass, Best], usable: bool
) -> Together:
    """Split the tile's transfers, keep them, and finish its ranks' figures."""
    store = details.scene.store
    waits = waiting.split(_matched(store, tile), details.hosts, clocks, best, set(tile.ranks))
    by_rank = waits.by_rank if usable else waiting.without_times(waits.by_rank)
    finished, surveys = [], []
    for rank in ranks:
        store.put_splits(rank.rank, by_rank[rank.rank])
        detail = details(rank.rank)
        finished.append(with_communication(rank, detail))
        surveys.append(None if rank.on_cpu else _surveyed(Side(replace(rank, read_detail=kept(detail)))))
    return Together(finished, surveys, waits.inconclusive)


def _surveyed(side: Side) -> Surveyed:
    plan = own_plan(side)
    exposed = exposed_by_step(steps_of(side, plan)) if plan else {}
    return Surveyed(survey(side), plan.mark if plan else None, exposed)


def scratch_file(folder: str, at: int) -> str:
    """Where the reduced form of the trace that was given as number ``at`` is kept."""
    return os.path.join(folder, f"reduced{at}")
