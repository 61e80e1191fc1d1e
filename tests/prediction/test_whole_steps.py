"""Steps of whole layers: what is measured of a model with a known clock, and what is predicted from it."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="a model is measured")

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dev.benchmarks import prediction
from ringprof import cli
from ringprof.errors import InputError, UnsupportedWorkloadError, UsageError
from ringprof.prediction import measure_model as measuring
from ringprof.prediction import whole_steps
from ringprof.prediction.calibration import (
    Calibration,
    ModelFigures,
    ModelStep,
    Phase,
    calibration_json,
    read_calibration,
)
from ringprof.prediction.measure_model import measure_model
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.prediction.whole_steps import StepPrediction, predict_step
from ringprof.workload.workload import LayerAround, Workload

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 4
EMBEDDING_NS, FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 5, 7, 11, 1000
"""Nanoseconds per token of the embedding and of a layer's passes, and of the optimizer per layer."""


class Clock:
    """Time that passes only when a model says so."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now


class Takes(torch.autograd.Function):
    """Identity that takes ``forward`` and ``backward`` nanoseconds."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, forward: int, backward: int, x: Tensor) -> Tensor:
        ctx.clock, ctx.backward_ns = clock, backward
        ctx.save_for_backward(x)
        clock.now += forward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        # Makes a checkpoint compute the layer again up to here.
        assert ctx.saved_tensors
        ctx.clock.now += ctx.backward_ns
        return None, None, None, gradient


