"""Ring prefill with a cache: a chunk of new tokens attends to all cached keys, and causally to itself.

The new tokens are distributed in zigzag chunks, the cached keys in equal parts, so every rank has the same work in
every step. The ring sends either of these:

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

from ringprof.workload.mask import Mask

from ..annotate import ring_step
from ..base import AttentionCall, Context, Shape
from ..kernels.merge import Partial, wide_type
from ..masks.layouts import ALL, LAYOUTS, Block
from ..masks.row_routing import RowRouting, routing_of
from ..masks.sharded_mask import ShardedMask, sharded_mask_of
from .cached import Cached, Heads, attention_over_blocks, block_attention, merge_by_lse

Passes = Literal["auto", "kv", "q"]


class RingPrefill(Cached):
    """Prefill of zigzag chunks of new tokens over a cache in equal parts."""

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

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        reason = super().why_unsupported(shape, size, **params)
        cached = 0 if shape.kv_length is None else shape.kv_length - shape.seq
        if reason is None and cached % size:
            return f"{size} ranks hold even shares of the cache: {cached} cached tokens are none"
        return reason

    def key_positions(self, kv_length: int, new_tokens: int) -> Tensor:
        cached = kv_length - new_tokens
        own_cached = LAYOUTS["contiguous"].positions(cached, self.comm.size, self.comm.rank)
        return torch.cat([own_cached, cached + self.query_positions(new_tokens)])

    def key_count(self, kv_length: int, new_tokens: int) -> int:
        return (kv_length - new_tokens) // self.comm.size + len(self.query_positions(new_tokens))

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
        if self.comm.size > 1 and self.passes_queries(q, k, v, mask):
            return self._pass_queries(call, mask, q, k, v)
        result, routing = Partial(), self._row_routing(q, k, mask)
        tour = self.ring.tour([k, v]) if routing is None else routing.tour(self.ring, None, [k, v])
        for step, (kv_rank, kv) in enumerate(tour):
            if routing is None or step == 0:
                blocks = self._blocks(self.comm.rank, kv_rank, q.shape[1], k.shape[1], mask)
            else:
                blocks = [block for block in (routing.block(self.comm.rank, kv_rank),) if block]
            for block in blocks:
                with ring_step("fwd", step, "block"):
                    partial = block_attention(call, q, kv[0], kv[1], block)
                with ring_step("fwd", step, "merge"):
                    result.merge(*partial, block.q)
        with ring_step("fwd", step, "merge"):
            return result.result(q.dtype)

    def passes_queries(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> bool:
        """Return whether to send queries and return outputs, instead of sending keys and values."""
        if self.parameters["passes"] != "auto":
            return bool(self.parameters["passes"] == "q")
        rows = q[..., 0].numel()
        query_bytes = rows * ((q.shape[3] + v.shape[3]) * q.element_size() + torch.finfo(wide_type(q)).bits // 8)
        routing = self._row_routing(q, k, mask)
        share = 1.0 if routing is None else sum(map(len, routing.inner_slices)) / (k.shape[1] * (self.comm.size - 1))
        return query_bytes < share * (k.numel() + v.numel()) * k.element_size()

    def _pass_queries(self, call: AttentionCall, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        batch, rows, heads, _ = q.shape
        outs = torch.empty((self.comm.size, *q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
        lses = torch.empty((self.comm.size, batch, heads, rows), dtype=wide_type(q), device=q.device)
        for step, (q_rank, (received_q,)) in enumerate(self.q_ring.tour([q])):
            blocks = self._blocks(q_rank, self.comm.rank, rows, k.shape[1], mask)
            out, lse = attention_over_blocks(call, received_q, k, v, blocks, step)
            outs[q_rank].copy_(out)
            lses[q_rank].copy_(lse)
        hops = [self.out_channel.all_to_all(x) for x in (outs, lses)]
        outs, lses = (hop.wait()[0] for hop in hops)
        with ring_step("fwd", self.comm.size, "merge"):
            return merge_by_lse(outs, lses, q.dtype)

    def _blocks(self, q_rank: int, kv_rank: int, queries: int, keys: int, mask: Mask) -> list[Block]:
        """Return the blocks of ``q_rank``'s new tokens with ``kv_rank``'s keys: cached keys first, then new ones."""
        cached, half = keys - queries, queries // 2
        if not mask.plain:
            block = self._sharded_mask_of_cache(queries, keys, mask).block(q_rank, kv_rank)
            return [] if block is None else [block]
        if not mask.causal:
            return [Block()]
        if kv_rank == q_rank:
            new_keys = Block(kv=slice(cached, keys), causal=True)
            return [Block(kv=slice(0, cached)), new_keys] if cached else [new_keys]
        if kv_rank < q_rank:
            return [Block(kv=slice(0, cached + half))]
        second_half = Block(q=slice(half, queries))
        return [second_half, Block(slice(0, half), slice(0, cached))] if cached else [second_half]

    def _sharded_mask_of_cache(self, queries: int, keys: int, mask: Mask) -> ShardedMask:
        """Return the mask sharded over the ranks; ``queries`` and ``keys`` are counts per rank."""
        size = self.comm.size
        return sharded_mask_of(mask, self.layout, size, keys * size, (keys - queries) * size)

    def _row_routing(self, q: Tensor, k: Tensor, mask: Mask) -> RowRouting | None:
        """Return the rows of keys and values to send; None if all rows are sent."""
        return (
            None
            if mask.plain
            else routing_of(self._sharded_mask_of_cache(q.shape[1], k.shape[1], mask), self.comm.size)
        )
