"""Patterns in the pairs of a query and a key that an attention sees or misses: which known mistake they equal exactly.

All functions are pure: each takes the pairs of the whole sequence. S tokens, T keys that were tried, N ranks.
"""

from __future__ import annotations

from itertools import product

import torch
from msgspec.structs import replace
from torch import Tensor

from ringprof.strategies.kernels.reference import KeyStretches
from ringprof.workload.workload import Workload

MOST_NAMED = 4
"""Most tokens, or pairs of ranks, that a sentence names."""


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
