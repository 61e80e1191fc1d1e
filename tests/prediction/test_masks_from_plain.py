"""Documents and windows on machines of which only plain calls were measured."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch", reason="a dry run needs it")

from dev.benchmarks.prediction import plain_masks, without_masks
from ringprof.dryrun.schedule import AttentionOp
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.kernel_model import SHAPE, OutsideCalibration
from ringprof.prediction.machine import MASKED_OVER_PLAIN, curves_of
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import inputs, predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.workload.workload import Workload


@pytest.mark.parametrize(("machine", "kernel"), [("h200", "flash-attn"), ("h100", "flash-attn-3")])
def test_the_ratios_are_those_of_the_measured_calls(machine: str, kernel: str) -> None:
    """Nine of ten samples lie within two spreads of the estimate from plain calls."""
    curves = curves_of(without_masks(read_calibration(machine)), kernel)
    off = []
    for sample in read_calibration(machine).kernel(kernel).samples:
        if sample.pairs is None or sample.head_dim != 128:
            continue
        estimate = curves.estimate(AttentionOp(label="", **{name: getattr(sample, name) for name in SHAPE}))
        off.append(abs(math.log(sample.ns / estimate.ns)) / estimate.spread)
    assert len(off) >= 19 and sum(distance <= 2 for distance in off) >= 0.9 * len(off)


def test_recorded_runs_are_predicted_from_plain_calls() -> None:
    scores = list(plain_masks())
    assert len(scores) == 9 and all(abs(score.error) < 0.12 and score.inside for score in scores)
    assert sum(abs(score.error) for score in scores) / len(scores) < 0.05


@pytest.mark.parametrize("mask", [{"documents": (65536, 65536)}, {"window": 4096}])
def test_b200_answers_with_a_spread_that_says_so(mask: dict[str, object]) -> None:
    workload = Workload(seq=131072, heads=32, kv_heads=8, head_dim=128, **mask)  # type: ignore[arg-type]
    prediction = predict(Query("zigzag", workload, Cluster(1, 8)), read_calibration("b200"), schedule_of)
    assert prediction.query.kernel == "flash-attn-4" and prediction.evidence == "assumed"
    assert inputs(prediction)["forward_masked_over_plain"] is MASKED_OVER_PLAIN["forward"]
    low, middle, high = prediction.interval_ns
    assert high / low > 1.3 and low < middle < high


def test_a800_refuses_documents_shorter_than_calibrated() -> None:
    workload = Workload(seq=131072, heads=32, kv_heads=8, head_dim=128, documents=(1024,) * 128)
    with pytest.raises(OutsideCalibration, match="of the forward pass are parts of the mask shorter than calibrated"):
        predict(Query("zigzag", workload, Cluster(1, 8)), read_calibration("a800"), schedule_of)
