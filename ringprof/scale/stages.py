"""Stages of the pipeline for one rank, or for a tile of ranks; each is a function that another process can run.

The wait and wire of a rank depend on the ranks that it exchanges messages with, and on their peers. So a tile of ranks
is split together with these two rings of neighbours, and only the tile's own results are kept. In memory, one tile
holds all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from ringprof.analysis.copy_waits import CopiedHop, CopyPeers, blocked_on_peers, copy_hops
from ringprof.analysis.cross_checks import warn_of_other_counts
from ringprof.analysis.explain import explain, with_communication, with_splits
from ringprof.analysis.kinds.groups import group_names
from ringprof.analysis.kinds.kinds import POINT_TO_POINT
from ringprof.analysis.rank import Detail, Rank, in_memory_reader
from ringprof.analysis.steps.plan import RankSteps, StepSummary, plan_of_rank, summarise_steps
from ringprof.analysis.steps.steps import ExposedBySteps, exposed_steps
from ringprof.analysis.timeline.kernels import RankKernel
from ringprof.analysis.timeline.window import Focus
from ringprof.analysis.transfers.clocks import Clocks, Traffic, collect_traffic
from ringprof.analysis.transfers.from_run import fill_from_run
from ringprof.analysis.transfers.hops import HostOfRank, PeerBlock
from ringprof.analysis.transfers.match_by_end import StreamCalls, unrecorded_calls
from ringprof.analysis.transfers.matching import AbsentRanks, Matches, match
from ringprof.analysis.transfers.wait_and_wire import LinkClass, Rate, WaitSplitter, waits_by_peer
from ringprof.common.files import is_url
from ringprof.common.limits import Limits, MemoryBudget
from ringprof.errors import InputError
from ringprof.run import Run, read_run
from ringprof.scale.store import RankStore
from ringprof.scale.workers import Workers
from ringprof.trace.columns import Notice
from ringprof.trace.formats import REDUCED, format_at
from ringprof.trace.one_run import TraceFacts, facts_of
from ringprof.trace.ranks import try_file
from ringprof.trace.reduced import reduce_trace


class RunContext(msgspec.Struct, frozen=True):
    """Inputs that all ranks share; with a store on disk, the context is small, plain data."""

    store: RankStore
    focus: Focus
    between_ns: Mapping[int, tuple[int, int]]
    """Rank -> the chosen times as Unix times of its clock; empty where none are chosen."""
    recorded: Run | str | None
    """The recorder's run.json, or its path."""
    hosts: HostOfRank

    def run(self) -> Run | None:
        """Return the run.json, or None without one."""
        return _cached_run(self.recorded) if isinstance(self.recorded, str) else self.recorded

    def detail(self, rank: int) -> Detail:
        """Return a rank's detail with its split transfers, for `ringprof.analysis.rank.Rank.read_detail`."""
        detail = self.store.detail(rank)
        if detail is not None:
            return detail
        return with_splits(self.unsplit_detail(rank), self.store.splits(rank), rank, self.store.blocks(rank))

    @property
    def uses_copy_engine(self) -> bool:
        """Whether run.json says that hops use the copy engine."""
        run = self.run()
        return run is not None and run.strategy is not None and run.strategy.hops == "copy"

    def unsplit_detail(self, rank: int) -> Detail:
        """Return a rank's detail without its split transfers."""
        detail = self.store.detail(rank)
        if detail is not None:
            return detail
        trace, host = self.store.trace(rank), self.hosts.get(rank)
        return explain(rank, host, trace, self.focus, self.between_ns.get(rank))[1]


_cached_run = lru_cache(maxsize=1)(read_run)


def reduce_at(path: str, limits: Limits) -> tuple[TraceFacts, bytes | None] | InputError:
    """Read a trace and return its facts and its reduced form (None for a local file that is reduced already).

    Returns the error instead where the trace cannot be read.
    """
    result = try_file(path, MemoryBudget(limits))
    if isinstance(result, InputError):
        return result
    (trace,) = result
    is_reduced = not is_url(path) and format_at(path) is REDUCED
    return facts_of(trace), None if is_reduced else reduce_trace(trace)


