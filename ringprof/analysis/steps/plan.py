"""Which attention and which hops make up which ring step: planned from the rank that has most steps, for every rank.

A hop belongs to the step whose attention was launched next after it: it was posted so that this block hides it. That
order is the same on every rank, so a rank without work in a step (causal, contiguous layout) takes the hops of that
step from the rank that has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec
import numpy as np

from ringprof.analysis.rank import Rank
from ringprof.analysis.steps.blocks import (
    AttentionRuns,
    StepBlocks,
    StepKey,
    inferred_blocks,
    launch_order,
    named_blocks,
    number_like,
    number_runs,
    runs_of,
)
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.transfers.hops import Exchange
from ringprof.trace.columns import NONE, Int64, distinct


class RankSteps:
    """One rank while its steps are found: its activities, and what it exchanged, in the order of their launch."""

    def __init__(self, rank: Rank) -> None:
        detail = rank.detail
        self.rank = rank
        self.detail = detail
        self.rows: TimedActivities = detail.rows()
        number = np.full(len(detail.classified.trace.activities.start_ns), NONE, np.int64)
        for place, activities in enumerate(detail.window.iterations):
            number[activities] = place
        exchanges: list[Exchange] = list(detail.hops)
        exchanges += [Exchange((p,)) for p in detail.splits if p.transfer.kind in ("all_gather", "reduce_scatter")]
        order, launched = launch_order(detail, self.rows, [[p.transfer.activity for p in e.parts] for e in exchanges])
        sequence = np.argsort(launched, kind="stable")
        self.iteration: Int64 = number[self.rows.activity]
        """Of every row."""
        self.order = order
        self.exchanges = tuple(exchanges[at] for at in sequence.tolist())
        """In the order of their launch."""
        self.launched: Int64 = launched[sequence]
        """That order."""
        self._runs: dict[int, AttentionRuns] = {}

    @cached_property
    def named(self) -> StepBlocks | None:
        """The steps that the trace names."""
        return named_blocks(self.detail, self.rows, self.iteration, self.order)

    def runs(self, ring_size: int) -> AttentionRuns:
        """Its attention between hops."""
        if ring_size not in self._runs:
            self._runs[ring_size] = runs_of(self.rows, self.iteration, self.order, self.launched, ring_size)
        return self._runs[ring_size]


class StepSummary(msgspec.Struct, frozen=True):
    """What one rank can tell of the run's steps."""

    source: str
    """Of the names of its steps; empty where it names none."""
    named: int
    """How many it names."""
    hops: int
    ring_size: int
    """Of the largest group that a hop of its belongs to."""
    world_size: int
    """That its trace names; 0 where it names none."""


class StepPlan(msgspec.Struct, frozen=True):
    """The steps of a run, as the rank that has most of them has them; plain data."""

    source: str
    keys: tuple[StepKey, ...]
    slots: Int64
    """For each exchange of a rank that has all, the step whose block should hide it, as an index into ``keys``."""
    ring_size: int
    model: AttentionRuns | None
    """Where the order of hops tells the steps: the model's attention between hops."""
    run_keys: tuple[StepKey, ...] = ()
    """Of each run of the model."""

    @property
    def mark(self) -> str:
        """The same for plans that place every rank's attention and hops alike."""
        import hashlib  # here: loading OpenSSL takes 2 ms

        runs = (self.model.hops_before, self.model.phase, self.model.iteration) if self.model else None
        told = (self.source, self.keys, self.slots.tolist(), self.ring_size, self.run_keys, runs)
        return hashlib.sha256(repr(told).encode()).hexdigest()


def own_plan(side: RankSteps) -> StepPlan | None:
    """The steps as one rank alone tells them."""
    return plan_steps([survey(side)], HeldRanks(lambda: [side]))


def survey(side: RankSteps) -> StepSummary:
    """What one rank can tell."""
    named = side.named
    groups = {len(part.transfer.group[1]) for hop in side.detail.hops for part in hop.parts}
    return StepSummary(
        source=named.source if named else "",
        named=len(named.keys) if named else 0,
        hops=len(side.detail.hops),
        ring_size=max(groups, default=0),
        world_size=side.rank.world_size or 0,
    )


