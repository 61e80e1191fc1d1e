"""Wrapper of MagiAttention (SandAI-org/MagiAttention)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base import AttentionCall, Context
from ..errors import Unsupported
from ..masks.layouts import Layout
from .call import PeerStrategy


class Magi(PeerStrategy):
    """MagiAttention, whose own dispatcher assigns chunks of the sequence to ranks."""

    layout: Layout
    # The kernel is flash-attn 3, extended to masks of any shape.
    KERNELS = ("flash-attn",)
    SINGLE_SEQUENCE = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        "chunk_size": "tokens per chunk, the unit that is assigned to a rank",
        **PeerStrategy.PARAMETERS,
    }

    def __init__(self, context: Context, *, chunk_size: int = 512, deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        self.parameters["chunk_size"] = chunk_size
        self._keys = lru_cache(maxsize=8)(self._build_key)
        self.layout = _Dispatched(self)

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Layout:
        return _Chunks(params.get("chunk_size", 512))

    def call(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionCall) -> Tensor:
        from magi_attention.api import calc_attn

        key = self._keys(q.shape[1] * self.comm.size, attention.causal, q.shape[2], k.shape[2], q.shape[3])
        out: Tensor = _call_with_known(calc_attn, q=q[0], k=k[0], v=v[0], key=key, softmax_scale=attention.scale)[0]
        return out.unsqueeze(0)

    def positions_of(self, seq: int) -> Tensor:
        """Return the positions on this rank; they depend neither on the number of heads nor on causality."""
        from magi_attention.api import get_position_ids

        key = self._keys(seq, True, 1, 1, 128)
        positions: Tensor = get_position_ids(key)
        return positions.long().cpu()

    def _build_key(self, seq: int, causal: bool, heads: int, kv_heads: int, head_dim: int) -> Any:
        from magi_attention.api import magi_attn_varlen_key

        ends = torch.tensor([0, seq], dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
        return _call_with_known(
            magi_attn_varlen_key, cu_seqlens_q=ends, cu_seqlens_k=ends, num_heads_q=heads, num_heads_kv=kv_heads,
            head_dim=head_dim, pad_size=0, cp_group_or_mesh=self.comm.group, causal=causal,
            chunk_size=self.parameters["chunk_size"],
        )  # fmt: skip


def _call_with_known(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function with those arguments that the installed release of the package accepts."""
    accepted = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in accepted})


class _Chunks(Layout):
    """Layout of chunks before the package has assigned them to ranks."""

    name = "magi"

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def divisor(self, size: int) -> int:
        return size * self._chunk_size

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        raise Unsupported("the chunks of a rank are known only after the strategy is created on its ranks")

    def causal_block(self, q_rank: int, kv_rank: int, local_seq: int) -> Any:
        raise NotImplementedError("computed by MagiAttention")


class _Dispatched(_Chunks):
    """Layout of chunks as the package's dispatcher assigns them to ranks."""

    def __init__(self, strategy: Magi) -> None:
        super().__init__(strategy.parameters["chunk_size"])
        self._strategy = strategy
        self._positions: dict[int, list[Tensor]] = {}

    def positions(self, seq: int, size: int, rank: int) -> Tensor:
        """Return the positions on a rank; collective at the first call for a sequence length."""
        if seq not in self._positions:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            own_positions = self._strategy.positions_of(seq).to(device)
            self._positions[seq] = [positions.cpu() for positions in self._strategy.comm.all_gather(own_positions)]
        return self._positions[seq][rank]


Magi.layout = _Chunks(512)
