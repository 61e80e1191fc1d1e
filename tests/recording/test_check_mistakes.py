"""Explanations of wrong attention as pure functions of arrays: each planted mistake is named, and nothing right is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="checking needs torch")

import torch
from torch import Tensor

from ringprof.proof.backward_mistakes import (
    coefficients,
    gradient_parts,
    gradients_under,
    head_parts_mistake,
    rank_parts_mistake,
)
from ringprof.proof.dense import Tensors
from ringprof.proof.visible_keys import holder_of, mask_mistake, merge_mistake
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.workload.workload import Workload

SEQ, RANKS = 32, 4
ORDER = LAYOUTS["zigzag"].order(SEQ, RANKS).view(RANKS, -1)
QUERY, KEY = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None]
CAUSAL = QUERY >= KEY
HOLDER = holder_of(ORDER)
SAME_RANK = HOLDER[:, None] == HOLDER
DOCUMENT = torch.bucketize(torch.arange(SEQ), torch.tensor([5, 18]), right=True)
SAME_DOCUMENT = DOCUMENT[:, None] == DOCUMENT
PACKED = {"documents": (5, 13, 14)}


# --- which keys are visible -------------------------------------------------------------------


def after(offset: int) -> Tensor:
    """Pairs whose key is held by the rank ``offset`` after the query's."""
    return (HOLDER - HOLDER[:, None]) % RANKS == offset


def as_of(owner: Callable[[int, int], int]) -> Tensor:
    """Causal mask in which rank r takes the keys of rank s for those of ``owner(r, s)``."""
    sees = torch.zeros(SEQ, SEQ, dtype=torch.bool)
    for rank in range(RANKS):
        for other in range(RANKS):
            block = ORDER[rank][:, None] >= ORDER[owner(rank, other) % RANKS]
            sees[ORDER[rank][:, None], ORDER[other]] = block
    return sees


def edge_at(*ends: int) -> Tensor:
    document = torch.bucketize(torch.arange(SEQ), torch.tensor(ends), right=True)
    return CAUSAL & (document[:, None] == document)


