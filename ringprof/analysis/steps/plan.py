"""Plan of a run's ring steps, taken from the rank with the most steps and applied to every rank.

A hop belongs to the step whose attention was launched next after the hop: the hop was posted so that this block hides
it. The order is the same on every rank. So a rank without work in a step (causal mask, contiguous layout) takes the
hops of that step from the rank that has all steps.
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
    attention_runs,
    inferred_blocks,
    launch_order,
    named_blocks,
    number_runs,
    number_runs_like,
)
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.transfers.hops import Exchange
from ringprof.trace.columns import NONE, Int64, distinct


class RankSteps:
    """Activities and exchanges of one rank, in launch order: the input for finding its ring steps."""

    def __init__(self, rank: Rank) -> None:
        detail = rank.detail
        self.rank = rank
        self.detail = detail
        self.rows: TimedActivities = detail.rows()
        iteration_of = np.full(len(detail.classified.trace.activities.start_ns), NONE, np.int64)
        for index, activities in enumerate(detail.window.iterations):
            iteration_of[activities] = index
        exchanges: list[Exchange] = list(detail.hops)
        exchanges += [
            Exchange((part,)) for part in detail.splits if part.transfer.kind in ("all_gather", "reduce_scatter")
        ]
        order, launched = launch_order(
            detail, self.rows, [[part.transfer.activity for part in exchange.parts] for exchange in exchanges]
        )
        sequence = np.argsort(launched, kind="stable")
        self.iteration: Int64 = iteration_of[self.rows.activity]
        """Iteration of every row."""
        self.order = order
        self.exchanges = tuple(exchanges[index] for index in sequence.tolist())
        """Hops, gathers and scatters, in launch order."""
        self.launched: Int64 = launched[sequence]
        """Launch position of each exchange, ascending."""
        self._runs: dict[int, AttentionRuns] = {}

    @cached_property
    def named(self) -> StepBlocks | None:
        """The steps that the trace's annotations name; None without such annotations."""
        return named_blocks(self.detail, self.rows, self.iteration, self.order)

    def runs(self, ring_size: int) -> AttentionRuns:
        """Group the rank's attention kernels into runs between hops."""
        if ring_size not in self._runs:
            self._runs[ring_size] = attention_runs(self.rows, self.iteration, self.order, self.launched, ring_size)
        return self._runs[ring_size]


class StepSummary(msgspec.Struct, frozen=True):
    """Summary of one rank's trace for planning the run's steps."""

    source: str
    """Source of the step annotations; empty without any."""
    named_steps: int
    """Number of annotated steps."""
    hops: int
    ring_size: int
    """Size of the largest group among the rank's hops."""
    world_size: int
    """World size in the trace; 0 where it names none."""


class StepPlan(msgspec.Struct, frozen=True):
    """Steps of a run, as found on the rank with the most steps; plain data."""

    source: str
    keys: tuple[StepKey, ...]
    slots: Int64
    """For each exchange of a rank with all exchanges: the step whose block should hide it, as index into ``keys``."""
    ring_size: int
    model: AttentionRuns | None
    """Attention runs of the model rank where the order of hops defines the steps; else None."""
    run_keys: tuple[StepKey, ...] = ()
    """Step of each run of the model rank."""

    @property
    def digest(self) -> str:
        """Hash of the plan: equal for plans that assign every rank's attention and hops alike."""
        import hashlib  # imported here: loading OpenSSL takes 2 ms

        runs = (self.model.hops_before, self.model.phase, self.model.iteration) if self.model else None
        content = (self.source, self.keys, self.slots.tolist(), self.ring_size, self.run_keys, runs)
        return hashlib.sha256(repr(content).encode()).hexdigest()


def plan_of_rank(rank_steps: RankSteps) -> StepPlan | None:
    """Plan the steps from one rank alone; None where its trace shows none."""
    return plan_steps([summarise_steps(rank_steps)], InMemoryRanks(lambda: [rank_steps]))


def summarise_steps(rank_steps: RankSteps) -> StepSummary:
    """Summarize what one rank's trace says about the run's steps."""
    named = rank_steps.named
    groups = {len(part.transfer.group[1]) for hop in rank_steps.detail.hops for part in hop.parts}
    return StepSummary(
        source=named.source if named else "",
        named_steps=len(named.keys) if named else 0,
        hops=len(rank_steps.detail.hops),
        ring_size=max(groups, default=0),
        world_size=rank_steps.rank.world_size or 0,
    )


