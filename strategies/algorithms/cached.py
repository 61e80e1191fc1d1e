"""What strategies share whose queries are fewer than their keys: prefill and decode over a cache of keys and values.

A sequence has ``kv_length`` keys, and its last tokens, S of them, are new: query i stands at position
kv_length - S + i of the mask. The ranks hold the keys by position; there is no backward pass.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringprof.mask import Mask
from ringprof.strategies.annotate import ring_step
from ringprof.strategies.base import AttentionCall, Rows, Shape, Strategy, mask_of_call
from ringprof.strategies.errors import Unsupported
from ringprof.strategies.kernels.kernel import Gradients
from ringprof.strategies.kernels.merge import merge_rows, wide_type, with_sinks
from ringprof.strategies.kernels.uncompiled import uncompiled
from ringprof.strategies.masks.layouts import ALL, LAYOUTS, Block, part


@dataclass(frozen=True)
class Heads:
    """Which heads of all a rank has: slices."""

    given: slice
    """Of the queries that `Cached.attention` is given."""
    returned: slice
    """Of the output that it returns."""
    kv: slice
    """Of the keys and values that the rank holds."""


class _Held(NamedTuple):
    """Shapes of what a rank is given: q (B, S, H, D), k and v (B, keys, Hkv, D)."""

    q: tuple[int, int, int, int]
    kv: tuple[int, int, int, int]


class Cached(Strategy):
    """Attention of new tokens over a cache that is spread over the ranks."""

    layout = LAYOUTS["contiguous"]

    @abstractmethod
    def compute(
        self, call: AttentionCall, mask: Mask, q: Tensor, k: Tensor, v: Tensor, kv_length: int
    ) -> tuple[Tensor, Tensor]:
        """Output (B, S, H, D) in q's type and LSE (B, H, S) of the rows that this rank returns."""

    @abstractmethod
    def key_positions(self, kv_length: int, new_tokens: int) -> Tensor:
        """Positions (int64) of the keys that this rank holds, in local order."""

    def key_count(self, kv_length: int, new_tokens: int) -> int:
        """Return how many keys this rank holds, the length of `key_positions`. Override it to allocate no positions."""
        return len(self.key_positions(kv_length, new_tokens))

    @abstractmethod
    def query_places(self, new_tokens: int) -> Tensor:
        """Which of the new tokens (int64, 0 the first) this rank has queries of, in local order."""

    @abstractmethod
    def heads(self, heads: int, kv_heads: int) -> Heads:
        """Which of all heads this rank has."""

    @property
    def out_roundings(self) -> int:
        """How often the output is rounded to the input's type on its way over the ranks."""
        return 0

    @uncompiled
    def attention(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, softmax_scale: float | None = None,
        kv_length: int | None = None, return_lse: bool = False, window_size: tuple[int, int] = (-1, -1),
        prefix: int = 0, sinks: Tensor | None = None, softcap: float = 0.0,
    ) -> Any:  # fmt: skip
        """Attention of this rank's new queries over all keys, which every rank has a share of. Not differentiable.

        q (B, S, H, D) as `shard` gives it; k and v (B, keys, Hkv, D) as `shard_cache` does, those of the new tokens
        among them; heads of v may be smaller. ``kv_length`` is the number of keys of all ranks. ``sinks`` are the
        logits of the heads that this rank returns; ``window_size``, ``prefix`` and ``softcap`` as in training. Returns
        out, or (out, lse) with lse (B, H, S). Raises `Unsupported` for shapes and options that do not fit.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise Unsupported(f"{type(self).__name__} has no backward pass: call it under torch.no_grad()")
        matching = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and v.shape[3] <= k.shape[3]
        if not matching or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise Unsupported(
                f"expected q (B, S, H, D), k and v (B, keys, Hkv, D) of the same batch and D: got {shapes}"
            )
        mask = mask_of_call(None, window_size, causal=causal, prefix=prefix)
        kv_length = self._length(q, k, mask) if kv_length is None else kv_length
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        call = AttentionCall(self.kernel_for(q, **self._kernel_requirements(mask, softcap)), scale, causal)
        self.comm.meter.phase = "forward"
        out, lse = self.compute(call, mask, q, k, v, kv_length)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return (out, lse) if return_lse else out

    @classmethod
    def why_mask_unsupported(cls, mask: Mask, seq: int, size: int, **params: Any) -> str | None:
        return "takes no packed documents over a cache" if mask.documents else None

    @abstractmethod
    def _length(self, q: Tensor, k: Tensor, mask: Mask) -> int:
        """``kv_length`` where the call does not say it. Raises `Unsupported` where it must."""

    # --- what is where ------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int = 1, **_: Any) -> Tensor:
        """This rank's queries of the full tensor (B, S, H, D) of new tokens."""
        return self._share(x, self.heads(x.shape[2], x.shape[2]).given, dim)

    def shard_output(self, x: Tensor) -> Tensor:
        """What this rank returns of the full output (B, S, H, D)."""
        return self._share(x, self.heads(x.shape[2], x.shape[2]).returned, 1)

    def _share(self, x: Tensor, heads: slice, dim: int) -> Tensor:
        return x[:, :, heads].index_select(dim, self.query_places(x.shape[dim]).to(x.device))

    def shard_cache(self, x: Tensor, new_tokens: int, heads: int) -> Tensor:
        """This rank's share of all keys or values (B, kv_length, Hkv, D), where q has ``heads`` heads."""
        held = self.heads(heads, x.shape[2]).kv
        return x[:, :, held].index_select(1, self.key_positions(x.shape[1], new_tokens).to(x.device))

    def held(self, shape: Shape) -> _Held:
        """The shapes of this rank's share of a problem; those of v where its heads are as large as k's."""
        assert shape.kv_length is not None
        mine = self.heads(shape.heads, shape.kv_heads)
        queries = len(self.query_places(shape.seq))
        keys = self.key_count(shape.kv_length, shape.seq)
        given, kv = (len(range(*one.indices(count))) for one, count in
                     ((mine.given, shape.heads), (mine.kv, shape.kv_heads)))  # fmt: skip
        return _Held(
            (shape.batch, queries, given, shape.head_dim), (shape.batch, keys, kv, shape.head_dim)
        )  # fmt: skip

    # --- what there is not --------------------------------------------------------------------

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a cache is asked by `compute`")

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        raise NotImplementedError("there is no backward pass over a cache")


