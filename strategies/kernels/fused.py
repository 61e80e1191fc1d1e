"""What runs between blocks, as one fused Triton kernel each: every tensor is read and written once.

All tensors are dense, except that `add` takes rows of the sequence of a dense tensor. Results equal those of `merge.py`
to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows (one query of one head) that a program handles; 8 to 64 measured alike on H200."""
ELEMENTS = 4096
"""Elements that a program adds."""


@triton.jit
def ringprof_merge(
    out, before, lse, block, block_lse, count, seq, heads, from_query, queries, first, block_seq,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < count
    # Heads vary fastest, as they do in memory.
    head = rows % heads
    query = (rows // heads) % queries + from_query
    batch = (rows // heads // queries).to(tl.int64)
    merged = inside & (query >= first) & (query < first + block_seq)
    lse_at = lse + (batch * heads + head) * seq + query
    mine = tl.load(lse_at, mask=merged, other=0.0)
    theirs = tl.load(block_lse + (batch * heads + head) * block_seq + query - first, mask=merged, other=0.0)
    weight = tl.where(merged, tl.sigmoid(theirs - mine), 0.0)

    columns = tl.arange(0, WIDTH)
    wide = (columns < HEAD_DIM)[None, :]
    at = (((batch * seq + query) * heads + head) * HEAD_DIM)[:, None] + columns[None, :]
    block_at = (((batch * block_seq + query - first) * heads + head) * HEAD_DIM)[:, None] + columns[None, :]
    old = tl.load(before + at, mask=inside[:, None] & wide, other=0.0).to(tl.float32)
    new = tl.load(block + block_at, mask=merged[:, None] & wide, other=0.0).to(tl.float32)
    # Several warps hold copies of a small tensor: all must have read before the first one writes in place.
    tl.debug_barrier()
    tl.store(out + at, old - weight[:, None] * (old - new), mask=inside[:, None] & wide)
    # log(exp(a) + exp(b)) from the larger of the two, which cannot overflow
    larger = tl.maximum(mine, theirs)
    tl.store(lse_at, larger + tl.log(1.0 + tl.exp(-tl.abs(mine - theirs))), mask=merged)


@triton.jit
def ringprof_merge_add(
    out, total, block, count, out_stride, total_stride, block_stride, HAS_TOTAL: tl.constexpr, ELEMENTS: tl.constexpr
):
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = at < count
    value = tl.load(block + batch * block_stride + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_TOTAL:
        value += tl.load(total + batch * total_stride + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + batch * out_stride + at, value, mask=mask)


@triton.jit
def ringprof_row_product(
    dout, out, delta, count, seq, heads, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (columns < HEAD_DIM)[None, :]
    at = (rows.to(tl.int64) * HEAD_DIM)[:, None] + columns[None, :]
    product = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32) * tl.load(out + at, mask=mask, other=0.0)
    batch, query, head = (rows // heads // seq).to(tl.int64), (rows // heads) % seq, rows % heads
    tl.store(delta + (batch * heads + head) * seq + query, tl.sum(product, 1), mask=rows < count)


@triton.jit
def ringprof_output_with_delta(
    dout, delta, out, count, seq, heads, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (columns < HEAD_DIM)[None, :]
    at = (rows.to(tl.int64) * HEAD_DIM)[:, None] + columns[None, :]
    gradient = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(gradient), 1)
    divisor = tl.where(largest > 0, largest, 1.0)
    unit = gradient / divisor[:, None]
    batch, query, head = (rows // heads // seq).to(tl.int64), (rows // heads) % seq, rows % heads
    wanted = tl.load(delta + (batch * heads + head) * seq + query, mask=rows < count, other=0.0)
    ratio = tl.where(largest > 0, wanted / divisor / tl.sum(unit * unit, 1), 0.0)
    tl.store(out + at, unit * ratio[:, None], mask=mask)


def merge_into(out: Tensor, before: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, first: int) -> None:
    """As `merge.merge_into`, for queries from ``first`` on."""
    batch, seq, heads, head_dim = out.shape
    block_seq = block_out.shape[1]
    # In place, other queries stay as they are; else they are copied.
    from_query, queries = (first, block_seq) if out is before else (0, seq)
    _launch_rows(
        ringprof_merge, batch * queries * heads, head_dim, (out, before, lse, block_out, block_lse),
        (seq, heads, from_query, queries, first, block_seq),
    )  # fmt: skip


def add(out: Tensor, total: Tensor | None, block: Tensor) -> bool:
    """``out`` = ``total`` + ``block``, added in float32; False where a tensor is not rows of a dense one."""
    if out.dim() > 4:
        # A view, never a copy.
        out, block = (x.view(-1, *x.shape[-3:]) for x in (out, block))
        return add(out, None if total is None else total.view(-1, *total.shape[-3:]), block)
    count = out[0].numel()
    if not all(x is None or x[0].is_contiguous() for x in (out, total, block)):
        return False
    given = block if total is None else total
    _launch(
        ringprof_merge_add, (-(-count // ELEMENTS), out.shape[0], 1), (out, given, block),
        (count, out.stride(0), given.stride(0), block.stride(0)), (total is not None, ELEMENTS), num_warps=8,
    )  # fmt: skip
    return True


def row_product(dout: Tensor, out: Tensor) -> Tensor:
    """As `merge.row_product`."""
    batch, seq, heads, head_dim = dout.shape
    delta = torch.empty(batch, heads, seq, dtype=torch.float32, device=dout.device)
    _launch_rows(ringprof_row_product, batch * seq * heads, head_dim, (dout, out, delta), (seq, heads))
    return delta


def output_with_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """As `merge.output_with_delta`."""
    batch, seq, heads, head_dim = dout.shape
    out = torch.empty_like(dout)
    tensors = (dout, delta.contiguous(), out)
    _launch_rows(ringprof_output_with_delta, batch * seq * heads, head_dim, tensors, (seq, heads))
    return out


def _launch_rows(kernel: Any, rows: int, head_dim: int, tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> None:
    constants = (head_dim, ROWS, 1 << (head_dim - 1).bit_length())
    _launch(kernel, (-(-rows // ROWS), 1, 1), tensors, (rows, *sizes), constants)


_compiled: dict[Any, Any] = {}
"""By all that a kernel is compiled for, and more: the numbers themselves."""
_COMPILED_AT_MOST = 512


def _launch(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[int, ...],
    constants: tuple[Any, ...], **how: Any,
) -> None:  # fmt: skip
    """Launch; from the second time on without triton's look at every argument, which costs as much again."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    # By the kernel's address: its own hash reads its source.
    key = id(kernel), tensors[0].device, numbers, constants, *[tensor.dtype for tensor in tensors]
    # A kernel is compiled for addresses that are multiples of 16, or for any.
    aligned = not any(address % 16 for address in addresses)
    compiled = _compiled.get(key) if aligned else None
    if compiled is not None:
        compiled[grid](*addresses, *numbers, *constants)
        return
    compiled = kernel[grid](*tensors, *numbers, *constants, **how)
    if aligned:
        if len(_compiled) >= _COMPILED_AT_MOST:
            _compiled.clear()
        _compiled[key] = compiled
