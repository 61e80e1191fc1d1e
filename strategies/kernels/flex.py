"""Kernel of torch's FlexAttention: any mask in one call, softcap, any head size. It is the fallback for every mask.

The keys that a query sees are ranges, one for each rectangle of the mask that contains the query. The compiled kernel
reads them from two tensors of integers, so one compilation serves all masks with the same number of ranges per query.
The same ranges determine which tiles of `TILE` x `TILE` are computed, and which of them need no mask. Time and memory
for this grow with the number of tiles, not of query-key pairs.

FlexAttention's backward pass takes no LSE over all blocks. Let L be the LSE of the block alone and LSE that of the row
over all blocks. The weight of the block in its rows is then w = exp(L - LSE), and the gradient of the block is what
torch's own autograd computes for

    dO · w  through its output, and  rowsum(dO · w · O_block) - w · delta  through its LSE,

which costs another forward pass. On a CPU, the kernel is dense and not compiled, for checks only.

Documents may share a tile. A key of another document has weight 0 and does not change a finite result, but NaN times 0
is NaN: a NaN or an infinity in one document may reach tokens of another document in the same tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks.mask_blocks import AttnRectangle, MaskBlocks
from .kernel import Gradients, Kernel
from .merge import row_product

TILE = 128
"""Number of queries, and of keys, of a tile, the unit that is computed or skipped."""
MOST_COMPILATIONS = 64
"""Limit on compilations, one per head size, type and number of ranges; torch's own limit is too low."""


class FlexKernel(Kernel):
    """Kernel of torch.nn.attention.flex_attention, with a mask given as ranges of keys per query."""

    name = "flex"
    dense_rows = False
    takes_windows = True
    takes_softcap = True
    varlen = True
    compiles_by_heads = True

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    head_dim_step = 1

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        try:
            from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401 - torch 2.9 and later
        except ImportError:
            return "needs torch 2.9 or later"
        return None

    @classmethod
    def why_unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type == "cpu" and dtype == torch.float64:
            # The CPU computes densely, in any type.
            return cls.missing(device)
        if device.type != "cpu" and head_dim < _LEAST_HEAD_DIM:
            return f"takes head_dim from {_LEAST_HEAD_DIM} on, not {head_dim}"
        return super().why_unsupported(device, dtype, head_dim)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return self._forward_masked(q, k, v, scale, _simple_mask(q.shape[1], k.shape[1], causal, q.device))

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        block_mask = _simple_mask(q.shape[1], k.shape[1], causal, q.device)
        return self._gradients(dout, q, k, v, lse, out, scale, block_mask)

    def _forward_parts(self, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: MaskBlocks) -> tuple[Tensor, Tensor]:
        return self._forward_masked(q, k, v, scale, _mask_of_parts(parts, q.device))

    def _backward_parts(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, parts: MaskBlocks,
    ) -> Gradients:  # fmt: skip
        return self._gradients(dout, q, k, v, lse, out, scale, _mask_of_parts(parts, q.device))

    def _forward_masked(self, q: Tensor, k: Tensor, v: Tensor, scale: float, block_mask: Any) -> tuple[Tensor, Tensor]:
        # torch compiles separately for each autograd mode and set of inputs that need gradients. Use a single mode.
        with torch.no_grad():
            return self._call(q.detach(), k.detach(), v.detach(), scale, block_mask)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, scale: float, block_mask: Any) -> tuple[Tensor, Tensor]:
        out, lse = _flex(q.is_cuda)(
            *(_standard_layout(x).transpose(1, 2) for x in (q, k, v)), _score_mod(self.softcap), block_mask, scale
        )
        return out.transpose(1, 2), lse

    def _gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        out: Tensor | None,
        scale: float,
        block_mask: Any,
    ) -> Gradients:
        assert out is not None
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            block_out, block_lse = self._call(leaves[0], leaves[1], leaves[2], scale, block_mask)
        # A row that sees nothing of the block has an LSE of -inf, and a weight of 0.
        weight = (block_lse.detach() - lse).exp()
        grad_out = (dout * weight.transpose(1, 2).unsqueeze(-1)).to(block_out.dtype)
        # Use the rounded gradient, so that the amount subtracted equals the amount that the kernel adds.
        grad_lse = row_product(grad_out, block_out.detach()) - weight * row_product(dout, out)
        gradients = torch.autograd.grad([block_out, block_lse], leaves, [grad_out, grad_lse.to(block_lse.dtype)])
        return gradients[0], gradients[1], gradients[2]


