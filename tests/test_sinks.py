"""Sinks of monitor's figures, each read back by the library that its users read with."""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringprof.errors import MissingExtraError, UsageError
from ringprof.scale.pipeline import attribute
from ringprof.trace.reduced import reduce_trace
from ringprof.training import sinks
from ringprof.training.api import SampleLog, sample_figures
from tests.analysis.transfers.test_hops import ring

FIGURES = {"exposed_comm_share": 0.25, "step_ms": 12.5, "straggler": 3.0}


def late(rank: int) -> list[Any]:
    """Return the traces of four ranks of a ring, one of which starts 500 ns after the others."""
    starts = [1500 if number == rank else 1000 for number in range(4)]
    return [builder.trace() for builder in ring(starts, [2500] * 4, tensors=1)]


def add_samples(*used: sinks.Sink, steps: int = 2) -> None:
    samples = SampleLog(None, used)
    for step in range(1, steps + 1):
        samples.add(100 * step, [reduce_trace(trace) for trace in late(3)], {"step_ms": 12.5, "interval": 100})


def test_a_sink_gets_the_known_figures_of_every_sample() -> None:
    seen: list[tuple[dict[str, float], int]] = []
    add_samples(lambda figures, step: seen.append((dict(figures), step)))
    truth = sample_figures(attribute(late(3)))
    assert [step for _, step in seen] == [100, 200]
    for figures, _ in seen:
        assert figures == {
            "step_ms": 12.5, "wall_ms": truth["wall_ms"], "wait_ms": truth["wait_ms"], "wire_ms": truth["wire_ms"],
            "exposed_comm_share": truth["exposed_comm_share"]["mean"],
            "exposed_comm_share_worst": truth["exposed_comm_share"]["worst"],
            "straggler": 3.0, "straggler_ms": truth["waited_for"]["3"],
        }  # fmt: skip


def test_a_failing_sink_is_logged_and_keeps_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def broken(figures: Any, step: int) -> None:
        raise ConnectionError("no route to host")

    seen: list[int] = []
    with caplog.at_level(logging.WARNING, "ringprof.monitor"):
        add_samples(broken, lambda figures, step: seen.append(step))
    assert seen == [100, 200]
    assert caplog.messages == [f"step {step}: the sink broken failed: no route to host" for step in seen]


@pytest.mark.parametrize(("create", "module", "package"), [
    (sinks.wandb, "wandb", "wandb"),
    (sinks.mlflow, "mlflow", "mlflow"),
    (sinks.opentelemetry, "opentelemetry.metrics", "opentelemetry-api"),
    (lambda: sinks.tensorboard("folder"), "torch.utils.tensorboard", "tensorboard"),
])  # fmt: skip
def test_a_missing_library_is_named_with_its_installation(
    create: Any, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f"pip install {package}$"):
        create()


def test_prometheus_file_is_replaced_as_a_whole_and_parsed(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    path = tmp_path / "job.prom"
    sink = sinks.prometheus(path, {"job": 'a "b"\\c'})
    for step in (100, 200):
        sink(FIGURES, step)
        families = list(parser.text_string_to_metric_families(path.read_text("utf-8")))
        values = {family.name: family.samples[0].value for family in families}
        assert values == {f"ringprof_{name}": value for name, value in {**FIGURES, "step": step}.items()}
        assert all(family.type == "gauge" and family.documentation for family in families)
        assert all(family.samples[0].labels == {"job": 'a "b"\\c'} for family in families)
    assert list(tmp_path.iterdir()) == [path]


def test_prometheus_file_needs_the_ending_that_node_exporter_reads() -> None:
    with pytest.raises(UsageError, match=r"end in \.prom"):
        sinks.prometheus("job.txt")


@pytest.mark.parametrize("name", ["a b", "1st", "", "job-id", 'a="b",c'])
def test_a_label_that_would_spoil_the_prometheus_file_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="names of labels"):
        sinks.prometheus("job.prom", {name: "x"})


def test_numbers_as_labels_are_written(tmp_path: Path) -> None:
    sinks.prometheus(tmp_path / "job.prom", {"rank": 3})({"step_ms": 1.5}, 1)  # type: ignore[dict-item]
    assert 'ringprof_step_ms{rank="3"} 1.5' in (tmp_path / "job.prom").read_text()


def test_opentelemetry_reader_collects_the_gauges() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    sink = sinks.opentelemetry(MeterProvider([reader]).get_meter("training"))
    for step in (100, 200):
        sink(FIGURES, step)
        data = reader.get_metrics_data()
        assert data is not None
        (resource,) = json.loads(data.to_json())["resource_metrics"]
        metrics = resource["scope_metrics"][0]["metrics"]
        values = {metric["name"]: metric["data"]["data_points"][0]["value"] for metric in metrics}
        assert values == {f"ringprof.{name}": value for name, value in {**FIGURES, "step": step}.items()}


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = sinks.tensorboard(tmp_path)
    assert not list(tmp_path.iterdir())  # ranks other than the first create a sink and never call it
    sink(FIGURES, 100)
    sink(FIGURES, 200)
    events = EventAccumulator(str(tmp_path)).Reload()
    for name, value in FIGURES.items():
        assert [(event.step, event.value) for event in events.Scalars(f"ringprof/{name}")] == [
            (100, value), (200, value),
        ]  # fmt: skip


def test_mlflow_store_has_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no other store
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    sink = sinks.mlflow()
    with pytest.raises(UsageError, match="no current run"):
        sink(FIGURES, 1)
    with mlflow.start_run() as run:
        sink(FIGURES, 100)
    sinks.mlflow(run.info.run_id)(FIGURES, 200)
    client = mlflow.MlflowClient()
    for name, value in FIGURES.items():
        history = client.get_metric_history(run.info.run_id, f"ringprof/{name}")
        assert [(row.step, row.value) for row in history] == [(100, value), (200, value)]


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a run written offline: LevelDB's log format after a header of 7 bytes."""
    data, offset, parts = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # the rest of a block is too short for another header
            offset += 32768 - offset % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_run_has_the_figures_and_keeps_its_own_steps(tmp_path: Path) -> None:
    wandb: Any = pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    sink = sinks.wandb()
    with pytest.raises(UsageError, match="no current run"):
        sink(FIGURES, 1)
    with wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True)) as run:
        run.log({"loss": 3.0}, step=7)
        sink(FIGURES, 100)
        run.log({"loss": 2.0}, step=8)
        run.log({"late": 1.0}, step=8)
        sink(FIGURES, 200)
        sink(FIGURES, 300)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for data in wandb_records(path):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    ours = [row for row in rows if "ringprof/step" in row]
    assert [row["ringprof/step"] for row in ours] == [100, 200, 300]
    assert all(row[f"ringprof/{name}"] == value for row in ours for name, value in FIGURES.items())
    assert [row["loss"] for row in rows if "loss" in row] == [3.0, 2.0]
    assert [row["_step"] for row in rows if "late" in row] == [8]
