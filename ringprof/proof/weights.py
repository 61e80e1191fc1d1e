"""Attention weights read off the output of a user's attention, which show exactly which keys each query sees.

Let v be `UNIT` in element d of one key's heads and 0 in all other keys. Then element d of a query's output is `UNIT`
times the query's weight for that key. That is not 0 where the query sees the key, and exactly 0 where it does not, in
every data type and for every sequence length. One call reveals the weights of head_dim keys. The logarithm of a weight
is the score, less a constant of the whole row, so the weights also show the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from ringprof.proof.dense import Tensors, relative_rms
from ringprof.proof.result import QueryAndKey, Seen
from ringprof.proof.user_attention import AttentionResults, UserAttention
from ringprof.proof.visible_keys import (
    PARTIAL_OUTPUTS,
    TOLERANCE,
    holder_of,
    mask_mistake,
    merge_mistake,
    shown_by_mask,
)
from ringprof.workload.workload import Workload

MOST_CALLS = 16
"""Most calls that are made: enough for all keys of a short sequence.

In longer sequences only the keys at the documents' edges and some between are tried.
"""
UNIT = 64.0
"""Value of v, large enough that no weight becomes too small for float16."""
SCORED_ROWS = 64
"""Most queries per rank whose scores are compared."""
AFTER_SOFTMAX = "weights sum to less than 1: the softmax is over all keys, and the mask hides keys after it"
ZERO_V = (
    "keys that are not seen count in the sum of weights: their v is 0 (not received in time), or their output is lost"
)
ZERO_K_AND_V = "keys that are not seen count with a score of 0, as k and v of 0 in a buffer read before it is received"

_ScoresOfHidden = Callable[[Tensor], Tensor]


class _Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Findings from the weights of one rank's queries, which the ranks exchange."""

    seen: Seen
    """Comparison with the mask, of this rank's queries."""
    shift: int | None
    """Number of keys that every query sees too far ahead; None where queries differ."""
    repeat_difference: float
    """Relative difference of two calls with the same tensors."""
    scale: float | None = None
    """Factor by which scores are multiplied; None where no scores explain the weights."""
    scores: str = ""
    """Sentence about other scores than q·k, of keys that the mask shows or hides; empty where none is found."""
    merge: str = ""
    """Sentence about a wrong merge of the ranks' partial outputs; empty where none is found."""
    explains_seen: bool = False
    """Whether all keys that are seen have the weights that their scores give."""
    received: bool = True
    """Whether keys that are not seen have no weight. They have some where k or v is 0 in their place."""
    heads: list[tuple[int, int]] = []
    """For each output head, the query head and the kv head whose scores explain it; empty where none do."""


def read_weights(
    call: Callable[[Tensors], AttentionResults],
    attention: UserAttention,
    full: Tensors,
    workload: Workload,
    scale: float | None,
) -> tuple[Seen | None, list[str]]:
    """Compare the keys that queries see with the mask; return the comparison, and sentences about mistakes. Collective.

    The comparison is None where weights differ from call to call. ``call`` makes a call of the attention with full
    tensors, ``full`` are random inputs.
    """
    scale = workload.head_dim**-0.5 if scale is None else scale
    # Scores of about 1, whatever the scale, so that no weight underflows beside a larger one.
    full = replace(full, q=(full.q / (scale * workload.head_dim**0.5)).to(full.q.dtype))
    keys = _keys_to_try(workload, full.q.device)
    starts = range(0, len(keys), workload.head_dim)
    weights = torch.cat(
        [_weights_from_call(call, full, keys[first : first + workload.head_dim]) for first in starts], 3
    )
    first = keys[: workload.head_dim]
    first_weights = weights[..., : len(first)]
    repeat_difference = relative_rms(_weights_from_call(call, full, first) - first_weights, first_weights)
    rank_weights = _RankWeights(attention, full, workload, keys, weights)
    sees = torch.empty(workload.seq, len(keys), dtype=torch.bool, device=keys.device)
    sees[attention.order.flatten()] = torch.cat(attention.ranks.gather_tensor(rank_weights.sees[0].byte())).bool()
    by_rank = attention.ranks.gather_structs(
        rank_weights.findings(repeat_difference if math.isfinite(repeat_difference) else 0.0)
    )
    repeat_difference = max(findings.repeat_difference for findings in by_rank)
    if repeat_difference > TOLERANCE:
        difference = f"out differs between two calls with the same tensors, by {repeat_difference:.2g}"
        return None, [f"{difference}: dropout is on, or ranks race"]
    reasons = _reasons(by_rank, workload, scale)
    # Which pairs are wrong is no reason by itself: v may be of other keys, and hidden scores may be finite.
    if all(findings.explains_seen and findings.received for findings in by_rank) and not _shifts(by_rank):
        reasons = [*filter(None, [mask_mistake(sees, keys, attention.order, workload)]), *reasons]
    seen_by_rank = [findings.seen for findings in by_rank]

    def first_of(pairs: Iterable[QueryAndKey | None]) -> QueryAndKey | None:
        return min((pair for pair in pairs if pair), key=lambda pair: (pair.query, pair.key), default=None)

    return Seen(
        pairs=sum(seen.pairs for seen in seen_by_rank), of=workload.seq**2,
        leaks=sum(seen.leaks for seen in seen_by_rank), first_leak=first_of(seen.first_leak for seen in seen_by_rank),
        missing=sum(seen.missing for seen in seen_by_rank),
        first_missing=first_of(seen.first_missing for seen in seen_by_rank),
    ), reasons  # fmt: skip


