"""The kernels by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .errors import Unfit, UnknownName
from .kernel import Gradients, Kernel, half_only
from .merge import row_product, wide_type
from .torch_kernels import CpuFlashKernel, CudnnKernel, TorchEfficientKernel, TorchFlashKernel

__all__ = ["KERNELS", "Gradients", "Kernel", "ReferenceKernel", "choose_kernel"]


class FlashAttnKernel(Kernel):
    """The flash-attn package, version 2."""

    name = "flash-attn"
    dense_rows = False

    @classmethod
    def unfit(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        if find_spec("flash_attn") is None:
            return "needs the flash-attn package: pip install 'ringprof[flash]'"
        if head_dim % 8 or head_dim > 256:
            return f"takes head_dim up to 256 in steps of 8, not {head_dim}"
        return half_only(dtype)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _flash_attn().fwd(q, k, v, None, None, 0.0, scale, causal, -1, -1, 0.0, False, None)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        # Side by side: what comes after takes both in one step.
        dk, dv = torch.empty((2, *k.shape), dtype=k.dtype, device=k.device).unbind(0)
        dq, *_ = _flash_attn().bwd(
            dout, q, k, v, out, lse, None, dk, dv, None, 0.0, scale, causal, -1, -1, 0.0, self.deterministic, None, None
        )
        return dq, dk, dv


@cache
def _flash_attn() -> Any:
    """The package's compiled part, which its Python functions call; those cost the host as much again."""
    from flash_attn import flash_attn_interface

    return flash_attn_interface.flash_attn_gpu


class ReferenceKernel(Kernel):
    """Dense attention in float64, for checks: simple, slow, any device and type."""

    name = "reference"
    takes_delta = True
    grouped_heads = False
    production = False

    @classmethod
    def unfit(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, scale, causal)
        lse = torch.logsumexp(scores, dim=-1)
        out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse.unsqueeze(-1)).exp(), v.double())
        return out.to(q.dtype), lse.to(wide_type(q))

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        if delta is None:
            assert out is not None
            delta = row_product(dout.double(), out.double())
        weights = (self._scores(q, k, scale, causal) - lse.double().unsqueeze(-1)).exp()
        dweights = torch.einsum("bqhd,bkhd->bhqk", dout.double(), v.double())
        dscores = weights * (dweights - delta.double().unsqueeze(-1)) * scale
        dq = torch.einsum("bhqk,bkhd->bqhd", dscores, k.double())
        dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.double())
        dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout.double())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale
        if causal:
            above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(above, float("-inf"))
        return scores


# Fastest first (measured on H200: cuDNN about 1.7 times flash-attn 2).
KERNELS: dict[str, type[Kernel]] = {
    kernel.name: kernel
    for kernel in (
        CudnnKernel,
        FlashAttnKernel,
        TorchFlashKernel,
        TorchEfficientKernel,
        CpuFlashKernel,
        ReferenceKernel,
    )
}


def choose_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool = False,
    among: Sequence[str] = (),
) -> type[Kernel]:  # fmt: skip
    """The kernel called ``name``, or for ``auto`` the fastest that this device, type and head_dim allow.

    ``among`` are those that may be chosen, where not all may. Raises `UnknownName`, or `Unfit` with the reason.
    """
    if name not in ("auto", *KERNELS):
        raise UnknownName(f"no kernel {name!r}; there are: auto, {', '.join(KERNELS)}")
    if among and name not in ("auto", *among):
        raise Unfit(f"kernel {name!r}: this strategy brings its own way to compute blocks; it has {', '.join(among)}")
    of_all = [kernel for kernel in KERNELS.values() if kernel.production and (not among or kernel.name in among)]
    candidates = [KERNELS[name]] if name != "auto" else of_all
    reasons = [_reason_against(kernel, device, dtype, head_dim, deterministic) for kernel in candidates]
    for kernel, reason in zip(candidates, reasons, strict=True):
        if reason is None:
            return kernel
    if name != "auto":
        raise Unfit(f"kernel {name!r} is not available: it {reasons[0]}")
    said = "; ".join(f"{kernel.name} {reason}" for kernel, reason in zip(candidates, reasons, strict=True))
    raise Unfit(f"no kernel takes {dtype} with head_dim {head_dim} on {device.type}: {said}")


def _reason_against(
    kernel: type[Kernel], device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool
) -> str | None:
    if deterministic and not kernel.has_deterministic_mode:
        return "has no deterministic backward pass"
    return kernel.unfit(device, dtype, head_dim)
