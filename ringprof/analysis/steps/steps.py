"""Ring steps of each rank: how long the block took, which hops it should have hidden, and how much stayed exposed.

`ringprof.analysis.steps.plan` decides which attention and hops belong to a step. A step lasts from the start of its
block to the start of the next step; without a block, it starts when its keys arrive. The last step of a pass ends with
its block and hops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.exposure import exposure_of
from ringprof.analysis.kinds.kinds import COMPUTE
from ringprof.analysis.rank import Rank
from ringprof.analysis.steps.blocks import StepBlocks, StepKey
from ringprof.analysis.steps.plan import (
    InMemoryRanks,
    RankSteps,
    RankStepsSource,
    StepPlan,
    StepSummary,
    assign_steps,
    plan_steps,
    summarise_steps,
)
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.transfers.hops import Exchange, total
from ringprof.trace.columns import Int64

NEGLIGIBLE = 50
"""A step counts as compute-bound where its exposed communication is below one part in this many of its length."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """One ring step of one rank; times in nanoseconds."""

    rank: int
    iteration: int
    """Number of the profiled iteration."""
    phase: str
    """``fwd`` or ``bwd``."""
    call: int
    """Index of the attention call in the iteration and phase, from 0; a model has one call per layer."""
    step: int
    start_ns: int
    """Unix time by the rank's own clock, like ``end_ns``."""
    end_ns: int
    block_ns: int
    """Union of the step's attention kernels; 0 where the rank has no work in the step."""
    compute_ns: int
    """Time in the step during which any computation runs."""
    hops: int
    """Number of exchanges that the block should hide."""
    bytes: int | None
    """Bytes that these exchanges send; None where any size is unknown."""
    wait_ns: int | None
    """Sum of the waits of these exchanges; None where any is unknown."""
    wire_ns: int | None
    """Sum of the wire times of these exchanges; None where any is unknown."""
    exposed_ns: int
    """Communication within the step that no computation overlaps."""
    exposed_wire_ns: int | None
    """Part of ``exposed_ns`` with data on the wire; None where that is unknown."""
    bound: str | None
    """Cause of the step's length: ``compute``, ``wire`` or ``peer`` (waiting); None where exposed communication cannot
    be split into wire and wait."""
    source: str
    """Source of the steps: ``ringprof`` (its annotations), ``annotation`` (annotations of other software), ``order``
    (of hops and attention kernels)."""


ExposedBySteps = dict[tuple[str, int], tuple[int, int]]
"""(phase, step) -> exposed communication in nanoseconds, and the number of steps summed."""

ExposedByPlan = dict[str, tuple[ExposedBySteps, set[int]]]
"""Digest of a plan -> sums of exposed communication, and the ranks in these sums: those whose own plan this is."""


