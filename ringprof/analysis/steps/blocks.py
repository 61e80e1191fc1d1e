"""Attention kernels of one rank by ring step, from annotations, else from the order of attention kernels and hops.

ringprof's strategies annotate their steps (``ringprof::fwd/step=3/block``), and so does other software
(``ring_step_fwd_3``). Without such annotations, a ring step is the attention launched between one hop and the next.
Public implementations work this way (ring-flash-attention, Transformer Engine, PyTorch's rotation by all-to-all): they
post a hop first and then compute the block that hides it.
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
from ringprof.trace.columns import NONE, Int64, Trace, among, enclosing_rows

PHASES = ("fwd", "bwd")

_RINGPROF_RANGE = re.compile(r"ringprof::(?P<phase>fwd|bwd)/step=(?P<step>[0-9]{1,6})/(?P<part>\w+)")
_FOREIGN_RANGE = re.compile(
    r"(?:\w+[./:])*(?:ring|cp|context_parallel)[_ -]?step[_ -]"
    r"(?P<phase>fwd|bwd|forward|backward)[_ =-]*(?P<step>[0-9]{1,6})",
    re.IGNORECASE,
)


class StepKey(NamedTuple):
    """Identifier of one ring step, equal on every rank."""

    iteration: int
    phase: str
    """``fwd`` or ``bwd``."""
    call: int
    """Index of the attention call within the iteration and phase; a model has one call per layer."""
    step: int


class StepBlocks(msgspec.Struct, frozen=True):
    """Attention kernels of one rank, assigned to ring steps."""

    keys: tuple[StepKey, ...]
    """Ring steps, in launch order."""
    row: Int64
    """Indices into `TimedActivities` of the attention kernels that belong to a step."""
    slot: Int64
    """Index into ``keys`` for each of these kernels."""
    order: Int64
    """Launch position of each of these kernels, from `launch_order`."""
    source: str
    """Source of the steps: ``ringprof``, ``annotation`` or ``order``."""


def launch_order(detail: Detail, rows: TimedActivities, exchanges: list[list[int]]) -> tuple[Int64, Int64]:
    """Return launch positions of every row of ``rows`` and of each exchange (a list of activities).

    Without launch records (CUDA graphs), an exchange counts before every activity that ends after the exchange began.
    So the attention kernel that overlaps the exchange comes next.
    """
    launch, columns = detail.classified.launch, detail.classified.trace.activities
    attention = rows.activity[rows.of(*ATTENTION)]
    first = [min(exchange, key=lambda activity: int(launch[activity])) for exchange in exchanges]
    first_activity = np.array(first, np.int64)
    if np.any(launch[attention] == NONE) or np.any(launch[first_activity] == NONE):
        return columns.end_ns[rows.activity], columns.start_ns[first_activity]
    return launch[rows.activity], launch[first_activity]


# --- named steps ------------------------------------------------------------------------------------


class _Range(NamedTuple):
    """One step annotation of a CPU thread."""

    start_ns: int
    end_ns: int
    thread: int
    phase: str
    step: int
    part: str


def named_blocks(detail: Detail, rows: TimedActivities, iteration: Int64, order: Int64) -> StepBlocks | None:
    """Group attention kernels by the trace's step annotations; None without such annotations.

    ``iteration`` and ``order`` have one element per row of ``rows``.
    """
    trace = detail.classified.trace
    for source, pattern in (("ringprof", _RINGPROF_RANGE), ("annotation", _FOREIGN_RANGE)):
        ranges = _ranges(trace, pattern)
        block_ranges = [range_index for range_index, item in enumerate(ranges) if item.part == "block"]
        if not block_ranges:
            continue
        launch, calls_of_host = detail.classified.launch, trace.launches
        attention_rows = np.flatnonzero(rows.of(*ATTENTION) & (launch[rows.activity] != NONE))
        call = launch[rows.activity[attention_rows]]
        start, end, thread = (
            np.array([getattr(ranges[index], name) for index in block_ranges], np.int64)
            for name in ("start_ns", "end_ns", "thread")
        )
        enclosing = enclosing_rows((start, end, thread), calls_of_host.start_ns[call], calls_of_host.thread[call])
        attention_rows = attention_rows[enclosing != NONE]
        range_index = np.array(block_ranges, np.int64)[enclosing[enclosing != NONE]]
        if len(attention_rows):
            # A new call begins where the steps of a phase start over.
            calls = []
            count, previous = dict.fromkeys(PHASES, 0), dict.fromkeys(PHASES, (-1, ""))
            for item in ranges:
                step, part = previous[item.phase]
                repeats = item.step == step and part == "merge" and item.part == "block"
                count[item.phase] += item.step < step or repeats
                previous[item.phase] = item.step, item.part
                calls.append(count[item.phase])
            # Calls are counted from 0 in every iteration.
            absolute_keys = [
                StepKey(number, ranges[index].phase, calls[index], ranges[index].step)
                for number, index in zip(iteration[attention_rows].tolist(), range_index.tolist(), strict=True)
            ]
            first_call: dict[tuple[int, str], int] = {}
            for key in absolute_keys:
                lowest = first_call.setdefault((key.iteration, key.phase), key.call)
                first_call[key.iteration, key.phase] = min(lowest, key.call)
            keys = [
                StepKey(number, phase, index - first_call[number, phase], step)
                for number, phase, index, step in absolute_keys
            ]
            return blocks_in_order(attention_rows, keys, order[attention_rows], source)
    return None


def _ranges(trace: Trace, pattern: re.Pattern[str]) -> list[_Range]:
    """Return the annotations that match ``pattern``, sorted by start."""
    matches = {index: match for index, name in enumerate(trace.names) if (match := pattern.fullmatch(name))}
    annotations = trace.annotations
    rows = np.flatnonzero(among(annotations.name, np.array(list(matches), np.int32)))
    columns = (annotations.start_ns[rows], annotations.end_ns[rows], annotations.thread[rows], annotations.name[rows])
    result = []
    for start, end, thread, name in zip(*(column.tolist() for column in columns), strict=True):
        fields = matches[name].groupdict()
        phase = "bwd" if fields["phase"].lower().startswith("b") else "fwd"
        result.append(_Range(start, end, thread, phase, int(fields["step"]), fields.get("part", "block")))
    return result


def blocks_in_order(row: Int64, keys: list[StepKey], order: Int64, source: str) -> StepBlocks:
    """Build `StepBlocks` from kernels and their keys, sorted by launch order."""
    sequence = np.argsort(order, kind="stable")
    slots = {key: slot for slot, key in enumerate(dict.fromkeys(keys[index] for index in sequence.tolist()))}
    slot = np.array([slots[keys[index]] for index in sequence.tolist()], np.int64)
    return StepBlocks(tuple(slots), row[sequence], slot, order[sequence], source)


# --- steps from the order of hops and attention -----------------------------------------------------


class AttentionRuns(msgspec.Struct, frozen=True):
    """Attention kernels of one rank in runs: a run is launched with no hop in between."""

    row: Int64
    """Indices into `TimedActivities`, in launch order."""
    order: Int64
    run: Int64
    """Number of each kernel's run, ascending."""
    hops_before: tuple[int, ...]
    """Number of hops launched before each run."""
    phase: tuple[str, ...]
    iteration: tuple[int, ...]


