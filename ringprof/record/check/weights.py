"""Attention weights read off the output of a user's attention, which show exactly which keys each query sees.

Let v be `UNIT` in element d of one key's heads and 0 in all other keys. Then element d of a query's output is `UNIT`
times the query's weight for that key. That is not 0 where the query sees the key, and exactly 0 where it does not, in
every data type and for every sequence length. One call reveals the weights of head_dim keys. The logarithm of a weight
is the score, less a constant of the whole row, so the weights also show the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from ringprof.record.check.dense import Tensors, relative_rms
from ringprof.record.check.merging import merge_mistake
from ringprof.record.check.result import QueryAndKey, Seen
from ringprof.record.check.user_attention import AttentionResults, UserAttention
from ringprof.record.check.visible_keys import mask_mistake, shown_by_mask
from ringprof.record.request import from_json
from ringprof.run import Workload

MOST_CALLS = 16
"""Most calls that are made: enough for all keys of a short sequence.

In longer sequences only the keys at the documents' edges and some between are tried.
"""
UNIT = 64.0
"""Value of v, large enough that no weight becomes too small for float16."""
SCORED_ROWS = 64
"""Most queries per rank whose scores are compared."""
TOLERANCE = 0.05
"""Largest difference between weights and the scores that explain them: rounding is below it, mistakes are above."""


class _RankFindings(msgspec.Struct, frozen=True):
    """Findings from the weights of one rank's queries, which the ranks exchange."""

    pairs: int
    """Number of (query, key) pairs that were tried."""
    leaks: int
    """Number of pairs that the mask hides and the attention sees."""
    first_leak: QueryAndKey | None
    missing: int
    """Number of pairs that the mask shows and the attention does not see."""
    first_missing: QueryAndKey | None
    shift: int | None
    """Number of keys that every query sees too far ahead; None where queries differ."""
    repeat_difference: float
    """Relative difference of two calls with the same tensors."""
    scale: float | None
    """Factor by which scores are multiplied; None where no scores explain the weights."""
    merge_mistake: str
    """Sentence about a wrong merge of the ranks' partial outputs; empty where none is found."""
    heads: list[tuple[int, int]]
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
    rank_findings = rank_weights.findings(repeat_difference if math.isfinite(repeat_difference) else 0.0)
    findings_by_rank = [from_json(encoded, _RankFindings) for encoded in attention.ranks.gather_structs(rank_findings)]
    repeat_difference = max(findings.repeat_difference for findings in findings_by_rank)
    if repeat_difference > TOLERANCE:
        difference = f"out differs between two calls with the same tensors, by {repeat_difference:.2g}"
        return None, [f"{difference}: dropout is on, or ranks race"]
    mistake = "" if _shifts(findings_by_rank) else mask_mistake(sees, keys, attention.order, workload)
    reasons = _reasons(findings_by_rank, workload, scale)
    return _combine_ranks(findings_by_rank, workload), [mistake, *reasons] if mistake else reasons


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


@dataclass(frozen=True)
class _RankWeights:
    """Weights of one rank's queries, with the workload that states what they should be."""

    attention: UserAttention
    full: Tensors
    workload: Workload
    keys: Tensor
    """Positions (T) of the keys that were tried."""
    weights: Tensor
    """Weights (B, S/N, H, T), times `UNIT`."""

    @cached_property
    def shown_by_mask(self) -> Tensor:
        """Boolean mask (S/N, T) of the keys that each query should see."""
        return shown_by_mask(self.workload, self.attention.positions, self.keys)

    @cached_property
    def sees(self) -> Tensor:
        """Boolean mask (B, S/N, T) of the keys that any head of each query sees."""
        return (self.weights != 0).any(2)

    def findings(self, repeat_difference: float) -> _RankFindings:
        """Return this rank's findings, with the given difference between two equal calls."""
        finite = self.weights.isfinite().all(3).all(2).all(0)[:, None]
        leaks, missing = (
            self.sees.any(0) & ~self.shown_by_mask & finite,
            ~self.sees.all(0) & self.shown_by_mask & finite,
        )
        scale, merge_mistake, heads = None, "", list[tuple[int, int]]()
        if finite.all():
            scale, merge_mistake, heads = _ScoreFit(self).fit()
        return _RankFindings(
            self.shown_by_mask.numel(), int(leaks.sum()), self._first_pair(leaks), int(missing.sum()),
            self._first_pair(missing), self._position_shift(self.sees[0]), repeat_difference, scale, merge_mistake,
            heads,
        )  # fmt: skip

    def _first_pair(self, pairs: Tensor) -> QueryAndKey | None:
        """Return the first pair in a boolean mask (S/N, T), by the query's position, then the key's; None if empty."""
        if not pairs.any():
            return None
        query = int(torch.where(pairs.any(1), self.attention.positions, self.workload.seq).argmin())
        key = self.keys[int(pairs[query].int().argmax())]
        return QueryAndKey(query=int(self.attention.positions[query]), key=int(key), rank=self.attention.ranks.rank)

    def _position_shift(self, sees: Tensor) -> int | None:
        """Return the number of keys by which all queries see too far ahead; None where queries differ.

        Queries whose last visible key is at either end of the sequence may differ. Only known for causal masks.
        """
        if not self.workload.causal or len(self.keys) < self.workload.seq or not sees.any(1).all():
            return None
        last_seen, last_shown = (torch.where(mask, self.keys, -1).amax(1) for mask in (sees, self.shown_by_mask))
        shifts = (last_seen - last_shown).tolist()
        positions = self.attention.positions.tolist()
        shift = max(shifts, key=shifts.count)
        ends = (0, self.workload.seq - 1)
        others = [(other, position) for other, position in zip(shifts, positions, strict=True) if other != shift]
        return shift if all(position + other in ends for other, position in others) else None


