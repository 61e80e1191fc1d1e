"""Gradients under known mistakes of a backward pass, and the parts that a gradient is the sum of.

All functions are pure and compute in float64 over the whole sequence, one batch entry and kv head after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from ringprof.proof.dense import Tensors
from ringprof.proof.visible_keys import relative_rank, shown_by_mask
from ringprof.workload.workload import Workload

BACKWARD_MISTAKES = {
    "no delta": "leaves out delta, the row sums of dout times out",
    "own delta": "subtracts each rank's own delta, from its partial output, not that of the merged output",
    "own softmax": "uses each rank's own LSE, not that of the whole row",
    "own softmax and delta": "uses each rank's own LSE and delta, not those of the whole row",
    "no mask": "is computed without the mask",
    "mask of own rank": "is computed without the mask between tokens of different ranks",
    "no documents": "is computed across documents",
    "no window": "is computed without the window",
    "local mask": "masks by the places of tokens within their rank, not by their positions",
}
"""Mistakes that `gradients_under` knows, each with its words after the name of a gradient."""


@dataclass(frozen=True)
class _Group:
    """One batch entry and kv head with its G query heads, over S tokens, in float64."""

    batch: int
    kv_head: int
    heads: slice
    q: Tensor
    """Queries (G, S, D)."""
    k: Tensor
    """Keys (S, D)."""
    dout: Tensor
    """Gradient of the output (G, S, D)."""
    scores: Tensor
    """Scores (G, S, S), scaled."""
    dweights: Tensor
    """Gradient of the weights (G, S, S)."""


def _groups(full: Tensors, workload: Workload, scale: float) -> Iterator[_Group]:
    size = workload.heads // workload.kv_heads
    for batch in range(workload.batch):
        for kv_head in range(workload.kv_heads):
            heads = slice(kv_head * size, (kv_head + 1) * size)
            q, dout = (x[batch, :, heads].double().transpose(0, 1) for x in (full.q, full.dout))
            k, v = (x[batch, :, kv_head].double() for x in (full.k, full.v))
            yield _Group(batch, kv_head, heads, q, k, dout, q @ k.T * scale, dout @ v.T)


def _weights_and_dscores(
    group: _Group, mask: Tensor, holder: Tensor, scale: float, mistake: str = "", other_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights and the gradients of the scores (G, S, S), under a mistake of `BACKWARD_MISTAKES` or none.

    With ``other_mask`` weights are recomputed from the right LSE with another mask.
    """
    masked = group.scores.masked_fill(~mask, -torch.inf)
    weights = masked.softmax(2)
    delta = (weights * group.dweights).sum(2, keepdim=True)
    if other_mask is not None:
        weights = (group.scores - masked.logsumexp(2, keepdim=True)).exp() * other_mask
    if mistake == "no delta":
        delta = torch.zeros_like(delta)
    if mistake.startswith("own"):
        own_weights, own_delta = torch.zeros_like(weights), torch.zeros_like(weights)
        for rank in torch.unique(holder):
            keys = holder == rank
            own_weights[..., keys] = masked[..., keys].softmax(2).nan_to_num(0)
            own_delta[..., keys] = (own_weights * group.dweights)[..., keys].sum(2, keepdim=True)
        delta = own_delta if "delta" in mistake else delta
        weights = own_weights if "softmax" in mistake else weights
    return weights, weights * (group.dweights - delta) * scale


def gradients_under(mistake: str, full: Tensors, workload: Workload, scale: float, holder: Tensor) -> dict[str, Tensor]:
    """Return dq (B, S, H, D), dk and dv (B, S, Hkv, D) under a mistake of `BACKWARD_MISTAKES`.

    ``holder`` (S) is the rank that holds each token.
    """
    positions = torch.arange(workload.seq, device=holder.device)
    mask, other_mask = shown_by_mask(workload, positions, positions), None
    if mistake == "no mask":
        other_mask = torch.ones_like(mask)
    elif mistake == "local mask":
        local_index = torch.empty_like(holder)
        for rank in torch.unique(holder):
            local_index[holder == rank] = torch.arange(int((holder == rank).sum()), device=holder.device)
        other_mask = local_index[:, None] >= local_index
    elif mistake == "mask of own rank":
        other_mask = mask | (holder[:, None] != holder)
    elif mistake in ("no documents", "no window"):
        other_mask = shown_by_mask(replace(workload, **{mistake.split()[1]: None}), positions, positions)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (full.q, full.k, full.v))
    for group in _groups(full, workload, scale):
        weights, dscores = _weights_and_dscores(group, mask, holder, scale, mistake, other_mask)
        dq[group.batch, :, group.heads] = (dscores @ group.k).transpose(0, 1)
        dk[group.batch, :, group.kv_head] = torch.einsum("gqk,gqd->kd", dscores, group.q)
        dv[group.batch, :, group.kv_head] = torch.einsum("gqk,gqd->kd", weights, group.dout)
    return {"dq": dq, "dk": dk, "dv": dv}


