"""A rank that raises in the middle of a call on GPUs, over NCCL and copied hops: the other raises, and both recover."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.strategies import RankRaised, create
from ringprof.strategies.base import AttentionCall
from ringprof.strategies.kernels.reference import ReferenceKernel
from tests.strategies.gpu_ranks import needs_two_gpus, run_gpu_ranks

pytestmark = [pytest.mark.gpu, needs_two_gpus]
NINE = ("ring", "zigzag", "stripe", "ulysses", "usp", "double-ring", "burst", "megatron", "allgather")
COPYING = ("ring", "zigzag", "stripe", "double-ring", "burst")
SHAPE = 1, 512, 4, 128
KNOWN_S = 3.0
"""Seconds after which every rank knows that another has raised: it looks twice a second."""
SOON_S = 30.0
TOLERANCE = 0.02
"""Relative error of bf16; wrong results are off by 0.3 and more."""


def problem() -> tuple[list[Tensor], list[Tensor]]:
    """Return q, k, v and dout in bf16, and the output and gradients in float64."""
    generator = torch.Generator("cuda").manual_seed(0)
    full = [torch.randn(SHAPE, generator=generator, device="cuda").bfloat16() for _ in range(4)]
    q, k, v, dout = (x.double() for x in full)
    kernel, scale = ReferenceKernel(), SHAPE[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, scale=scale, causal=True)
    return full, [out, *kernel.backward(dout, q, k, v, lse, out=out, scale=scale, causal=True)]


def outcome(strategy: Any, full: list[Tensor], truth: list[Tensor]) -> str:
    """Return what a call and its backward pass raise, or ``right``, ``nan`` or ``wrong``."""
    begin = time.monotonic()
    try:
        leaves = [strategy.shard(x).requires_grad_() for x in full[:3]]
        out = strategy.attention(*leaves)
        results = out.detach(), *torch.autograd.grad(out, leaves, strategy.shard(full[3]))
        pairs = [(x.double(), strategy.shard(exact)) for x, exact in zip(results, truth, strict=True)]
        worst = max([float((x - exact).norm() / exact.norm()) for x, exact in pairs], key=lambda x: (x != x, x))
    except (RankRaised, MemoryError) as raised:
        kind = "late" if time.monotonic() - begin > SOON_S else type(raised).__name__
        return f"{kind}: {raised}"
    return "right" if worst < TOLERANCE else "nan" if worst != worst else "wrong"


def raising(rank: int, hops: str, names: tuple[str, ...]) -> list[str]:
    """Let a rank raise in a call of each strategy, of the first at each moment; return what is not as it should be."""
    full, truth = problem()
    faults = []
    for number, name in enumerate(names):
        strategy = create(name, hops=hops)
        # Each turn makes the communicators of all channels three times.
        for turn in range(3) if not number else (number % 3,):
            moment, block = (("forward", 1), ("forward", 2), ("backward", 1))[turn]
            methods = ("backward", "backward_into") if moment == "backward" else ("forward",)
            culprit = (number + turn) % 2
            left = [1 if name in ("ulysses", "usp", "allgather") or (name, culprit) == ("ring", 0) else block]
            first = outcome(strategy, full, truth)
            with pytest.MonkeyPatch.context() as patch:
                for method in methods if rank == culprit else ():
                    patch.setattr(AttentionCall, method, failing(getattr(AttentionCall, method), left))
                this = outcome(strategy, full, truth)
            time.sleep(KNOWN_S)
            after = outcome(strategy, full, truth)
            strategy.recover()
            recovered = [outcome(strategy, full, truth) for _ in range(2)]
            begin = "RankRaised: this rank left " if rank == culprit else f"RankRaised: rank {culprit} raised in "
            if rank == culprit:
                fits = this.startswith("MemoryError")
            else:
                # Over NCCL, what an aborted communicator should have brought is undefined.
                fits = this in ("right", "nan") or this.startswith(begin) or (this == "wrong" and hops == "nccl")
            if not fits or not after.startswith(begin) or [first, *recovered] != ["right"] * 3:
                faults.append(f"{name}, {moment}, block {block}, rank {rank}: {first}; {this}; {after}; {recovered}")
    return faults


def failing(method: Any, left: list[int]) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise MemoryError("out of memory")
        return method(*args, **options)

    return run


@pytest.mark.parametrize(("hops", "names"), [("nccl", NINE), ("copy", COPYING)], ids=["nccl", "copy"])
def test_other_rank_raises_and_both_recover(hops, names):
    assert run_gpu_ranks(2, raising, hops, names) == [[], []]
