"""Sinks for the figures of `ringprof.monitor`: TensorBoard, Weights & Biases, MLflow, Prometheus, OpenTelemetry.

    with ringprof.monitor("exposed.jsonl", sinks=[sinks.wandb(), sinks.prometheus("/var/lib/node_exporter/job.prom")]):
        train()

A sink is any function of a mapping of names to numbers and a step. It is called on the first rank, once per sample, so
that every rank may create it: files are opened and runs looked up at the first sample. A sink that fails is logged as a
warning and never ends the training. A missing library raises `MissingExtraError` when the sink is created.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ringprof.errors import MissingExtraError, UsageError

Sink = Callable[[Mapping[str, float], int], None]
"""Function that stores the figures of one sample, by name, and the sample's step."""
_HELP = {
    "exposed_comm_share": "Mean over ranks of the share of the step that is exposed communication (0 to 1).",
    "exposed_comm_share_worst": "Largest share of exposed communication of any rank (0 to 1).",
    "step_ms": "Median time of a step without the profiler, in ms.",
    "wall_ms": "Time of the sampled step on the slowest rank, in ms.",
    "wait_ms": "Mean over ranks of the time that transfers waited for a peer, in ms.",
    "wire_ms": "Mean over ranks of the time that transfers took on the wire, in ms.",
    "straggler": "Rank that others waited for most.",
    "straggler_ms": "Time that transfers of other ranks waited for that rank, in ms.",
    "step": "Step of the sample.",
}


def tensorboard(folder: str | os.PathLike[str]) -> Sink:
    """Return a sink that writes scalars ``ringprof/NAME`` into a folder of TensorBoard."""
    library = _imported("torch.utils.tensorboard", "tensorboard")
    writer: Any = None

    def tensorboard_sink(figures: Mapping[str, float], step: int) -> None:
        nonlocal writer
        writer = writer or library.SummaryWriter(os.fspath(folder))
        for name, value in figures.items():
            writer.add_scalar(f"ringprof/{name}", value, step)
        writer.flush()

    return tensorboard_sink


def wandb(run: Any = None) -> Sink:
    """Return a sink that logs ``ringprof/NAME`` to a run of Weights & Biases (None: the current run).

    The figures have their own step, ``ringprof/step``, and join the next row that the program logs, so that steps of
    the program's own are not disturbed. If it logs nothing until the next sample, they become a row of their own.
    """
    library = _imported("wandb", "wandb")
    opened, pending = None, -1

    def wandb_sink(figures: Mapping[str, float], step: int) -> None:
        nonlocal opened, pending
        if opened is None:
            opened = run or library.run
            if opened is None:
                raise UsageError("Weights & Biases has no current run: call wandb.init() on the first rank")
            opened.define_metric("ringprof/*", step_metric="ringprof/step")
        if opened.step == pending:
            opened.log({}, commit=True)
        pending = opened.step
        opened.log({f"ringprof/{name}": value for name, value in {**figures, "step": step}.items()}, commit=False)

    return wandb_sink


def mlflow(run_id: str | None = None) -> Sink:
    """Return a sink that logs metrics ``ringprof/NAME`` to a run of MLflow (None: the current run)."""
    library = _imported("mlflow", "mlflow")

    def mlflow_sink(figures: Mapping[str, float], step: int) -> None:
        current = library.active_run()
        if run_id is None and current is None:  # MLflow would start a run of its own
            raise UsageError("MLflow has no current run: call mlflow.start_run() on the first rank, or pass a run's ID")
        metrics = {f"ringprof/{name}": value for name, value in figures.items()}
        library.log_metrics(metrics, step=step, run_id=run_id or current.info.run_id)

    return mlflow_sink


def prometheus(path: str | os.PathLike[str], labels: Mapping[str, str] | None = None) -> Sink:
    """Return a sink that replaces a text file of gauges ``ringprof_NAME``, as node_exporter's collector reads it.

    ``path`` ends in ``.prom`` and lies in the folder of ``--collector.textfile.directory``. The file is replaced
    as a whole, so that no scrape sees half of it. ``labels`` are added to every gauge; the gauge ``ringprof_step`` is
    the sample's step. Raises `UsageError` for another ending, and for a name of a label with which node_exporter would
    refuse the whole file.
    """
    target = Path(path)
    if target.suffix != ".prom":
        raise UsageError(f"{target}: node_exporter reads files that end in .prom")
    for name in labels or {}:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
            raise UsageError(f"label {name!r}: names of labels have letters, digits and _ only, no digit first")
    escaped = {name: str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
               for name, value in (labels or {}).items()}  # fmt: skip
    suffix = "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if escaped else ""

    def prometheus_sink(figures: Mapping[str, float], step: int) -> None:
        lines = []
        for name, value in {**figures, "step": step}.items():
            help_line = [f"# HELP ringprof_{name} {_HELP[name]}"] if name in _HELP else []
            lines += [*help_line, f"# TYPE ringprof_{name} gauge", f"ringprof_{name}{suffix} {float(value)!r}"]
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        draft.write_text("\n".join(lines) + "\n", "utf-8")
        draft.replace(target)

    return prometheus_sink


def opentelemetry(meter: Any = None) -> Sink:
    """Return a sink that sets gauges ``ringprof.NAME`` of an OpenTelemetry meter (None: of the global provider).

    The gauge ``ringprof.step`` is the sample's step.
    """
    metrics = _imported("opentelemetry.metrics", "opentelemetry-api")
    meter = meter or metrics.get_meter("ringprof")
    gauges: dict[str, Any] = {}

    def opentelemetry_sink(figures: Mapping[str, float], step: int) -> None:
        for name, value in {**figures, "step": step}.items():
            if name not in gauges:
                gauges[name] = meter.create_gauge(f"ringprof.{name}", description=_HELP.get(name, ""))
            gauges[name].set(value)

    return opentelemetry_sink


def _imported(module: str, package: str) -> Any:
    """Import a library. Raises `MissingExtraError` with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{module} cannot be imported ({error}): pip install {package}") from None