class StepFinder:
    """Ring steps of a run's GPU ranks, computed on first access."""

    def __init__(
        self,
        ranks: RankStepsSource,
        summaries: Sequence[StepSummary] | None = None,
        exposed_by_plan: ExposedByPlan | None = None,
    ) -> None:
        """``summaries`` and ``exposed_by_plan`` hold earlier results, so that fewer ranks must be analysed again."""
        self._ranks, self._summaries, self._exposed_by_plan = ranks, summaries, exposed_by_plan or {}

    @property
    def listed(self) -> bool:
        """Whether a report lists every rank's steps: only where the ranks are in memory."""
        return isinstance(self._ranks, InMemoryRanks)

    @cached_property
    def plan(self) -> StepPlan | None:
        """Plan of the run's steps; None where the traces show no steps."""
        summaries = list(self._ranks.map(summarise_steps)) if self._summaries is None else self._summaries
        return plan_steps(summaries, self._ranks) if summaries else None

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps, by rank and time; memory grows with their number."""
        if self.plan is None:
            return ()
        return tuple(step for steps in self._ranks.map(steps_of, self.plan) for step in steps)

    @cached_property
    def by_activity(self) -> dict[int, dict[int, StepKey]]:
        """Rank -> activity -> step, for the attention kernels and exchanges of each rank."""
        return {} if self.plan is None else dict(self._ranks.map(keys_of_activities, self.plan))

    @cached_property
    def exposed_by_step(self) -> ExposedBySteps:
        """Exposed communication of each ring step, summed over all ranks, calls and iterations."""
        if self.plan is None:
            return {}
        # A rank's own sums are valid for the run where its own plan equals the run's plan.
        known, ranks = self._exposed_by_plan.get(self.plan.digest if self._exposed_by_plan else "", ({}, set()))
        exposed = dict(known)
        for rank_exposed in self._ranks.map(exposed_steps, self.plan, skip=ranks):
            add_exposed(exposed, rank_exposed)
        return exposed


def steps_in_memory(ranks: Iterable[Rank]) -> StepFinder:
    """Return the steps of ranks whose details stay in memory; CPU ranks have none."""
    return StepFinder(InMemoryRanks(lambda: [RankSteps(rank) for rank in ranks if not rank.on_cpu]))


def exposed_steps(rank_steps: RankSteps, plan: StepPlan) -> ExposedBySteps:
    """Return the exposed communication of each of one rank's steps."""
    blocks, slots = assign_steps(rank_steps, plan)
    result: ExposedBySteps = {}
    if blocks.keys:
        exposed = intervals.covered_ns(
            exposure_of(rank_steps.detail, rank_steps.rows).everything, *_step_bounds(rank_steps, blocks, slots)
        )
        for key, time in zip(blocks.keys, exposed.tolist(), strict=True):
            add_exposed(result, {(key.phase, key.step): (time, 1)})
    return result


def steps_of(rank_steps: RankSteps, plan: StepPlan) -> list[Step]:
    """Return the steps of one rank, by time."""
    return _compute_steps(rank_steps, *assign_steps(rank_steps, plan))


def keys_of_activities(rank_steps: RankSteps, plan: StepPlan) -> tuple[int, dict[int, StepKey]]:
    """Return a rank, and activity -> step for its attention kernels and exchanges."""
    blocks, slots = assign_steps(rank_steps, plan)
    attention = zip(rank_steps.rows.activity[blocks.row].tolist(), blocks.slot.tolist(), strict=True)
    keys = {activity: blocks.keys[slot] for activity, slot in attention}
    if not blocks.keys:
        return rank_steps.rank.rank, keys
    for slot, exchange in zip(slots.tolist(), rank_steps.exchanges, strict=True):
        keys |= {part.transfer.activity: blocks.keys[slot] for part in exchange.parts}
    return rank_steps.rank.rank, keys


def add_exposed(totals: ExposedBySteps, others: ExposedBySteps) -> None:
    """Add the sums of ``others`` to ``totals``."""
    for key, (time, count) in others.items():
        total = totals.get(key, (0, 0))
        totals[key] = total[0] + time, total[1] + count


# --- figures ------------------------------------------------------------------------------------------


