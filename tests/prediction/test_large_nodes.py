"""Nodes larger than any calibrated one, clusters that are extrapolated, and predictions that do not fit."""

from __future__ import annotations

import json
from functools import cache

import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")

from ringprof.errors import UnsupportedWorkloadError
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import PredictionResult, predict, warnings_of
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.workload.workload import Workload
from tests.prediction.test_commands import run

TOKENS = 8192
"""Tokens per rank."""


@cache
def predicted(strategy: str, hosts: int, gpus_per_host: int) -> PredictionResult:
    """Predict a strategy with 8192 tokens per rank, NCCL hops and NICs of 400 Gbit/s on H100.

    The number of channels is fixed: by NCCL's own rule a hop gets fewer from 65 ranks on, which is a jump of its own.
    """
    workload = Workload(seq=TOKENS * hosts * gpus_per_host, heads=64, kv_heads=8, head_dim=128, backward=False)
    cluster = Cluster(hosts=hosts, gpus_per_host=gpus_per_host, nic_gbit=400.0, net_channels=2)
    return predict(Query(strategy, workload, cluster, "cudnn", "nccl"), read_calibration("h100"), schedule_of, draws=1)


def test_two_nodes_of_1024_gpus_are_predicted_from_few_ranks() -> None:
    """Each step of a flat ring takes as long as its slowest hop, between the nodes, however many ranks lie inside.

    So 2 nodes of 1024 take 2048 / 64 times as long as 2 nodes of 32, which are simulated rank by rank.
    """
    large, simulated = predicted("zigzag", 2, 1024), predicted("zigzag", 2, 32)
    assert len(simulated.timelines) == 64 and len(large.timelines) <= 32
    assert large.median_ns == pytest.approx(simulated.median_ns * 2048 / 64, rel=0.03)


@pytest.mark.parametrize("strategy", ["zigzag", pytest.param("burst", marks=pytest.mark.long)])
def test_time_grows_by_a_step_per_rank_where_direct_simulation_ends(strategy: str) -> None:
    """With the same tokens per rank, 9 nodes (extrapolated) take one step in eight more than 8 (simulated)."""
    simulated, extrapolated = (predicted(strategy, hosts, 8) for hosts in (8, 9))
    assert len(simulated.timelines) == 64 and len(extrapolated.timelines) < 64
    assert extrapolated.median_ns / simulated.median_ns == pytest.approx(9 / 8, rel=0.02)


LARGE = ["--seq", "4m", "--heads", "64", "--kv-heads", "8", "--machine", "h100", "--strategy", "zigzag"]


def test_a_prediction_that_does_not_fit_says_so_in_json_and_by_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """K, V, Q, out and gradients of 4 million tokens of 64 heads on one GPU are hundreds of GB."""
    code, out, _ = run(capsys, "predict", *LARGE, "--gpus-per-node", "2", "--format", "json")
    answer = json.loads(out)
    assert code == 1 and answer["fits"] is False and answer["peak_memory_mib"] > answer["device_memory_mib"]
    assert [warning["code"] for warning in answer["warnings"]] == ["does_not_fit"]
    code, out, _ = run(capsys, "predict", *LARGE, "--gpus-per-node", "2")
    assert code == 1 and "this does not fit: a GPU has" in out


def test_what_fits_in_measured_nodes_has_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*LARGE[2:], "--seq", "64k", "--gpus-per-node", "8", "--format", "json"]
    code, out, _ = run(capsys, "predict", *options)
    answer = json.loads(out)
    assert code == 0 and answer["fits"] is True and answer["warnings"] == []
    assert [warning["code"] for warning in warnings_of(predicted("zigzag", 2, 32))] == ["larger_node"]


def test_nodes_larger_than_measured_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*LARGE[2:], "--seq", str(72 * 2048), "--gpus-per-node", "72", "--forward-only"]
    code, out, _ = run(capsys, "predict", *options)
    assert code == 0 and "nodes of 72 GPUs are predicted with the rates of nodes of 8" in " ".join(out.split())


@pytest.mark.parametrize(
    ("strategy", "params", "tolerance"),
    [
        ("burst", {}, 0.01),
        pytest.param("zigzag", {}, 0.01, marks=pytest.mark.long),
        pytest.param("usp", {"ulysses_degree": 8}, 0.02, marks=pytest.mark.long),
        pytest.param("megatron", {}, 0.03, marks=pytest.mark.long),
    ],
)
def test_nodes_of_8_and_16_ranks_stand_for_larger_ones(
    strategy: str, params: dict[str, int], tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against all 64 ranks of 2 nodes of 32, simulated one by one. A double ring has a ring of 32 inside a node."""
    workload = Workload(seq=TOKENS * 64, heads=64, kv_heads=8, head_dim=128, backward=False)
    cluster = Cluster(hosts=2, gpus_per_host=32, nic_gbit=400.0, net_channels=2)
    query = Query(strategy, workload, cluster, "cudnn", "nccl", params)
    simulated = predict(query, read_calibration("h100"), schedule_of, draws=3)
    monkeypatch.setattr("ringprof.prediction.predict.MAX_SIMULATED_RANKS", 16)
    extrapolated = predict(query, read_calibration("h100"), schedule_of, draws=3)
    assert (len(simulated.timelines), len(extrapolated.timelines)) == (64, 32)
    assert extrapolated.median_ns == pytest.approx(simulated.median_ns, rel=tolerance)


def test_too_many_ranks_that_none_can_stand_for_are_refused_at_once() -> None:
    """Rings over all ranks of a node and all-to-alls between nodes have no smaller cluster of the same form."""
    workload = Workload(seq=TOKENS * 16384, heads=64, kv_heads=8, head_dim=128)
    cluster = Cluster(hosts=16, gpus_per_host=1024, nic_gbit=400.0)
    params = {"ulysses_degree": 8, "placement": "ring-first"}
    with pytest.raises(UnsupportedWorkloadError, match="16384 ranks are too many to simulate some of them"):
        predict(Query("usp", workload, cluster, "cudnn", "nccl", params), read_calibration("h100"), schedule_of)