def _keys_to_try(workload: Workload, device: torch.device) -> Tensor:
    """Return the positions (T) of the keys to try, in ascending order."""
    seq, max_keys = workload.seq, MOST_CALLS * workload.head_dim
    if seq <= max_keys:
        return torch.arange(seq, device=device)
    edges = {0, seq - 1, *(edge for bound in workload.mask().documents or () for edge in (bound - 1, bound))}
    edges = {edge for edge in edges if 0 <= edge < seq}
    chosen = sorted(edges)[: max_keys // 2]
    return torch.tensor(sorted({*chosen, *range(0, seq, -(-seq // (max_keys - len(chosen))))}), device=device)


def _weights_from_call(call: Callable[[Tensors], AttentionResults], full: Tensors, keys: Tensor) -> Tensor:
    """Return the weights (B, S/N, H, keys) of this rank's queries, times `UNIT`, from one call."""
    v = torch.zeros_like(full.v)
    v[:, keys, :, torch.arange(len(keys), device=keys.device)] = UNIT
    return call(replace(full, v=v))["out"][..., : len(keys)]


class _RankWeights:
    """Weights of one rank's queries, and the scores that explain some of them. R queries, T keys, N ranks of keys."""

    def __init__(self, attention: UserAttention, full: Tensors, workload: Workload, keys: Tensor, weights: Tensor):
        """Take the positions (T) of the keys that were tried, and the weights (B, S/N, H, T), times `UNIT`."""
        self.attention, self.workload, self.keys, self.all_weights = attention, workload, keys, weights
        self.shown_by_mask = shown_by_mask(workload, attention.positions, keys)
        """Boolean mask (S/N, T) of the keys that each query should see."""
        self.sees = (weights != 0).any(2)
        """Boolean mask (B, S/N, T) of the keys that any head of each query sees."""
        local = len(attention.positions)
        rows = torch.arange(0, local, -(-local // SCORED_ROWS), device=keys.device)
        q, k = full.q[0, attention.positions[rows]].double(), full.k[0].double()
        self.group_size = workload.heads // workload.kv_heads
        self.weights = weights[0, rows].transpose(0, 1).double() / UNIT
        """Weights (H, R, T)."""
        all_keys = torch.arange(workload.seq, device=keys.device)
        self.shown = shown_by_mask(workload, attention.positions[rows], all_keys)
        """Boolean mask (R, S) of the keys that the mask shows."""
        seen = (self.weights > 0).all(0)
        self.visible = seen & self.shown[:, keys]
        """Boolean mask (R, T) of the keys that every head of a query sees, and that the mask shows."""
        self.leaked = seen & ~self.shown[:, keys]
        """Boolean mask (R, T) of the keys that every head of a query sees, and that the mask hides."""
        self.distance = (attention.positions[rows][:, None] - keys).double()
        """Distances (R, T) from a key to the query."""
        self.scores = torch.einsum("rhd,tkd->hkrt", q, k[keys])
        """Products q·k (H, Hkv, R, T) of every pair of heads, without a scale."""
        self.all_scores = torch.einsum("rhd,thd->hrt", q, k.repeat_interleave(self.group_size, 1))
        """Products q·k (H, R, S) of the right pairs of heads, over all keys."""
        self.holder = holder_of(attention.order)
        """Rank (S) that holds each key."""
        self.holder_one_hot = torch.nn.functional.one_hot(self.holder[keys], attention.ranks.size).double()
        """Rank that holds each key, one-hot (T, N)."""
        self.key_count = (self.visible.double() @ self.holder_one_hot).clamp_min(1e-9)
        """Number (R, N) of keys of each rank that a query sees; above 0, for division."""

    def findings(self, repeat_difference: float) -> _Findings:
        """Return this rank's findings, with the given difference between two equal calls."""
        finite = self.all_weights.isfinite().all(3).all(2).all(0)[:, None]
        leaks, missing = (
            self.sees.any(0) & ~self.shown_by_mask & finite,
            ~self.sees.all(0) & self.shown_by_mask & finite,
        )
        seen = Seen(
            pairs=self.shown_by_mask.numel(), of=self.workload.seq**2, leaks=int(leaks.sum()),
            first_leak=self._first_pair(leaks), missing=int(missing.sum()), first_missing=self._first_pair(missing),
        )  # fmt: skip
        shift = self._position_shift(self.sees[0])
        findings = _Findings(seen=seen, shift=shift, repeat_difference=repeat_difference)
        return self._fit(findings) if finite.all() else findings

    def _first_pair(self, pairs: Tensor) -> QueryAndKey | None:
        """Return the first pair in a boolean mask (S/N, T), by the query's position, then the key's; None if empty."""
        if not pairs.any():
            return None
        query = int(torch.where(pairs.any(1), self.attention.positions, self.workload.seq).argmin())
        key = self.keys[int(pairs[query].int().argmax())]
        return QueryAndKey(query=int(self.attention.positions[query]), key=int(key), rank=self.attention.ranks.rank)

    def _position_shift(self, sees: Tensor) -> int | None:
        """Return the number of keys by which all queries see too far ahead; None where they see other keys."""
        positions, last = self.attention.positions, self.workload.seq - 1
        if not self.workload.causal or len(self.keys) <= last or not sees.any(1).all():
            return None
        shifts = torch.where(sees, self.keys, -1).amax(1) - torch.where(self.shown_by_mask, self.keys, -1).amax(1)
        shift = int(shifts.mode().values)
        moved = (positions + shift).clamp(0, last)
        # Most queries must stay inside the sequence: at its ends, many shifts give the same keys.
        same = torch.equal(sees, shown_by_mask(self.workload, moved, self.keys))
        return shift if same and int((moved == positions + shift).sum()) * 2 >= len(positions) else None

    def _fit(self, findings: _Findings) -> _Findings:
        """Add to ``findings`` how scores explain the weights.

        Compares the logarithms of the weights with the scores of every pair of heads. Both are centred over the keys of
        each rank, so that neither the softmax's normalisation nor a wrong merge matters.
        """
        logs = torch.where(self.visible | self.leaked, self.weights.clamp_min(1e-300).log(), 0.0)
        of_weights, of_scores = self._centred(logs), self._centred(self.scores)
        norms = of_weights.flatten(-2).norm(dim=-1)[:, None, None], of_scores.flatten(-2).norm(dim=-1)
        likeness = torch.einsum("hrt,gkrt->hgk", of_weights, of_scores) / (norms[0] * norms[1]).clamp_min(1e-300)
        best = likeness.flatten(1).max(1)
        kv_heads = self.scores.shape[1]
        heads = [(int(index) // kv_heads, int(index) % kv_heads) for index in best.indices]
        expected_heads = [(head, head // self.group_size) for head in range(len(heads))]
        centred_scores, scores = (torch.stack([x[h, k] for h, k in expected_heads]) for x in (of_scores, self.scores))
        alike = bool((best.values > 1 - TOLERANCE).all())
        if alike and heads != expected_heads:
            return replace_fields(findings, heads=heads)
        slope = float((centred_scores * of_weights).sum() / centred_scores.square().sum().clamp_min(1e-300))
        if not alike or not self._negligible(of_weights - slope * centred_scores):
            bias = self._distance_bias(of_weights, centred_scores)
            return replace_fields(findings, heads=heads if alike else [], scores=bias)
        rest = torch.where(self.visible, logs - slope * scores, 0.0)
        log_factors = rest @ self.holder_one_hot / self.key_count
        row_factors = rest.sum(2, keepdim=True) / self.visible.sum(1).clamp_min(1)[:, None]
        near = (centred_scores.abs() <= centred_scores.abs()[:, self.visible].median()) & self.visible
        halves = ((centred_scores[part], of_weights[part]) for part in (near, ~near & self.visible))
        slopes = [float((x * y).sum() / x.square().sum().clamp_min(1e-300)) for x, y in halves]
        if abs(slopes[0] - slopes[1]) > TOLERANCE / 2 * abs(slope):
            return replace_fields(findings, heads=heads)  # scores are no multiple of q·k
        if not torch.equal((self.weights > 0).any(0), (self.weights > 0).all(0)):
            return replace_fields(findings, scale=slope, heads=heads)  # heads see different keys
        hidden, hidden_scores = self._hidden_scores(logs - row_factors, slope * scores)
        # Weights of hidden keys show their scores only if one factor per query is right for the keys that are shown.
        if hidden is None or (hidden and not self._negligible(rest - row_factors)):
            return replace_fields(findings, scale=slope, heads=heads)
        # Keys that were not tried are taken for those that the mask shows.
        seen, all_scores = self.shown.clone(), slope * self.all_scores
        seen[:, self.keys] = self.visible | self.leaked
        unseen = self.shown & ~seen
        if hidden_scores is not None:
            all_scores = torch.where(self.shown, all_scores, hidden_scores(all_scores))
            seen = ~unseen
        by_rank = self.holder == torch.arange(self.holder_one_hot.shape[1], device=self.holder.device)[:, None]
        scores_by_rank = all_scores[:, :, None].masked_fill(~(seen[:, None] & by_rank), -torch.inf)
        lses = scores_by_rank.logsumexp(3)
        sums = {AFTER_SOFTMAX: all_scores.logsumexp(2)}
        if unseen.any():
            sums[ZERO_V] = all_scores.masked_fill(~(seen | unseen), -torch.inf).logsumexp(2)
            sums[ZERO_K_AND_V] = (lses.logsumexp(2).exp() + unseen.sum(1)).log()
        mistake = merge_mistake(
            log_factors, lses, scores_by_rank.amax(3), self.key_count > 0.5, self.attention.ranks.rank, sums
        )  # fmt: skip
        # Where keys are not seen, a rank's keys may have come twice, in the place of these: no mistake of the merge.
        if unseen.any() and mistake.startswith(PARTIAL_OUTPUTS):
            return replace_fields(findings, scale=slope, heads=heads)
        received = mistake not in (ZERO_V, ZERO_K_AND_V)
        return replace_fields(
            findings, scale=slope, scores=hidden, merge=mistake, explains_seen=not hidden, received=received,
            heads=heads,
        )  # fmt: skip

    def _negligible(self, x: Tensor) -> bool:
        return float(x[:, self.visible].square().mean().sqrt()) <= TOLERANCE

    def _hidden_scores(self, of_weights: Tensor, scores: Tensor) -> tuple[str | None, _ScoresOfHidden | None]:
        """Compare the scores (H, R, T) that weights of hidden keys show with those that the keys have.

        Returns a sentence, empty where they are equal or no hidden key is seen, and None where nothing explains them;
        and a function from the right scores to those of hidden keys, if they differ.
        """
        measured = of_weights[:, self.leaked]
        if not measured.numel():
            return "", None
        added = measured - scores[:, self.leaked]
        middle, shift = float(measured.mean()), float(added.mean())
        if float((measured - middle).square().mean().sqrt()) <= TOLERANCE:
            score = "0" if abs(middle) <= TOLERANCE else f"{middle:.3g}"
            words = f"keys that the mask hides have a score of {score}, not of minus infinity"
            return words, lambda x: torch.full_like(x, middle)
        if float((added - shift).square().mean().sqrt()) > TOLERANCE:
            return None, None
        if shift > -1:  # no number that is meant to hide a key
            return ("" if abs(shift) <= TOLERANCE else None), None
        return (
            f"the mask adds {shift:.3g} to the scores of the keys that it hides, not minus infinity",
            lambda x: x + shift,
        )

    def _distance_bias(self, of_weights: Tensor, of_scores: Tensor) -> str:
        """Return a sentence if scores have a multiple of the distance added, by head; empty otherwise."""
        distance = self._centred(self.distance)
        factors, rest = [], []
        for weights, scores in zip(of_weights, of_scores, strict=True):
            matrix = torch.stack([scores.flatten(), distance.flatten()], 1)
            solution = torch.linalg.lstsq(matrix, weights.flatten()[:, None]).solution[:, 0]
            factors.append(float(solution[1]))
            rest.append(weights - (matrix @ solution).view_as(weights))
        if not self._negligible(torch.stack(rest)):
            return ""
        low, high = f"{min(factors):.3g}", f"{max(factors):.3g}"
        times = low if low == high else f"{low} to {high}"
        return f"scores have the distance from the key to the query added, times {times}, as with ALiBi"

    def _centred(self, x: Tensor) -> Tensor:
        """Subtract from x (..., R, T) its mean over the visible keys of each rank; return 0 for keys not visible."""
        mean = (torch.where(self.visible, x, 0.0) @ self.holder_one_hot) / self.key_count
        return torch.where(self.visible, x - mean @ self.holder_one_hot.T, 0.0)


def _reasons(by_rank: list[_Findings], workload: Workload, scale: float) -> list[str]:
    """Return sentences about the mistakes that the weights reveal.

    A mistake that explains others is reported alone: shifted positions before swapped heads before scale and merge.
    """
    if (shifted := _shifts(by_rank)) and all(fit.explains_seen for fit in by_rank):
        shifts = ", ".join(f"{shift:+d} on rank {rank}" for rank, shift in shifted)
        return [f"queries see as if at other positions: {shifts}"]
    heads = next((fit.heads for fit in by_rank if fit.heads), [])
    group_size = workload.heads // workload.kv_heads
    if heads and any(pair != (head, head // group_size) for head, pair in enumerate(heads)):
        of_q, of_k = (", ".join(str(pair[side]) for pair in heads) for side in (0, 1))
        right = ", ".join(str(head // group_size) for head in range(workload.heads))
        if [pair[0] for pair in heads] != list(range(workload.heads)):
            return [f"the output's heads are those of query heads {of_q}"]
        return [f"query heads use kv heads {of_k}, not {right}"]
    reasons = []
    scales = [fit.scale for fit in by_rank if fit.scale is not None]
    if scales and all(abs(found_scale / scale - 1) > TOLERANCE / 2 for found_scale in scales):
        reasons.append(f"scores are multiplied with {sum(scales) / len(scales):.3g}, not {scale:.3g} (softmax_scale)")
    # The sentence of most ranks. ZERO_K_AND_V and ZERO_V differ little where few keys are seen.
    for sentences in ([fit.scores for fit in by_rank if fit.scores], [fit.merge for fit in by_rank if fit.merge]):
        reasons += [max(sentences, key=sentences.count)] if sentences else []
    return reasons


def _shifts(by_rank: list[_Findings]) -> list[tuple[int, int]]:
    """Return the ranks whose queries see as if at other positions, with the shift; empty if that is not all."""
    wrong = [(rank, findings) for rank, findings in enumerate(by_rank) if not findings.seen.right]
    shifted = [(rank, findings.shift) for rank, findings in wrong if findings.shift]
    return shifted if len(shifted) == len(wrong) else []