class RanksOfSteps(Protocol):
    """The ranks of a run while its steps are found, by rank: held in memory, or made anew whenever one is asked for."""

    def map(self, function: Callable[..., Any], *arguments: Any, skip: Container[int] = ()) -> Iterator[Any]:
        """``function(side, *arguments)`` for every rank but those to skip; the function may run in another process."""

    def at(self, place: int) -> RankSteps:
        """One rank by its place."""


class HeldRanks:
    """Ranks that stay in memory, made when the first is asked for."""

    def __init__(self, make: Callable[[], Sequence[RankSteps]]) -> None:
        self._make = make

    @cached_property
    def _sides(self) -> Sequence[RankSteps]:
        return self._make()

    def map(self, function: Callable[..., Any], *arguments: Any, skip: Container[int] = ()) -> Iterator[Any]:
        return (function(side, *arguments) for side in self._sides if side.rank.rank not in skip)

    def at(self, place: int) -> RankSteps:
        return self._sides[place]


def plan_steps(surveys: Sequence[StepSummary], ranks: RanksOfSteps) -> StepPlan | None:
    """The steps of a run, by name, else by the order of hops; None where nothing tells them."""
    source = next((found.source for found in surveys if found.source), None)
    if source is not None:
        model = ranks.at(max(range(len(surveys)), key=lambda place: surveys[place].named))
        assert model.named is not None
        return StepPlan(source, model.named.keys, _slots(model, model.named), 0, None)
    if not any(found.hops for found in surveys):
        return None
    size = max(found.ring_size for found in surveys)
    size = size or max(found.world_size for found in surveys) or len(surveys)
    counts = list(ranks.map(count_runs, size))
    model = ranks.at(max(range(len(counts)), key=counts.__getitem__))
    runs = model.runs(size)
    keys = number_runs(runs, size)
    blocks = inferred_blocks(runs, keys)
    return StepPlan(blocks.source, blocks.keys, _slots(model, blocks), size, runs, tuple(keys))


def count_runs(side: RankSteps, ring_size: int) -> int:
    """How many runs of attention between hops a rank has."""
    return len(side.runs(ring_size).phase)


def placed(side: RankSteps, plan: StepPlan) -> tuple[StepBlocks, Int64]:
    """One rank's attention by step, and the step of each of its exchanges as an index into the steps' keys."""
    mine = _blocks(side, plan)
    keys, slots = plan.keys, plan.slots
    if len(side.exchanges) != len(slots) or not set(mine.keys) <= set(keys):
        keys, slots = mine.keys, _slots(side, mine)
    return _under(mine, keys), slots


def _blocks(side: RankSteps, plan: StepPlan) -> StepBlocks:
    if plan.model is None:
        nothing = np.empty(0, np.int64)
        return side.named or StepBlocks((), nothing, nothing, nothing, plan.source)
    runs = side.runs(plan.ring_size)
    mine = number_like(runs, plan.model, list(plan.run_keys))
    return inferred_blocks(runs, number_runs(runs, plan.ring_size) if mine is None else mine)


def _slots(side: RankSteps, blocks: StepBlocks) -> Int64:
    """For each of the rank's exchanges the step, as an index into the keys, whose block was launched next."""
    first = np.full(len(blocks.keys), np.iinfo(np.int64).max)
    np.minimum.at(first, blocks.slot, blocks.order)
    slots = np.searchsorted(first, side.launched, side="right")
    if blocks.source == "order":
        slots = _home(slots, blocks.keys)
    result: Int64 = np.minimum(slots, len(blocks.keys) - 1)
    return result


def _home(slots: Int64, keys: Sequence[StepKey]) -> Int64:
    """Where one layer's backward pass meets the next, the first of several hops carries the previous layer's last
    dK and dV: assign it there."""
    result: Int64 = slots.copy()
    for slot in distinct(slots).tolist():
        here = np.flatnonzero(slots == slot)
        if 0 < slot < len(keys) and len(here) > 1 and keys[slot - 1].phase == "bwd" and keys[slot].step == 0:
            result[here[0]] = slot - 1
    return result


def _under(blocks: StepBlocks, keys: tuple[StepKey, ...]) -> StepBlocks:
    """Re-index onto ``keys``, a superset of ``blocks.keys``."""
    if blocks.keys == keys:
        return blocks
    place = {key: slot for slot, key in enumerate(keys)}
    slot = np.array([place[key] for key in blocks.keys], np.int64)[blocks.slot] if len(blocks.slot) else blocks.slot
    return StepBlocks(keys, blocks.row, slot, blocks.order, blocks.source)
