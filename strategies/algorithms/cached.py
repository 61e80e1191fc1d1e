"""Base class of strategies over a cache of keys and values: prefill and decode, with fewer queries than keys.

A sequence has ``kv_length`` keys, and its last S tokens are new: query i is at position kv_length - S + i of the mask.
Keys are assigned to ranks by position. There is no backward pass.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ringprof.workload.mask import Mask

from ..annotate import ring_step
from ..base import AttentionCall, Context, Rows, Shape, Strategy, mask_of_call, scaled_queries
from ..errors import Unsupported, why_not_tensors
from ..kernels.kernel import Gradients
from ..kernels.merge import merge_rows, wide_type, with_sinks
from ..kernels.uncompiled import uncompiled
from ..masks.cache_layout import CacheLayout
from ..masks.layouts import ALL, LAYOUTS, Block, part
from ..transport.passes import in_pass
from ..transport.ring_channel import Collective


@dataclass(frozen=True)
class Heads:
    """Heads of one rank, as slices of all heads."""

    queries: slice
    """Heads of the queries that the rank passes to `Cached.attention`."""
    returned: slice
    """Heads of the output that `Cached.attention` returns."""
    kv: slice
    """Heads of the keys and values that the rank holds."""


KeyChunks = tuple[int, ...] | Literal["contiguous"] | None
"""Where cached keys lie: in chunks of these lengths, where they were computed, or in contiguous shares."""


class Cached(Strategy):
    """Attention of new tokens over a cache that is distributed over the ranks."""

    layout = LAYOUTS["contiguous"]
    out_channel: Collective
    """The channel that partial outputs are merged on."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._agreed: dict[Any, Any] = {}
        """The latest lengths that all ranks are known to have in common, by kind of call."""

    @abstractmethod
    def compute(
        self, call: AttentionCall, mask: Mask, q: Tensor, k: Tensor, v: Tensor, kv_length: int
    ) -> tuple[Tensor, Tensor]:
        """Compute output (B, S, H, D) in q's type and LSE (B, H, S) of the rows that this rank returns."""

    @abstractmethod
    def cache_layout(self, kv_length: int, new_tokens: int, kv_chunks: KeyChunks = None) -> CacheLayout:
        """Return which keys each rank holds; ``kv_chunks`` are those of `attention`. Raises `Unsupported`."""

    def shares_of_ranks(self, kv_heads: int) -> list[tuple[int, range]]:
        """Return the number in `cache_layout` and the kv heads of each rank."""
        return [(rank, range(kv_heads)) for rank in range(self.comm.size)]

    @property
    def cache_rank(self) -> int:
        """This rank's number in `cache_layout`."""
        return self.comm.rank

    def key_positions(self, kv_length: int, new_tokens: int) -> Tensor:
        """Return the positions (int64) of the keys that this rank holds, in local order."""
        return self.cache_layout(kv_length, new_tokens).positions(self.cache_rank)

    def key_count(self, kv_length: int, new_tokens: int) -> int:
        """Return the number of keys on this rank, the length of `key_positions`."""
        return self.cache_layout(kv_length, new_tokens).key_count(self.cache_rank)

    @abstractmethod
    def query_positions(self, new_tokens: int) -> Tensor:
        """Return the new tokens (int64, 0 is the first) whose queries this rank has, in local order."""

    @abstractmethod
    def heads(self, heads: int, kv_heads: int) -> Heads:
        """Return the heads of this rank, given the numbers of all heads."""

    @property
    def out_roundings(self) -> int:
        """Number of times that the output is rounded to the input's type while it is communicated."""
        return 0

    @uncompiled
    @in_pass("forward")
    def attention(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, softmax_scale: float | None = None,
        kv_length: int | None = None, return_lse: bool = False, window_size: tuple[int, int] = (-1, -1),
        prefix: int = 0, sinks: Tensor | None = None, softcap: float = 0.0,
        kv_chunks: Sequence[int] | Literal["contiguous"] | None = None,
        cache_seqlens: Any = None, block_table: Any = None,
    ) -> Any:  # fmt: skip
        """Compute attention of this rank's new queries over the keys of all ranks. Not differentiable.

        q: (B, S, H, D), as `shard` returns it. k and v: (B, keys, Hkv, D), as `shard_cache` returns them, including
        the new tokens; v may have a smaller head size. ``kv_length``: number of keys of all ranks. ``sinks``: logits
        of the heads that this rank returns. ``window_size``, ``prefix`` and ``softcap`` are those of training.
        ``kv_chunks`` tells ring-prefill where the cached keys lie: where they were computed, in chunks of these
        lengths, the new tokens last, or "contiguous" for contiguous shares. A window over a cache needs it, since
        nothing in the keys shows their positions. ``cache_seqlens`` and ``block_table`` (flash-attn's names for
        sequences of different lengths and for paged caches) are refused.
        Returns out, or (out, lse) with lse (B, H, S).

        Collective. The ranks compare their arguments on the first call of each kind, and where its lengths change.
        Raises `Unsupported` for unsupported shapes and options, for a number of keys that is not this rank's part of
        ``kv_length``, and, on every rank, where the arguments differ.
        """
        if cache_seqlens is not None or block_table is not None:
            raise Unsupported(
                f"{'cache_seqlens' if block_table is None else 'block_table'}: all sequences of a batch have one "
                "kv_length, and their keys are in k and v. Call once per length, with contiguous keys"
            )
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise Unsupported(f"{type(self).__name__} has no backward pass: call it under torch.no_grad()")
        matching = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and v.shape[3] <= k.shape[3]
        if not matching or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise Unsupported(
                f"expected q (B, S, H, D), k and v (B, keys, Hkv, D) of the same batch and D: got {shapes}"
            )
        mask = mask_of_call(None, window_size, causal=causal, prefix=prefix)
        q, scale = scaled_queries(q, softmax_scale)
        kv_length, chunks = lengths_of(kv_length, kv_chunks)
        new, inferred = chunks[-1] if isinstance(chunks, tuple) else self.new_tokens(q), kv_length is None
        kv_length = self._length(q, k, mask) if kv_length is None else kv_length
        if self.phase == "prefill" and chunks is None and not mask.plain and kv_length > new and self.comm.size > 1:
            raise Unsupported(
                "a window over a cache needs kv_chunks: the lengths of the chunks whose keys each rank has kept where"
                ' it computed them, the new tokens last; or "contiguous", if the cached keys are in contiguous shares'
            )
        layout = self.cache_layout(kv_length, new, chunks)
        self._check_cached_call(q, k, v, layout, new, mask, (scale, float(softcap), sinks is not None), inferred)
        call = AttentionCall(
            self.kernel_for(
                q, use=(q.shape[2], k.shape[2], v.shape[3], causal), **self._kernel_requirements(mask, softcap)
            ), scale, causal, cache_layout=layout,
        )  # fmt: skip
        out, lse = self.compute(call, mask, q, k, v, kv_length)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return (out, lse) if return_lse else out

    @classmethod
    def why_mask_unsupported(cls, mask: Mask, seq: int, size: int, **params: Any) -> str | None:
        return "takes no packed documents over a cache" if mask.documents else None

    def depends_on_length(self, new_tokens: int, mask: Mask) -> bool:
        """Return whether the result depends on ``kv_length``, beside the keys that each rank passes."""
        return True

    def new_tokens(self, q: Tensor) -> int:
        """Return the number of new tokens of all ranks, from this rank's queries."""
        return q.shape[1]

    def _check_cached_call(
        self, q: Tensor, k: Tensor, v: Tensor, layout: CacheLayout, new: int, mask: Mask,
        scores: tuple[float, float, bool], inferred: bool,
    ) -> None:  # fmt: skip
        """Check that this rank holds its part of the keys, and that all ranks make the same call.

        The ranks talk on the first call of a kind and where its lengths change, and then all raise `Unsupported` if
        one of them does. ``inferred``: the caller did not give the length.
        """
        lengths = str(layout) if self.depends_on_length(new, mask) else None
        problem, rank = why_not_tensors(q, k, v), self.comm.global_rank(self.comm.rank)
        keys, queries = layout.key_count(self.cache_rank), len(self.query_positions(new))
        said = f"kv_length={layout.kv_length} with {new} new tokens"
        if problem or (inferred and lengths is None):
            # Where the ranks infer different lengths, none is used.
            pass
        elif new > layout.kv_length:
            problem = f"kv_length={layout.kv_length} is less than the {new} new tokens, which it includes"
        elif k.shape[1] != keys:
            problem = f"{said} makes {keys} keys per sequence on rank {rank}, which holds {k.shape[1]}"
        elif q.shape[1] != queries:
            problem = f"{said} makes {queries} queries per sequence on rank {rank}, which has {q.shape[1]}"
        kind = new, q.shape[0], q.shape[2:], k.shape[2:], v.shape[3], q.dtype, k.dtype, v.dtype, mask, scores

        def describe() -> str:
            scale, softcap, sinks = scores
            return (
                f"{type(self).__name__} of {new} new tokens; kv_length={lengths and layout.kv_length} ({lengths}); "
                f"batch {q.shape[0]}; {q.shape[2]} and {k.shape[2]} heads of {q.shape[3]} and {v.shape[3]}; "
                f"types {q.dtype}, {k.dtype}, {v.dtype}; causal={mask.causal}; window_size={mask.window}; "
                f"prefix={mask.prefix}; softmax_scale={scale}; softcap={softcap}; sinks={sinks}"
            )

        self.agree(kind, lengths, problem, describe)

    def agree(self, kind: Any, lengths: str | None, problem: str | None, describe: Callable[[], str]) -> None:
        """Check that all ranks make the same call, which ``describe`` puts into words for `require_same_call`.

        Collective on the first call of a ``kind`` and where its ``lengths`` change. Raises `Unsupported` for a
        ``problem`` of this rank; where the ranks talk, on all of them.
        """
        kind = self.comm.token, kind
        agreed = self._agreed.pop(kind, self)
        if agreed is self:
            self.comm.require_same_call(describe(), problem)
        elif agreed != lengths:
            # Lengths change with every decode step: they are compared on the host, without a collective.
            self.comm.compare_call({"caches": problem, "lengths": lengths})
        self._agreed[kind] = lengths
        if problem:
            raise Unsupported(problem)

    @abstractmethod
    def _length(self, q: Tensor, k: Tensor, mask: Mask) -> int:
        """Infer ``kv_length`` if the caller did not give it. Raises `Unsupported` if the caller must."""

    # --- shards -------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int = 1, **_: Any) -> Tensor:
        """Return this rank's queries from the full tensor (B, S, H, D) of new tokens."""
        return self._shard_heads(x, self.heads(x.shape[2], x.shape[2]).queries, dim)

    def shard_output(self, x: Tensor) -> Tensor:
        """Return this rank's rows and heads of the full output (B, S, H, D)."""
        return self._shard_heads(x, self.heads(x.shape[2], x.shape[2]).returned, 1)

    def _shard_heads(self, x: Tensor, heads: slice, dim: int) -> Tensor:
        return x[:, :, heads].index_select(dim, self.query_positions(x.shape[dim]).to(x.device))

    def shard_cache(self, x: Tensor, new_tokens: int, heads: int) -> Tensor:
        """Return this rank's part of all keys or values (B, kv_length, Hkv, D); ``heads``: number of heads of q."""
        own_heads = self.heads(heads, x.shape[2]).kv
        return x[:, :, own_heads].index_select(1, self.key_positions(x.shape[1], new_tokens).to(x.device))

    def local_shapes(self, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of this rank's q (B, S, H, D) and k (B, keys, Hkv, D) for a problem.

        v has the shape of k if its head size is the same.
        """
        assert shape.kv_length is not None
        own_heads = self.heads(shape.heads, shape.kv_heads)
        query_count = len(self.query_positions(shape.seq))
        key_count = self.key_count(shape.kv_length, shape.seq)
        heads, kv_heads = (len(range(*part.indices(count))) for part, count in
                     ((own_heads.queries, shape.heads), (own_heads.kv, shape.kv_heads)))  # fmt: skip
        return (
            (shape.batch, query_count, heads, shape.head_dim), (shape.batch, key_count, kv_heads, shape.head_dim)
        )  # fmt: skip

    # --- training is unsupported --------------------------------------------------------------

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("computed by `compute`")

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        raise NotImplementedError("there is no backward pass over a cache")


def lengths_of(kv_length: Any, kv_chunks: Sequence[Any] | Literal["contiguous"] | None) -> tuple[int | None, KeyChunks]:
    """Return the number of keys and the lengths of chunks of a call, as integers. Raises `Unsupported`."""
    try:
        chunks: Any = kv_chunks
        if kv_chunks is not None and kv_chunks != "contiguous":
            chunks = tuple(map(operator.index, kv_chunks))
        kv_length = kv_length if kv_length is None else operator.index(kv_length)
    except TypeError:
        raise Unsupported(
            "kv_length is one number: sequences of different lengths in a batch are not supported (call once per "
            f"length); got {kv_length!r}"
        ) from None
    if not isinstance(chunks, tuple):
        return kv_length, chunks
    if not chunks or min(chunks) < 1 or kv_length not in (None, sum(chunks)):
        raise Unsupported(f"kv_chunks {list(chunks)} are no lengths of chunks of kv_length={kv_length} tokens")
    return sum(chunks), chunks


def attention_over_blocks(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], step: int
) -> tuple[Tensor, Tensor]:
    """Compute output and LSE of q over the keys of ``blocks``; 0 and -inf in rows that see no key."""
    if len(blocks) == 1 and blocks[0].q == ALL:
        with ring_step("fwd", step, "block"):
            return block_attention(call, q, k, v, blocks[0])
    wide = wide_type(q)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=wide)
    for block in blocks:
        with ring_step("fwd", step, "block"):
            partial = block_attention(call, q, k, v, block)
        with ring_step("fwd", step, "merge"):
            merge_rows(out, lse, *partial, block.q)
    return out, lse


FEW_ROWS = 64
"""Largest number of queries per sequence for which heads that share keys are computed as rows of one head."""


def block_attention(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Compute output and LSE of one block.

    With few queries, the heads of a group become rows of one head, (B, S·G, Hkv, D). The kernel then reads the keys
    once for the whole group, and need not repeat them.
    """
    queries = part(q, block.q)
    batch, rows, heads, head_dim = queries.shape
    kv_heads = k.shape[2]
    if not kv_heads or heads % kv_heads:
        raise Unsupported(
            f"a rank computes {heads} heads over {kv_heads} kv heads: heads must be a multiple of kv heads"
        )
    group = heads // kv_heads
    if block.causal or block.parts is not None or group == 1 or rows > FEW_ROWS:
        return call.forward(q, k, v, block)
    grouped = queries.reshape(batch, rows, kv_heads, group, head_dim)
    packed = grouped.transpose(2, 3).reshape(batch, rows * group, kv_heads, head_dim)
    out, lse = call.forward(packed, k, v, Block(kv=block.kv))
    out = out.reshape(batch, rows, group, kv_heads, v.shape[3]).transpose(2, 3).flatten(2, 3)
    return out, lse.reshape(batch, kv_heads, rows, group).transpose(2, 3).reshape(batch, heads, rows)


def merge_by_lse(outs: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge N partial outputs (N, B, S, H, D) and LSEs (N, B, H, S) into one output in ``dtype`` and one LSE.

    A partial result without keys has an LSE of -inf and weight 0.
    """
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse).exp().transpose(2, 3).unsqueeze(-1)
    return (outs.to(weights.dtype) * weights).sum(0).to(dtype), lse
