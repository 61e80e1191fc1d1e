"""Checks of the workload stated by the user of `ringprof.capture` against the FLOPs that the recorder counted."""

from __future__ import annotations

import msgspec

from ringprof.common.formatting import three_digits
from ringprof.run import Run
from ringprof.trace.columns import Notice

_TOLERANCE = 0.02
"""Largest relative difference between stated and counted FLOPs that is not reported."""


def counted_over_needed(run: Run) -> float | None:
    """Divide the FLOPs that the attention kernels counted by those that the workload needs, over all ranks.

    None for a run of `ringprof record`, which checks this itself, and where either number is unknown.
    """
    counted, needed = run.block_flops(), run.needed_flops()
    if not run.captured or not counted or not needed:
        return None
    return sum(counted.values()) / needed


def workload_fits(run: Run) -> bool:
    """Return whether the counted FLOPs can come from the stated workload; true where nothing was counted.

    Fewer FLOPs never can. More can, up to one more forward pass of every layer: activation checkpointing.
    """
    ratio = counted_over_needed(run)
    return ratio is None or 1 - _TOLERANCE <= ratio <= (1 + _TOLERANCE) * _most_recomputed(run)


def workload_problems(run: Run) -> list[Notice]:
    """List the reasons to doubt the rates of a captured block; empty for a run of `ringprof record`."""
    if not run.captured or run.workload is None:
        return []
    ratio = counted_over_needed(run)
    if ratio is not None:
        return [] if abs(ratio - 1) <= _TOLERANCE else [_flops_differ(run, ratio)]
    if run.workload_ranks is not None or run.topology.world_size == 1:
        return []
    message = (
        f"TFLOP/s assume that all {run.topology.world_size} ranks share the workload; with data parallelism they are "
        "too low: pass strategy= to capture, or the ranks that share it as group="
    )
    return [Notice("workload_ranks_unknown", message)]


def _flops_differ(run: Run, ratio: float) -> Notice:
    """Describe the difference between stated and counted FLOPs, with advice; ``ratio`` is counted over stated."""
    counted, needed = sum((run.block_flops() or {}).values()), run.needed_flops() or 0
    group, world = run.sharing_ranks, run.topology.world_size
    advice = f"state the work of one group of {group} rank{'s' if group > 1 else ''}"
    if group == world:
        advice = "correct its batch, heads, layers or steps"
    if run.workload_ranks is None and world > 1:
        advice = "pass strategy=, state the work of one context-parallel group"
    operator = "recurrence" if run.workload is not None and run.workload.recurrent else "attention"
    recomputed = _most_recomputed(run)
    if 1 < ratio <= (1 + _TOLERANCE) * recomputed:
        advice = f"checkpointing explains up to {three_digits(recomputed)} times, else correct it"
    message = (
        f"{operator} FLOPs of {world} rank{'s' if world > 1 else ''} ({group} per workload): {_flop(needed)} stated, "
        f"{_flop(counted)} counted ({three_digits(ratio)} times); TFLOP/s use the stated workload: {advice}"
    )
    return Notice("workload_flops_differ", message)


def _most_recomputed(run: Run) -> float:
    """Return the FLOPs of an iteration that computes each forward pass twice, over those that it needs."""
    work = run.workload
    if work is None or not work.backward:
        return 1.0
    once = msgspec.structs.replace(work, backward=False).exact_flops()
    return 1 + once / work.exact_flops()


def _flop(flops: int) -> str:
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= size:
            return f"{three_digits(flops / size)} {unit}"
    return f"{flops:,} FLOP"
