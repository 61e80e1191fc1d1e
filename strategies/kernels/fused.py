"""Fused Triton kernels of the operations in `merge.py`: every tensor is read and written once.

All tensors must be contiguous; `add` also accepts sequence rows of a contiguous tensor. Results equal those of
`merge.py` up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows (one query of one head) per program; 8 to 64 are equally fast on H200."""
ELEMENTS = 4096
"""Elements that one program adds."""


@triton.jit
def ringprof_merge(
    out, old_out, lse, block, block_lse, count, seq, heads, from_query, queries, first, block_seq,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = rows < count
    # Heads vary fastest, as in memory.
    head = rows % heads
    query = (rows // heads) % queries + from_query
    batch = (rows // heads // queries).to(tl.int64)
    merged = in_range & (query >= first) & (query < first + block_seq)
    lse_pointers = lse + (batch * heads + head) * seq + query
    own_lse = tl.load(lse_pointers, mask=merged, other=0.0)
    new_lse = tl.load(block_lse + (batch * heads + head) * block_seq + query - first, mask=merged, other=0.0)
    weight = tl.where(merged, tl.sigmoid(new_lse - own_lse), 0.0)

    columns = tl.arange(0, WIDTH)
    wide = (columns < HEAD_DIM)[None, :]
    offset = (((batch * seq + query) * heads + head) * HEAD_DIM)[:, None] + columns[None, :]
    block_offset = (((batch * block_seq + query - first) * heads + head) * HEAD_DIM)[:, None] + columns[None, :]
    old = tl.load(old_out + offset, mask=in_range[:, None] & wide, other=0.0).to(tl.float32)
    new = tl.load(block + block_offset, mask=merged[:, None] & wide, other=0.0).to(tl.float32)
    # Several warps hold copies of a small tensor: all must finish reading before the first one writes in place.
    tl.debug_barrier()
    tl.store(out + offset, old - weight[:, None] * (old - new), mask=in_range[:, None] & wide)
    # log(exp(a) + exp(b)) from the larger of the two, which cannot overflow
    larger = tl.maximum(own_lse, new_lse)
    tl.store(lse_pointers, larger + tl.log(1.0 + tl.exp(-tl.abs(own_lse - new_lse))), mask=merged)


@triton.jit
def ringprof_merge_add(
    out, total, block, count, out_stride, total_stride, block_stride, HAS_TOTAL: tl.constexpr, ELEMENTS: tl.constexpr
):
    batch = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offset < count
    value = tl.load(block + batch * block_stride + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_TOTAL:
        value += tl.load(total + batch * total_stride + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + batch * out_stride + offset, value, mask=mask)


@triton.jit
def ringprof_row_product(
    dout, out, delta, count, seq, heads, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (columns < HEAD_DIM)[None, :]
    offset = (rows.to(tl.int64) * HEAD_DIM)[:, None] + columns[None, :]
    product = tl.load(dout + offset, mask=mask, other=0.0).to(tl.float32) * tl.load(out + offset, mask=mask, other=0.0)
    batch, query, head = (rows // heads // seq).to(tl.int64), (rows // heads) % seq, rows % heads
    tl.store(delta + (batch * heads + head) * seq + query, tl.sum(product, 1), mask=rows < count)


@triton.jit
def ringprof_output_with_delta(
    dout, delta, out, count, seq, heads, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = (rows < count)[:, None] & (columns < HEAD_DIM)[None, :]
    offset = (rows.to(tl.int64) * HEAD_DIM)[:, None] + columns[None, :]
    gradient = tl.load(dout + offset, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(gradient), 1)
    divisor = tl.where(largest > 0, largest, 1.0)
    unit = gradient / divisor[:, None]
    batch, query, head = (rows // heads // seq).to(tl.int64), (rows // heads) % seq, rows % heads
    row_delta = tl.load(delta + (batch * heads + head) * seq + query, mask=rows < count, other=0.0)
    squares = tl.sum(unit * unit, 1)
    # As in the plain form, one column takes what the rounding of the others lacks.
    left_out = squares >= 2.0
    ratio = tl.where(largest > 0, row_delta / divisor / tl.where(left_out, squares - 1.0, squares), 0.0)
    is_rest = (columns[None, :] == tl.argmax(tl.abs(unit), 1)[:, None]) & left_out[:, None]
    value = tl.where(is_rest, 0.0, unit * ratio[:, None]).to(out.dtype.element_ty).to(tl.float32)
    lacking = row_delta - tl.sum(gradient * value, 1)
    tl.store(out + offset, tl.where(is_rest, unit * (lacking / divisor)[:, None], value), mask=mask)


def merge_into(out: Tensor, old_out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, first: int) -> None:
    """Merge a block's result for the queries from ``first`` on; the fused form of `merge.merge_into`."""
    batch, seq, heads, head_dim = out.shape
    block_seq = block_out.shape[1]
    # In place, other queries keep their values; otherwise they are copied.
    from_query, queries = (first, block_seq) if out is old_out else (0, seq)
    _launch_rows(
        ringprof_merge, batch * queries * heads, head_dim, (out, old_out, lse, block_out, block_lse),
        (seq, heads, from_query, queries, first, block_seq),
    )  # fmt: skip


def add(out: Tensor, total: Tensor | None, block: Tensor) -> bool:
    """Set ``out`` = ``total`` + ``block``, added in float32.

    Returns False without a change if a tensor is not made of sequence rows of a contiguous tensor.
    """
    if out.dim() > 4:
        # `view` never copies.
        out, block = (x.view(-1, *x.shape[-3:]) for x in (out, block))
        return add(out, None if total is None else total.view(-1, *total.shape[-3:]), block)
    count = out[0].numel()
    if not all(x is None or x[0].is_contiguous() for x in (out, total, block)):
        return False
    summand = block if total is None else total
    _launch(
        ringprof_merge_add, (-(-count // ELEMENTS), out.shape[0], 1), (out, summand, block),
        (count, out.stride(0), summand.stride(0), block.stride(0)), (total is not None, ELEMENTS), num_warps=8,
    )  # fmt: skip
    return True


def row_product(dout: Tensor, out: Tensor) -> Tensor:
    """Compute delta = rowsum(dO · O), (B, H, S), in float32; the fused form of `merge.row_product`."""
    batch, seq, heads, head_dim = dout.shape
    delta = torch.empty(batch, heads, seq, dtype=torch.float32, device=dout.device)
    _launch_rows(ringprof_row_product, batch * seq * heads, head_dim, (dout, out, delta), (seq, heads))
    return delta


def output_with_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """Compute a replacement for O from delta; the fused form of `merge.output_with_delta`."""
    batch, seq, heads, head_dim = dout.shape
    out = torch.empty_like(dout)
    tensors = (dout, delta.contiguous(), out)
    _launch_rows(ringprof_output_with_delta, batch * seq * heads, head_dim, tensors, (seq, heads))
    return out


def _launch_rows(kernel: Any, rows: int, head_dim: int, tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> None:
    constants = (head_dim, ROWS, 1 << (head_dim - 1).bit_length())
    _launch(kernel, (-(-rows // ROWS), 1, 1), tensors, (rows, *sizes), constants)


_compiled: dict[Any, Any] = {}
"""Compiled kernels by everything they are specialized for, and by the integer arguments."""
_CACHE_SIZE = 512


def _launch(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[int, ...],
    constants: tuple[Any, ...], **options: Any,
) -> None:  # fmt: skip
    """Launch a kernel; repeated launches skip triton's inspection of the arguments, which doubles the host time."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    # Use the kernel's id, because its hash reads its source code.
    key = id(kernel), tensors[0].device, numbers, constants, *[tensor.dtype for tensor in tensors]
    # triton specializes kernels for addresses that are multiples of 16.
    aligned = not any(address % 16 for address in addresses)
    compiled = _compiled.get(key) if aligned else None
    if compiled is not None:
        compiled[grid](*addresses, *numbers, *constants)
        return
    compiled = kernel[grid](*tensors, *numbers, *constants, **options)
    if aligned:
        if len(_compiled) >= _CACHE_SIZE:
            _compiled.clear()
        _compiled[key] = compiled
