"""Explanations of a wrong result: it is compared with the results of the known mistakes of context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from ringprof.record.check.dense import References, Tensors, gather_numbers, reference_results, relative_rms
from ringprof.record.check.result import TensorCheck
from ringprof.record.check.user_attention import UserAttention
from ringprof.run import Workload
from ringprof.strategies.masks.layouts import LAYOUTS

MATCH_FACTOR = 1.5
"""A result matches an explanation if its error against it is at most this many times the error allowed otherwise."""


Explanation = tuple[str, Tensor]
"""Sentence about a wrong tensor, and this rank's tensor if the sentence is true."""


@dataclass(frozen=True)
class WrongCall:
    """A call of the attention whose results differ from the reference."""

    attention: UserAttention
    full: Tensors
    workload: Workload
    scale: float | None
    results: dict[str, Tensor]
    reference: References
    errors: dict[str, TensorCheck]
    wrong: dict[str, bool]
    """Whether each tensor is wrong on this rank."""

    def reasons(self) -> list[str]:
        """Return a sentence for each wrong tensor with a known explanation. Collective.

        Where the output is wrong, only the output is explained.
        """
        if not self.errors["out"].equal:
            return _best_explanation("out", list(_known_mistakes(self)), self) or _scale_explanation("out", self)
        sentences = []
        for name in (name for name, error in self.errors.items() if not error.equal):
            candidates = [(f"is 0: no gradient reaches {name[1]}", torch.zeros_like(self.reference.exact[name]))]
            if name != "dq":
                message = "is what a rank's own queries give: other ranks' part is missing"
                dout = torch.zeros_like(self.full.dout)
                dout[:, self.attention.positions] = self.full.dout[:, self.attention.positions]
                gradient = reference_results(replace(self.full, dout=dout), self.workload, self.scale)[name]
                candidates.append((message, self.attention.shard(gradient)))
            sentences += _best_explanation(name, candidates, self) or _scale_explanation(name, self)
        return sentences

    def dense_output(self, full: Tensors, scale: float | None, *, causal: bool, **mask: None) -> Tensor:
        """Return the float64 output of dense attention.

        ``mask`` names the fields of the workload to leave out, such as ``documents=None`` or ``window=None``.
        """
        seq = full.q.shape[1]
        # Documents and window refer to positions in the whole sequence: one rank's tokens are computed without them.
        omitted = {} if seq == self.workload.seq else {"documents": None, "window": None, "prefix": None}
        omitted |= {"prefix": None} if causal and self.workload.window is None else {}
        workload = replace_fields(self.workload, backward=False, causal=causal, **{"seq": seq, **omitted, **mask})
        return reference_results(full, workload, scale)["out"]


def _known_mistakes(call: WrongCall) -> Iterator[Explanation]:
    """Yield each known mistake with this rank's output under that mistake, in float64."""
    attention, full, scale, causal = call.attention, call.full, call.scale, call.workload.causal
    local = Tensors(*(attention.shard(x) for x in (full.q, full.k, full.v, full.dout)))
    if attention.ranks.size > 1:
        local_only = "equals attention over the rank's own tokens alone{}: context parallelism is off, or sends in vain"
        yield local_only.format(""), call.dense_output(local, scale, causal=causal)
        if causal:
            yield local_only.format(", without a mask"), call.dense_output(local, scale, causal=False)
    workload = call.workload
    if workload.documents:
        across_documents = "equals attention across documents: where they end is not told, or not heeded"
        yield across_documents, attention.shard(call.dense_output(full, scale, causal=causal, documents=None))
    if workload.window:
        without_window = call.dense_output(full, scale, causal=causal, window=None, prefix=None)
        yield "equals attention without the window", attention.shard(without_window)
    if workload.prefix:
        without_prefix = call.dense_output(full, scale, causal=causal, prefix=None)
        missing = "the prefix" if workload.window else "a mask"
        yield f"equals attention without {missing}", attention.shard(without_prefix)
    other_mask = "without the causal mask" if causal else "with a causal mask"
    yield f"equals attention {other_mask}", attention.shard(call.dense_output(full, scale, causal=not causal))
    dim = call.workload.head_dim
    for other in {1.0, 1 / dim, dim**-0.5} - {dim**-0.5 if scale is None else scale}:
        yield (
            f"equals attention with softmax_scale {other:.4g}",
            attention.shard(call.dense_output(full, other, causal=causal)),
        )
    yield from _layout_mistakes(call)
    heads, kv_heads = call.workload.heads, call.workload.kv_heads
    if 1 < kv_heads < heads:
        order = torch.arange(heads, device=full.q.device).view(-1, kv_heads).T.flatten()
        regrouped = call.dense_output(replace(full, q=full.q[:, :, order]), scale, causal=causal)[:, :, order.argsort()]
        yield "equals attention in which query head h uses kv head h mod kv_heads", attention.shard(regrouped)
    yield "is 0", torch.zeros_like(call.reference.exact["out"])


