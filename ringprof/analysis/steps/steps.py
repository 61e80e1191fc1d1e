"""Ring steps: what each rank's block took, which hops it should have hidden, and what of them it did not.

Which attention and which hops belong to a step is planned in `ringprof.analysis.steps.plan`. A step lasts from the
start of its block (without one: from the arrival of its keys) to the start of the next step; the last of a pass to the
end of its block and hops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ringprof.analysis import intervals
from ringprof.analysis.exposure import Exposure, exposure_of
from ringprof.analysis.kinds.kinds import COMPUTE
from ringprof.analysis.rank import Rank
from ringprof.analysis.steps.blocks import StepBlocks, StepKey
from ringprof.analysis.steps.plan import (
    HeldRanks,
    RanksOfSteps,
    RankSteps,
    StepPlan,
    StepSummary,
    placed,
    plan_steps,
    survey,
)
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.transfers.hops import Exchange, total
from ringprof.trace.columns import Int64

NEGLIGIBLE = 50
"""A step whose exposed communication is less than one part in this many is bound by computation."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """One ring step of one rank; times in nanoseconds."""

    rank: int
    iteration: int
    """Number of the profiled iteration."""
    phase: str
    """``fwd`` or ``bwd``."""
    call: int
    """Which attention call of the iteration and phase, from 0: a model has one a layer."""
    step: int
    start_ns: int
    """Unix time by the rank's own clock, as ``end_ns``."""
    end_ns: int
    block_ns: int
    """Union of the attention kernels of the step; 0 where the rank has no work in it."""
    compute_ns: int
    """Time in the step in which anything computes."""
    hops: int
    """Exchanges that the block should hide."""
    bytes: int | None
    """Those they send; None where one's is not known."""
    wait_ns: int | None
    """Of these exchanges, summed; None where one's is not known."""
    wire_ns: int | None
    exposed_ns: int
    """Communication within the step with no computation beside it."""
    exposed_wire_ns: int | None
    """Of it, the part with something on the wire; None where that is not known."""
    bound: str | None
    """What the step's length came from: ``compute``, ``wire`` or ``peer`` (waiting); None where exposed communication
    cannot be told apart."""
    source: str
    """What tells the steps: ``ringprof`` (its annotations), ``annotation`` (someone else's), ``order`` (of hops and
    attention kernels)."""


ExposedBySteps = dict[tuple[str, int], tuple[int, int]]
"""(phase, step) -> exposed communication in nanoseconds and the number of steps that it is the sum of."""

ExposedByPlan = dict[str, tuple[ExposedBySteps, set[int]]]
"""The mark of a plan -> what the steps of the ranks that tell this plan expose, and which ranks these are."""


