"""Blocks of several rectangles with varlen kernels, which take packed sequences of any length in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..masks.mask_blocks import Batch, Lengths, MaskBlocks
from .kernel import Gradients, Kernel
from .merge import merge_into, merge_rows, wide_type

_Call = Callable[..., Any]
"""Function of a kernel over packed rows: q, dout and out (T, H, D), k and v (T', Hkv, D), LSE (H, T)."""


class VarlenKernel(Kernel):
    """Base class of kernels that compute packed sequences of any length in one call."""

    varlen = True

    @abstractmethod
    def _varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute out (T, H, D) and LSE (H, T) of packed rows: q (T, H, D), k and v (T', Hkv, D)."""

    @abstractmethod
    def _varlen_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Lengths, batch: Batch,
        scale: float,
    ) -> Gradients: ...  # fmt: skip

    def _forward_parts(self, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: MaskBlocks) -> tuple[Tensor, Tensor]:
        return forward(self._varlen_forward, q, k, v, scale, parts)

    def _backward_parts(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, parts: MaskBlocks, into: Gradients | None = None,
    ) -> Gradients:  # fmt: skip
        assert out is not None
        return backward(self._varlen_backward, dout, q, k, v, lse, out, scale, parts, into)


def forward(call: _Call, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: MaskBlocks) -> tuple[Tensor, Tensor]:
    """Compute output and LSE of ``parts``, as `Kernel.forward` returns them.

    ``call(q, k, v, lengths, batch, scale)`` computes out and LSE of one batch of packed rows.
    """
    out = lse = None
    wide, covered = wide_type(q) if parts.share_queries else q.dtype, False
    for batch in parts.batches:
        lengths, rows = _lengths(batch, q, k)
        packed = (_pack(x, index) for x, index in zip((q, k, v), (lengths.q, lengths.kv, lengths.kv), strict=True))
        some_out, some_lse = call(*packed, lengths, batch, scale)
        if len(parts.batches) == 1 and some_out.shape[0] == rows:
            return some_out.view(*q.shape[:3], v.shape[3]), _unpack_lse(some_lse, q)
        if out is None or lse is None:
            covered = some_out.shape[0] == rows
            out = some_out.to(wide) if covered else q.new_zeros((rows, *some_out.shape[1:]), dtype=wide)
            lse = some_lse if covered else q.new_full((q.shape[2], rows), float("-inf"), dtype=some_lse.dtype)
            if covered:
                continue
        if covered and isinstance(lengths.q, slice):
            merge_into(out[None], out[None], lse[None], some_out[None], some_lse[None], lengths.q)
        else:
            merge_rows(out[None], lse[None], some_out[None], some_lse[None], lengths.q)
    assert out is not None and lse is not None
    return out.view(*q.shape[:3], v.shape[3]), _unpack_lse(lse, q)


def backward(
    call: _Call,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    out: Tensor,
    scale: float,
    parts: MaskBlocks,
    into: Gradients | None = None,
) -> Gradients:
    """Compute the gradients of ``parts``, as `Kernel.backward` returns them.

    ``call(dout, q, k, v, out, lse, lengths, batch, scale)`` computes those of one batch of packed rows. With ``into``
    it takes them as a keyword, too, and writes a single batch that covers all rows of one batch entry there.
    """
    by_head = lse.transpose(0, 1).flatten(1)
    totals: list[Tensor] = []
    for batch in parts.batches:
        lengths, rows = _lengths(batch, q, k)
        dout_, q_, out_ = (_pack(x, lengths.q) for x in (dout, q, out))
        k_, v_ = (_pack(x, lengths.kv) for x in (k, v))
        some_lse = by_head[:, lengths.q].contiguous()
        covers_all = len(parts.batches) == 1 and len(q_) == rows and len(k_) == k.shape[0] * k.shape[1]
        if covers_all and into is not None and q.shape[0] == 1:
            call(dout_, q_, k_, v_, out_, some_lse, lengths, batch, scale, into=[x.squeeze(0) for x in into])
            return into
        gradients = call(dout_, q_, k_, v_, out_, some_lse, lengths, batch, scale)
        if covers_all:
            return tuple(x.view(like.shape) for x, like in zip(gradients, (q, k, v), strict=True))
        totals = totals or _zeros(q, k, v, parts)
        for total, index, gradient in zip(totals, (lengths.q, lengths.kv, lengths.kv), gradients, strict=True):
            # A row occurs only once in one batch of parts.
            total[index] += gradient
    dq, dk, dv = (total.view(like.shape) for total, like in zip(totals, (q, k, v), strict=True))
    return dq, dk, dv


def _zeros(q: Tensor, k: Tensor, v: Tensor, parts: MaskBlocks) -> list[Tensor]:
    """Allocate zeros for packed dq, dk and dv, in a wide type where several parts add to the same rows."""
    shared = parts.share_queries, parts.share_keys, parts.share_keys
    return [
        torch.zeros_like(x.flatten(0, 1), dtype=wide_type(x) if wide else x.dtype)
        for x, wide in zip((q, k, v), shared, strict=True)
    ]


def _lengths(batch: Batch, q: Tensor, k: Tensor) -> tuple[Lengths, int]:
    """Return the lengths of a batch on the tensors' device, and the number of packed query rows."""
    return batch.lengths_on(q.device, q.shape[0], q.shape[1], k.shape[1]), q.shape[0] * q.shape[1]


def _pack(x: Tensor, rows: Tensor | slice) -> Tensor:
    """Pack some rows of a tensor: (B, S, H, D) -> (T, H, D)."""
    flat = x.flatten(0, 1)
    return flat[rows] if isinstance(rows, slice) else flat.index_select(0, rows)


def _unpack_lse(lse: Tensor, q: Tensor) -> Tensor:
    """Unpack the LSE: (H, B · S) -> (B, H, S)."""
    return lse.view(q.shape[2], q.shape[0], q.shape[1]).transpose(0, 1).contiguous()
