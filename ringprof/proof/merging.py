"""Mistakes in how ranks' partial outputs are merged, told by the weights that keys of each rank get.

All functions are pure. H heads, R queries, N ranks that hold the keys. In a right merge, the weight of every key is
exp(score - LSE), whichever rank holds it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringprof.proof.visible_keys import relative_rank

TOLERANCE = 0.05
"""Largest difference between logarithms of weights that rounding explains."""
PARTIAL_OUTPUTS = "the ranks' partial outputs"
"""First words of the sentences about factors that differ between the ranks that hold the keys."""


def merge_mistake(
    log_factors: Tensor, lses: Tensor, largest_scores: Tensor, has_keys: Tensor, own_rank: int,
    other_sums: dict[str, Tensor] | None = None,
) -> str:  # fmt: skip
    """Return a sentence about a wrong merge; empty where the merge is right.

    ``log_factors`` (H, R, N) are the logarithms of the weights less the scores, which in a right merge are minus the
    LSE of the whole row. ``lses`` (H, R, N) are the LSEs over each rank's keys, ``largest_scores`` (H, R, N) the
    largest of their scores, ``has_keys`` (R, N) says for which ranks there are factors, and ``own_rank`` holds the
    queries. ``other_sums`` (H, R) are LSEs over other keys, by the
    sentence that is true where they are in the place of the right ones.
    """
    rows = has_keys.any(1)
    factors, has_keys = log_factors[:, rows], has_keys[rows]
    lses, largest_scores = lses[:, rows], largest_scores[:, rows]
    largest, smallest = (torch.where(has_keys, factors, -sign * torch.inf) for sign in (1, -1))
    if _small((largest.amax(2) - smallest.amin(2))[:, has_keys.sum(1) > 1]):
        divisor = -torch.where(has_keys, factors, 0.0).sum(2) / has_keys.sum(1)
        return _wrong_sum(divisor, lses, has_keys, {text: x[:, rows] for text, x in (other_sums or {}).items()})
    lses, largest_scores = (torch.where(has_keys, x, -torch.inf) for x in (lses, largest_scores))
    return f"{PARTIAL_OUTPUTS} {_wrong_weighting(factors, lses, largest_scores, has_keys, own_rank)}"


def _small(difference: Tensor, limit: float = TOLERANCE) -> bool:
    return not difference.numel() or float(difference.square().mean().sqrt()) < limit


def _wrong_sum(divisor: Tensor, lses: Tensor, has_keys: Tensor, other_sums: dict[str, Tensor]) -> str:
    """Explain weights that are right but for a factor per query: exp(score - ``divisor`` (H, R)), not minus the LSE."""
    total = lses.logsumexp(2)
    if _small(divisor - total):
        return ""
    hidden_ranks = (~has_keys).sum(1)
    sums = {
        "partial outputs are merged with the maximum of the ranks' LSEs, not with the LSE of all": lses.amax(2),
        "LSEs are added in base 2 and used in base e: log2 and ln are mixed": torch.exp2(lses).sum(2).log2(),
        **other_sums,
        "ranks whose keys a query does not see count with an LSE of 0, not of minus infinity":
            (total.exp() + hidden_ranks).log(),
    }  # fmt: skip
    # Where two sums hardly differ, the weights do not tell which of them is used.
    limit = min(TOLERANCE, float((divisor - total).square().mean().sqrt()) / 4)
    for text, expected in sums.items():
        if _small(divisor - expected, limit):
            return text
    extra = divisor.exp() - total.exp()
    middle = float(extra.median())
    count = round(middle)
    if count > 0 and abs(middle - count) <= 0.02 * count and _small(divisor - (total.exp() + count).log(), limit):
        return f"weights sum to less than 1, as with {count} more key{'s' * (count > 1)} of score 0 for every query"
    by_head = extra.median(1, keepdim=True).values
    if float(by_head.min()) > 0 and _small(divisor - (total.exp() + by_head).log(), limit):
        scores = sorted({f"{math.log(float(x)):.2g}" for x in (by_head.min(), by_head.max())}, key=float)
        score = " to ".join(scores) + ", by head" * (len(scores) > 1)
        return f"weights sum to less than 1, as with one more key for every query, an attention sink of score {score}"
    sums_of_weights = (total - divisor).exp()
    low, middle, high = (float(x) for x in (sums_of_weights.min(), sums_of_weights.median(), sums_of_weights.max()))
    relation = "sum to less than 1" if high < 1 else "sum to more than 1" if low > 1 else "do not sum to 1"
    return f"weights of a query {relation}: from {low:.3g} to {high:.3g}, the median is {middle:.3g}"


def _wrong_weighting(
    factors: Tensor, lses: Tensor, largest_scores: Tensor, has_keys: Tensor, own_rank: int
) -> str:  # fmt: skip
    """Explain weights whose factors differ between the ranks that hold the keys. Arguments as in `merge_mistake`."""
    several = has_keys.sum(1) > 1
    factors, lses, largest_scores = (x[:, several] for x in (factors, lses, largest_scores))
    has_keys = has_keys[several]
    visible = has_keys.expand_as(factors)
    masses = factors + torch.where(has_keys, lses, 0.0)
    counts = has_keys.sum(1, keepdim=True).double()
    if _small(masses[visible]):
        return "are added as they are, not weighted by their LSE"
    if _small((masses + counts.log())[visible]):
        return "are averaged, not weighted by their LSE"
    size = has_keys.shape[1]

    def mean(x: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, x, 0.0).sum(2) / where.sum(1).clamp_min(1)

    for step in (-1, 1, 0):  # a ring in either direction, or the ranks from the first to the last
        order = [(own_rank + step * hop) % size if step else hop for hop in range(size)]
        running, maximum = torch.empty_like(lses), torch.empty_like(lses)
        running[..., order] = lses[..., order].logcumsumexp(2)
        if _small((factors + running)[visible]):
            return "are not rescaled when later ones are merged: each is weighted by the LSE up to its own hop"
        for of_rank, words in ((largest_scores, "score"), (lses, "LSE")):
            maximum[..., order] = of_rank[..., order].cummax(2).values
            # Whatever they are divided by at the end.
            rest = torch.where(has_keys, factors + maximum, 0.0)
            if _small((rest - mean(rest, has_keys)[..., None])[visible]):
                return (
                    f"are not rescaled when a later one has a larger {words}: each keeps the running maximum of its own"
                    " hop"
                )
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