class _ScoreFit:
    """Fit of the weights of some queries by scores q·k. R queries, T keys, N ranks that hold the keys."""

    def __init__(self, rank_weights: _RankWeights) -> None:
        attention, full, workload = rank_weights.attention, rank_weights.full, rank_weights.workload
        rows = torch.arange(
            0, len(attention.positions), -(-len(attention.positions) // SCORED_ROWS), device=rank_weights.keys.device
        )
        q = full.q[0, attention.positions[rows]].double()
        k = full.k[0, rank_weights.keys].double()
        self.group_size = workload.heads // workload.kv_heads
        weights = rank_weights.weights[0, rows].transpose(0, 1).double() / UNIT
        self.weights = weights
        """Weights (H, R, T)."""
        self.visible = (weights > 0).all(0)
        """Boolean mask (R, T) of the keys that every head of a query sees."""
        self.scores = torch.einsum("rhd,tkd->hkrt", q, k)
        """Products q·k (H, Hkv, R, T) of every pair of heads, without a scale."""
        holder = torch.empty(workload.seq, dtype=torch.int64, device=rank_weights.keys.device)
        holder[attention.order.flatten()] = torch.arange(workload.seq, device=holder.device) // attention.order.shape[1]
        self.holder_one_hot = torch.nn.functional.one_hot(holder[rank_weights.keys], attention.ranks.size).double()
        """Rank that holds each key, one-hot (T, N)."""
        self.key_count = (self.visible.double() @ self.holder_one_hot).clamp_min(1e-9)
        """Number (R, N) of keys of each rank that a query sees; above 0, for division."""
        self.own_rank = attention.ranks.rank
        all_keys = torch.arange(workload.seq, device=holder.device)
        shown = shown_by_mask(workload, attention.positions[rows], all_keys)
        # Keys that were not tried are taken for those that the mask shows.
        shown[:, rank_weights.keys] = self.visible
        self.shown_by_rank = shown[:, None] & (
            holder == torch.arange(attention.ranks.size, device=holder.device)[:, None]
        )
        """Boolean mask (R, N, S) of each rank's keys that a query sees."""
        wide_k = full.k[0].double().repeat_interleave(self.group_size, 1)
        self.all_scores = torch.einsum("rhd,thd->hrt", q, wide_k)
        """Products q·k (H, R, S) of the right pairs of heads, over all keys."""

    def fit(self) -> tuple[float | None, str, list[tuple[int, int]]]:
        """Return the scale of the scores, the merge mistake and the pairs of heads, as in `_RankFindings`.

        The logarithms of the weights are compared with the scores of every pair of heads. Both are centred over the
        keys of each rank, so that neither the softmax's normalisation nor a wrong merge matters.
        """
        logs = torch.where(self.visible, self.weights.clamp_min(1e-300).log(), 0.0)
        of_weights, of_scores = self._centred(logs), self._centred(torch.where(self.visible, self.scores, 0.0))
        norms = of_weights.flatten(-2).norm(dim=-1)[:, None, None], of_scores.flatten(-2).norm(dim=-1)
        likeness = torch.einsum("hrt,gkrt->hgk", of_weights, of_scores) / (norms[0] * norms[1]).clamp_min(1e-300)
        best = likeness.flatten(1).max(1)
        kv_heads = self.scores.shape[1]
        heads = [(int(index) // kv_heads, int(index) % kv_heads) for index in best.indices]
        expected_heads = [(head, head // self.group_size) for head in range(len(heads))]
        if not bool((best.values > 1 - TOLERANCE).all()):
            return None, "", []
        if heads != expected_heads:
            return None, "", heads
        centred_scores, scores = (torch.stack([x[h, k] for h, k in expected_heads]) for x in (of_scores, self.scores))
        slope = float((centred_scores * of_weights).sum() / centred_scores.square().sum())
        if float((of_weights - slope * centred_scores)[:, self.visible].square().mean().sqrt()) > TOLERANCE:
            return None, "", heads
        log_factors = torch.where(self.visible, logs - slope * scores, 0.0) @ self.holder_one_hot / self.key_count
        masked_scores = torch.where(self.shown_by_rank, slope * self.all_scores[:, :, None], -torch.inf)
        mistake = merge_mistake(log_factors, masked_scores.logsumexp(3), self.key_count > 0.5, self.own_rank)
        return slope, mistake, heads

    def _centred(self, x: Tensor) -> Tensor:
        """Subtract from x (..., R, T) its mean over the keys of each rank that a query sees."""
        mean = (x @ self.holder_one_hot) / self.key_count
        return torch.where(self.visible, x - mean @ self.holder_one_hot.T, 0.0)


def _combine_ranks(findings_by_rank: list[_RankFindings], workload: Workload) -> Seen:
    """Combine all ranks' findings into the comparison with the mask."""

    def first_of(pairs: list[QueryAndKey | None]) -> QueryAndKey | None:
        return min((pair for pair in pairs if pair), key=lambda pair: (pair.query, pair.key), default=None)

    return Seen(
        pairs=sum(findings.pairs for findings in findings_by_rank),
        of=workload.seq**2,
        leaks=sum(findings.leaks for findings in findings_by_rank),
        first_leak=first_of([findings.first_leak for findings in findings_by_rank]),
        missing=sum(findings.missing for findings in findings_by_rank),
        first_missing=first_of([findings.first_missing for findings in findings_by_rank]),
    )


def _reasons(findings_by_rank: list[_RankFindings], workload: Workload, scale: float) -> list[str]:
    """Return sentences about the mistakes that the weights reveal.

    A mistake that explains others is reported alone: shifted positions before swapped heads before scale and merge.
    """
    if shifted := _shifts(findings_by_rank):
        shifts = ", ".join(f"{shift:+d} on rank {rank}" for rank, shift in shifted)
        return [f"queries see as if at other positions: {shifts}"]
    heads = next((findings.heads for findings in findings_by_rank if findings.heads), [])
    group_size = workload.heads // workload.kv_heads
    if heads and any(pair != (head, head // group_size) for head, pair in enumerate(heads)):
        of_q, of_k = (", ".join(str(pair[side]) for pair in heads) for side in (0, 1))
        right = ", ".join(str(head // group_size) for head in range(workload.heads))
        if [pair[0] for pair in heads] != list(range(workload.heads)):
            return [f"the output's heads are those of query heads {of_q}"]
        return [f"query heads use kv heads {of_k}, not {right}"]
    reasons = []
    scales = [findings.scale for findings in findings_by_rank if findings.scale is not None]
    if scales and all(abs(found_scale / scale - 1) > TOLERANCE / 2 for found_scale in scales):
        reasons.append(f"scores are multiplied with {sum(scales) / len(scales):.3g}, not {scale:.3g} (softmax_scale)")
    merges = [findings.merge_mistake for findings in findings_by_rank if findings.merge_mistake]
    if merges:
        reasons.append(max(merges, key=merges.count))
    return reasons


def _shifts(findings_by_rank: list[_RankFindings]) -> list[tuple[int, int]]:
    """Return the ranks whose queries see as if at other positions, with the shift; empty if that is not all."""
    wrong = [(rank, findings) for rank, findings in enumerate(findings_by_rank) if findings.leaks or findings.missing]
    shifted = [(rank, findings.shift) for rank, findings in wrong if findings.shift]
    return shifted if len(shifted) == len(wrong) else []