class RankStepsSource(Protocol):
    """Access to the `RankSteps` of a run, by rank: held in memory, or rebuilt whenever one is needed."""

    def map(self, function: Callable[..., Any], *arguments: Any, skip: Container[int] = ()) -> Iterator[Any]:
        """Yield ``function(rank_steps, *arguments)`` for every rank not in ``skip``; may run in another process."""

    def rank_at(self, index: int) -> RankSteps:
        """Return the rank at an index."""


class InMemoryRanks:
    """`RankSteps` that stay in memory, built at the first access."""

    def __init__(self, make: Callable[[], Sequence[RankSteps]]) -> None:
        self._make = make

    @cached_property
    def _all_rank_steps(self) -> Sequence[RankSteps]:
        return self._make()

    def map(self, function: Callable[..., Any], *arguments: Any, skip: Container[int] = ()) -> Iterator[Any]:
        return (
            function(rank_steps, *arguments) for rank_steps in self._all_rank_steps if rank_steps.rank.rank not in skip
        )

    def rank_at(self, index: int) -> RankSteps:
        return self._all_rank_steps[index]


def plan_steps(summaries: Sequence[StepSummary], ranks: RankStepsSource) -> StepPlan | None:
    """Plan the steps of a run from annotations, else from the order of hops; None where the traces show neither."""
    source = next((summary.source for summary in summaries if summary.source), None)
    if source is not None:
        model = ranks.rank_at(max(range(len(summaries)), key=lambda index: summaries[index].named_steps))
        assert model.named is not None
        return StepPlan(source, model.named.keys, _slots_of_exchanges(model, model.named), 0, None)
    if not any(summary.hops for summary in summaries):
        return None
    size = max(summary.ring_size for summary in summaries)
    size = size or max(summary.world_size for summary in summaries) or len(summaries)
    counts = list(ranks.map(count_runs, size))
    model = ranks.rank_at(max(range(len(counts)), key=counts.__getitem__))
    runs = model.runs(size)
    keys = number_runs(runs, size)
    blocks = inferred_blocks(runs, keys)
    return StepPlan(blocks.source, blocks.keys, _slots_of_exchanges(model, blocks), size, runs, tuple(keys))


def count_runs(rank_steps: RankSteps, ring_size: int) -> int:
    """Return how many runs of attention between hops a rank has."""
    return len(rank_steps.runs(ring_size).phase)


def assign_steps(rank_steps: RankSteps, plan: StepPlan) -> tuple[StepBlocks, Int64]:
    """Assign one rank's attention and exchanges to steps.

    Returns the attention by step, and for each exchange its step as an index into the keys.
    """
    if plan.model is None:
        empty = np.empty(0, np.int64)
        blocks = rank_steps.named or StepBlocks((), empty, empty, empty, plan.source)
    else:
        runs = rank_steps.runs(plan.ring_size)
        run_keys = number_runs_like(runs, plan.model, list(plan.run_keys))
        blocks = inferred_blocks(runs, number_runs(runs, plan.ring_size) if run_keys is None else run_keys)
    keys, slots = plan.keys, plan.slots
    if len(rank_steps.exchanges) != len(slots) or not set(blocks.keys) <= set(keys):
        keys, slots = blocks.keys, _slots_of_exchanges(rank_steps, blocks)
    return _reindexed(blocks, keys), slots


def _slots_of_exchanges(rank_steps: RankSteps, blocks: StepBlocks) -> Int64:
    """Return for each of the rank's exchanges the step whose block was launched next, as an index into the keys."""
    first = np.full(len(blocks.keys), np.iinfo(np.int64).max)
    np.minimum.at(first, blocks.slot, blocks.order)
    slots, keys = np.searchsorted(first, rank_steps.launched, side="right"), blocks.keys
    # Where one layer's backward pass meets the next, the first of several hops carries the previous layer's last dK and
    # dV: it belongs to the previous layer's last step.
    for slot in distinct(slots).tolist() if blocks.source == "order" else ():
        exchanges = np.flatnonzero(slots == slot)
        if 0 < slot < len(keys) and len(exchanges) > 1 and keys[slot - 1].phase == "bwd" and keys[slot].step == 0:
            slots[exchanges[0]] = slot - 1
    result: Int64 = np.minimum(slots, len(keys) - 1)
    return result


def _reindexed(blocks: StepBlocks, keys: tuple[StepKey, ...]) -> StepBlocks:
    """Return ``blocks`` indexed by ``keys``, a superset of ``blocks.keys``."""
    if blocks.keys == keys:
        return blocks
    slot_of_key = {key: slot for slot, key in enumerate(keys)}
    slot = (
        np.array([slot_of_key[key] for key in blocks.keys], np.int64)[blocks.slot] if len(blocks.slot) else blocks.slot
    )
    return StepBlocks(keys, blocks.row, slot, blocks.order, blocks.source)
