"""Patterns in what an attention's weights show: which known mistake of the mask or of the merge they equal.

All functions are pure. Masks are compared exactly, by the pairs of a query and a key of the whole sequence: S tokens, T
keys that were tried, N ranks that hold them. In a right merge of the ranks' partial outputs, the weight of every key is
exp(score - LSE), whichever rank holds it: H heads, R queries.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from msgspec.structs import replace
from torch import Tensor

from ringprof.strategies.kernels.reference import KeyStretches
from ringprof.workload.workload import Workload

MOST_NAMED = 4
"""Most tokens, or pairs of ranks, that a sentence names."""
TOLERANCE = 0.05
"""Largest difference between logarithms of weights that rounding explains."""
PARTIAL_OUTPUTS = "the ranks' partial outputs"
"""First words of the sentences about factors that differ between the ranks that hold the keys."""


def shown_by_mask(workload: Workload, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which of the keys at these positions (T) the mask shows to queries at these (R): bool (R, T)."""
    return KeyStretches.of(workload.mask(), queries, workload.seq).shown(keys)


def holder_of(order: Tensor) -> Tensor:
    """Return the rank (S) that holds each token, from the positions (N, S/N) that each rank holds."""
    return order.flatten().argsort() // order.shape[1]


def relative_rank(offset: int, size: int) -> str:
    """Name the rank ``offset`` after a rank, among ``size`` ranks in a ring."""
    if offset == 0:
        return "the rank itself"
    if offset <= size // 2:
        return "the next rank" if offset == 1 else f"the rank {offset} after it"
    return "the rank before it" if offset == size - 1 else f"the rank {size - offset} before it"


def mask_mistake(sees: Tensor, keys: Tensor, order: Tensor, workload: Workload) -> str:
    """Return a sentence about the mask that the visible keys equal; empty where they equal none that is known.

    ``sees`` is bool (S, T) by position, ``keys`` are the positions (T) of the keys, and ``order`` (N, S/N) the
    positions that each rank holds.
    """
    positions = torch.arange(workload.seq, device=sees.device)
    shown = shown_by_mask(workload, positions, keys)
    if torch.equal(sees, shown):
        return ""
    holder = holder_of(order)
    same_rank = holder[:, None] == holder[keys]
    distance = positions[:, None] - keys
    return (
        _unseen_keys(sees, shown, keys, order)
        or _other_window(sees, keys, distance, workload)
        or _other_documents(sees, shown, keys, same_rank, workload)
        or (_rank_pairs(sees, order, workload) if len(keys) == workload.seq else "")
        or _blind_queries(sees, shown)
        or _whole_blocks(sees, keys, workload)
        or _same_distance(sees ^ shown, distance, same_rank)
    )


def _other_window(sees: Tensor, keys: Tensor, distance: Tensor, workload: Workload) -> str:
    """Compare with the mask of another window."""
    reach = int(distance[sees].max()) + 1 if sees.any() else 0
    if not 0 < reach < workload.seq:
        return ""
    mask = shown_by_mask(replace(workload, window=reach), torch.arange(len(sees), device=sees.device), keys)
    if not torch.equal(sees, mask):
        return ""
    if workload.window:
        return f"the window is {reach} keys, not {workload.window}"
    return f"keys {reach} or more tokens before a query are not seen, as with a window of {reach}"


def _other_documents(sees: Tensor, shown: Tensor, keys: Tensor, same_rank: Tensor, workload: Workload) -> str:
    """Compare with masks of documents that end elsewhere, or that only some pairs of ranks heed."""
    if not workload.documents:
        return ""
    positions, lengths = torch.arange(len(sees), device=sees.device), list(workload.documents)
    for shift in (-2, -1, 1, 2):
        moved = [lengths[0] + shift, *lengths[1:-1], lengths[-1] - shift]
        if len(lengths) < 2 or min(moved) < 1:
            continue
        if torch.equal(sees, shown_by_mask(replace(workload, documents=tuple(moved)), positions, keys)):
            tokens = f"{abs(shift)} token{'s' * (abs(shift) > 1)} {'late' if shift > 0 else 'early'}"
            return f"documents end {tokens}"
    across = shown_by_mask(replace(workload, documents=None), positions, keys)
    if torch.equal(sees, torch.where(same_rank, shown, across)):
        return "documents are separated among a rank's own tokens alone, not across ranks"
    if torch.equal(sees, torch.where(same_rank, across, shown)):
        return "documents are separated across ranks alone, not among a rank's own tokens"
    return ""


