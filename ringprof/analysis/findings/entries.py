"""Runs and traces as entries of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ringprof.analysis.findings.comparison import WATERFALL, Entry, Figure
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.run import Run, Workload
from ringprof.trace.columns import NOTES

MS = 1e6
MIB = 1 << 20


def entry_of_run(label: str, found: Findings) -> Entry:
    """A recorded run, or the traces of one that nothing else is known of."""
    run, summary = found.attribution.run, found.summary
    figures = _timed_figures(run) if run is not None else {}
    iterations = max(1, summary.iterations)
    for part in summary.parts:
        figures[part.name] = _time(part.mean_ns / iterations)
    figures["exposed_comm_share"] = Figure(summary.exposed_mean, "share", higher_is_better=False)
    if summary.overlap_ratio is not None:
        figures["overlap_ratio"] = Figure(summary.overlap_ratio, "share", higher_is_better=True)
    if summary.rates.block_tflops is not None:
        figures["block_tflops"] = Figure(summary.rates.block_tflops, "TFLOP/s", higher_is_better=True)
    if summary.rates.solo_tflops is not None:
        figures["solo_tflops"] = Figure(summary.rates.solo_tflops, "TFLOP/s", higher_is_better=True)
    times = {row.kind: row.time_ns / iterations for row in summary.kinds}
    figures |= {kind: _time(times[kind]) for kind in KINDS if kind in times}
    figures |= {f"{WATERFALL}{part.part}": _time(part.time_ns / iterations) for part in found.waterfall.parts}
    settings = _run_settings(run) if run is not None else {}
    devices = ", ".join(summary.devices) or None
    warnings = tuple(f"{one.message} [{one.code}]" for one in found.attribution.warnings if one.code not in NOTES)
    return Entry(label, "trace" if run is None else "run", settings | {"device": devices}, figures, warnings)


def _run_settings(run: Run) -> dict[str, str | None]:
    settings: dict[str, str | None] = {"world_size": str(run.topology.world_size)}
    if run.workload is not None:
        settings |= _workload_settings(run.workload)
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
        "batch": str(work.batch),
        "heads": str(work.heads),
        "kv_heads": str(work.kv_heads),
        "head_dim": str(work.head_dim),
        "causal": str(work.causal).lower(),
        **({} if work.mask().plain else {"mask": f"{work.mask()}: {work.mask().area(work.seq)} pairs"}),
        "dtype": work.dtype,
        "passes": "forward and backward" if work.backward else "forward",
        **{name: str(count) for name, count in (("layers", work.layers), ("steps", work.steps)) if count > 1},
    }


def _timed_figures(run: Run) -> dict[str, Figure]:
    """What the recorder timed without the profiler: of every iteration, the slowest rank's time."""
    figures: dict[str, Figure] = {}
    if run.timings is not None:
        slowest = [max(times) for times in zip(*run.timings.iterations_ns, strict=True)]
        figures["iteration"] = Figure(
            median(slowest) / MS, "ms", min(slowest) / MS, max(slowest) / MS, False, depends_on_work=True
        )
        if run.workload is not None:
            per_device = run.workload.model_flops() / run.topology.world_size / 1e3
            low, high = per_device / max(slowest), per_device / min(slowest)
            figures["tflops"] = Figure(per_device / median(slowest), "TFLOP/s", low, high, True)
    if run.peak_memory_bytes:
        figures["peak_memory"] = Figure(
            max(run.peak_memory_bytes) / MIB, "MiB", higher_is_better=False, depends_on_work=True
        )
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


def flat(figures: Mapping[str, Figure]) -> dict[str, float]:
    """Figure name -> value, for conditions."""
    return {name: figure.value for name, figure in figures.items()}
