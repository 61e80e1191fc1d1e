"""Pipeline from the traces of one run to its findings: a map over ranks and a small reduce.

The same steps run over ranks that are all in memory, as one tile, and over ranks of which memory holds only a few. In
the second case, each step leaves its results for the next in files, and tiles of ranks are processed one by one.
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

from ringprof.analysis.attribution import (
    Attribution,
    RunInfo,
    all_warnings,
    judge_matching,
    read_run_info,
    steps_warning,
)
from ringprof.analysis.copy_waits import count_unequal_hops, name_receivers, peers_of_ranks
from ringprof.analysis.findings.findings import Findings, findings_in_memory
from ringprof.analysis.kinds.groups import refuse_unknown_group
from ringprof.analysis.rank import Rank, in_memory_reader
from ringprof.analysis.steps.plan import StepSummary
from ringprof.analysis.steps.steps import ExposedByPlan, StepFinder, add_exposed
from ringprof.analysis.timeline.kernels import KernelTotals
from ringprof.analysis.timeline.window import EVERYTHING, Focus
from ringprof.analysis.transfers.clocks import (
    Clocks,
    Traffic,
    TrafficEvidence,
    fit_clocks,
    hosts_in_order,
    one_clock,
)
from ringprof.analysis.transfers.match_by_end import ENDS_SOURCE, find_communicators
from ringprof.analysis.transfers.matching import AbsentRanks
from ringprof.analysis.transfers.wait_and_wire import LinkClass, Rate, better_rates
from ringprof.common.files import is_url
from ringprof.common.limits import Limits
from ringprof.common.scratch import remove, scratch_folder
from ringprof.errors import InputError
from ringprof.run import Run
from ringprof.scale import stages
from ringprof.scale.collective_index import CollectiveIndex
from ringprof.scale.store import DiskStore, MemoryStore, RankStore
from ringprof.scale.workers import LocalProcesses, Notify, TraceSet, Workers, ignore_progress
from ringprof.trace.columns import Notice, Trace
from ringprof.trace.one_run import TraceFacts, checked_facts, facts_of

_TILE = 16
"""Smallest number of ranks that are analysed together; tiles hold whole hosts."""
NEIGHBOURHOOD = 2
"""Reach of a rank's wait and wire: its peers and their peers (`ringprof.analysis.transfers.wait_and_wire`)."""
MAX_PLANS = 4
"""Number of step plans whose sums are kept: in most runs all ranks have the same plan."""
MAX_DETAILS = 4
"""Number of details that stay in memory beside the files."""


def attribute(
    traces: Sequence[Trace], run: Run | None = None, ranks_per_host: int | None = None, focus: Focus = EVERYTHING
) -> Attribution:
    """Explain the traces of one run, one per rank, in memory; ``focus`` chooses the part of them to analyse.

    ``ranks_per_host`` names the hosts where neither ``run`` nor the traces do. Raises `InputError` where two traces
    are of the same rank or of runs of different size. Raises `TraceFormatError` for a trace with nothing to analyse,
    and `UsageError` for a chosen range or group that does not exist.
    """
    info = read_run_info([facts_of(trace) for trace in traces], run, ranks_per_host, focus)
    by_rank = {rank: msgspec.structs.replace(traces[index], rank=rank) for rank, index in info.trace_index.items()}
    return _build_pipeline(info, lambda: MemoryStore(by_rank), focus, run, LocalProcesses(1)).attribute()


def _build_pipeline(
    info: RunInfo, store: Callable[[], RankStore], focus: Focus, recorded: Run | str | None, workers: Workers,
    notify: Notify = ignore_progress,
) -> _Pipeline:  # fmt: skip
    """Build the pipeline; where the chosen times need the clocks of all hosts, attribute the whole run first."""
    clocks = None
    if info.needs_clocks:
        whole = stages.RunContext(store(), msgspec.structs.replace(focus, between_ns=None), {}, recorded, info.hosts)
        clocks = _Pipeline(whole, info, workers, notify).attribute().clocks
        info = msgspec.structs.replace(info, offset_ns=clocks.offset_ns)
    context = stages.RunContext(store(), focus, info.chosen_by_rank(), recorded, info.hosts)
    return _Pipeline(context, info, workers, notify, clocks)


def explain_traces(
    traces: Sequence[Trace], run: Run | None = None, ranks_per_host: int | None = None, focus: Focus = EVERYTHING
) -> Findings:
    """Return the findings of traces that are in memory. Raises the same errors as `attribute`."""
    return findings_in_memory(attribute(traces, run, ranks_per_host, focus))


