"""Layers of a model that trains on two ranks, by capture and by the profiler's own stacks, against the raw events."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="capturing needs torch")

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import ringprof
from ringprof.analysis.timeline import layers as analysis_layers
from ringprof.errors import UsageError
from ringprof.iteration import layer_ranges
from ringprof.strategies import create
from tests.recording.tiny_model import Model
from tests.strategies.ranks import run_ranks

SEQ, LAYERS, SLOW = 128, 4, 2
DELAY_S = 0.15


def train(rank: int, folder: Path, how: str, recompute: bool) -> None:
    """Profile a step in which rank 1 is late in the forward pass of one layer."""
    torch.manual_seed(0)
    strategy = create("zigzag")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = strategy.attention(q, k, v, causal=True)
        return out

    model = Model(attention, layers=LAYERS, recompute=recompute)
    ids = strategy.shard(torch.randint(64, (1, SEQ)))

    def step() -> None:
        model(ids, strategy.positions(SEQ, torch.device("cpu"))).sum().backward()

    step()
    late: list[int] = []

    def hook(*_: Any) -> None:
        if rank == 1 and not late:
            late.append(1)
            time.sleep(DELAY_S)

    model.get_submodule(f"layers.{SLOW}.q").register_forward_pre_hook(hook)
    if how == "capture":
        with ringprof.capture(folder, strategy=strategy, model=model):
            step()
    else:
        with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
            step()
        profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))


def waits_by_layer(path: Path, prefix: str) -> dict[str, int]:
    """Attribute each marked wait in a trace by the sequence numbers of operators, which the package does not read."""
    with gzip.open(path) as file:
        events = json.load(file, parse_float=Decimal)["traceEvents"]
    events = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    for event in events:
        event["ts"], event["dur"] = Decimal(event["ts"]), Decimal(event["dur"])
    named = [event for event in events if event["name"].startswith(prefix)]

    def around(candidates: list[Any], event: Any) -> list[Any]:
        return [
            other
            for other in candidates
            if other["tid"] == event["tid"] and other["ts"] <= event["ts"] < other["ts"] + other["dur"]
        ]

    operators = [event for event in events if event["cat"] == "cpu_op"]
    nodes = [event for event in operators if event["name"].startswith("autograd::engine::evaluate_function")]
    forward: dict[int, Any] = {}
    for event in sorted(operators, key=lambda event: event["ts"]):
        if event["args"].get("Fwd thread id", 0) == 0 and "Sequence number" in event["args"]:
            forward[event["args"]["Sequence number"]] = event
    result: Counter[str] = Counter()
    for event in events:
        if event["name"].startswith("ringprof::wait"):
            owners = around(named, event)
            if not owners and (inside := around(nodes, event)):
                node = max(inside, key=lambda other: other["ts"])
                owners = around(named, forward[node["args"]["Sequence number"]])
            name = owners[0]["name"].removeprefix(prefix) if owners else ""
            result[name] += int(event["dur"] * 1000)
    return dict(result)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "recompute"), [("capture", False), ("capture", True), ("stack", False), ("stack", True)]
)
def test_waits_belong_to_the_layer_by_the_sequence_number_of_the_forward_operator(
    tmp_path: Path, how: str, recompute: bool
) -> None:
    folder = tmp_path / "mine"
    if how == "stack":
        folder.mkdir()
    run_ranks(2, train, folder, how, recompute)
    analysis = ringprof.load(folder)
    prefix = layer_ranges.NAMED_LAYER if how == "capture" else "nn.Module: Layer_"
    for rank in analysis.attribution.ranks:
        label = "" if how == "capture" else "Layer_"
        layers = {row.layer.removeprefix(label): row.exposed_ns for row in rank.layers if row.exposed_ns}
        expected = waits_by_layer(folder / f"rank{rank.rank}.json.gz", prefix)
        assert layers.keys() == expected.keys()
        for layer, exposed_ns in layers.items():
            assert exposed_ns == pytest.approx(expected[layer], rel=0.01, abs=20_000)
        assert sum(layers.values()) == rank.breakdown.exposed_comm_ns
    frame = analysis.layers()
    waiting = frame[frame["rank"] == 0].set_index("layer")["exposed_ns"]
    assert str(waiting.idxmax()).endswith(str(SLOW)) and waiting.max() > DELAY_S * 0.9e9
    assert frame["wait_ns"].isna().all()  # a CPU trace does not tell waiting from sending
    assert f"{waiting.idxmax()}" in analysis.to_terminal(sections=["layers"])


class Nested(nn.Module):
    """Two stages of two layers each, another list of one module, and a list within a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))}) for _ in range(2)
        )
        self.heads = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage.children():
                x = layer(x)
        return x


def test_layers_of_a_model_are_the_members_of_its_outermost_lists() -> None:
    assert list(layer_ranges.layers_of(Nested())) == ["stages.0", "stages.1"]
    assert list(layer_ranges.layers_of(nn.ModuleList(nn.Linear(1, 1) for _ in range(3)))) == ["0", "1", "2"]
    assert layer_ranges.layers_of(nn.Linear(1, 1)) == {}


def test_hooks_end_with_the_block_also_after_an_error() -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    with layer_ranges.named_layers(layers), pytest.raises(RuntimeError):
        layers[0](torch.zeros(3))
    with layer_ranges.named_layers(layers):
        assert layers[1](torch.zeros(2)).shape == (2,)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


def test_recorder_and_analysis_agree_on_the_name_of_the_ranges() -> None:
    assert layer_ranges.NAMED_LAYER == analysis_layers.NAMED_LAYER


def test_capture_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model is a torch\.nn\.Module"), ringprof.capture(tmp_path, model="llama"):  # type: ignore[arg-type]
        pass
