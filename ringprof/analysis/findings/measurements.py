"""Runs and traces as entries of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean, median

import numpy as np

from ringprof.analysis.findings.baselines import BaselineMetrics
from ringprof.analysis.findings.comparison import WATERFALL_PREFIX, Entry, Figure
from ringprof.analysis.findings.conditions import IDLE_FIGURES, figures_of
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.same_work import evidence_of
from ringprof.analysis.findings.step_rates import step_rates_of
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.run import Baselines, Run, Workload, slowest
from ringprof.trace.columns import NOTES

MS = 1e6
_MIB = 1 << 20


def entry_of_run(label: str, found: Findings) -> Entry:
    """A recorded run, or the traces of one that nothing else is known of."""
    run, summary = found.attribution.run, found.summary
    # Rates, memory and controls are of whole iterations: beside a part of one they would be read as its own.
    whole = run if not found.attribution.partial_window else None
    figures = _timed_figures(whole, summary) if whole is not None else {}
    if "iteration_ms" not in figures:
        figures |= _marked_iterations(found)
    iterations = summary.times_divisor
    for part in summary.parts:
        figures[f"{part.name}_ms"] = _time(part.mean_ns / iterations)
    known = figures_of(found)
    times = {name: known[f"{name}_ns"] for name in IDLE_FIGURES if f"{name}_ns" in known}
    figures |= {f"{name}_ms": _time(time / iterations) for name, time in times.items()}
    figures["exposed_comm"] = Figure(summary.exposed_mean, "share", higher_is_better=False)
    if summary.overlap_ratio is not None:
        figures["overlap_ratio"] = Figure(summary.overlap_ratio, "share", higher_is_better=True)
    if summary.rates.block_tflops is not None:
        figures["block_tflops"] = Figure(summary.rates.block_tflops, "TFLOP/s", higher_is_better=True)
    if whole is not None and whole.controls is not None and summary.rates.controls is not None:
        figures |= _control_figures(whole.controls, summary.rates.controls)
    figures |= _step_figures(found)
    of_kinds = {row.kind: row.time_ns / iterations for row in summary.kinds}
    figures |= {f"{kind}_ms": _time(of_kinds[kind]) for kind in KINDS if kind in of_kinds}
    figures |= {f"{WATERFALL_PREFIX}{part.part}_ms": _time(part.time_ns / iterations) for part in found.waterfall.parts}
    settings = _run_settings(run, summary.window_iterations) if run is not None else {}
    named = summary.devices or (tuple(dict.fromkeys(run.environment.devices)) if run is not None else ())
    devices = ", ".join(named) or None
    warnings = tuple(f"{one.message} [{one.code}]" for one in found.attribution.warnings if one.code not in NOTES)
    return Entry(
        label=label,
        source="trace" if run is None else "run",
        settings=settings | {"device": devices},
        figures=figures,
        warnings=warnings,
        others={name: value for name, value in known.items() if name not in figures},
        created=(run.created,) if run is not None else (),
        evidence=evidence_of(found, iterations),
        times_are_of=found.attribution.times_are_of,
    )


def _run_settings(run: Run, iterations: int | None) -> dict[str, str | None]:
    settings: dict[str, str | None] = {"world_size": str(run.topology.world_size)}
    if run.workload is not None:
        settings |= _workload_settings(run.workload)
        # The same work is as much in one iteration over all ranks, however many of both were captured.
        settings["batch"] = str(Fraction(run.workload.batch * run.topology.world_size, run.sharing_ranks))
        settings |= _more_than_one("steps", Fraction(run.workload.steps, iterations or 1 if run.captured else 1))
    if run.strategy is not None:
        settings["strategy"] = run.strategy.name
        settings["hops"] = run.strategy.hops
        settings |= {f"-p {key}": str(value) for key, value in sorted(run.strategy.params.items())}
    settings["kernel"] = run.kernel
    settings["ranks_per_host"] = str(run.topology.ranks_per_host)
    versions = run.environment.versions
    return settings | {name: versions[name] for name in ("torch", "nccl") if name in versions}


def _workload_settings(work: Workload) -> dict[str, str | None]:
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
        **_more_than_one("layers", work.layers),
    }


def _more_than_one(name: str, count: int | Fraction) -> dict[str, str | None]:
    return {} if count == 1 else {name: str(count)}


def _timed_figures(run: Run, summary: Summary) -> dict[str, Figure]:
    """What the recorder timed without the profiler: of every iteration, the slowest rank's time."""
    figures: dict[str, Figure] = {}
    rates = summary.rates
    times = slowest(run.timings.iterations_ns) if run.timings else []
    if rates.slowest_median_ns is not None:
        each = (tuple(time / MS for time in times),)
        figures["iteration_ms"] = Figure(rates.slowest_median_ns / MS, "ms", each, False, depends_on_work=True)
    if rates.tflops is not None:
        # A captured block was timed under the profiler only.
        timed = times or (slowest(run.profiled.iterations_ns) if run.profiled else [])
        each = (tuple(rate for time in timed if (rate := run.tflops(time)) is not None),)
        figures["tflops"] = Figure(rates.tflops, "TFLOP/s", each, True)
    if rates.peak_memory_bytes is not None:
        figures["peak_memory_mib"] = Figure(
            rates.peak_memory_bytes / _MIB, "MiB", higher_is_better=False, depends_on_work=True
        )
    return figures


