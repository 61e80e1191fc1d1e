"""Stand-ins for other people's packages: the names, signatures and layouts of the real ones, dense attention inside.

Every function gathers all that the ranks hold, puts it in the order in which the real package shards a sequence, and
computes in float64. So an adapter that shards otherwise, or hands over other arguments, gets wrong numbers.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringprof.workload.mask import Mask
from tests.strategies.cases import attend


def install() -> None:
    """Install the stand-ins in `sys.modules`; to be called in a separate process."""
    _module("flash_attn")
    _module(
        "ring_flash_attn", ring_flash_attn_func=_ring, zigzag_ring_flash_attn_func=_zigzag,
        stripe_flash_attn_func=_stripe, llama3_flash_attn_varlen_func=_llama3,
        llama3_flash_attn_prepare_cu_seqlens=_prepare,
    )  # fmt: skip
    held = SimpleNamespace(ULYSSES_PG=None, RING_PG=None)
    _module(
        "yunchang", set_seq_parallel_pg=_set_groups(held), LongContextAttention=_LongContextAttention,
        globals=SimpleNamespace(PROCESS_GROUP=held), kernels=SimpleNamespace(AttnType=SimpleNamespace(FA="fa")),
    )  # fmt: skip
    pytorch = _module("transformer_engine.pytorch", DotProductAttention=_DotProduct)
    _module("transformer_engine", pytorch=pytorch)
    _module("transformer_engine.pytorch.attention")
    _module("transformer_engine.pytorch.attention.dot_product_attention", _attention_backends={})


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    sys.modules[name] = module
    return module


# --- who holds what: index of the rank's tokens in the whole sequence -----------------------------------


def _contiguous(seq: int, size: int, rank: int) -> list[int]:
    return list(range(rank * seq // size, (rank + 1) * seq // size))


def _two_chunks(seq: int, size: int, rank: int) -> list[int]:
    chunk = seq // size // 2
    other = 2 * size - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(other * chunk, (other + 1) * chunk)]


def _striped(seq: int, size: int, rank: int) -> list[int]:
    return list(range(rank, seq, size))


class _Dense(torch.autograd.Function):
    """Attention of this rank's queries over the keys of all ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, held: list[list[int]], mask: Mask, scale: float | None, group: Any
    ) -> Tensor:  # fmt: skip
        ctx.full = [_whole(x, held, group).requires_grad_() for x in (q, k, v)]
        ctx.held, ctx.group, ctx.mine = held, group, held[dist.get_rank(group)]
        with torch.enable_grad():
            ctx.out = attend(ctx.full[0], ctx.full[1], ctx.full[2], mask, scale=scale)[0]
        out: Tensor = ctx.out.detach()[:, ctx.mine].to(q.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        whole = torch.autograd.grad(ctx.out, ctx.full, _whole(dout, ctx.held, ctx.group))
        return (*(x[:, ctx.mine].to(dout.dtype) for x in whole), None, None, None, None)


def _whole(x: Tensor, held: list[list[int]], group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in held]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    order = torch.tensor([token for tokens in held for token in tokens])
    return torch.cat(parts, 1).double()[:, order.argsort()]


def _dense(
    layout: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, group: Any
) -> Tensor:  # fmt: skip
    size = dist.get_world_size(group)
    held = [layout(q.shape[1] * size, size, rank) for rank in range(size)]
    out: Tensor = _Dense.apply(q, k, v, held, mask, scale, group)
    return out


# --- ring-flash-attn ----------------------------------------------------------------------------------


def _check_plain(dropout_p, window_size, alibi_slopes, return_attn_probs, deterministic):
    assert (dropout_p, window_size, alibi_slopes, return_attn_probs) == (0.0, (-1, -1), None, False)
    assert deterministic is False, "no strategy of the tests asks for it"


def _attention(positions, causal_only=""):
    """Return the package's function for a layout; ``causal_only`` is what it says without a causal mask."""

    def call(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
        deterministic=False, return_attn_probs=False, group=None,
    ):  # fmt: skip
        _check_plain(dropout_p, window_size, alibi_slopes, return_attn_probs, deterministic)
        assert causal or not causal_only, causal_only
        return _dense(positions, q, k, v, Mask(causal), softmax_scale, group)

    return call


_ring = _attention(_contiguous)
_zigzag = _attention(_two_chunks, "zigzag ring is meaningless for causal=False")
_stripe = _attention(_striped, "stripe flash attn only supports causal attention")


def _prepare(cu_seqlens, causal, rank, world_size):
    assert cu_seqlens.dtype == torch.int32
    total = int(cu_seqlens[-1])
    local = total // world_size
    assert causal
    seen = (rank + 1) * local
    ends = [torch.tensor([0, count], dtype=torch.int32) for count in (local, seen)]
    return *ends, local, seen, slice(0, seen)


def _llama3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, deterministic=False,
    return_attn_probs=False, group=None,
):  # fmt: skip
    _check_plain(dropout_p, window_size, alibi_slopes, return_attn_probs, deterministic)
    rank = dist.get_rank(group)
    assert causal and k.shape[1] % heads_k_stride == 0
    assert max_seqlen_q == q.shape[0] == int(cu_seqlens_q[-1])
    assert max_seqlen_k == int(cu_seqlens_k[-1]) == local_k_slice.stop == (rank + 1) * q.shape[0]
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    return _dense(_contiguous, q, k, v, Mask(causal), softmax_scale, group).squeeze(0)


