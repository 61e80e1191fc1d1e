"""The attribution of a run whose traces memory need not hold: one rank, or one tile of ranks, at a time.

What it says is what `ringprof.analysis.attribution.attribute` says of the same traces.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from ringprof.analysis.attribution import Attribution, Opening, all_warnings, judge, open_run
from ringprof.analysis.findings.verdict import Findings
from ringprof.analysis.kinds.groups import refuse_unknown_group
from ringprof.analysis.rank import Rank
from ringprof.analysis.steps.plan import Plan, Side, Survey, plan_steps
from ringprof.analysis.steps.steps import ExposedBySteps, Step, add_exposed
from ringprof.analysis.timeline.focus import Focus
from ringprof.analysis.transfers.clocks import Clocks, OneWay, Traffic, Way, fit_ways, host_names, one_clock
from ringprof.analysis.transfers.waiting import Best, LinkClass, better
from ringprof.errors import InputError
from ringprof.run import Run
from ringprof.scale import stages
from ringprof.scale.gatherings import Gatherings
from ringprof.scale.given import Given, Notify
from ringprof.scale.store import Store
from ringprof.scale.work import Processes, Work
from ringprof.scratch import remove, scratch_folder
from ringprof.trace.heads import Head, checked_heads

TILE = 16
"""Ranks that are looked at together, at least; whole hosts."""
MOST_PLANS = 4
"""Plans of ring steps whose sums are kept: in most runs all ranks have one."""
MOST_DETAILS = 4
"""Details of ranks that stay in memory."""


ExposedByPlan = dict[str, tuple[ExposedBySteps, set[int]]]
"""The mark of a plan -> what the steps of the ranks that tell this plan expose, and which ranks these are."""


@dataclass(frozen=True)
class StoredFindings(Findings):
    """Findings of a run whose ranks' details are made anew when they are asked for."""

    details: stages.Details
    surveys: tuple[Survey, ...]
    """Of the ranks on GPUs, by rank."""
    told: ExposedByPlan
    work: Work

    @property
    def lists_steps(self) -> bool:
        return False

    @cached_property
    def plan(self) -> Plan | None:
        ranks = self._ranks

        def count_runs(ring_size: int) -> list[int]:
            return list(self.work.map(stages.count_runs, ((self.details, _bare(rank), ring_size) for rank in ranks)))

        return plan_steps(self.surveys, count_runs, lambda at: Side(ranks[at]))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps, which take as much memory as there are."""
        plan = self.plan
        items = ((self.details, _bare(rank), plan) for rank in self._ranks if plan)
        return tuple(step for steps in self.work.map(stages.steps_at, items) for step in steps)

    @cached_property
    def exposed_by_step(self) -> ExposedBySteps:
        found: ExposedBySteps = {}
        for mine in self._exposed():
            add_exposed(found, mine)
        return found

    def _exposed(self) -> Iterator[ExposedBySteps]:
        """What steps expose: as ranks told them alone, where that is how the run has them."""
        plan = self.plan
        if plan is None:
            return
        known, ranks = self.told.get(plan.mark, ({}, set()))
        yield known
        others = ((self.details, _bare(rank), plan) for rank in self._ranks if rank.rank not in ranks)
        yield from self.work.map(stages.exposed_steps, others)

    @property
    def _ranks(self) -> list[Rank]:
        return [rank for rank in self.attribution.ranks if not rank.on_cpu]


@dataclass(frozen=True)
class Stored:
    """The attribution, and what further findings are made of."""

    attribution: Attribution
    details: stages.Details
    surveys: tuple[Survey, ...]
    told: ExposedByPlan


def attribute_stored(
    given: Given,
    ranks_per_host: int | None,
    focus: Focus,
    *,
    work: Work | None = None,
    reading: Work | None = None,
    limit_bytes: int | None = None,
    notify: Notify = lambda what, done, of: None,
) -> Stored:
    """Explain the traces of one run. Raises as `ringprof.analysis.attribution.attribute` and reading do.

    ``work`` carries out what needs this machine's files, ``reading`` the reading of the traces.
    """
    work = work or Processes()
    try:
        folder = scratch_folder("report")
        try:
            return _attribute_in(folder, given, ranks_per_host, focus, work, reading or work, limit_bytes, notify)
        except BaseException:
            remove(folder)
            raise
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise InputError(
            f"a report of many ranks keeps about 2 MB a rank in the folder that TMPDIR names: {why}"
        ) from None


def _attribute_in(
    folder: Path, given: Given, ranks_per_host: int | None, focus: Focus, work: Work, reading: Work,
    limit_bytes: int | None, notify: Notify,
) -> Stored:  # fmt: skip
    heads, reduced = _reduce(given, folder, reading, limit_bytes, notify)
    opening = open_run(heads, given.run, ranks_per_host, focus)
    store = Store(
        str(folder),
        {rank: reduced[at] for rank, at in opening.place.items()},
        {rank: heads[at].path for rank, at in opening.place.items()},
    )
    # The files live as long as anything that reads them.
    weakref.finalize(store, remove, folder)
    clocks = None
    if opening.needs_clocks:
        whole = stages.Scene(store, replace(focus, between_ns=None), {}, given.run_path)
        clocks = _Attributing(whole, opening, given.run, work, notify).attribute().attribution.clocks
        opening = opening.on(clocks)
    chosen = {rank: opening.between_ns(rank) for rank in opening.place} if opening.chosen_ns else {}
    scene = stages.Scene(store, focus, chosen, given.run_path)
    return _Attributing(scene, opening, given.run, work, notify, clocks).attribute()


def _reduce(
    given: Given, folder: Path, reading: Work, limit_bytes: int | None, notify: Notify
) -> tuple[list[Head], list[str]]:
    """The head of every trace, and where its reduced form is. A run's traces that cannot be read are left out."""
    heads: list[Head] = []
    reduced: list[str] = []
    problems: list[InputError] = []
    results = reading.map(stages.reduce_at, ((path, limit_bytes) for path in given.paths))
    for at, result in enumerate(results):
        notify("traces read", at + 1, len(given.paths))
        if isinstance(result, InputError):
            if given.run is None:
                raise result
            problems.append(result)
            continue
        head, data = result
        rank = head.rank if given.ranks[at] is None else given.ranks[at]
        heads.append(replace(head, rank=rank, path=given.shown[at]))
        reduced.append(given.paths[at] if data is None else stages.scratch_file(str(folder), at))
        if data is not None:
            Path(reduced[-1]).write_bytes(data)
    if not heads:
        raise problems[0]
    return checked_heads(heads, problems), reduced


