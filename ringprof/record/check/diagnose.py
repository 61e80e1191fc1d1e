"""How far this rank's results are from dense attention's, over all its tokens and at each.

Over all tokens the bound is that of `ringprof.record.verify`, with a rounding a hop for the output, too: of somebody's
code it is not known in which type its partial results travel. One wrong token of thousands would drown in that. So at
each token the error may be `TOKEN_FACTOR` times as much, of what is larger: that token's own reference or the mean one.
(The gradient of a first token's query is 0 and its kernel's error is not.) What a kernel alone has wrong at a token is
allowed three times.

What a wrong result equals in place of the right one is tried after: the mistakes that context parallelism is known for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec.structs import replace as changed
from torch import Tensor

from ringprof.record.check.result import TensorCheck
from ringprof.record.check.user_attention import Answers, UserAttention
from ringprof.record.verify import (
    ERROR_FACTOR,
    Tensors,
    allowed_rms,
    kernel_results,
    reference_results,
    relative_rms,
    whole_block,
    worst_error,
)
from ringprof.run import Workload
from ringprof.strategies import Unsupported
from ringprof.strategies.kernels.builtin import ReferenceKernel, choose_kernel
from ringprof.strategies.masks.layouts import LAYOUTS

TOKEN_FACTOR = 4.0


@dataclass(frozen=True)
class Truth:
    """This rank's share of what dense attention gives, and of what one kernel gives over the whole sequence."""

    exact: Answers
    alone: Answers

    @classmethod
    def of(cls, given: UserAttention, full: Tensors, workload: Workload, scale: float | None) -> Truth:
        exact = reference_results(full, workload, scale)
        try:
            asks: Any = workload.mask().asks_of_kernels()
            kernel = choose_kernel("auto", full.q.device, full.q.dtype, workload.head_dim, **asks)()
        except Unsupported:
            # Then the rounding of the result is all that is allowed for.
            kernel = ReferenceKernel()
        dout = full.dout if workload.backward else None
        alone = kernel_results(kernel, full.q, full.k, full.v, dout, whole_block(workload), scale)
        return cls(*({name: given.shard(x) for name, x in results.items()} for results in (exact, alone)))


def judge(
    answers: Answers, truth: Truth, given: UserAttention, dtype: torch.dtype
) -> tuple[dict[str, TensorCheck], dict[str, bool]]:
    """Every tensor's errors over all ranks, and whether it is wrong on this one. Collective."""
    hops = given.ranks.size if given.ranks.size > 1 else 0
    own = {name: _row(x, truth.exact[name], truth.alone[name], given, dtype, hops) for name, x in answers.items()}
    rows = torch.tensor(list(own.values()), dtype=torch.float64).to(given.order.device)
    by_rank = [part.tolist() for part in given.ranks.gather_tensor(rows)]
    errors = {
        name: _over_ranks([rank_rows[index] for rank_rows in by_rank], dtype, hops) for index, name in enumerate(own)
    }
    return errors, {name: not _over_ranks([row], dtype, hops).equal for name, row in own.items()}


def _row(x: Tensor, exact: Tensor, alone: Tensor, given: UserAttention, dtype: torch.dtype, hops: int) -> list[float]:
    """Largest error, relative errors of the result and of the kernel, wrong tokens, position of the first of them."""
    difference, kernel = x.double() - exact, alone.double() - exact
    kernel_rms = relative_rms(kernel, exact)
    sizes = _by_token(exact)
    bound = TOKEN_FACTOR * allowed_rms(kernel_rms, dtype, hops) * sizes.clamp_min(sizes.square().mean().sqrt().item())
    # What is not a number keeps no bound.
    wrong = ~(_by_token(difference) <= torch.maximum(bound, ERROR_FACTOR * _by_token(kernel)))
    first = given.positions[wrong].min().item() if wrong.any() else math.inf
    return [
        difference.abs().max().item(), relative_rms(difference, exact), kernel_rms, wrong.sum().item(), first,
    ]  # fmt: skip


def _by_token(x: Tensor) -> Tensor:
    """(B, S, H, D) -> (S): root mean squares."""
    return x.square().mean((0, 2, 3)).sqrt()