def attention_runs(rows: TimedActivities, iteration: Int64, order: Int64, hops: Int64, ring_size: int) -> AttentionRuns:
    """Group one rank's attention kernels into runs; ``hops`` is the launch order of its hops, ascending."""
    attention_rows = np.flatnonzero(rows.of(*ATTENTION))
    attention_rows = attention_rows[np.argsort(order[attention_rows], kind="stable")]
    backward = rows.kind[attention_rows] == CODE["flash_bwd"]
    hops_before, iterations = np.searchsorted(hops, order[attention_rows]), iteration[attention_rows]
    changes = (np.diff(hops_before) != 0) | (np.diff(backward) != 0) | (np.diff(iterations) != 0)
    run = np.concatenate((np.zeros(min(len(attention_rows), 1), np.int64), np.cumsum(changes)))
    # Split runs that hold two ring steps. A pass's last step has no hop before it, so its kernels join the previous
    # run, which then has twice the usual number of kernels. In a ring of two, every forward run holds two steps.
    starts, lengths = np.unique(run, return_index=True, return_counts=True)[1:]
    result = run.astype(np.int64)
    for is_backward in (False, True):
        phase_runs = np.flatnonzero(backward[starts] == is_backward) if len(starts) else starts
        if not len(phase_runs) or (is_backward and ring_size == 2):
            continue
        usual_length = Counter(lengths[phase_runs].tolist()).most_common(1)[0][0]
        double_runs = phase_runs[lengths[phase_runs] == (usual_length if ring_size == 2 else 2 * usual_length)]
        for index in double_runs[lengths[double_runs] % 2 == 0].tolist():
            result[starts[index] + lengths[index] // 2 :] += 1
    run = result
    first = np.unique(run, return_index=True)[1]
    return AttentionRuns(
        row=attention_rows,
        order=order[attention_rows],
        run=run,
        hops_before=tuple(hops_before[first].tolist()),
        phase=tuple(PHASES[int(late)] for late in backward[first]),
        iteration=tuple(iterations[first].tolist()),
    )


def number_runs(runs: AttentionRuns, ring_size: int) -> list[StepKey]:
    """Number the runs of the rank with the most runs as steps: ``ring_size`` steps per attention call."""
    keys = []
    count: Counter[tuple[int, str]] = Counter()
    for iteration, phase in zip(runs.iteration, runs.phase, strict=True):
        call, step = divmod(count[iteration, phase], max(1, ring_size))
        count[iteration, phase] += 1
        keys.append(StepKey(iteration, phase, call, step))
    return keys


def number_runs_like(runs: AttentionRuns, model: AttentionRuns, keys: list[StepKey]) -> list[StepKey] | None:
    """Give each run the step of the model's run that follows as many hops; None where the model has no such run."""
    keys_of_model: dict[tuple[int, str, int], list[StepKey]] = {}
    for hops_before, phase, iteration, key in zip(model.hops_before, model.phase, model.iteration, keys, strict=True):
        keys_of_model.setdefault((iteration, phase, hops_before), []).append(key)
    used: Counter[tuple[int, str, int]] = Counter()
    result = []
    for hops_before, phase, iteration in zip(runs.hops_before, runs.phase, runs.iteration, strict=True):
        position = iteration, phase, hops_before
        if used[position] >= len(keys_of_model.get(position, ())):
            return None
        result.append(keys_of_model[position][used[position]])
        used[position] += 1
    return result


def inferred_blocks(runs: AttentionRuns, keys: list[StepKey]) -> StepBlocks:
    """Build `StepBlocks` from runs; ``keys`` has the step of each run."""
    return blocks_in_order(runs.row, [keys[index] for index in runs.run.tolist()], runs.order, "order")