def _layout_mistakes(call: WrongCall) -> Iterator[Explanation]:
    """Yield the mistakes of a mixed-up layout.

    They are the rank's own tokens under the causal mask of another layout, and the output of the tokens that another
    layout gives the rank.
    """
    attention, full, scale, causal = call.attention, call.full, call.scale, call.workload.causal
    size, held_positions = attention.ranks.size, attention.order.flatten()
    correct = call.dense_output(full, scale, causal=causal)
    for name, layout in LAYOUTS.items():
        if len(held_positions) % layout.divisor(size):
            continue
        order = layout.order(len(held_positions), size).to(held_positions.device)
        if torch.equal(order, held_positions):
            continue
        layout_positions = order.view(size, -1)[attention.ranks.rank]
        if causal:
            # The sequence in that layout's order: at each position the token that the rank really holds there.
            tokens = torch.empty_like(order).index_copy_(0, order, held_positions)
            mistaken = Tensors(*(x[:, tokens] for x in (full.q, full.k, full.v, full.dout)))
            yield (f"equals attention under the causal mask of the {name} layout: the positions are not the tokens'",
                   call.dense_output(mistaken, scale, causal=True)[:, layout_positions])  # fmt: skip
        yield f"is that of the tokens which the {name} layout gives the rank", correct[:, layout_positions]


def _best_explanation(name: str, candidates: list[Explanation], call: WrongCall) -> list[str]:
    """Return a sentence about the candidate that matches on most of the ranks where a tensor is wrong. Collective.

    Empty where no candidate matches on any of them.
    """
    limit = MATCH_FACTOR * call.errors[name].allowed_rms
    # Relative to the right result where the mistaken one is 0.
    exact = call.reference.exact[name]
    equal = [
        relative_rms(call.results[name].double() - other, other if other.any() else exact) <= limit
        for _, other in candidates
    ]
    wrong_and_equal = gather_numbers([call.wrong[name], *equal], call.attention.ranks)
    affected = [rank for rank, row in enumerate(wrong_and_equal) if row[0]]
    matching_ranks = [
        [rank for rank in affected if wrong_and_equal[rank][1 + index]] for index in range(len(candidates))
    ]
    matching = max(matching_ranks, key=len)
    if not matching:
        return []
    index = matching_ranks.index(matching)
    matches_everywhere = all(row[1 + index] for row in wrong_and_equal)
    return [f"{name} {candidates[index][0]}" + ("" if matches_everywhere else f" ({_ranks(matching)})")]


def _scale_explanation(name: str, call: WrongCall) -> list[str]:
    """Return a sentence if a tensor is the reference times one factor on every rank where it is wrong. Collective."""
    x, exact = call.results[name].double(), call.reference.exact[name]
    factor = ((x * exact).sum() / exact.square().sum().clamp_min(1e-300)).item()
    matches = relative_rms(x - factor * exact, exact) <= MATCH_FACTOR * call.errors[name].allowed_rms * abs(factor)
    by_rank = gather_numbers([call.wrong[name], matches, factor], call.attention.ranks)
    affected = [rank for rank, row in enumerate(by_rank) if row[0]]
    factors = [by_rank[rank][2] for rank in affected]
    factors_agree = bool(factors) and max(factors) - min(factors) <= 0.02 * abs(factors[0])
    if not factors_agree or not all(by_rank[rank][1] for rank in affected):
        return []
    mean = sum(factors) / len(factors)
    if f"{mean:.3g}" == "1":
        return []  # the error is in a few tokens
    factor_names = {call.attention.ranks.size: "the number of ranks", 1 / call.attention.ranks.size: "1 / ranks"}
    factor_name = next(
        (f" ({text})" for value, text in factor_names.items() if value != 1 and abs(mean / value - 1) < 0.02), ""
    )
    where = "" if len(affected) == len(by_rank) else f" ({_ranks(affected)})"
    return [f"{name} is the right one times {mean:.3g}{factor_name}{where}"]


def _ranks(numbers: list[int]) -> str:
    return f"on rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
