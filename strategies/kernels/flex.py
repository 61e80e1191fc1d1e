"""FlexAttention of torch as a kernel: any parts in one call, softcap, any head size. The fallback for every mask.

Which keys a query sees are stretches, one for each of the parts that it is in. They are two tensors of integers that
the compiled kernel reads, so that one compilation does for all masks of as many stretches a query. Which tiles of
`TILE` x `TILE` are to be computed at all, and which of them need no mask, follows from the same stretches in time and
memory of tiles, and not of pairs.

Its backward pass has no argument for an LSE of all blocks. With that of the block alone, L, and the row's of all
blocks, LSE, the weight of the block in its rows is w = exp(L - LSE), and what the block owes is the gradient that
torch's own autograd gives for

    dO · w  through its output, and  rowsum(dO · w · O_block) - w · delta  through its LSE,

at the price of its forward pass again. On a CPU it is dense and not compiled: for checks.

Tiles are shared: a key of another document has weight 0 and no part in a result that is finite, but NaN times 0 is NaN.
A NaN or an infinity in one document may reach tokens of another within a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringprof.strategies.kernels.kernel import Gradients, Kernel
from ringprof.strategies.kernels.merge import row_product
from ringprof.strategies.masks.mask_blocks import AttnRectangle, MaskBlocks

TILE = 128
"""Queries, and keys, of a tile that is computed as one or not at all."""
MOST_COMPILATIONS = 64
"""It compiles anew for head sizes, types, numbers of stretches; beyond torch's own limit it would refuse to."""


class FlexKernel(Kernel):
    """torch.nn.attention.flex_attention with a mask of stretches."""

    name = "flex"
    dense_rows = False
    takes_windows = True
    takes_softcap = True
    several_lengths = True

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
            # Dense there, and so in any type.
            return cls.missing(device)
        if device.type != "cpu" and head_dim < _LEAST_HEAD_DIM:
            return f"takes head_dim from {_LEAST_HEAD_DIM} on, not {head_dim}"
        return super().why_unsupported(device, dtype, head_dim)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return self._alone(q, k, v, scale, _plain(q.shape[1], k.shape[1], causal, q.device))

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        seen = _plain(q.shape[1], k.shape[1], causal, q.device)
        return self._gradients(dout, q, k, v, lse, out, scale, seen)

    def _forward_parts(self, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: MaskBlocks) -> tuple[Tensor, Tensor]:
        return self._alone(q, k, v, scale, _of_parts(parts, q.device))

    def _backward_parts(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, parts: MaskBlocks,
    ) -> Gradients:  # fmt: skip
        return self._gradients(dout, q, k, v, lse, out, scale, _of_parts(parts, q.device))

    def _alone(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Any) -> tuple[Tensor, Tensor]:
        # The mode of autograd is compiled for, and who wants a gradient: one mode here, whoever asks.
        with torch.no_grad():
            return self._call(q.detach(), k.detach(), v.detach(), scale, seen)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Any) -> tuple[Tensor, Tensor]:
        out, lse = _flex(q.is_cuda)(
            *(_alike(x).transpose(1, 2) for x in (q, k, v)), _score_mod(self.softcap), seen, scale
        )
        return out.transpose(1, 2), lse

    def _gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, out: Tensor | None, scale: float, seen: Any
    ) -> Gradients:
        assert out is not None
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            own, own_lse = self._call(leaves[0], leaves[1], leaves[2], scale, seen)
        # A row that sees nothing of the block has an LSE of -inf, and a weight of 0.
        weight = (own_lse.detach() - lse).exp()
        through_out = (dout * weight.transpose(1, 2).unsqueeze(-1)).to(own.dtype)
        # Of the rounded one, so that what is taken off is what the kernel adds.
        through_lse = row_product(through_out, own.detach()) - weight * row_product(dout, out)
        found = torch.autograd.grad([own, own_lse], leaves, [through_out, through_lse.to(own_lse.dtype)])
        return found[0], found[1], found[2]


def _alike(x: Tensor) -> Tensor:
    """``x``, or a copy where it is a part of more: it is compiled for where tensors begin and how they lie."""
    whole = x.is_contiguous() and x.storage_offset() == 0 and x.stride(0) == x[0].numel()
    return x if whole else x.clone(memory_format=torch.contiguous_format)