class StepFinder:
    """The ring steps of a run's ranks on GPUs, found when they are first asked for."""

    def __init__(
        self, ranks: RanksOfSteps, surveys: Sequence[StepSummary] | None = None, told: ExposedByPlan | None = None
    ) -> None:
        """``surveys`` and ``told``: what was found before, so that fewer ranks must be looked at again."""
        self._ranks, self._surveys, self._told = ranks, surveys, told or {}

    @property
    def listed(self) -> bool:
        """Whether a report lists every rank's steps: where their ranks are in memory."""
        return isinstance(self._ranks, HeldRanks)

    @cached_property
    def plan(self) -> StepPlan | None:
        """None where nothing tells steps."""
        surveys = list(self._ranks.map(survey)) if self._surveys is None else self._surveys
        return plan_steps(surveys, self._ranks) if surveys else None

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps, by rank and time; they take as much memory as there are."""
        if self.plan is None:
            return ()
        return tuple(step for steps in self._ranks.map(steps_of, self.plan) for step in steps)

    @cached_property
    def by_activity(self) -> dict[int, dict[int, StepKey]]:
        """Rank -> the step that each of its attention kernels and exchanges belongs to, by activity."""
        return {} if self.plan is None else dict(self._ranks.map(keys_of_activities, self.plan))

    @cached_property
    def exposed_by_step(self) -> ExposedBySteps:
        """What each ring step exposes, over all ranks, calls and iterations."""
        if self.plan is None:
            return {}
        # What a rank computed alone holds for the run where its own plan equals the run's.
        known, ranks = self._told.get(self.plan.mark if self._told else "", ({}, set()))
        found = dict(known)
        for mine in self._ranks.map(exposed_steps, self.plan, skip=ranks):
            add_exposed(found, mine)
        return found


def steps_in_memory(ranks: Iterable[Rank]) -> StepFinder:
    """The steps of ranks whose details stay in memory; none on CPU."""
    return StepFinder(HeldRanks(lambda: [RankSteps(rank) for rank in ranks if not rank.on_cpu]))


def exposed_steps(side: RankSteps, plan: StepPlan) -> ExposedBySteps:
    """What each step of one rank exposes."""
    blocks, slots = placed(side, plan)
    found: ExposedBySteps = {}
    if blocks.keys:
        exposed = intervals.covered_ns(exposure_of(side.detail, side.rows).everything, *_bounds(side, blocks, slots))
        for key, time in zip(blocks.keys, exposed.tolist(), strict=True):
            add_exposed(found, {(key.phase, key.step): (time, 1)})
    return found


def steps_of(side: RankSteps, plan: StepPlan) -> list[Step]:
    """The steps of one rank, by time."""
    return _steps(side, *placed(side, plan))


def keys_of_activities(side: RankSteps, plan: StepPlan) -> tuple[int, dict[int, StepKey]]:
    """A rank, and the step that each of its attention kernels and exchanges belongs to, by activity."""
    blocks, slots = placed(side, plan)
    attention = zip(side.rows.activity[blocks.row].tolist(), blocks.slot.tolist(), strict=True)
    found = {activity: blocks.keys[slot] for activity, slot in attention}
    if not blocks.keys:
        return side.rank.rank, found
    for slot, exchange in zip(slots.tolist(), side.exchanges, strict=True):
        found |= {part.transfer.activity: blocks.keys[slot] for part in exchange.parts}
    return side.rank.rank, found


def add_exposed(found: ExposedBySteps, more: ExposedBySteps) -> None:
    """Add what other steps expose."""
    for key, (time, count) in more.items():
        known = found.get(key, (0, 0))
        found[key] = known[0] + time, known[1] + count


# --- figures ------------------------------------------------------------------------------------------


def _steps(side: RankSteps, blocks: StepBlocks, slots: Int64) -> list[Step]:
    if not blocks.keys:
        return []
    start, end = _bounds(side, blocks, slots)
    rows, exposure = side.rows, exposure_of(side.detail, side.rows)
    exposed = intervals.covered_ns(exposure.everything, start, end)
    columns: dict[str, Int64] = {
        "start_ns": start,
        "end_ns": end,
        "block_ns": _block_ns(rows, blocks),
        "compute_ns": intervals.covered_ns(rows.spans(*COMPUTE), start, end),
        "exposed_ns": exposed,
    }
    values = [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
    wire = _known(exposure, start, end)
    carried = _carried(side, slots, len(blocks.keys))
    return [
        Step(
            rank=side.rank.rank,
            **key._asdict(),
            **figures,
            **moved,
            exposed_wire_ns=on_wire,
            bound=_bound(figures["end_ns"] - figures["start_ns"], figures["exposed_ns"], on_wire),
            source=blocks.source,
        )
        for key, figures, moved, on_wire in zip(blocks.keys, values, carried, wire, strict=True)
    ]


def _bounds(side: RankSteps, blocks: StepBlocks, slots: Int64) -> tuple[Int64, Int64]:
    """Start and end of every step."""
    count, never, always = len(blocks.keys), np.iinfo(np.int64).min, np.iinfo(np.int64).max
    begun, ended = np.full(count, always), np.full(count, never)
    np.minimum.at(begun, blocks.slot, side.rows.start_ns[blocks.row])
    np.maximum.at(ended, blocks.slot, side.rows.end_ns[blocks.row])
    sent, arrived = np.full(count, always), np.full(count, never)
    np.minimum.at(sent, slots, np.array([exchange.start_ns for exchange in side.exchanges], np.int64))
    np.maximum.at(arrived, slots, np.array([exchange.end_ns for exchange in side.exchanges], np.int64))
    done = np.maximum.accumulate(np.maximum(ended, arrived))
    before = np.concatenate(([never], done[:-1]))
    # Without a block, a step begins when what it waited for has come.
    start = np.where(begun < always, begun, np.where(before > never, before, sent))
    passes = [key[:3] for key in blocks.keys]
    first = np.array([at == 0 or passes[at] != passes[at - 1] for at in range(count)], np.bool_)
    computed = np.concatenate(([never], np.maximum.accumulate(ended)[:-1]))
    start = np.where(first, np.maximum(np.minimum(start, sent), computed), start)
    start = np.minimum.accumulate(np.where(start < always, start, done[-1])[::-1])[::-1]
    following = np.concatenate((start[1:], [always]))
    last = np.concatenate((first[1:], [True]))
    end = np.where(last, np.minimum(np.maximum(done, start), following), following)
    return start, end


def _known(exposure: Exposure, start: Int64, end: Int64) -> list[int | None]:
    """Exposed wire time of each step, None where some of what is exposed there is not known."""
    wire = intervals.covered_ns(exposure.wire, start, end)
    unknown = intervals.covered_ns(exposure.unknown, start, end)
    return [None if lost else time for time, lost in zip(wire.tolist(), unknown.tolist(), strict=True)]


def _block_ns(rows: TimedActivities, blocks: StepBlocks) -> Int64:
    """Union of each step's attention kernels: what each adds to those that began before it in the same step."""
    start, end = rows.start_ns[blocks.row], rows.end_ns[blocks.row]
    sequence = np.lexsort((start, blocks.slot))
    slot, start, end = blocks.slot[sequence], start[sequence], end[sequence]
    result = np.zeros(len(blocks.keys), np.int64)
    if not len(slot):
        return result
    # Steps are set apart by more than the whole window, so that one running maximum serves all.
    apart = slot * (int(end.max()) - int(start.min()) + 1) - int(start.min())
    reached = np.maximum.accumulate(end + apart)
    before = np.concatenate(([np.iinfo(np.int64).min], reached[:-1]))
    np.add.at(result, slot, np.maximum(reached - np.maximum(start + apart, before), 0))
    return result


def _carried(side: RankSteps, slots: Int64, count: int) -> list[dict[str, Any]]:
    """The hops of each step: their number, the bytes that they send, and their waits and wires."""
    exchanges: list[list[Exchange]] = [[] for _ in range(count)]
    for slot, exchange in zip(slots.tolist(), side.exchanges, strict=True):
        exchanges[slot].append(exchange)
    return [
        {
            "hops": len(mine),
            "bytes": total([part.transfer.sent_bytes for exchange in mine for part in exchange.parts]),
            "wait_ns": total([wait for exchange in mine for wait in exchange.waits_ns]),
            "wire_ns": total([part.wire_ns for exchange in mine for part in exchange.parts]),
        }
        for mine in exchanges
    ]


def _bound(time_ns: int, exposed_ns: int, on_wire: int | None) -> str | None:
    if exposed_ns * NEGLIGIBLE <= time_ns:
        return "compute"
    if on_wire is None:
        return None
    return "wire" if 2 * on_wire >= exposed_ns else "peer"