def _rank_pairs(sees: Tensor, order: Tensor, workload: Workload) -> str:
    """Compare the keys of each rank that each rank's queries see with masks of other ranks' keys, or of none."""
    size = len(order)

    def masked_as(query_rank: int, key_rank: int) -> Tensor:
        return shown_by_mask(workload, order[query_rank], order[key_rank % size])

    blocks = {(r, s): sees[order[r]][:, order[s]] for r, s in product(range(size), repeat=2)}
    wrong = {pair: block for pair, block in blocks.items() if not torch.equal(block, masked_as(*pair))}
    if all(torch.equal(block, masked_as(r, 2 * r - s)) for (r, s), block in wrong.items()):
        return (
            "keys of the rank i after a query's own are masked as those of the rank i before it, as if the ring turned"
            " the other way"
        )
    for offset in range(1, size):
        if all(torch.equal(block, masked_as(r, s + offset)) for (r, s), block in wrong.items()):
            return f"keys of a rank are masked as if {relative_rank(offset, size)} held them"
    offsets = {(s - r) % size for r, s in wrong}
    everywhere = all(
        pair in wrong or not masked_as(*pair).any() for pair in blocks if (pair[1] - pair[0]) % size in offsets
    )
    pairs = ", ".join(f"{s} to queries of rank {r}" for r, s in list(wrong)[:MOST_NAMED])
    pairs += f" and {len(wrong) - MOST_NAMED} more pairs of ranks" * (len(wrong) > MOST_NAMED)
    if not any(block.any() for block in wrong.values()):
        if offsets == {0}:
            return "queries do not see their own rank's keys"
        if everywhere:
            owners = " and ".join(relative_rank(offset, size) for offset in sorted(offsets))
            return f"queries of a rank see no key of {owners}, as if a hop were missing"
        return f"all keys are hidden of rank {pairs}"
    if all(bool(block.all()) for block in wrong.values()):
        if offsets == {0} and everywhere:
            return "queries see all keys of their own rank: these are not masked"
        return f"all keys are seen of rank {pairs}: they are not masked"
    return ""


def _unseen_keys(sees: Tensor, shown: Tensor, keys: Tensor, order: Tensor) -> str:
    """Name the keys that no query sees, if these are all that is wrong."""
    unseen = shown.any(0) & ~sees.any(0)
    if not unseen.any() or not torch.equal(sees, shown & ~unseen):
        return ""
    missing = torch.zeros_like(order.flatten(), dtype=torch.bool)
    missing[keys[unseen]] = True
    by_rank = missing[order]
    indices = by_rank[0].nonzero().flatten().tolist()
    if len(keys) == len(missing) and by_rank.all(1).any() and not (by_rank.any(1) ^ by_rank.all(1)).any():
        return f"no query sees any key of rank {', '.join(map(str, by_rank.all(1).nonzero().flatten().tolist()))}"
    if len(order) > 1 and indices and bool((by_rank == by_rank[0]).all()) and "," not in _ranges(indices):
        return f"no query sees keys {_ranges(indices)} of the {order.shape[1]} of each rank, counted from 0"
    ranges = _ranges(keys[unseen].tolist())
    return f"no query sees key{'s' * (int(unseen.sum()) > 1)} {ranges}" if ranges.count(",") < MOST_NAMED else ""


def _ranges(numbers: list[int]) -> str:
    """Format ascending numbers, those that follow each other as ``first to last``."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def _blind_queries(sees: Tensor, shown: Tensor) -> str:
    """Name the queries that see no key, if these are all that is wrong."""
    rows = (sees ^ shown).any(1)
    if int(rows.sum()) <= MOST_NAMED and not sees[rows].any():
        return f"no key is seen by the query at token {', '.join(str(int(row)) for row in rows.nonzero())}"
    return ""


def _whole_blocks(sees: Tensor, keys: Tensor, workload: Workload) -> str:
    """Compare with masks that all queries of a block have from its last or its first query."""
    positions, size = torch.arange(len(sees), device=sees.device), 2
    while size < len(sees):
        for which, offset in (("last", size - 1), ("first", 0)):
            query = (positions // size * size + offset).clamp_max(len(sees) - 1)
            if torch.equal(sees, shown_by_mask(workload, query, keys)):
                return f"all queries of each block of {size} tokens see the keys that its {which} query should see"
        size *= 2
    return ""


def _same_distance(wrong: Tensor, distance: Tensor, same_rank: Tensor) -> str:
    """Name the distance between query and key, if all wrong pairs have the same."""
    distances = torch.unique(distance[wrong])
    if len(distances) != 1 or int(wrong.sum()) < 2:
        return ""
    tokens = abs(int(distances[0]))
    where = (
        ", held by another rank"
        if not same_rank[wrong].any()
        else ", held by the same rank" * bool(same_rank[wrong].all())
    )
    side = "after" if int(distances[0]) < 0 else "before"
    return f"every wrong pair is a query and the key {tokens} token{'s' * (tokens > 1)} {side} it{where}"


# --- how partial outputs are merged ------------------------------------------------------------------


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
