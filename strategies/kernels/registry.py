"""Registry of attention kernels by name, and the choice of a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from ..errors import UnknownName, Unsupported, nearest_name
from .flash_attn import FlashAttnKernel
from .flex import FlexKernel
from .kernel import Kernel
from .newer_flash_attn import FlashAttn3Kernel, FlashAttn4Kernel
from .reference import ReferenceKernel
from .torch_kernels import (
    CpuFlashKernel,
    CudnnKernel,
    TorchEfficientKernel,
    TorchFlashKernel,
)

# Fastest first, as measured on H200 (docs/kernels.md): flash-attn 3 takes 0.6 to 1.1 of cuDNN's time from 256 tokens
# on, mostly less than 1, and cuDNN about 0.6 of flash-attn 2's. Forward and backward of flash-attn 4 take 0.96 to 1.05
# of flash-attn 3's time from 4,096 tokens on, and it compiles for seconds when it is first called.
KERNELS: dict[str, type[Kernel]] = {
    kernel.name: kernel
    for kernel in (
        FlashAttn3Kernel,
        FlashAttn4Kernel,
        CudnnKernel,
        FlashAttnKernel,
        TorchFlashKernel,
        TorchEfficientKernel,
        CpuFlashKernel,
        FlexKernel,
        ReferenceKernel,
    )
}


_FLASH_ATTN_3_FASTEST_TO = 192
"""Largest head_dim of which flash-attn 3 is the fastest: on H200, its backward pass of 256 reaches 450 TFLOP/s, that of
flash-attn 2 reaches 600."""
NOTHING_REFUSED: Mapping[str, str] = MappingProxyType({})
_LACKS = {
    "windows": "takes no sliding windows",
    "softcap": "takes no softcap",
    "deterministic": "has no deterministic backward pass",
}


def choose_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool = False,
    windows: bool = False, documents: bool = False, softcap: float = 0.0, among: Sequence[str] = (),
    refused: Mapping[str, str] = NOTHING_REFUSED,
) -> type[Kernel]:  # fmt: skip
    """Return the kernel called ``name``; for ``auto``, the fastest that supports the device, type and head_dim.

    ``windows``: the kernel must support sliding windows. ``softcap``: above 0, the kernel must support it.
    ``documents``: prefer kernels that compute packed documents in one call; cuDNN builds a plan for every length.
    ``among``: names of the kernels that may be chosen; empty: all. ``refused``: why kernels are not used, by name.
    Raises `UnknownName`, or `Unsupported` with the reason.
    """
    if name not in ("auto", *KERNELS):
        raise UnknownName(f"no kernel {name!r}{nearest_name(name, KERNELS)}; there are: auto, {', '.join(KERNELS)}")
    if among and name not in ("auto", *among):
        raise Unsupported(
            f"kernel {name!r}: this strategy computes blocks in its own way; it supports {', '.join(among)}"
        )
    preferred = auto_order(head_dim, documents=documents and device.type == "cuda")
    allowed = [kernel for kernel in preferred if not among or kernel.name in among]
    candidates = [KERNELS[name]] if name != "auto" else allowed
    requirements = {"windows": windows, "deterministic": deterministic, "softcap": bool(softcap)}
    reasons = {
        kernel: refused.get(kernel.name) or reason_against(kernel, device, dtype, head_dim, **requirements)
        for kernel in candidates
    }
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


def auto_order(head_dim: int, *, documents: bool = False) -> list[type[Kernel]]:
    """Return the kernels that ``auto`` may choose, in the order in which it prefers them; see `choose_kernel`."""
    order = [kernel for kernel in KERNELS.values() if kernel.production]
    if head_dim > _FLASH_ATTN_3_FASTEST_TO:
        order.sort(key=lambda kernel: kernel is not FlashAttnKernel)
    if documents:
        order.sort(key=lambda kernel: not kernel.varlen)
    return order


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