# --- yunchang -----------------------------------------------------------------------------------------


def _set_groups(held: Any) -> Any:
    def set_seq_parallel_pg(sp_ulysses_degree, sp_ring_degree, rank, world_size, use_ulysses_low=True):
        assert sp_ulysses_degree * sp_ring_degree == world_size == dist.get_world_size()
        assert rank == dist.get_rank()
        held.ULYSSES_PG, held.RING_PG = (sp_ulysses_degree, use_ulysses_low), (sp_ring_degree, use_ulysses_low)

    return set_seq_parallel_pg


class _LongContextAttention(torch.nn.Module):
    """A stand-in in which the ranks of a Ulysses group share two chunks of the sequence, split contiguously."""

    def __init__(
        self, scatter_idx=2, gather_idx=1, ring_impl_type="basic", use_pack_qkv=False, use_sync=False, attn_type="fa",
        attn_processor=None,
    ):  # fmt: skip
        super().__init__()
        held = sys.modules["yunchang"].globals.PROCESS_GROUP
        assert ring_impl_type == "zigzag" and held.ULYSSES_PG
        self.ulysses_pg, self.ring_pg = held.ULYSSES_PG, held.RING_PG

    def forward(
        self, query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False, *args,
    ):  # fmt: skip
        _check_plain(dropout_p, window_size, alibi_slopes, return_attn_probs, deterministic)
        assert softcap == 0.0 and not args
        (ulysses, low), (ring, _) = self.ulysses_pg, self.ring_pg
        assert query.shape[2] % ulysses == key.shape[2] % ulysses == 0

        def layout(seq: int, size: int, rank: int) -> list[int]:
            position, within = (rank // ulysses, rank % ulysses) if low else (rank % ring, rank // ring)
            tokens = _two_chunks(seq, ring, position)
            return tokens[within * seq // size : (within + 1) * seq // size]

        return _dense(layout, query, key, value, Mask(causal), softmax_scale, None)


# --- Transformer Engine -------------------------------------------------------------------------------


class _DotProduct(torch.nn.Module):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, sequence_parallel=False, softmax_scale=None,
    ):  # fmt: skip
        super().__init__()
        assert attention_dropout == 0.0
        self.sizes = num_attention_heads, num_gqa_groups, kv_channels
        self.packed = {"bshd": False, "thd": True}[qkv_format]
        masks = ("padding", "padding_causal") if self.packed else ("no_mask", "causal")
        self.causal, self.scale = bool(masks.index(attn_mask_type)), softmax_scale

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        world = dist.group.WORLD
        if cp_comm_type == "a2a+p2p":
            a2a, p2p = (dist.get_process_group_ranks(group) for group in cp_group)
            assert len(a2a) * len(p2p) == len(cp_global_ranks) and len(a2a) > 1 and len(p2p) > 1
            assert a2a == list(range(a2a[0], a2a[0] + len(a2a))) and p2p[1] - p2p[0] == len(a2a)
        else:
            assert cp_comm_type in ("p2p", "all_gather", "a2a")
            assert cp_global_ranks == dist.get_process_group_ranks(cp_group)
        self.group, self.comm_type = world, cp_comm_type

    def forward(
        self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
        attn_mask_type=None, window_size=None,
    ):  # fmt: skip
        tensors = query_layer, key_layer, value_layer
        assert self.sizes == (query_layer.shape[-2], key_layer.shape[-2], query_layer.shape[-1])
        assert window_size is None or (self.comm_type in ("a2a", "all_gather") and window_size[1] == 0)
        if not self.packed:
            mask = Mask.of(window=window_size or (-1, -1), causal=self.causal)
            return _dense(_two_chunks, *tensors, mask, self.scale, self.group).flatten(2)
        # The package finds no padding between sequences where both lengths are one object.
        assert cu_seqlens_q is cu_seqlens_q_padded and cu_seqlens_kv is cu_seqlens_kv_padded
        assert cu_seqlens_q.dtype == torch.int32 and query_layer.dim() == 3
        ends = cu_seqlens_q.tolist()
        assert max_seqlen_q == max_seqlen_kv == max(end - first for first, end in pairwise(ends))

        def layout(seq: int, size: int, rank: int) -> list[int]:
            assert seq == ends[-1]
            return [first + token for first, end in pairwise(ends) for token in _two_chunks(end - first, size, rank)]

        mask = Mask.of(documents=ends, window=window_size or (-1, -1), causal=self.causal)
        q, k, v = (x.unsqueeze(0) for x in tensors)
        return _dense(layout, q, k, v, mask, self.scale, self.group).squeeze(0).flatten(1)
