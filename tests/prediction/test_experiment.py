"""The measurement that would overturn a recommendation, against predictions with that result; Llama 3's question."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")

from ringprof.cli import run
from ringprof.prediction.advise import deciding_experiment
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import PredictionResult, predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import ScheduleCache
from ringprof.workload.workload import Workload

WORKLOAD = Workload(seq=131072, heads=128, kv_heads=8, head_dim=128)


def test_predictions_with_the_result_change_the_order() -> None:
    """All-gather is ahead of Ulysses by 0.3 %; a NIC that is a little faster than the stated rate turns that."""
    machine, cache = read_calibration("h200"), ScheduleCache()

    def predictions(gbit: float) -> tuple[PredictionResult, PredictionResult]:
        cluster = Cluster(2, 4, nic_gbit=gbit)
        first = Query("allgather", WORKLOAD, cluster, "flash-attn-3", "nccl", {"layout": "zigzag"})
        second = replace(first, strategy="ulysses", params={})
        return predict(first, machine, cache.of), predict(second, machine, cache.of)

    first, second = predictions(400.0)
    assert first.median_ns < second.median_ns
    experiment = deciding_experiment(first, second)
    assert experiment is not None and 0 < experiment[0] < 0.5
    match = re.fullmatch(
        r"the rate between two nodes \(on two GPUs: .*\): at least ([0-9.]+) GB/s \(50\.0 assumed\) would put it.*",
        experiment[1],
    )
    assert match is not None
    first, second = predictions(1.1 * 8 * float(match[1]))
    assert second.median_ns < first.median_ns


@pytest.mark.long
def test_gathered_keys_beat_rings_for_llama_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """131,072 tokens in documents, 16 context-parallel ranks, tensor parallelism 8: a rank has 16 heads, 1 kv head.

    Tensor parallelism takes a node's GPUs, so every context-parallel rank has a node of its own. Llama 3 (section 3.3.2
    of its report) gathers keys and values instead of a ring.
    """
    monkeypatch.setattr("ringprof.prediction.advise._sweep", lambda *_: iter(()))
    options = [
        "--documents", "16384,49152,8192,32768,4096,20480", "--heads", "16", "--kv-heads", "1", "--machine", "h200",
        "--nodes", "16", "--gpus-per-node", "1", "--nic", "400", "--format", "json",
        *(f"--strategy={name}" for name in ("allgather", "zigzag", "megatron")),
    ]  # fmt: skip
    assert run(["advise", "--seq", "128k", *options]) == 0
    advice = json.loads(capsys.readouterr().out)
    times = {choice["question"]["strategy"]: choice["iteration_ms"]["p50"] for choice in advice["choices"]}
    assert min(times, key=lambda name: times[name]) == "allgather"
    assert times["allgather"] < 0.9 * times["zigzag"]
