"""What runs between blocks, as one fused Triton kernel each: every tensor is read and written once.

All take views with any strides, as long as head_dim is contiguous. Results equal those of `merge.py` to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows (one query of one head) that a program handles; 8 to 64 measured alike on H200."""


@triton.jit
def _row(rows, seq, heads):
    """(batch, query, head) of a row number; heads vary fastest, as they do in memory."""
    head = rows % heads
    query = (rows // heads) % seq
    return (rows // heads // seq).to(tl.int64), query.to(tl.int64), head.to(tl.int64)


@triton.jit
def ringprof_merge(
    out, lse, block_out, block_lse, count, seq, heads, head_dim,
    out_b, out_s, out_h, lse_b, lse_h, lse_s, block_b, block_s, block_h, block_lse_b, block_lse_h, block_lse_s,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < count
    batch, query, head = _row(rows, seq, heads)
    lse_at = lse + batch * lse_b + head * lse_h + query * lse_s
    mine = tl.load(lse_at, mask=inside, other=0.0)
    theirs_at = block_lse + batch * block_lse_b + head * block_lse_h + query * block_lse_s
    theirs = tl.load(theirs_at, mask=inside, other=0.0)
    weight = tl.sigmoid(theirs - mine)

    columns = tl.arange(0, WIDTH)
    mask = inside[:, None] & (columns < head_dim)[None, :]
    out_at = out + (batch * out_b + query * out_s + head * out_h)[:, None] + columns[None, :]
    block_at = block_out + (batch * block_b + query * block_s + head * block_h)[:, None] + columns[None, :]
    old = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    new = tl.load(block_at, mask=mask, other=0.0).to(tl.float32)
    # Several warps hold copies of a small tensor: all must have read before the first one writes in place.
    tl.debug_barrier()
    tl.store(out_at, old - weight[:, None] * (old - new), mask=mask)
    # log(exp(a) + exp(b)) from the larger of the two, which cannot overflow
    larger = tl.maximum(mine, theirs)
    tl.store(lse_at, larger + tl.log(1.0 + tl.exp(-tl.abs(mine - theirs))), mask=inside)


@triton.jit
def ringprof_merge_accumulate(
    total, block, count, seq, heads, head_dim, total_b, total_s, total_h, block_b, block_s, block_h,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch, query, head = _row(rows, seq, heads)
    columns = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (columns < head_dim)[None, :]
    total_at = total + (batch * total_b + query * total_s + head * total_h)[:, None] + columns[None, :]
    block_at = block + (batch * block_b + query * block_s + head * block_h)[:, None] + columns[None, :]
    old = tl.load(total_at, mask=mask, other=0.0).to(tl.float32)
    new = tl.load(block_at, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # as in the merge
    tl.store(total_at, old + new, mask=mask)


@triton.jit
def ringprof_merge_add(
    out, total, block, count, seq, heads, head_dim, out_b, out_s, out_h, total_b, total_s, total_h,
    block_b, block_s, block_h, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch, query, head = _row(rows, seq, heads)
    columns = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (columns < head_dim)[None, :]
    out_at = out + (batch * out_b + query * out_s + head * out_h)[:, None] + columns[None, :]
    total_at = total + (batch * total_b + query * total_s + head * total_h)[:, None] + columns[None, :]
    block_at = block + (batch * block_b + query * block_s + head * block_h)[:, None] + columns[None, :]
    old = tl.load(total_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, old + tl.load(block_at, mask=mask, other=0.0).to(tl.float32), mask=mask)


@triton.jit
def ringprof_merge_convert(
    out, block, count, seq, heads, head_dim, out_b, out_s, out_h, block_b, block_s, block_h,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch, query, head = _row(rows, seq, heads)
    columns = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (columns < head_dim)[None, :]
    out_at = out + (batch * out_b + query * out_s + head * out_h)[:, None] + columns[None, :]
    block_at = block + (batch * block_b + query * block_s + head * block_h)[:, None] + columns[None, :]
    tl.store(out_at, tl.load(block_at, mask=mask, other=0.0), mask=mask)


@triton.jit
def ringprof_row_product(
    dout, out, delta, count, seq, heads, head_dim, dout_b, dout_s, dout_h, out_b, out_s, out_h,
    delta_b, delta_h, delta_s, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch, query, head = _row(rows, seq, heads)
    columns = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (columns < head_dim)[None, :]
    dout_at = dout + (batch * dout_b + query * dout_s + head * dout_h)[:, None] + columns[None, :]
    out_at = out + (batch * out_b + query * out_s + head * out_h)[:, None] + columns[None, :]
    product = tl.load(dout_at, mask=mask, other=0.0).to(tl.float32) * tl.load(out_at, mask=mask, other=0.0)
    delta_at = delta + batch * delta_b + head * delta_h + query * delta_s
    tl.store(delta_at, tl.sum(product, 1), mask=rows < count)


@triton.jit
def ringprof_output_with_delta(
    dout, delta, out, count, seq, heads, head_dim, dout_b, dout_s, dout_h, delta_b, delta_h, delta_s,
    out_b, out_s, out_h, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch, query, head = _row(rows, seq, heads)
    columns = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (columns < head_dim)[None, :]
    dout_at = dout + (batch * dout_b + query * dout_s + head * dout_h)[:, None] + columns[None, :]
    gradient = tl.load(dout_at, mask=mask, other=0.0).to(tl.float32)
    norm = tl.sum(gradient * gradient, 1)
    wanted = tl.load(delta + batch * delta_b + head * delta_h + query * delta_s, mask=rows < count, other=0.0)
    ratio = tl.where(norm > 0, wanted / norm, 0.0)
    out_at = out + (batch * out_b + query * out_s + head * out_h)[:, None] + columns[None, :]
    tl.store(out_at, gradient * ratio[:, None], mask=mask)


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """As `merge.merge_into`."""
    strides = (*out.stride()[:3], *lse.stride(), *block_out.stride()[:3], *block_lse.stride())
    _launch(ringprof_merge, out, lse, block_out, block_lse, like=out, strides=strides)


def accumulate(total: Tensor, block: Tensor) -> None:
    """As `merge.accumulate`."""
    strides = (*total.stride()[:3], *block.stride()[:3])
    _launch(ringprof_merge_accumulate, total, block, like=total, strides=strides)


def add(out: Tensor, total: Tensor, block: Tensor) -> None:
    """``out = total + block``, added in float32."""
    strides = (*out.stride()[:3], *total.stride()[:3], *block.stride()[:3])
    _launch(ringprof_merge_add, out, total, block, like=out, strides=strides)


def convert(out: Tensor, block: Tensor) -> None:
    """As `merge.convert`."""
    _launch(ringprof_merge_convert, out, block, like=out, strides=(*out.stride()[:3], *block.stride()[:3]))


def row_product(dout: Tensor, out: Tensor) -> Tensor:
    """As `merge.row_product`."""
    batch, seq, heads, _ = dout.shape
    delta = torch.empty(batch, heads, seq, dtype=torch.float32, device=dout.device)
    strides = (*dout.stride()[:3], *out.stride()[:3], *delta.stride())
    _launch(ringprof_row_product, dout, out, delta, like=dout, strides=strides)
    return delta


def output_with_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """As `merge.output_with_delta`."""
    out = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    strides = (*dout.stride()[:3], *delta.stride(), *out.stride()[:3])
    _launch(ringprof_output_with_delta, dout, delta, out, like=dout, strides=strides)
    return out


def _launch(kernel: Any, *tensors: Tensor, like: Tensor, strides: tuple[int, ...]) -> None:
    batch, seq, heads, head_dim = like.shape
    count = batch * seq * heads
    grid = (triton.cdiv(count, ROWS),)
    width = triton.next_power_of_2(head_dim)
    kernel[grid](*tensors, count, seq, heads, head_dim, *strides, ROWS=ROWS, WIDTH=width)