def _standard_layout(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if it is a view of a larger tensor: each offset and stride would need a compilation."""
    standard = x.is_contiguous() and x.storage_offset() == 0 and x.stride(0) == x[0].numel()
    return x if standard else x.clone(memory_format=torch.contiguous_format)


_LEAST_HEAD_DIM = 16
_LENGTHS = "L['block_mask'].seq_lengths[0],L['block_mask'].seq_lengths[1]"
"""Sources of the block's lengths for the compiler, which marks them dynamic; else it would compile for every length."""
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""Kernel options that send short queries to the general kernel, not to the decoding kernel."""


@lru_cache(maxsize=64)
def _simple_mask(queries: int, keys: int, causal: bool, device: torch.device) -> Any:
    """Return the ``BlockMask`` of a full or a causal block."""
    rectangle = AttnRectangle(0, queries, 0, keys, right=0 if causal and queries > 1 else -1)
    return _mask_of_parts(MaskBlocks((rectangle,), queries, keys), device)


def _mask_of_parts(parts: MaskBlocks, device: torch.device) -> Any:
    """Return FlexAttention's ``BlockMask`` for an attention call; cached in ``parts``, per device."""
    if device not in parts.kernel_cache:
        with torch.inference_mode(False):
            first, end = stretches(parts)
            # Build it on the host: a strategy may build it on one stream and use it on another.
            parts.kernel_cache[device] = _block_mask(first, end, parts.keys, device)
    return parts.kernel_cache[device]


def stretches(parts: MaskBlocks) -> tuple[Tensor, Tensor]:
    """Return the first keys and the ends of the ranges that each query of a block sees: int32 (n, queries), 0 and 0 if
    none.

    n is a power of two, because each number of ranges is compiled separately.
    """
    layers = [batch.parts for batch in parts.batches]
    count = 1 << max(0, len(layers) - 1).bit_length()
    first, end = torch.zeros(2, count, parts.queries, dtype=torch.int32, device="cpu")
    for layer, layer_parts in enumerate(layers):
        for part in layer_parts:
            position = torch.arange(part.queries, dtype=torch.int32, device="cpu") + (part.keys - part.queries)
            low = torch.zeros_like(position) if part.left < 0 else (position - part.left).clamp_(0, part.keys)
            high = (
                torch.full_like(position, part.keys)
                if part.right < 0
                else (position + part.right + 1).clamp_(0, part.keys)
            )
            first[layer, part.q], end[layer, part.q] = low + part.kv_first, high + part.kv_first
    return first, end


def tiles(first: Tensor, end: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return partly visible tiles and fully visible tiles: two bool masks (tiles of queries, tiles of keys).

    ``first`` and ``end`` come from `stretches`. A tile that ends beyond the last query or key never counts as full.
    """
    queries = first.shape[1]
    shape = -(-queries // TILE), -(-keys // TILE)
    nonempty = end > first
    touched = _count_rows(shape, first // TILE, -(-end // TILE), nonempty)
    inside_first, inside_end = -(-first // TILE), end // TILE
    covered = _count_rows(shape, inside_first, inside_end, nonempty & (inside_end > inside_first))
    full = covered == TILE
    return (touched > 0) & ~full, full


def _count_rows(shape: tuple[int, int], first: Tensor, end: Tensor, nonempty: Tensor) -> Tensor:
    """Count the rows of each tile of queries that have a range over each tile of keys, from ``first`` up to ``end``."""
    edges = torch.zeros(shape[0] * (shape[1] + 1), dtype=torch.int32, device=first.device)
    tile = torch.arange(first.shape[1], device=first.device) // TILE * (shape[1] + 1)
    increment = nonempty.to(torch.int32).flatten()
    edges.index_add_(0, (tile + first.clamp(max=shape[1])).flatten(), increment)
    edges.index_add_(0, (tile + end.clamp(max=shape[1])).flatten(), -increment)
    return edges.view(shape[0], shape[1] + 1).cumsum(1)[:, :-1]


def _block_mask(first: Tensor, end: Tensor, keys: int, device: torch.device) -> Any:
    """Build the ``BlockMask`` of ranges of keys."""
    from torch.nn.attention.flex_attention import BlockMask

    def to_lists(tile_mask: Tensor) -> tuple[Tensor, Tensor]:
        order = tile_mask.to(torch.int32).argsort(dim=1, descending=True, stable=True)
        return tile_mask.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    # Pad to at least two tiles per dimension, because a single tile would be compiled separately.
    partial, full = (
        pad(tile_mask, (0, max(0, 2 - tile_mask.shape[1]), 0, max(0, 2 - tile_mask.shape[0])))
        for tile_mask in tiles(first, end, keys)
    )
    pairs = list(zip(first.to(device).unbind(0), end.to(device).unbind(0), strict=True))
    # Do not use `from_kv_blocks`, which from torch 2.14 on drops the padding.
    (kv_num, kv), (full_kv_num, full_kv) = to_lists(partial), to_lists(full)
    (q_num, q), (full_q_num, full_q) = to_lists(partial.T.contiguous()), to_lists(full.T.contiguous())
    mask = BlockMask(
        (first.shape[1], keys), kv_num, kv, full_kv_num, full_kv, q_num, q, full_q_num, full_q,
        BLOCK_SIZE=(TILE, TILE), mask_mod=_mask_mod(pairs),
    ).to(device)  # fmt: skip
    _mark_dynamic([x for x in mask.as_tuple() if isinstance(x, Tensor)], 2)
    _mark_dynamic([x for pair in pairs for x in pair], 0)
    return mask


def _mark_dynamic(tensors: Iterable[Tensor], first: int, end: int | None = None) -> None:
    """Mark dimensions of tensors as dynamic, so that one compilation serves blocks of any length."""
    for tensor in tensors:
        for dim in range(first, end or tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _mask_mod(pairs: list[tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Return the mask function of ranges, given as pairs of first key and end per query."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (key >= pairs[0][0][query]) & (key < pairs[0][1][query])
        for low, high in pairs[1:]:
            visible = visible | ((key >= low[query]) & (key < high[query]))
        return visible

    return seen


def _unchanged(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score


@lru_cache(maxsize=8)
def _score_mod(softcap: float) -> Callable[..., Tensor]:
    """Return the score function of a softcap; cached, because torch compiles for each function object."""
    if not softcap:
        return _unchanged

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _flex(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function for output (B, H, S, D) and LSE: the compiled kernel, or the dense operator behind it."""
    return _compiled() if compiled else _dense


def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile FlexAttention, and return a function that calls it with our options."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    function: Any = torch.compile(flex_attention, fullgraph=True)
    settings: Any = torch.compiler.config

    def call(
        q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor], block_mask: Any, scale: float
    ) -> tuple[Tensor, Tensor]:
        _mark_dynamic((q, k, v), 2, 3)
        # Without `specialize_float`, a second softcap becomes a tensor, which the kernel's template rejects.
        limits = torch._dynamo.config.patch(recompile_limit=MOST_COMPILATIONS, specialize_float=True)
        with limits, settings.patch(dynamic_sources=_LENGTHS):
            out, aux = function(
                q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
                return_aux=AuxRequest(lse=True), kernel_options=_OPTIONS,
            )  # fmt: skip
        return out, aux.lse

    return call


def _dense(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor], block_mask: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """Call the operator behind FlexAttention.

    torch's function has no CPU gradients; the operator does, with a base-2 LSE.
    """
    out, lse, *_ = torch.ops.higher_order.flex_attention(q, k, v, score_mod, block_mask.as_tuple(), scale, {}, (), ())
    return out, lse * math.log(2)