def _over_ranks(rows: list[list[float]], dtype: torch.dtype, hops: int) -> TensorCheck:
    error = worst_error([row[:3] for row in rows], dtype, hops)
    first = min(row[4] for row in rows)
    found = math.isfinite(first)
    return TensorCheck(
        max_abs=error.max_abs, rms=error.rms, kernel_rms=error.kernel_rms, allowed_rms=error.allowed_rms,
        rank=error.rank, wrong_tokens=int(sum(row[3] for row in rows)), first_token=int(first) if found else None,
        first_rank=[row[4] for row in rows].index(first) if found else None,
    )  # fmt: skip


SAME = 1.5
"""A result equals another explanation while it is at most so many times further off than a right one may be."""


Explanation = tuple[str, Tensor]
"""What a tensor would be said to be, and what it would be then on this rank."""


@dataclass(frozen=True)
class Case:
    """One call that is not equal."""

    given: UserAttention
    full: Tensors
    workload: Workload
    scale: float | None
    answers: Answers
    truth: Truth
    errors: dict[str, TensorCheck]
    wrong: dict[str, bool]
    """Whether a tensor is wrong on this rank."""

    def reasons(self) -> list[str]:
        """A sentence for each tensor that can be explained: the output alone where it is wrong. Collective."""
        if not self.errors["out"].equal:
            return _explained("out", list(_outputs(self)), self) or _scaled("out", self)
        found = []
        for name in (name for name, error in self.errors.items() if not error.equal):
            candidates = [(f"is 0: no gradient reaches {name[1]}", torch.zeros_like(self.truth.exact[name]))]
            if name != "dq":
                candidates.append(("is what a rank's own queries give: other ranks' part is missing", self._own(name)))
            found += _explained(name, candidates, self) or _scaled(name, self)
        return found

    def gathered(self, numbers: Sequence[float]) -> list[Tensor]:
        """Every rank's numbers."""
        return self.given.ranks.gather_tensor(torch.tensor(numbers, dtype=torch.float64).to(self.full.q.device))

    def reference(self, full: Tensors, scale: float | None, *, causal: bool, **mask: None) -> Tensor:
        """The output of dense attention, in float64; ``mask`` says what of documents and window is left out."""
        seq = full.q.shape[1]
        # Documents and window are of the whole sequence: a rank's own tokens are seen without.
        whole = {} if seq == self.workload.seq else {"documents": None, "window": None, "prefix": None}
        whole |= {"prefix": None} if causal and self.workload.window is None else {}
        told = changed(self.workload, backward=False, causal=causal, **{"seq": seq, **whole, **mask})
        return reference_results(full, told, scale)["out"]

    def _own(self, name: str) -> Tensor:
        """A gradient of this rank's where nothing but its own queries gives any."""
        dout = torch.zeros_like(self.full.dout)
        dout[:, self.given.positions] = self.full.dout[:, self.given.positions]
        return self.given.shard(reference_results(replace(self.full, dout=dout), self.workload, self.scale)[name])


def _outputs(case: Case) -> Iterator[Explanation]:
    """This rank's output by each mistake that is known, in float64."""
    given, full, scale, causal = case.given, case.full, case.scale, case.workload.causal
    own = Tensors(*(given.shard(x) for x in (full.q, full.k, full.v, full.dout)))
    if given.ranks.size > 1:
        alone = "equals attention over the rank's own tokens alone{}: context parallelism is off, or sends in vain"
        yield alone.format(""), case.reference(own, scale, causal=causal)
        if causal:
            yield alone.format(", without a mask"), case.reference(own, scale, causal=False)
    work = case.workload
    if work.documents:
        across = "equals attention across documents: where they end is not told, or not heeded"
        yield across, given.shard(case.reference(full, scale, causal=causal, documents=None))
    if work.window:
        unlimited = case.reference(full, scale, causal=causal, window=None, prefix=None)
        yield "equals attention without the window", given.shard(unlimited)
    if work.prefix:
        within = case.reference(full, scale, causal=causal, prefix=None)
        yield f"equals attention without {'the prefix' if work.window else 'a mask'}", given.shard(within)
    other_mask = "without the causal mask" if causal else "with a causal mask"
    yield f"equals attention {other_mask}", given.shard(case.reference(full, scale, causal=not causal))
    dim = case.workload.head_dim
    for other in {1.0, 1 / dim, dim**-0.5} - {dim**-0.5 if scale is None else scale}:
        yield (
            f"equals attention with softmax_scale {other:.4g}",
            given.shard(case.reference(full, other, causal=causal)),
        )
    yield from _other_layouts(case)
    heads, kv_heads = case.workload.heads, case.workload.kv_heads
    if 1 < kv_heads < heads:
        order = torch.arange(heads, device=full.q.device).view(-1, kv_heads).T.flatten()
        regrouped = case.reference(replace(full, q=full.q[:, :, order]), scale, causal=causal)[:, :, order.argsort()]
        yield "equals attention in which query head h uses kv head h mod kv_heads", given.shard(regrouped)
    yield "is 0", torch.zeros_like(case.truth.exact["out"])