_LEAST_HEAD_DIM = 16
_LENGTHS = "L['block_mask'].seq_lengths[0],L['block_mask'].seq_lengths[1]"
"""The block's lengths, where the compiler finds them: numbers, which it would else compile for one by one."""
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""Short queries go to the same kernel as all others, and not to the one for decoding."""


@lru_cache(maxsize=64)
def _plain(queries: int, keys: int, causal: bool, device: torch.device) -> Any:
    part = AttnRectangle(0, queries, 0, keys, right=0 if causal and queries > 1 else -1)
    return _of_parts(MaskBlocks((part,), queries, keys), device)


def _of_parts(parts: MaskBlocks, device: torch.device) -> Any:
    """Which keys the queries of a block see, as FlexAttention takes it: a ``BlockMask``, made once."""
    if device not in parts.kernel_cache:
        first, end = stretches(parts)
        # Made on the host: a strategy may ask on one stream and compute on another.
        parts.kernel_cache[device] = _block_mask(first, end, parts.keys, device)
    return parts.kernel_cache[device]


def stretches(parts: MaskBlocks) -> tuple[Tensor, Tensor]:
    """First key and end of the stretches that every query of a block sees: int32 (n, queries), 0 and 0 for none.

    There are 1, 2, 4, ... of them a query: each number is compiled for by itself.
    """
    layers = [batch.parts for batch in parts.batches]
    count = 1 << max(0, len(layers) - 1).bit_length()
    first, end = torch.zeros(2, count, parts.queries, dtype=torch.int32, device="cpu")
    for layer, held in enumerate(layers):
        for part in held:
            place = torch.arange(part.queries, dtype=torch.int32, device="cpu") + (part.keys - part.queries)
            low = torch.zeros_like(place) if part.left < 0 else (place - part.left).clamp_(0, part.keys)
            high = (
                torch.full_like(place, part.keys) if part.right < 0 else (place + part.right + 1).clamp_(0, part.keys)
            )
            first[layer, part.q], end[layer, part.q] = low + part.kv_first, high + part.kv_first
    return first, end


def tiles(first: Tensor, end: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Tiles of which some pair is seen and some not, and tiles that are seen whole: bool (tiles of queries, of keys).

    ``first`` and ``end`` as `stretches` gives them. A tile that ends beyond the last query or key is never whole.
    """
    queries = first.shape[1]
    shape = -(-queries // TILE), -(-keys // TILE)
    there = end > first
    touched = _rows_of_tiles(shape, first // TILE, -(-end // TILE), there)
    inside_first, inside_end = -(-first // TILE), end // TILE
    covered = _rows_of_tiles(shape, inside_first, inside_end, there & (inside_end > inside_first))
    whole = covered == TILE
    return (touched > 0) & ~whole, whole


def _rows_of_tiles(shape: tuple[int, int], first: Tensor, end: Tensor, there: Tensor) -> Tensor:
    """How many rows of each tile of queries have a stretch over each tile of keys, from ``first`` up to ``end``."""
    edges = torch.zeros(shape[0] * (shape[1] + 1), dtype=torch.int32, device=first.device)
    tile = torch.arange(first.shape[1], device=first.device) // TILE * (shape[1] + 1)
    one = there.to(torch.int32).flatten()
    edges.index_add_(0, (tile + first.clamp(max=shape[1])).flatten(), one)
    edges.index_add_(0, (tile + end.clamp(max=shape[1])).flatten(), -one)
    return edges.view(shape[0], shape[1] + 1).cumsum(1)[:, :-1]


def _block_mask(first: Tensor, end: Tensor, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    def listed(found: Tensor) -> tuple[Tensor, Tensor]:
        order = found.to(torch.int32).argsort(dim=1, descending=True, stable=True)
        return found.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    # A single tile would be compiled for by itself: of each kind there are two, of which one may be no tile's.
    partial, whole = (
        pad(found, (0, max(0, 2 - found.shape[1]), 0, max(0, 2 - found.shape[0]))) for found in tiles(first, end, keys)
    )
    pairs = list(zip(first.to(device).unbind(0), end.to(device).unbind(0), strict=True))
    # Not by `from_kv_blocks`, which from torch 2.14 on drops columns that are no tile's.
    (kv_num, kv), (full_kv_num, full_kv) = listed(partial), listed(whole)
    (q_num, q), (full_q_num, full_q) = listed(partial.T.contiguous()), listed(whole.T.contiguous())
    made = BlockMask(
        (first.shape[1], keys), kv_num, kv, full_kv_num, full_kv, q_num, q, full_q_num, full_q,
        BLOCK_SIZE=(TILE, TILE), mask_mod=_mask_mod(pairs),
    ).to(device)  # fmt: skip
    _of_any_size([x for x in made.as_tuple() if isinstance(x, Tensor)], 2)
    _of_any_size([x for pair in pairs for x in pair], 0)
    return made


def _of_any_size(tensors: Iterable[Tensor], first: int, end: int | None = None) -> None:
    """What is compiled with them is to take any size of these dimensions, which follow from a block's lengths."""
    for tensor in tensors:
        for dim in range(first, end or tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _mask_mod(pairs: list[tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = (key >= pairs[0][0][query]) & (key < pairs[0][1][query])
        for low, high in pairs[1:]:
            found = found | ((key >= low[query]) & (key < high[query]))
        return found

    return seen


def _as_it_is(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score


@lru_cache(maxsize=8)
def _score_mod(softcap: float) -> Callable[..., Tensor]:
    if not softcap:
        return _as_it_is

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _flex(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Output (B, H, S, D) and LSE of (B, H, S, D) tensors, by the compiled kernel or the dense operator behind it."""
    return _compiled() if compiled else _dense


def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    function: Any = torch.compile(flex_attention, fullgraph=True)
    settings: Any = torch.compiler.config

    def call(
        q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor], block_mask: Any, scale: float
    ) -> tuple[Tensor, Tensor]:
        _of_any_size((q, k, v), 2, 3)
        # A second softcap would else be a tensor, which the kernel's template refuses.
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
    """torch's own function has no gradients on a CPU; the operator that it calls has, and gives the LSE to base 2."""
    out, lse, *_ = torch.ops.higher_order.flex_attention(q, k, v, score_mod, block_mask.as_tuple(), scale, {}, (), ())
    return out, lse * math.log(2)