MASKS = [
    (CAUSAL, {}, ""),
    (CAUSAL & SAME_DOCUMENT, PACKED, ""),
    (CAUSAL & (QUERY - KEY < 9), {"window": 8}, "the window is 9 keys, not 8"),
    (CAUSAL & (QUERY - KEY < 29), {}, "keys 29 or more tokens before a query are not seen, as with a window of 29"),
    (edge_at(6, 19), PACKED, "documents end 1 token late"),
    (edge_at(3, 16), PACKED, "documents end 2 tokens early"),
    (CAUSAL & (SAME_DOCUMENT | ~SAME_RANK), PACKED,
     "documents are separated among a rank's own tokens alone, not across ranks"),
    (CAUSAL & (SAME_DOCUMENT | SAME_RANK), PACKED,
     "documents are separated across ranks alone, not among a rank's own tokens"),
    (CAUSAL & ~after(1), {}, "queries of a rank see no key of the next rank, as if a hop were missing"),
    (CAUSAL & ~after(0), {}, "queries do not see their own rank's keys"),
    (CAUSAL | after(0), {}, "queries see all keys of their own rank: these are not masked"),
    (CAUSAL & ~((HOLDER[:, None] == 3) & (HOLDER == 0)), {}, "all keys are hidden of rank 0 to queries of rank 3"),
    (CAUSAL | ((HOLDER[:, None] == 1) & (HOLDER == 2)), {},
     "all keys are seen of rank 2 to queries of rank 1: they are not masked"),
    (as_of(lambda rank, other: 2 * rank - other), {},
     "keys of the rank i after a query's own are masked as those of the rank i before it, as if the ring turned the"
     " other way"),
    (as_of(lambda rank, other: other + 1), {}, "keys of a rank are masked as if the next rank held them"),
    (CAUSAL & (KEY != 7), {}, "no query sees key 7"),
    (CAUSAL & (QUERY != 7) & (QUERY != 9), {}, "no key is seen by the query at token 7, 9"),
    (CAUSAL | ((QUERY + 1 == KEY) & ~SAME_RANK), {},
     "every wrong pair is a query and the key 1 token after it, held by another rank"),
    (CAUSAL & (QUERY - KEY != 2), {}, "every wrong pair is a query and the key 2 tokens before it"),
    (CAUSAL & ~((QUERY == 20) & (KEY == 3)), {}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("sees", "options", "sentence"), MASKS, ids=lambda value: value if type(value) is str else "")
def test_visible_keys_name_the_mask_that_they_equal(sees: Tensor, options: dict[str, int], sentence: str) -> None:
    workload = Workload(seq=SEQ, heads=1, kv_heads=1, head_dim=4, **options)  # type: ignore[arg-type]
    assert mask_mistake(sees, torch.arange(SEQ), ORDER, workload) == sentence


# --- how partial outputs are merged -----------------------------------------------------------

LSES = 2 * torch.randn(2, 40, RANKS, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 3
HAS_KEYS = torch.ones(40, RANKS, dtype=torch.bool)
HAS_KEYS[:10, 2:] = False
LSES[:, ~HAS_KEYS] = -torch.inf
TOTAL = LSES.logsumexp(2, keepdim=True)
# The LSE of n keys is at most log(n) above the largest score.
LARGEST = LSES - math.log(20) * torch.rand(LSES.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
EVERY = torch.zeros_like(LSES)
PARTIAL = "the ranks' partial outputs "


def up_to_own_hop(own: int) -> Tensor:
    """LSE over the ranks own, own - 1, ... up to each."""
    running, total = torch.zeros_like(LSES), torch.full_like(TOTAL[..., 0], -torch.inf)
    for hop in range(RANKS):
        total = torch.logaddexp(total, LSES[..., (own - hop) % RANKS])
        running[..., (own - hop) % RANKS] = total
    return running


def kept_maximum(of_rank: Tensor, order: list[int]) -> Tensor:
    """Factors of an accumulator that adds up exp(score - running maximum) and is never rescaled, as its sum is."""
    running, maximum = torch.zeros_like(LSES), torch.full_like(TOTAL[..., 0], -torch.inf)
    for rank in order:
        maximum = torch.maximum(maximum, of_rank[..., rank])
        running[..., rank] = maximum
    return maximum[..., None] - running - TOTAL


def counted_twice(offset: int) -> Tensor:
    twice = EVERY.clone()
    twice[..., (1 + offset) % RANKS] = math.log(2)
    return twice - (LSES + twice).logsumexp(2, keepdim=True)


KEPT = "are not rescaled when a later one has a larger {}: each keeps the running maximum of its own hop"
MERGES = [
    (EVERY - TOTAL, ""),
    (EVERY - LSES.amax(2, keepdim=True),
     "partial outputs are merged with the maximum of the ranks' LSEs, not with the LSE of all"),
    (EVERY - torch.exp2(LSES).sum(2, keepdim=True).log2(),
     "LSEs are added in base 2 and used in base e: log2 and ln are mixed"),
    (EVERY - (TOTAL.exp() + (~HAS_KEYS).sum(1)[:, None]).log(),
     "ranks whose keys a query does not see count with an LSE of 0, not of minus infinity"),
    (EVERY - (TOTAL.exp() + 8).log(),
     "weights sum to less than 1, as with 8 more keys of score 0 for every query"),
    (EVERY - TOTAL + math.log(1.5),
     "weights of a query sum to more than 1: from 1.5 to 1.5, the median is 1.5"),
    (EVERY - TOTAL + torch.tensor([1.5, 0.5]).log()[:, None, None],
     "weights of a query do not sum to 1: from 0.5 to 1.5, the median is 0.5"),
    (-LSES, PARTIAL + "are added as they are, not weighted by their LSE"),
    (-LSES - HAS_KEYS.sum(1, keepdim=True).log(), PARTIAL + "are averaged, not weighted by their LSE"),
    (-up_to_own_hop(1),
     PARTIAL + "are not rescaled when later ones are merged: each is weighted by the LSE up to its own hop"),
    (kept_maximum(LARGEST, [1, 0, *range(RANKS - 1, 1, -1)]), PARTIAL + KEPT.format("score")),
    (kept_maximum(LARGEST, list(range(RANKS))), PARTIAL + KEPT.format("score")),
    (kept_maximum(LSES, [*range(1, RANKS), 0]), PARTIAL + KEPT.format("LSE")),
    (kept_maximum(LARGEST, list(range(RANKS))) + EVERY.cumsum(0) + 1.0, PARTIAL + KEPT.format("score")),
    (counted_twice(0),
     PARTIAL + "are not weighted by their LSE: for a rank's queries, keys of the rank itself weigh 2 times too much"),
    (counted_twice(3),
     PARTIAL + "are not weighted by their LSE: for a rank's queries, keys of the rank before it weigh 2 times"
     " too much"),
    (math.log(2) * LSES - LSES - (math.log(2) * LSES).logsumexp(2, keepdim=True),
     PARTIAL + "are weighted by 0.693 times their LSE: ln is taken for log2"),
    (LSES.square() / 9 - TOTAL, PARTIAL + "are not weighted by their LSE"),
]  # fmt: skip


@pytest.mark.parametrize(("factors", "sentence"), MERGES, ids=lambda value: value if type(value) is str else "")
def test_weights_name_the_merge_that_gives_them(factors: Tensor, sentence: str) -> None:
    noise = 0.01 * torch.randn(factors.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    factors = torch.where(HAS_KEYS, factors + noise * (sentence == ""), 0.0)
    assert merge_mistake(factors, LSES, LARGEST, HAS_KEYS, 1) == sentence


# --- backward passes --------------------------------------------------------------------------

WORK = Workload(seq=SEQ, batch=2, heads=4, kv_heads=2, head_dim=8, dtype="fp32")
SCALE = 8**-0.5


def drawn() -> Tensors:
    generator = torch.Generator().manual_seed(7)
    sizes = (4, 2, 2, 4)
    return Tensors(*(torch.randn(2, SEQ, heads, 8, generator=generator, dtype=torch.float64) for heads in sizes))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * SCALE


def by_autograd(weights_of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Gradients of an attention whose weights are a function of its scores."""
    full = drawn()
    q, k, v = (x.clone().requires_grad_() for x in (full.q, full.k, full.v))
    out = torch.einsum("bhqk,bkhd->bqhd", weights_of(scores(q, k)), v.repeat_interleave(2, 2))
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, [q, k, v], full.dout), strict=True))


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(~CAUSAL, -torch.inf)


def of_each_rank(x: Tensor) -> Tensor:
    """Weights that sum to one over the keys of each rank."""
    weights = torch.zeros_like(x)
    for rank in range(RANKS):
        part = masked(x).masked_fill(HOLDER != rank, -torch.inf)
        some = part.isfinite().any(-1, keepdim=True)
        weights = weights + part.masked_fill(~some, 0.0).softmax(-1) * some
    return weights


@pytest.mark.parametrize(
    ("mistake", "weights_of"),
    [
        # With a constant divisor, nothing is subtracted from the gradient of the scores.
        ("no delta", lambda x: (masked(x) - masked(x).detach().logsumexp(-1, keepdim=True)).exp()),
        ("own softmax and delta", of_each_rank),
    ],
)
def test_gradients_under_a_mistake_are_autograds_of_a_mistaken_softmax(
    mistake: str, weights_of: Callable[[Tensor], Tensor]
) -> None:
    gradients = gradients_under(mistake, drawn(), WORK, SCALE, HOLDER)
    for name, expected in by_autograd(weights_of).items():
        torch.testing.assert_close(gradients[name], expected)


def test_parts_of_gradients_sum_to_autograds() -> None:
    positions = ORDER[1]
    parts = gradient_parts(drawn(), WORK, SCALE, HOLDER, positions)
    expected = by_autograd(lambda x: masked(x).softmax(-1))
    torch.testing.assert_close(parts["dq"].sum(0), expected["dq"][:, positions])
    for name in ("dk", "dv"):
        summed = parts[name].sum(0).view(2, len(positions), 2, 2, 8).sum(3)
        torch.testing.assert_close(summed, expected[name][:, positions])


def test_a_part_is_what_queries_of_one_rank_give() -> None:
    """dV is the transposed weights times dout, of which other ranks' rows are left out."""
    full = drawn()
    weights = masked(scores(full.q, full.k)).softmax(-1)
    dout = full.dout * (HOLDER == 2)[:, None, None]
    expected = torch.einsum("bhqk,bqhd->bkhd", weights, dout)[:, ORDER[0]]
    torch.testing.assert_close(gradient_parts(full, WORK, SCALE, HOLDER, ORDER[0])["dv"][2], expected)


def test_coefficients_are_those_of_the_sum() -> None:
    parts = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts[1] = 0
    factors = coefficients(2 * parts[0] - parts[2], parts, 1e-6)
    assert factors[0] == pytest.approx(2) and math.isnan(factors[1]) and factors[2] == pytest.approx(-1)
    assert coefficients(torch.ones(5, 7), parts, 1e-6) == []


NAN = math.nan
RANK_FACTORS = [
    ([[1, 1], [1, 1]], ""),
    ([[0.5, 0.5], [0.5, 0.5]], ""),
    ([[1, 0, 0], [0, 1, 0], [0, 0, 1]], "is what a rank's own queries give: other ranks' part is missing"),
    ([[1, 1, 0], [0, 1, 1], [1, 0, 1]], "lacks what the queries of the rank before it give"),
    ([[0, NAN, 1], [1, 0, NAN], [1, 1, 0]], "lacks what the queries of the rank itself give"),
    ([[2, 1], [1, 2]], "counts what the queries of the rank itself give 2 times"),
    ([[1, 1, 1], [1, 1, 1], [1, 2, 1]], "on rank 2 counts what the queries of ranks 0 to 2 give 1, 2, 1 times"),
]


@pytest.mark.parametrize(("factors", "words"), RANK_FACTORS)
def test_factors_of_ranks_are_put_in_words(factors: list[list[float]], words: str) -> None:
    assert rank_parts_mistake("dk", factors) == words


HEAD_FACTORS = [
    ([[1, 1, 0, 0], [0, 0, 1, 1]], ""),
    ([[1, 0, 1, 0], [0, 1, 0, 1]], "of kv head 0 sums query heads 0, 2, not 0, 1"),
    ([[2, 0, 0, 0], [0, 0, 2, 0]], "of kv head 0 sums query heads 0, not 0, 1, times 2"),
]


@pytest.mark.parametrize(("factors", "words"), HEAD_FACTORS)
def test_factors_of_heads_are_put_in_words(factors: list[list[float]], words: str) -> None:
    assert head_parts_mistake(factors) == words
