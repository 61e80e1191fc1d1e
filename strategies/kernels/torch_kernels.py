"""Attention kernels that are part of torch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..masks.mask_blocks import AttnRectangle, Batch, Lengths, band_mask
from .kernel import Gradients, Kernel
from .plan_check import PlanCheck
from .reference import ReferenceKernel
from .varlen import VarlenKernel

aten = torch.ops.aten


@cache
@torch.inference_mode(False)
def _no_dropout_state(device: torch.device) -> Tensor:
    """Return a placeholder for the random state of dropout, which is not used."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _bhsd(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors as (B, H, S, D) views for torch's kernels, without a copy."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


class CudnnKernel(Kernel):
    """Kernel of cuDNN attention, called through torch: the fastest of torch's own on Hopper."""

    name = "cudnn"
    # Through torch 2.11 the backward pass differs from call to call even under use_deterministic_algorithms.
    has_deterministic_mode = False
    _plans = PlanCheck()

    most_head_dim = 128
    packages = ("torch.lib", "nvidia.cudnn")

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.backends.cudnn.version() is None:  # type: ignore[no-untyped-call]
            return "needs a CUDA device with cuDNN"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "needs compute capability 8.0 or higher"
        return None

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
        state = _no_dropout_state(q.device)
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            *_bhsd(dout, q, k, v, out), lse.unsqueeze(-1), state, state, None, None, None, q.shape[1], k.shape[1],
            0.0, causal, scale=scale,
        )  # fmt: skip
        result: Gradients = _bhsd(*gradients)  # type: ignore[assignment]
        self._plans.check(result, dout, q, k, v, out, lse, scale, causal)
        return result

    # cuDNN refuses one query with one key, such as a document of one token.
    def _forward_part(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, part: AttnRectangle
    ) -> tuple[Tensor, Tensor]:
        if part.queries == part.keys == 1:
            return ReferenceKernel().forward(q, k, v, scale=scale, causal=False)
        return super()._forward_part(q, k, v, scale, part)

    def _backward_part(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, part: AttnRectangle,
    ) -> Gradients:  # fmt: skip
        if part.queries == part.keys == 1:
            return ReferenceKernel().backward(dout, q, k, v, lse, out=out, scale=scale, causal=False)
        return super()._backward_part(dout, q, k, v, lse, out, delta, scale, part)


class TorchFlashKernel(VarlenKernel):
    """Kernel of the flash attention built into torch."""

    name = "torch-flash"
    grouped_heads = False
    takes_windows = True

    most_head_dim = 256

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "needs a CUDA device"

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
        rng = torch.empty(2, dtype=torch.uint64, device=q.device)
        with _deterministic(self.deterministic):
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                dout, q, k, v, out, lse.contiguous(), None, None, seq_q, seq_kv, 0.0, causal, rng, rng[0],
                scale=scale,
            )  # fmt: skip
        return _bhsd(dq, dk, dv)  # type: ignore[return-value]

    def _varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, lengths.cumulative_q, lengths.cumulative_kv, batch.most_queries, batch.most_keys, 0.0,
            batch.causal, False, scale=scale, window_size_left=batch.left, window_size_right=batch.right,
        )  # fmt: skip
        return out, lse

    def _varlen_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Lengths, batch: Batch,
        scale: float,
    ) -> Gradients:  # fmt: skip
        rng = torch.empty(2, dtype=torch.uint64, device=q.device)
        with _deterministic(self.deterministic):
            dq, dk, dv = aten._flash_attention_backward(
                dout, q, k, v, out, lse, lengths.cumulative_q, lengths.cumulative_kv, batch.most_queries,
                batch.most_keys, 0.0, batch.causal, rng, rng[0], scale=scale, window_size_left=batch.left,
                window_size_right=batch.right,
            )  # fmt: skip
        return dq, dk, dv


class TorchEfficientKernel(Kernel):
    """Kernel of torch's memory-efficient attention, which supports float32 on a GPU."""

    name = "torch-efficient"
    grouped_heads = False
    has_deterministic_mode = False

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "needs a CUDA device"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        seq = q.shape[1]
        q, k, v = _bhsd(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        # The kernel pads the rows of its LSE.
        return out.transpose(1, 2), lse[..., :seq].contiguous()

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        assert out is not None
        padding = -lse.shape[-1] % _EFFICIENT_ROWS
        lse = torch.nn.functional.pad(lse, (0, padding), value=float("inf"))
        dout, q, k, v, out = _bhsd(dout, q, k, v, out)
        state = _no_dropout_state(q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, state, state, 0.0, [True, True, True, False], causal, scale=scale
        )
        return _bhsd(dq, dk, dv)  # type: ignore[return-value]


_EFFICIENT_ROWS = 32
"""Divisor of the number of LSE rows of the memory-efficient kernel."""


class CpuFlashKernel(Kernel):
    """Kernel of torch's flash attention for the CPU."""

    name = "cpu-flash"
    grouped_heads = False
    takes_windows = True

    dtypes = None
    head_dim_step = 1

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if device.type == "cpu" else "runs on the CPU only"

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _bhsd(q, k, v)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out.transpose(1, 2), lse

    def _forward_band(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, part: AttnRectangle
    ) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, scale, False, _additive_mask(part, q))

    def _backward_band(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, part: AttnRectangle,
    ) -> Gradients:  # fmt: skip
        return self._backward(dout, q, k, v, lse, out, delta, scale, False, _additive_mask(part, q))

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool, mask: Tensor | None = None,
    ) -> Gradients:  # fmt: skip
        assert out is not None
        dout, q, k, v, out = _bhsd(dout, q, k, v, out)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=mask, scale=scale
        )
        return _bhsd(dq, dk, dv)  # type: ignore[return-value]


def _additive_mask(part: AttnRectangle, like: Tensor) -> Tensor:
    """Build the additive mask of a rectangle: 0 where a query sees a key, else -inf."""
    hidden = ~band_mask(part, like.device)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


class _deterministic:
    """Context manager for torch's deterministic algorithms, a global setting that cuDNN and torch's flash read."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def __enter__(self) -> None:
        self._was_enabled = torch.are_deterministic_algorithms_enabled()
        if self._enabled and not self._was_enabled:
            torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        if self._enabled and not self._was_enabled:
            torch.use_deterministic_algorithms(False)
