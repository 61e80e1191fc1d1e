"""What runs between blocks: the online-softmax merge, the sums of gradients, and the row term delta.

For two partial results a and b of the same queries, each normalised over its own keys:

    lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) · out_a + exp(lse_b - lse) · out_b

computed in the form that cannot overflow: with w = sigmoid(lse_b - lse_a), out = out_a - w · (out_a - out_b) and
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

from ringprof.strategies.errors import Unsupported
from ringprof.strategies.masks.layouts import ALL, as_contiguous, part

FUSED_FROM = 2**23
"""Elements from which a Triton kernel adds faster than torch: below, launching it costs the host more than it saves."""

_Part = tuple[slice, Tensor]
"""A block, and the rows of the sequence that it lies in."""


class Partial:
    """The running result of one rank's queries. Between blocks it has at least float32; it is rounded once, at the end.

    The last block waits for the next one, or for the end: with it the output is written in its final type at once.
    """

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._last: tuple[Tensor, Tensor, slice] | None = None

    def merge(self, out: Tensor, lse: Tensor, queries: slice = ALL) -> None:
        """Add a block's result for ``queries``, out (B, S, H, D) and lse (B, H, S); the first covers all of them.

        Both are used up: what they hold may be written over.
        """
        if self._out is None:
            self._out, self._lse = as_contiguous(out), as_contiguous(lse)
            return
        self._take(wide_type(self._out))
        self._last = out, lse, queries

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The output in ``dtype`` and the LSE, in at least float32."""
        self._take(dtype)
        assert self._out is not None and self._lse is not None
        return self._out if self._out.dtype == dtype else self._out.to(dtype), self._lse

    def _take(self, dtype: torch.dtype) -> None:
        if self._last is None:
            return
        assert self._out is not None and self._lse is not None
        out, lse, queries = self._last
        self._last = None
        if self._out.dtype != dtype:
            before, self._out = self._out, torch.empty_like(self._out, dtype=dtype)
        else:
            before = self._out
        merge_into(self._out, before, self._lse, out, lse, queries)


def merge_into(out: Tensor, before: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, queries: slice) -> None:
    """``out`` = ``before`` with a block's result for ``queries`` merged in; ``lse`` in place.

    ``out`` and ``before`` (B, S, H, D) are one tensor or two. Each element is rounded once, to the type of ``out``.
    """
    first, last, _ = queries.indices(out.shape[1])
    fused = _fused(out, before, block_out)
    if fused is not None:
        fused.merge_into(out, before, lse, block_out, as_contiguous(block_lse), first)
        return
    if out is not before:
        convert(out[:, :first], before[:, :first])
        convert(out[:, last:], before[:, last:])
    own, mine = before[:, first:last].to(lse.dtype), lse[..., first:last]
    weight = torch.sigmoid(block_lse - mine).transpose(1, 2).unsqueeze(-1)
    out[:, first:last] = own - weight * (own - block_out)
    mine -= functional.logsigmoid(mine - block_lse)


