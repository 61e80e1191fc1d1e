"""Whole layers: several ranks train to the same losses as one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="recording needs torch")

import msgspec
import torch
from torch import Tensor

from ringprof.iteration.layer import Layers, LayersShard, parallelize, rotated, rotation
from ringprof.strategies import create, names
from ringprof.workload.workload import LayerAround, Workload
from tests.recording.layer_training import losses_of_one_process, losses_over_ranks
from tests.strategies.ranks import run_ranks

WORK = Workload(
    batch=2, seq=32, heads=4, kv_heads=2, head_dim=8, layers=2, layer=LayerAround(parallel="ddp", mlp_size=24)
)
RATE = 0.5


def create_layers(strategy: Any, workload: Workload = WORK) -> Layers:
    torch.manual_seed(0)
    return Layers(workload, strategy).double()


def plain_layers(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Compute the layers without modules: complex rotation, masked softmax."""
    turn = torch.polar(
        torch.ones(32, 4, dtype=torch.float64),
        torch.arange(32)[:, None] * 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4),
    )[:, None]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt() * weight

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    for layer in ("layers.0", "layers.1"):
        w = {name.removeprefix(f"{layer}."): tensor for name, tensor in weights.items()}
        heads = (norm(x, w["before_attention.weight"]) @ w["qkv.weight"].T).unflatten(-1, (8, 8))
        q, k, v = turned(heads[:, :, :4]), turned(heads[:, :, 4:6]), heads[:, :, 6:]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 8**0.5
        seen = torch.arange(32) <= torch.arange(32)[:, None]
        out = torch.einsum(
            "bhqk,bkhd->bqhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v.repeat_interleave(2, 2)
        )
        x = x + out.flatten(2) @ w["out.weight"].T
        gate, up = (norm(x, w["before_mlp.weight"]) @ w["gate_up.weight"].T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ w["down.weight"].T
    return x


def losses(rank: int, name: str, parallel: Any, recomputed: bool) -> list[float]:
    """Train on all ranks; return the losses of the whole sequence, which are the mean of the ranks' losses."""
    strategy = create(name, kernel="reference")
    around = LayerAround(parallel=parallel, mlp_size=24, checkpoint=recomputed)
    model = parallelize(
        create_layers(strategy, msgspec.structs.replace(WORK, layer=around)), parallel, torch.device("cpu")
    )
    return losses_over_ranks(model, strategy, RATE)


def every_strategy(rank: int) -> dict[str, list[float]]:
    return {name: losses(rank, name, "ddp", False) for name in names()}


def every_way(rank: int) -> dict[str, list[float]]:
    ways = [("ddp", True), ("fsdp2", False), ("fsdp2", True)]
    return {f"{how} {again}": losses(rank, "zigzag", how, again) for how, again in ways}


@pytest.mark.processes
def test_every_strategy_trains_to_the_losses_of_one_process() -> None:
    truth = losses_of_one_process(create_layers(None), plain_layers, RATE)
    assert truth[-1] < truth[0] - 0.05, "it learns"
    by_strategy = run_ranks(4, every_strategy)[0]
    assert len(by_strategy) == 9
    for name, mine in by_strategy.items():
        assert mine == pytest.approx(truth, rel=1e-9), name


@pytest.mark.processes
def test_ddp_and_fsdp2_with_and_without_recomputation_train_alike() -> None:
    truth = losses_of_one_process(create_layers(None), plain_layers, RATE)
    for way, mine in run_ranks(2, every_way)[0].items():
        assert mine == pytest.approx(truth, rel=1e-9), way


def kept(rank: int, recomputed: bool) -> float:
    """Return the largest difference of the kept attention's results from those of that attention computed again."""
    around = LayerAround(parallel="ddp", mlp_size=24, checkpoint=recomputed)
    workload = msgspec.structs.replace(WORK, layer=around, dtype="fp32")
    strategy = create("zigzag", kernel="cpu-flash")
    shard = LayersShard.create(strategy, workload, torch.device("cpu"))
    results = shard.run_for_verification()
    q, k, v = (x.clone().requires_grad_() for x in (shard.q, shard.k, shard.v))
    out = strategy.attention(q, k, v)
    assert shard.dout is not None
    gradients = torch.autograd.grad(out, (q, k, v), shard.dout)
    pairs = zip((out.detach(), *gradients), (results.out, results.dq, results.dk, results.dv), strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs if theirs is not None)


@pytest.mark.processes
@pytest.mark.parametrize("recomputed", [False, True])
def test_verification_checks_the_attention_of_the_layer(recomputed: bool) -> None:
    assert max(run_ranks(2, kept, recomputed)) < 1e-6


def test_rotary_embedding_depends_on_position_difference() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 1, 8, generator=generator, dtype=torch.float64) for _ in range(2))

    def product(i: int, j: int) -> float:
        a, b = (rotated(x, rotation(torch.tensor([position]), 8, torch.float64)) for x, position in ((q, i), (k, j)))
        return float((a * b).sum())

    assert product(0, 0) == pytest.approx(float((q * k).sum()), rel=1e-12)
    assert product(1_000_007, 1_000_000) == pytest.approx(product(7, 0), rel=1e-9)


def test_model_flops_of_a_layer_are_attention_and_matrix_products() -> None:
    # Attention forward 2·B·S²·H·D = 131,072 a layer (causal), and 3.5 times that with the backward pass.
    # Matrices: 32·32 + 2·16·32 + 32·32 + 3·32·24 = 5376 numbers; 6 FLOPs a token and number; 64 tokens.
    assert WORK.parameters() == 5376
    assert WORK.model_flops() == 2 * (131_072 * 7 // 2 + 6 * 64 * 5376)
    again = LayerAround(parallel="ddp", mlp_size=24, checkpoint=True)
    assert msgspec.structs.replace(WORK, layer=again).model_flops() == WORK.model_flops()
