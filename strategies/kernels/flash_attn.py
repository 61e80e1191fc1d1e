"""Kernel of the flash-attn package, version 2."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..masks.mask_blocks import Batch, Lengths
from .kernel import Gradients, allocate_adjacent
from .varlen import VarlenKernel


class FlashAttnKernel(VarlenKernel):
    """Kernel of the flash-attn package, version 2."""

    name = "flash-attn"
    dense_rows = False
    pairs_gradients = True
    takes_windows = True
    takes_softcap = True
    most_head_dim = 256
    packages = ("flash_attn", "flash_attn_2_cuda")

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        advice = "pip install '.[flash]' in a clone of ringprof"
        return None if find_spec("flash_attn") else f"needs the flash-attn package: {advice}"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _flash_attn().fwd(q, k, v, None, None, 0.0, scale, causal, -1, -1, self.softcap, False, None)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        dk, dv = allocate_adjacent(k, v)
        dq, *_ = _flash_attn().bwd(
            dout, q, k, v, out, lse, None, dk, dv, None, 0.0, scale, causal, -1, -1, self.softcap, self.deterministic,
            None, None,
        )  # fmt: skip
        return dq, dk, dv

    def _varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn import flash_attn_interface

        out, lse, *_ = flash_attn_interface._flash_attn_varlen_forward(
            q, k, v, lengths.cumulative_q, lengths.cumulative_kv, batch.most_queries, batch.most_keys, 0.0, scale,
            causal=batch.causal, window_size_left=batch.left, window_size_right=batch.right, softcap=self.softcap,
            alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return out, lse

    def _varlen_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Lengths, batch: Batch,
        scale: float,
    ) -> Gradients:  # fmt: skip
        from flash_attn import flash_attn_interface

        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        flash_attn_interface._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, dq, dk, dv, lengths.cumulative_q, lengths.cumulative_kv, batch.most_queries,
            batch.most_keys, 0.0, scale, causal=batch.causal, window_size_left=batch.left,
            window_size_right=batch.right, softcap=self.softcap, alibi_slopes=None, deterministic=self.deterministic,
        )  # fmt: skip
        return dq, dk, dv


@cache
def _flash_attn() -> Any:
    """Return the compiled module of the package. Its Python wrappers would double the host time per call."""
    from flash_attn import flash_attn_interface

    return flash_attn_interface.flash_attn_gpu
