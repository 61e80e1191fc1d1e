"""The weights that an attention gives to keys, read off its output: what each query sees, exactly, and by which scores.

Where v is `UNIT` in number d of one key's heads and 0 in all others, number d of a query's output is `UNIT` times its
weight of that key: not 0 where it sees the key, and exactly 0 where it does not, in every type and however long the
sequence. A call tells head_dim keys. The logarithm of a weight is the score, less what the whole row has in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from ringprof.record.check.result import QueryAndKey, Seen
from ringprof.record.check.user_attention import Answers, UserAttention
from ringprof.record.request import from_json
from ringprof.record.verify import Tensors, relative_rms
from ringprof.run import Workload
from ringprof.strategies.kernels import builtin

MOST_CALLS = 16
"""So many tell all keys of short sequences; of longer ones the keys at the documents' edges and some between."""
UNIT = 64.0
"""So that no weight is too small for float16."""
SCORED_ROWS = 64
"""Of a rank's queries whose scores are looked at."""
LIKE = 0.05
"""What a weight may be off by, relative to the scores that explain it: rounding is below, mistakes are above."""


class _OnRank(msgspec.Struct, frozen=True):
    """What one rank's queries tell."""

    pairs: int
    leaks: int
    leak: QueryAndKey | None
    missing: int
    missed: QueryAndKey | None
    shift: int | None
    """By how many keys all queries see further than they should; None where they differ."""
    again: float
    """Relative difference of two calls with the same tensors."""
    scale: float | None
    """What scores are multiplied with, where the weights are those of scores at all."""
    merge: str
    """How the weights of the ranks' keys are put together wrongly; empty: they are not."""
    heads: list[tuple[int, int]]
    """For every head of the output the head of q and that of k whose scores it has; empty where that is not known."""


def read_weights(
    call: Callable[[Tensors], Answers], given: UserAttention, full: Tensors, workload: Workload, scale: float | None
) -> tuple[Seen | None, list[str]]:
    """Which pairs of a query and a key are not as the mask says, and what else the weights tell. Collective.

    None of the first where weights differ from call to call. ``call`` makes a call of the attention, ``full`` are drawn
    inputs.
    """
    scale = workload.head_dim**-0.5 if scale is None else scale
    # Scores of about 1, whatever the scale: no weight is lost beside another.
    full = replace(full, q=(full.q / (scale * workload.head_dim**0.5)).to(full.q.dtype))
    keys = _tried_keys(workload, full.q.device)
    at_once = range(0, len(keys), workload.head_dim)
    read = torch.cat([_weights(call, full, keys[first : first + workload.head_dim]) for first in at_once], 2)
    first = keys[: workload.head_dim]
    again = relative_rms(_weights(call, full, first) - read[..., : len(first)], read[..., : len(first)])
    own = _Weights(given, full, workload, keys, read)
    found = own.told(again if math.isfinite(again) else 0.0)
    ranks = [from_json(said, _OnRank) for said in given.ranks.gather_structs(found)]
    again = max(one.again for one in ranks)
    if again > LIKE:
        said = f"out differs between two calls with the same tensors, by {again:.2g}: dropout is on, or ranks race"
        return None, [said]
    return _over_ranks(ranks, workload), _reasons(ranks, workload, scale)


