"""The kernel seam: one block of attention on one device, forward and backward.

Tensors are (B, S, H, D) for q, out and dout, (B, S, Hkv, D) for k and v, and (B, H, S) float32 for the LSE, natural
logarithm. A block is full, or causal and square. Every kernel counts the FLOPs of the blocks that it computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.util import find_spec

import torch
from torch import Tensor

from .errors import Unfit, UnknownName
from .merge import output_with_delta, row_product, wide_type

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(ABC):
    """One attention kernel. Subclasses compute; this class checks, counts and prepares."""

    name: str
    takes_delta = False
    """Whether the backward pass can be given delta = rowsum(dO * O) in place of O."""
    has_deterministic_mode = True
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


def _bhsd(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The (B, H, S, D) view that torch's own kernels take: strides, no copy."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


class CudnnKernel(Kernel):
    """cuDNN attention through torch: the fastest on Hopper."""

    name = "cudnn"
    # Through torch 2.11 the backward pass differs from call to call even under use_deterministic_algorithms.
    has_deterministic_mode = False

    @classmethod
    def unfit(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda" or torch.backends.cudnn.version() is None:  # type: ignore[no-untyped-call]
            return "needs a CUDA device with cuDNN"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "needs compute capability 8.0 or higher"
        if head_dim % 8 or head_dim > 128:
            return f"takes head_dim up to 128 in steps of 8, not {head_dim}"
        return _half_only(dtype)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = _bhsd(q, k, v)
        result = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        out, lse = result[0], result[1]
        return out.transpose(1, 2), lse.view(lse.shape[:3])

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        assert out is not None
        seq_q, seq_kv = q.shape[1], k.shape[1]
        dout, q, k, v, out = _bhsd(dout, q, k, v, out)
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), nothing, nothing, None, None, None, seq_q, seq_kv, 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return _bhsd(dq, dk, dv)  # type: ignore[return-value]


class FlashAttnKernel(Kernel):
    """The flash-attn package, version 2."""

    name = "flash-attn"

    @classmethod
    def unfit(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        if find_spec("flash_attn") is None:
            return "needs the flash-attn package: pip install 'ringprof[flash]'"
        if head_dim % 8 or head_dim > 256:
            return f"takes head_dim up to 256 in steps of 8, not {head_dim}"
        return _half_only(dtype)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        from flash_attn import flash_attn_interface as flash

        out, lse, *_ = flash._flash_attn_forward(
            q, k, v, dropout_p=0.0, softmax_scale=scale, causal=causal, window_size_left=-1, window_size_right=-1,
            softcap=0.0, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        from flash_attn import flash_attn_interface as flash

        # flash-attn wants lse rows without gaps; a zigzag half is a view.
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        flash._flash_attn_backward(
            dout, q, k, v, out, lse.contiguous(), dq, dk, dv, dropout_p=0.0, softmax_scale=scale, causal=causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
            deterministic=self.deterministic, rng_state=None,
        )  # fmt: skip
        return dq, dk, dv


class TorchFlashKernel(Kernel):
    """The flash attention built into torch."""

    name = "torch-flash"
    grouped_heads = False

    @classmethod
    def unfit(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        if head_dim % 8 or head_dim > 256:
            return f"takes head_dim up to 256 in steps of 8, not {head_dim}"
        return _half_only(dtype)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = _bhsd(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        assert out is not None
        seq_q, seq_kv = q.shape[1], k.shape[1]
        dout, q, k, v, out = _bhsd(dout, q, k, v, out)
        rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
        with _deterministic(self.deterministic):
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                dout, q, k, v, out, lse.contiguous(), None, None, seq_q, seq_kv, 0.0, causal, rng, rng[0],
                scale=scale,
            )  # fmt: skip
        return _bhsd(dq, dk, dv)  # type: ignore[return-value]


class CpuFlashKernel(Kernel):
    """torch's flash attention for the CPU."""

    name = "cpu-flash"
    grouped_heads = False

    @classmethod
    def unfit(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None if device.type == "cpu" else "runs on the CPU only"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = _bhsd(q, k, v)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        assert out is not None
        dout, q, k, v, out = _bhsd(dout, q, k, v, out)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale
        )
        return _bhsd(dq, dk, dv)  # type: ignore[return-value]


class ReferenceKernel(Kernel):
    """Dense attention in float64, for checks: simple, slow, any device and type."""

    name = "reference"
    takes_delta = True
    grouped_heads = False

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


class _deterministic:
    """Torch's deterministic algorithms for one call: cuDNN and torch's flash take the mode from this global switch."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before = torch.are_deterministic_algorithms_enabled()
        if self._wanted and not self._before:
            torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        if self._wanted and not self._before:
            torch.use_deterministic_algorithms(False)


def _half_only(dtype: torch.dtype) -> str | None:
    return None if dtype in (torch.bfloat16, torch.float16) else f"takes bf16 and fp16, not {dtype}"


# Fastest first (measured on H200: cuDNN about 1.7 times flash-attn 2).
KERNELS: dict[str, type[Kernel]] = {
    kernel.name: kernel for kernel in (CudnnKernel, FlashAttnKernel, TorchFlashKernel, CpuFlashKernel, ReferenceKernel)
}


def choose_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool = False
) -> type[Kernel]:
    """The kernel called ``name``, or for ``auto`` the fastest that this device, type and head_dim allow.

    Raises `UnknownName`, or `Unfit` with the reason.
    """
    if name not in ("auto", *KERNELS):
        raise UnknownName(f"no kernel {name!r}; there are: auto, {', '.join(KERNELS)}")
    candidates = list(KERNELS.values()) if name == "auto" else [KERNELS[name]]
    reasons = [_reason_against(kernel, device, dtype, head_dim, deterministic) for kernel in candidates]
    for kernel, reason in zip(candidates, reasons, strict=True):
        if reason is None:
            return kernel
    raise Unfit(f"kernel {name!r} is not available: it {reasons[0]}")


def _reason_against(
    kernel: type[Kernel], device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool
) -> str | None:
    if deterministic and not kernel.has_deterministic_mode:
        return "has no deterministic backward pass"
    return kernel.unfit(device, dtype, head_dim)
