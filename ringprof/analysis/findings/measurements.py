"""Measurements, as a comparison needs them, from the findings of recorded runs and traces."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean, median

import numpy as np

from ringprof.analysis.findings.baselines import BaselineMetrics
from ringprof.analysis.findings.conditions import IDLE_METRICS, metrics_of
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.metric import WATERFALL_PREFIX, Measurement, Metric
from ringprof.analysis.findings.same_work import evidence_of
from ringprof.analysis.findings.step_rates import step_rates_of
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.run import Baselines, Run, Workload, slowest
from ringprof.trace.columns import NOTES

MS = 1e6
"""Nanoseconds per millisecond."""
_MIB = 1 << 20


def measurement_of_run(label: str, findings: Findings) -> Measurement:
    """Return the measurement of a recorded run, or of traces without ``run.json``."""
    run, summary = findings.attribution.run, findings.summary
    # Rates, memory and baselines cover whole iterations: they would be misread beside a part of an iteration.
    whole_run = run if not findings.attribution.partial_window else None
    metrics = _timed_metrics(whole_run, summary) if whole_run is not None else {}
    if "iteration_ms" not in metrics:
        metrics |= _marked_iterations(findings)
    iterations = summary.times_divisor
    for part in summary.parts:
        metrics[f"{part.name}_ms"] = _time_metric(part.mean_ns / iterations)
    report_metrics = metrics_of(findings)
    idle_times = {name: report_metrics[f"{name}_ns"] for name in IDLE_METRICS if f"{name}_ns" in report_metrics}
    metrics |= {f"{name}_ms": _time_metric(time / iterations) for name, time in idle_times.items()}
    metrics["exposed_comm"] = Metric(summary.exposed_mean, "share", higher_is_better=False)
    if summary.overlap_ratio is not None:
        metrics["overlap_ratio"] = Metric(summary.overlap_ratio, "share", higher_is_better=True)
    if summary.rates.block_tflops is not None:
        metrics["block_tflops"] = Metric(summary.rates.block_tflops, "TFLOP/s", higher_is_better=True)
    if whole_run is not None and whole_run.controls is not None and summary.rates.controls is not None:
        metrics |= _baseline_metrics(whole_run.controls, summary.rates.controls)
    metrics |= _step_metrics(findings)
    time_of_kind = {row.kind: row.time_ns / iterations for row in summary.kinds}
    metrics |= {f"{kind}_ms": _time_metric(time_of_kind[kind]) for kind in KINDS if kind in time_of_kind}
    metrics |= {
        f"{WATERFALL_PREFIX}{part.part}_ms": _time_metric(part.time_ns / iterations)
        for part in findings.waterfall.parts
    }
    settings = _run_settings(run, summary.window_iterations) if run is not None else {}
    device_names = summary.devices or (tuple(dict.fromkeys(run.environment.devices)) if run is not None else ())
    devices = ", ".join(device_names) or None
    warnings = tuple(
        f"{warning.message} [{warning.code}]" for warning in findings.attribution.warnings if warning.code not in NOTES
    )
    return Measurement(
        label=label,
        source="trace" if run is None else "run",
        settings=settings | {"device": devices},
        figures=metrics,
        warnings=warnings,
        others={name: value for name, value in report_metrics.items() if name not in metrics},
        created=(run.created,) if run is not None else (),
        evidence=evidence_of(findings, iterations),
        times_are_of=findings.attribution.times_are_of,
    )


def _run_settings(run: Run, iterations: int | None) -> dict[str, str | None]:
    """Return the settings of a run as text; ``iterations``: number in the window, None where it is not known."""
    settings: dict[str, str | None] = {"world_size": str(run.topology.world_size)}
    if run.workload is not None:
        settings |= _workload_settings(run.workload)
        # Batch and steps count per iteration and over all ranks, so that captures of different sizes stay comparable.
        settings["batch"] = str(Fraction(run.workload.batch * run.topology.world_size, run.sharing_ranks))
        settings |= _unless_one("steps", Fraction(run.workload.steps, iterations or 1 if run.captured else 1))
    if run.strategy is not None:
        settings["strategy"] = run.strategy.name
        settings["hops"] = run.strategy.hops
        settings |= {f"-p {key}": str(value) for key, value in sorted(run.strategy.params.items())}
    settings["kernel"] = run.kernel
    settings["ranks_per_host"] = str(run.topology.ranks_per_host)
    versions = run.environment.versions
    return settings | {name: versions[name] for name in ("torch", "nccl") if name in versions}


def _workload_settings(work: Workload) -> dict[str, str | None]:
    """Return the settings of a workload as text; defaults that add nothing are left out."""
    return {
        "seq": str(work.seq),
        **({} if work.kv_length is None else {"phase": work.phase, "kv_length": str(work.kv_length)}),
        "batch": str(work.batch),
        "heads": str(work.heads),
        "kv_heads": str(work.kv_heads),
        "head_dim": str(work.head_dim),
        "causal": str(work.causal).lower(),
        **({} if work.mask().plain else {"mask": f"{work.mask()}: {work.mask().area(work.seq)} pairs"}),
        **({} if work.sequences is None else {"sequences": ", ".join(map(str, work.sequences))}),
        **({} if work.layer is None else {"layer": str(work.layer)}),
        **({"v_head_dim": str(work.v_head_dim)} if work.v_head_dim else {}),
        **({"scores": ", ".join(work.extras())} if work.extras() else {}),
        "dtype": work.dtype,
        "passes": "forward and backward" if work.backward else "forward",
        **_unless_one("layers", work.layers),
    }


def _unless_one(name: str, count: int | Fraction) -> dict[str, str | None]:
    """Return a setting for a count; empty where it is 1."""
    return {} if count == 1 else {name: str(count)}


def _timed_metrics(run: Run, summary: Summary) -> dict[str, Metric]:
    """Return the metrics that the recorder measured: iteration time, rate and peak memory.

    Each iteration counts with its slowest rank's time, without the profiler where that was timed.
    """
    metrics: dict[str, Metric] = {}
    rates = summary.rates
    slowest_times = slowest(run.timings.iterations_ns) if run.timings else []
    if rates.slowest_median_ns is not None:
        repeated = (tuple(time / MS for time in slowest_times),)
        metrics["iteration_ms"] = Metric(rates.slowest_median_ns / MS, "ms", repeated, False, depends_on_work=True)
    if rates.tflops is not None:
        # A captured block was timed under the profiler only.
        rated_times = slowest_times or (slowest(run.profiled.iterations_ns) if run.profiled else [])
        repeated = (tuple(rate for time in rated_times if (rate := run.tflops(time)) is not None),)
        metrics["tflops"] = Metric(rates.tflops, "TFLOP/s", repeated, True)
    if rates.peak_memory_bytes is not None:
        metrics["peak_memory_mib"] = Metric(
            rates.peak_memory_bytes / _MIB, "MiB", higher_is_better=False, depends_on_work=True
        )
    return metrics


def _marked_iterations(findings: Findings) -> dict[str, Metric]:
    """Return the iteration time under the profiler; empty unless all traces mark the same two or more iterations.

    Each iteration counts with its slowest rank's time.
    """
    times_by_rank = [rank.iteration_ns for rank in findings.attribution.ranks]
    slowest_times = slowest(times_by_rank)
    if findings.attribution.partial_window or len({*map(len, times_by_rank)}) > 1 or len(slowest_times) < 2:
        return {}
    times_ms = tuple(time / MS for time in slowest_times)
    return {"profiled_iteration_ms": Metric(median(times_ms), "ms", (times_ms,), False, depends_on_work=True)}


def _step_metrics(findings: Findings) -> dict[str, Metric]:
    """Return the MFU and the rates of attention and matrix products, computed from recorded shapes."""
    step_rates = step_rates_of(findings.attribution)
    if step_rates is None:
        return {}
    metrics = {} if step_rates.mfu is None else {"mfu": Metric(step_rates.mfu, "share", higher_is_better=True)}
    rates = {f"{row.part}_tflops": row.tflops for row in step_rates.parts}
    return metrics | {
        name: Metric(rate, "TFLOP/s", higher_is_better=True) for name, rate in rates.items() if rate is not None
    }


def _baseline_metrics(controls: Baselines, baselines: BaselineMetrics) -> dict[str, Metric]:
    """Return the metrics of the baselines. Shares have one value per round, in which all baselines ran in turn."""

    def by_round(times: Sequence[float]) -> list[float]:
        """Return the median of each round's times."""
        return [float(np.median(chunk)) for chunk in np.array_split(times, controls.rounds or 1) if len(chunk)]

    def share(value: float, values: Sequence[float]) -> Metric:
        """Return a share whose repeated values are ``values`` over the ordinary iterations, by round."""
        ratios = (tuple(chunk / iteration for chunk, iteration in zip(values, ordinary_by_round, strict=False)),)
        return Metric(value, "share", ratios, higher_is_better=True)

    ordinary_by_round = by_round(slowest(controls.ordinary_ns))
    solo_by_round = by_round([fmean(times) for times in zip(*controls.solo_ns, strict=True)])
    metrics = {"solo_tflops": Metric(baselines.solo_tflops, "TFLOP/s", higher_is_better=True)}
    metrics["of_solo"] = share(baselines.of_solo, solo_by_round)
    if baselines.ideal_efficiency is not None:
        sides = [by_round(slowest(times or [])) for times in (controls.compute_only_ns, controls.communication_only_ns)]
        ideal = [max(pair) for pair in zip(*sides, strict=False)]
        metrics["ideal_efficiency"] = share(baselines.ideal_efficiency, ideal)
    return metrics


def shortest_labels(paths: Sequence[str]) -> list[str]:
    """Shorten each path to the fewest last parts that distinguish all paths; a final ``run.json`` is left out."""
    path_parts = [[part for part in path.split("/") if part not in ("", ".", "run.json")] or [path] for path in paths]
    for count in range(1, max(map(len, path_parts)) + 1):
        labels = ["/".join(part[-count:]) for part in path_parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{path} ({index + 1})" for index, path in enumerate(paths)]


def _time_metric(time_ns: float) -> Metric:
    """Return a time in milliseconds that was measured once."""
    return Metric(time_ns / MS, "ms", higher_is_better=False, depends_on_work=True)
