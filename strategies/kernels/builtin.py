"""Registry of attention kernels by name, and the choice of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringprof.mask import NO_LIMIT, Mask
from ringprof.strategies.errors import UnknownName, Unsupported
from ringprof.strategies.kernels.flex import FlexKernel
from ringprof.strategies.kernels.kernel import Gradients, Kernel, allocate_adjacent
from ringprof.strategies.kernels.merge import row_product, wide_type
from ringprof.strategies.kernels.newer_flash_attn import FlashAttn3Kernel, FlashAttn4Kernel
from ringprof.strategies.kernels.torch_builtin import (
    CpuFlashKernel,
    CudnnKernel,
    TorchEfficientKernel,
    TorchFlashKernel,
)
from ringprof.strategies.kernels.varlen import VarlenKernel
from ringprof.strategies.masks.mask_blocks import AttnRectangle, Batch, Lengths, band_mask

__all__ = ["KERNELS", "Gradients", "Kernel", "ReferenceKernel", "choose_kernel"]


class FlashAttnKernel(VarlenKernel):
    """Kernel of the flash-attn package, version 2."""

    name = "flash-attn"
    dense_rows = False
    pairs_gradients = True
    takes_windows = True
    takes_softcap = True
    most_head_dim = 256

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        return None if find_spec("flash_attn") else "needs the flash-attn package: pip install 'ringprof[flash]'"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _flash_attn().fwd(q, k, v, None, None, 0.0, scale, causal, -1, -1, self.softcap, False, None)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        dk, dv = allocate_adjacent(k)
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


class ReferenceKernel(Kernel):
    """Dense attention in float64 for checks: slow, but for any device and type."""

    name = "reference"
    takes_delta = True
    takes_windows = True
    takes_softcap = True
    grouped_heads = False
    production = False

    dtypes = None
    head_dim_step = 1

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return self.forward_masked(q, k, v, scale, self._visible_keys(q, causal))

    def _forward_band(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, part: AttnRectangle
    ) -> tuple[Tensor, Tensor]:
        return self.forward_masked(q, k, v, scale, band_mask(part, q.device))

    def forward_masked(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute output and LSE with as many kv heads as heads.

        ``mask``: bool (Sq, Sk), the keys that each query sees; None: all keys.
        """
        scores = self._mask_scores(self._scores(q, k, scale), mask)
        lse = torch.logsumexp(scores, dim=-1)
        out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse.unsqueeze(-1)).exp(), v.double())
        return out.to(q.dtype), lse.to(wide_type(q))

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        return self.backward_masked(dout, q, k, v, lse, out, delta, scale, self._visible_keys(q, causal))

    def _backward_band(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, part: AttnRectangle,
    ) -> Gradients:  # fmt: skip
        return self.backward_masked(dout, q, k, v, lse, out, delta, scale, band_mask(part, q.device))

    def backward_masked(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, mask: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """Compute the gradients dq, dk, dv; ``mask`` is that of `forward_masked`."""
        if delta is None:
            assert out is not None
            delta = row_product(dout.double(), out.double())
        scores = self._scores(q, k, scale)
        weights = (self._mask_scores(scores, mask) - lse.double().unsqueeze(-1)).exp()
        dweights = torch.einsum("bqhd,bkhd->bhqk", dout.double(), v.double())
        dscores = weights * (dweights - delta.double().unsqueeze(-1)) * scale
        if self.softcap:
            dscores = dscores * (1 - (scores / self.softcap).square())
        dq = torch.einsum("bhqk,bkhd->bqhd", dscores, k.double())
        dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.double())
        dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout.double())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _visible_keys(self, q: Tensor, causal: bool) -> Tensor | None:
        return torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril() if causal else None

    def _scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return capped(torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale, self.softcap)

    @staticmethod
    def _mask_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


class MaskedReference(ReferenceKernel):
    """Dense attention in float64 over a whole sequence with an arbitrary mask, for checks."""

    def __init__(self, mask: Mask, *, softcap: float = 0.0) -> None:
        super().__init__(softcap=softcap)
        self._mask = mask

    def _visible_keys(self, q: Tensor, causal: bool) -> Tensor:
        positions = torch.arange(q.shape[1], device=q.device)
        return KeyStretches.of(self._mask, positions, q.shape[1]).shown(positions)


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Return ``softcap`` · tanh(scores / ``softcap``); the scores themselves if ``softcap`` is 0."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