def merge_rows(out: Tensor, lse: Tensor, some_out: Tensor, some_lse: Tensor, rows: slice | Tensor) -> None:
    """Merge a result for ``rows`` (a slice, or indices) into out (B, S, H, D) and LSE (B, H, S).

    Rows without a key so far hold 0 and -inf, on either side: they take the other's as it is.
    """
    own, mine = out[:, rows], lse[..., rows]
    # Of two that are -inf the difference is no number.
    weight = torch.sigmoid(some_lse - mine.clamp_min(torch.finfo(mine.dtype).min)).transpose(1, 2).unsqueeze(-1)
    out[:, rows] = (own + weight * (some_out - own)).to(out.dtype)
    lse[..., rows] = torch.logaddexp(mine, some_lse)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, S, H, D) and LSE (B, H, S) of a softmax with one more logit a head, ``sinks`` (H), of value 0.

    Differentiable: what the sink takes of a row's weight is 1 - sigmoid(lse - sink).
    """
    if sinks.shape != (out.shape[2],):
        raise Unsupported(f"sinks are one logit a head: ({out.shape[2]},), not {tuple(sinks.shape)}")
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    kept = torch.sigmoid(lse - logits).transpose(1, 2).unsqueeze(-1)
    return (out * kept).to(out.dtype), torch.logaddexp(lse, logits)


class Sum:
    """A sum of blocks (B, S, H, D), each in some rows of one tensor: added in at least float32, rounded once."""

    def __init__(self, like: Tensor, blocks: int = 2) -> None:
        """``blocks`` are expected. Two wait for the end and need no wide total; of more none waits longer than it must,
        for the total takes their place in memory."""
        self._like, self._wait = like, 2 if blocks <= 2 else 1
        self._total: Tensor | None = None
        self._waiting: list[_Part] = []

    def add(self, block: Tensor, rows: slice = ALL) -> None:
        """Add a block. It is used up: what it holds may be written over."""
        if self._total is not None:
            accumulate(part(self._total, rows), block)
            return
        self._waiting.append((rows, block))
        if len(self._waiting) > self._wait:
            self._total = self._summed(wide_type(self._like))

    def result(self, dtype: torch.dtype, rest: Sequence[_Part] = ()) -> Tensor:
        """The sum in ``dtype``, with the last blocks, ``rest``, added."""
        if self._total is None and not rest:
            return self._summed(dtype)
        total, self._total = self._summed(wide_type(self._like)) if self._total is None else self._total, None
        return settled(total, rest, dtype)

    def _summed(self, dtype: torch.dtype) -> Tensor:
        """What waits, in a new tensor, or in the first block's where that has all rows and the type."""
        # That which has most rows: others are added in its place.
        (rows, first), *others = sorted(self._waiting, key=lambda waiting: -waiting[1].shape[1])
        self._waiting = []
        if first.shape[1] != self._like.shape[1]:
            first = started(torch.empty_like(self._like, dtype=wide_type(self._like)), rows, first)
        elif first.dtype != dtype and others:
            first = settled(first, [others.pop(0)], dtype)
        for rows, block in others:
            accumulate(part(first, rows), block)
        return first if first.dtype == dtype else first.to(dtype)


def accumulate(total: Tensor, block: Tensor) -> None:
    """``total += block`` (..., S, H, D), added in at least float32 and kept in the type of ``total``."""
    if not _added(total, total, block):
        total += block


def started(total: Tensor, rows: slice, block: Tensor) -> Tensor:
    """``total`` (..., S, H, D), with ``block`` written in ``rows`` of the sequence and 0 elsewhere."""
    if rows != ALL:
        first, last, _ = rows.indices(total.shape[-3])
        for around in (slice(0, first), slice(last, total.shape[-3])):
            if around.start < around.stop:
                part(total, around).zero_()
    convert(part(total, rows), block)
    return total


def settled(total: Tensor, parts: Sequence[_Part], dtype: torch.dtype) -> Tensor:
    """A new tensor (..., S, H, D) in ``dtype``: ``total`` plus some blocks, each in its rows; ``total`` is used up.

    Each element is added in at least float32 and rounded once.
    """
    result = torch.empty_like(total, dtype=dtype, memory_format=torch.contiguous_format)
    waiting = sorted(((*rows.indices(total.shape[-3])[:2], block) for rows, block in parts), key=itemgetter(0))
    spans: list[tuple[int, int, Tensor]] = []
    for first, last in pairwise(sorted({0, total.shape[-3], *(at for span in waiting for at in span[:2])})):
        rows = slice(first, last)
        while waiting and waiting[0][0] == first:
            spans.append(waiting.pop(0))
        spans = [span for span in spans if first < span[1]]
        here = [part(block, slice(first - begin, last - begin)) for begin, _, block in spans]
        # Only what several blocks share has a wide sum.
        own = part(total, rows)
        while len(here) > 1:
            wide = own if own.dtype == wide_type(own) else torch.empty_like(own, dtype=wide_type(own))
            own = _sum(own, here.pop(0), wide)
        if here:
            _sum(own, here[0], part(result, rows))
        else:
            convert(part(result, rows), own)
    return result


