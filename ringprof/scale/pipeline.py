"""The way from the traces of one run to its findings: a map over ranks and a small reduce.

The same steps run over ranks that are all in memory, as one tile, and over ranks of which memory holds a few at a time:
then what one step leaves for the next lies in files, and tiles of ranks are taken one after another.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from ringprof.analysis.attribution import Attribution, RunInfo, all_warnings, judge_matching, read_run_info
from ringprof.analysis.copy_waits import CopyPeers, count_unequal_hops, name_receivers, peers_of_ranks
from ringprof.analysis.findings.findings import Findings, findings_in_memory
from ringprof.analysis.iterations import steps_warning
from ringprof.analysis.kinds.groups import refuse_unknown_group
from ringprof.analysis.rank import Rank, in_memory_reader
from ringprof.analysis.steps.plan import StepSummary
from ringprof.analysis.steps.steps import ExposedByPlan, StepFinder, add_exposed
from ringprof.analysis.timeline.kernels import KernelTotals
from ringprof.analysis.timeline.window import EVERYTHING, Focus
from ringprof.analysis.transfers.clocks import (
    Clocks,
    Traffic,
    TrafficSamples,
    TrafficSummary,
    fit_ways,
    hosts_in_order,
    one_clock,
)
from ringprof.analysis.transfers.hops import HostOfRank
from ringprof.analysis.transfers.match_by_end import SOURCE, Communicators, find_communicators
from ringprof.analysis.transfers.wait_and_wire import Best, LinkClass, better
from ringprof.errors import InputError
from ringprof.files import is_url
from ringprof.limits import Limits
from ringprof.run import Run
from ringprof.scale import stages
from ringprof.scale.collective_index import CollectiveExtract, CollectiveIndex
from ringprof.scale.store import DiskStore, MemoryStore, RankStore
from ringprof.scale.trace_set import Notify, TraceSet, unheard
from ringprof.scale.workers import LocalProcesses, Workers
from ringprof.scratch import remove, scratch_folder
from ringprof.trace.columns import Trace
from ringprof.trace.one_run import TraceFacts, checked_facts, facts_of

_TILE = 16
"""Ranks that are looked at together, at least; whole hosts."""
NEIGHBOURHOOD = 2
"""How far a rank's wait and wire reach: its peers and their peers (`ringprof.analysis.transfers.wait_and_wire`)."""
MOST_PLANS = 4
"""Plans of ring steps whose sums are kept: in most runs all ranks have one."""
MOST_DETAILS = 4
"""Details of ranks that stay in memory beside those files."""


def attribute(
    traces: Sequence[Trace], run: Run | None = None, ranks_per_host: int | None = None, focus: Focus = EVERYTHING
) -> Attribution:
    """Explain the traces of one run, one a rank, in memory; ``focus`` chooses what part of them.

    ``ranks_per_host`` names the hosts where neither ``run`` nor the traces do. Raises `InputError` where two traces
    are of the same rank or of runs of different size, `TraceFormatError` where a trace holds nothing to analyse,
    `UsageError` where a chosen range or group is not there.
    """
    info = read_run_info([facts_of(trace) for trace in traces], run, ranks_per_host, focus)
    by_rank = {rank: msgspec.structs.replace(traces[at], rank=rank) for rank, at in info.trace_index.items()}
    return _pipeline(info, lambda: MemoryStore(by_rank), focus, run, LocalProcesses(1)).attribute()


def _pipeline(
    info: RunInfo, store: Callable[[], RankStore], focus: Focus, recorded: Run | str | None, workers: Workers,
    notify: Notify = unheard,
) -> _Pipeline:  # fmt: skip
    """That of the chosen part; where its times need the clocks of all hosts, the whole run is attributed before."""
    clocks = None
    if info.needs_clocks:
        whole = stages.RunContext(store(), msgspec.structs.replace(focus, between_ns=None), {}, recorded, info.hosts)
        clocks = _Pipeline(whole, info, workers, notify).attribute().clocks
        info = info.align(clocks)
    context = stages.RunContext(store(), focus, info.chosen_by_rank(), recorded, info.hosts)
    return _Pipeline(context, info, workers, notify, clocks)


def explain_traces(
    traces: Sequence[Trace], run: Run | None = None, ranks_per_host: int | None = None, focus: Focus = EVERYTHING
) -> Findings:
    """The findings of traces that are in memory; as `attribute`."""
    return findings_in_memory(attribute(traces, run, ranks_per_host, focus))


