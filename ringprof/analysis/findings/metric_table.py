"""The table of metrics: the JSON report, pages, frames, comparisons and ``--fail-if`` take their metrics from here.

A metric of a run is one row of `METRICS`; the times of a rank are in time_table.py. What a metric means is defined in
docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Flag, auto
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ringprof.run import Baselines, slowest

if TYPE_CHECKING:
    from ringprof.analysis.findings.findings import Findings

MS = 1e6
"""Nanoseconds per millisecond."""


# --- metrics of a run -------------------------------------------------------------------------------


class Use(Flag):
    """Where a metric is shown."""

    JSON = auto()
    """In ``summary`` of the JSON report."""
    CONDITIONS = auto()
    """In conditions of ``--fail-if``; all metrics of comparisons are known there, too."""
    COMPARISONS = auto()
    EVERYWHERE = JSON | CONDITIONS | COMPARISONS


class MetricRow(NamedTuple):
    """One metric of a run."""

    name: str
    unit: str
    """``ms``, ``TFLOP/s``, ``GB/s``, ``tokens/s``, ``share`` (0..1), ``MiB``, ``bytes`` or ``count``.

    ``object`` stands for several values by name, which only the JSON report has.
    """
    use: Use
    value: Callable[[Findings], Any]
    """Function that returns the value; None where it is not known."""
    higher_is_better: bool | None = None
    """Whether a higher value is better; None where neither direction is better, or no comparison shows the metric."""
    tile: str = ""
    """Text below the value at the top of a page; empty where the metric is not shown there."""
    repeated: Callable[[Findings], Sequence[float]] | None = None
    """Function that returns the repeated measurements behind the value; None where it was measured once."""


def _iteration_times(findings: Findings) -> list[float]:
    """Return the milliseconds of the slowest rank in each iteration timed without the profiler."""
    run = findings.attribution.run
    return [time / MS for time in slowest(run.timings.iterations_ns)] if run and run.timings else []


def _iteration_rates(findings: Findings) -> list[float]:
    """Return the TFLOP/s of each timed iteration; a captured block was timed under the profiler only."""
    run = findings.attribution.run
    assert run is not None
    times = slowest(run.timings.iterations_ns) if run.timings else []
    times = times or (slowest(run.profiled.iterations_ns) if run.profiled else [])
    return [rate for time in times if (rate := run.tflops(time)) is not None]


def _profiled_times(findings: Findings) -> list[float]:
    """Return the milliseconds of the slowest rank in each iteration under the profiler.

    Empty where iterations were timed without it, and unless all traces mark the same two or more iterations.
    """
    times_by_rank = [rank.iteration_ns for rank in findings.attribution.ranks]
    times = slowest(times_by_rank)
    is_timed = findings.summary.rates.slowest_median_ns is not None
    if is_timed or findings.attribution.partial_window or len({*map(len, times_by_rank)}) > 1 or len(times) < 2:
        return []
    return [time / MS for time in times]


def _shares_by_round(findings: Findings, baselines: Callable[[Baselines], list[Sequence[float]]]) -> list[float]:
    """Return the longest of the baselines' times over that of ordinary iterations, by round.

    All baselines ran in turn in every round. ``baselines`` returns the times of each by iteration.
    """
    run = findings.attribution.run
    assert run is not None and run.controls is not None
    rounds = run.controls.rounds or 1
    ordinary, *sides = (
        [float(np.median(chunk)) for chunk in np.array_split(times, rounds) if len(chunk)]
        for times in (slowest(run.controls.ordinary_ns), *baselines(run.controls))
    )
    return [max(times) / iteration for iteration, *times in zip(ordinary, *sides, strict=False)]


def _solo_shares(findings: Findings) -> list[float]:
    """Return the time of the attention blocks alone as a share of an ordinary iteration, by round."""
    return _shares_by_round(
        findings, lambda controls: [[fmean(times) for times in zip(*controls.solo_ns, strict=True)]]
    )


def _ideal_shares(findings: Findings) -> list[float]:
    """Return the time with perfect overlap as a share of an ordinary iteration, by round."""
    return _shares_by_round(
        findings,
        lambda controls: [slowest(controls.compute_only_ns or []), slowest(controls.communication_only_ns or [])],
    )


def _baselines(findings: Findings, name: str) -> float | None:
    """Return a metric of the baselines; None where the run has none."""
    return getattr(findings.summary.rates.controls, name, None)


def _scaled(value: float | None, unit: float) -> float | None:
    """Convert a value to a larger unit."""
    return None if value is None else value / unit


_COMPARED = Use.CONDITIONS | Use.COMPARISONS
RECORDED = (
    MetricRow("iteration_ms", "ms", Use.COMPARISONS, lambda f: _scaled(f.summary.rates.slowest_median_ns, MS),
              higher_is_better=False, repeated=_iteration_times),
    MetricRow("tflops", "TFLOP/s", Use.EVERYWHERE, lambda f: f.summary.rates.tflops,
              higher_is_better=True, tile="achieved, per device", repeated=_iteration_rates),
    MetricRow("tflops_quantiles", "object", Use.JSON, lambda f: f.summary.rates.tflops_quantiles),
    MetricRow("iterations_timed", "count", Use.JSON, lambda f: f.summary.rates.iterations_timed),
    MetricRow("peak_memory_mib", "MiB", Use.COMPARISONS, lambda f: _scaled(f.summary.rates.peak_memory_bytes, 1 << 20),
              higher_is_better=False),
    MetricRow("profiled_iteration_ms", "ms", Use.COMPARISONS,
              lambda f: median(times) if (times := _profiled_times(f)) else None,
              higher_is_better=False, repeated=_profiled_times),
)  # fmt: skip
"""Metrics that the recorder measured. The three tables are in the order of the JSON report and of a page's tiles."""
RATES = (
    MetricRow("block_tflops", "TFLOP/s", Use.EVERYWHERE, lambda f: f.summary.rates.block_tflops,
              higher_is_better=True, tile="attention kernels in the run"),
    MetricRow("solo_tflops", "TFLOP/s", Use.EVERYWHERE, lambda f: f.summary.rates.solo_tflops,
              higher_is_better=True, tile="the same blocks alone"),
    MetricRow("of_solo", "share", _COMPARED, lambda f: _baselines(f, "of_solo"),
              higher_is_better=True, repeated=_solo_shares),
    MetricRow("ideal_efficiency", "share", _COMPARED, lambda f: _baselines(f, "ideal_efficiency"),
              higher_is_better=True, repeated=_ideal_shares),
    MetricRow("mfu", "share", _COMPARED, lambda f: f.step_rates and f.step_rates.mfu, higher_is_better=True),
    MetricRow("flash_slowdown", "share", Use.CONDITIONS, lambda f: _baselines(f, "flash_slowdown")),
    MetricRow("controls", "object", Use.JSON, lambda f: msgspec.to_builtins(f.summary.rates.controls)),
    MetricRow("profiler_overhead", "share", Use.JSON | Use.CONDITIONS, lambda f: f.summary.rates.profiler_overhead),
)  # fmt: skip
"""Rates, and metrics of the baselines."""
SHARES = (
    MetricRow("exposed_comm_share", "object", Use.JSON, lambda f: {
        "mean": f.summary.exposed_mean, "worst": f.summary.exposed_worst, "rank": f.summary.exposed_worst_rank}),
    MetricRow("exposed_comm", "share", _COMPARED, lambda f: f.summary.exposed_mean,
              higher_is_better=False, tile="exposed communication, of the mean wall"),
    MetricRow("overlap_ratio", "share", Use.EVERYWHERE, lambda f: f.summary.overlap_ratio,
              higher_is_better=True, tile="of communication hidden"),
    MetricRow("other_share", "share", Use.JSON | Use.CONDITIONS, lambda f: f.summary.other_share),
    MetricRow("iterations", "count", Use.JSON, lambda f: f.summary.iterations),
    MetricRow("window_iterations", "count", Use.JSON, lambda f: f.summary.window_iterations),
    MetricRow("slowest_excess", "share", Use.CONDITIONS, lambda f: f.summary.slowest_excess),
    MetricRow("shapes_known", "share", Use.CONDITIONS, lambda f: f.step_rates and f.step_rates.coverage),
    MetricRow("peak_memory_bytes", "bytes", Use.CONDITIONS, lambda f: f.summary.rates.peak_memory_bytes,
              tile="peak memory per device"),
    MetricRow("warnings", "count", Use.CONDITIONS, lambda f: sum(notice.count for notice in f.attribution.warnings)),
    MetricRow("tokens_per_second", "tokens/s", Use.CONDITIONS, lambda f: f.inference and f.inference.tokens_per_second),
    MetricRow("read_gbps", "GB/s", Use.CONDITIONS, lambda f: f.inference and f.inference.read_gbps),
)  # fmt: skip
"""Shares of the time, and what conditions know beside."""
METRICS = RECORDED + RATES + SHARES
