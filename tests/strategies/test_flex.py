"""FlexAttention as a kernel: its stretches and tiles pair by pair, and its blocks against the reference kernel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprof.strategies import create
from ringprof.strategies.kernels import flex
from ringprof.strategies.kernels.flex import TILE, stretches, tiles
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.layouts import LAYOUTS, part
from ringprof.strategies.masks.mask_blocks import AttnRectangle, MaskBlocks, band_mask
from ringprof.strategies.masks.sharded_mask import sharded_mask_of
from ringprof.workload.mask import Mask
from tests.strategies.cases import (
    Case,
    WorkloadShard,
    dense,
    examples,
    inputs,
    over_the_ranks,
    relative_error,
    worst,
)
from tests.strategies.ranks import run_ranks
from tests.strategies.test_masks import drawn

CPU = torch.device("cpu")


def pairs_of(parts: MaskBlocks) -> torch.Tensor:
    seen = torch.zeros(parts.queries, parts.keys, dtype=torch.int32)
    for part_ in parts:
        seen[part_.q, part_.kv] += band_mask(part_, torch.device("cpu")).int()
    return seen


@given(drawn(), st.sampled_from([1, 2]), st.sampled_from(["contiguous", "zigzag", "stripe"]))
def test_key_ranges_cover_exactly_the_pairs_of_the_mask(
    drawn_problem: tuple[WorkloadShard, Mask], size: int, layout: str
) -> None:
    problem, mask = drawn_problem
    sharded_mask = sharded_mask_of(mask, LAYOUTS[layout], size, problem.seq)
    for q_rank, kv_rank in itertools.product(range(size), repeat=2):
        block = sharded_mask.block(q_rank, kv_rank)
        if block is None or block.parts is None:
            continue
        first, end = stretches(block.parts)
        keys = torch.arange(block.parts.keys)
        seen = ((keys >= first[..., None]) & (keys < end[..., None])).int().sum(0)
        assert torch.equal(seen, pairs_of(block.parts))


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "stripe"])
def test_window_after_a_query_is_exact_on_local_rows(layout: str, after: int) -> None:
    """Each query sees all keys before it and ``after`` keys behind it, checked pair by pair; 0 is a causal mask."""
    mask = Mask.of(window=(-1, after), causal=False)
    sharded_mask, positions = (
        sharded_mask_of(mask, LAYOUTS[layout], 2, 16),
        LAYOUTS[layout].positions(16, 2, 0).tolist(),
    )
    block = sharded_mask.block(0, 0)
    assert block is not None
    dense_block = torch.ones(8, 8).tril() if block.parts is None and block.causal else torch.ones(8, 8)
    seen = dense_block if block.parts is None else pairs_of(block.parts)
    assert seen.tolist() == [[int(key <= query + after) for key in positions] for query in positions]


@pytest.mark.parametrize(("number", "stretched"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_number_of_key_ranges_is_a_power_of_two(number: int, stretched: int) -> None:
    """A query that sees every other key needs one stretch per key: each number of stretches is compiled separately."""
    block = MaskBlocks(tuple(AttnRectangle(0, 1, 2 * index, 2 * index + 1) for index in range(number)), 1, 2 * number)
    first, end = stretches(block)
    assert first.shape == end.shape == (stretched, 1)
    assert sorted(zip(first.flatten().tolist(), end.flatten().tolist(), strict=True)) == sorted(
        [(2 * index, 2 * index + 1) for index in range(number)] + [(0, 0)] * (stretched - number)
    )


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), min_size=1, max_size=400), st.integers(1, 700))
def test_tiles_equal_those_of_the_dense_mask(rows: list[tuple[int, int]], keys: int) -> None:
    bounds = torch.tensor(rows, dtype=torch.int32).clamp(max=keys)
    first, end = bounds[:, 0][None], bounds[:, 1][None]
    key = torch.arange(keys)
    seen = (key >= first.T) & (key < end.T)
    height, width = -(-len(rows) // TILE) * TILE, -(-keys // TILE) * TILE
    padded = torch.zeros(height, width, dtype=torch.bool)
    padded[: len(rows), :keys] = seen
    tiled = padded.view(height // TILE, TILE, width // TILE, TILE)
    whole = tiled.all(3).all(1)
    partial, full = tiles(first, end, keys)
    assert torch.equal(full, whole)
    assert torch.equal(partial, tiled.any(3).any(1) & ~whole)


@pytest.mark.parametrize(("queries", "keys"), [(300, 700), (700, 100), (100, 300), (256, 128)])
def test_key_tiles_equal_the_transposed_query_tiles_of_torch(queries: int, keys: int) -> None:
    """torch computes one index from the other; columns outside all tiles have no entry."""
    from torch.nn.attention.flex_attention import BlockMask

    mask = flex._mask_of_parts(
        MaskBlocks((AttnRectangle(10, queries, 0, keys - 3, left=190, right=40),), queries, keys), CPU
    )
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    own = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, seq_lengths=(queries, keys))
    assert own.q_num_blocks is not None and mask.q_num_blocks.sum() > 0
    for kind in ("q", "full_q"):
        counts, places = (getattr(mask, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        truth, true_places = (getattr(own, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        there = truth.shape[-1]
        assert counts.dtype == places.dtype == torch.int32 and places.is_contiguous() and not counts[..., there:].any()
        assert torch.equal(counts[..., :there], truth) and torch.equal(places[..., :there, :], true_places)


BLOCKS = [
    (Mask(), "contiguous", 1, 0, 0),
    (Mask(causal=False), "contiguous", 1, 0, 0),
    (Mask.of(documents=[0, 1, 30, 96]), "zigzag", 2, 1, 0),
    # Rows 0 to 2 see nothing of the other rank's keys.
    (Mask.of(causal=False, window=(20, 9)), "contiguous", 2, 0, 1),
    (Mask.of(documents=[0, 50, 96], window=(7, 0)), "stripe", 2, 0, 1),
]


@pytest.mark.parametrize(("mask", "layout", "size", "q_rank", "kv_rank"), BLOCKS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_block_with_the_global_lse_has_exact_gradients(
    mask: Mask, layout: str, size: int, q_rank: int, kv_rank: int, softcap: float
) -> None:
    block = sharded_mask_of(mask, LAYOUTS[layout], size, 96).block(q_rank, kv_rank)
    assert block is not None
    generator = torch.Generator().manual_seed(1)

    def draw(heads: int, rows: int = 96 // size) -> torch.Tensor:
        return torch.randn(2, rows, heads, 8, generator=generator, dtype=torch.float64)

    q, dout, out = (part(draw(4), block.q) for _ in range(3))
    k, v = (part(draw(2), block.kv) for _ in range(2))
    how: Any = {"scale": 0.3, "causal": block.causal, "parts": block.parts}
    flex, exact = KERNELS["flex"](softcap=softcap), ReferenceKernel(softcap=softcap)
    (result, lse), (truth, true_lse) = (kernel.forward(q, k, v, **how) for kernel in (flex, exact))
    assert relative_error(result, truth) < 1e-13 and torch.allclose(lse, true_lse, rtol=1e-13)
    # Of other blocks, too: larger than the block's own, and an output that is another.
    whole = true_lse.where(true_lse.isfinite(), torch.tensor(0.0, dtype=torch.float64)) + 0.7
    gradients = zip(*(kernel.backward(dout, q, k, v, whole, out=out, **how) for kernel in (flex, exact)), strict=True)
    assert all(relative_error(gradient, true_gradient) < 1e-12 for gradient, true_gradient in gradients)


def through_strategies(rank: int, truths: dict[Mask, list[torch.Tensor]]) -> list[tuple[str, float]]:
    problem = WorkloadShard(seq=64, kernel="flex")
    cases = [Case("zigzag", {"documents_layout": "per_document"}), Case("ring"), Case("allgather")]
    return [
        (f"{case}, {mask}", worst(over_the_ranks(case, problem, mask), truth))
        for mask, truth in truths.items()
        for case in cases
    ]


@pytest.mark.processes
def test_strategies_are_exact_with_flex() -> None:
    masks = [Mask.of(documents=[0, 1, 2, 9, 9, 40, 64]), Mask.of(causal=False, documents=[0, 29, 64], window=(5, 2))]
    truths = {mask: dense(WorkloadShard(seq=64), mask) for mask in masks}
    for label, error in run_ranks(2, through_strategies, truths)[0]:
        assert error < 1e-12, label


def test_values_of_one_document_do_not_change_another() -> None:
    """Only NaN may pass, within a tile, as docs/kernels.md says."""
    strategy, results = create("zigzag", kernel="flex"), []
    for factor in (1.0, -1.5):
        *qkv, dout = inputs(WorkloadShard(seq=64, dtype=torch.float32))
        for x in (*qkv, dout):
            x[:, 7:37] *= factor
        leaves = [x.requires_grad_() for x in qkv]
        out = strategy.attention(*leaves, documents=[0, 7, 37, 64])
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    for before, after in zip(*results, strict=True):
        assert not torch.equal(before[:, 7:37], after[:, 7:37])
        assert torch.equal(before[:, :7], after[:, :7]) and torch.equal(before[:, 37:], after[:, 37:])


@examples(3)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 40))
def test_flex_is_exact_with_two_head_sizes_and_any_length(queries: int, keys: int, size: int) -> None:
    generator = torch.Generator().manual_seed(queries)
    q, k = (torch.randn(1, rows, 2, 12, generator=generator, dtype=torch.float64) for rows in (queries, keys))
    v = torch.randn(1, keys, 2, size, generator=generator, dtype=torch.float64)
    result, truth = (
        kernel.forward(q, k, v, scale=1.0, causal=False) for kernel in (KERNELS["flex"](), ReferenceKernel())
    )
    assert relative_error(result[0], truth[0]) < 1e-12


def test_softcap_is_compiled_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would make a number that changes between calls a tensor, which the kernel template refuses on a GPU."""
    numbers: list[int] = []

    def counting(graph: Any, args: list[Any]) -> Any:
        numbers.append(sum(isinstance(x, float) or (isinstance(x, torch.Tensor) and x.dim() == 0) for x in args))
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: real(function, backend=counting, **how))
    call = flex._compiled()
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    seen = flex._simple_mask(256, 256, causal=True, device=torch.device("cpu"))
    for softcap in (2.0, 30.0, 7.0):
        score_mod = flex._score_mod(softcap)
        with torch.no_grad():
            out, _ = call(q, k, v, score_mod, seen, 0.25)
        assert torch.allclose(out, flex._dense(q, k, v, score_mod, seen, 0.25)[0], atol=1e-5)
    assert numbers == [0, 0, 0]


