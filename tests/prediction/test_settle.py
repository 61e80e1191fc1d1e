"""Scores of saved predictions: against recorded runs and tables, and what is not scored."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="names of strategies and kernels")

from ringprof.errors import InputError
from ringprof.prediction.measured import Measured
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.prediction.score import Scored, read_forecasts
from ringprof.run import read_run, write_run
from ringprof.workload.workload import Workload
from tests.paths import TRACES
from tests.prediction.test_commands import answer, run

ZIGZAG = TRACES / "h200x4-zigzag-65536"


def forecast_of(path: Path, times: tuple[float, float, float], schema: str = "ringprof.prediction/1") -> dict[str, Any]:
    """Return a saved prediction of a recorded run, with these percentiles in ms."""
    recorded = read_run(path / "run.json")
    assert recorded.strategy is not None
    return {
        "schema": schema,
        "question": {
            "strategy": recorded.strategy.name, "params": msgspec.to_builtins(recorded.strategy.params),
            "workload": msgspec.to_builtins(recorded.workload), "kernel": recorded.kernel,
            "hops": recorded.strategy.hops, "hosts": 1, "gpus_per_host": 4, "machine": "h200", "device": "NVIDIA H200",
        },
        "iteration_ms": dict(zip(("p10", "p50", "p90"), times, strict=True)),
    }  # fmt: skip


def save(folder: Path, forecast: dict[str, Any]) -> str:
    path = folder / "forecast.json"
    path.write_text(json.dumps(forecast))
    return str(path)


def median_ms(path: Path) -> float:
    """Return the median over iterations of the slowest rank's time, from the file itself."""
    timings = json.loads((path / "run.json").read_text())["timings"]
    slowest = sorted(max(times) for times in zip(*timings["iterations_ns"], strict=True))
    middle = len(slowest) // 2
    result: float = (slowest[middle] if len(slowest) % 2 else (slowest[middle - 1] + slowest[middle]) / 2) / 1e6
    return result