def _sum(total: Tensor, block: Tensor, out: Tensor) -> Tensor:
    if not _added(out, total, block):
        # torch adds in float32 what is narrower, but rounds to the wider of the two types before it converts.
        torch.add(total if out.dtype in (total.dtype, block.dtype) else total.to(wide_type(total)), block, out=out)
    return out


def convert(out: Tensor, block: Tensor) -> None:
    """``out`` = ``block`` (..., S, H, D), in the type of ``out``."""
    if out.shape[-3] and not _added(out, None, block):
        out.copy_(block)


def _added(out: Tensor, total: Tensor | None, block: Tensor) -> bool:
    """``out`` = ``total`` + ``block`` by one kernel, where that pays; False where nothing was done."""
    if out.numel() < FUSED_FROM or out.dtype == torch.float64:
        return False
    fused = _fused(block)
    return fused is not None and bool(fused.add(out, total, block))


def row_product(dout: Tensor, out: Tensor) -> Tensor:
    """delta = rowsum(dO · O), (B, H, S), in at least float32."""
    fused = _fused(dout, out)
    if fused is not None:
        product: Tensor = fused.row_product(dout, out)
        return product
    wide = wide_type(out)
    return (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).contiguous()


def output_with_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """A stand-in for O whose row product with dO is ``delta``: dO · delta / rowsum(dO²), 0 where dO is 0.

    A flash backward pass uses O for nothing but delta = rowsum(dO · O), so it computes the same gradients with this.
    Shapes: dout (B, S, H, D), delta (B, H, S); the result has dout's shape and type.
    """
    fused = _fused(dout)
    if fused is not None:
        stand_in: Tensor = fused.output_with_delta(dout, delta)
        return stand_in
    dout_f = dout.to(wide_type(dout))
    # Squares of very small numbers would vanish: a row is divided by its largest first.
    largest = dout_f.abs().amax(-1, keepdim=True)
    unit = dout_f / largest.masked_fill(largest == 0, 1)
    ratio = delta.transpose(1, 2).unsqueeze(-1) / largest / unit.square().sum(-1, keepdim=True)
    return (unit * ratio.masked_fill(largest == 0, 0)).to(dout.dtype)


def rows_that_carry(dout: Tensor, delta: Tensor) -> Tensor:
    """dO, with a first element in those rows that are too small for `output_with_delta` to give them ``delta``.

    That element is ``delta`` · 2^-100 (fp16: 2^-14). It is the only error: it enters dV in place of the row's own, and
    the product with V, which stands beside ``delta`` itself.
    """
    reach, least = (2.0**14, 2.0**-24) if dout.dtype == torch.float16 else (2.0**100, 2.0**-126)
    element = (delta.transpose(1, 2).abs() / reach).clamp_min(least).unsqueeze(-1)
    small = (dout.abs().amax(-1, keepdim=True) < element) & (delta != 0).transpose(1, 2).unsqueeze(-1)
    alone = functional.pad(element.to(dout.dtype), (0, dout.shape[-1] - 1))
    return torch.where(small, alone, dout)


def _fused(*tensors: Tensor) -> Any:
    """What does it in one kernel, of `FUSED`, for dense tensors of at most float32; None where nothing does."""
    find = FUSED.get(tensors[0].device.type)
    if find is None:
        return None
    for tensor in tensors:
        if tensor.dtype == torch.float64 or not tensor.is_contiguous():
            return None
    return find()


@cache
def _triton_kernels() -> Any:
    if find_spec("triton") is None:
        return None
    from ringprof.strategies.kernels import fused

    return fused


FUSED: dict[str, Callable[[], Any]] = {"cuda": _triton_kernels}
"""What computes in one kernel each, by the type of device; it gives None where it cannot. A planner that runs
strategies on ``meta`` tensors adds its own."""


def wide_type(tensor: Tensor) -> torch.dtype:
    """The type that partial results accumulate in: float32, or float64 for float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
