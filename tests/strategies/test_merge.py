"""Sums of gradients, from the first block to the final cast, against sums in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ringprof.strategies.kernels import merge


@pytest.mark.parametrize("rows", [slice(None), slice(0, 5), slice(5, 12), slice(3, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_rows_surrounds_a_block_with_zeros(rows, dtype):
    like, block = torch.full((2, 12, 3, 4), torch.nan), torch.randn(2, len(range(12)[rows]), 3, 4)
    expected = torch.zeros(2, 12, 3, 4, dtype=dtype)
    expected[:, rows] = block.to(dtype)
    assert torch.equal(merge.write_rows(like.to(dtype), rows, block), expected)


@pytest.mark.parametrize("cuts", [(0, 12), (0, 6, 12), (0, 1, 5, 12), (6, 9, 12), (0, 5)])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float64])
def test_add_and_cast_rounds_the_sum_once(cuts, wire):
    total = torch.randn(1, 12, 2, 8).to(wire)
    parts = [(slice(a, b), torch.randn(1, b - a, 2, 8).to(wire)) for a, b in itertools.pairwise(cuts) if b > a]
    truth = total.double().clone()
    for rows, block in parts:
        truth[:, rows] += block.double()
    wide = merge.add_and_cast(total, parts, torch.float32)
    assert torch.all((wide.double() - truth).abs() <= truth.abs() * 2**-24 * (1 + 2**-10))
    result = merge.add_and_cast(total, parts, torch.bfloat16)
    assert result.dtype == torch.bfloat16
    # One rounding to 8 bits, after a sum in float32 (24 bits), whose own rounding can move a tie.
    assert torch.all((result.double() - truth).abs() <= truth.abs() * 2**-8 * (1 + 2**-10))


def test_add_and_cast_returns_new_memory():
    total = torch.randn(1, 4, 1, 8)
    for parts in ([], [(slice(None), torch.randn(1, 4, 1, 8))]):
        before = total.clone()
        merge.add_and_cast(total, parts, torch.float32).zero_()
        assert torch.equal(total, before)


SLICES = [slice(None), slice(0, 6), slice(6, 12), slice(1, 12), slice(3, 9)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_sum_of_blocks_is_rounded_once(dtype, count):
    """Sums of blocks in any rows, some kept to the end, are right: one rounding to the type, after sums in float32."""
    torch.manual_seed(count)
    for draw in range(20):
        order = torch.randint(len(SLICES), (count,)).tolist()
        blocks = [(SLICES[i], torch.randn(2, len(range(12)[SLICES[i]]), 3, 4).to(dtype)) for i in order]
        kept = draw % (count + 1)
        truth = torch.zeros(2, 12, 3, 4, dtype=torch.float64)
        for rows, block in blocks:
            truth[:, rows] += block.double()
        total = merge.Sum(torch.empty(2, 12, 3, 4, dtype=dtype), draw % 2 * count)
        for rows, block in blocks[kept:]:
            total.add(block.clone(), rows)
        if kept == count:
            total.add(torch.zeros(2, 12, 3, 4, dtype=dtype))
        result = total.result(dtype, [(rows, block.clone()) for rows, block in blocks[:kept]])
        unit = torch.finfo(dtype).eps
        assert result.dtype == dtype
        # The sum's own error in float32 counts against the size of its terms.
        assert torch.all((result.double() - truth).abs() <= truth.abs() * unit * (1 + 2**-8) + 2**-20), (order, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("queries", [[], [slice(None)], [slice(6, 12)], [slice(1, 12), slice(None), slice(6, 12)]])
def test_a_merge_of_partial_results_is_the_softmax_over_all_keys(dtype, queries):
    torch.manual_seed(0)
    outs = [torch.randn(2, len(range(12)[rows]), 3, 4).to(dtype) for rows in [slice(None), *queries]]
    lses = [3 * torch.randn(2, 3, len(range(12)[rows])).double() for rows in [slice(None), *queries]]
    weights, weighted = torch.zeros(2, 3, 12).double(), torch.zeros(2, 12, 3, 4).double()
    for rows, out, lse in zip([slice(None), *queries], outs, lses, strict=True):
        weights[..., rows] += lse.exp()
        weighted[:, rows] += lse.exp().transpose(1, 2).unsqueeze(-1) * out.double()
    partial = merge.Partial()
    for rows, out, lse in zip([slice(None), *queries], outs, lses, strict=True):
        partial.merge(out.clone(), lse.to(merge.wide_type(out)), rows)
    result, lse = partial.result(dtype)
    truth = weighted / weights.transpose(1, 2).unsqueeze(-1)
    unit = torch.finfo(dtype).eps
    assert torch.allclose(lse.double(), weights.log(), atol=1e-5 if dtype == torch.bfloat16 else 1e-13)
    assert torch.all(
        (result.double() - truth).abs() <= truth.abs() * unit + (1e-5 if dtype != torch.float64 else 1e-13)
    )


def test_merge_result_can_be_read_twice():
    blocks = [(torch.full((1, 2, 1, 1), value), torch.zeros(1, 1, 2)) for value in (1.0, 3.0)]
    partial = merge.Partial()
    for out, lse in blocks:
        partial.merge(out, lse)
    for _ in range(2):
        out, lse = partial.result(torch.float32)
        # Two blocks of one weight: their mean, and twice the weight.
        assert out.flatten().tolist() == [2.0, 2.0]
        assert torch.allclose(lse, torch.full((1, 1, 2), 2.0).log())


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-20, 1e-25, 1e-30, 1e-37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_with_delta_carries_delta_for_tiny_gradients(dtype, size):
    torch.manual_seed(0)
    dout = (size * torch.randn(1, 8, 2, 16)).to(dtype)
    delta = size * torch.randn(1, 2, 8)
    stand_in = merge.output_with_delta(dout, delta)
    carried = (dout.double() * stand_in.double()).sum(-1).transpose(1, 2)
    assert torch.allclose(carried, delta.double(), rtol=16 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_with_delta_is_as_exact_as_float32(dtype):
    torch.manual_seed(0)
    dout, delta = torch.randn(2, 32, 3, 64).to(dtype), torch.randn(2, 3, 32)
    carried = (dout.double() * merge.output_with_delta(dout, delta).double()).sum(-1).transpose(1, 2)
    # float16 has no numbers below 2^-24.
    assert torch.allclose(carried, delta.double(), rtol=1e-5, atol=2.0**-22 if dtype == torch.float16 else 0)
    # Where one column is all of dO, or more than half of its square, the replacement is no larger than before.
    dout[..., 1:] *= 2.0**-10
    largest = merge.output_with_delta(dout, delta).abs().amax(-1)
    assert torch.all(largest.transpose(1, 2) <= 2 * delta.abs() / dout[..., 0].abs().transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_gradient_carry_the_lse_gradient(dtype):
    torch.manual_seed(0)
    dout, delta = torch.randn(1, 8, 2, 16).to(dtype), torch.randn(1, 2, 8)
    dout[:, 2:6] = 0
    delta[..., 3] = 0
    rows = merge.lift_tiny_rows(dout, delta)
    carried = (rows.double() * merge.output_with_delta(rows, delta).double()).sum(-1).transpose(1, 2)
    assert torch.allclose(carried, delta.double(), rtol=16 * torch.finfo(dtype).eps, atol=0)
    others = [0, 1, 3, 6, 7]
    assert torch.equal(rows[:, others], dout[:, others])
    # What enters dV in place of nothing.
    least = 2**-14 if dtype == torch.float16 else 2**-100
    assert rows[:, 2:6].abs().max() <= least * delta.abs().max() * 1.01


def test_lifted_rows_in_float16_are_at_least_its_minimum():
    dout, delta = torch.zeros(1, 1, 1, 4, dtype=torch.float16), torch.full((1, 1, 1), 2.0**-20)
    assert merge.lift_tiny_rows(dout, delta).flatten().tolist() == [2.0**-24, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(40))
def test_blocks_sharing_rows_are_added_in_place(seed):
    """Sums over any, also overlapping, stretches of rows equal one addition after the other."""
    random = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(1, 12, (), generator=random))
    total = torch.randn(2, rows, 1, 2, dtype=torch.float64, generator=random)
    parts, truth = [], total.clone()
    for _ in range(seed % 5):
        first, last = sorted(torch.randint(0, rows + 1, (2,), generator=random).tolist())
        block = torch.randn(2, last - first, 1, 2, dtype=torch.float64, generator=random)
        parts.append((slice(first, last), block))
        truth[:, first:last] += block
    assert torch.allclose(merge.add_and_cast(total.clone(), parts, torch.float64), truth)


def test_sink_scales_the_output_and_adds_to_the_lse():
    """Three keys of score 0, and a sink of score 0: the output keeps three quarters, the LSE is log 4."""
    out, lse = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), math.log(3))
    kept, total = merge.with_sinks(out, lse, torch.zeros(1))
    assert torch.allclose(kept, torch.full_like(out, 0.75)) and total.item() == pytest.approx(math.log(4))


def test_merge_of_rows_without_keys_stays_finite():
    """Rows 0 and 1 have seen nothing, row 2 has; the block's rows 0 and 2 see nothing, its row 1 does."""
    never = -math.inf
    out, lse = torch.tensor([0.0, 0.0, 5.0]).view(1, 3, 1, 1), torch.tensor([never, never, 2.0]).view(1, 1, 3)
    some, some_lse = torch.tensor([0.0, 7.0, 0.0]).view(1, 3, 1, 1), torch.tensor([never, 3.0, never]).view(1, 1, 3)
    merge.merge_rows(out, lse, some, some_lse, slice(None))
    assert out.flatten().tolist() == [0.0, 7.0, 5.0] and lse.flatten().tolist() == [never, 3.0, 2.0]
