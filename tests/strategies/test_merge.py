"""Totals of gradients, begun with one block and settled with the last, against sums in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from ringprof.strategies import merge


@pytest.mark.parametrize("rows", [slice(None), slice(0, 5), slice(5, 12), slice(3, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_total_begins_with_its_block_and_zeros_around_it(rows, dtype):
    like, block = torch.full((2, 12, 3, 4), torch.nan), torch.randn(2, len(range(12)[rows]), 3, 4)
    expected = torch.zeros(2, 12, 3, 4, dtype=dtype)
    expected[:, rows] = block.to(dtype)
    assert torch.equal(merge.started(like, rows, block, dtype), expected)


@pytest.mark.parametrize("cuts", [(0, 12), (0, 6, 12), (0, 1, 5, 12), (6, 9, 12), (0, 5)])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float64])
def test_a_settled_total_is_the_sum_rounded_once(cuts, wire):
    total = torch.randn(1, 12, 2, 8).to(wire)
    parts = [(slice(a, b), torch.randn(1, b - a, 2, 8).to(wire)) for a, b in itertools.pairwise(cuts) if b > a]
    truth = total.double().clone()
    for rows, block in parts:
        truth[:, rows] += block.double()
    result = merge.settled(total, parts, torch.bfloat16)
    assert result.dtype == torch.bfloat16
    # One rounding to 8 bits, after a sum in float32 (24 bits), whose own rounding can move a tie.
    assert torch.all((result.double() - truth).abs() <= truth.abs() * 2**-8 * (1 + 2**-10))


def test_several_blocks_in_the_same_rows_are_all_added():
    total = torch.randn(1, 12, 2, 8)
    parts = [(slice(None), torch.randn(1, 12, 2, 8)), (slice(None), torch.randn(1, 12, 2, 8))]
    truth = sum((block.double() for _, block in parts), total.double())
    assert torch.allclose(merge.settled(total, parts, torch.float32).double(), truth, atol=1e-6)


def test_a_settled_total_shares_no_memory():
    total = torch.randn(1, 4, 1, 8)
    for parts in ([], [(slice(None), torch.randn(1, 4, 1, 8))]):
        before = total.clone()
        merge.settled(total, parts, torch.float32).zero_()
        assert torch.equal(total, before)
