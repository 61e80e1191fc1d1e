"""Decode context parallelism: the keys of a sequence are distributed over ranks that have the same few queries.

Every rank computes the attention of the new tokens over its own keys, and the partial results are merged by their LSE.
The bytes sent do not grow with the cache:

    queries=gathered     each rank starts with H/T heads of the queries, as tensor parallelism leaves them, and gathers
                         those of its group; with replicated, it already has all heads of its group
    merge                how the partial outputs of N ranks are merged
      reduce-scatter     LSEs are gathered, outputs weighted and reduced; a rank keeps H/T heads (vLLM's ag_rs)
      all-to-all         each rank gets all partial results of its H/T heads, and merges them (vLLM's a2a, Helix)
      all-gather         every rank gets all partial results and merges all heads

Of T ranks, N = dcp_degree neighbours share the keys; the T/N groups split the kv heads, as tensor parallelism does.
Token t is on rank t mod N of its group, so a growing cache stays balanced (vLLM's interleaved cache).

Source: vLLM's decode context parallelism; Helix Parallelism (arXiv 2507.07120).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ringprof.workload.mask import Mask

from ..annotate import ring_step
from ..base import AttentionCall, Context, Shape
from ..errors import Unsupported
from ..kernels.kernel import Kernel
from ..kernels.merge import wide_type
from ..kernels.reference import KeyStretches
from ..kernels.registry import choose_kernel
from ..masks.cache_layout import CacheLayout, cache_layout_of
from ..masks.layouts import ALL, LAYOUTS, Block, Layout
from .cached import Cached, Heads, KeyChunks, attention_over_blocks, merge_by_lse

SPLITTING = ("flash-attn", "torch-flash")
"""Kernels that ``auto`` prefers to kernels that are faster on long blocks. They split the keys of few queries over the
whole GPU (95 % of an H200's memory bandwidth, where cuDNN reaches 58 %)."""
Merge = Literal["reduce-scatter", "all-to-all", "all-gather"]


class DecodeContextParallel(Cached):
    """Attention of few queries over a cache whose token t is on rank t mod N."""

    phase = "decode"
    layout = LAYOUTS["stripe"]
    PARAMETERS: ClassVar[dict[str, str]] = {
        "dcp_degree": "ranks that share the keys of a sequence; the groups split the kv heads",
        "queries": "gathered from the ranks that have their heads, or replicated on every rank",
        "merge": "how partial outputs are merged",
        "out_wire": "type in which outputs are sent: fp32, or the input's own",
    }

    def __init__(
        self, context: Context, *, dcp_degree: int | None = None, merge: Merge = "reduce-scatter",
        queries: Literal["gathered", "replicated"] = "gathered", out_wire: Literal["fp32", "input"] = "input",
    ) -> None:  # fmt: skip
        super().__init__(context)
        size, rank = self.comm.size, self.comm.rank
        degree = _degree(size, dcp_degree)
        self.parameters = {"dcp_degree": degree, "queries": queries, "merge": merge, "out_wire": out_wire}
        self.degree, self.rank_in_group, self.group, self.groups = degree, rank % degree, rank // degree, size // degree
        members = list(range(self.group * degree, (self.group + 1) * degree))
        self.q_channel = self.comm.collective("q", members)
        self.out_channel = self.comm.collective("out", members)

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Layout:
        _degree(size, params.get("dcp_degree"))
        return cls.layout

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        try:
            degree = _degree(size, params.get("dcp_degree"))
        except Unsupported as error:
            return str(error)
        if shape.heads % shape.kv_heads:
            return f"{shape.heads} heads are not a multiple of {shape.kv_heads} kv heads"
        if shape.kv_heads % (size // degree):
            return (
                f"{size // degree} groups of {degree} ranks cannot share out {shape.kv_heads} kv heads: "
                f"take a larger dcp_degree, up to {size}"
            )
        keeps_all_heads = params.get("merge") == "all-gather" and params.get("queries") == "replicated"
        if not keeps_all_heads and shape.heads % size:
            return f"{size} ranks cannot share out {shape.heads} heads (queries=replicated and merge=all-gather can)"
        return None

    @classmethod
    def kernel_class(
        cls, name: str, device: torch.device, dtype: torch.dtype, head_dim: int, **asks: Any
    ) -> type[Kernel]:  # fmt: skip
        if name == "auto":
            with suppress(Unsupported):
                return choose_kernel(name, device, dtype, head_dim, among=SPLITTING, **asks)
        return super().kernel_class(name, device, dtype, head_dim, **asks)

    @property
    def out_roundings(self) -> int:
        narrow = self.parameters["out_wire"] == "input" and self.parameters["merge"] == "reduce-scatter"
        return self.degree if narrow and self.degree > 1 else 0

    def cache_layout(self, kv_length: int, new_tokens: int, kv_chunks: KeyChunks = None) -> CacheLayout:
        if kv_chunks:
            raise Unsupported(
                "kv_chunks: dcp has token t on rank t mod N; redistribute_cache moves prefill's keys there"
            )
        return cache_layout_of(self.degree, ((self.layout, kv_length),))

    def shares_of_ranks(self, kv_heads: int) -> list[tuple[int, range]]:
        return [
            (rank % self.degree, range(kv_heads)[_share(kv_heads, self.groups, rank // self.degree)])
            for rank in range(self.comm.size)
        ]

    @property
    def cache_rank(self) -> int:
        return self.rank_in_group

    def query_positions(self, new_tokens: int) -> Tensor:
        return torch.arange(new_tokens, device="cpu")

    def heads(self, heads: int, kv_heads: int) -> Heads:
        group_heads, own_heads = _share(heads, self.groups, self.group), _share(heads, self.comm.size, self.comm.rank)
        return Heads(
            own_heads if self.parameters["queries"] == "gathered" else group_heads,
            group_heads if self.parameters["merge"] == "all-gather" else own_heads,
            _share(kv_heads, self.groups, self.group),
        )

    def depends_on_length(self, new_tokens: int, mask: Mask) -> bool:
        return new_tokens > 1 or not mask.plain

    def _length(self, q: Tensor, k: Tensor, mask: Mask) -> int:
        # A rank may hold one key more than others. This does not matter for a single query that sees all keys.
        if self.depends_on_length(q.shape[1], mask):
            raise Unsupported("with more than one new token per sequence, or with a window, attention needs kv_length")
        return k.shape[1] * self.degree

    def compute(
        self, call: AttentionCall, mask: Mask, q: Tensor, k: Tensor, v: Tensor, kv_length: int
    ) -> tuple[Tensor, Tensor]:
        """Compute output and LSE of this rank's heads: attention over the rank's keys, merged with the other ranks'.

        ``kv_length`` counts the keys of all ranks. Collective.
        """
        if self.parameters["queries"] == "gathered":
            # (N, B, S, H, D) -> (B, S, N·H, D)
            q = self.q_channel.all_gather(q).wait()[0].permute(1, 2, 0, 3, 4).flatten(2, 3)
        out, lse = attention_over_blocks(call, q, k, v, self._blocks(q.shape[1], k.shape[1], kv_length, mask), 0)
        if self.degree == 1:
            return out.to(q.dtype), lse
        wire = q.dtype if self.parameters["out_wire"] == "input" else wide_type(q)
        with ring_step("fwd", 1, "merge"):
            if self.parameters["merge"] == "reduce-scatter":
                # LSEs are gathered and weighted outputs reduced; a rank keeps its own heads.
                total = torch.logsumexp(self.out_channel.all_gather(lse).wait()[0], 0)
                weighted = (out * (lse - total).exp().transpose(1, 2).unsqueeze(-1)).to(wire)
                out = self.out_channel.reduce_scatter(_split_heads(weighted, 2, self.degree)).wait()[0]
                return out.to(q.dtype), total.chunk(self.degree, 1)[self.rank_in_group]
            if self.parameters["merge"] == "all-to-all":
                # The partial results of this rank's own heads.
                split = ((out.to(wire), 2), (lse, 1))
                hops = [self.out_channel.all_to_all(_split_heads(x, dim, self.degree)) for x, dim in split]
            else:
                hops = [self.out_channel.all_gather(x) for x in (out.to(wire), lse)]
            outs, lses = (hop.wait()[0] for hop in hops)
            out, lse = merge_by_lse(outs, lses, wire)
            return out.to(q.dtype), lse

    def _blocks(self, queries: int, keys: int, kv_length: int, mask: Mask) -> list[Block]:
        """Split this rank's keys into blocks by the consecutive queries that see them."""
        if mask.plain and (not mask.causal or queries == 1):
            return [Block()] if keys else []
        key_ranges = KeyStretches.of(mask, torch.arange(kv_length - queries, kv_length, device="cpu"), kv_length)
        # Convert positions to indices of this rank's keys: the first key at or after a position.
        bounds = [[-((self.rank_in_group - x) // self.degree) for x in ends] for ends in key_ranges.stretches]
        local = KeyStretches(tuple((first, end) for first, end in bounds))
        edges = torch.cat([x for ends in bounds for x in ends]).clamp(0, keys)
        edges = torch.tensor(sorted(set(edges.tolist())), device="cpu")
        visible = local.shown(edges[:-1])
        blocks: list[Block] = []
        for start, end, first, count in zip(
            *(x.tolist() for x in (edges[:-1], edges[1:], visible.int().argmax(0), visible.sum(0))), strict=True
        ):
            rows = ALL if count == queries else slice(first, first + count)
            if blocks and blocks[-1].q == rows and blocks[-1].kv.stop == start:
                start = blocks.pop().kv.start
            blocks += [Block(rows, slice(start, end))] if count else []
        return blocks


def _degree(size: int, requested: int | None) -> int:
    """Return the number of ranks that share keys, all ranks by default. Raises `Unsupported`."""
    degree = size if requested is None else requested
    if degree < 1 or size % degree:
        raise Unsupported(f"dcp_degree {degree} does not divide the world size {size}")
    return degree


def _share(count: int, pieces: int, index: int) -> slice:
    """Return one of equal pieces of so many heads."""
    return slice(count * index // pieces, count * (index + 1) // pieces)


def _split_heads(x: Tensor, dim: int, pieces: int) -> Tensor:
    """Split a dimension of heads into equal parts, stacked in a new first dimension: one part per rank of the group."""
    return torch.stack(x.chunk(pieces, dim))
