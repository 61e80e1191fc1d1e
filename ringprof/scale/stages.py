"""What the pipeline does for one rank, or for a tile of ranks; each a function that another process can carry out.

A rank's wait and wire hang on the ranks that it exchanges messages with, and on theirs. So a tile of ranks is split
with those two rings of neighbours around it, and of what comes out only the tile's part is kept. In memory one tile
holds all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from ringprof.analysis.copy_waits import CopyHop, CopyPeers, blocked_on_peers, copy_hops
from ringprof.analysis.cross_checks import warn_of_other_counts
from ringprof.analysis.explain import explain, with_communication, with_splits
from ringprof.analysis.kinds.groups import group_names
from ringprof.analysis.kinds.kinds import POINT_TO_POINT
from ringprof.analysis.rank import Detail, Rank, in_memory_reader
from ringprof.analysis.steps.plan import RankSteps, StepSummary, own_plan, survey
from ringprof.analysis.steps.steps import ExposedBySteps, exposed_steps
from ringprof.analysis.timeline.kernels import RankKernel
from ringprof.analysis.timeline.window import Focus
from ringprof.analysis.transfers.clocks import Clocks, TrafficSummary, collect
from ringprof.analysis.transfers.from_run import fill_from_run
from ringprof.analysis.transfers.hops import HostOfRank, PeerBlock
from ringprof.analysis.transfers.match_by_end import StreamCalls, unrecorded_calls
from ringprof.analysis.transfers.matching import Matches, match
from ringprof.analysis.transfers.wait_and_wire import Best, LinkClass, Waiting, waited_for
from ringprof.errors import InputError
from ringprof.files import is_url
from ringprof.limits import Limits, MemoryBudget
from ringprof.run import Run, read_run
from ringprof.scale.collective_index import CollectiveExtract
from ringprof.scale.store import RankStore
from ringprof.scale.workers import Workers
from ringprof.trace.columns import Notice
from ringprof.trace.formats import REDUCED, format_at
from ringprof.trace.one_run import TraceFacts, facts_of
from ringprof.trace.ranks import try_file
from ringprof.trace.reduced import reduce_trace


class RunContext(msgspec.Struct, frozen=True):
    """What all ranks have in common; with a store on disk plain data, and little."""

    store: RankStore
    focus: Focus
    between_ns: Mapping[int, tuple[int, int] | None]
    """The chosen times by rank, as unix times of its clock; empty where none are chosen."""
    recorded: Run | str | None
    """What the recorder wrote, or the path of it."""
    hosts: HostOfRank

    def run(self) -> Run | None:
        return _run_at(self.recorded) if isinstance(self.recorded, str) else self.recorded

    def detail(self, rank: int) -> Detail:
        """The detail of a rank whose transfers are split; for `ringprof.analysis.rank.Rank.read_detail`."""
        found = self.store.detail(rank)
        if found is not None:
            return found
        return with_splits(self.detail_alone(rank), self.store.splits(rank), rank, self.store.blocks(rank))

    @property
    def copies_hops(self) -> bool:
        """Whether a run.json names hops by the copy engine."""
        run = self.run()
        return run is not None and run.strategy is not None and run.strategy.hops == "copy"

    def detail_alone(self, rank: int) -> Detail:
        """The same without its communication."""
        found = self.store.detail(rank)
        if found is not None:
            return found
        trace, host = self.store.trace(rank), self.hosts.get(rank)
        return explain(rank, host, trace, self.focus, self.between_ns.get(rank)).detail


@lru_cache(maxsize=1)
def _run_at(path: str) -> Run:
    return read_run(path)


def reduce_at(path: str, limits: Limits) -> tuple[TraceFacts, bytes | None] | InputError:
    """The facts of a trace, and its reduced form; None where a file of this machine is that already.

    Returns the error of a trace that cannot be read.
    """
    read = try_file(path, MemoryBudget(limits))
    if isinstance(read, InputError):
        return read
    (trace,) = read
    here = not is_url(path) and format_at(path) is REDUCED
    return facts_of(trace), None if here else reduce_trace(trace)


def scratch_file(folder: str, at: int) -> str:
    """Where the reduced form of the trace that was given as number ``at`` is kept."""
    return os.path.join(folder, f"reduced{at}")


# --- one rank -----------------------------------------------------------------------------------------


class RankAlone(msgspec.Struct, frozen=True):
    """What one trace says without the others."""

    rank: Rank
    warnings: tuple[Notice, ...]
    in_group: bool
    group_names: frozenset[str]
    """Where the chosen group is not there: those that are."""
    peers: frozenset[int]
    """Ranks that it exchanges messages with."""
    communicates: bool
    in_collectives: bool
    unrecorded: tuple[StreamCalls, ...]
    """Collectives of which no record tells the group."""
    kernels: Sequence[RankKernel] = ()
    """What ran on its device by name, until it is added up."""
    copies: tuple[CopyHop, ...] = ()
    """Its hops by the copy engine."""


def explain_alone(context: RunContext, rank: int) -> RankAlone:
    """Explain one rank by itself, and keep its transfers and detail."""
    trace = context.store.trace(rank)
    explained = explain(rank, context.hosts.get(rank), trace, context.focus, context.between_ns.get(rank))
    run = context.run() if context.focus.group is None else None
    unlike = warn_of_other_counts(run, rank, trace, explained.detail.window, explained.transfers)
    transfers = fill_from_run(explained.transfers, context.run(), rank)
    context.store.put_transfers(rank, transfers)
    context.store.keep_detail(rank, explained.detail)
    exchanges = {id(one.sends): one.sends for one in transfers} | {id(one.receives): one.receives for one in transfers}
    return RankAlone(
        rank=explained.rank,
        warnings=(*explained.warnings, *unlike),
        in_group=explained.in_group,
        group_names=frozenset() if explained.in_group else frozenset(group_names(trace)),
        peers=frozenset(message.peer for messages in exchanges.values() for message in messages) - {rank},
        communicates=bool(transfers),
        in_collectives=any(one.kind not in POINT_TO_POINT for one in transfers),
        unrecorded=tuple(unrecorded_calls(rank, transfers)),
        kernels=explained.kernels,
        copies=() if explained.rank.on_cpu else copy_hops(explained.detail, rank, context.run()),
    )


# --- a tile of ranks ------------------------------------------------------------------------------------


class Tile(msgspec.Struct, frozen=True):
    """Ranks that are looked at together, and what must be known of others."""

    ranks: tuple[int, ...]
    around: tuple[int, ...]
    """These and their neighbours and theirs."""
    absent: CollectiveExtract | None = None
    """What ranks outside did in collectives; None where no rank is outside."""
    copies: Mapping[int, CopyPeers] = {}
    """For the ranks that post hops by the copy engine: their hops and those of their peers."""


def _matched(store: RankStore, tile: Tile) -> Matches:
    def find() -> Matches:
        mine = set(tile.ranks)
        transfers = {
            rank: [one for one in store.transfers(rank) if rank in mine or one.kind == "send_recv"]
            for rank in tile.around
        }
        return match(transfers, tile.absent)

    return store.matched(find)


def traffic_of(store: RankStore, tile: Tile, host: Mapping[int, int]) -> dict[tuple[int, int], TrafficSummary]:
    """What the messages of the tile's hosts with others say of their clocks; the tile holds whole hosts."""
    hosts = {host[rank] for rank in tile.ranks}
    found = collect(_matched(store, tile), host)
    return {key: way.summed() for key, way in found.items() if hosts & set(key)}