def _marked_iterations(found: Findings) -> dict[str, Figure]:
    """Of several iterations that all traces mark, the slowest rank's time."""
    each = [rank.iteration_ns for rank in found.attribution.ranks]
    times = slowest(each)
    if found.attribution.partial_window or len({*map(len, each)}) > 1 or len(times) < 2:
        return {}
    recording = tuple(time / MS for time in times)
    return {"profiled_iteration_ms": Figure(median(recording), "ms", (recording,), False, depends_on_work=True)}


def _step_figures(found: Findings) -> dict[str, Figure]:
    """Return the MFU and the rates that follow from recorded shapes."""
    step = step_rates_of(found.attribution)
    if step is None:
        return {}
    figures = {} if step.mfu is None else {"mfu": Figure(step.mfu, "share", higher_is_better=True)}
    rates = {f"{row.part}_tflops": row.tflops for row in step.parts}
    return figures | {
        name: Figure(rate, "TFLOP/s", higher_is_better=True) for name, rate in rates.items() if rate is not None
    }


def _control_figures(controls: Baselines, found: BaselineMetrics) -> dict[str, Figure]:
    """Of the controls: the shares are repeated by rounds, in which all that they set against each other took turns."""

    def by_round(times: Sequence[float]) -> list[float]:
        return [float(np.median(part)) for part in np.array_split(times, controls.rounds or 1) if len(part)]

    def share(value: float, parts: Sequence[float]) -> Figure:
        ratios = (tuple(part / whole for part, whole in zip(parts, ordinary, strict=False)),)
        return Figure(value, "share", ratios, higher_is_better=True)

    ordinary = by_round(slowest(controls.ordinary_ns))
    solo = by_round([fmean(times) for times in zip(*controls.solo_ns, strict=True)])
    figures = {"solo_tflops": Figure(found.solo_tflops, "TFLOP/s", higher_is_better=True)}
    figures["of_solo"] = share(found.of_solo, solo)
    if found.ideal_efficiency is not None:
        sides = [by_round(slowest(one or [])) for one in (controls.compute_only_ns, controls.communication_only_ns)]
        figures["ideal_efficiency"] = share(found.ideal_efficiency, [max(pair) for pair in zip(*sides, strict=False)])
    return figures


def labels_of(paths: Sequence[str]) -> list[str]:
    """The shortest end of each path that tells it from the others: its last parts, ``run.json`` left out."""
    parts = [[part for part in path.split("/") if part not in ("", ".", "run.json")] or [path] for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == len(short):
            return short
    return [f"{path} ({index + 1})" for index, path in enumerate(paths)]


def _time(time_ns: float) -> Figure:
    return Figure(time_ns / MS, "ms", higher_is_better=False, depends_on_work=True)