@pytest.mark.parametrize(
    ("factors", "inside"), [((0.9, 0.95, 1.1), True), ((1.01, 1.05, 1.1), False), ((0.8, 0.9, 0.99), False)]
)
def test_error_and_interval_follow_from_the_run(
    factors: tuple[float, float, float], inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = median_ms(ZIGZAG)
    low, middle, high = (factor * measured for factor in factors)
    path = save(tmp_path, forecast_of(ZIGZAG, (low, middle, high)))
    settled = answer(capsys, "compare", path, str(ZIGZAG))
    (score,) = settled["scores"]
    assert settled["schema"] == "ringprof.settlement/1" and (settled["inside"], settled["count"]) == (inside, 1)
    assert score["error"] == pytest.approx(factors[1] - 1, abs=1e-5) and score["inside"] is inside
    _, out, _ = run(capsys, "compare", path, str(ZIGZAG))
    words = f"{abs(factors[1] - 1):.1%}".replace("%", " %") + (" too long" if factors[1] > 1 else " too short")
    assert words in out and ("inside the interval" if inside else "outside the interval") in " ".join(out.split())


def test_deviations_are_those_of_a_lognormal() -> None:
    """The 90th percentile of a normal distribution lies 1.2816 standard deviations above its median."""
    query = Query("zigzag", Workload(seq=1, heads=1, kv_heads=1, head_dim=1), Cluster(1, 1))
    predicted = 100 / math.exp(0.1), 100.0, 100 * math.exp(0.1)
    at_p90 = Scored(Measured("x", query, 100 * math.exp(0.1)), predicted)
    assert at_p90.deviations == pytest.approx(1.2816) and at_p90.inside
    assert Scored(Measured("x", query, 100 / math.exp(0.2)), predicted).deviations == pytest.approx(-2 * 1.2816)


TABLE = """id,strategy,seq_global,heads,kv_heads,head_dim,n_gpus,hosts,causal,pass,kernel,hardware,time_ms
mine,zigzag,65536,{heads},{kv},128,4,1,True,fwd+bwd,,H200,{ms}
kernel,zigzag,65536,{heads},{kv},128,4,1,True,fwd+bwd,fa2,H200,{ms}
forward,zigzag,65536,{heads},{kv},128,4,1,True,fwd,,H200,{ms}
longer,zigzag,131072,{heads},{kv},128,4,1,True,fwd+bwd,,H200,{ms}
more,zigzag,65536,{heads},{kv},128,8,1,True,fwd+bwd,,H200,{ms}
other,ring,65536,{heads},{kv},128,4,1,True,fwd+bwd,,H200,{ms}
a100,zigzag,65536,{heads},{kv},128,4,1,True,fwd+bwd,,A100,{ms}
theirs,magi,65536,{heads},{kv},128,4,1,True,fwd+bwd,,H200,{ms}
half,zigzag,65536,{heads},{kv},128,4,1,True,bwd,,H200,{ms}
"""


def test_rows_of_a_table_are_scored_only_where_they_are_what_was_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = read_run(ZIGZAG / "run.json").workload
    assert workload is not None and workload.seq == 65536
    table = tmp_path / "table.csv"
    table.write_text(TABLE.format(heads=workload.heads, kv=workload.kv_heads, ms=100.0))
    path = save(tmp_path, forecast_of(ZIGZAG, (90.0, 110.0, 120.0)))
    settled = answer(capsys, "compare", path, str(table), str(ZIGZAG))
    first, second = settled["scores"]
    assert (first["source"], first["error"], second["source"]) == (f"{table}:2", 0.1, str(ZIGZAG))
    reasons = [entry["reason"] for entry in settled["others"]]
    for reason, part in zip(
        reasons,
        ("kernel flash-attn instead of cudnn", "backward False instead of True", "seq 131072 instead of 65536",
         "GPUs 8 instead of 4", "strategy ring instead of zigzag", "a100", "ringprof has not", "a backward pass alone"),
        strict=True,
    ):  # fmt: skip
        assert part.lower() in reason.lower()


def test_advice_and_predicted_folders_are_forecasts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Score the choice of an advice that was run."""
    right = forecast_of(ZIGZAG, (70.0, 80.0, 90.0))
    ring = forecast_of(ZIGZAG, (1.0, 2.0, 3.0))
    ring["question"]["strategy"] = "ring"
    choices = [{"label": "ring", **ring}, {"label": "zigzag, hops by NCCL", **right}]
    path = save(tmp_path, {"schema": "ringprof.advice/1", "choices": choices})
    (score,) = answer(capsys, "compare", path, str(ZIGZAG))["scores"]
    assert score["forecast"] == "zigzag, hops by NCCL"
    folder = tmp_path / "predicted"
    folder.mkdir()
    assert run(capsys, "predict", "--like", str(ZIGZAG), "--machine", "h200", "-o", str(folder))[0] == 0
    saved = tmp_path / "saved.json"
    saved.write_text(run(capsys, "predict", "--like", str(ZIGZAG), "--machine", "h200", "--format", "json")[1])
    answers = [answer(capsys, "compare", str(name), str(ZIGZAG)) for name in (folder, saved)]
    # A predicted run is compared as any other, and scored.
    assert answers[0]["schema"] == "ringprof.compare/1" and answers[1]["schema"] == "ringprof.settlement/1"
    _, text, _ = run(capsys, "compare", str(folder), str(ZIGZAG))
    assert "TFLOP/s" in text and "the interval" in text.splitlines()[-1]
    table = tmp_path / "table.csv"
    workload = read_run(ZIGZAG / "run.json").workload
    assert workload is not None
    table.write_text(TABLE.format(heads=workload.heads, kv=workload.kv_heads, ms=median_ms(ZIGZAG)))
    rows = json.loads(run(capsys, "compare", str(folder), str(table), "--format", "json")[1])
    assert rows["schema"] == "ringprof.settlement/1" and rows["scores"][0]["source"] == f"{table}:2"
    answers[0] = answers[0]["scores"]
    assert answers[0]["scores"][0]["error"] == pytest.approx(answers[1]["scores"][0]["error"], abs=1e-4)


def test_what_is_no_forecast_or_no_measurement_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="a recorded run, not a prediction"):
        read_forecasts(str(ZIGZAG))
    path = save(tmp_path, forecast_of(ZIGZAG, (70.0, 80.0, 90.0)))
    other = str(TRACES / "h200x4-ring-262144")
    code, _, err = run(capsys, "compare", path, other)
    assert code == 2 and "nothing to score" in err and "strategy ring instead of zigzag" in err
    code, _, err = run(capsys, "compare", save(tmp_path, forecast_of(ZIGZAG, (90.0, 80.0, 70.0))), str(ZIGZAG))
    assert code == 2 and "not a saved prediction" in err
    elsewhere = forecast_of(ZIGZAG, (70.0, 80.0, 90.0))
    elsewhere["question"]["device"] = "NVIDIA H100 80GB HBM3"
    code, _, err = run(capsys, "compare", save(tmp_path, elsewhere), str(ZIGZAG))
    assert code == 2 and "device H200 instead of H100" in err
    damaged: list[Any] = [{"schema": "ringprof.prediction/1"}, {"schema": "ringprof.prediction/1", "question": []}, []]
    for damage in damaged:
        code, _, err = run(capsys, "compare", save(tmp_path, damage), str(ZIGZAG))
        assert code == 2 and err.count("\n") == 1 and "Traceback" not in err
    _, _, err = run(capsys, "compare", save(tmp_path, damaged[0]), str(ZIGZAG))
    assert "it has no field 'question'" in err


def test_a_run_without_timings_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = read_run(ZIGZAG / "run.json")
    (tmp_path / "mine").mkdir()
    write_run(msgspec.structs.replace(recorded, timings=None, traces=[]), tmp_path / "mine" / "run.json")
    path = save(tmp_path, forecast_of(ZIGZAG, (70.0, 80.0, 90.0)))
    code, _, err = run(capsys, "compare", path, str(tmp_path / "mine"))
    assert code == 2 and "no iteration was timed" in err
    assert read_forecasts(path)[0].predicted_ms[1] == 80.0