class TileRates(msgspec.Struct, frozen=True):
    """What the matching of one tile says for the whole run."""

    best: dict[LinkClass, Best]
    unmatched: dict[str, int]
    clocks_disagree: bool


def rates_of_tile(context: RunContext, tile: Tile, clocks: Clocks) -> TileRates:
    """The best rates seen, and what does not match."""
    matches = _matched(context.store, tile)
    waiting = Waiting(matches, context.hosts, clocks)
    return TileRates(waiting.best_rates(), matches.unmatched(set(tile.ranks)), waiting.clocks_disagree())


class RankSurvey(msgspec.Struct, frozen=True):
    """One rank's steps as it tells them alone: in most runs all ranks tell the same."""

    survey: StepSummary
    plan: str | None
    """The plan's mark; None where it tells none."""
    exposed: ExposedBySteps


class SplitTile(msgspec.Struct, frozen=True):
    """The ranks of one tile with their communication."""

    ranks: list[Rank]
    surveyed: list[RankSurvey | None]
    """None on CPU, and where details stay in memory, to be surveyed when steps are asked for."""
    inconclusive: int
    """Kernels left unsplit because the clocks are not known well enough to tell their wait."""


def split_tile(
    context: RunContext, tile: Tile, ranks: list[Rank], clocks: Clocks, best: dict[LinkClass, Best] | None
) -> SplitTile:
    """Split the tile's transfers, keep them, and finish its ranks' figures; as `Waiting.split`."""
    store = context.store
    matches = _matched(store, tile)
    by_rank, inconclusive = Waiting(matches, context.hosts, clocks).split(best, set(tile.ranks))
    waits = waited_for(matches, clocks, by_rank)
    finished, surveyed = [], []
    for rank in ranks:
        splits, alone = by_rank[rank.rank], context.detail_alone(rank.rank)
        blocks = _blocks(context, tile, rank, alone, clocks, one_clock=best is not None)
        detail = with_splits(alone, splits, rank.rank, blocks)
        store.put_splits(rank.rank, splits)
        store.put_blocks(rank.rank, blocks)
        store.keep_detail(rank.rank, detail)
        finished.append(with_communication(rank, detail, waits[rank.rank]))
        stays = store.detail(rank.rank) is not None
        surveyed.append(None if rank.on_cpu or stays else _survey(replace(rank, read_detail=in_memory_reader(detail))))
    return SplitTile(finished, surveyed, inconclusive)


