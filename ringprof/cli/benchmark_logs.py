"""Benchmark logs on the command line of ``ringprof report``: settings that a log does not state, and predictions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import click

from ringprof.cli.progress import show_progress
from ringprof.cli.values import Number, Whole
from ringprof.common.json_object import JsonObject
from ringprof.common.limits import Limits
from ringprof.errors import UsageError, nearest

if TYPE_CHECKING:
    from ringprof.printed.benchmarks.logs import BenchmarkLogs
    from ringprof.printed.benchmarks.rows import LogSettings

_COUNT = Whole(min=1)
LOG_SETTINGS: Mapping[str, click.ParamType[Any]] = {
    "batch": _COUNT, "heads": _COUNT, "head-dim": _COUNT, "world": _COUNT, "causal": click.BOOL,
    "device": click.STRING, "gpus-per-node": Whole(1, 1024), "nic": Number(min=0, min_open=True),
}  # fmt: skip
"""Types of the values of ``--setting``; the last two are for the prediction of ``--machine``."""
_OF_MACHINE = ("gpus-per-node", "nic")


def is_benchmark(loaded: object) -> TypeGuard[BenchmarkLogs]:
    """Return whether an analysis is of benchmark logs, without importing their class."""
    return type(loaded).__name__ == "BenchmarkLogs"


def settings_of(texts: Iterable[str]) -> JsonObject:
    """Parse values of ``--setting``, ``KEY=VALUE``. Raises `UsageError` and `click.BadParameter`."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name = key.replace("_", "-")
        if not equals:
            raise click.BadParameter(f"{text!r} is not KEY=VALUE, such as heads=40", param_hint="--setting")
        if name not in LOG_SETTINGS:
            hint = nearest(name, LOG_SETTINGS)
            raise UsageError(f"--setting {key}: no such setting{hint}; there are: {', '.join(LOG_SETTINGS)}")
        try:
            settings[name] = LOG_SETTINGS[name].convert(value, None, None)
        except click.BadParameter as error:
            raise click.BadParameter(error.message, param_hint=f"--setting {name}") from None
    return settings


def log_settings(settings: Mapping[str, Any]) -> LogSettings | None:
    """Return the settings that complete the rows of a log; None without any."""
    if not settings:
        return None
    from ringprof.printed.benchmarks.rows import LogSettings  # imported here, since few reports are of logs

    fields = {name.replace("-", "_"): value for name, value in settings.items() if name not in _OF_MACHINE}
    return LogSettings(world_size=fields.pop("world", None), **fields)


def read_logs(paths: Sequence[str], limits: Limits, settings: LogSettings | None, spread: float) -> BenchmarkLogs:
    """Read several benchmark logs into one table."""
    from ringprof.printed.benchmarks.logs import BenchmarkLogs
    from ringprof.printed.benchmarks.read import read_log

    return BenchmarkLogs([read_log(path, limits) for path in dict.fromkeys(paths)], settings, spread)


def flag_implausible_rows(
    logs: BenchmarkLogs, machine: str | os.PathLike[str] | None, settings: Mapping[str, Any]
) -> None:
    """Add flags of the rows whose times a prediction for the machine contradicts. Raises `UsageError`."""
    if machine is None:
        unused = next((name for name in _OF_MACHINE if name in settings), None)
        if unused:
            raise UsageError(f"--setting {unused} goes with --machine")
        return
    with show_progress("predicting"):
        from ringprof.prediction.calibration import read_calibration
        from ringprof.prediction.network import Cluster
        from ringprof.prediction.schedules import schedule_of
        from ringprof.prediction.score import check_log_rows

        cluster = Cluster(gpus_per_host=settings.get("gpus-per-node", 8), nic_gbit=settings.get("nic"))
        logs.add(check_log_rows(logs.rows, read_calibration(machine), schedule_of, cluster))
