"""Explanations of a wrong result: it is compared with the results of the known mistakes of context parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from ringprof.record.check.backward_mistakes import (
    BACKWARD_MISTAKES,
    coefficients,
    gradient_parts,
    gradients_under,
    head_parts_mistake,
    holder_of,
    rank_parts_mistake,
)
from ringprof.record.check.dense import References, Tensors, gather_numbers, reference_results, relative_rms
from ringprof.record.check.result import TensorCheck
from ringprof.record.check.user_attention import UserAttention
from ringprof.record.check.visible_keys import relative_rank, shown_by_mask
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
    earlier: dict[int, Tensors] = field(default_factory=dict)
    """Full inputs of earlier calls, by the number of the call."""

    def reasons(self) -> list[str]:
        """Return a sentence for each wrong tensor with a known explanation. Collective.

        Where the output is wrong, only the output is explained.
        """
        names = ["out"] if not self.errors["out"].equal else [n for n, error in self.errors.items() if not error.equal]
        sentences = []
        for name in names:
            candidates = _known_mistakes(self) if name == "out" else _gradient_mistakes(name, self)
            sentences += (
                _not_finite(name, self)
                or _best_explanation(name, list(candidates), self)
                or _scale_explanation(name, self)
                or (_overflow(self) if name == "out" else self._parts_explanation(name))
            )
        return sentences or self._reasons_of_one_entry()

    def lost_digits(self) -> list[str]:
        """Return sentences about results in fp32 that have lost digits, as by a shorter type. Collective."""
        if self.workload.dtype != "fp32":
            return []
        names = ["out"] if not self.errors["out"].equal else [n for n, error in self.errors.items() if not error.equal]
        return [text for name in names for text in _lost_digits(name, self)]

    @cached_property
    def whole_gradients(self) -> dict[str, Tensor]:
        """Gradients of the whole sequence in float64, by name."""
        return reference_results(self.full, self.workload, self.scale)

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        return self.workload.head_dim**-0.5 if self.scale is None else self.scale

    def match_limit(self, name: str) -> float:
        """Return the largest relative error of a tensor against an explanation that matches it."""
        limit, exact = MATCH_FACTOR * self.errors[name].allowed_rms, self.reference.exact[name]
        # Next to the right result, where only some tokens are off, much is about equal.
        return min(limit, relative_rms(self.results[name] - exact, exact) / 4) if self.wrong[name] else limit

    def _reasons_of_one_entry(self) -> list[str]:
        """Explain the first wrong batch entry where other entries are right; empty where all are wrong. Collective."""
        names, batch = [name for name, error in self.errors.items() if not error.equal], self.workload.batch
        if batch == 1:
            return []
        severities = [
            [
                relative_rms(self.results[name][entry] - exact[entry], exact[entry]) / self.errors[name].allowed_rms
                for name, exact in self.reference.exact.items()
            ]
            for entry in range(batch)
        ]
        by_rank = gather_numbers(severities, self.attention.ranks)
        right_entries = [entry for entry in range(batch) if all(max(rows[entry]) <= MATCH_FACTOR for rows in by_rank)]
        # Far off, since an error near the bound may exceed it in one entry alone by chance.
        wrong_entries = [
            entry for entry in range(batch) if any(max(rows[entry]) > 4 * MATCH_FACTOR for rows in by_rank)
        ]
        if not right_entries or not wrong_entries:
            return []
        first, right = wrong_entries[0], right_entries[0]

        def of_entry(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: x[first : first + 1] for name, x in tensors.items()}

        wrong = {
            name: not value <= MATCH_FACTOR for name, value in zip(self.reference.exact, severities[first], strict=True)
        }
        one_entry = replace(
            self, workload=replace_fields(self.workload, batch=1), results=of_entry(self.results),
            full=Tensors(**of_entry(vars(self.full))), wrong=wrong,
            reference=References(of_entry(self.reference.exact), of_entry(self.reference.kernel)), earlier={},
        )  # fmt: skip
        others = f"batch entry {first} is wrong and entry {right} is right"
        grossly_wrong = any(max(rows[first]) * self.errors["out"].allowed_rms > 0.25 for rows in by_rank)
        reasons = one_entry.reasons() or [", ".join(names)] * grossly_wrong
        return [f"{others}: {reason}" for reason in reasons]

    @cached_property
    def scores(self) -> Tensor:
        """Scores (B, S/N, H, S) of this rank's queries in float64; minus infinity where the mask hides a key."""
        workload, positions = self.workload, self.attention.positions
        shown = shown_by_mask(workload, positions, torch.arange(workload.seq, device=positions.device))
        k = self.full.k.double().repeat_interleave(workload.heads // workload.kv_heads, 2)
        scores = torch.einsum("bqhd,bkhd->bqhk", self.full.q[:, positions].double(), k) * self.softmax_scale
        return scores.masked_fill(~shown[:, None], -torch.inf)

    @cached_property
    def _parts(self) -> dict[str, Tensor]:
        """Parts of the gradients of this rank's tokens, from `gradient_parts`."""
        holder = holder_of(self.attention.order)
        return gradient_parts(self.full, self.workload, self.softmax_scale, holder, self.attention.positions)

    def _parts_explanation(self, name: str) -> list[str]:
        """Return a sentence about a gradient that counts some ranks or query heads wrongly. Collective."""
        parts, x, ranks, limit = self._parts[name], self.results[name], self.attention.ranks, self.match_limit(name)
        group = self.workload.heads // self.workload.kv_heads
        rank_parts = parts if name == "dq" else parts.view(*parts.shape[:3], -1, group, parts.shape[-1]).sum(4)
        by_rank = gather_numbers(coefficients(x, rank_parts, limit) or [math.inf] * ranks.size, ranks)
        if all(math.inf not in row for row in by_rank):
            mistake = rank_parts_mistake(name, by_rank)
            return [f"{name} {mistake}"] if mistake else []
        if name == "dq" or group == 1:
            return []
        head_parts = parts.sum(0).unbind(2)
        by_head = [
            coefficients(x[:, :, kv_head], torch.stack(head_parts), limit) or [math.inf] * len(head_parts)
            for kv_head in range(self.workload.kv_heads)
        ]
        affected = [
            rows for rows, wrong in zip(
                gather_numbers(by_head, ranks), gather_numbers([self.wrong[name]], ranks), strict=True
            ) if wrong[0]
        ]  # fmt: skip
        if not affected or any(math.inf in row for rows in affected for row in rows):
            return []
        mistake = head_parts_mistake(affected[0])
        return [f"{name} {mistake}"] if mistake else []

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
    if call.workload.batch > 1:
        first_entry = replace(full, k=full.k[:1].expand_as(full.k), v=full.v[:1].expand_as(full.v))
        yield (
            "uses k and v of batch entry 0 for all entries",
            attention.shard(call.dense_output(first_entry, scale, causal=causal)),
        )
        exact = call.reference.exact["out"]
        yield "is that of batch entry 0 for all entries", exact[:1].expand_as(exact)
    yield from _stale_inputs(call)


def _stale_inputs(call: WrongCall) -> Iterator[Explanation]:
    """Yield the mistakes of a buffer that still has the data of an earlier call."""
    attention, full, scale, causal = call.attention, call.full, call.scale, call.workload.causal
    others = torch.ones(full.q.shape[1], dtype=torch.bool, device=full.q.device)
    others[attention.positions] = False
    for number, earlier in call.earlier.items():
        yield f"is that of call {number}", attention.shard(call.dense_output(earlier, scale, causal=causal))
        for names in (("k",), ("v",), ("k", "v"), ("q",)):
            old = {name: getattr(earlier, name) for name in names}
            words = f"{' and '.join(names)} of call {number}, left in a buffer"
            yield f"uses {words}", attention.shard(call.dense_output(replace(full, **old), scale, causal=causal))
            if names != ("q",):
                mixed = {name: torch.where(others[:, None, None], x, getattr(full, name)) for name, x in old.items()}
                yield (
                    f"uses other ranks' {words}",
                    attention.shard(call.dense_output(replace(full, **mixed), scale, causal=causal)),
                )


def _gradient_mistakes(name: str, call: WrongCall) -> Iterator[Explanation]:
    """Yield each known mistake of a backward pass with this rank's gradient under that mistake, in float64."""
    attention, exact, result = call.attention, call.reference.exact, call.results[name]
    yield f"is 0: no gradient reaches {name[1]}", torch.zeros_like(exact[name])
    holder = holder_of(attention.order)
    for mistake, words in BACKWARD_MISTAKES.items():
        if mistake.startswith("own") and attention.ranks.size == 1:
            continue
        gradients = gradients_under(mistake, call.full, call.workload, call.softmax_scale, holder)
        yield words, attention.shard(gradients[name])
    whole = call.whole_gradients[name]
    for offset in range(1, attention.ranks.size):
        owner = attention.order[(attention.ranks.rank + offset) % attention.ranks.size]
        yield f"is that of the tokens of {relative_rank(offset, attention.ranks.size)}", whole[:, owner]
    largest = max(row[0] for row in gather_numbers([result.double().abs().max().item()], attention.ranks))
    clipped = exact[name].clamp(-largest, largest)
    # On a rank where nothing is clipped, this explains nothing.
    nothing_clipped = torch.full_like(clipped, torch.nan)
    yield f"is clipped at {largest:.3g}", nothing_clipped if torch.equal(clipped, exact[name]) else clipped
    if name != "dq":
        other = "dv" if name == "dk" else "dk"
        yield f"is {other}: they are swapped", exact[other]
        both = call.whole_gradients["dk"] + call.whole_gradients["dv"]
        yield "is the sum of dk and dv", attention.shard(both)
        for offset in range(1, attention.ranks.size):
            owner = attention.order[(attention.ranks.rank + offset) % attention.ranks.size]
            tokens = f"of the tokens of {relative_rank(offset, attention.ranks.size)}"
            yield f"is the sum of dk and dv {tokens}", both[:, owner]
    if call.workload.batch > 1:
        yield "is the sum over all batch entries", exact[name].sum(0, keepdim=True).expand_as(exact[name])
    for number, earlier in call.earlier.items():
        earlier_gradient = attention.shard(reference_results(earlier, call.workload, call.scale)[name])
        yield f"is that of call {number}", earlier_gradient
        yield f"has that of call {number} added: a buffer is not set to 0", exact[name] + earlier_gradient


def _not_finite(name: str, call: WrongCall) -> list[str]:
    """Return a sentence about tokens whose result is not finite; empty where all are. Collective."""
    tokens = ~call.results[name].isfinite().all(3).all(2).all(0)
    workload, positions = call.workload, call.attention.positions
    visible = call.scores[0, :, 0].isfinite()
    sees_no_key = torch.stack([~visible[:, held].any(1) for held in call.attention.order]).any(0)
    first = int(positions[tokens].min()) if tokens.any() else -1
    rows = gather_numbers([int(tokens.sum()), first, torch.equal(tokens, sees_no_key)], call.attention.ranks)
    affected = [(int(row[1]), rank) for rank, row in enumerate(rows) if row[0]]
    if not affected:
        return []
    token, rank = min(affected)
    where = f"at {int(sum(row[0] for row in rows))} of {workload.seq} tokens, the first is token {token} on rank {rank}"
    why = ": all that see no key of some rank" if all(row[2] for row in rows) else ""
    return [f"{name} is not finite {where}{why}", *(_overflow(call) if name == "out" else [])]


def _overflow(call: WrongCall) -> list[str]:
    """Return a sentence if the output is wrong where exp() of a score overflows, and only there. Collective."""
    exact = call.reference.exact["out"]
    error, size = (x.double().square().mean(3).sqrt() for x in (call.results["out"] - exact, exact))
    wrong, largest = ~(error <= size / 2), call.scores.amax(3)
    for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32)):
        limit = math.log(torch.finfo(dtype).max)
        above, below = largest > limit, largest.abs() < limit - 2
        counts = [int(x.sum()) for x in (above, above & wrong, below & wrong)]
        rows, wrong_above, wrong_below = torch.tensor(gather_numbers(counts, call.attention.ranks)).sum(0).tolist()
        if wrong_above and wrong_above >= 0.8 * rows and wrong_below <= 0.05 * wrong_above:
            return [
                f"out is wrong where a query's largest score is above {limit:.3g}, from which exp() overflows {name}:"
                " the row's maximum is not subtracted"
            ]
    return []


