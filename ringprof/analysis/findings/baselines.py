"""Metrics from the baselines of a recording: compute-only, communication-only and kernel-only iterations.

They show what overlap could gain, and how close the run comes to the speed of its attention blocks alone. Times are
medians over iterations of the slowest rank's time, as in the achieved rate. The solo time and metrics derived from it
are means over ranks, so that ranks with less work are not charged for waiting. All baselines are compared with ordinary
iterations that were interleaved with them, on equally hot devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from ringprof.analysis.rank import Rank
from ringprof.run import Baselines, slowest_median


class BaselineMetrics(msgspec.Struct, frozen=True):
    """Baselines over all ranks; times in nanoseconds."""

    rounds: int
    """Number of times that all kinds of iteration were run in turn."""
    iterations: int
    """Number of ordinary iterations, the smallest of any rank."""
    iteration_ns: float
    """Time of an ordinary iteration, interleaved with the baselines."""
    compute_only_ns: float | None
    """Time of an iteration that sends nothing; None for a single rank, which communicates nothing."""
    communication_only_ns: float | None
    """Time of an iteration whose attention kernel computes nothing; None for a single rank."""
    ideal_ns: float | None
    """The larger of compute-only and communication-only time, reached with perfect overlap; None for a single rank."""
    ideal_efficiency: float | None
    """ideal_ns / iteration_ns; None for a single rank."""
    solo_ns: float
    """Time of the attention blocks alone (kernel-only baseline): mean over ranks of each rank's median."""
    solo_tflops: float
    """FLOPs of all ranks' blocks over the sum of their solo times, in TFLOP/s."""
    of_solo: float
    """solo_ns / iteration_ns: share of the solo rate that the iteration reaches."""
    flash_slowdown: float | None
    """Attention kernels' time in the profiled run / solo time - 1, over ranks with a trace; None on CPU, and for a
    single rank."""


def baseline_metrics(controls: Baselines | None, ranks: Sequence[Rank]) -> BaselineMetrics | None:
    """Compute the metrics of the baselines; None where none were recorded, or a time is missing or zero."""
    if controls is None:
        return None
    single_rank = len(controls.solo_ns) == 1
    ordinary_ns, compute_only, communication_only = (
        slowest_median(times or [])
        for times in (controls.ordinary_ns, controls.compute_only_ns, controls.communication_only_ns)
    )
    solo_ns = [median(times) if times else 0.0 for times in controls.solo_ns]
    complete = len(solo_ns) == len(controls.solo_flops) and min(solo_ns, default=0) > 0
    if not (ordinary_ns and complete):
        return None
    ideal_ns, mean_solo_ns = None, fmean(solo_ns)
    if single_rank:
        # Older recordings of a single rank hold these baselines, too, although nothing is communicated.
        compute_only = communication_only = None
    elif compute_only and communication_only:
        ideal_ns = max(compute_only, communication_only)
    else:
        return None
    return BaselineMetrics(
        rounds=controls.rounds,
        iterations=min(len(times) for times in controls.ordinary_ns),
        iteration_ns=ordinary_ns,
        compute_only_ns=compute_only,
        communication_only_ns=communication_only,
        ideal_ns=ideal_ns,
        ideal_efficiency=ideal_ns / ordinary_ns if ideal_ns else None,
        solo_ns=mean_solo_ns,
        solo_tflops=sum(controls.solo_flops) / sum(solo_ns) / 1e3,
        of_solo=mean_solo_ns / ordinary_ns,
        flash_slowdown=None if single_rank else _flash_slowdown(ranks, solo_ns),
    )


def _flash_slowdown(ranks: Sequence[Rank], solo_ns: Sequence[float]) -> float | None:
    """Compute how much slower attention kernels are in the profiled run than alone, as a share of the solo time.

    None where the window is not whole profiled iterations, which have other blocks. None on CPU, too: ranks share
    cores there, and communication takes time from other ranks' kernels.
    """
    in_run_ns, solo_total_ns = 0.0, 0.0
    for rank in ranks:
        if rank.on_cpu or not rank.iteration_ns or rank.rank >= len(solo_ns):
            return None
        in_run_ns += rank.breakdown.flash_ns
        solo_total_ns += solo_ns[rank.rank] * len(rank.iteration_ns)
    return in_run_ns / solo_total_ns - 1.0 if in_run_ns and solo_total_ns else None