def gradient_parts(
    full: Tensors, workload: Workload, scale: float, holder: Tensor, positions: Tensor
) -> dict[str, Tensor]:
    """Return the parts that the gradients of one rank's tokens are the sums of, by name.

    ``dq`` (N, B, S/N, H, D) has a part for the keys of each rank. ``dk`` and ``dv`` (N, B, S/N, H, D) have a part for
    each query head of each rank's queries. ``positions`` (S/N) are those of the rank's tokens.
    """
    ranks = int(holder.max()) + 1
    all_positions = torch.arange(workload.seq, device=holder.device)
    mask = shown_by_mask(workload, all_positions, all_positions)
    shape = (ranks, workload.batch, len(positions), workload.heads, workload.head_dim)
    parts = {name: torch.zeros(shape, dtype=torch.float64, device=holder.device) for name in ("dq", "dk", "dv")}
    for group in _groups(full, workload, scale):
        weights, dscores = _weights_and_dscores(group, mask, holder, scale)
        for rank in range(ranks):
            tokens = holder == rank
            own_part = {
                "dq": dscores[:, positions][..., tokens] @ group.k[tokens],
                "dk": dscores[:, tokens][..., positions].transpose(1, 2) @ group.q[:, tokens],
                "dv": weights[:, tokens][..., positions].transpose(1, 2) @ group.dout[:, tokens],
            }
            for name, part in own_part.items():
                parts[name][rank, group.batch, :, group.heads] = part.transpose(0, 1)
    return parts


def coefficients(x: Tensor, parts: Tensor, limit: float) -> list[float]:
    """Return the factors (P) with which parts (P, ...) sum to x (...); NaN for a part that is 0.

    Empty where no factors leave an error of at most ``limit``, relative to the sum of all parts.
    """
    matrix, whole = parts.flatten(1).T, parts.sum(0)
    used = matrix.square().sum(0) > 1e-12 * matrix.square().sum()
    factors = torch.full((len(parts),), torch.nan, dtype=torch.float64, device=x.device)
    factors[used] = torch.linalg.lstsq(matrix[:, used], x.double().flatten()[:, None]).solution[:, 0]
    residual = (x.double().flatten() - matrix[:, used] @ factors[used]).square().mean().sqrt()
    return factors.tolist() if float(residual) <= limit * float(whole.square().mean().sqrt()) else []


def rank_parts_mistake(name: str, factors: list[list[float]]) -> str:
    """Return words about a gradient that counts some ranks' parts wrongly; empty where all count alike.

    ``factors`` (N, N) says how often each rank's gradient counts what each rank's queries (dk, dv) or keys (dq) give;
    NaN where they give nothing.
    """
    size, source = len(factors), "keys" if name == "dq" else "queries"
    by_offset = [[row[(rank + offset) % size] for rank, row in enumerate(factors)] for offset in range(size)]
    known = [[factor for factor in row if not math.isnan(factor)] for row in by_offset]
    if not all(_alike(row) for row in known):
        rank = max(range(size), key=lambda rank: max(abs(factor - 1) for factor in factors[rank] if factor == factor))
        counts = ", ".join("-" if math.isnan(factor) else _count(factor) for factor in factors[rank])
        return f"on rank {rank} counts what the {source} of ranks 0 to {size - 1} give {counts} times"
    counts_by_offset = [sum(row) / len(row) if row else math.nan for row in known]
    own, others = counts_by_offset[0], [count for count in counts_by_offset[1:] if not math.isnan(count)]
    if _alike([own, *others]):
        return ""
    if _alike([own, 1]) and _alike([0, *others]):
        return f"is what a rank's own {source} give: other ranks' part is missing"
    wrong = {offset: count for offset, count in enumerate(counts_by_offset) if not _alike([count, 1])}
    owners = " and ".join(relative_rank(offset, size) for offset in wrong)
    if _alike([0, *wrong.values()]):
        return f"lacks what the {source} of {owners} give"
    counts = " and ".join(_count(count) for count in wrong.values())
    return f"counts what the {source} of {owners} give {counts} times"


def head_parts_mistake(factors: list[list[float]]) -> str:
    """Return words about dk or dv that counts query heads wrongly; empty where all count alike.

    ``factors`` (Hkv, H) says how often the gradient of each kv head counts each query head.
    """
    group = len(factors[0]) // len(factors)
    for kv_head, row in enumerate(factors):
        right = range(kv_head * group, (kv_head + 1) * group)
        if _alike([row[head] for head in right]) and _alike([0, *(row[h] for h in range(len(row)) if h not in right)]):
            continue
        heads = [head for head, factor in enumerate(row) if abs(factor) > 0.05]
        sums = ", ".join(map(str, heads)) + f", not {', '.join(map(str, right))}"
        times = (
            ""
            if _alike([1, *(row[head] for head in heads)])
            else ", times " + ", ".join(_count(row[head]) for head in heads)
        )
        return f"of kv head {kv_head} sums query heads {sums}{times}"
    return ""


def _alike(factors: list[float]) -> bool:
    return not factors or max(factors) - min(factors) < 0.05


def _count(factor: float) -> str:
    return f"{round(factor, 1) + 0.0:g}"