class Layer(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.weight = clock, nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        x = Takes.apply(self.clock, tokens * FORWARD_NS, tokens * BACKWARD_NS, self.weight(x))
        heads = x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        out = functional.scaled_dot_product_attention(heads, heads[:, :KV_HEADS], heads[:, :KV_HEADS], is_causal=True)
        out = out.transpose(1, 2).flatten(2)
        return out * out


class Model(nn.Module):
    def __init__(self, clock: Clock, layers: int, recomputed: bool) -> None:
        super().__init__()
        self.clock, self.recomputed = clock, recomputed
        self.layers = nn.ModuleList(Layer(clock) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = Takes.apply(self.clock, x.shape[1] * EMBEDDING_NS, 0, x.requires_grad_())
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return x.square().mean()


class Optimizer(torch.optim.SGD):
    def __init__(self, model: Model) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model = model

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.model.clock.now += OPTIMIZER_NS * len(self.model.layers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that attention moves by the square of the tokens, twice as far in the backward pass."""
    clock = Clock()

    def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        assert is_causal and k.shape[1] == KV_HEADS
        mixed = q + k.repeat_interleave(2, 1) + v.repeat_interleave(2, 1)
        out: Tensor = Takes.apply(clock, q.shape[2] ** 2, 2 * q.shape[2] ** 2, mixed)
        return out

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(measuring, "time", clock)
    return clock


def measured(clock: Clock, *, recomputed: bool = False, tokens: tuple[int, ...] = (8, 32)) -> ModelFigures:
    def function(layers: int) -> tuple[Model, Callable[[int], dict[str, Tensor]], Optimizer]:
        model = Model(clock, layers, recomputed)
        return model, lambda count: {"x": torch.ones(1, count, HIDDEN)}, Optimizer(model)

    return measure_model(function, "made:up", torch.device("cpu"), tokens)


def test_a_layers_time_is_what_a_second_layer_adds_without_attention(clock: Clock) -> None:
    figures = measured(clock)
    for tokens in (8, 20, 32):
        assert figures.times_ns("forward", tokens) == (tokens * FORWARD_NS, tokens * EMBEDDING_NS, 0.0)
        assert figures.times_ns("backward", tokens) == (tokens * BACKWARD_NS, 0.0, 0.0)
        assert figures.times_ns("optimizer", tokens) == (OPTIMIZER_NS, 0.0, 0.0)
    assert figures.attention_ns == {"forward": [(8, 64), (32, 1024)], "backward": [(8, 128), (32, 2048)]}
    assert figures.attention_calls == {"forward": 1, "backward": 1}
    assert (figures.heads, figures.kv_heads, figures.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert figures.layer_bytes == 4 * HIDDEN**2 and figures.rest_bytes == 0


def test_layers_that_are_computed_again_have_a_second_forward_call_in_the_backward_pass(clock: Clock) -> None:
    figures = measured(clock, recomputed=True)
    assert figures.attention_calls == {"forward": 2, "backward": 1}
    assert figures.times_ns("forward", 8)[0] == 8 * FORWARD_NS
    assert figures.times_ns("backward", 8)[0] == 8 * (BACKWARD_NS + FORWARD_NS)


def test_beyond_twice_the_measured_lengths_is_refused(clock: Clock) -> None:
    figures = measured(clock)
    assert figures.times_ns("forward", 64)[0] == 64 * FORWARD_NS and figures.times_ns("forward", 4)[0] == 4 * FORWARD_NS
    for tokens in (3, 65):
        with pytest.raises(UnsupportedWorkloadError, match=f"^{tokens} tokens per GPU: .* measured with 8 to 32"):
            figures.times_ns("forward", tokens)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda layers: nn.Linear(2, 2), "must return a model and a function"),
        (lambda layers: (nn.Linear(2, 2), lambda tokens: {"input": torch.ones(tokens, 2)}), "no attention call"),
        (lambda: None, r"made:up: with 1 layer fails with TypeError: .* takes 0 positional arguments .*py:\d+\)$"),
        (lambda layers: (nn.Linear(2, 2), lambda tokens: 1 / 0), r"number of tokens fails with ZeroDivisionError"),
        (lambda layers: (nn.Linear(2, 2), lambda tokens: {"x": 1}), "a step over 4 tokens fails with TypeError"),
        (lambda layers: (nn.ReLU(), lambda tokens: {}), "the model has no parameters"),
    ],
)
def test_functions_that_measure_nothing_are_refused(function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure_model(function, "made:up", torch.device("cpu"), [4])


# --- predictions ---------------------------------------------------------------------------------------

H200 = read_calibration("h200")
SEQ, LAYERS = 32768, 3
TIMES_MS: dict[Phase, tuple[float, float]] = {"forward": (9.0, 15.0), "backward": (18.0, 29.0), "optimizer": (3.0, 5.0)}
"""Milliseconds of one and of two layers outside attention."""
LAYER_BYTES, REST_BYTES = 400 << 20, 200 << 20


def machine(**changes: Any) -> Calibration:
    steps = [
        ModelStep(
            phase=phase, tokens=SEQ // 2, one_layer_ns=single * 1e6, two_layers_ns=double * 1e6, spread=0.0, count=5
        )
        for phase, (single, double) in TIMES_MS.items()
    ]
    figures = ModelFigures(
        target="mine:layers", device=H200.device, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16",
        layer_bytes=LAYER_BYTES, rest_bytes=REST_BYTES, attention_calls={"forward": 1, "backward": 1},
        attention_ns={}, steps=steps,
    )  # fmt: skip
    return msgspec.structs.replace(H200, model=msgspec.structs.replace(figures, **changes))


def query(size: int, seq: int = SEQ, parallel: Any = "fsdp2") -> Query:
    layer = LayerAround(parallel=parallel, mlp_size=14336)
    workload = Workload(seq=seq, heads=32, kv_heads=8, head_dim=128, layers=LAYERS, layer=layer)
    return Query("zigzag", workload, Cluster(1, size), "flash-attn-3", "copy")


def predicted(size: int, machine: Calibration, parallel: str = "fsdp2") -> tuple[StepPrediction, float]:
    whole = query(size, SEQ * size // 2, parallel)
    alone = msgspec.structs.replace(whole.workload, layer=None, layers=1)
    attention_ns = predict(replace(whole, workload=alone), machine, schedule_of).median_ns
    return predict_step(whole, machine, schedule_of), attention_ns


def copies_ns(parameter_bytes: int, copies: float) -> float:
    """Return the time of so many copies, each read and written."""
    return 2 * copies * parameter_bytes / H200.memory_gb_s.value


def test_a_step_on_one_gpu_is_the_sum_of_its_layers() -> None:
    """FSDP2 copies a layer's parameters twice and its gradients in and out; it keeps the other parameters."""
    step, attention_ns = predicted(1, machine())
    layers_ns, once_ms = LAYERS * (17e6 + copies_ns(LAYER_BYTES, 4)), 3 + 7
    assert step.parts_ns == pytest.approx(
        {"attention": LAYERS * attention_ns, "layers": layers_ns, "optimizer": (LAYERS * 2 + 1) * 1e6,
         "once": once_ms * 1e6, "traffic": copies_ns(REST_BYTES, 3)}
    )  # fmt: skip
    low, middle, high = step.interval_ns
    assert low < middle < high and middle == pytest.approx(sum(step.parts_ns.values()))


def test_recomputed_attention_is_counted_once_more() -> None:
    once, attention_ns = predicted(1, machine())
    again, _ = predicted(1, machine(attention_calls={"forward": 2, "backward": 1}))
    forward = sum(once.attention.breakdown.forward.values()) / (
        sum(once.attention.breakdown.forward.values()) + sum(once.attention.breakdown.backward.values())
    )
    assert again.parts_ns["attention"] - once.parts_ns["attention"] == pytest.approx(LAYERS * forward * attention_ns)


@pytest.mark.parametrize("parallel", ["fsdp2", "ddp"])
def test_traffic_is_that_of_ring_collectives(parallel: str) -> None:
    """Half of the parameters leave each of two ranks per collective; all but the first and last overlap.

    The larger of two standard normal numbers has a median of 0.545: by so many variations the slower device is slower.
    """
    step, _ = predicted(2, machine(), parallel)
    slower = 1 + 0.545 * H200.device_variation.value
    rates = {name: H200.same_host.collective_gb_s[name].value for name in ("all_gather", "reduce_scatter")}

    def ns(operation: str, size: int) -> float:
        return size / 2 / rates[operation] + 1e3 * H200.same_host.latency_us.value

    rest = ns("all_gather", REST_BYTES) + ns("reduce_scatter", REST_BYTES)
    gather, reduce = ns("all_gather", LAYER_BYTES), ns("reduce_scatter", LAYER_BYTES)
    taken = H200.contention.value * H200.nccl.collective_channels / H200.multiprocessors
    if parallel == "fsdp2":
        # Two gathers of a layer with a shard's and a whole copy each; one of the rest, which stays for both passes.
        exposed = gather + reduce + rest + copies_ns(REST_BYTES, 1.5 + 1)
        slowed = LAYERS * (taken * (2 * gather + reduce) + copies_ns(LAYER_BYTES, 2 * 1.5 + 1))
        optimizer_ms = (LAYERS * 2 + 1) / 2
    else:
        # Gradients are copied into the buckets and back.
        exposed, optimizer_ms = gather + rest + copies_ns(REST_BYTES, 2), LAYERS * 2 + 1
        slowed = LAYERS * (taken * (gather + reduce) + copies_ns(LAYER_BYTES, 2))
    assert step.parts_ns["traffic"] == pytest.approx(exposed)
    assert step.parts_ns["layers"] == pytest.approx(LAYERS * 17e6 * slower + slowed, rel=1e-5)
    assert step.parts_ns["optimizer"] == pytest.approx(optimizer_ms * 1e6 * slower, rel=1e-5)


def test_layers_take_as_long_as_on_the_slowest_of_eight_devices() -> None:
    """Against the median of the slowest of eight drawn devices; embeddings, head and loss are computed on each."""
    generator = random.Random(0)
    variation = H200.device_variation.value
    slowest = median(max(generator.gauss(1.0, variation) for _ in range(8)) for _ in range(20_000))
    step = predict_step(query(8, SEQ * 8 // 2, "ddp"), machine(), schedule_of, draws=1)
    assert step.parts_ns["once"] == pytest.approx((3 + 7) * 1e6 * slowest, rel=5e-4)
    assert slowest > 1.015


def test_traffic_that_is_longer_than_a_layer_is_exposed() -> None:
    huge = 64 << 30
    step, attention_ns = predicted(2, machine(layer_bytes=huge))
    gather_ns = huge / 2 / H200.same_host.collective_gb_s["all_gather"].value
    reduce_ns = huge / 2 / H200.same_host.collective_gb_s["reduce_scatter"].value
    assert sum(step.parts_ns.values()) == pytest.approx(LAYERS * (2 * gather_ns + reduce_ns), rel=0.4)
    assert step.parts_ns["traffic"] > LAYERS * (
        2 * gather_ns + reduce_ns - copies_ns(huge, 4) - 17e6 - 1.3 * attention_ns
    )


def test_measured_steps_of_four_layers_are_predicted() -> None:
    """Steps of dev/benchmarks/step_prediction.py on one and two H200, in other processes than the layers.

    All come out too fast; the spread of a whole step is such that they lie inside.
    """
    scores = list(prediction.steps())
    assert len(scores) == 6 and all(-0.05 < score.error < -0.015 and score.inside for score in scores)


def test_the_spread_of_a_step_holds_five_of_six_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spread is the most that a step needs beyond that of its parts; so are five by others, four by other hosts."""
    spread = whole_steps.STEP_SPREAD
    monkeypatch.setattr(whole_steps, "STEP_SPREAD", 0.0)
    needed, normal_80 = [], NormalDist().inv_cdf(0.9)
    for score in prediction.steps():
        assert score.low and score.high
        of_parts = math.log(score.high / score.low) / (2 * normal_80)
        needed.append(max(0.0, (math.log(score.predicted / score.measured) / normal_80) ** 2 - of_parts**2) ** 0.5)
    with open(prediction.DATA / "h200_steps.csv", encoding="utf-8", newline="") as file:
        hosts = [row["host"] for row in csv.DictReader(file)]

    def inside(groups: Sequence[object]) -> int:
        """Count the steps that need no more than the most that those of other groups need."""
        return sum(
            need <= max(other for other, there in zip(needed, groups, strict=True) if there != group)
            for need, group in zip(needed, groups, strict=True)
        )

    assert inside(range(6)) == 5 and inside(hosts) == 4
    assert max(needed) <= spread == pytest.approx(max(needed), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "NVIDIA H100 80GB HBM3"}, "were measured on NVIDIA H100"),
        ({"heads": 40}, "the attention of mine:layers has 40 heads"),
    ],
)
def test_models_of_other_devices_and_heads_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedWorkloadError, match=message):
        predict_step(query(2), machine(**changes), schedule_of)


def test_the_command_predicts_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(calibration_json(machine()))
    command = [
        "predict", "--strategy", "zigzag", "--seq", str(SEQ), "--heads", "32", "--kv-heads", "8", "--gpus-per-node",
        "2", "--machine", str(path), "--layer", "fsdp2", "--layers", str(LAYERS),
    ]  # fmt: skip
    assert cli.run([*command, "--format", "json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert (step["layers"], step["parallel"], step["model"]) == (LAYERS, "fsdp2", "mine:layers")
    assert step["step_ms"]["p50"] == pytest.approx(sum(step["parts_ms"].values()), rel=1e-3)
    assert cli.run(command) == 0
    assert f"PREDICTED STEP: {LAYERS} layers of mine:layers with FSDP2" in capsys.readouterr().out
    without = [*command[:-6], "--machine", "h200", *command[-4:]]
    assert cli.run(without) == 2
    assert "ringprof calibrate --model" in capsys.readouterr().err


def test_the_command_measures_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    path = tmp_path / "machine.json"
    command = ["calibrate", "--model", "tiny_layers:layers", "--tokens", "8,16", "-o", str(path)]
    assert cli.run(command) == 0
    figures = read_calibration(path).model
    assert figures is not None and {step.tokens for step in figures.steps} == {8, 16} and figures.heads == 2
    assert cli.run([*command, "--parts", "host"]) == 2
    assert "--parts: not with --model" in capsys.readouterr().err
    before = path.read_bytes()
    assert cli.run([*command, "--tokens", "0,8"]) == 2
    assert "--tokens 0: steps over at least one token" in capsys.readouterr().err and path.read_bytes() == before


def test_files_that_hold_one_layers_attention_are_not_written_for_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(calibration_json(machine()))
    command = ["predict", "--strategy", "zigzag", "--seq", "32k", "--machine", str(path), "--layer", "ddp"]
    assert cli.run([*command, "-o", str(tmp_path / "run")]) == 2
    assert "leave --layer out" in capsys.readouterr().err


def test_a_file_whose_model_lacks_a_phase_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    whole = machine()
    assert whole.model is not None
    path.write_bytes(calibration_json(machine(steps=whole.model.steps[:2])))
    with pytest.raises(InputError, match="its model lacks a phase"):
        read_calibration(path)