def _bare(rank: Rank) -> Rank:
    """For another process, which is told how to find details."""
    return replace(rank, read_detail=None)


class _Attributing:
    """One attribution, step by step."""

    def __init__(
        self, scene: stages.Scene, opening: Opening, run: Run | None, work: Work, notify: Notify,
        clocks: Clocks | None = None,
    ) -> None:  # fmt: skip
        self.scene, self.opening, self.run = scene, opening, run
        self.work, self.notify, self.clocks = work, notify, clocks
        self.details = stages.Details(scene, opening.hosts)
        names = host_names(opening.clock_of)
        number = {name: at for at, name in enumerate(names)}
        self.host = {rank: number[name] for rank, name in opening.clock_of.items()}
        self.several_clocks = len(names) > 1
        self.surveyed: dict[int, Survey] = {}
        self.told: ExposedByPlan = {}

    def attribute(self) -> Stored:
        alone = self._explain()
        gatherings = self._gather(alone)
        tiles = [stages.Tile(ranks, around(ranks, alone)) for ranks in self._tiles()]
        clocks = self.clocks or self._clocks(tiles, gatherings)
        tiles = [replace(tile, gathered=gatherings.known_to(tile.ranks, clocks)) for tile in tiles]
        ranks = [one.rank for one in alone.values()]
        best, unmatched, disagree = self._judge(tiles, clocks)
        usable, warnings = judge(ranks, clocks, unmatched, disagree, 0)
        silent = not any(one.communicates for one in alone.values())
        finished, inconclusive = self._split(tiles, ranks, clocks, best, usable or silent)
        if usable and inconclusive:
            usable, warnings = judge(ranks, clocks, unmatched, disagree, inconclusive)
        said = [*self.opening.warnings, *(warning for one in alone.values() for warning in one.warnings)]
        rates = {key: size / span for key, (size, span) in best.items()} if usable and not silent else {}
        warned = all_warnings(self.opening, said, [] if silent else warnings)
        return Stored(
            Attribution(finished, self.run, rates, warned, clocks, self.opening.world_size),
            self.details,
            self._surveys(finished),
            self.told,
        )

    def _explain(self) -> dict[int, stages.Alone]:
        items = ((self.scene, rank, self.opening.hosts.get(rank)) for rank in self.opening.place)
        alone: dict[int, stages.Alone] = {}
        for one in self.work.map(stages.explain_alone, items):
            alone[one.rank.rank] = one
            self.notify("ranks explained", len(alone), len(self.opening.place))
        group = self.scene.focus.group
        if group is not None and not any(one.in_group for one in alone.values()):
            refuse_unknown_group(group, {name for one in alone.values() for name in one.group_names})
        return alone

    def _gather(self, alone: dict[int, stages.Alone]) -> Gatherings:
        gatherings = Gatherings(self.host)
        for rank, one in alone.items():
            if one.gathers:
                gatherings.add(rank, self.scene.store.transfers(rank))
        return gatherings

    def _tiles(self) -> list[tuple[int, ...]]:
        """Whole hosts, where more than one is known, until there are enough ranks."""
        tiles: list[list[int]] = [[]]
        before = None
        for rank in sorted(self.host, key=lambda rank: (self.host[rank], rank)):
            full = len(tiles[-1]) >= TILE
            if full and (not self.several_clocks or self.host[rank] != before):
                tiles.append([])
            tiles[-1].append(rank)
            before = self.host[rank]
        return [tuple(tile) for tile in tiles]

    def _clocks(self, tiles: Sequence[stages.Tile], gatherings: Gatherings) -> Clocks:
        if not self.several_clocks:
            return one_clock(list(self.opening.place))
        ways: dict[tuple[int, int], Way] = {}
        for found in self.work.map(stages.traffic_of, ((self.scene.store, tile, self.host) for tile in tiles)):
            ways |= found
        met: Traffic = defaultdict(OneWay)
        gatherings.traffic(met)
        for key, way in met.items():
            ways[key] = _both(ways.get(key, Way()), way.summed())
        return fit_ways(ways, self.opening.clock_of)

    def _judge(
        self, tiles: Sequence[stages.Tile], clocks: Clocks
    ) -> tuple[dict[LinkClass, Best], dict[str, int], bool]:
        best: dict[LinkClass, Best] = {}
        unmatched: Counter[str] = Counter()
        disagree = False
        items = ((self.scene.store, tile, self.opening.hosts, clocks) for tile in tiles)
        for done, found in enumerate(self.work.map(stages.judge_tile, items), 1):
            best = better(best, found.best)
            unmatched.update(found.unmatched)
            disagree |= found.disagree
            self.notify("groups of ranks matched", done, len(tiles))
        return best, dict(unmatched), disagree

    def _split(
        self,
        tiles: Sequence[stages.Tile],
        ranks: Sequence[Rank],
        clocks: Clocks,
        best: dict[LinkClass, Best],
        usable: bool,
    ) -> tuple[tuple[Rank, ...], int]:
        by_rank = {rank.rank: rank for rank in ranks}
        read_detail = lru_cache(MOST_DETAILS)(self.details)
        items = ((self.details, tile, [by_rank[rank] for rank in tile.ranks], clocks, best, usable) for tile in tiles)
        finished: dict[int, Rank] = {}
        inconclusive = 0
        for found in self.work.map(stages.split_tile, items):
            inconclusive += found.inconclusive
            for rank, one in zip(found.ranks, found.surveyed, strict=True):
                finished[rank.rank] = replace(rank, read_detail=read_detail)
                if one is not None:
                    self._take(rank.rank, one)
            self.notify("ranks split", len(finished), len(ranks))
        order = [rank.rank for rank in ranks]
        return tuple(finished[rank] for rank in order), inconclusive

    def _take(self, rank: int, one: stages.Surveyed) -> None:
        """Add what a rank tells of its steps alone; of a few plans only, so that ranks do not add to memory."""
        self.surveyed[rank] = one.survey
        if one.plan is None or (one.plan not in self.told and len(self.told) >= MOST_PLANS):
            return
        exposed, ranks = self.told.setdefault(one.plan, ({}, set()))
        add_exposed(exposed, one.exposed)
        ranks.add(rank)

    def _surveys(self, ranks: Sequence[Rank]) -> tuple[Survey, ...]:
        return tuple(self.surveyed[rank.rank] for rank in ranks if rank.rank in self.surveyed)


def around(ranks: tuple[int, ...], alone: dict[int, stages.Alone]) -> tuple[int, ...]:
    """The ranks, those that they exchange messages with, and those that these do."""
    found = set(ranks)
    for _ in range(2):
        found |= {peer for rank in found for peer in alone[rank].peers if peer in alone}
    return tuple(sorted(found))


def _both(messages: Way, meetings: Way) -> Way:
    """What messages and what collectives say of the same two hosts."""
    limits = [limit for limit in (messages.limit, meetings.limit) if limit is not None]
    return Way(messages.ends, meetings.together, max(limits, default=None), messages.count + meetings.count)
