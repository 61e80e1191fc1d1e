"""Cases of every strategy and its options; an attention problem computed on several ranks, and densely in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from math import inf, isnan
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from ringprof.strategies import create
from ringprof.workload.mask import Mask
from tests.test_mask import sees


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


Strided = Callable[[Tensor], Tensor]
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


@cache
def pairs_seen(mask: Mask, queries: int, keys: int) -> Tensor:
    """Return which of the last ``queries`` tokens see which of the ``keys``, pair by pair."""
    return torch.tensor([[sees(mask, row, key) for key in range(keys)] for row in range(keys - queries, keys)])


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, *, scale: float | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of the last tokens of k, and its LSE, by the formula; k and v may have fewer heads than q.

    Arguments are those of the strategies; the mask is causal if none is given.
    """
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~pairs_seen(mask or Mask(), q.shape[1], k.shape[1]), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(-1)


def dense(
    problem: WorkloadShard, mask: Mask | None = None, tensors: Iterable[Tensor] | None = None, *,
    scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None, with_lse: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Compute out, dq, dk and dv, the gradient of ``sinks`` if given, and the LSE on request, by torch in float64."""
    *leaves, dout = (x.detach().double() for x in tensors or inputs(problem))
    leaves = [x.requires_grad_() for x in (*leaves, *([] if sinks is None else [sinks.clone()]))]
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": None if sinks is None else leaves[3]}
    out, lse = attend(leaves[0], leaves[1], leaves[2], Mask(problem.causal) if mask is None else mask, **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout), *([lse.detach()] if with_lse else [])]


def shares(
    strategy: Any, tensors: Iterable[Tensor], mask: Mask | None = None, strided: Strided | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return this rank's q, k and v, which take gradients, and its dout; ``strided`` gives them their strides."""
    local = [strategy.shard(x, documents=mask and mask.documents) for x in tensors]
    *qkv, dout = local if strided is None else map(strided, local)
    return [x.detach().requires_grad_() for x in qkv], dout


def call(
    strategy: Any, problem: WorkloadShard, mask: Mask | None = None, tensors: Iterable[Tensor] | None = None, *,
    strided: Strided | None = None, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Compute this rank's out, dq, dk and dv with a mask, by default that of the problem."""
    leaves, dout = shares(strategy, tensors or inputs(problem), mask, strided)
    how: dict[str, Any] = {"causal": problem.causal}
    if mask is not None:
        how = {"causal": mask.causal, "window_size": mask.window, "prefix": mask.prefix, "documents": mask.documents}
    out = strategy.attention(*leaves, **how, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def whole_call(strategy: Any, problem: WorkloadShard, mask: Mask | None = None, **options: Any) -> list[Tensor]:
    """Compute out, dq, dk and dv of the whole sequence on all ranks."""
    return [strategy.unshard(x, documents=mask and mask.documents) for x in call(strategy, problem, mask, **options)]


def over_the_ranks(case: Case, problem: WorkloadShard, mask: Mask | None = None, **options: Any) -> list[Tensor]:
    """Compute out, dq, dk and dv of the whole sequence on all ranks."""
    return whole_call(create(case.name, kernel=problem.kernel, **case.params), problem, mask, **options)


def with_kernel(
    rank: int, kernel: Callable[[], Any], cases: Iterable[Case], problem: WorkloadShard,
    masks: Iterable[Mask | None] = (None,), *, overlaps: bool | None = None,
) -> list[tuple[str, float, Any]]:  # fmt: skip
    """Return for each case the error with a new ``kernel()``, and that kernel; labels are the case and the mask."""
    rows = []
    for mask in masks:
        truth = dense(problem, mask)
        for case in cases:
            strategy, own = create(case.name, kernel="reference", **case.params), kernel()
            strategy.kernel_for = lambda q, own=own, **_: own
            if overlaps is not None:
                strategy.overlaps_last_hop = lambda travelling: overlaps
            label = f"{case} {mask}" if mask else str(case)
            rows.append((label, error_of(strategy, problem, mask, truth), own))
    return rows


def error_of(
    strategy: Any, problem: WorkloadShard, mask: Mask | None = None, truth: Iterable[Tensor] | None = None, *,
    tensors: list[Tensor] | None = None, **options: Any,
) -> float:  # fmt: skip
    """Return the largest error of out, dq, dk and dv of the whole sequence."""
    return worst(
        whole_call(strategy, problem, mask, tensors=tensors, **options), truth or dense(problem, mask, tensors)
    )


def worst(values: Iterable[Tensor | None], truths: Iterable[Tensor | None]) -> float:
    """Return the largest relative error."""
    pairs = zip(values, truths, strict=True)
    return max(relative_error(x, true) for x, true in pairs if x is not None and true is not None)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return the root mean square of the difference over that of the truth; NaN, which `max` hides, is infinity."""
    error = float((value.double() - truth).norm() / truth.norm())
    return inf if isnan(error) else error


def examples(count: int) -> settings:
    """Return settings for ``count`` examples without health checks, because forked ranks are slow."""
    return settings(max_examples=count, suppress_health_check=list(HealthCheck), print_blob=True)