def _tried_keys(workload: Workload, device: torch.device) -> Tensor:
    """Positions (T) in order."""
    seq, most = workload.seq, MOST_CALLS * workload.head_dim
    if seq <= most:
        return torch.arange(seq, device=device)
    edges = {0, seq - 1, *(edge for bound in workload.mask().documents or () for edge in (bound - 1, bound))}
    edges = {edge for edge in edges if 0 <= edge < seq}
    some = sorted(edges)[: most // 2]
    return torch.tensor(sorted({*some, *range(0, seq, -(-seq // (most - len(some))))}), device=device)


def _weights(call: Callable[[Tensors], Answers], full: Tensors, keys: Tensor) -> Tensor:
    """The weights (S/N, H, keys) of this rank's queries, from one call."""
    v = torch.zeros_like(full.v)
    v[:, keys, :, torch.arange(len(keys), device=keys.device)] = UNIT
    return call(replace(full, v=v))["out"][0, :, :, : len(keys)]


@dataclass(frozen=True)
class _Weights:
    """One rank's weights beside what they should be."""

    given: UserAttention
    full: Tensors
    workload: Workload
    keys: Tensor
    """Positions (T) of the keys that were tried."""
    read: Tensor
    """(S/N, H, T)."""

    @cached_property
    def seen(self) -> Tensor:
        """Which keys the mask shows a query: bool (S/N, T)."""
        return builtin.KeyStretches.of(self.workload.mask(), self.given.positions, self.workload.seq).shown(self.keys)

    def told(self, again: float) -> _OnRank:
        finite = self.read.isfinite().all(2).all(1)[:, None]
        sees = (self.read != 0).any(1)
        leaks, missing = sees & ~self.seen & finite, ~sees & self.seen & finite
        scale, merge, heads = None, "", list[tuple[int, int]]()
        if finite.all():
            scale, merge, heads = _Scores(self).told()
        return _OnRank(
            self.seen.numel(), int(leaks.sum()), self._first(leaks), int(missing.sum()), self._first(missing),
            self._shift(sees), again, scale, merge, heads,
        )  # fmt: skip

    def _first(self, pairs: Tensor) -> QueryAndKey | None:
        """The first query, by its position, and the first of its keys."""
        if not pairs.any():
            return None
        query = int(torch.where(pairs.any(1), self.given.positions, self.workload.seq).argmin())
        key = self.keys[int(pairs[query].int().argmax())]
        return QueryAndKey(query=int(self.given.positions[query]), key=int(key), rank=self.given.ranks.rank)

    def _shift(self, sees: Tensor) -> int | None:
        if not self.workload.causal or len(self.keys) < self.workload.seq or not sees.any(1).all():
            return None
        off = (torch.where(sees, self.keys, -1).amax(1) - torch.where(self.seen, self.keys, -1).amax(1)).tolist()
        places = self.given.positions.tolist()
        shift = max(off, key=off.count)
        ends = (0, self.workload.seq - 1)
        return (
            shift if all(one == shift or place + one in ends for one, place in zip(off, places, strict=True)) else None
        )


class _Scores:
    """What scores the weights of some queries have. R queries, T keys, N ranks that hold these."""

    def __init__(self, weights: _Weights) -> None:
        given, full, work = weights.given, weights.full, weights.workload
        rows = torch.arange(
            0, len(given.positions), -(-len(given.positions) // SCORED_ROWS), device=weights.keys.device
        )
        q = full.q[0, given.positions[rows]].double()
        k = full.k[0, weights.keys].double()
        self.group = work.heads // work.kv_heads
        read = weights.read[rows].transpose(0, 1).double() / UNIT
        self.read = read
        """(H, R, T)."""
        self.there = (read > 0).all(0)
        """(R, T): what all heads see."""
        self.raw = torch.einsum("rhd,tkd->hkrt", q, k)
        """(H, Hkv, R, T)."""
        holder = torch.empty(work.seq, dtype=torch.int64, device=weights.keys.device)
        holder[given.order.flatten()] = torch.arange(work.seq, device=holder.device) // given.order.shape[1]
        self.held = torch.nn.functional.one_hot(holder[weights.keys], given.ranks.size).double()
        """(T, N)."""
        self.count = (self.there.double() @ self.held).clamp_min(1e-9)
        """(R, N)."""
        self.whole = len(weights.keys) == work.seq

    def told(self) -> tuple[float | None, str, list[tuple[int, int]]]:
        logs = torch.where(self.there, self.read.clamp_min(1e-300).log(), 0.0)
        of_weights, of_scores = self._apart(logs), self._apart(torch.where(self.there, self.raw, 0.0))
        norms = of_weights.flatten(-2).norm(dim=-1)[:, None, None], of_scores.flatten(-2).norm(dim=-1)
        likeness = torch.einsum("hrt,gkrt->hgk", of_weights, of_scores) / (norms[0] * norms[1]).clamp_min(1e-300)
        best = likeness.flatten(1).max(1)
        kv_heads = self.raw.shape[1]
        heads = [(int(one) // kv_heads, int(one) % kv_heads) for one in best.indices]
        right = [(head, head // self.group) for head in range(len(heads))]
        if not bool((best.values > 1 - LIKE).all()):
            return None, "", []
        if heads != right:
            return None, "", heads
        own, scores = (torch.stack([x[h, k] for h, k in right]) for x in (of_scores, self.raw))
        slope = float((own * of_weights).sum() / own.square().sum())
        if float((of_weights - slope * own)[:, self.there].square().mean().sqrt()) > LIKE:
            return None, "", heads
        return slope, self._merge(torch.where(self.there, logs - slope * scores, 0.0)), heads

    def _apart(self, x: Tensor) -> Tensor:
        """x (..., R, T) less its mean over the keys of each rank that a query sees."""
        mean = (x @ self.held) / self.count
        return torch.where(self.there, x - mean @ self.held.T, 0.0)

    def _merge(self, rest: Tensor) -> str:
        """How a row's weights over the keys of different ranks (rest (H, R, T) in logarithms) go together."""
        by_rank = (rest @ self.held) / self.count
        has = self.count > 0.5
        several = has.sum(1) > 1
        if not bool(several.any()):
            return ""
        spread = torch.where(has, by_rank, -torch.inf).amax(2) - torch.where(has, by_rank, torch.inf).amin(2)
        if float(spread[:, several].square().mean().sqrt()) < LIKE:
            return ""
        if self.whole:
            sums, ranks = (self.read @ self.held)[:, several], has[several]
            for says, one in (("added", torch.ones_like(sums)), ("averaged", 1 / ranks.sum(1)[:, None].double())):
                if bool(((sums - one).abs()[ranks.expand_as(sums)] < LIKE).all()):
                    return says
        return "weighted wrongly"


def _over_ranks(ranks: list[_OnRank], workload: Workload) -> Seen:
    def first(pairs: list[QueryAndKey | None]) -> QueryAndKey | None:
        return min((pair for pair in pairs if pair), key=lambda pair: (pair.query, pair.key), default=None)

    return Seen(
        pairs=sum(one.pairs for one in ranks), of=workload.seq**2, leaks=sum(one.leaks for one in ranks),
        first_leak=first([one.leak for one in ranks]), missing=sum(one.missing for one in ranks),
        first_missing=first([one.missed for one in ranks]),
    )  # fmt: skip


_MERGES = {
    "added": "are added as they are, not weighted by their LSE",
    "averaged": "are averaged, not weighted by their LSE",
    "weighted wrongly": "are not weighted by their LSE",
}


def _reasons(ranks: list[_OnRank], workload: Workload, scale: float) -> list[str]:
    """What is wrong by the weights; of things that follow from each other the first."""
    shifted = [(rank, one.shift) for rank, one in enumerate(ranks) if one.shift and (one.leaks or one.missing)]
    if shifted and len(shifted) == sum(bool(one.leaks or one.missing) for one in ranks):
        by = ", ".join(f"{shift:+d} on rank {rank}" for rank, shift in shifted)
        return [f"queries see as if at other positions: {by}"]
    heads = next((one.heads for one in ranks if one.heads), [])
    group = workload.heads // workload.kv_heads
    if heads and any(pair != (head, head // group) for head, pair in enumerate(heads)):
        of_q, of_k = (", ".join(str(pair[which]) for pair in heads) for which in (0, 1))
        right = ", ".join(str(head // group) for head in range(workload.heads))
        if [pair[0] for pair in heads] != list(range(workload.heads)):
            return [f"the output's heads are those of query heads {of_q}"]
        return [f"query heads use kv heads {of_k}, not {right}"]
    found = []
    scales = [one.scale for one in ranks if one.scale is not None]
    if scales and all(abs(one / scale - 1) > LIKE / 2 for one in scales):
        found.append(f"scores are multiplied with {sum(scales) / len(scales):.3g}, not {scale:.3g} (softmax_scale)")
    merges = [one.merge for one in ranks if one.merge]
    if merges:
        found.append(f"the ranks' partial outputs {_MERGES[max(merges, key=merges.count)]}")
    return found
