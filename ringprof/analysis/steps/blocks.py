"""Which attention kernels make up which ring step of one rank: from annotations, else from their order among hops.

ringprof's strategies name their steps (``ringprof::fwd/step=3/block``); other people name theirs, too
(``ring_step_fwd_3``). Where nobody did, a ring step is the attention that was launched between one hop and the next:
so do the public implementations go (ring-flash-attention, Transformer Engine, PyTorch's rotation by all-to-all), which
post the hop first and then compute what hides it.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np

from ringprof.analysis.kinds.kinds import ATTENTION, CODE
from ringprof.analysis.rank import Detail
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.trace.columns import NONE, Int64, Trace, among

PHASES = ("fwd", "bwd")

_OWN = re.compile(r"ringprof::(?P<phase>fwd|bwd)/step=(?P<step>[0-9]{1,6})/(?P<part>\w+)")
_OTHERS = re.compile(
    r"(?:\w+[./:])*(?:ring|cp|context_parallel)[_ -]?step[_ -]"
    r"(?P<phase>fwd|bwd|forward|backward)[_ =-]*(?P<step>[0-9]{1,6})",
    re.IGNORECASE,
)


class StepKey(NamedTuple):
    """One ring step, the same on every rank."""

    iteration: int
    phase: str
    """``fwd`` or ``bwd``."""
    call: int
    """Which attention call of the iteration and phase: a model has one a layer."""
    step: int


class StepBlocks(msgspec.Struct, frozen=True):
    """The attention kernels of one rank by ring step."""

    keys: tuple[StepKey, ...]
    """In the order of their launch."""
    row: Int64
    """Places in `TimedActivities` of the attention kernels that belong to a step."""
    slot: Int64
    """Index into ``keys`` for each of them."""
    order: Int64
    """When each was launched, as `launch_order` counts."""
    source: str
    """``ringprof``, ``annotation`` or ``order``."""


def launch_order(detail: Detail, rows: TimedActivities, exchanges: list[list[int]]) -> tuple[Int64, Int64]:
    """The order in which the CPU launched every one of ``rows`` and each exchange (lists of activities).

    Without launch records (CUDA graphs) an exchange counts before every activity that ends after it began: so the
    attention kernel beside it comes next.
    """
    launch, columns = detail.classified.launch, detail.classified.trace.activities
    attention = rows.activity[rows.of(*ATTENTION)]
    first = [min(exchange, key=lambda activity: int(launch[activity])) for exchange in exchanges]
    at = np.array(first, np.int64)
    if np.any(launch[attention] == NONE) or np.any(launch[at] == NONE):
        return columns.end_ns[rows.activity], columns.start_ns[at]
    return launch[rows.activity], launch[at]


# --- named steps ------------------------------------------------------------------------------------


class _Range(NamedTuple):
    start_ns: int
    end_ns: int
    thread: int
    phase: str
    step: int
    part: str


def named_blocks(detail: Detail, rows: TimedActivities, iteration: Int64, order: Int64) -> StepBlocks | None:
    """The steps that the trace names; None where it names none. ``iteration`` and ``order`` are of every row."""
    trace = detail.classified.trace
    for source, pattern in (("ringprof", _OWN), ("annotation", _OTHERS)):
        ranges = _ranges(trace, pattern)
        blocks = [place for place, item in enumerate(ranges) if item.part == "block"]
        if not blocks:
            continue
        flash = np.flatnonzero(rows.of(*ATTENTION))
        place = _launched_in(trace, detail.classified.launch[rows.activity[flash]], ranges, blocks)
        flash, place = flash[place != NONE], place[place != NONE]
        if len(flash):
            return _keyed(flash, place, _calls(ranges), ranges, iteration, order, source)
    return None


def _ranges(trace: Trace, pattern: re.Pattern[str]) -> list[_Range]:
    """The annotations that fit, by start."""
    matches = {index: found for index, name in enumerate(trace.names) if (found := pattern.fullmatch(name))}
    marks = trace.annotations
    wanted = np.flatnonzero(among(marks.name, np.array(list(matches), np.int32)))
    columns = (marks.start_ns[wanted], marks.end_ns[wanted], marks.thread[wanted], marks.name[wanted])
    result = []
    for start, end, thread, name in zip(*(column.tolist() for column in columns), strict=True):
        groups = matches[name].groupdict()
        phase = "bwd" if groups["phase"].lower().startswith("b") else "fwd"
        result.append(_Range(start, end, thread, phase, int(groups["step"]), groups.get("part", "block")))
    return result


def _calls(ranges: list[_Range]) -> list[int]:
    """The attention call of each range: a new one begins where the steps of a phase begin again."""
    calls = []
    number, last = dict.fromkeys(PHASES, 0), dict.fromkeys(PHASES, (-1, ""))
    for item in ranges:
        step, part = last[item.phase]
        again = item.step == step and part == "merge" and item.part == "block"
        number[item.phase] += item.step < step or again
        last[item.phase] = item.step, item.part
        calls.append(number[item.phase])
    return calls


def _launched_in(trace: Trace, launch: Int64, ranges: list[_Range], blocks: list[int]) -> Int64:
    """For each launch the block range on its thread that it lies in, as a place in ``ranges``; else `NONE`."""
    result = np.full(len(launch), NONE, np.int64)
    joined = launch != NONE
    at = np.where(joined, launch, 0)
    if not joined.any():
        return result
    for thread in {ranges[place].thread for place in blocks}:
        mine = np.array([place for place in blocks if ranges[place].thread == thread], np.int64)
        start = np.array([ranges[place].start_ns for place in mine], np.int64)
        end = np.array([ranges[place].end_ns for place in mine], np.int64)
        time = trace.launches.start_ns[at]
        found = np.searchsorted(start, time, side="right") - 1
        inside = joined & (trace.launches.thread[at] == thread) & (found >= 0) & (time < end[np.maximum(found, 0)])
        result[inside] = mine[found[inside]]
    return result


def _keyed(
    flash: Int64, place: Int64, calls: list[int], ranges: list[_Range], iteration: Int64, order: Int64, source: str
) -> StepBlocks:
    """Calls are counted from 0 in every iteration."""
    full = [
        StepKey(number, ranges[at].phase, calls[at], ranges[at].step)
        for number, at in zip(iteration[flash].tolist(), place.tolist(), strict=True)
    ]
    first: dict[tuple[int, str], int] = {}
    for key in full:
        known = first.setdefault((key.iteration, key.phase), key.call)
        first[key.iteration, key.phase] = min(known, key.call)
    named = [StepKey(number, phase, call - first[number, phase], step) for number, phase, call, step in full]
    return blocks_in_order(flash, named, order[flash], source)


def blocks_in_order(row: Int64, keys: list[StepKey], order: Int64, source: str) -> StepBlocks:
    """Kernels with their keys as `StepBlocks`."""
    sequence = np.argsort(order, kind="stable")
    slots = {key: slot for slot, key in enumerate(dict.fromkeys(keys[at] for at in sequence.tolist()))}
    slot = np.array([slots[keys[at]] for at in sequence.tolist()], np.int64)
    return StepBlocks(tuple(slots), row[sequence], slot, order[sequence], source)


# --- steps from the order of hops and attention -----------------------------------------------------


class AttentionRuns(msgspec.Struct, frozen=True):
    """Attention kernels that were launched with no hop between them."""

    row: Int64
    """Places in `TimedActivities`, in launch order."""
    order: Int64
    run: Int64
    """Number of the run that each belongs to, ascending."""
    hops_before: tuple[int, ...]
    """Of each run: how many hops were launched before it."""
    phase: tuple[str, ...]
    iteration: tuple[int, ...]


def runs_of(rows: TimedActivities, iteration: Int64, order: Int64, hops: Int64, ring_size: int) -> AttentionRuns:
    """The runs of one rank; ``hops`` is the launch order of its hops, ascending."""
    flash = np.flatnonzero(rows.of(*ATTENTION))
    flash = flash[np.argsort(order[flash], kind="stable")]
    backward = rows.kind[flash] == CODE["flash_bwd"]
    before, number = np.searchsorted(hops, order[flash]), iteration[flash]
    changes = (np.diff(before) != 0) | (np.diff(backward) != 0) | (np.diff(number) != 0)
    run = np.concatenate((np.zeros(min(len(flash), 1), np.int64), np.cumsum(changes)))
    run = _halved(run, backward, ring_size)
    first = np.unique(run, return_index=True)[1]
    return AttentionRuns(
        row=flash,
        order=order[flash],
        run=run,
        hops_before=tuple(before[first].tolist()),
        phase=tuple(PHASES[int(late)] for late in backward[first]),
        iteration=tuple(number[first].tolist()),
    )


def _halved(run: Int64, backward: Int64, ring_size: int) -> Int64:
    """Split runs that hold two ring steps: a pass's last step has no hop before it, so its kernels join the previous
    run, which then has twice the usual count. In a ring of two, every forward run is one.
    """
    starts, lengths = np.unique(run, return_index=True, return_counts=True)[1:]
    result = run.astype(np.int64)
    for late in (False, True):
        mine = np.flatnonzero(backward[starts] == late) if len(starts) else starts
        if not len(mine) or (late and ring_size == 2):
            continue
        usual = Counter(lengths[mine].tolist()).most_common(1)[0][0]
        twice = mine[lengths[mine] == (usual if ring_size == 2 else 2 * usual)]
        for at in twice[lengths[twice] % 2 == 0].tolist():
            result[starts[at] + lengths[at] // 2 :] += 1
    return result


def number_runs(runs: AttentionRuns, ring_size: int) -> list[StepKey]:
    """Each run of the rank with most of them as a step: ``ring_size`` to an attention call."""
    keys = []
    count: Counter[tuple[int, str]] = Counter()
    for number, phase in zip(runs.iteration, runs.phase, strict=True):
        call, step = divmod(count[number, phase], max(1, ring_size))
        count[number, phase] += 1
        keys.append(StepKey(number, phase, call, step))
    return keys


def number_like(runs: AttentionRuns, model: AttentionRuns, keys: list[StepKey]) -> list[StepKey] | None:
    """Each run as the step of the model's run that follows as many hops; None where the model has none like it."""
    places: dict[tuple[int, str, int], list[StepKey]] = {}
    for before, phase, number, key in zip(model.hops_before, model.phase, model.iteration, keys, strict=True):
        places.setdefault((number, phase, before), []).append(key)
    used: Counter[tuple[int, str, int]] = Counter()
    result = []
    for before, phase, number in zip(runs.hops_before, runs.phase, runs.iteration, strict=True):
        place = number, phase, before
        if used[place] >= len(places.get(place, ())):
            return None
        result.append(places[place][used[place]])
        used[place] += 1
    return result


def inferred_blocks(runs: AttentionRuns, keys: list[StepKey]) -> StepBlocks:
    """The kernels of the runs by step."""
    return blocks_in_order(runs.row, [keys[number] for number in runs.run.tolist()], runs.order, "order")
