"""Measurements, as a comparison needs them, from the findings of recorded runs and traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from msgspec.structs import replace

from ringprof.analysis.findings.conditions import metrics_of
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.metric import WATERFALL_PREFIX, Measurement, Metric
from ringprof.analysis.findings.metric_table import MS, RATES, RECORDED, SHARES, MetricRow, Use
from ringprof.analysis.findings.same_work import evidence_of
from ringprof.analysis.findings.time_table import IDLE_LABELS
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.run import Run
from ringprof.trace.columns import NOTES
from ringprof.workload.workload import Workload


def measurement_of_run(label: str, findings: Findings) -> Measurement:
    """Return the measurement of a recorded run, or of traces without ``run.json``."""
    run, summary = findings.attribution.run, findings.summary
    iterations, report_metrics = summary.times_divisor, metrics_of(findings)

    def times(times_ns: Mapping[str, float]) -> dict[str, Metric]:
        """Return times of one iteration, which were measured once."""
        return {
            f"{name}_ms": Metric(time / iterations / MS, "ms", higher_is_better=False, depends_on_work=True)
            for name, time in times_ns.items()
        }

    metrics = _metrics_of_rows(RECORDED, findings)
    metrics |= times({part.name: part.mean_ns for part in summary.parts})
    metrics |= times({name: report_metrics[f"{name}_ns"] for name in IDLE_LABELS if f"{name}_ns" in report_metrics})
    metrics |= _metrics_of_rows(SHARES, findings) | _metrics_of_rows(RATES, findings)
    for part in findings.step_rates.parts if findings.step_rates is not None else ():
        if part.tflops is not None:
            metrics[f"{part.part}_tflops"] = Metric(part.tflops, "TFLOP/s", higher_is_better=True)
    time_of_kind = {row.kind: row.time_ns for row in summary.kinds}
    metrics |= times({kind: time_of_kind[kind] for kind in KINDS if kind in time_of_kind})
    metrics |= times({f"{WATERFALL_PREFIX}{part.part}": part.time_ns for part in findings.waterfall.parts})
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
        settings["hops"] = "gloo" if run.topology.backend == "gloo" else run.strategy.hops
        settings |= {f"-p {key}": str(value) for key, value in sorted(run.strategy.params.items())}
    settings["kernel"] = run.kernel
    settings["ranks_per_host"] = str(run.topology.ranks_per_host)
    versions = run.environment.versions
    return settings | {name: versions[name] for name in ("torch", "nccl") if name in versions}


def _workload_settings(work: Workload) -> dict[str, str | None]:
    """Return the settings of a workload as text; defaults that add nothing are left out."""
    scores = replace(work, conv_width=None).extras()
    # A recurrence has no pairs of queries and keys.
    mask = work.mask_in_words() if work.recurrent else f"{work.mask()}: {work.mask().area(work.seq)} pairs"
    return {
        "seq": str(work.seq),
        **({"operator": work.operator} if work.recurrent else {}),
        **({} if work.kv_length is None else {"phase": work.phase, "kv_length": str(work.kv_length)}),
        "batch": str(work.batch),
        "heads": str(work.heads),
        "kv_heads": str(work.kv_heads),
        "head_dim": str(work.head_dim),
        "causal": str(work.causal).lower(),
        **({} if work.mask().plain else {"mask": mask}),
        **({} if work.sequences is None else {"sequences": ", ".join(map(str, work.sequences))}),
        **({} if work.layer is None else {"layer": str(work.layer)}),
        **({"v_head_dim": str(work.v_head_dim)} if work.v_head_dim else {}),
        **({"scores": ", ".join(scores)} if scores else {}),
        **({} if work.conv_width is None else {"conv_width": str(work.conv_width)}),
        "dtype": work.dtype,
        "passes": "forward and backward" if work.backward else "forward",
        **_unless_one("layers", work.layers),
    }


def _unless_one(name: str, count: int | Fraction) -> dict[str, str | None]:
    """Return a setting for a count; empty where it is 1."""
    return {} if count == 1 else {name: str(count)}


def _metrics_of_rows(rows: Sequence[MetricRow], findings: Findings) -> dict[str, Metric]:
    """Return those metrics of a table that comparisons show and that are known."""
    metrics = {}
    for row in rows:
        value = row.value(findings) if Use.COMPARISONS in row.use else None
        if value is not None:
            recordings = (tuple(row.repeated(findings)),) if row.repeated else ()
            depends_on_work = row.unit in ("ms", "MiB")
            metrics[row.name] = Metric(value, row.unit, recordings, row.higher_is_better, depends_on_work)
    return metrics


def shortest_labels(paths: Sequence[str]) -> list[str]:
    """Shorten each path to the fewest last parts that distinguish all paths; a final ``run.json`` is left out."""
    path_parts = [[part for part in path.split("/") if part not in ("", ".", "run.json")] or [path] for path in paths]
    for count in range(1, max(map(len, path_parts)) + 1):
        labels = ["/".join(part[-count:]) for part in path_parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{path} ({index + 1})" for index, path in enumerate(paths)]