def explain_stored(
    given: TraceSet,
    ranks_per_host: int | None,
    focus: Focus,
    *,
    workers: Workers,
    readers: Workers | None,
    limits: Limits,
    notify: Notify | None,
) -> Findings:
    """The findings of traces that memory need not hold. Raises as `attribute` and reading do.

    ``workers`` carry out what needs this machine's files, ``readers`` (None: they, too) the reading of the traces.
    """
    notify = notify or unheard
    try:
        folder = scratch_folder("report")
        try:
            facts, reduced = _reduce(given, folder, readers or workers, limits, notify)
            return _explain_in(folder, facts, reduced, given, ranks_per_host, focus, workers, notify)
        except BaseException:
            remove(folder)
            raise
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise InputError(
            f"a report of many ranks keeps about 2 MB a rank in the folder that TMPDIR names: {why}"
        ) from None


def _explain_in(
    folder: Path, facts: Sequence[TraceFacts], reduced: Sequence[str], given: TraceSet, ranks_per_host: int | None,
    focus: Focus, workers: Workers, notify: Notify,
) -> Findings:  # fmt: skip
    info = read_run_info(facts, given.run, ranks_per_host, focus)
    store = DiskStore(
        str(folder),
        {rank: reduced[at] for rank, at in info.trace_index.items()},
        {rank: facts[at].path for rank, at in info.trace_index.items()},
    )
    # The files live as long as anything that reads them.
    weakref.finalize(store, remove, folder)
    pipeline = _pipeline(info, lambda: store, focus, given.run_path, workers, notify)
    attribution = pipeline.attribute()
    ranks = [rank for rank in attribution.ranks if not rank.on_cpu]
    surveys = [pipeline.surveyed[rank.rank] for rank in ranks]
    finder = StepFinder(stages.StoredRanks(pipeline.context, ranks, workers), surveys, pipeline.told)
    return Findings(msgspec.structs.replace(attribution, run=given.run), finder)


def _reduce(
    given: TraceSet, folder: Path, readers: Workers, limits: Limits, notify: Notify
) -> tuple[list[TraceFacts], list[str]]:
    """The facts of every trace, and where its reduced form is. A run's traces that cannot be read are left out."""
    facts: list[TraceFacts] = []
    reduced: list[str] = []
    problems = list(given.left_out)
    for at, result in enumerate(_reduced(given.paths, readers, limits)):
        notify("traces read", at + 1, len(given.paths))
        if isinstance(result, InputError):
            if given.run is None and not given.in_folder:
                raise result
            problems.append(result)
            continue
        one, data = result
        rank = one.rank if given.ranks[at] is None else given.ranks[at]
        facts.append(msgspec.structs.replace(one, rank=rank, path=given.shown[at]))
        reduced.append(given.paths[at] if data is None else stages.scratch_file(str(folder), at))
        if data is not None:
            Path(reduced[-1]).write_bytes(data)
    if not facts:
        raise problems[0]
    checked = checked_facts(facts, problems)
    reported = [place for place, one in enumerate(checked) if not one.other_cycle]
    return [checked[place] for place in reported], [reduced[place] for place in reported]


def _reduced(paths: Sequence[str], readers: Workers, limits: Limits) -> Iterator[Any]:
    """What `stages.reduce_at` makes of each. No process of this machine is asked for a file that is not there."""
    here = isinstance(readers, LocalProcesses)
    absent = {path for path in paths if here and not is_url(path) and not os.path.lexists(path)}
    results = readers.map(stages.reduce_at, ((path, limits) for path in paths if path not in absent))
    for path in paths:
        yield InputError(f"{path}: {os.strerror(errno.ENOENT)}") if path in absent else next(results)


