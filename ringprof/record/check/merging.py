"""Mistakes in how ranks' partial outputs are merged, told by the weights that keys of each rank get.

All functions are pure. H heads, R queries, N ranks that hold the keys. In a right merge, the weight of every key is
exp(score - LSE), whichever rank holds it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringprof.record.check.visible_keys import relative_rank

TOLERANCE = 0.05
"""Largest difference between logarithms of weights that rounding explains."""


def merge_mistake(log_factors: Tensor, lses: Tensor, has_keys: Tensor, own_rank: int) -> str:
    """Return a sentence about a wrong merge; empty where the merge is right.

    ``log_factors`` (H, R, N) are the logarithms of the weights less the scores, which in a right merge are minus the
    LSE of the whole row. ``lses`` (H, R, N) are the LSEs over each rank's keys, ``has_keys`` (R, N) says which ranks
    hold keys that a query sees, and ``own_rank`` holds the queries.
    """
    rows = has_keys.any(1)
    factors, has_keys = log_factors[:, rows], has_keys[rows]
    lses = torch.where(has_keys, lses[:, rows], -torch.inf)
    total = lses.logsumexp(2)
    largest, smallest = (torch.where(has_keys, factors, -sign * torch.inf) for sign in (1, -1))
    if _small((largest.amax(2) - smallest.amin(2))[:, has_keys.sum(1) > 1]):
        divisor = -torch.where(has_keys, factors, 0.0).sum(2) / has_keys.sum(1)
        return _wrong_sum(divisor, total, lses, has_keys)
    return f"the ranks' partial outputs {_wrong_weighting(factors, lses, has_keys, own_rank)}"


def _small(difference: Tensor) -> bool:
    return not difference.numel() or float(difference.square().mean().sqrt()) < TOLERANCE


def _wrong_sum(divisor: Tensor, total: Tensor, lses: Tensor, has_keys: Tensor) -> str:
    """Explain weights that are right but for a factor per query: exp(score - ``divisor``), not exp(score - ``total``).

    Both are (H, R).
    """
    if _small(divisor - total):
        return ""
    if _small(divisor - lses.amax(2)):
        return "partial outputs are merged with the maximum of the ranks' LSEs, not with the LSE of all"
    if _small(divisor - torch.exp2(lses).sum(2).log2()):
        return "LSEs are added in base 2 and used in base e: log2 and ln are mixed"
    zero_keys = divisor.exp() - total.exp()
    empty = (~has_keys).sum(1).double()
    allowed = TOLERANCE / 2 * (divisor.exp() + total.exp())
    if bool(empty.any()) and bool(((zero_keys - empty).abs() <= allowed).all()):
        return "ranks whose keys a query does not see count with an LSE of 0, not of minus infinity"
    count = round(float(zero_keys.median()))
    if count and bool(((zero_keys - count).abs() <= allowed).all()):
        plural = "s" * (abs(count) > 1)
        if count > 0:
            return f"weights sum to less than 1, as with {count} more key{plural} of score 0: padding is not masked"
    sums = (total - divisor).exp()
    relation = "less" if float(sums.median()) < 1 else "more"
    return (
        f"weights of a query sum to {relation} than 1: from {float(sums.min()):.3g} to {float(sums.max()):.3g},"
        f" the median is {float(sums.median()):.3g}"
    )


def _wrong_weighting(factors: Tensor, lses: Tensor, has_keys: Tensor, own_rank: int) -> str:
    """Explain weights whose factors differ between the ranks that hold the keys. Arguments as in `merge_mistake`."""
    several = has_keys.sum(1) > 1
    factors, lses, has_keys = factors[:, several], lses[:, several], has_keys[several]
    visible = has_keys.expand_as(factors)
    masses = factors + torch.where(has_keys, lses, 0.0)
    counts = has_keys.sum(1, keepdim=True).double()
    if _small(masses[visible]):
        return "are added as they are, not weighted by their LSE"
    if _small((masses + counts.log())[visible]):
        return "are averaged, not weighted by their LSE"
    size = has_keys.shape[1]
    for direction in (-1, 1):
        ring = [(own_rank + direction * hop) % size for hop in range(size)]
        running = torch.empty_like(lses)
        running[..., ring] = lses[..., ring].logcumsumexp(2)
        if _small((factors + running)[visible]):
            return "are not rescaled when later ones are merged: each is weighted by the LSE up to its own hop"

    def mean(x: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, x, 0.0).sum(2) / where.sum(1).clamp_min(1)

    for offset in range(size):
        other = has_keys.clone()
        other[:, (own_rank + offset) % size] = False
        both = has_keys[:, (own_rank + offset) % size] & other.any(1)
        if not both.any():
            continue
        excess = (factors[..., (own_rank + offset) % size] - mean(factors, other))[:, both]
        among_others = (factors - mean(factors, other)[..., None])[:, both][other[both].expand(len(factors), -1, -1)]
        if _small(among_others) and _small(excess - excess.mean()):
            owner, times = relative_rank(offset, size), math.exp(float(excess.mean()))
            return (
                f"are not weighted by their LSE: for a rank's queries, keys of {owner} weigh {times:.3g} times too much"
            )
    finite = torch.where(has_keys, lses, 0.0)
    centred = [torch.where(has_keys, x - mean(x, has_keys)[..., None], 0.0) for x in (masses, finite)]
    slope = float((centred[0] * centred[1]).sum() / centred[1].square().sum())
    if _small((centred[0] - slope * centred[1])[visible]):
        bases = {math.log(2): ": ln is taken for log2", 1 / math.log(2): ": log2 is taken for ln"}
        base = next((text for value, text in bases.items() if abs(slope / value - 1) < TOLERANCE), "")
        return f"are weighted by {slope:.3g} times their LSE{base}"
    return "are not weighted by their LSE"
