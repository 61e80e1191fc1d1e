"""How far this rank's results are from dense attention's, over all its tokens and at each.

Over all tokens the bound is that of `ringprof.record.verify`, with a rounding a hop for the output, too: of somebody's
code it is not known in which type its partial results travel. One wrong token of thousands would drown in that. So at
each token the error may be `TOKEN_FACTOR` times as much, of what is larger: that token's own reference or the mean one.
(The gradient of a first token's query is 0 and its kernel's error is not.) What a kernel alone has wrong at a token is
allowed three times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringprof.record.check.given import Answers, GivenAttention
from ringprof.record.check.result import TensorCheck
from ringprof.record.verify import (
    FACTOR,
    Tensors,
    allowed_rms,
    kernel_results,
    reference_results,
    relative_rms,
    whole_block,
    worst,
)
from ringprof.run import Workload
from ringprof.strategies import Unfit
from ringprof.strategies.kernels import ReferenceKernel, choose_kernel

TOKEN_FACTOR = 4.0


@dataclass(frozen=True)
class Truth:
    """This rank's share of what dense attention gives, and of what one kernel gives over the whole sequence."""

    exact: Answers
    alone: Answers

    @classmethod
    def of(cls, given: GivenAttention, full: Tensors, workload: Workload, scale: float | None) -> Truth:
        exact = reference_results(full, workload, scale)
        try:
            asks: Any = workload.mask().asks_of_kernels()
            kernel = choose_kernel("auto", full.q.device, full.q.dtype, workload.head_dim, **asks)()
        except Unfit:
            # Then the rounding of the result is all that is allowed for.
            kernel = ReferenceKernel()
        dout = full.dout if workload.backward else None
        alone = kernel_results(kernel, full.q, full.k, full.v, dout, whole_block(workload), scale)
        return cls(*({name: given.shard(x) for name, x in results.items()} for results in (exact, alone)))


def judge(
    answers: Answers, truth: Truth, given: GivenAttention, dtype: torch.dtype
) -> tuple[dict[str, TensorCheck], dict[str, bool]]:
    """Every tensor's errors over all ranks, and whether it is wrong on this one. Collective."""
    hops = given.ranks.size if given.ranks.size > 1 else 0
    own = {name: _row(x, truth.exact[name], truth.alone[name], given, dtype, hops) for name, x in answers.items()}
    rows = torch.tensor(list(own.values()), dtype=torch.float64).to(given.order.device)
    by_rank = [part.tolist() for part in given.ranks.gathered(rows)]
    errors = {
        name: _over_ranks([rank_rows[index] for rank_rows in by_rank], dtype, hops) for index, name in enumerate(own)
    }
    return errors, {name: not _over_ranks([row], dtype, hops).equal for name, row in own.items()}


def _row(x: Tensor, exact: Tensor, alone: Tensor, given: GivenAttention, dtype: torch.dtype, hops: int) -> list[float]:
    """Largest error, relative errors of the result and of the kernel, wrong tokens, position of the first of them."""
    difference, kernel = x.double() - exact, alone.double() - exact
    kernel_rms = relative_rms(kernel, exact)
    sizes = _by_token(exact)
    bound = TOKEN_FACTOR * allowed_rms(kernel_rms, dtype, hops) * sizes.clamp_min(sizes.square().mean().sqrt().item())
    # What is not a number keeps no bound.
    wrong = ~(_by_token(difference) <= torch.maximum(bound, FACTOR * _by_token(kernel)))
    first = given.positions[wrong].min().item() if wrong.any() else math.inf
    return [
        difference.abs().max().item(), relative_rms(difference, exact), kernel_rms, wrong.sum().item(), first,
    ]  # fmt: skip


def _by_token(x: Tensor) -> Tensor:
    """(B, S, H, D) -> (S): root mean squares."""
    return x.square().mean((0, 2, 3)).sqrt()


def _over_ranks(rows: list[list[float]], dtype: torch.dtype, hops: int) -> TensorCheck:
    error = worst([row[:3] for row in rows], dtype, hops)
    first = min(row[4] for row in rows)
    found = math.isfinite(first)
    return TensorCheck(
        max_abs=error.max_abs, rms=error.rms, kernel_rms=error.kernel_rms, allowed_rms=error.allowed_rms,
        rank=error.rank, wrong_tokens=int(sum(row[3] for row in rows)), first_token=int(first) if found else None,
        first_rank=[row[4] for row in rows].index(first) if found else None,
    )  # fmt: skip
