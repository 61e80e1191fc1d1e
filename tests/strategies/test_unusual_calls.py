"""Calls that kernels would get silently wrong: odd strides, scales that are not positive, groups that are gone."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ringprof.integrations.batches import shard_batch
from ringprof.strategies import Unsupported, create, names
from tests.strategies.cases import (
    Case,
    WorkloadShard,
    attend,
    dense,
    error_of,
    inputs,
    over_the_ranks,
    relative_error,
    worst,
)
from tests.strategies.ranks import refusal, run_ranks

ODD = WorkloadShard(seq=16, heads=4, kv_heads=4, dtype=torch.float32)
"""The kernel of the CPU repeats fewer kv heads, which makes them dense."""


# --- strides ----------------------------------------------------------------------------------------------


def heads_outside(x: Tensor) -> Tensor:
    """Return ``x`` (B, S, H, D) in memory as (B, S, D, H)."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def heads_first(x: Tensor) -> Tensor:
    """Return ``x`` (B, S, H, D) in memory as (B, H, S, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_a_projection(x: Tensor) -> Tensor:
    """Return ``x`` (B, S, H, D) as a part of the heads of a wider tensor."""
    return torch.cat([x, x], 2)[:, :, : x.shape[2]]


def every_strategy_with_odd_strides(rank: int, kernel: str, strided: Any) -> list[tuple[str, float]]:
    return [
        (f"{name}, batch {problem.batch}", error_of(create(name, kernel=kernel), problem, strided=strided))
        for problem in (ODD, replace(ODD, batch=2))
        for name in names()
    ]


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_heads_that_are_not_innermost_in_memory(kernel):
    assert error_of(create("zigzag", kernel=kernel), ODD, strided=heads_outside) < 1e-6


@pytest.mark.processes
@pytest.mark.parametrize("kernel", ["cpu-flash", "reference"])
@pytest.mark.parametrize("strided", [heads_outside, heads_first, part_of_a_projection])
def test_odd_strides_are_exact_on_two_ranks(kernel, strided):
    for case, error in run_ranks(2, every_strategy_with_odd_strides, kernel, strided)[0]:
        assert error < 1e-6, case


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_inputs_that_are_broadcast(dim, kernel):
    problem = WorkloadShard(seq=8, batch=2, kv_heads=4)

    def broadcast(x: Tensor) -> Tensor:
        return x.narrow(dim, 0, 1).expand_as(x)

    full = [broadcast(x) for x in inputs(problem)]
    assert error_of(create("ring", kernel=kernel), problem, tensors=full, strided=broadcast) < 1e-13


# --- scales -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_negative_scale(kernel):
    problem = WorkloadShard(seq=8)
    truth = dense(problem, scale=-0.3)
    assert error_of(create("zigzag", kernel=kernel), problem, truth=truth, softmax_scale=-0.3) < 1e-13


@pytest.mark.parametrize("scale", [0, 0.0, -0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["zigzag", "ring-prefill"])
def test_a_scale_that_is_refused(name, scale):
    with pytest.raises(Unsupported, match=rf"^softmax_scale is a finite number other than 0 .*: not {scale}$"):
        create(name).attention(*inputs(WorkloadShard(seq=8))[:3], softmax_scale=scale)


def saturated(rank: int) -> dict[str, list[float]]:
    """Return the errors of dQ, dK and dV in bf16 where scores are in the thousands."""
    problem = WorkloadShard(seq=256, heads=8, kv_heads=8, head_dim=64, dtype=torch.bfloat16, kernel="cpu-flash")
    q, k, v, dout = inputs(problem)
    full = [60 * q, 60 * k, v, dout]
    truth = dense(problem, None, full)[1:]
    results = {name: over_the_ranks(Case(name), problem, tensors=full)[1:] for name in ("zigzag", "burst")}
    return {name: [*map(relative_error, gradients, truth)] for name, gradients in results.items()}


@pytest.mark.processes
def test_burst_is_as_exact_as_zigzag_where_scores_are_large():
    for errors in run_ranks(2, saturated):
        assert all(a <= 1.2 * b for a, b in zip(errors["burst"], errors["zigzag"], strict=True)), errors


# --- arguments --------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one number": ({"window_size": 5}, r"window_size is two integers, .*: not 5$"),
    "no window": ({"window_size": None}, r"window_size is two integers, .*: not None$"),
    "one side": ({"window_size": (3,)}, r"window_size is two integers, .*: not \(3,\)$"),
    "floats": ({"window_size": (3.0, 0.0)}, r"window_size is two integers, .*: not \(3\.0, 0\.0\)$"),
    "causal": ({"causal": None}, "causal is True or False: not None$"),
    "documents of each row": (
        {"cu_seqlens": torch.tensor([[0, 4, 16]] * 2)},
        r"documents are cumulative lengths, integers in one dimension, the same for every .*: not tensor\(\[\[ ?0, +4",
    ),
    "too few tokens": ({"documents": [0, 12]}, "the documents end at 12, and the sequence has 16 tokens$"),
    "too many tokens": ({"documents": [0, 20]}, "the documents end at 20, and the sequence has 16 tokens$"),
    "two documents": ({"documents": [0, 8, 12]}, "the documents end at 12, and the sequence has 16 tokens$"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("name", ["ring", "ulysses", "torch-cp"])
def test_an_argument_that_is_refused(name, options, words):
    x = torch.randn(1, 16, 4, 8)
    assert re.match(words, refusal(lambda: create(name).attention(x, x, x, **options)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
@pytest.mark.parametrize("name", ["zigzag", "ring-prefill"])
def test_types_that_are_not_real_are_refused(name, dtype):
    x = torch.ones(1, 16, 4, 8, dtype=dtype)
    assert refusal(lambda: create(name).attention(x, x, x)).startswith("strategies compute in real floating point: got")


@pytest.mark.parametrize("name", ["ring", "zigzag"])
@pytest.mark.parametrize("documents", [[0, 40], [0, 60], [0, 20, 40], [0, 20, 60]])
def test_sharding_never_drops_or_repeats_tokens(name, documents):
    strategy, x = create(name), torch.arange(48)
    calls = [
        lambda: strategy.shard(x, 0, documents=documents), lambda: strategy.positions(48, documents=documents),
        lambda: strategy.unshard(x, 0, documents=torch.tensor(documents)),
    ]  # fmt: skip
    for refused in calls:
        assert refusal(refused) == f"the documents end at {documents[-1]}, and the sequence has 48 tokens"


@pytest.mark.parametrize("lengths", [[0, 40], [0, 60], [0, 20, 40]])
def test_a_batch_whose_documents_end_elsewhere_is_refused(lengths):
    batch = {"input_ids": torch.zeros(1, 48, dtype=torch.int64), "cu_seq_lens_q": torch.tensor(lengths)}
    text = refusal(lambda: shard_batch(batch, create("zigzag")))
    assert f"cu_seq_lens_q, which ends at {lengths[-1]}, is not that of its 48 tokens" in text


def refused_by_one_rank(rank: int) -> list[str]:
    """Return the refusals of DTensors, of unequal shards, and of a type that one rank alone has."""
    strategies, messages = [create(name) for name in ("zigzag", "ulysses")], []
    x = torch.randn(1, 8, 4, 8)
    ones = DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Shard(1)])
    uneven, typed = x if rank else torch.randn(1, 9, 4, 8), x.long() if rank else x
    for strategy in strategies:
        full = torch.randn(1, 16, 4, 8)
        strategy.attention(full, full, full)  # local tensors of the DTensor's shape
        messages += [refusal(partial(strategy.attention, y, y, y)) for y in (ones, uneven, typed)]
    return messages


@pytest.mark.processes
def test_every_rank_says_why_a_call_is_refused():
    first, second = run_ranks(2, refused_by_one_rank)
    for words, others in zip(first, second, strict=True):
        assert words == others
    assert first[0].startswith("strategies take and return this rank's tensors, not DTensors: call to_local()")
    assert "(1, 9, 4, 8)" in first[1] and "(1, 8, 4, 8)" in first[1]
    assert "float32" in first[2] and "int64" in first[2]


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
    true_out, true_lse = attend(leaves[0], leaves[1], leaves[2], sinks=sinks.double())
    gradients = torch.autograd.grad((true_out * dout.double()).sum() + true_lse.sum(), leaves)
    return worst([out.detach(), *(x.grad for x in local)], map(strategy.shard, (true_out.detach(), *gradients)))


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
    messages = [refusal(strategy.attention, x, x, x) for strategy in strategies]
    # The harness ends with a barrier.
    store: Any = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return messages


@pytest.mark.processes
def test_a_strategy_of_a_process_group_that_was_destroyed_is_refused():
    for messages in run_ranks(2, after_shutting_down):
        assert set(messages) == {"torch.distributed was shut down since this strategy was created: create it again"}