def _other_layouts(case: Case) -> Iterator[Explanation]:
    """The tokens that a rank holds, under the mask of another layout; or the output of the tokens of another layout."""
    given, full, scale, causal = case.given, case.full, case.scale, case.workload.causal
    size, held = given.ranks.size, given.order.flatten()
    right = case.reference(full, scale, causal=causal)
    for name, layout in LAYOUTS.items():
        if len(held) % layout.divisor(size):
            continue
        order = layout.order(len(held), size).to(held.device)
        if torch.equal(order, held):
            continue
        own = order.view(size, -1)[given.ranks.rank]
        if causal:
            # The sequence as that layout would have it: at each of its positions the token that is really there.
            tokens = torch.empty_like(order).index_copy_(0, order, held)
            mistaken = Tensors(*(x[:, tokens] for x in (full.q, full.k, full.v, full.dout)))
            yield (f"equals attention under the causal mask of the {name} layout: the positions are not the tokens'",
                   case.reference(mistaken, scale, causal=True)[:, own])  # fmt: skip
        yield f"is that of the tokens which the {name} layout gives the rank", right[:, own]


def _explained(name: str, candidates: list[Explanation], case: Case) -> list[str]:
    """The first candidate that a tensor equals on most of the ranks where it is wrong. Collective."""
    limit = SAME * case.errors[name].allowed_rms
    equal = [relative_rms(case.answers[name].double() - other, other) <= limit for _, other in candidates]
    wrong_and_equal = [part.tolist() for part in case.gathered([case.wrong[name], *equal])]
    affected = [rank for rank, row in enumerate(wrong_and_equal) if row[0]]
    agree = [[rank for rank in affected if wrong_and_equal[rank][1 + index]] for index in range(len(candidates))]
    most = max(agree, key=len)
    if not most:
        return []
    index = agree.index(most)
    everywhere = all(row[1 + index] for row in wrong_and_equal)
    return [f"{name} {candidates[index][0]}" + ("" if everywhere else f" ({_ranks(most)})")]


def _scaled(name: str, case: Case) -> list[str]:
    """Where a tensor is the right one times a number, on every rank where it is wrong. Collective."""
    x, exact = case.answers[name].double(), case.truth.exact[name]
    factor = ((x * exact).sum() / exact.square().sum().clamp_min(1e-300)).item()
    like = relative_rms(x - factor * exact, exact) <= SAME * case.errors[name].allowed_rms * abs(factor)
    by_rank = [part.tolist() for part in case.gathered([case.wrong[name], like, factor])]
    affected = [rank for rank, row in enumerate(by_rank) if row[0]]
    factors = [by_rank[rank][2] for rank in affected]
    near = bool(factors) and max(factors) - min(factors) <= 0.02 * abs(factors[0])
    if not near or not all(by_rank[rank][1] for rank in affected):
        return []
    mean = sum(factors) / len(factors)
    known = {case.given.ranks.size: "the number of ranks", 1 / case.given.ranks.size: "1 / ranks"}
    named = next((f" ({word})" for value, word in known.items() if value != 1 and abs(mean / value - 1) < 0.02), "")
    where = "" if len(affected) == len(by_rank) else f" ({_ranks(affected)})"
    return [f"{name} is the right one times {mean:.3g}{named}{where}"]


def _ranks(numbers: list[int]) -> str:
    return f"on rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