class _Pipeline(msgspec.Struct, dict=True):
    """One attribution, step by step."""

    context: stages.RunContext
    info: RunInfo
    workers: Workers
    notify: Notify = unheard
    clocks: Clocks | None = None
    """Where they are known already."""
    surveyed: dict[int, StepSummary] = msgspec.field(default_factory=dict)
    """What ranks whose details do not stay in memory tell of the run's steps."""
    told: ExposedByPlan = msgspec.field(default_factory=dict)
    kernels: KernelTotals = msgspec.field(default_factory=KernelTotals)

    def __post_init__(self) -> None:
        number = {name: at for at, name in enumerate(hosts_in_order(self.info.clock_of))}
        self.host = {rank: number[name] for rank, name in self.info.clock_of.items()}
        self.several_clocks = len(number) > 1
        self.in_memory = isinstance(self.context.store, MemoryStore)

    def attribute(self) -> Attribution:
        alone = self._explain()
        told_by_ends = self._group_by_ends(alone)
        ledger = CollectiveIndex(self.host)
        if not self.in_memory:
            self._enter(ledger, alone)
        tiles = self._tiles(alone)
        clocks = self.clocks or self._fit_clocks(tiles, ledger)
        if not self.in_memory:
            tiles = [msgspec.structs.replace(tile, absent=ledger.extract(tile.ranks, clocks)) for tile in tiles]
        copies = _copy_peers(alone, self.context.hosts, self.info.world_size)
        tiles = [
            msgspec.structs.replace(tile, copies={rank: copies[rank] for rank in tile.ranks if rank in copies})
            for tile in tiles
        ]
        ranks = [one.rank for one in alone.values()]
        best, unmatched, disagree = self._rates(tiles, clocks)
        if unequal := count_unequal_hops(copies):
            unmatched["counts_differ"] = unmatched.get("counts_differ", 0) + unequal
        usable, warnings = judge_matching(ranks, clocks, unmatched, 0, disagree=disagree)
        silent = not any(one.communicates for one in alone.values())
        finished, inconclusive = self._split(tiles, ranks, clocks, best if usable else None)
        if usable and inconclusive:
            usable, warnings = judge_matching(ranks, clocks, unmatched, inconclusive, disagree=disagree)
        warnings += told_by_ends.warning()
        said = [*self.info.warnings, *(warning for one in alone.values() for warning in one.warnings)]
        said += steps_warning(ranks, self.context.run())
        return Attribution(
            ranks=finished,
            run=self.context.run(),
            best_gbps={key: size / span for key, (size, span) in best.items()} if usable and not silent else {},
            warnings=all_warnings(self.info, said, [] if silent else warnings),
            clocks=clocks,
            world_size=self.info.world_size,
            kernels=self.kernels.sorted(),
        )

    def _explain(self) -> dict[int, stages.RankAlone]:
        alone: dict[int, stages.RankAlone] = {}
        for one in self.workers.map(stages.explain_alone, ((self.context, rank) for rank in self.info.trace_index)):
            self.kernels.add(one.rank.rank, one.kernels)
            alone[one.rank.rank] = msgspec.structs.replace(one, kernels=())
            self.notify("ranks explained", len(alone), len(self.info.trace_index))
        group = self.context.focus.group
        if group is not None and not any(one.in_group for one in alone.values()):
            refuse_unknown_group(group, {name for one in alone.values() for name in one.group_names})
        return alone

    def _group_by_ends(self, alone: Mapping[int, stages.RankAlone]) -> Communicators:
        """Give collectives without a record the groups that their ends tell."""
        calls = [one for rank in alone.values() for one in rank.unrecorded]
        if self.info.world_size > len(alone):
            # Whoever is not here may have been the last to begin.
            calls = []
        found = find_communicators(calls, self.host)
        for rank, groups in found.group_of.items():
            transfers = self.context.store.transfers(rank)
            for place, group in groups.items():
                transfers[place] = msgspec.structs.replace(transfers[place], group=group, source=SOURCE)
            self.context.store.put_transfers(rank, transfers)
        return found

    def _enter(self, ledger: CollectiveIndex, alone: Mapping[int, stages.RankAlone]) -> None:
        for rank, one in alone.items():
            if one.in_collectives:
                ledger.add(rank, self.context.store.transfers(rank))

    def _tiles(self, alone: Mapping[int, stages.RankAlone]) -> list[stages.Tile]:
        """One of all ranks in memory, else whole hosts, where more than one is known, until there are enough ranks."""
        if self.in_memory:
            return [stages.Tile(tuple(alone), tuple(alone))]
        tiles: list[list[int]] = [[]]
        before = None
        for rank in sorted(self.host, key=lambda rank: (self.host[rank], rank)):
            full = len(tiles[-1]) >= _TILE
            if full and (not self.several_clocks or self.host[rank] != before):
                tiles.append([])
            tiles[-1].append(rank)
            before = self.host[rank]
        return [stages.Tile(tuple(ranks), _around(ranks, alone), CollectiveExtract({})) for ranks in tiles]

    def _fit_clocks(self, tiles: Sequence[stages.Tile], ledger: CollectiveIndex) -> Clocks:
        if not self.several_clocks:
            return one_clock(list(self.info.trace_index))
        ways: dict[tuple[int, int], TrafficSummary] = {}
        for found in self.workers.map(stages.traffic_of, ((self.context.store, tile, self.host) for tile in tiles)):
            ways |= found
        met: Traffic = defaultdict(TrafficSamples)
        ledger.traffic(met)
        for key, way in met.items():
            ways[key] = _both(ways.get(key, TrafficSummary()), way.summed())
        return fit_ways(ways, self.info.clock_of)

    def _rates(
        self, tiles: Sequence[stages.Tile], clocks: Clocks
    ) -> tuple[dict[LinkClass, Best], dict[str, int], bool]:
        best: dict[LinkClass, Best] = {}
        unmatched: Counter[str] = Counter()
        disagree = False
        results = self.workers.map(stages.rates_of_tile, ((self.context, tile, clocks) for tile in tiles))
        for done, found in enumerate(results, 1):
            best = better(best, found.best)
            unmatched.update(found.unmatched)
            disagree |= found.clocks_disagree
            self.notify("groups of ranks matched", done, len(tiles))
        return best, dict(unmatched), disagree

    def _split(
        self,
        tiles: Sequence[stages.Tile],
        ranks: Sequence[Rank],
        clocks: Clocks,
        best: dict[LinkClass, Best] | None,
    ) -> tuple[tuple[Rank, ...], int]:
        by_rank = {rank.rank: rank for rank in ranks}
        # In memory the store has the details, and holds the traces; a rank shall hold its own detail only.
        read_detail = lru_cache(MOST_DETAILS)(self.context.detail)
        items = ((self.context, tile, [by_rank[rank] for rank in tile.ranks], clocks, best) for tile in tiles)
        finished: dict[int, Rank] = {}
        inconclusive = 0
        for found in self.workers.map(stages.split_tile, items):
            inconclusive += found.inconclusive
            for rank, one in zip(found.ranks, found.surveyed, strict=True):
                detail = self.context.store.detail(rank.rank)
                finished[rank.rank] = replace(
                    rank, read_detail=read_detail if detail is None else in_memory_reader(detail)
                )
                if one is not None:
                    self._take(rank.rank, one)
            self.notify("ranks split", len(finished), len(ranks))
        return tuple(finished[rank.rank] for rank in ranks), inconclusive

    def _take(self, rank: int, one: stages.RankSurvey) -> None:
        """Add what a rank tells of its steps alone; of a few plans only, so that ranks do not add to memory."""
        self.surveyed[rank] = one.survey
        if one.plan is None or (one.plan not in self.told and len(self.told) >= MOST_PLANS):
            return
        exposed, ranks = self.told.setdefault(one.plan, ({}, set()))
        add_exposed(exposed, one.exposed)
        ranks.add(rank)


def _copy_peers(alone: Mapping[int, stages.RankAlone], hosts: HostOfRank, world_size: int) -> dict[int, CopyPeers]:
    """For each rank that posts hops by the copy engine, its hops and those of its peers."""
    hops = {rank: one.copies for rank, one in alone.items() if one.copies}
    return peers_of_ranks(name_receivers(hops, hosts, world_size))


def _around(ranks: Sequence[int], alone: Mapping[int, stages.RankAlone]) -> tuple[int, ...]:
    """The ranks, those that they exchange messages with, and those that these do."""
    found = set(ranks)
    for _ in range(NEIGHBOURHOOD):
        found |= {peer for rank in found for peer in alone[rank].peers if peer in alone}
    return tuple(sorted(found))


def _both(messages: TrafficSummary, meetings: TrafficSummary) -> TrafficSummary:
    """What messages and what collectives say of the same two hosts."""
    limits = [limit for limit in (messages.limit, meetings.limit) if limit is not None]
    return msgspec.structs.replace(
        messages,
        together=meetings.together,
        limit=max(limits, default=None),
        count=messages.count + meetings.count,
    )