# --- one rank -----------------------------------------------------------------------------------------


class RankExplanation(msgspec.Struct, frozen=True):
    """Results from one trace without the others."""

    rank: Rank
    warnings: tuple[Notice, ...]
    in_group: bool
    group_names: frozenset[str]
    """Groups in the trace, where the chosen group is not among them."""
    peers: frozenset[int]
    """Ranks that this rank exchanges messages with."""
    communicates: bool
    in_collectives: bool
    unrecorded: tuple[StreamCalls, ...]
    """Collectives whose group no record names."""
    kernels: Sequence[RankKernel] = ()
    """Activities of the rank's device by name, until they are summed over ranks."""
    copies: tuple[CopiedHop, ...] = ()
    """Hops of the rank that use the copy engine."""


def explain_rank(context: RunContext, rank: int) -> RankExplanation:
    """Explain one rank by itself; store its transfers and detail."""
    trace = context.store.trace(rank)
    metrics, detail, transfers, warnings, in_group, kernels = explain(
        rank, context.hosts.get(rank), trace, context.focus, context.between_ns.get(rank)
    )
    run = context.run() if context.focus.group is None else None
    differences = warn_of_other_counts(run, rank, trace, detail.window, transfers)
    transfers = fill_from_run(transfers, context.run(), rank)
    context.store.put_transfers(rank, transfers)
    context.store.keep_detail(rank, detail)
    message_lists = {id(sent): sent for transfer in transfers for sent in (transfer.sends, transfer.receives)}
    return RankExplanation(
        rank=metrics, warnings=(*warnings, *differences), in_group=in_group,
        group_names=frozenset() if in_group else frozenset(group_names(trace)),
        peers=frozenset(message.peer for messages in message_lists.values() for message in messages) - {rank},
        communicates=bool(transfers),
        in_collectives=any(transfer.kind not in POINT_TO_POINT for transfer in transfers),
        unrecorded=tuple(unrecorded_calls(rank, transfers)), kernels=kernels,
        copies=() if metrics.on_cpu else copy_hops(detail, rank, context.run()),
    )  # fmt: skip


# --- a tile of ranks ------------------------------------------------------------------------------------


class Tile(msgspec.Struct, frozen=True):
    """Ranks that are analysed together, and the data of other ranks that they need."""

    ranks: tuple[int, ...]
    around: tuple[int, ...]
    """Ranks of the tile, their neighbours, and the neighbours' neighbours."""
    absent: AbsentRanks | None = None
    """Collectives of ranks outside the tile; None where no rank is outside."""
    copies: Mapping[int, CopyPeers] = {}
    """Rank -> its copy-engine hops and those of its peers, for ranks that post such hops."""


def _match_tile(store: RankStore, tile: Tile) -> Matches:
    """Match the transfers of a tile; of ranks around it, only send/recv messages take part."""

    def compute() -> Matches:
        ranks = set(tile.ranks)
        transfers = {
            rank: [transfer for transfer in store.transfers(rank) if rank in ranks or transfer.kind == "send_recv"]
            for rank in tile.around
        }
        return match(transfers, tile.absent)

    return store.matched(compute)


def traffic_of(store: RankStore, tile: Tile, host: Mapping[int, int]) -> Traffic:
    """Return the evidence about clocks from messages of the tile's hosts with others; a tile holds whole hosts."""
    hosts = {host[rank] for rank in tile.ranks}
    traffic = collect_traffic(_match_tile(store, tile), host)
    return {key: evidence for key, evidence in traffic.items() if hosts & set(key)}


def rates_of_tile(
    context: RunContext, tile: Tile, clocks: Clocks
) -> tuple[dict[LinkClass, Rate], dict[str, int], bool]:
    """Match a tile; return the best measured rates, the counts of unmatched transfers, and whether clocks disagree."""
    matches = _match_tile(context.store, tile)
    waiting = WaitSplitter(matches, context.hosts, clocks)
    return waiting.best_rates(), matches.unmatched(set(tile.ranks)), waiting.clocks_disagree()


