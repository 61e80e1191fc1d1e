"""Explanations of a wrong result: it is compared with the results of the known mistakes of context parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from ringprof.proof.backward_mistakes import (
    BACKWARD_MISTAKES,
    coefficients,
    gradient_parts,
    gradients_under,
    head_parts_mistake,
    rank_parts_mistake,
)
from ringprof.proof.dense import Tensors, gather_numbers, reference_results, relative_rms
from ringprof.proof.result import TensorCheck
from ringprof.proof.user_attention import UserAttention
from ringprof.proof.visible_keys import holder_of, relative_rank, shown_by_mask
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.workload.workload import Workload

MATCH_FACTOR = 1.5
"""A result matches an explanation if its error against it is at most this many times the error allowed otherwise."""
ZERO_LIMIT = 1e-6
"""Largest result, relative to the right one, that is called 0."""

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
    exact: dict[str, Tensor]
    """This rank's share of dense attention, by name."""
    errors: dict[str, TensorCheck]
    wrong: dict[str, bool]
    """Whether each tensor is wrong on this rank."""
    earlier: dict[int, Tensors] = field(default_factory=dict)
    """Full inputs of earlier calls, by the number of the call."""
    between: Tensors | None = None
    """Full inputs of a forward pass that was made between the call's forward and backward pass."""
    misread_dout: Tensor | None = None
    """Output gradient (B, S, H, D) if its memory is read as if it were contiguous; None where it is contiguous."""

    def reasons(self) -> list[str]:
        """Return a sentence for each wrong tensor with a known explanation. Collective.

        Where the output is wrong, only the output is explained.
        """
        sentences = []
        for name in self._wrong_names:
            candidates = _known_mistakes(self) if name == "out" else _gradient_mistakes(name, self)
            sentences += (
                _not_finite(name, self)
                or _best_explanation(name, candidates, self)
                or _other_tokens(name, self)
                or _scale_explanation(name, self)
                or (_changed_scores(self) or _overflow(self) if name == "out" else self._parts_explanation(name))
            )
        return sentences or self._reasons_of_one_entry()

    @property
    def _wrong_names(self) -> list[str]:
        """Names of the tensors to explain: only the output, if that is wrong."""
        return ["out"] if not self.errors["out"].equal else [n for n, error in self.errors.items() if not error.equal]

    def lost_digits(self) -> list[str]:
        """Return sentences about results in fp32 that have lost digits, as by a shorter type. Collective."""
        if self.workload.dtype != "fp32":
            return []
        return [text for name in self._wrong_names for text in _lost_digits(name, self)]

    def where_wrong(self, name: str, *numbers: float | Tensor) -> list[tuple[int, list[float]]]:
        """Return each rank on which a tensor is wrong, with this rank's ``numbers``. Collective."""
        by_rank = gather_numbers([float(x) for x in (self.wrong[name], *numbers)], self.attention.ranks)
        return [(rank, of_rank) for rank, (wrong, *of_rank) in enumerate(by_rank) if wrong]

    @cached_property
    def whole(self) -> dict[str, Tensor]:
        """Output and gradients of the whole sequence in float64, by name."""
        return reference_results(self.full, self.workload, self.scale)

    def under(self, **changes: Any) -> Tensor:
        """Return this rank's output in float64 with other inputs (``q``, ``k``, ``v``), ``scale`` or mask."""
        options: dict[str, Any] = {"scale": self.scale, "causal": self.workload.causal}
        options |= {name: x for name, x in changes.items() if not isinstance(x, Tensor)}
        tensors = {name: x for name, x in changes.items() if isinstance(x, Tensor)}
        return self.attention.shard(self.dense_output(replace(self.full, **tensors), **options))

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        return self.workload.head_dim**-0.5 if self.scale is None else self.scale

    def match_limit(self, name: str) -> float:
        """Return the largest relative error of a tensor against an explanation that matches it."""
        limit, exact = MATCH_FACTOR * self.errors[name].allowed_rms, self.exact[name]
        # Next to the right result, where only some tokens are off, much is about equal.
        return min(limit, relative_rms(self.results[name] - exact, exact) / 6) if self.wrong[name] else limit

    def _reasons_of_one_entry(self) -> list[str]:
        """Explain the first wrong batch entry where other entries are right; empty where all are wrong. Collective."""
        names, batch = [name for name, error in self.errors.items() if not error.equal], self.workload.batch
        if batch == 1:
            return []
        severities = [
            [
                relative_rms(self.results[name][entry] - exact[entry], exact[entry]) / self.errors[name].allowed_rms
                for name, exact in self.exact.items()
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

        wrong = {name: not value <= MATCH_FACTOR for name, value in zip(self.exact, severities[first], strict=True)}
        one_entry = replace(
            self, workload=replace_fields(self.workload, batch=1), results=of_entry(self.results),
            full=Tensors(**of_entry(vars(self.full))), wrong=wrong,
            exact=of_entry(self.exact), earlier={}, between=None, misread_dout=None,
        )  # fmt: skip
        others = f"batch entry {first} is wrong and entry {right} is right"
        grossly_wrong = any(max(rows[first]) * self.errors["out"].allowed_rms > 0.25 for rows in by_rank)
        reasons = one_entry.reasons() or [", ".join(names)] * grossly_wrong
        return [f"{others}: {reason}" for reason in reasons]

    @cached_property
    def shown(self) -> Tensor:
        """Boolean mask (S/N, S) of the keys that the mask shows to this rank's queries."""
        positions = self.attention.positions
        return shown_by_mask(self.workload, positions, torch.arange(self.workload.seq, device=positions.device))

    @cached_property
    def unmasked_scores(self) -> Tensor:
        """Scores (B, S/N, H, S) of this rank's queries in float64, of hidden keys, too."""
        q = self.full.q[:, self.attention.positions].double()
        k = self.full.k.double().repeat_interleave(self.workload.heads // self.workload.kv_heads, 2)
        return torch.einsum("bqhd,bkhd->bqhk", q, k) * self.softmax_scale

    @property
    def scores(self) -> Tensor:
        """Scores (B, S/N, H, S) of this rank's queries in float64; minus infinity where the mask hides a key."""
        return self.unmasked_scores.masked_fill(~self.shown[:, None], -torch.inf)

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
        if name == "dq":
            return self._delta_explanation()
        if group == 1:
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

    def _delta_explanation(self) -> list[str]:
        """Return a sentence if dq is right but for one number per query, its delta. Collective."""
        holder, exact = holder_of(self.attention.order), self.exact["dq"]
        without = gradients_under("no delta", self.full, self.workload, self.softmax_scale, holder)["dq"]
        by_delta, excess = (self.attention.shard(without) - x for x in (exact, self.results["dq"].double()))
        ratio = (excess * by_delta).sum(3) / by_delta.square().sum(3).clamp_min(1e-300)
        rest = relative_rms(excess - ratio[..., None] * by_delta, exact)
        rows = gather_numbers([rest <= self.match_limit("dq"), ratio.median().item()], self.attention.ranks)
        if not all(row[0] for row in rows):
            return []
        middle = sorted(row[1] for row in rows)[len(rows) // 2]
        if abs(middle - 1) < 0.05:
            return []
        return [
            "dq is right but for delta, the row sums of dout times out: it subtracts"
            f" {middle:.3g} times the right one in the median"
        ]

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
    attention, full, workload, exact = call.attention, call.full, call.workload, call.exact["out"]
    causal, dim, ranks = workload.causal, workload.head_dim, attention.ranks
    local = Tensors(*(attention.shard(x) for x in (full.q, full.k, full.v, full.dout)))
    if ranks.size > 1:
        local_only = "equals attention over the rank's own tokens alone{}: context parallelism is off, or sends in vain"
        yield local_only.format(""), call.dense_output(local, call.scale, causal=causal)
        if causal:
            yield local_only.format(", without a mask"), call.dense_output(local, call.scale, causal=False)
    if workload.documents:
        across_documents = "equals attention across documents: where they end is not told, or not heeded"
        yield across_documents, call.under(documents=None)
    if workload.window:
        yield "equals attention without the window", call.under(window=None, prefix=None)
    if workload.prefix:
        yield f"equals attention without {'the prefix' if workload.window else 'a mask'}", call.under(prefix=None)
    yield f"equals attention {'without the' if causal else 'with a'} causal mask", call.under(causal=not causal)
    for other in {1.0, 1 / dim, dim**-0.5} - {call.softmax_scale}:
        yield f"equals attention with softmax_scale {other:.4g}", call.under(scale=other)
    yield from _layout_mistakes(call)
    heads, kv_heads = workload.heads, workload.kv_heads
    if 1 < kv_heads < heads:
        order = torch.arange(heads, device=full.q.device).view(-1, kv_heads).T.flatten()
        regrouped = call.under(q=full.q[:, :, order])[:, :, order.argsort()]
        yield "equals attention in which query head h uses kv head h mod kv_heads", regrouped
    yield "is 0", torch.zeros_like(exact)
    yield "uses k in the place of v", call.under(v=full.k)
    yield "uses k for v and v for k: they are swapped", call.under(k=full.v, v=full.k)
    normalized = {name: getattr(full, name).double() for name in "qk"}
    normalized = {name: x * x.square().mean(3, keepdim=True).rsqrt() for name, x in normalized.items()}
    yield "equals attention with q and k normalized per head", call.under(**normalized)
    if workload.batch > 1:
        first_entry = {name: getattr(full, name)[:1].expand_as(full.k) for name in "kv"}
        yield "uses k and v of batch entry 0 for all entries", call.under(**first_entry)
        yield "is that of batch entry 0 for all entries", exact[:1].expand_as(exact)
        yield "has the batch entries in reverse order", exact.flip(0)
        yield "uses k and v of the batch entries in reverse order", call.under(k=full.k.flip(0), v=full.v.flip(0))
    yield from _mixed_ranks(call)
    yield from _stale_inputs(call)


def _of_ranks(call: WrongCall, x: Tensor, holder: Callable[[int], int]) -> Tensor:
    """Return a full tensor (B, S, ...) in which each rank's tokens are replaced with those of the rank ``holder``."""
    order, mixed = call.attention.order, x.clone()
    for rank, own in enumerate(order):
        mixed[:, own] = x[:, order[holder(rank) % len(order)]]
    return mixed


def _mixed_ranks(call: WrongCall) -> Iterator[Explanation]:
    """Yield the mistakes in which k or v does not arrive as the other does, or in fewer digits."""
    ranks, full = call.attention.ranks, call.full
    own, size = ranks.rank, ranks.size
    if size == 1:
        return
    for name, other in ("kv", "vk"):
        words = f"uses the rank's own {name} with the {other} of every rank: {name} is not sent on"
        yield words, call.under(**{name: _of_ranks(call, getattr(full, name), lambda rank: own)})
    if size > 2:
        words = "uses v of the rank i before the query's with k of the rank i after it: k and v are sent opposite ways"
        yield words, call.under(v=_of_ranks(call, full.v, lambda rank: 2 * own - rank))
    backwards = {name: _of_ranks(call, getattr(full, name), lambda rank: -1 - rank) for name in "kv"}
    yield "uses the ranks' v in reverse order", call.under(v=backwards["v"])
    yield "uses the ranks' k and v in reverse order, under the mask of the right order", call.under(**backwards)
    for offset in range(1, size):
        words = f"uses with the k of each rank the v of {relative_rank(offset, size)}"
        yield words, call.under(v=_of_ranks(call, full.v, lambda rank, offset=offset: rank + offset))  # type: ignore[misc]
    types = [torch.float8_e4m3fn, torch.float8_e5m2]
    types += [torch.bfloat16, torch.float16] if full.q.dtype == torch.float32 else []
    others = torch.ones(full.q.shape[1], dtype=torch.bool, device=full.q.device)
    others[call.attention.positions] = False
    for dtype in types:
        rounded = {name: getattr(full, name).to(dtype).to(full.q.dtype) for name in "kv"}
        rounded = {name: torch.where(others[:, None, None], x, getattr(full, name)) for name, x in rounded.items()}
        for names in ("kv", "k", "v"):
            words = f"uses other ranks' {' and '.join(names)} rounded to {str(dtype).removeprefix('torch.')}"
            yield words, call.under(**{name: rounded[name] for name in names})


def _stale_inputs(call: WrongCall) -> Iterator[Explanation]:
    """Yield the mistakes of a buffer that still has the data of an earlier call."""
    attention, full, causal = call.attention, call.full, call.workload.causal
    others = torch.ones(full.q.shape[1], dtype=torch.bool, device=full.q.device)
    others[attention.positions] = False
    for number, earlier in call.earlier.items():
        yield f"is that of call {number}", attention.shard(call.dense_output(earlier, call.scale, causal=causal))
        for names in ("k", "v", "kv", "q"):
            old = {name: getattr(earlier, name) for name in names}
            words = f"{' and '.join(names)} of call {number}, left in a buffer"
            yield f"uses {words}", call.under(**old)
            if names != "q":
                mixed = {name: torch.where(others[:, None, None], x, getattr(full, name)) for name, x in old.items()}
                yield f"uses other ranks' {words}", call.under(**mixed)


def _gradient_mistakes(name: str, call: WrongCall) -> Iterator[Explanation]:
    """Yield each known mistake of a backward pass with this rank's gradient under that mistake, in float64."""
    attention, exact, result = call.attention, call.exact, call.results[name]
    yield f"is 0: no gradient reaches {name[1]}", torch.zeros_like(exact[name])
    holder = holder_of(attention.order)
    for mistake, words in BACKWARD_MISTAKES.items():
        needs = mistake.split()[-1]
        if attention.ranks.size == 1 and mistake.startswith(("own", "local")):
            continue
        if needs in ("documents", "window") and getattr(call.workload, needs) is None:
            continue
        gradients = gradients_under(mistake, call.full, call.workload, call.softmax_scale, holder)
        yield words, attention.shard(gradients[name])
    whole = call.whole[name]
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
        both = call.whole["dk"] + call.whole["dv"]
        yield "is the sum of dk and dv", attention.shard(both)
        for offset in range(1, attention.ranks.size):
            owner = attention.order[(attention.ranks.rank + offset) % attention.ranks.size]
            tokens = f"of the tokens of {relative_rank(offset, attention.ranks.size)}"
            yield f"is the sum of dk and dv {tokens}", both[:, owner]
    if call.workload.batch > 1:
        yield "has the batch entries in reverse order", exact[name].flip(0)
        yield "is the sum over all batch entries", exact[name].sum(0, keepdim=True).expand_as(exact[name])
    earlier_gradients = {
        number: attention.shard(reference_results(earlier, call.workload, call.scale)[name])
        for number, earlier in {**call.earlier, **({0: call.between} if call.between else {})}.items()
    }
    if call.between:
        mixed = reference_results(replace(call.between, dout=call.full.dout), call.workload, call.scale)[name]
        words = "is computed from the tensors of another forward pass, made before this backward pass"
        yield f"{words}: they are not kept for each call", attention.shard(mixed)
    if call.misread_dout is not None:
        misread = reference_results(replace(call.full, dout=call.misread_dout), call.workload, call.scale)[name]
        yield "reads dout as if it were contiguous in memory: its strides are not heeded", attention.shard(misread)
    for number, gradient in earlier_gradients.items():
        words = f"that of call {number}" if number else "that of the call between its passes"
        yield f"is {words}", gradient
        yield f"has {words} added: a buffer is not set to 0", exact[name] + gradient
    if len(earlier_gradients) > 1:
        added = sum(earlier_gradients.values(), exact[name])
        yield "has those of all earlier calls added: a buffer is not set to 0", added


def _not_finite(name: str, call: WrongCall) -> list[str]:
    """Return a sentence about tokens whose result is not finite; empty where all are. Collective."""
    tokens = ~call.results[name].isfinite().all(3).all(2).all(0)
    workload, positions = call.workload, call.attention.positions
    sees_no_key = torch.stack([~call.shown[:, held].any(1) for held in call.attention.order]).any(0)
    first = int(positions[tokens].min()) if tokens.any() else -1
    rows = gather_numbers([int(tokens.sum()), first, torch.equal(tokens, sees_no_key)], call.attention.ranks)
    affected = [(int(row[1]), rank) for rank, row in enumerate(rows) if row[0]]
    if not affected:
        return []
    token, rank = min(affected)
    where = f"at {int(sum(row[0] for row in rows))} of {workload.seq} tokens, the first is token {token} on rank {rank}"
    why = ": all that see no key of some rank" if all(row[2] for row in rows) else ""
    return [f"{name} is not finite {where}{why}", *(_overflow(call) if name == "out" else [])]


SCORE_CHANGES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "are capped, {0} * tanh(score / {0})":
        lambda scores, hidden, cap: (cap * (scores / cap).tanh()).masked_fill(hidden, -torch.inf),
    "are clamped to ±{0}": lambda scores, hidden, cap: scores.clamp(-cap, cap).masked_fill(hidden, -torch.inf),
    "are clamped to at most {0}": lambda scores, hidden, cap: scores.clamp(max=cap).masked_fill(hidden, -torch.inf),
}  # fmt: skip
"""Changes of scores by one number, each with its words; the second argument says which keys the mask hides."""
_CHANGED_ROWS = 32
"""Most queries per rank that are compared with changed scores."""


def _changed_scores(call: WrongCall) -> list[str]:
    """Return a sentence if scores changed by one number explain nearly all of the output's error. Collective."""
    ranks, workload, exact = call.attention.ranks, call.workload, call.exact["out"]
    rows = slice(None, None, -(-exact.shape[1] // _CHANGED_ROWS))
    scores, hidden = call.unmasked_scores[:1, rows], ~call.shown[rows, None]
    v = call.full.v[:1].double().repeat_interleave(workload.heads // workload.kv_heads, 2)
    exact, x = exact[:1, rows], call.results["out"][:1, rows].double()

    def errors(change: Callable[[Tensor, Tensor, float], Tensor], numbers: list[float]) -> list[float]:
        outs = (torch.einsum("bqhk,bkhd->bqhd", change(scores, hidden, n).softmax(3), v) for n in numbers)
        squares = [float((x - out).square().sum()) for out in outs]
        own = [*squares, float((x - exact).square().sum()), float(exact.square().sum())]
        *totals, error, size = torch.tensor(gather_numbers(own, ranks)).sum(0).tolist()
        return [math.sqrt(total / size) for total in [*totals, error]]

    matches = {}
    limit = MATCH_FACTOR * call.errors["out"].allowed_rms
    for words, change in SCORE_CHANGES.items():
        numbers = [float(n) for n in torch.logspace(-0.3, 2.3, 20)]
        for attempt in range(12):
            *by_number, error = errors(change, numbers)
            best = by_number.index(min(by_number))
            low, high = numbers[max(best - 1, 0)], numbers[min(best + 1, len(numbers) - 1)]
            if by_number[best] <= min(limit, error / 8):
                matches[words] = (by_number[best], numbers[best])
            if attempt == 2 and by_number[best] > error / 2:
                break
            numbers = torch.linspace(low, high, 7, dtype=torch.float64).tolist()
    # Changes that fit about equally are all named.
    least = min((fit for fit, _ in matches.values()), default=0.0)
    named = [words.format(f"{n:.3g}") for words, (fit, n) in matches.items() if fit <= 2 * least + limit / 100]
    return [f"out equals attention whose scores {', or '.join(named)}"] if named else []


def _overflow(call: WrongCall) -> list[str]:
    """Return a sentence if the output is lost where exp() of a score overflows, and right below. Collective."""
    x, exact = call.results["out"].double(), call.exact["out"]
    error, size = (y.square().mean(3).sqrt() for y in (x - exact, exact))
    lost, wrong, largest = ~(x.square().mean(3).sqrt() > size / 100), ~(error <= size / 2), call.scores.amax(3)
    for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32)):
        limit = math.log(torch.finfo(dtype).max)
        above, below = largest > limit, largest.abs() < limit - 2
        counts = [int(y.sum()) for y in (above, above & lost, below & wrong)]
        rows, lost_above, wrong_below = torch.tensor(gather_numbers(counts, call.attention.ranks)).sum(0).tolist()
        if lost_above and lost_above >= 0.8 * rows and wrong_below <= 0.05 * lost_above:
            return [
                f"out is 0 or not finite where a query's largest score is above {limit:.3g}, from which exp() overflows"
                f" {name}: the row's maximum is not subtracted"
            ]
    return []


def _lost_digits(name: str, call: WrongCall) -> list[str]:
    """Return a sentence about a result in fp32 that has lost digits, as by a shorter type. Collective."""
    x, exact, ranks = call.results[name].double(), call.exact[name], call.attention.ranks
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


def _best_explanation(name: str, candidates: Iterator[Explanation], call: WrongCall) -> list[str]:
    """Return a sentence about the first candidate that matches on all ranks where a tensor is wrong. Collective."""
    limit = call.match_limit(name)
    x, exact = call.results[name].double(), call.exact[name]
    for words, other in candidates:
        # A result that is 0 is exactly 0; a small one is not, even within a wide bound.
        error, bound = (relative_rms(x - other, other), limit) if other.any() else (relative_rms(x, exact), ZERO_LIMIT)
        by_rank = gather_numbers([call.wrong[name], error <= bound], call.attention.ranks)
        affected = [rank for rank, row in enumerate(by_rank) if row[0]]
        if affected and all(by_rank[rank][1] for rank in affected):
            return [f"{name} {words}" + ("" if all(row[1] for row in by_rank) else f" ({_ranks(affected)})")]
    return []


def _other_tokens(name: str, call: WrongCall) -> list[str]:
    """Return a sentence if a tensor has the right result of other tokens in the place of a token's own. Collective."""
    positions = call.attention.positions
    own, whole = (x.double().transpose(0, 1).flatten(1) for x in (call.results[name], call.whole[name]))
    norms = own.norm(dim=1, keepdim=True)
    likeness = (own / norms.clamp_min(1e-300)) @ (whole / whole.norm(dim=1, keepdim=True).clamp_min(1e-300)).T
    best = likeness.max(1)
    moved = best.indices != positions
    same = (whole[best.indices] - own).norm(dim=1) <= call.match_limit(name) * whole.norm(dim=1).square().mean().sqrt()
    first = int(moved.int().argmax())
    offsets = (best.indices - positions)[moved]
    low, high = (offsets.min(), offsets.max()) if moved.any() else (0, 0)
    rows = call.where_wrong(name, same.all() and moved.any(), positions[first], best.indices[first], low, high)
    if not rows or not all(matches for _, (matches, *_) in rows):
        return []
    token, other, offset = (int(x) for x in rows[0][1][1:4])
    if all(low == high == offset for _, (*_, low, high) in rows):
        return [f"{name} is that of the token {abs(offset)} {'after' if offset > 0 else 'before'} it"]
    return [f"{name} has its tokens in another order: at token {token} is that of token {other}"]


def _scale_explanation(name: str, call: WrongCall) -> list[str]:
    """Return a sentence if a tensor is the reference times one factor on every rank where it is wrong. Collective."""
    x, exact = call.results[name].double(), call.exact[name]
    factor = ((x * exact).sum() / exact.square().sum().clamp_min(1e-300)).item()
    matches = relative_rms(x - factor * exact, exact) <= call.match_limit(name) * abs(factor)
    rows = call.where_wrong(name, matches, factor)
    factors = [factor for _, (_, factor) in rows]
    if not rows or max(factors) - min(factors) > 0.02 * abs(factors[0]) or not all(fits for _, (fits, _) in rows):
        return []
    mean = sum(factors) / len(factors)
    if f"{mean:.3g}" == "1":
        return []  # the error is in a few tokens
    size, scale, group = call.attention.ranks.size, call.softmax_scale, call.workload.heads // call.workload.kv_heads
    factor_names = [(size, "the number of ranks"), (1 / size, "1 / ranks")]
    if name in ("dq", "dk"):
        factor_names += [(1 / scale, "1 / softmax_scale"), (scale, "softmax_scale")]
    if name != "dq":
        factor_names += [(1 / group, "1 / query heads per kv head"), (group, "query heads per kv head")]
    fitting = [text for value, text in factor_names if value != 1 and abs(mean / value - 1) < 0.02]
    factor_name = f" ({' or '.join(fitting)})" if fitting else ""
    where = "" if len(rows) == size else f" ({_ranks([rank for rank, _ in rows])})"
    return [f"{name} is the right one times {mean:.3g}{factor_name}{where}"]


def _ranks(numbers: list[int]) -> str:
    return f"on rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
