"""What the controls of a recording say: what overlap is worth, and how near the run is to its blocks alone.

Times are medians over iterations of the slowest rank's, as in the achieved rate; the solo time and what follows from it
are means over ranks, since ranks with less work must not be charged for waiting. Everything is set against ordinary
iterations that were timed in turns with the controls, on equally hot devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from ringprof.analysis.rank import Rank
from ringprof.run import Baselines, slowest_median


class BaselineMetrics(msgspec.Struct, frozen=True):
    """The controls over all ranks; times in nanoseconds."""

    rounds: int
    iterations: int
    """Of each kind."""
    iteration_ns: float
    """An ordinary iteration, in turns with the controls."""
    compute_only_ns: float | None
    """None, as the next three, for one rank alone: nothing is communicated."""
    communication_only_ns: float | None
    ideal_ns: float | None
    """The larger of the two."""
    ideal_efficiency: float | None
    """ideal / iteration."""
    solo_ns: float
    """The same blocks alone: mean over ranks of each rank's median."""
    solo_tflops: float
    """FLOPs of all ranks' blocks over the sum of their solo times."""
    of_solo: float
    """solo / iteration: the share of the solo rate that the iteration reaches."""
    flash_slowdown: float | None
    """Attention kernels' time in the profiled run / solo time - 1, over ranks with a trace; None on CPU, and for one
    rank alone."""


def baseline_metrics(controls: Baselines | None, ranks: Sequence[Rank]) -> BaselineMetrics | None:
    """The figures; None where nothing was controlled, or a time is missing or zero."""
    if controls is None:
        return None
    alone = len(controls.solo_ns) == 1
    ordinary, compute, communication = (
        slowest_median(times or [])
        for times in (controls.ordinary_ns, controls.compute_only_ns, controls.communication_only_ns)
    )
    solo = [median(times) if times else 0.0 for times in controls.solo_ns]
    complete = len(solo) == len(controls.solo_flops) and min(solo, default=0) > 0
    if not (ordinary and complete):
        return None
    ideal, mean_solo = None, fmean(solo)
    if alone:
        # Runs of before one rank's controls were left out have them, too.
        compute = communication = None
    elif compute and communication:
        ideal = max(compute, communication)
    else:
        return None
    return BaselineMetrics(
        rounds=controls.rounds,
        iterations=min(len(times) for times in controls.ordinary_ns),
        iteration_ns=ordinary,
        compute_only_ns=compute,
        communication_only_ns=communication,
        ideal_ns=ideal,
        ideal_efficiency=ideal / ordinary if ideal else None,
        solo_ns=mean_solo,
        solo_tflops=sum(controls.solo_flops) / sum(solo) / 1e3,
        of_solo=mean_solo / ordinary,
        flash_slowdown=None if alone else _flash_slowdown(ranks, solo),
    )


def _flash_slowdown(ranks: Sequence[Rank], solo_ns: Sequence[float]) -> float | None:
    """Over whole profiled iterations only: a part of one, or another window, has other blocks. Not on CPU, where ranks
    share cores and communication takes its time from other ranks' kernels."""
    run, alone = 0.0, 0.0
    for rank in ranks:
        if rank.on_cpu or not rank.iteration_ns or rank.rank >= len(solo_ns):
            return None
        run += rank.breakdown.flash_ns
        alone += solo_ns[rank.rank] * len(rank.iteration_ns)
    return run / alone - 1.0 if run and alone else None