def _compute_steps(rank_steps: RankSteps, blocks: StepBlocks, slots: Int64) -> list[Step]:
    """Compute the steps of one rank from its blocks and the steps of its exchanges."""
    if not blocks.keys:
        return []
    start, end = _step_bounds(rank_steps, blocks, slots)
    rows, exposure = rank_steps.rows, exposure_of(rank_steps.detail, rank_steps.rows)
    exposed = intervals.covered_ns(exposure.everything, start, end)
    columns: dict[str, Int64] = {
        "start_ns": start,
        "end_ns": end,
        "block_ns": _attention_ns(rows, blocks),
        "compute_ns": intervals.covered_ns(rows.spans(*COMPUTE), start, end),
        "exposed_ns": exposed,
    }
    values = [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
    wire = intervals.covered_ns(exposure.wire, start, end)
    unknown = intervals.covered_ns(exposure.unknown, start, end)
    exposed_wire = [
        None if unknown_ns else time for time, unknown_ns in zip(wire.tolist(), unknown.tolist(), strict=True)
    ]
    exchanges: list[list[Exchange]] = [[] for _ in range(len(blocks.keys))]
    for slot, exchange in zip(slots.tolist(), rank_steps.exchanges, strict=True):
        exchanges[slot].append(exchange)
    communication: list[dict[str, Any]] = [
        {
            "hops": len(in_step),
            "bytes": total([part.transfer.sent_bytes for exchange in in_step for part in exchange.parts]),
            "wait_ns": total([wait for exchange in in_step for wait in exchange.waits_ns]),
            "wire_ns": total([part.wire_ns for exchange in in_step for part in exchange.parts]),
        }
        for in_step in exchanges
    ]
    return [
        Step(
            rank=rank_steps.rank.rank,
            **key._asdict(),
            **times,
            **exchanged,
            exposed_wire_ns=exposed_wire_ns,
            bound=_bound_of_step(times["end_ns"] - times["start_ns"], times["exposed_ns"], exposed_wire_ns),
            source=blocks.source,
        )
        for key, times, exchanged, exposed_wire_ns in zip(blocks.keys, values, communication, exposed_wire, strict=True)
    ]


def _step_bounds(rank_steps: RankSteps, blocks: StepBlocks, slots: Int64) -> tuple[Int64, Int64]:
    """Return start and end of every step."""
    count, minimum, maximum = len(blocks.keys), np.iinfo(np.int64).min, np.iinfo(np.int64).max
    block_start, block_end = np.full(count, maximum), np.full(count, minimum)
    np.minimum.at(block_start, blocks.slot, rank_steps.rows.start_ns[blocks.row])
    np.maximum.at(block_end, blocks.slot, rank_steps.rows.end_ns[blocks.row])
    hop_start, hop_end = np.full(count, maximum), np.full(count, minimum)
    np.minimum.at(hop_start, slots, np.array([exchange.start_ns for exchange in rank_steps.exchanges], np.int64))
    np.maximum.at(hop_end, slots, np.array([exchange.end_ns for exchange in rank_steps.exchanges], np.int64))
    all_done = np.maximum.accumulate(np.maximum(block_end, hop_end))
    previous_done = np.concatenate(([minimum], all_done[:-1]))
    # Without a block, a step begins when all earlier blocks and hops are done.
    start = np.where(block_start < maximum, block_start, np.where(previous_done > minimum, previous_done, hop_start))
    passes = [key[:3] for key in blocks.keys]
    first = np.array([index == 0 or passes[index] != passes[index - 1] for index in range(count)], np.bool_)
    blocks_done = np.concatenate(([minimum], np.maximum.accumulate(block_end)[:-1]))
    start = np.where(first, np.maximum(np.minimum(start, hop_start), blocks_done), start)
    start = np.minimum.accumulate(np.where(start < maximum, start, all_done[-1])[::-1])[::-1]
    following = np.concatenate((start[1:], [maximum]))
    last = np.concatenate((first[1:], [True]))
    end = np.where(last, np.minimum(np.maximum(all_done, start), following), following)
    return start, end


def _attention_ns(rows: TimedActivities, blocks: StepBlocks) -> Int64:
    """Return each step's union of attention kernels: the sum of what each kernel adds to the earlier ones."""
    start, end = rows.start_ns[blocks.row], rows.end_ns[blocks.row]
    sequence = np.lexsort((start, blocks.slot))
    slot, start, end = blocks.slot[sequence], start[sequence], end[sequence]
    result = np.zeros(len(blocks.keys), np.int64)
    if not len(slot):
        return result
    # Shift the steps apart by more than the whole window, so that one running maximum serves all of them.
    shift = slot * (int(end.max()) - int(start.min()) + 1) - int(start.min())
    latest_end = np.maximum.accumulate(end + shift)
    previous_end = np.concatenate(([np.iinfo(np.int64).min], latest_end[:-1]))
    np.add.at(result, slot, np.maximum(latest_end - np.maximum(start + shift, previous_end), 0))
    return result


def _bound_of_step(time_ns: int, exposed_ns: int, exposed_wire_ns: int | None) -> str | None:
    """Return what a step's length came from, see `Step.bound`."""
    if exposed_ns * NEGLIGIBLE <= time_ns:
        return "compute"
    if exposed_wire_ns is None:
        return None
    return "wire" if 2 * exposed_wire_ns >= exposed_ns else "peer"