def test_blocks_of_every_length_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def counting(graph: Any, args: list[Any]) -> Any:
        compiled.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: real(function, backend=counting, **how))
    call, cpu = flex._compiled(), torch.device("cpu")
    documents = sharded_mask_of(Mask.of(documents=[0, 300, 768]), LAYOUTS["contiguous"], 1, 768).block(0, 0)
    assert documents is not None and documents.parts is not None
    masks = [flex._simple_mask(*sizes, cpu) for sizes in ((512, 512, True), (256, 512, False), (512, 128, False))]
    monkeypatch.setattr(flex, "_flex", lambda compiled: call)
    kernel = flex.FlexKernel()
    for seen in (*masks, flex._mask_of_parts(documents.parts, cpu), flex._simple_mask(640, 640, True, cpu)):
        queries, keys = seen.seq_lengths
        # As blocks come: whole, as the later rows of more, and as the second of two that travelled side by side.
        q = torch.randn(1, queries + 64, 2, 16)[:, 64:]
        k, v = torch.randn(2, 1, keys, 2, 16).unbind(0)
        for wants in (False, True):
            out, _ = kernel._forward_masked(q.requires_grad_(wants), k, v, 0.25, seen)
        by_head = [x.detach().transpose(1, 2) for x in (q, k, v)]
        exact, _ = flex._dense(by_head[0], by_head[1], by_head[2], flex._unchanged, seen, 0.25)
        assert torch.allclose(out.transpose(1, 2), exact, atol=1e-5)
    assert len(compiled) == 1