def assembled(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, owed: list[Block], step: int
) -> tuple[Tensor, Tensor]:
    """Output and LSE of q over the keys of the blocks ``owed``; 0 and -inf in rows that see none of them."""
    if len(owed) == 1 and owed[0].q == ALL:
        with ring_step("fwd", step, "block"):
            return rectangle(call, q, k, v, owed[0])
    wide = wide_type(q)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=wide)
    for block in owed:
        with ring_step("fwd", step, "block"):
            found = rectangle(call, q, k, v, block)
        with ring_step("fwd", step, "merge"):
            merge_rows(out, lse, *found, block.q)
    return out, lse


FEW_ROWS = 64
"""Up to so many queries of a sequence, the heads that share keys are computed as rows of one: keys are read once."""


def rectangle(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Output and LSE of one block. Where queries are few, the heads of a group are rows of one head, (B, S·G, Hkv, D):
    a kernel reads the keys once for all of them, and none must repeat the keys."""
    few = part(q, block.q)
    batch, rows, heads, head_dim = few.shape
    kv_heads = k.shape[2]
    if not kv_heads or heads % kv_heads:
        raise Unsupported(
            f"a rank computes {heads} heads over {kv_heads} kv heads: the ones must be a multiple of the others"
        )
    group = heads // kv_heads
    if block.causal or block.parts is not None or group == 1 or rows > FEW_ROWS:
        return call.forward(q, k, v, block)
    grouped = few.reshape(batch, rows, kv_heads, group, head_dim)
    packed = grouped.transpose(2, 3).reshape(batch, rows * group, kv_heads, head_dim)
    out, lse = call.forward(packed, k, v, Block(kv=block.kv))
    out = out.reshape(batch, rows, group, kv_heads, v.shape[3]).transpose(2, 3).flatten(2, 3)
    return out, lse.reshape(batch, kv_heads, rows, group).transpose(2, 3).reshape(batch, heads, rows)


def merged_by_lse(outs: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One output (B, S, H, D) in ``dtype`` and LSE (B, H, S) of N partial ones, (N, B, S, H, D) and (N, B, H, S).

    A partial result over no keys has an LSE of -inf and counts nothing.
    """
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse).exp().transpose(2, 3).unsqueeze(-1)
    return (outs.to(weights.dtype) * weights).sum(0).to(dtype), lse
