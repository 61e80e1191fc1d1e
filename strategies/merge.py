"""What runs between blocks: the online-softmax merge, the accumulation of gradients, and the row term delta.

For two partial results a and b of the same queries, each normalised over its own keys:

    lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) · out_a + exp(lse_b - lse) · out_b

computed in the form that cannot overflow: with w = sigmoid(lse_b - lse_a), out = out_a - w · (out_a - out_b) and
lse = lse_a - logsigmoid(lse_a - lse_b). (Milakov & Gimelshein, arXiv 1805.02867; the stable form is discussed in
zhuzilin/ring-flash-attention, pull request 34.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from .layouts import ALL


class Partial:
    """The running result of one rank's queries: output (B, S, H, D) and LSE (B, H, S), both at least float32."""

    def __init__(self) -> None:
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def merge(self, out: Tensor, lse: Tensor, queries: slice = ALL) -> None:
        """Add a block's result for ``queries``; the first block must cover all of them."""
        if self.out is None or self.lse is None:
            self.out, self.lse = torch.empty(out.shape, dtype=wide_type(out), device=out.device), lse.clone()
            convert(self.out, out)
            return
        merge_into(self.out[:, queries], self.lse[..., queries], out, lse)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The output in ``dtype`` and the LSE."""
        assert self.out is not None and self.lse is not None
        return self.out.to(dtype), self.lse


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's result into ``out`` (B, S, H, D) and ``lse`` (B, H, S), in place."""
    if _fused(out, block_out):
        from . import fused

        fused.merge_into(out, lse, block_out, block_lse)
        return
    weight = torch.sigmoid(block_lse - lse).transpose(1, 2).unsqueeze(-1)
    out -= weight * (out - block_out)
    lse -= functional.logsigmoid(lse - block_lse)


def accumulate(total: Tensor, block: Tensor) -> None:
    """``total += block`` (B, S, H, D), added in at least float32 and kept in the type of ``total``."""
    if _fused(total, block):
        from . import fused

        fused.accumulate(total, block)
        return
    total += block


def started(like: Tensor, rows: slice, block: Tensor, dtype: torch.dtype) -> Tensor:
    """A new total of ``like``'s shape in ``dtype``: ``block`` in ``rows`` of the sequence, 0 elsewhere."""
    total = torch.empty(like.shape, dtype=dtype, device=like.device)
    first, last, _ = rows.indices(like.shape[1])
    total[:, :first].zero_()
    total[:, last:].zero_()
    convert(total[:, rows], block)
    return total


def settled(total: Tensor, parts: Sequence[tuple[slice, Tensor]], dtype: torch.dtype) -> Tensor:
    """A new tensor in ``dtype``: ``total`` plus the last blocks, each in its rows; ``total`` is used up.

    Where the blocks' rows tile the sequence, each element is added in at least float32 and rounded once.
    """
    if not _tile([rows for rows, _ in parts], total.shape[1]):
        total = total.to(wide_type(total), copy=True)
        for rows, block in parts:
            accumulate(total[:, rows], block)
        return total.to(dtype)
    result = torch.empty(total.shape, dtype=dtype, device=total.device)
    for rows, block in parts:
        if _fused(total, block):
            from . import fused

            fused.add(result[:, rows], total[:, rows], block)
        else:
            result[:, rows] = total[:, rows].to(wide_type(total)) + block
    return result


def _tile(parts: Sequence[slice], length: int) -> bool:
    """Whether slices, in order, cover a sequence once."""
    at = 0
    for part in parts:
        first, last, step = part.indices(length)
        if first != at or step != 1:
            return False
        at = last
    return bool(parts) and at == length


def convert(out: Tensor, block: Tensor) -> None:
    """``out`` = ``block`` (B, S, H, D), in the type of ``out``."""
    if _fused(out, block):
        from . import fused

        fused.convert(out, block)
        return
    out.copy_(block)


def row_product(dout: Tensor, out: Tensor) -> Tensor:
    """delta = rowsum(dO · O), (B, H, S), in at least float32."""
    if _fused(dout, out):
        from . import fused

        return fused.row_product(dout, out)
    wide = wide_type(out)
    return (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).contiguous()


def output_with_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """A stand-in for O whose row product with dO is ``delta``: dO · delta / rowsum(dO²), 0 where dO is 0.

    A flash backward pass uses O for nothing but delta = rowsum(dO · O), so it computes the same gradients with this.
    Shapes: dout (B, S, H, D), delta (B, H, S); the result has dout's shape and type.
    """
    if _fused(dout, dout):
        from . import fused

        return fused.output_with_delta(dout, delta)
    dout_f = dout.to(wide_type(dout))
    norm = dout_f.square().sum(-1)
    ratio = torch.where(norm > 0, delta.transpose(1, 2) / norm, 0)
    return (dout_f * ratio.unsqueeze(-1)).to(dout.dtype)


def _fused(a: Tensor, b: Tensor) -> bool:
    """Whether the Triton kernels can do it: GPU tensors, at most float32, head_dim contiguous."""
    narrow = a.dtype != torch.float64 and a.stride(-1) == 1 and b.stride(-1) == 1
    return a.is_cuda and narrow and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def wide_type(tensor: Tensor) -> torch.dtype:
    """The type that partial results accumulate in: float32, or float64 for float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def wide(tensor: Tensor) -> Tensor:
    """A copy in the type that partial results accumulate in."""
    return tensor.to(wide_type(tensor), copy=True)


def wide_zeros(like: Tensor) -> Tensor:
    """Zeros of a tensor's shape in the type that partial results accumulate in."""
    return torch.zeros(like.shape, dtype=wide_type(like), device=like.device)