def explain_stored(
    trace_set: TraceSet, ranks_per_host: int | None, focus: Focus, *, workers: Workers, readers: Workers | None,
    limits: Limits, notify: Notify | None,
) -> Findings:  # fmt: skip
    """Explain the traces of one run that may be larger than memory, by way of reduced traces in a scratch folder.

    ``readers`` read and reduce the traces, on other machines where they are a cluster's; None stands for ``workers``,
    which analyse the reduced traces on this machine. Raises the errors of `attribute` and of reading.
    """
    notify = notify or ignore_progress
    try:
        folder = scratch_folder("report")
        try:
            facts, reduced = _reduce_traces(trace_set, folder, readers or workers, limits, notify)
            return _explain_in(folder, facts, reduced, trace_set, ranks_per_host, focus, workers, notify)
        except BaseException:
            remove(folder)
            raise
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        message = f"a report of many ranks keeps about 2 MB per rank in the folder that TMPDIR names: {reason}"
        raise InputError(message) from None


def _explain_in(
    folder: Path, facts: Sequence[TraceFacts], reduced: Sequence[str], trace_set: TraceSet, ranks_per_host: int | None,
    focus: Focus, workers: Workers, notify: Notify,
) -> Findings:  # fmt: skip
    """Explain traces whose reduced forms are in ``folder``, which the result keeps alive."""
    info = read_run_info(facts, trace_set.run, ranks_per_host, focus)
    store = DiskStore(
        str(folder),
        {rank: reduced[index] for rank, index in info.trace_index.items()},
        {rank: facts[index].path for rank, index in info.trace_index.items()},
    )
    # The files are removed when nothing refers to the store any more.
    weakref.finalize(store, remove, folder)
    pipeline = _build_pipeline(info, lambda: store, focus, trace_set.run_path, workers, notify)
    attribution = pipeline.attribute()
    ranks = [rank for rank in attribution.ranks if not rank.on_cpu]
    summaries = [pipeline.step_summaries[rank.rank] for rank in ranks]
    finder = StepFinder(stages.StoredRanks(pipeline.context, ranks, workers), summaries, pipeline.exposed_by_plan)
    return Findings(msgspec.structs.replace(attribution, run=trace_set.run), finder)


def _reduce_traces(
    trace_set: TraceSet, folder: Path, readers: Workers, limits: Limits, notify: Notify
) -> tuple[list[TraceFacts], list[str]]:
    """Return the facts of every trace and the path of its reduced form; unreadable traces of a run are left out."""
    facts: list[TraceFacts] = []
    reduced: list[str] = []
    errors = list(trace_set.left_out)
    for index, result in enumerate(_reduction_results(trace_set.paths, readers, limits)):
        notify("traces read", index + 1, len(trace_set.paths))
        if isinstance(result, InputError):
            if trace_set.run is None and not trace_set.in_folder:
                raise result
            errors.append(result)
            continue
        trace_facts, data = result
        rank = trace_facts.rank if trace_set.ranks[index] is None else trace_set.ranks[index]
        facts.append(msgspec.structs.replace(trace_facts, rank=rank, path=trace_set.shown[index]))
        reduced.append(trace_set.paths[index] if data is None else str(folder / f"reduced{index}"))
        if data is not None:
            Path(reduced[-1]).write_bytes(data)
    if not facts:
        raise errors[0]
    checked = checked_facts(facts, errors)
    reported = [kept_index for kept_index, trace_facts in enumerate(checked) if not trace_facts.other_cycle]
    return [checked[kept_index] for kept_index in reported], [reduced[kept_index] for kept_index in reported]


def _reduction_results(paths: Sequence[str], readers: Workers, limits: Limits) -> Iterator[Any]:
    """Yield the result of `stages.reduce_at` for each path, without starting a local process for a missing file."""
    is_local = isinstance(readers, LocalProcesses)
    absent = {path for path in paths if is_local and not is_url(path) and not os.path.lexists(path)}
    results = readers.map(stages.reduce_at, ((path, limits) for path in paths if path not in absent))
    for path in paths:
        yield InputError(f"{path}: {os.strerror(errno.ENOENT)}") if path in absent else next(results)


