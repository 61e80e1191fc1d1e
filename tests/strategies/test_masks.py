"""Packed documents and sliding windows on every strategy that computes them, against dense float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringprof.strategies import Unsupported, create, find
from ringprof.strategies.kernels import varlen
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.masks.document_layouts import dealt_layout, layout_for_documents
from ringprof.strategies.masks.layouts import LAYOUTS, zigzag_per_document
from ringprof.strategies.masks.mask_blocks import AttnRectangle, MaskBlocks, band, band_mask, joined, split_rows
from ringprof.strategies.masks.row_routing import routing_of
from ringprof.strategies.masks.sharded_mask import sharded_mask_of, steps_over_mean
from ringprof.workload.mask import NO_LIMIT, Mask
from tests.strategies.cases import (
    CASES,
    Case,
    WorkloadShard,
    dense,
    examples,
    inputs,
    over_the_ranks,
    whole_call,
    worst,
)
from tests.strategies.ranks import run_ranks
from tests.test_mask import sees

TAKING = [
    Case("ring"),
    Case("zigzag"),
    Case("zigzag", {"documents_layout": "per_document", "grad_wire": "input"}),
    Case("stripe"),
    Case("ulysses", {}, (1, 2, 4)),
    Case("usp"),
    Case("usp", {"ulysses_degree": 2, "documents_layout": "per_document", "placement": "ring-first"}, (2, 4)),
    Case("usp", {"ulysses_degree": 2, "layout": "stripe"}, (2, 4)),
    Case("allgather"),
    Case("allgather", {"layout": "zigzag"}),
    Case("allgather", {"layout": "zigzag", "documents_layout": "per_document"}),
    Case("allgather", {"heads_at_a_time": 1}),
    Case("burst"),
    Case("burst", {"documents_layout": "per_document", "ring_window": 2, "optimized_backward": False}, (2, 4)),
    Case("double-ring", {"documents_layout": "per_document"}),
    Case("zigzag", {"documents_layout": "packed"}),
    Case("zigzag", {"documents_layout": "dealt"}),
    Case("usp", {"ulysses_degree": 2, "documents_layout": "dealt"}, (2, 4)),
    Case("burst", {"documents_layout": "dealt"}, (2, 4)),
    Case("allgather", {"layout": "zigzag", "documents_layout": "dealt"}),
    Case("megatron", {"documents_layout": "dealt"}, (2,)),
    Case("double-ring", {"ring_window": 2}, (4,)),
    Case("double-ring", {"ulysses_degree": 2, "ring_window": 1}, (2, 4)),
    Case("megatron"),
    Case("megatron", {"documents_layout": "per_document", "grad_wire": "fp32"}),
]
MASKS = [
    # Single tokens, an empty document, one long among many, bounds inside and on the edges of every chunk.
    Mask.of(documents=[0, 1, 2, 9, 9, 40, 64]),
    Mask.of(documents=[0, 16, 32, 48, 64]),
    Mask.of(documents=[0, 61, 62, 63, 64]),
    Mask.of(causal=False, documents=[0, 5, 40, 64]),
    Mask.of(window=(6, 0)),
    Mask.of(window=(33, 0)),
    Mask.of(causal=False, window=(3, 17)),
    Mask.of(documents=[0, 3, 30, 64], window=(8, 0)),
    Mask.of(causal=False, documents=[0, 29, 64], window=(5, 2)),
    Mask.of(window=(6, 0), prefix=3),
    Mask.of(documents=[0, 3, 45, 64], window=(8, 0), prefix=20),
    Mask.of(causal=False, documents=[0, 29, 64], window=(5, 2), prefix=7),
    # A prefix that sees itself both ways, and causal after it; longer than a chunk, and than a share of a rank.
    Mask.of(causal=False, window=(-1, 0), prefix=20),
    Mask.of(causal=False, documents=[0, 9, 64], window=(-1, 0), prefix=40),
]


def errors_of(
    rank: int, cases: list[Case], problem: WorkloadShard, truths: dict[Mask, list[Tensor]]
) -> list[tuple[str, float]]:
    errors = []
    for mask, truth in truths.items():
        for case in cases:
            strategy = create(case.name, kernel=problem.kernel, **case.params)
            error = worst(whole_call(strategy, problem, mask), truth)
            total = torch.tensor(sum(kernel.flops for kernel in strategy.kernels()))
            torch.distributed.all_reduce(total)
            pairs = problem.batch * problem.heads * problem.head_dim * mask.area(problem.seq)
            counted = int(total) == 14 * pairs
            errors.append((f"{case} {mask}" + ("" if counted else " counts other FLOPs"), error if counted else 1.0))
    return errors


@pytest.mark.parametrize(
    ("world", "kernel", "masks"),
    [
        (2, "cpu-flash", MASKS[7::3]),
        *(pytest.param(world, "reference", MASKS, marks=pytest.mark.processes) for world in (1, 4)),
        pytest.param(2, "cpu-flash", MASKS, marks=pytest.mark.processes),
        pytest.param(8, "reference", MASKS, marks=pytest.mark.long),
    ],
    ids=["2, few", "1", "4", "2", "8"],
)
def test_masks_are_exact_in_float64_and_counted_by_area(world: int, kernel: str, masks: list[Mask]) -> None:
    cases = [case for case in TAKING if min(world, 4) in case.worlds and (case.name, world) != ("ulysses", 8)]
    problem = WorkloadShard(seq=64, batch=2, kernel=kernel)
    truths = {mask: dense(problem, mask) for mask in masks}
    for label, error in run_ranks(world, errors_of, cases, problem, truths)[0]:
        assert error < 1e-12, label


@st.composite
def drawn(draw) -> tuple[WorkloadShard, Mask]:
    seq = 4 * draw(st.integers(1, 14))
    bounds = draw(st.lists(st.integers(0, seq), max_size=6))
    causal = draw(st.booleans())
    documents = [0, *sorted(bounds), seq] if draw(st.booleans()) else None
    window = draw(st.tuples(st.sampled_from([-1, 1, 2, 5, 13, 40]), st.sampled_from([-1, 0, 1, 7, 60])))
    kv_heads = draw(st.sampled_from([2, 4]))
    heads = kv_heads * draw(st.integers(1, 3))
    problem = WorkloadShard(
        seq, draw(st.integers(1, 3)), heads, kv_heads, draw(st.integers(1, 9)), seed=draw(st.integers(0, 999))
    )
    prefix = draw(st.sampled_from([0, 1, 6, 50])) if Mask.of(documents, window, causal=causal).windowed else 0
    return problem, Mask.of(documents, window, causal=causal, prefix=prefix)


def check_drawn(world: int, problem: WorkloadShard, mask: Mask) -> None:
    cases = [case for case in [*TAKING, *CASES] if world in case.worlds and problem.heads % world == 0]
    # Where a query attends only to itself, dq and dk are 0 except for rounding.
    for label, error in run_ranks(world, errors_of_all, cases, problem, mask)[0]:
        assert error < 1e-12, label


@pytest.mark.processes
@examples(5)
@given(drawn())
def test_random_shapes_and_masks_on_2_ranks_are_exact(problem: tuple[WorkloadShard, Mask]) -> None:
    check_drawn(2, *problem)


@pytest.mark.long
@examples(60)
@given(drawn().filter(lambda drawn_one: drawn_one[0].seq % 8 == 0))
def test_random_shapes_and_masks_on_4_ranks_are_exact(problem: tuple[WorkloadShard, Mask]) -> None:
    check_drawn(4, *problem)


def errors_of_all(rank: int, cases: list[Case], problem: WorkloadShard, mask: Mask) -> list[tuple[str, float]]:
    truth = dense(problem, mask)
    size = max(float(x.norm()) for x in truth)
    return [
        (f"{case} {mask}", max(float((value - exact).norm()) for value, exact in zip(whole, truth, strict=True)) / size)
        for case in cases
        for whole in (over_the_ranks(case, problem, mask),)
    ]


# --- nothing leaks --------------------------------------------------------------------------------------


def leaks(rank: int, kernel: str) -> list[str]:
    problem = WorkloadShard(seq=64, kernel=kernel, dtype=torch.float32)
    mask = Mask.of(documents=[0, 7, 37, 64])
    mine = slice(7, 37)
    leaking = []
    for case in (case for case in TAKING if 4 in case.worlds):
        strategy, whole = create(case.name, kernel=kernel, **case.params), inputs(problem)
        before = whole_call(strategy, problem, mask)
        for label, change in (("NaN", lambda x: x.fill_(float("nan"))), ("other values", lambda x: x.mul_(-1.5))):
            changed = [x.clone() for x in whole]
            for x in changed:
                change(x[:, mine])
            after = whole_call(strategy, problem, mask, tensors=changed)
            for name, old, new in zip(("out", "dq", "dk", "dv"), before, after, strict=True):
                outside = [torch.equal(old[:, rows], new[:, rows]) for rows in (slice(0, 7), slice(37, 64))]
                if not all(outside) or torch.equal(old[:, mine], new[:, mine]):
                    leaking.append(f"{case}: {label} in a document: {name} of another")
    return leaking


@pytest.mark.processes
@pytest.mark.parametrize("kernel", ["reference", "cpu-flash"])
def test_values_of_one_document_do_not_change_another(kernel: str) -> None:
    assert run_ranks(4, leaks, kernel) == [[]] * 4


# --- types ----------------------------------------------------------------------------------------------


def types_and_bytes(rank: int, name: str) -> tuple[set[torch.dtype], list[int]]:
    """Return the types of outputs, saved tensors and gradients, and the bytes sent without and with a prefix."""
    sent = []
    for options in ({}, {"window_size": (6, 0), "prefix": 5}):
        strategy = create(name, kernel="cpu-flash")
        leaves = [strategy.shard(x).bfloat16().requires_grad_() for x in inputs(WorkloadShard(seq=64))[:3]]
        out = strategy.attention(*leaves, **options)
        types = {out.dtype, *(x.dtype for x in out.grad_fn.saved_tensors[:-1])} if name != "usp" else {out.dtype}
        types |= {x.dtype for x in torch.autograd.grad(out.sum(), leaves)}
        sent.append(sum(size for _, size in strategy.comm.meter.sent.values()))
    return types, sent


@pytest.mark.processes
def test_mask_blocks_sharing_rows_return_the_input_dtype() -> None:
    """Rows in several parts, and gradients of keys in several parts, are merged in float32, but do not travel in it."""
    types, sent = run_ranks(2, types_and_bytes, "ulysses")[0]
    assert types == {torch.bfloat16} and sent[0] == sent[1]
    assert run_ranks(2, types_and_bytes, "usp")[0][0] == {torch.bfloat16}


# --- refusals -------------------------------------------------------------------------------------------


def test_stripe_layout_per_document_is_refused() -> None:
    mask, usp = Mask.of(documents=[0, 4, 16]), find("usp").load()
    assert usp.why_mask_unsupported(mask, 16, 2, layout="stripe") is None
    assert "stripe" in usp.why_mask_unsupported(mask, 16, 2, layout="stripe", documents_layout="per_document")


def test_single_document_without_window_uses_the_plain_path() -> None:
    strategy = create("burst", kernel="reference")
    x = torch.randn(1, 8, 2, 4)
    plain = strategy.attention(x, x, x)
    assert torch.equal(plain, strategy.attention(x, x, x, documents=[0, 8], window_size=(-1, 0)))


# --- pieces ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(sum), st.integers(1, 5))
def test_zigzag_per_document_assigns_tokens_evenly(lengths: list[int], size: int) -> None:
    lengths.append(-sum(lengths) % (2 * size))
    bounds = (0, *itertools.accumulate(lengths))
    layout = zigzag_per_document(bounds)
    shares = [layout.positions(bounds[-1], size, rank) for rank in range(size)]
    assert sorted(torch.cat(shares).tolist()) == list(range(bounds[-1]))
    assert {len(share) for share in shares} == {bounds[-1] // size}
    for first, end in itertools.pairwise(bounds):
        chunks = 2 * size
        for rank, share in enumerate(shares):
            held = share[(share >= first) & (share < end)]
            # At most one token more in either chunk than an even cut.
            assert (end - first) // chunks * 2 <= len(held) <= (end - first) // chunks * 2 + 2, rank
            assert held.tolist() == sorted(held.tolist())


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(sum), st.integers(1, 5), st.integers(0, 9))
def test_dealt_documents_have_every_token_once_and_lie_whole_where_they_fit(
    lengths: list[int], size: int, cut: int
) -> None:
    lengths.append(-sum(lengths) % (2 * size))
    bounds = (0, *itertools.accumulate(lengths))
    layout = dealt_layout(bounds, cut)
    shares = [layout.positions(bounds[-1], size, rank).tolist() for rank in range(size)]
    assert sorted(itertools.chain(*shares)) == list(range(bounds[-1]))
    assert {len(share) for share in shares} == {bounds[-1] // size}
    assert all(
        x == sorted(x)
        for share in shares
        for first, end in itertools.pairwise(bounds)
        if (x := [y for y in share if first <= y < end])
    )
    held = [[sum(first <= x < end for x in share) for share in shares] for first, end in itertools.pairwise(bounds)]
    longest_first = sorted(range(len(held)), key=lambda document: (-sum(held[document]), bounds[document]))
    share = sum(held[longest_first[0]]) // size
    for document in longest_first[1:cut]:
        assert max(held[document]) - min(held[document]) <= 2
    # A document that is neither cut in zigzag nor whole fitted no rank beside the longer ones.
    for number, document in enumerate(longest_first[cut:], cut):
        if max(held[document]) < sum(held[document]):
            longer = [x for x in longest_first[:number] if x in longest_first[:cut] or max(held[x]) == sum(held[x])]
            taken = [
                sum(share if cut and x == longest_first[0] else held[x][rank] for x in longer) for rank in range(size)
            ]
            assert bounds[-1] // size - min(taken) < sum(held[document])


LISTS = st.lists(st.integers(1, 40), min_size=2, max_size=12)


@given(LISTS, st.sampled_from([2, 3, 4]))
@settings(max_examples=20, deadline=None)
def test_auto_is_as_even_as_the_best_layout_by_the_exact_area(lengths: list[int], size: int) -> None:
    """Long documents, in which tiles do not matter; work is counted step by step, since hops tie the ranks."""
    bounds = tuple(2 * size * 2048 * bound for bound in (0, *itertools.accumulate(lengths)))
    mask, zigzag = Mask.of(documents=bounds), LAYOUTS["zigzag"]

    def unevenness(kind: str) -> float:
        layout = layout_for_documents(zigzag, kind, bounds, size)
        return steps_over_mean(sharded_mask_of(mask, layout, size, bounds[-1]).areas())

    # 3 % are not worth more pieces, and twice that where the estimate of a layout counts pieces of tiles.
    assert unevenness("auto") <= 1.07 * min(map(unevenness, ("packed", "per_document", "dealt")))


def test_auto_chooses_by_the_lengths() -> None:
    def name(lengths: list[int], size: int = 2) -> str:
        bounds = (0, *itertools.accumulate(lengths))
        return layout_for_documents(LAYOUTS["zigzag"], "auto", bounds, size).name

    # Equal halves, and one document, are even as they are; on one rank everything is.
    assert name([65536, 65536]) == name([131072]) == name([90000, 41072], 1) == "zigzag"
    # The long one is too much for one rank, and the last of the three short ones would be.
    assert name([40960, 13312, 13312, 14336]) == "dealt documents, the longest 2 cut in zigzag"
    # Two pairs of like documents, side by side: one of each goes to each rank.
    assert name([40960, 40960, 8192, 8192]) == "dealt documents"
    assert name([131072] * 3, 8) == "zigzag per document"


@pytest.mark.processes
def test_auto_refuses_documents_that_were_not_sharded_by_them() -> None:
    run_ranks(2, refuses_unsharded)


def refuses_unsharded(rank: int) -> None:
    bounds = (0, 4096, 4300, 4500, 4700, 5000, 6144, 8192)
    strategy, x = create("zigzag", kernel="reference"), torch.zeros(1, 4096, 1, 1)
    with pytest.raises(Unsupported, match="documents_layout='packed'"):
        strategy.attention(x, x, x, documents=bounds)
    packed = create("zigzag", kernel="reference", documents_layout="packed")
    assert torch.equal(packed.positions(8192), packed.positions(8192, documents=bounds))


@given(*(st.integers(1, 7),) * 2, *(st.one_of(st.none(), st.integers(-9, 9)),) * 2)
def test_band_keeps_every_pair(queries: int, keys: int, low: int | None, high: int | None) -> None:
    wanted = {
        (i, j)
        for i, j in itertools.product(range(queries), range(keys))
        if (low is None or j >= i + low) and (high is None or j <= i + high)
    }
    part = band(0, queries, 0, keys, low, high)
    if part is None:
        assert not wanted
        return
    seen = band_mask(part, torch.device("cpu"))
    assert {(i + part.q_first, j + part.kv_first) for i, j in seen.nonzero().tolist()} == wanted
    assert part.area == len(wanted) and bool(seen.any(1).all()) and bool(seen.any(0).all())
    # What needs no window is called full or causal.
    assert part.left in (NO_LIMIT, *range(keys)) and part.right in (NO_LIMIT, *range(queries))
    assert part.full == bool(seen.all())


def as_flash_attn_reads(part: AttnRectangle) -> AttnRectangle:
    """Return the limits that flash-attn 2 computes with: next to another limit, it ignores the number of keys."""
    left, right = (NO_LIMIT if side >= part.keys else side for side in part.band)
    if left >= 0 > right:
        right = part.keys
    elif right >= 0 > left:
        left = part.keys
    return AttnRectangle(part.q_first, part.q_end, part.kv_first, part.kv_end, left, right)


@given(drawn(), st.sampled_from([1, 2, 4]))
@settings(max_examples=150, deadline=None)
def test_flash_attn_windows_match_every_mask_block(problem: tuple[WorkloadShard, Mask], size: int) -> None:
    """With more queries than keys it would not, because of the order in which it normalises its windows."""
    seq, mask = 4 * size * problem[0].seq, problem[1].scaled(problem[0].seq, 4 * size * problem[0].seq)
    for layout in (*LAYOUTS.values(), zigzag_per_document(mask.documents or (0, seq))):
        sharded_mask = sharded_mask_of(mask, layout, size, seq)
        for ranks in itertools.product(range(size), repeat=2):
            for part in sharded_mask.parts(*ranks):
                read = band_mask(as_flash_attn_reads(part), torch.device("cpu"))
                assert torch.equal(read, band_mask(part, torch.device("cpu"))), (layout.name, part)


@given(*(st.integers(1, 9),) * 2, *(st.one_of(st.none(), st.integers(-9, 9)),) * 2)
def test_split_rows_keep_every_pair_once(queries: int, keys: int, low: int | None, high: int | None) -> None:
    part = band(0, queries, 0, keys, low, high)
    if part is None:
        return
    whole, split = torch.zeros(queries, keys, dtype=torch.int), torch.zeros(queries, keys, dtype=torch.int)
    for total, pieces in ((whole, [part]), (split, split_rows(part))):
        for piece in pieces:
            total[piece.q, piece.kv] += band_mask(piece, torch.device("cpu")).int()
    assert torch.equal(whole, split)


def test_full_rectangles_join_only_with_equal_sides() -> None:
    top, below, beside = AttnRectangle(0, 2, 0, 4), AttnRectangle(2, 4, 0, 4), AttnRectangle(0, 2, 4, 6)
    assert joined([top, below]) == [AttnRectangle(0, 4, 0, 4)]
    assert joined([top, beside]) == [AttnRectangle(0, 2, 0, 6)]
    for other in (
        AttnRectangle(2, 4, 0, 3),
        AttnRectangle(2, 4, 4, 6),
        AttnRectangle(0, 1, 4, 6),
        AttnRectangle(2, 4, 0, 4, right=1),
    ):
        assert joined([top, other]) == [top, other]


def test_rows_attending_all_keys_are_split_off() -> None:
    # Query i sees key j where j <= i - 2: from query 4 on all three.
    assert split_rows(AttnRectangle(0, 6, 0, 3, right=1)) == [
        AttnRectangle(2, 4, 0, 2, right=0),
        AttnRectangle(4, 6, 0, 3),
    ]


PARTS = {
    "triangles, all rows": [AttnRectangle(0, 5, 0, 5, right=0), AttnRectangle(5, 12, 5, 12, right=0)],
    "with gaps": [
        AttnRectangle(1, 5, 0, 4, right=0),
        AttnRectangle(6, 9, 7, 10, right=0),
        AttnRectangle(9, 12, 10, 12),
    ],
    "all queries, some keys": [AttnRectangle(0, 12, 3, 8)],
    "some queries, all keys": [AttnRectangle(3, 8, 0, 12)],
    "shared queries": [AttnRectangle(0, 12, 0, 3), AttnRectangle(2, 12, 2, 12, 3, 0), AttnRectangle(6, 9, 9, 12, 2, 1)],
    "shared keys": [AttnRectangle(0, 4, 0, 12), AttnRectangle(4, 12, 0, 12, left=9)],
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_varlen_call_equals_one_call_per_length(parts: list[AttnRectangle], batch: int) -> None:
    """The rows and lengths for a varlen kernel are right, checked with one made of dense calls."""
    block, kernel = MaskBlocks(tuple(parts), 12, 12), ReferenceKernel()
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(batch, 12, heads, 4, dtype=torch.float64) for heads in (4, 2, 2, 4))
    wide_k, wide_v = (x.repeat_interleave(2, 2) for x in (k, v))
    out, lse = kernel.forward(q, k, v, scale=0.5, causal=False, parts=block)
    results = varlen.forward(_varlen_forward, q, wide_k, wide_v, 0.5, block)
    assert torch.allclose(results[0], out) and torch.allclose(results[1].double(), lse, atol=1e-6)
    # Every row with some result has an LSE of its own; what the gradients are taken at does not matter here.
    rows = torch.randn(batch, 4, 12, dtype=torch.float64), torch.randn_like(q)
    expected = kernel._backward_parts(dout, q, wide_k, wide_v, rows[0], rows[1], None, 0.5, block)
    gradients = varlen.backward(_varlen_backward, dout, q, wide_k, wide_v, rows[0], rows[1], 0.5, block)
    assert all(torch.allclose(gradient, other) for gradient, other in zip(gradients, expected, strict=True))


def _segments(lengths, batch) -> list[tuple[slice, slice, AttnRectangle]]:
    q, kv = (list(itertools.pairwise(x.tolist())) for x in (lengths.cumulative_q, lengths.cumulative_kv))
    assert batch.most_queries == max(b - a for a, b in q) and batch.most_keys == max(b - a for a, b in kv)
    return [
        (slice(*a), slice(*b), AttnRectangle(0, a[1] - a[0], 0, b[1] - b[0], batch.left, batch.right))
        for a, b in zip(q, kv, strict=True)
    ]


def _varlen_forward(q, k, v, lengths, batch, scale):
    results = [
        ReferenceKernel()._forward_band(q[None, a], k[None, b], v[None, b], scale, part)
        for a, b, part in _segments(lengths, batch)
    ]
    return torch.cat([out[0] for out, _ in results]), torch.cat([lse[0] for _, lse in results], 1)


def _varlen_backward(dout, q, k, v, out, lse, lengths, batch, scale):
    results = [
        ReferenceKernel()._backward_band(
            dout[None, a], q[None, a], k[None, b], v[None, b], lse[None, :, a], out[None, a], None, scale, part
        )
        for a, b, part in _segments(lengths, batch)
    ]
    return tuple(torch.cat([gradients[i][0] for gradients in results]) for i in range(3))


def test_packed_zigzag_computes_full_rectangles_between_ranks_and_triangles_on_them() -> None:
    """On 4 ranks with chunks of 8, documents of 40 and 24 tokens give rank 0 four plain calls."""
    from ringprof.strategies.masks.sharded_mask import ShardedMask

    sharded_mask = ShardedMask(Mask.of(documents=[0, 40, 64]), LAYOUTS["zigzag"], 4, 64)
    own = sharded_mask.block(0, 0)
    assert own is not None and own.parts is not None
    assert [part.area for part in own.parts] == [36, 36]
    # Rank 0 holds 0..8 of the first and 56..64 of the second, rank 1 holds 8..16 and 48..56.
    later = sharded_mask.block(0, 1)
    assert later is not None and later.parts is None and not later.causal
    assert (later.q, later.kv) == (slice(8, 16), slice(8, 16))
    earlier = sharded_mask.block(1, 0)
    assert earlier is not None and (earlier.q, earlier.kv) == (slice(0, 8), slice(0, 8))


@settings(max_examples=20, deadline=None)
@given(drawn(), st.sampled_from([2, 3, 4]), st.sampled_from(["contiguous", "packed", "per_document", "dealt"]))
def test_gathered_keys_are_those_seen_in_two_calls_at_most(
    problem: tuple[WorkloadShard, Mask], size: int, kind: Any
) -> None:
    seq, mask = problem[0].seq * size, problem[1].scaled(problem[0].seq, problem[0].seq * size)
    layout = LAYOUTS["contiguous" if kind == "contiguous" else "zigzag"]
    if mask.documents and kind != "contiguous":
        layout = layout_for_documents(layout, kind, mask.documents, size)
    order, local = layout.order(seq, size), seq // size
    for rank in range(size):
        block, ranges = sharded_mask_of(mask, layout, size, seq).block_with_others(rank)
        queries, keys = order[rank * local :][:local].tolist(), order[[i for span in ranges for i in range(*span)]]
        counts = torch.zeros(local, len(keys), dtype=torch.int)
        if block is not None:
            seen = counts[block.q, block.kv]
            for part in block.parts or [AttnRectangle(0, len(seen), 0, seen.shape[1], right=0 if block.causal else -1)]:
                seen[part.q, part.kv] += band_mask(part, torch.device("cpu")).int()
            alike = mask.causal and not mask.windowed
            assert not alike or block.parts is None or len(block.parts.batches) <= 2
        assert counts.tolist() == [[int(sees(mask, i, j)) for j in keys.tolist()] for i in queries]
        elsewhere = {*range(seq)} - {*queries}
        needed = sorted(j for j in elsewhere if any(sees(mask, i, j) for i in queries))
        assert sorted(keys.tolist()) == needed


def rows_sent(rank: int, name: str, mask: Mask, **params: Any) -> dict[str, tuple[int, int]]:
    """Return the hops of each channel, and the number of tokens whose K and V, or dK and dV, they carried."""
    problem = WorkloadShard(seq=64)
    if name == "zigzag":
        params["documents_layout"] = "packed"
    strategy = create(name, kernel="reference", **params)
    *qkv, dout = (strategy.shard(x).requires_grad_() for x in inputs(problem))
    options = {"documents": mask.documents, "window_size": mask.window, "prefix": mask.prefix}
    strategy.attention(*qkv, causal=mask.causal, **options).backward(dout)
    row = 2 * problem.kv_heads * problem.head_dim * 8
    sent = strategy.comm.meter.sent.items()
    return {f"{channel} {phase}": (count, size // row) for (channel, phase, *_), (count, size) in sent}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "mask", "kv", "dkv"),
    [
        # A window no longer than a rank's 16 tokens reaches the rank before alone.
        ("ring", Mask.of(window=(5, 0)), (1, 5), ("dkv_back", 1, 5)),
        ("ring", Mask.of(window=(16, 0)), (1, 16), ("dkv_back", 1, 16)),
        # One token more, of which one goes two hops; dK and dV go round the whole ring.
        ("ring", Mask.of(window=(17, 0)), (2, 16 + 1), ("dkv", 3, 3 * 16)),
        # Of the first rank's two tokens and its last five, the two are needed by all.
        ("ring", Mask.of(window=(5, 0), prefix=2), (3, 7 + 2 + 2), ("dkv", 3, 3 * 7)),
        # Chunks of 8: the end of a rank's early chunk is needed one hop on, that of its late one three hops on.
        ("zigzag", Mask.of(window=(5, 0)), (3, 10 + 5 + 5), ("dkv", 3, 5 + 5 + 10)),
        # Every rank has the neighbours of every token.
        ("stripe", Mask.of(window=(5, 0)), (3, 3 * 16), ("dkv", 3, 3 * 16)),
        # A document that begins at the fifth token of the second rank.
        ("ring", Mask.of(documents=[0, 16, 20, 33, 48, 64]), (1, 12), ("dkv_back", 1, 12)),
        # A document over most of the chunks: all tokens of some rank travel, and so they do of all.
        ("zigzag", Mask.of(documents=[0, 4, 44, 64]), (3, 3 * 16), ("dkv", 3, 3 * 16)),
    ],
)
def test_hops_carry_only_rows_that_some_rank_needs(
    name: str, mask: Mask, kv: tuple[int, int], dkv: tuple[str, int, int]
) -> None:
    expected = {"kv forward": kv, "kv backward": kv, f"{dkv[0]} backward": dkv[1:]}
    assert run_ranks(4, rows_sent, name, mask) == [expected] * 4


@pytest.mark.parametrize("size", [2, 4])
def test_whole_shards_are_sent_where_routing_saves_little(size: int) -> None:
    """On two ranks, the last chunks of the first rank see all keys of the second: cutting out rows saves nothing."""
    bounds = (0, 40, 90, 128)
    sharded_mask = sharded_mask_of(Mask.of(documents=bounds), zigzag_per_document(bounds), size, 128)
    routing = routing_of(sharded_mask, size)
    assert routing is None or (size == 2 and routing.pack_rows(0, x := torch.zeros(1, 64, 1, 1)) is x)
    assert routing_of(sharded_mask_of(Mask.of(window=(5, 0)), LAYOUTS["zigzag"], size, 128), size) is not None


def window_rows_sent(rank: int) -> list[dict[str, tuple[int, int]]]:
    mask = Mask.of(window=(5, 0))
    return [
        rows_sent(rank, "burst", mask, grad_wire="fp32"),
        rows_sent(rank, "megatron", mask, grad_wire="fp32"),
        rows_sent(rank, "double-ring", mask, ring_window=2),
        rows_sent(rank, "burst", mask, ring_window=2),
    ]


@pytest.mark.processes
def test_rings_send_only_window_rows_of_queries_keys_and_gradients() -> None:
    """Only rows in a window travel: 5 keys before each of 8 chunks of 8 tokens, over one hop or three.

    Of two inner rings of two ranks the one is in the same ring, and the other comes in the last step of the other one.
    A token's queries are as large as its K and V; dO is, too, and LSE and delta are an eighth of it each.
    """
    hops = (3, 10 + 5 + 5)
    assert run_ranks(4, window_rows_sent) == [[
        {"read_inner forward": hops, "read_inner backward": (3, 20 * 9 // 4), "dq_inner backward": (3, 20)},
        # dK and dV by the same ring.
        {"kv forward": hops, "kv backward": (6, 40)},
        {
            "kv_inner forward": (2, 10), "kv_outer forward": (1, 5), "kv_inner backward": (2, 10),
            "kv_outer backward": (1, 5), "dkv_outer backward": (2, 5 + 10), "dkv_inner backward": (1, 10),
        },
        {
            "read_inner forward": (2, 10), "read_outer forward": (1, 5), "read_inner backward": (2, 10 * 9 // 4),
            "read_outer backward": (1, 5 * 9 // 4), "dq_outer backward": (2, 5 + 10), "dq_inner backward": (1, 10),
        },
    ]] * 4  # fmt: skip


@pytest.mark.processes
def test_nothing_is_sent_if_no_document_spans_two_ranks() -> None:
    assert run_ranks(4, rows_sent, "ring", Mask.of(documents=[0, 16, 20, 32, 48, 64])) == [{}] * 4


@settings(max_examples=150, deadline=None)
@given(
    drawn(), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["contiguous", "zigzag", "stripe"]), st.booleans(),
)  # fmt: skip
def test_every_hop_carries_all_rows_still_needed(
    drawn_problem: tuple[WorkloadShard, Mask], size: int, window: int, name: str, queries: bool
) -> None:
    """The needed rows follow from the mask, pair by pair."""
    mask, seq = drawn_problem[1], drawn_problem[0].seq
    if mask.documents is not None or seq % (2 * size):
        seq = 16 * size
        mask = Mask.of(None, mask.window, causal=mask.causal, prefix=mask.prefix)
    layout, local = LAYOUTS[name], seq // size
    routing = routing_of(sharded_mask_of(mask, layout, size, seq), window := min(window, size), queries=queries)
    if routing is None:
        return
    held = [layout.positions(seq, size, rank).tolist() for rank in range(size)]
    carried = [
        routing.pack_rows(rank, torch.arange(local).view(1, -1, 1, 1)).flatten().tolist() for rank in range(size)
    ]
    for rank in range(size):
        needed: set[int] = set()
        for turn, position in itertools.product(range(size // window), range(window)):
            other_positions = held[(rank // window + turn) * window % size + (rank + position) % window]
            needs = {
                row for row, mine in enumerate(held[rank])
                if any(sees(mask, mine, other) if queries else sees(mask, other, mine) for other in other_positions)
            }  # fmt: skip
            if step := turn * window + position:
                needed |= needs
                assert needs <= {carried[rank][row] for row in routing.received_rows(step)}
                assert needs <= {carried[rank][row] for row in routing.inner_gradient_slices[step]}
        given_back = [(rows.start, rows.stop, x.flatten().tolist()) for rows, x in routing.split_by_own_rows(
            rank, torch.tensor(carried[rank]).view(1, -1, 1, 1))]  # fmt: skip
        assert all(rows == list(range(start, stop)) for start, stop, rows in given_back)
        assert needed <= {row for start, stop, _ in given_back for row in range(start, stop)}
