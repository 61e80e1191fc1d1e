"""Operations between attention blocks: the online-softmax merge, sums of gradients, and the row term delta.

For two partial results a and b of the same queries, each normalised over its own keys:

    lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) · out_a + exp(lse_b - lse) · out_b

computed in a form that cannot overflow: with w = sigmoid(lse_b - lse_a), out = out_a - w · (out_a - out_b) and
lse = lse_a - logsigmoid(lse_a - lse_b). (Milakov & Gimelshein, arXiv 1805.02867; the stable form is discussed in
zhuzilin/ring-flash-attention, pull request 34.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import Unsupported
from ..masks.layouts import ALL, as_contiguous, part

FUSED_FROM = 2**23
"""Number of elements from which a Triton kernel adds faster than torch. Below, its launch costs the host more time."""

_Part = tuple[slice, Tensor]
"""Rows of the sequence, and the block for these rows."""


class Partial:
    """Running result of one rank's queries, in at least float32 between blocks; it is rounded once, at the end.

    The last block is merged only when the next one arrives or the result is requested. The final merge then writes the
    output directly in its final type.
    """

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._pending: tuple[Tensor, Tensor, slice] | None = None

    def merge(self, out: Tensor, lse: Tensor, queries: slice = ALL) -> None:
        """Merge a block's result for ``queries``: out (B, S, H, D) and lse (B, H, S). The first block covers all
        queries.

        Both tensors may be overwritten.
        """
        if self._out is None:
            self._out, self._lse = as_contiguous(out), as_contiguous(lse)
            return
        self._merge_pending(wide_type(self._out))
        self._pending = out, lse, queries

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the output in ``dtype``, and the LSE in at least float32."""
        self._merge_pending(dtype)
        assert self._out is not None and self._lse is not None
        return self._out if self._out.dtype == dtype else self._out.to(dtype), self._lse

    def _merge_pending(self, dtype: torch.dtype) -> None:
        """Merge the pending block into the output, which then has the type ``dtype``."""
        if self._pending is None:
            return
        assert self._out is not None and self._lse is not None
        out, lse, queries = self._pending
        self._pending = None
        if self._out.dtype != dtype:
            old_out, self._out = self._out, torch.empty_like(self._out, dtype=dtype)
        else:
            old_out = self._out
        merge_into(self._out, old_out, self._lse, out, lse, queries)


def merge_into(out: Tensor, old_out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, queries: slice) -> None:
    """Set ``out`` to ``old_out`` with a block's result for ``queries`` merged in, and update ``lse`` in place.

    ``out`` and ``old_out`` (B, S, H, D) may be the same tensor. Each element is rounded once, to the type of ``out``.
    """
    first, last, _ = queries.indices(out.shape[1])
    fused = _fused(out, old_out, block_out)
    if fused is not None:
        fused.merge_into(out, old_out, lse, block_out, as_contiguous(block_lse), first)
        return
    if out is not old_out:
        convert(out[:, :first], old_out[:, :first])
        convert(out[:, last:], old_out[:, last:])
    old, old_lse = old_out[:, first:last].to(lse.dtype), lse[..., first:last]
    weight = torch.sigmoid(block_lse - old_lse).transpose(1, 2).unsqueeze(-1)
    out[:, first:last] = old - weight * (old - block_out)
    old_lse -= functional.logsigmoid(old_lse - block_lse)


