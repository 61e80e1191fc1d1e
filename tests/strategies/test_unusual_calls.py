"""Calls that kernels would get silently wrong: odd strides, scales that are not positive, groups that are gone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringprof.strategies import Unsupported, create, names
from tests.strategies.cases import WorkloadShard, inputs, relative_error
from tests.strategies.ranks import run_ranks

ODD = WorkloadShard(seq=16, heads=4, kv_heads=4, dtype=torch.float32)
"""The kernel of the CPU repeats fewer kv heads, which makes them dense."""


def plain(q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute causal attention and its LSE by the formula; k and v may have fewer heads than q."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[None, :, None].expand_as(lse))
    return torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v), lse


def errors_of(
    strategy: Any, full: list[Tensor], strided: Callable[[Tensor], Tensor] = Tensor.contiguous, **options: Any
) -> float:
    """Return the largest relative error of output and gradients; ``strided`` gives the local inputs their strides."""
    *qkv, dout = full
    local = [strided(strategy.shard(x)).detach().requires_grad_() for x in qkv]
    out = strategy.attention(*local, **options)
    out.backward(strategy.shard(dout))
    leaves = [x.double().requires_grad_() for x in qkv]
    truth = plain(*leaves, scale=options.get("softmax_scale", qkv[0].shape[-1] ** -0.5))[0]
    truth.backward(dout.double())
    pairs = [(out.detach(), truth.detach()), *((x.grad, y.grad) for x, y in zip(local, leaves, strict=True))]
    return max(relative_error(value, strategy.shard(true)) for value, true in pairs)


# --- strides ----------------------------------------------------------------------------------------------


def heads_outside(x: Tensor) -> Tensor:
    """Return ``x`` (B, S, H, D) in memory as (B, S, D, H)."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def every_strategy_with_odd_strides(rank: int) -> float:
    full = inputs(ODD)
    return max(errors_of(create(name, kernel="cpu-flash"), full, heads_outside) for name in names())


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_heads_that_are_not_innermost_in_memory(kernel):
    assert errors_of(create("zigzag", kernel=kernel), inputs(ODD), heads_outside) < 1e-6


@pytest.mark.processes
def test_heads_that_are_not_innermost_in_memory_on_two_ranks():
    assert max(run_ranks(2, every_strategy_with_odd_strides)) < 1e-6


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_inputs_that_are_broadcast(dim, kernel):
    full = [x.narrow(dim, 0, 1).expand_as(x) for x in inputs(WorkloadShard(seq=8, batch=2, kv_heads=4))[:3]]
    full.append(inputs(WorkloadShard(seq=8, batch=2))[3])
    assert errors_of(create("ring", kernel=kernel), full, lambda x: x.narrow(dim, 0, 1).expand_as(x)) < 1e-13


# --- scales -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_negative_scale(kernel):
    assert errors_of(create("zigzag", kernel=kernel), inputs(WorkloadShard(seq=8)), softmax_scale=-0.3) < 1e-13


@pytest.mark.parametrize("scale", [0, 0.0, -0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["zigzag", "ring-prefill"])
def test_a_scale_that_is_refused(name, scale):
    with pytest.raises(Unsupported, match=rf"^softmax_scale is a finite number other than 0 .*: not {scale}$"):
        create(name).attention(*inputs(WorkloadShard(seq=8))[:3], softmax_scale=scale)


# --- torch's own ring -------------------------------------------------------------------------------------


def torchs_ring(rank: int, kernel: str) -> float:
    """Return the largest error with smaller heads of v, the LSE in the loss, and sinks."""
    q, k, v, dout = inputs(WorkloadShard(seq=16, dtype=torch.float32))
    v, dout, sinks = v[..., :5], dout[..., :5], torch.tensor([0.5, -1.0, 0.0, 2.0])
    strategy = create("torch-cp", kernel=kernel)
    local = [strategy.shard(x).requires_grad_() for x in (q, k, v)]
    out, lse = strategy.attention(*local, return_lse=True, sinks=sinks)
    ((out * strategy.shard(dout)).sum() + lse.sum()).backward()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    true_out, true_lse = plain(*leaves, scale=8**-0.5, sinks=sinks.double())
    ((true_out * dout.double()).sum() + true_lse.sum()).backward()
    pairs = [(out.detach(), true_out.detach()), *((x.grad, y.grad) for x, y in zip(local, leaves, strict=True))]
    return max(relative_error(value, strategy.shard(true)) for value, true in pairs)


@pytest.mark.processes
@pytest.mark.parametrize("kernel", ["cpu-flash", "reference"])
def test_torchs_ring_with_smaller_heads_of_v_an_lse_and_sinks(kernel):
    assert max(run_ranks(2, torchs_ring, kernel)) < 1e-6


# --- process groups ---------------------------------------------------------------------------------------


def after_shutting_down(rank: int) -> list[str]:
    strategies = [create(name) for name in names()]
    x = strategies[0].shard(torch.randn(1, 16, 4, 8))
    for strategy in strategies:
        strategy.attention(x, x, x)
    dist.barrier()
    dist.destroy_process_group()
    messages = []
    for strategy in strategies:
        with pytest.raises(Unsupported) as refusal:
            strategy.attention(x, x, x)
        messages.append(str(refusal.value))
    # The harness ends with a barrier.
    store: Any = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return messages


@pytest.mark.processes
def test_a_strategy_of_a_process_group_that_was_destroyed_is_refused():
    for messages in run_ranks(2, after_shutting_down):
        assert set(messages) == {"torch.distributed was shut down since this strategy was created: create it again"}
