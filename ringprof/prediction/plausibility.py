"""Plausibility checks of benchmark logs: rows that a machine cannot have reached, or whose time fits another length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ringprof.benchmark_logs.rows import Flag, JudgedRow, LogRow, flag
from ringprof.common.json_object import JsonObject
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import ScheduleOf
from ringprof.prediction.score import check_rows

_STRATEGIES = {"megatron_cp": "megatron"}
_NEEDED = ("seq", "heads", "head_dim", "world_size")


def check_log_rows(
    rows: Iterable[JudgedRow], machine: Calibration, schedule_of: ScheduleOf, cluster: Cluster
) -> Iterator[Flag]:
    """Yield flags of the rows that state enough to be predicted; ``cluster`` gives the GPUs per host.

    Rates above the device's peak are left out, because the audit reports them without a machine.
    """
    measurements = [(row, measurement) for row in rows if (measurement := _as_measurement(row))]
    for (row, _), checked in zip(
        measurements,
        check_rows([measurement for _, measurement in measurements], machine, schedule_of, cluster),
        strict=True,
    ):
        for code, message in checked.flags:
            if code != "above_peak":
                yield flag(row.row, code, "error", f"{row.row.system}: {message}", checked.row.measured_ms)


def _as_measurement(judged: JudgedRow) -> JsonObject | None:
    """Return the row in the form that `check_rows` reads; None if a required value is missing."""
    row = judged.row
    ms = row.forward_ms if row.forward_only or row.forward_backward_ms is None else row.forward_backward_ms
    if (ms is None and judged.tflops_per_gpu is None) or not all(getattr(row, name) for name in _NEEDED):
        return None
    return {
        "strategy": _STRATEGIES.get(row.system, row.system), "seq_global": str(row.seq), "heads": str(row.heads),
        "kv_heads": str(row.kv_heads or row.heads), "head_dim": str(row.head_dim), "batch": str(row.batch or 1),
        "n_gpus": str(row.world_size), "causal": str(row.causal is not False),
        "pass": "fwd" if row.forward_only or (ms and ms is row.forward_ms) else "fwd+bwd", "degrees": _degrees(row),
        "time_ms": ms and str(ms), "tflops": None if ms else str(judged.tflops_per_gpu),
    }  # fmt: skip


def _degrees(row: LogRow) -> str:
    flat = "flat ring" if row.double_ring is False else ""
    return f"ulysses={row.ulysses_degree}" if row.ulysses_degree else flat