def merge_rows(out: Tensor, lse: Tensor, some_out: Tensor, some_lse: Tensor, rows: slice | Tensor) -> None:
    """Merge a result for ``rows`` (a slice, or indices) into out (B, S, H, D) and LSE (B, H, S).

    Rows without keys hold 0 and -inf, in either result; they take the values of the other result.
    """
    old, old_lse = out[:, rows], lse[..., rows]
    # The difference of two values of -inf is NaN.
    weight = torch.sigmoid(some_lse - old_lse.clamp_min(torch.finfo(old_lse.dtype).min)).transpose(1, 2).unsqueeze(-1)
    out[:, rows] = (old + weight * (some_out - old)).to(out.dtype)
    lse[..., rows] = torch.logaddexp(old_lse, some_lse)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add one logit per head, ``sinks`` (H), with value 0, to the softmax of an output (B, S, H, D) and LSE (B, H, S).

    Differentiable. The share of the sink in a row's weight is 1 - sigmoid(lse - sink).
    """
    if sinks.shape != (out.shape[2],):
        raise Unsupported(f"sinks are one logit a head: ({out.shape[2]},), not {tuple(sinks.shape)}")
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    weight = torch.sigmoid(lse - logits).transpose(1, 2).unsqueeze(-1)
    return (out * weight).to(out.dtype), torch.logaddexp(lse, logits)


class Sum:
    """Sum of blocks (B, S, H, D), each for some rows of one tensor; added in at least float32 and rounded once."""

    def __init__(self, like: Tensor, blocks: int = 2) -> None:
        """Prepare a sum of the shape of ``like``; ``blocks``: expected number of blocks.

        Up to two blocks are kept until the end and need no wide total. More blocks are added at once, to free their
        memory.
        """
        self._like, self._most_waiting = like, 2 if blocks <= 2 else 1
        self._total: Tensor | None = None
        self._waiting: list[_Part] = []

    def add(self, block: Tensor, rows: slice = ALL) -> None:
        """Add a block for ``rows``. The block may be overwritten."""
        if self._total is not None:
            accumulate(part(self._total, rows), block)
            return
        self._waiting.append((rows, block))
        if len(self._waiting) > self._most_waiting:
            self._total = self._sum_waiting(wide_type(self._like))

    def result(self, dtype: torch.dtype, rest: Sequence[_Part] = ()) -> Tensor:
        """Return the sum in ``dtype``, including the last blocks, ``rest``."""
        if self._total is None and len(self._waiting) + len(rest) <= 2:
            self._waiting += rest
            return self._sum_waiting(dtype)
        total, self._total = self._sum_waiting(wide_type(self._like)) if self._total is None else self._total, None
        return add_and_cast(total, rest, dtype)

    def _sum_waiting(self, dtype: torch.dtype) -> Tensor:
        """Sum the waiting blocks, in the largest block if it has all rows and the type, else in a new tensor."""
        # Start with the block that has most rows, and add the others in place.
        (rows, first), *others = sorted(self._waiting, key=lambda waiting: -waiting[1].shape[1])
        self._waiting = []
        if first.shape[1] != self._like.shape[1]:
            first = write_rows(torch.empty_like(self._like, dtype=wide_type(self._like)), rows, first)
        elif first.dtype != dtype and others:
            first = add_and_cast(first, [others.pop(0)], dtype)
        for rows, block in others:
            accumulate(part(first, rows), block)
        return first if first.dtype == dtype else first.to(dtype)


def accumulate(total: Tensor, block: Tensor) -> None:
    """Add ``block`` (..., S, H, D) to ``total`` in place, in at least float32 and rounded to the type of ``total``."""
    if not _add_fused(total, total, block):
        total += block


def write_rows(total: Tensor, rows: slice, block: Tensor) -> Tensor:
    """Write ``block`` to ``rows`` of ``total`` (..., S, H, D), and 0 to all other rows; return ``total``."""
    zero_other_rows(total, rows)
    convert(part(total, rows), block)
    return total


def zero_other_rows(total: Tensor, rows: slice) -> None:
    """Write 0 to all rows of ``total`` (..., S, H, D) but ``rows``."""
    first, last, seq = *rows.indices(total.shape[-3])[:2], total.shape[-3]
    for other_rows in (slice(0, first), slice(last, seq)):
        if other_rows.start < other_rows.stop:
            part(total, other_rows).zero_()


def add_and_cast(total: Tensor, parts: Sequence[_Part], dtype: torch.dtype) -> Tensor:
    """Return ``total`` (..., S, H, D) plus blocks in their rows, as a new tensor in ``dtype``.

    Each element is added in at least float32 and rounded once. ``total`` may be overwritten.
    """
    result = torch.empty_like(total, dtype=dtype, memory_format=torch.contiguous_format)
    waiting = sorted(((*rows.indices(total.shape[-3])[:2], block) for rows, block in parts), key=itemgetter(0))
    spans: list[tuple[int, int, Tensor]] = []
    for first, last in pairwise(sorted({0, total.shape[-3], *(bound for span in waiting for bound in span[:2])})):
        rows = slice(first, last)
        while waiting and waiting[0][0] == first:
            spans.append(waiting.pop(0))
        spans = [span for span in spans if first < span[1]]
        pieces = [part(block, slice(first - start, last - start)) for start, _, block in spans]
        # Only rows covered by several blocks need a wide intermediate sum.
        partial_sum = part(total, rows)
        while len(pieces) > 1:
            wide = (
                partial_sum
                if partial_sum.dtype == wide_type(partial_sum)
                else torch.empty_like(partial_sum, dtype=wide_type(partial_sum))
            )
            partial_sum = _sum(partial_sum, pieces.pop(0), wide)
        if pieces:
            _sum(partial_sum, pieces[0], part(result, rows))
        else:
            convert(part(result, rows), partial_sum)
    return result


def _sum(total: Tensor, block: Tensor, out: Tensor) -> Tensor:
    """Write ``total`` + ``block`` to ``out``, rounded once; return ``out``."""
    if not _add_fused(out, total, block):
        # torch adds narrower types in float32, but rounds to the wider of the two types before it converts.
        torch.add(total if out.dtype in (total.dtype, block.dtype) else total.to(wide_type(total)), block, out=out)
    return out


def convert(out: Tensor, block: Tensor) -> None:
    """Copy ``block`` (..., S, H, D) to ``out``, converted to its type."""
    if out.shape[-3] and not _add_fused(out, None, block):
        out.copy_(block)


def _add_fused(out: Tensor, total: Tensor | None, block: Tensor) -> bool:
    """Set ``out`` = ``total`` + ``block`` with one fused kernel if that is faster; return False if nothing was done."""
    if out.numel() < FUSED_FROM or out.dtype == torch.float64:
        return False
    fused = _fused(block)
    return fused is not None and bool(fused.add(out, total, block))


def row_product(dout: Tensor, out: Tensor) -> Tensor:
    """Compute delta = rowsum(dO · O), (B, H, S), in at least float32."""
    fused = _fused(dout, out)
    if fused is not None:
        product: Tensor = fused.row_product(dout, out)
        return product
    wide = wide_type(out)
    return (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).contiguous()


def output_with_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """Compute a replacement for O whose row product with dO is ``delta``: dO · delta / rowsum(dO²), 0 where dO is 0.

    A flash backward pass uses O only for delta = rowsum(dO · O), so it computes the same gradients from this tensor.
    The column where dO is largest is left out and takes what the rounding of the others lacks: where a softmax is
    saturated, gradients are what is left of delta. It is not left out where it is more than half of rowsum(dO²).
    Shapes: dout (B, S, H, D), delta (B, H, S); the result has dout's shape and type.
    """
    fused = _fused(dout)
    if fused is not None:
        replacement: Tensor = fused.output_with_delta(dout, delta)
        return replacement
    dout_f = dout.to(wide_type(dout))
    # Divide each row by its largest element first, because squares of very small numbers would underflow.
    largest, column = dout_f.abs().max(-1, keepdim=True)
    divisor, delta = largest.masked_fill(largest == 0, 1), delta.transpose(1, 2).unsqueeze(-1)
    unit = dout_f / divisor
    squares, sign = unit.square().sum(-1, keepdim=True), unit.gather(-1, column)
    left_out = squares >= 2
    ratio = (delta / divisor / (squares - left_out.to(squares.dtype))).masked_fill(largest == 0, 0)
    scaled = unit.mul_(ratio)
    out = scaled.scatter_(-1, column, scaled.gather(-1, column).masked_fill(left_out, 0)).to(dout.dtype)
    del unit, scaled  # as large as dO in float32
    lacking = delta - (dout_f * out).sum(-1, keepdim=True)
    rest = torch.where(left_out, lacking / divisor * sign, out.gather(-1, column))
    return out.scatter_(-1, column, rest.to(dout.dtype))


def lift_tiny_rows(dout: Tensor, delta: Tensor) -> Tensor:
    """Replace rows of dO that are too small for `output_with_delta` with a row that has only a first element.

    That element is ``delta`` · 2^-100 (fp16: 2^-14). The replacement is the only error. The element enters dV in place
    of the row's own values, and the product with V, which is small compared to ``delta``.
    """
    scale, smallest = (2.0**14, 2.0**-24) if dout.dtype == torch.float16 else (2.0**100, 2.0**-126)
    element = (delta.transpose(1, 2).abs() / scale).clamp_min(smallest).unsqueeze(-1)
    small = (dout.abs().amax(-1, keepdim=True) < element) & (delta != 0).transpose(1, 2).unsqueeze(-1)
    replacement = functional.pad(element.to(dout.dtype), (0, dout.shape[-1] - 1))
    return torch.where(small, replacement, dout)


def _fused(*tensors: Tensor) -> Any:
    """Return the module of fused kernels for contiguous tensors of at most float32; None if there is none."""
    load_kernels = FUSED.get(tensors[0].device.type)
    if load_kernels is None:
        return None
    for tensor in tensors:
        if tensor.dtype == torch.float64 or not tensor.is_contiguous():
            return None
    return load_kernels()


@cache
def _triton_kernels() -> Any:
    """Return the module of Triton kernels; None if triton is not installed."""
    if find_spec("triton") is None:
        return None
    from . import fused

    return fused


FUSED: dict[str, Callable[[], Any]] = {"cuda": _triton_kernels}
"""Functions that return the module of fused kernels, by device type; they return None if there is none. The dry run,
which runs strategies on ``meta`` tensors, adds its own."""


def wide_type(tensor: Tensor) -> torch.dtype:
    """Return the type in which partial results accumulate: float32, or float64 for float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
