"""Wrappers of the ring-flash-attn package (zhuzilin/ring-flash-attention)."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base import AttentionCall, Context, Shape
from ..masks.layouts import LAYOUTS
from .call import PeerStrategy


def _package() -> Any:
    """Import the package, without its adapters where they do not import."""
    try:
        import ring_flash_attn
    except ImportError:
        # The adapters patch parts of transformers that newer releases lack; the attention functions do not need them.
        stub: Any = types.ModuleType("ring_flash_attn.adapters")
        stub.substitute_hf_flash_attn = stub.update_ring_flash_attn_params = None
        sys.modules["ring_flash_attn.adapters"] = stub
        import ring_flash_attn
    return ring_flash_attn


class _RingFlashAttn(PeerStrategy):
    """Strategy that calls one function of the package."""

    KERNELS = ("flash-attn",)
    FUNCTION: ClassVar[str]

    def __init__(self, context: Context, *, deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        self._function: Callable[..., Tensor] = getattr(_package(), self.FUNCTION)

    def call(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionCall) -> Tensor:
        return self._function(
            q, k, v, softmax_scale=attention.scale, causal=attention.causal, deterministic=self._deterministic,
            group=self.comm.group,
        )  # fmt: skip


class RingFlashAttnRing(_RingFlashAttn):
    """Ring attention over the contiguous layout."""

    layout = LAYOUTS["contiguous"]
    FUNCTION = "ring_flash_attn_func"


class RingFlashAttnZigzag(_RingFlashAttn):
    """Ring attention over the zigzag layout: two chunks per rank."""

    layout = LAYOUTS["zigzag"]
    FUNCTION = "zigzag_ring_flash_attn_func"
    CAUSAL_ONLY = True


class RingFlashAttnStripe(_RingFlashAttn):
    """Ring attention over the stripe layout: every N-th token on a rank."""

    layout = LAYOUTS["stripe"]
    FUNCTION = "stripe_flash_attn_func"
    CAUSAL_ONLY = True


class RingFlashAttnLlama3(_RingFlashAttn):
    """All-gather of keys and values, ``heads_k_stride`` kv heads at a time."""

    layout = LAYOUTS["contiguous"]
    FUNCTION = "llama3_flash_attn_varlen_func"
    SINGLE_SEQUENCE = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        "heads_k_stride": "kv heads that are gathered at a time",
        **PeerStrategy.PARAMETERS,
    }

    def __init__(self, context: Context, *, heads_k_stride: int = 1, deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        self.parameters["heads_k_stride"] = heads_k_stride
        self._cu_seqlens = lru_cache(maxsize=8)(self._prepare_cu_seqlens)

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        stride = params.get("heads_k_stride", 1)
        if shape.kv_heads % stride:
            return f"heads_k_stride {stride} does not divide {shape.kv_heads} kv heads"
        return super().why_unsupported(shape, size, **params)

    def call(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionCall) -> Tensor:
        prepared = self._cu_seqlens(q.shape[1] * self.comm.size, attention.causal, q.device)
        out = self._function(
            q[0], k[0], v[0], *prepared[:4], self.parameters["heads_k_stride"], prepared[4],
            softmax_scale=attention.scale, causal=attention.causal, deterministic=self._deterministic,
            group=self.comm.group,
        )  # fmt: skip
        return out.unsqueeze(0)

    def _prepare_cu_seqlens(self, seq: int, causal: bool, device: torch.device) -> Any:
        ends = torch.tensor([0, seq], dtype=torch.int32, device=device)
        prepare = _package().llama3_flash_attn_prepare_cu_seqlens
        return prepare(ends, causal=causal, rank=self.comm.rank, world_size=self.comm.size)
