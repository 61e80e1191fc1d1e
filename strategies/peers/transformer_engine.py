"""Wrappers of NVIDIA Transformer Engine, whose context parallelism is an option of its attention module."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import Context, Shape
from ..masks.layouts import LAYOUTS
from .call import PeerStrategy


class _TransformerEngine(PeerStrategy):
    """`DotProductAttention` with a context-parallel group; its backends have the names of our corresponding kernels."""

    layout = LAYOUTS["zigzag"]
    KERNELS = ("cudnn", "flash-attn")
    COMM_TYPE: ClassVar[str]

    def __init__(self, context: Context, *, deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        self._module = lru_cache(maxsize=8)(self._build_module)
        self._stream: Any = None

    def call(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        os.environ |= {
            "NVTE_FUSED_ATTN": str(int(self.kernel_for(q).name == "cudnn")),
            "NVTE_FLASH_ATTN": str(int(self.kernel_for(q).name == "flash-attn")),
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": str(int(not self._deterministic)),
        }
        out: Tensor = self._module(q.shape[2], k.shape[2], q.shape[3], causal, scale)(q, k, v)
        return out.view(q.shape)

    def _build_module(self, heads: int, kv_heads: int, head_dim: int, causal: bool, scale: float) -> Any:
        """Create the attention module for one problem size."""
        from transformer_engine.pytorch import DotProductAttention

        module = DotProductAttention(
            heads, head_dim, num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format="bshd",
            attn_mask_type="causal" if causal else "no_mask", softmax_scale=scale,
        )  # fmt: skip
        if self._stream is None and torch.cuda.is_available():
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        group = self.comm.group
        module.set_context_parallel_group(group, dist.get_process_group_ranks(group), self._stream, self.COMM_TYPE)
        return module


class TransformerEngineP2P(_TransformerEngine):
    """Transformer Engine's ring of send/recv hops."""

    COMM_TYPE = "p2p"


class TransformerEngineAllGather(_TransformerEngine):
    """Transformer Engine's all-gather of keys and values."""

    COMM_TYPE = "all_gather"


class TransformerEngineA2A(_TransformerEngine):
    """Transformer Engine's all-to-all between sequence and head shards."""

    COMM_TYPE = "a2a"

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        if shape.heads % size or shape.kv_heads % size:
            return f"its all-to-all must divide {shape.heads} heads and {shape.kv_heads} kv heads by {size} ranks"
        return super().why_unsupported(shape, size, **params)