class _Pipeline(msgspec.Struct, dict=True):
    """One attribution, in steps."""

    context: stages.RunContext
    info: RunInfo
    workers: Workers
    notify: Notify = ignore_progress
    clocks: Clocks | None = None
    """Clocks that are known already; None: fit them."""
    step_summaries: dict[int, StepSummary] = msgspec.field(default_factory=dict)
    """Step summaries of the ranks whose details do not stay in memory."""
    exposed_by_plan: ExposedByPlan = msgspec.field(default_factory=dict)
    kernels: KernelTotals = msgspec.field(default_factory=KernelTotals)

    def __post_init__(self) -> None:
        number_of_host = {name: index for index, name in enumerate(hosts_in_order(self.info.clock_of))}
        self.host = {rank: number_of_host[name] for rank, name in self.info.clock_of.items()}
        self.several_clocks = len(number_of_host) > 1
        self.in_memory = isinstance(self.context.store, MemoryStore)

    def attribute(self) -> Attribution:
        """Run all steps: explain ranks, group and match transfers, fit clocks, split, and collect warnings."""
        explained = self._explain_ranks()
        warnings_of_groups = self._group_by_end(explained)
        collective_index = CollectiveIndex(self.host)
        for rank, explained_rank in explained.items():
            if not self.in_memory and explained_rank.in_collectives:
                collective_index.add(rank, self.context.store.transfers(rank))
        tiles = self._tiles(explained)
        clocks = self.clocks or self._fit_clocks(tiles, collective_index)
        if not self.in_memory:
            absent = (collective_index.extract(tile.ranks, clocks) for tile in tiles)
            tiles = [msgspec.structs.replace(tile, absent=extract) for tile, extract in zip(tiles, absent, strict=True)]
        # For each rank with copy-engine hops: these hops and those of its peers.
        hops = {rank: explained_rank.copies for rank, explained_rank in explained.items() if explained_rank.copies}
        named_hops = name_receivers(hops, self.context.hosts, self.info.world_size)
        copies = peers_of_ranks(named_hops)
        tiles = [
            msgspec.structs.replace(tile, copies={rank: copies[rank] for rank in tile.ranks if rank in copies})
            for tile in tiles
        ]
        ranks = [explained_rank.rank for explained_rank in explained.values()]
        best, unmatched, disagree = self._match_tiles(tiles, clocks)
        if unequal_count := count_unequal_hops(copies):
            unmatched["counts_differ"] = unmatched.get("counts_differ", 0) + unequal_count
        usable, warnings = judge_matching(ranks, clocks, unmatched, 0, disagree=disagree)
        no_communication = not any(explained_rank.communicates for explained_rank in explained.values())
        finished, inconclusive = self._split_tiles(tiles, ranks, clocks, best if usable else None)
        if usable and inconclusive:
            usable, warnings = judge_matching(ranks, clocks, unmatched, inconclusive, disagree=disagree)
        warnings += warnings_of_groups
        nameless = sum(hop.receiver is None for rank_hops in named_hops.values() for hop in rank_hops)
        if nameless and len(named_hops) > 1 and not self.context.uses_copy_engine:
            message = (
                f"{nameless} copied hops do not tell which rank they write to: time blocked on a peer counts as idle"
            )
            warnings.append(Notice("copy_targets_unknown", message, count=nameless))
        rank_warnings = [*self.info.warnings]
        rank_warnings += (warning for explained_rank in explained.values() for warning in explained_rank.warnings)
        run = self.context.run()
        if run is not None and run.work and all(work.sent == [] for work in run.work):
            # Where a document ends at every border of ranks, nothing is sent, and so there is no wait to be marked.
            rank_warnings = [warning for warning in rank_warnings if warning.code != "cpu_no_wait_marks"]
        rank_warnings += steps_warning(ranks, self.context.run())
        return Attribution(
            ranks=finished,
            run=self.context.run(),
            best_gbps={key: size / span for key, (size, span) in best.items()}
            if usable and not no_communication
            else {},
            warnings=all_warnings(self.info, rank_warnings, [] if no_communication else warnings),
            clocks=clocks,
            world_size=self.info.world_size,
            kernels=self.kernels.sorted(),
        )

    def _explain_ranks(self) -> dict[int, stages.RankExplanation]:
        """Explain every rank by itself. Raises `UsageError` where the chosen group occurs on no rank."""
        explained: dict[int, stages.RankExplanation] = {}
        items = ((self.context, rank) for rank in self.info.trace_index)
        for explained_rank in self.workers.map(stages.explain_rank, items):
            self.kernels.add(explained_rank.rank.rank, explained_rank.kernels)
            explained[explained_rank.rank.rank] = msgspec.structs.replace(explained_rank, kernels=())
            self.notify("ranks explained", len(explained), len(self.info.trace_index))
        group = self.context.focus.group
        if group is not None and not any(explained_rank.in_group for explained_rank in explained.values()):
            refuse_unknown_group(group, {name for rank in explained.values() for name in rank.group_names})
        return explained

    def _group_by_end(self, explained: Mapping[int, stages.RankExplanation]) -> list[Notice]:
        """Assign groups to collectives without a record, inferred from their ends; return the notice about them."""
        calls = [stream_calls for rank in explained.values() for stream_calls in rank.unrecorded]
        if self.info.world_size > len(explained):
            # A missing rank may have been the last to begin.
            calls = []
        group_of, notices = find_communicators(calls, self.host)
        for rank, groups in group_of.items():
            transfers = self.context.store.transfers(rank)
            for index, group in groups.items():
                transfers[index] = msgspec.structs.replace(transfers[index], group=group, source=ENDS_SOURCE)
            self.context.store.put_transfers(rank, transfers)
        return notices

    def _tiles(self, explained: Mapping[int, stages.RankExplanation]) -> list[stages.Tile]:
        """Return one tile in memory, else tiles of enough ranks each: whole hosts, where several are known."""
        if self.in_memory:
            return [stages.Tile(tuple(explained), tuple(explained))]
        tiles: list[list[int]] = [[]]
        previous_host = None
        for rank in sorted(self.host, key=lambda rank: (self.host[rank], rank)):
            is_full = len(tiles[-1]) >= _TILE
            if is_full and (not self.several_clocks or self.host[rank] != previous_host):
                tiles.append([])
            tiles[-1].append(rank)
            previous_host = self.host[rank]
        return [stages.Tile(tuple(ranks), _with_neighbours(ranks, explained), AbsentRanks({})) for ranks in tiles]

    def _fit_clocks(self, tiles: Sequence[stages.Tile], collective_index: CollectiveIndex) -> Clocks:
        """Fit the clocks of the hosts to the traffic within tiles and to the collectives."""
        if not self.several_clocks:
            return one_clock(list(self.info.trace_index))
        traffic: Traffic = defaultdict(TrafficEvidence)
        items = ((self.context.store, tile, self.host) for tile in tiles)
        for tile_traffic in self.workers.map(stages.traffic_of, items):
            traffic |= tile_traffic
        collective_index.traffic(traffic)
        return fit_clocks(traffic, self.info.clock_of)

    def _match_tiles(
        self, tiles: Sequence[stages.Tile], clocks: Clocks
    ) -> tuple[dict[LinkClass, Rate], dict[str, int], bool]:
        """Match all tiles; return the best rates, the unmatched transfers by reason, and whether clocks disagree."""
        best: dict[LinkClass, Rate] = {}
        unmatched: Counter[str] = Counter()
        disagree = False
        results = self.workers.map(stages.rates_of_tile, ((self.context, tile, clocks) for tile in tiles))
        for completed, (tile_best, tile_unmatched, tile_disagrees) in enumerate(results, 1):
            best = better_rates(best, tile_best)
            unmatched.update(tile_unmatched)
            disagree |= tile_disagrees
            self.notify("groups of ranks matched", completed, len(tiles))
        return best, dict(unmatched), disagree

    def _split_tiles(
        self, tiles: Sequence[stages.Tile], ranks: Sequence[Rank], clocks: Clocks, best: dict[LinkClass, Rate] | None
    ) -> tuple[tuple[Rank, ...], int]:
        """Split the transfers of all tiles; return the finished ranks and the number of inconclusive kernels."""
        by_rank = {rank.rank: rank for rank in ranks}
        # In memory, the store holds the details and the traces; a rank shall hold only its own detail.
        read_detail = lru_cache(MAX_DETAILS)(self.context.detail)
        items = ((self.context, tile, [by_rank[rank] for rank in tile.ranks], clocks, best) for tile in tiles)
        finished: dict[int, Rank] = {}
        inconclusive = 0
        for split_ranks, tile_inconclusive in self.workers.map(stages.split_tile, items):
            inconclusive += tile_inconclusive
            for rank, step_result in split_ranks:
                detail = self.context.store.detail(rank.rank)
                reader = read_detail if detail is None else in_memory_reader(detail)
                finished[rank.rank] = replace(rank, read_detail=reader)
                if step_result is None:
                    continue
                self.step_summaries[rank.rank], plan, rank_exposed = step_result
                # Sums are kept for few plans only, so that memory does not grow with ranks.
                if plan in self.exposed_by_plan or (plan is not None and len(self.exposed_by_plan) < MAX_PLANS):
                    exposed, ranks_of_plan = self.exposed_by_plan.setdefault(plan, ({}, set()))
                    add_exposed(exposed, rank_exposed)
                    ranks_of_plan.add(rank.rank)
            self.notify("ranks split", len(finished), len(ranks))
        return tuple(finished[rank.rank] for rank in ranks), inconclusive


def _with_neighbours(ranks: Sequence[int], explained: Mapping[int, stages.RankExplanation]) -> tuple[int, ...]:
    """Return the ranks, their message peers, and the peers' peers."""
    ranks_around = set(ranks)
    for _ in range(NEIGHBOURHOOD):
        ranks_around |= {peer for rank in ranks_around for peer in explained[rank].peers if peer in explained}
    return tuple(sorted(ranks_around))
