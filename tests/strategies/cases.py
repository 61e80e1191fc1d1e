"""Cases of every strategy and its options; an attention problem computed on several ranks, and densely in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringprof.strategies import create


@dataclass(frozen=True)
class WorkloadShard:
    """One attention problem over all ranks."""

    seq: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int | None = None
    causal: bool = True
    dtype: torch.dtype = torch.float64
    kernel: str = "reference"
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """A strategy, its parameters, and the world sizes that it can run on."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    worlds: tuple[int, ...] = (1, 2, 4, 8)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.params.items())])


def _usp(degree: int, **params: Any) -> Case:
    return Case("usp", {"ulysses_degree": degree, **params}, tuple(size for size in (2, 4, 8) if size >= degree))


CASES = [
    Case("ring"),
    Case("ring", {"grad_wire": "input"}),
    Case("zigzag"),
    Case("stripe"),
    Case("ulysses", {}, (1, 2, 4)),
    Case("ulysses", {"grad_wire": "fp32"}, (1, 2, 4)),
    Case("usp"),
    Case("usp", {"ring_degree": 1}, (1, 2, 4)),
    Case("usp", {"ring_degree": 2, "placement": "ring-first", "grad_wire": "input"}, (2, 4, 8)),
    *(
        _usp(2, placement=placement, layout=layout)
        for placement in ("head-first", "ring-first")
        for layout in ("zigzag", "contiguous", "stripe")
    ),
    *(_usp(4, placement=placement, layout="stripe") for placement in ("head-first", "ring-first")),
    Case("double-ring"),
    Case("double-ring", {"ring_window": 2}, (2, 4, 8)),
    Case("double-ring", {"ring_window": 1}, (2, 4)),
    Case("double-ring", {"ring_window": 2, "grad_wire": "fp32"}, (4, 8)),
    Case("double-ring", {"ring_window": 2, "grad_wire": "input"}, (4, 8)),
    Case("double-ring", {"ulysses_degree": 2, "ring_window": 1}, (2, 4, 8)),
    Case("double-ring", {"ulysses_degree": 2, "ring_window": 2, "placement": "context-first"}, (4, 8)),
    Case("burst"),
    Case("burst", {"ring_window": 2}, (2, 4, 8)),
    Case("burst", {"ring_window": 1}, (2, 4)),
    Case("burst", {"optimized_backward": False}),
    Case("burst", {"optimized_backward": False, "ring_window": 2, "grad_wire": "fp32"}, (4,)),
    Case("megatron"),
    Case("megatron", {"grad_wire": "fp32"}),
    Case("allgather"),
    Case("allgather", {"layout": "zigzag"}),
    Case("allgather", {"layout": "zigzag", "grad_wire": "fp32"}),
    Case("allgather", {"layout": "zigzag", "heads_at_a_time": 1}),
]


def inputs(problem: WorkloadShard) -> list[Tensor]:
    """Return the full q, k, v and dout, equal on every rank."""
    generator = torch.Generator().manual_seed(problem.seed)

    def draw(heads: int, size: int) -> Tensor:
        shape = (problem.batch, problem.seq, heads, size)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(problem.dtype)

    heads, kv_heads, size = problem.heads, problem.kv_heads, problem.head_dim
    v_size = problem.v_head_dim or size
    return [draw(heads, size), draw(kv_heads, size), draw(kv_heads, v_size), draw(heads, v_size)]


def dense(problem: WorkloadShard) -> list[Tensor]:
    """Compute out, dq, dk and dv by torch's autograd over the plain formula, in float64."""
    q, k, v, dout = (tensor.double() for tensor in inputs(problem))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    groups = problem.heads // problem.kv_heads
    wide_k, wide_v = (tensor.repeat_interleave(groups, 2) for tensor in leaves[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], wide_k) * problem.head_dim**-0.5
    if problem.causal:
        scores = scores.masked_fill(torch.ones(problem.seq, problem.seq).triu(1).bool(), float("-inf"))
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), wide_v)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def over_the_ranks(case: Case, problem: WorkloadShard, using: Any = None, **how: Any) -> list[Tensor]:
    """Compute out, dq, dk and dv of the whole sequence on all ranks, with the kernel ``using`` if there is one."""
    strategy = create(case.name, kernel=problem.kernel, **how, **case.params)
    if using is not None:
        strategy.kernel_for = lambda q, **_: using
    *qkv, dout = (strategy.shard(tensor) for tensor in inputs(problem))
    for tensor in qkv:
        tensor.requires_grad_()
    out = strategy.attention(*qkv, causal=problem.causal)
    out.backward(dout)
    return [strategy.unshard(tensor) for tensor in (out, *(tensor.grad for tensor in qkv))]


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return the root mean square of the difference over that of the truth."""
    return float((value.double() - truth).norm() / truth.norm())
