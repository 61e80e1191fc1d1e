"""The rows of benchmark logs held against a machine: what it cannot have done, and whose length the time is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ringprof.benchmark_logs.rows import Flag, JudgedRow, LogRow, flag
from ringprof.json_object import JsonObject
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import TapeOf
from ringprof.prediction.score import check_rows

_STRATEGIES = {"megatron_cp": "megatron"}
_NEEDED = ("seq", "heads", "head_dim", "world_size")


def logs_held(rows: Iterable[JudgedRow], machine: Calibration, schedule_of: TapeOf, cluster: Cluster) -> Iterator[Flag]:
    """Flags of rows that say what they are of; a host has as many GPUs as ``cluster`` says.

    What is above the device's peak the audit says without a machine.
    """
    told = [(one, asked) for one in rows if (asked := _asked(one))]
    for (one, _), found in zip(
        told, check_rows([asked for _, asked in told], machine, schedule_of, cluster), strict=True
    ):
        for code, message in found.flags:
            if code != "above_peak":
                yield flag(one.row, code, "error", f"{one.row.system}: {message}", found.row.measured_ms)


def _asked(one: JudgedRow) -> JsonObject | None:
    """The row as `check` takes it; None where something is not stated."""
    row = one.row
    ms = row.forward_ms if row.forward_only or row.forward_backward_ms is None else row.forward_backward_ms
    if (ms is None and one.tflops_per_gpu is None) or not all(getattr(row, name) for name in _NEEDED):
        return None
    return {
        "strategy": _STRATEGIES.get(row.system, row.system), "seq_global": str(row.seq), "heads": str(row.heads),
        "kv_heads": str(row.kv_heads or row.heads), "head_dim": str(row.head_dim), "batch": str(row.batch or 1),
        "n_gpus": str(row.world_size), "causal": str(row.causal is not False),
        "pass": "fwd" if row.forward_only or (ms and ms is row.forward_ms) else "fwd+bwd", "degrees": _degrees(row),
        "time_ms": ms and str(ms), "tflops": None if ms else str(one.tflops_per_gpu),
    }  # fmt: skip


def _degrees(row: LogRow) -> str:
    flat = "flat ring" if row.double_ring is False else ""
    return f"ulysses={row.ulysses_degree}" if row.ulysses_degree else flat
