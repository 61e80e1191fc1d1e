"""The kernel seam: one block of attention on one device, forward and backward.

Tensors are (B, S, H, D) for q, out and dout, (B, S, Hkv, D) for k and v, and (B, H, S) float32 for the LSE, natural
logarithm. A block is full, or causal and square. Every kernel counts the FLOPs of the blocks that it computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .merge import output_with_delta, wide_type

Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(ABC):
    """One attention kernel. Subclasses compute; this class checks, counts and prepares."""

    name: str
    takes_delta = False
    """Whether the backward pass can be given delta = rowsum(dO * O) in place of O."""
    has_deterministic_mode = True
    production = True
    """Whether ``auto`` may choose it; a kernel for checks is chosen by name alone."""
    dense_rows = True
    """Whether a backward pass must be given O and dO without gaps, as torch's own autograd does. torch keeps cuDNN's
    plans by the strides of q, k and v alone: O, dO and LSE must always have the strides that belong to such a q."""
    greedy = False
    """Whether it loses more to the multiprocessors that NCCL's kernels take than hops by copy engine cost."""
    grouped_heads = True
    """Whether fewer kv heads than heads are taken as they are; otherwise they are repeated, gradients summed."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self.flops = 0
        self.calls = {"forward": 0, "backward": 0}

    @classmethod
    @abstractmethod
    def unfit(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this kernel cannot run such a problem here; None where it can."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Output (B, Sq, H, D) in q's type and LSE (B, H, Sq) in float32 (float64 for float64 input)."""
        self._count("forward", q, k, causal, 4)
        k, v = self._heads_for(q, k), self._heads_for(q, v)
        return self._forward(q, k, v, scale, causal)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        *,
        out: Tensor | None = None,
        delta: Tensor | None = None,
        scale: float,
        causal: bool,
    ) -> Gradients:
        """Gradients dq, dk, dv of one block, in the inputs' type.

        ``lse`` and ``out`` (or ``delta``, (B, H, Sq) float32) are those of the whole row over all blocks, which makes
        every block's gradient independent of the others.
        """  # fmt: skip
        self._count("backward", q, k, causal, 10)
        if delta is not None and not self.takes_delta:
            out, delta = output_with_delta(dout, delta), None
        kv_heads = k.shape[2]
        k, v = self._heads_for(q, k), self._heads_for(q, v)
        dq, dk, dv = self._backward(dout, q, k, v, lse, out, delta, scale, causal)
        return dq, _sum_groups(dk, kv_heads), _sum_groups(dv, kv_heads)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients: ...  # fmt: skip

    def _count(self, phase: str, q: Tensor, k: Tensor, causal: bool, flops_per_pair: int) -> None:
        batch, seq, heads, head_dim = q.shape
        pairs = seq * (seq + 1) // 2 if causal else seq * k.shape[1]
        self.flops += flops_per_pair * batch * heads * head_dim * pairs
        self.calls[phase] += 1

    def _heads_for(self, q: Tensor, kv: Tensor) -> Tensor:
        groups = q.shape[2] // kv.shape[2]
        return kv if self.grouped_heads or groups == 1 else kv.repeat_interleave(groups, dim=2)


def _sum_groups(gradient: Tensor, kv_heads: int) -> Tensor:
    batch, seq, heads, head_dim = gradient.shape
    if heads == kv_heads:
        return gradient
    grouped = gradient.view(batch, seq, kv_heads, heads // kv_heads, head_dim)
    return grouped.sum(3, dtype=wide_type(gradient)).to(gradient.dtype)


def half_only(dtype: torch.dtype) -> str | None:
    """Why a kernel for bf16 and fp16 does not take this type; None where it does."""
    return None if dtype in (torch.bfloat16, torch.float16) else f"takes bf16 and fp16, not {dtype}"
