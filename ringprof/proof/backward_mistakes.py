"""Gradients under known mistakes of a backward pass, and the parts that a gradient is the sum of.

All functions are pure and compute in float64 over the whole sequence, one batch entry and kv head after another.
"""

from __future__ import annotations

import math

import torch
from msgspec.structs import replace
from torch import Tensor

from ringprof.proof.dense import REFERENCE, Tensors, each_kv_head
from ringprof.proof.visible_keys import relative_rank, shown_by_mask
from ringprof.strategies.kernels.kernel import Gradients
from ringprof.strategies.kernels.merge import row_product
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


def gradients_under(mistake: str, full: Tensors, workload: Workload, scale: float, holder: Tensor) -> dict[str, Tensor]:
    """Return dq (B, S, H, D), dk and dv (B, S, Hkv, D) under a mistake of `BACKWARD_MISTAKES`.

    ``holder`` (S) is the rank that holds each token.
    """
    positions = torch.arange(workload.seq, device=holder.device)
    mask = used_mask = shown_by_mask(workload, positions, positions)
    if mistake == "no mask":
        used_mask = torch.ones_like(mask)
    elif mistake == "local mask":
        local_index = torch.empty_like(holder)
        for rank in torch.unique(holder):
            local_index[holder == rank] = torch.arange(int((holder == rank).sum()), device=holder.device)
        used_mask = local_index[:, None] >= local_index
    elif mistake == "mask of own rank":
        used_mask = mask | (holder[:, None] != holder)
    elif mistake in ("no documents", "no window"):
        used_mask = shown_by_mask(replace(workload, **{mistake.split()[1]: None}), positions, positions)
    by_rank = mistake.startswith("own")
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (full.q, full.k, full.v))
    for entry, heads, kv_head, (q, k, v, dout) in each_kv_head(full, workload):
        out, lse = REFERENCE.forward_masked(q, k, v, scale, mask)
        delta = row_product(dout, torch.zeros_like(out) if mistake == "no delta" else out)
        for keys in [positions[holder == rank] for rank in torch.unique(holder)] if by_rank else [positions]:
            if by_rank:
                own_out, own_lse = REFERENCE.forward_masked(q, k[:, keys], v[:, keys], scale, mask[:, keys])
                # A query may see no key of a rank.
                delta = row_product(dout, own_out.nan_to_num(0)) if "delta" in mistake else delta
                lse = own_lse.masked_fill(own_lse.isneginf(), 0) if "softmax" in mistake else lse
            parts = _between(positions, keys, [q, k, v, dout], lse, delta, scale, used_mask)
            dq[entry, :, heads] += parts[0][0]
            dk[entry, keys, kv_head], dv[entry, keys, kv_head] = (x[0].sum(1) for x in parts[1:])
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
    results = {name: torch.zeros(shape, dtype=torch.float64, device=holder.device) for name in ("dq", "dk", "dv")}
    for entry, heads, _, (q, k, v, dout) in each_kv_head(full, workload):
        out, lse = REFERENCE.forward_masked(q, k, v, scale, mask)
        delta = row_product(dout, out)
        softmax = [q, k, v, dout], lse, delta, scale, mask
        for rank in range(ranks):
            tokens = all_positions[holder == rank]
            parts = _between(positions, tokens, *softmax)[:1] + _between(tokens, positions, *softmax)[1:]
            for result, part in zip(results.values(), parts, strict=True):
                result[rank, entry, :, heads] = part[0]
    return results


def _between(
    queries: Tensor, keys: Tensor, tensors: list[Tensor], lse: Tensor, delta: Tensor, scale: float, mask: Tensor
) -> Gradients:
    """Return what queries and keys at some positions give each other of dq, and of dk and dv per query head."""
    q, k, v, dout = tensors
    return REFERENCE.backward_masked(
        dout[:, queries], q[:, queries], k[:, keys], v[:, keys], lse[..., queries], None, delta[..., queries], scale,
        mask[queries][:, keys],
    )  # fmt: skip


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