RankStepResult = tuple[StepSummary, str | None, ExposedBySteps]
"""Steps of one rank, planned from its own trace, the digest of the plan (None without one), and what the steps expose;
in most runs all ranks have the same plan."""


def split_tile(
    context: RunContext, tile: Tile, ranks: list[Rank], clocks: Clocks, best: dict[LinkClass, Rate] | None
) -> tuple[list[tuple[Rank, RankStepResult | None]], int]:
    """Split a tile's transfers, store them, and complete its ranks' figures; ``best`` as in `WaitSplitter.split`.

    Return each rank with its steps, and the number of kernels left unsplit because of uncertain clocks. The steps are
    None on CPU, and where details stay in memory: those are summarised when steps are needed.
    """
    store = context.store
    matches = _match_tile(store, tile)
    by_rank, inconclusive = WaitSplitter(matches, context.hosts, clocks).split(best, set(tile.ranks))
    waits = waits_by_peer(matches, clocks, by_rank)
    finished: list[tuple[Rank, RankStepResult | None]] = []
    for rank in ranks:
        splits, unsplit = by_rank[rank.rank], context.unsplit_detail(rank.rank)
        blocks = _peer_blocks(context, tile, rank, unsplit, clocks, one_clock=best is not None)
        detail = with_splits(unsplit, splits, rank.rank, blocks)
        store.put_splits(rank.rank, splits)
        store.put_blocks(rank.rank, blocks)
        store.keep_detail(rank.rank, detail)
        is_in_memory = store.detail(rank.rank) is not None
        step_result = (
            None if rank.on_cpu or is_in_memory else _step_result(replace(rank, read_detail=in_memory_reader(detail)))
        )
        finished.append((with_communication(rank, detail, waits[rank.rank]), step_result))
    return finished, inconclusive


def _peer_blocks(
    context: RunContext, tile: Tile, rank: Rank, detail: Detail, clocks: Clocks, *, one_clock: bool
) -> tuple[PeerBlock, ...]:
    """Return the idle intervals that a rank's peers caused; empty on CPU, and for hops by kernels."""
    peers = tile.copies.get(rank.rank)
    if rank.on_cpu or peers is None:
        return ()
    # Without a common clock, the times of a peer's trace cannot be compared with this one.
    peers = peers if one_clock else CopyPeers(peers.sent)
    return blocked_on_peers(detail, peers, clocks.offset_ns, rank.rank, recorded=context.uses_copy_engine)


def _step_result(rank: Rank) -> RankStepResult:
    """Plan one rank's steps from its own trace."""
    rank_steps = RankSteps(rank)
    plan = plan_of_rank(rank_steps)
    return summarise_steps(rank_steps), plan.digest if plan else None, exposed_steps(rank_steps, plan) if plan else {}


# --- steps of ranks whose details are rebuilt -------------------------------------------------------------


class StoredRanks(msgspec.Struct, frozen=True):
    """Stored ranks of a run as a `ringprof.analysis.steps.plan.RankStepsSource`."""

    context: RunContext
    ranks: Sequence[Rank]
    workers: Workers

    def map(self, function: Callable[..., Any], *arguments: Any, skip: Container[int] = ()) -> Iterator[Any]:
        # Details do not travel to another process: it reads them from the store itself.
        without_reader = (replace(rank, read_detail=None) for rank in self.ranks if rank.rank not in skip)
        return self.workers.map(_apply_to_steps, ((self.context, rank, function, arguments) for rank in without_reader))

    def rank_at(self, index: int) -> RankSteps:
        return RankSteps(self.ranks[index])


def _apply_to_steps(context: RunContext, rank: Rank, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call ``function`` with a rank's `RankSteps`, which read details from the store."""
    return function(RankSteps(replace(rank, read_detail=context.detail)), *arguments)