class KeyStretches(NamedTuple):
    """Ranges of keys that each of R query rows sees, as int64 positions."""

    stretches: tuple[tuple[Tensor, Tensor], ...]
    """First key (R) and end (R) of each range; there are one or two ranges per row."""

    @classmethod
    def of(cls, mask: Mask, positions: Tensor, seq: int) -> KeyStretches:
        """Return the ranges of ``seq`` keys that queries at these positions see."""
        mask.check(seq)
        bounds = torch.tensor(mask.documents or (0, seq), device=positions.device)
        document = torch.searchsorted(bounds, positions, right=True)
        document_start, document_end = bounds[document - 1], bounds[document]
        first = document_start if mask.left == NO_LIMIT else torch.maximum(document_start, positions - mask.left)
        end = document_end if mask.right == NO_LIMIT else torch.minimum(document_end, positions + mask.right + 1)
        if not mask.prefix:
            return cls(((first, end),))
        return cls(
            (
                (first, end),
                (document_start, torch.minimum(document_start + mask.prefix, end if mask.causal else document_end)),
            )
        )

    def repeated(self, times: int) -> KeyStretches:
        """Return the ranges with all rows repeated ``times`` times, for the heads of a group."""
        return KeyStretches(tuple((first.repeat(times), end.repeat(times)) for first, end in self.stretches))

    def bounds(self) -> tuple[int, int]:
        """Return the first key that any row sees, and the end of the keys that any row sees."""
        return min(int(first.min()) for first, _ in self.stretches), max(int(end.max()) for _, end in self.stretches)

    def shown(self, keys: Tensor) -> Tensor:
        """Return which of the keys at these positions (K) each row sees: bool (R, K)."""
        masks = [(keys >= first[:, None]) & (keys < end[:, None]) for first, end in self.stretches]
        return masks[0] if len(masks) == 1 else masks[0] | masks[1]


# Fastest first: on H200, cuDNN measured about 1.7 times as fast as flash-attn 2; flash-attn 3 and 4 as their authors
# state.
KERNELS: dict[str, type[Kernel]] = {
    kernel.name: kernel
    for kernel in (
        CudnnKernel,
        FlashAttn3Kernel,
        FlashAttnKernel,
        FlashAttn4Kernel,
        TorchFlashKernel,
        TorchEfficientKernel,
        CpuFlashKernel,
        FlexKernel,
        ReferenceKernel,
    )
}


_LACKS = {
    "windows": "takes no sliding windows",
    "softcap": "takes no softcap",
    "deterministic": "has no deterministic backward pass",
}


def choose_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool = False,
    windows: bool = False, documents: bool = False, softcap: float = 0.0, among: Sequence[str] = (),
) -> type[Kernel]:  # fmt: skip
    """Return the kernel called ``name``; for ``auto``, the fastest that supports the device, type and head_dim.

    ``windows``: the kernel must support sliding windows. ``softcap``: above 0, the kernel must support it.
    ``documents``: prefer kernels that compute packed documents in one call; cuDNN builds a plan for every length.
    ``among``: names of the kernels that may be chosen; empty: all.
    Raises `UnknownName`, or `Unsupported` with the reason.
    """
    if name not in ("auto", *KERNELS):
        raise UnknownName(f"no kernel {name!r}; there are: auto, {', '.join(KERNELS)}")
    if among and name not in ("auto", *among):
        raise Unsupported(
            f"kernel {name!r}: this strategy computes blocks in its own way; it supports {', '.join(among)}"
        )
    allowed = [kernel for kernel in KERNELS.values() if kernel.production and (not among or kernel.name in among)]
    if documents and device.type == "cuda":
        allowed.sort(key=lambda kernel: not kernel.varlen)
    candidates = [KERNELS[name]] if name != "auto" else allowed
    requirements = {"windows": windows, "deterministic": deterministic, "softcap": bool(softcap)}
    reasons = {kernel: reason_against(kernel, device, dtype, head_dim, **requirements) for kernel in candidates}
    for kernel, reason in reasons.items():
        if reason is None:
            return kernel
    if name != "auto":
        reason = reasons[KERNELS[name]]
        others = KERNELS.values() if reason in _LACKS.values() else ()
        alternatives = [
            kernel.name for kernel in others if reason_against(kernel, device, dtype, head_dim, **requirements) is None
        ]
        hint = f" (those here that do: {', '.join(alternatives)})" if alternatives else ""
        raise Unsupported(f"kernel {name!r} is not available: it {reason}{hint}")
    explanation = "; ".join(f"{kernel.name} {reason}" for kernel, reason in reasons.items())
    raise Unsupported(f"no kernel takes {dtype} with head_dim {head_dim} on {device.type}: {explanation}")


def reason_against(
    kernel: type[Kernel], device: torch.device, dtype: torch.dtype, head_dim: int, **wants: bool
) -> str | None:
    """Return why a kernel does not support a problem on a device; None if it does. ``wants``: keys of `_LACKS`."""
    supported = {
        "windows": kernel.takes_windows, "softcap": kernel.takes_softcap,
        "deterministic": kernel.has_deterministic_mode,
    }  # fmt: skip
    for feature, required in wants.items():
        if required and not supported[feature]:
            return _LACKS[feature]
    return kernel.why_unsupported(device, dtype, head_dim)