def _blocks(
    context: RunContext, tile: Tile, rank: Rank, detail: Detail, clocks: Clocks, *, one_clock: bool
) -> tuple[PeerBlock, ...]:
    """The idle time that peers of the rank caused; none on CPU, and where its hops go by kernels."""
    peers = tile.copies.get(rank.rank)
    if rank.on_cpu or peers is None:
        return ()
    # Without a common clock nothing of a peer's trace can be set against this one.
    peers = peers if one_clock else CopyPeers(peers.sent)
    return blocked_on_peers(detail, peers, clocks.offset_ns, rank.rank, recorded=context.copies_hops)


def _survey(rank: Rank) -> RankSurvey:
    side = RankSteps(rank)
    plan = own_plan(side)
    return RankSurvey(survey(side), plan.mark if plan else None, exposed_steps(side, plan) if plan else {})


# --- steps of ranks whose details are made anew -----------------------------------------------------------


class StoredRanks(msgspec.Struct, frozen=True):
    """The ranks of a run while its steps are found, as `ringprof.analysis.steps.plan.RanksOfSteps`."""

    context: RunContext
    ranks: Sequence[Rank]
    workers: Workers

    def map(self, function: Callable[..., Any], *arguments: Any, skip: Container[int] = ()) -> Iterator[Any]:
        # Another process is told how to find details, and finds them by itself.
        bare = (replace(rank, read_detail=None) for rank in self.ranks if rank.rank not in skip)
        return self.workers.map(_with_steps, ((self.context, rank, function, arguments) for rank in bare))

    def at(self, place: int) -> RankSteps:
        return RankSteps(self.ranks[place])


def _with_steps(context: RunContext, rank: Rank, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(RankSteps(replace(rank, read_detail=context.detail)), *arguments)
