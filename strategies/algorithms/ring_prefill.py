"""Ring prefill with a cache: a chunk of new tokens attends to all cached keys, and causally to itself.

The new tokens are distributed in zigzag chunks, so every rank has the same work in every step. The cached keys are in
contiguous shares, or, with ``kv_chunks``, where earlier chunks of the prompt were computed. Shares may differ by a few
tokens; hops are then filled up to the largest. The ring sends either of these:

    passes=kv    keys and values, cached and new: N-1 hops, each overlapped by a block; outputs stay on their rank
    passes=q     queries: each rank computes the received queries over its own keys, and a final all-to-all returns
                 the partial outputs and LSEs. The cache is not sent
    passes=auto  the one that sends fewer bytes: queries if the cache is long compared to the chunk

Source: Context Parallelism for Scalable Million-Token Inference (arXiv 2411.01783).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringprof.workload.mask import Mask

from ..annotate import ring_step
from ..base import AttentionCall, Context
from ..kernels.merge import Partial, wide_type
from ..masks.cache_layout import CacheLayout, cache_layout_of
from ..masks.layouts import ALL, LAYOUTS, Block
from ..masks.row_routing import RowRouting, routing_of
from ..masks.sharded_mask import ShardedMask, sharded_mask_of
from .cached import Cached, Heads, KeyChunks, attention_over_blocks, block_attention, merge_by_lse

Passes = Literal["auto", "kv", "q"]


class RingPrefill(Cached):
    """Prefill of a chunk of new tokens, in zigzag layout, over a cache in contiguous shares or of earlier chunks."""

    phase = "prefill"
    layout = LAYOUTS["zigzag"]
    PARAMETERS: ClassVar[dict[str, str]] = {"passes": "what the ring sends: kv, q, or (auto) the one with fewer bytes"}

    def __init__(self, context: Context, *, passes: Passes = "auto") -> None:
        super().__init__(context)
        self.parameters = {"passes": passes}
        self.ring = self.comm.ring("kv")
        self.q_ring = self.comm.ring("q")
        self.out_channel = self.comm.collective("out")

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0

    def cache_layout(self, kv_length: int, new_tokens: int, kv_chunks: KeyChunks = None) -> CacheLayout:
        if not isinstance(kv_chunks, tuple):
            cached = LAYOUTS["contiguous"], kv_length - new_tokens
            return cache_layout_of(self.comm.size, (cached, (self.layout, new_tokens)))
        return cache_layout_of(self.comm.size, tuple((self.layout, tokens) for tokens in kv_chunks))

    def query_positions(self, new_tokens: int) -> Tensor:
        return self.layout.positions(new_tokens, self.comm.size, self.comm.rank)

    def heads(self, heads: int, kv_heads: int) -> Heads:
        return Heads(ALL, ALL, ALL)

    def new_tokens(self, q: Tensor) -> int:
        return q.shape[1] * self.comm.size

    def _length(self, q: Tensor, k: Tensor, mask: Mask) -> int:
        return k.shape[1] * self.comm.size

    def compute(
        self, call: AttentionCall, mask: Mask, q: Tensor, k: Tensor, v: Tensor, kv_length: int
    ) -> tuple[Tensor, Tensor]:
        layout = call.cache_layout
        assert layout is not None
        if self.comm.size > 1 and self.passes_queries(layout, q, k, v, mask):
            return self._pass_queries(call, layout, mask, q, k, v)
        # Hops have equal sizes: ranks with fewer keys than others send rows that no block contains.
        missing = max(layout.key_counts) - k.shape[1]
        k, v = (pad(x, (0, 0, 0, 0, 0, missing)) if missing else x for x in (k, v))
        result, routing = Partial(), self._row_routing(layout, mask)
        tour = self.ring.tour([k, v]) if routing is None else routing.tour(self.ring, None, [k, v])
        for step, (kv_rank, kv) in enumerate(tour):
            if routing is None or step == 0:
                blocks = self._blocks(layout, self.comm.rank, kv_rank, mask)
            else:
                blocks = [block for block in (routing.block(self.comm.rank, kv_rank),) if block]
            for block in blocks:
                with ring_step("fwd", step, "block"):
                    partial = block_attention(call, q, kv[0], kv[1], block)
                with ring_step("fwd", step, "merge"):
                    result.merge(*partial, block.q)
        if not q.shape[1]:
            out, lse = attention_over_blocks(call, q, k, v, [], step)
            return out.to(q.dtype), lse
        with ring_step("fwd", step, "merge"):
            return result.result(q.dtype)

    def passes_queries(self, layout: CacheLayout, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> bool:
        """Return whether to send queries and return outputs, instead of sending keys and values."""
        if self.parameters["passes"] != "auto":
            return bool(self.parameters["passes"] == "q")
        rows = q.shape[0] * max(layout.new_counts) * q.shape[2]
        query_bytes = rows * ((q.shape[3] + v.shape[3]) * q.element_size() + torch.finfo(wide_type(q)).bits // 8)
        routing, keys = self._row_routing(layout, mask), max(layout.key_counts)
        sent_keys = keys if routing is None else sum(map(len, routing.inner_slices)) / (self.comm.size - 1)
        key_bytes = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
        return query_bytes < sent_keys * key_bytes

    def _pass_queries(
        self, call: AttentionCall, layout: CacheLayout, mask: Mask, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        queries, rows = q.shape[1], max(layout.new_counts)
        if queries < rows:
            # Hops have equal sizes; the rows that fill them are in no block.
            q = pad(q, (0, 0, 0, 0, 0, rows - queries))
        outs = torch.empty((self.comm.size, *q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
        lses = torch.empty((self.comm.size, q.shape[0], q.shape[2], rows), dtype=wide_type(q), device=q.device)
        for step, (q_rank, (received_q,)) in enumerate(self.q_ring.tour([q])):
            blocks = self._blocks(layout, q_rank, self.comm.rank, mask)
            out, lse = attention_over_blocks(call, received_q, k, v, blocks, step)
            outs[q_rank].copy_(out)
            lses[q_rank].copy_(lse)
        hops = [self.out_channel.all_to_all(x) for x in (outs, lses)]
        outs, lses = (hop.wait()[0] for hop in hops)
        with ring_step("fwd", self.comm.size, "merge"):
            return merge_by_lse(outs[:, :, :queries], lses[..., :queries], q.dtype)

    def _blocks(self, layout: CacheLayout, q_rank: int, kv_rank: int, mask: Mask) -> list[Block]:
        """Return the blocks of ``q_rank``'s new tokens with ``kv_rank``'s keys: cached keys first, then new ones."""
        if not mask.plain:
            block = self._sharded_mask_of_cache(layout, mask).block(q_rank, kv_rank)
            return [] if block is None else [block]
        (early, late), (kv_early, kv_late) = (map(len, layout.ranges(rank, new=True)) for rank in (q_rank, kv_rank))
        queries, keys = early + late, layout.key_counts[kv_rank]
        cached = keys - kv_early - kv_late
        # Of tensors with as many rows as the largest share, fewer are of this rank.
        rows = ALL if queries == max(layout.new_counts) else slice(0, queries)
        columns = ALL if keys == max(layout.key_counts) else slice(0, keys)
        if not mask.causal:
            blocks = [Block(rows, columns)]
        elif kv_rank == q_rank:
            blocks = [Block(rows, slice(0, cached)), Block(rows, slice(cached, keys), causal=True)]
        elif kv_rank < q_rank:
            blocks = [Block(rows, slice(0, cached + kv_early))]
        else:
            blocks = [Block(slice(early, queries), columns), Block(slice(0, early), slice(0, cached))]
        return [x for x in blocks if range(queries)[x.q] and range(keys)[x.kv]]

    def _sharded_mask_of_cache(self, layout: CacheLayout, mask: Mask) -> ShardedMask:
        return sharded_mask_of(mask, self.layout, self.comm.size, layout.kv_length, layout)

    def _row_routing(self, layout: CacheLayout, mask: Mask) -> RowRouting | None:
        """Return the rows of keys and values to send; None if all rows are sent."""
        return None if mask.plain else routing_of(self._sharded_mask_of_cache(layout, mask), self.comm.size)