def _lost_digits(name: str, call: WrongCall) -> list[str]:
    """Return a sentence about a result in fp32 that has lost digits, as by a shorter type. Collective."""
    x, exact, ranks = call.results[name].double(), call.reference.exact[name], call.attention.ranks
    limit = 0.2 * relative_rms(x - exact, exact)
    for words, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if all(row[0] for row in gather_numbers([torch.equal(x.to(dtype).double(), x)], ranks)):
            return [f"{name} has the digits of {words} alone: it is summed up, sent or returned in {words}"]
    if name == "out":
        factor = (x * exact).sum(3, keepdim=True) / exact.square().sum(3, keepdim=True).clamp_min(1e-300)
        by_rank = gather_numbers(
            [relative_rms(x - factor * exact, exact) <= limit, factor.min().item(), factor.max().item()], ranks
        )
        if all(row[0] for row in by_rank):
            low, high = min(row[1] for row in by_rank), max(row[2] for row in by_rank)
            return [f"each query's out is right times a factor from {low:.4g} to {high:.4g}: its LSE has lost digits"]
        for words, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            v = call.full.v.double().repeat_interleave(x.shape[2] // call.workload.kv_heads, 2)
            for scale in (1.0, call.softmax_scale):
                weights = ((call.scores / scale).to(dtype).double() * scale).softmax(3)
                mistaken = torch.einsum("bqhk,bkhd->bqhd", weights, v)
                if all(row[0] for row in gather_numbers([relative_rms(x - mistaken, exact) <= limit], ranks)):
                    return [f"out equals attention with scores rounded to {words}"]
    unit = {words: torch.finfo(dtype).eps for words, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))}
    words = min(unit, key=lambda words: abs(math.log(max(call.errors[name].rms, 1e-300) / (unit[words] / 4))))
    # Rounding reaches every token.
    if call.errors[name].wrong_tokens < call.workload.seq / 2:
        return []
    if unit[words] / 40 <= call.errors[name].rms <= unit[words]:
        return [f"{name} is off in fp32 by about as much as rounding to {words} explains"]
    return []


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
    limit = call.match_limit(name)
    x, exact = call.results[name].double(), call.reference.exact[name]
    # Relative to the right result where the mistaken one is 0.
    equal = [relative_rms(x - other, other if other.any() else exact) <= limit for _, other in candidates]
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
    matches = relative_rms(x - factor * exact, exact) <= call.match_limit(name) * abs(factor)
    by_rank = gather_numbers([call.wrong[name], matches, factor], call.attention.ranks)
    affected = [rank for rank, row in enumerate(by_rank) if row[0]]
    factors = [by_rank[rank][2] for rank in affected]
    factors_agree = bool(factors) and max(factors) - min(factors) <= 0.02 * abs(factors[0])
    if not factors_agree or not all(by_rank[rank][1] for rank in affected):
        return []
    mean = sum(factors) / len(factors)
    if f"{mean:.3g}" == "1":
        return []  # the error is in a few tokens
    size, scale = call.attention.ranks.size, call.softmax_scale
    factor_names = {size: "the number of ranks", 1 / size: "1 / ranks"}
    if name in ("dq", "dk"):
        factor_names |= {1 / scale: "1 / softmax_scale", scale: "softmax_scale"}
    factor_name = next(
        (f" ({text})" for value, text in factor_names.items() if value != 1 and abs(mean / value - 1) < 0.02), ""
    )
    where = "" if len(affected) == len(by_rank) else f" ({_ranks(affected)})"
    return [f"{name} is the right one times {mean:.3g}{factor_name}{where}"]


def _ranks(numbers: list[int]) -> str:
    return f"on rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
