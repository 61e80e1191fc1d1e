"""Kernels of flash-attn 3 and 4, called by the functions that their own autograd functions call.

A recording checks the results of every kernel before it measures them, including these.

Source: Dao-AILab/flash-attention, hopper/flash_api_stable.cpp (3) and flash_attn/cute/interface.py (4).
"""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks.mask_blocks import Batch, Lengths
from .kernel import Gradients, allocate_adjacent
from .varlen import VarlenKernel


def _disabled_features() -> frozenset[str]:
    """Return the features that the installed flash-attn 3 was compiled without, such as "SOFTCAP" or "HDIM256".

    Its setup.py writes FLASHATTENTION_DISABLE_... of the build into the module ``flash_attn_config``. A call that needs
    a disabled feature can end the process by a segmentation fault (seen: softcap on H200), so no such call is made.
    """
    try:
        flags = import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError, TypeError):
        return frozenset()
    return frozenset(
        name.rpartition("DISABLE_")[2] for name, disabled in flags.items() if "DISABLE_" in name and disabled
    )


_DISABLED = _disabled_features()


class _NewerFlashAttn(VarlenKernel):
    """Base class of both kernels: a plain block and packed rows are one call with and without `_packed` arguments."""

    pairs_gradients = True
    dense_rows = False
    writes_into = True

    @abstractmethod
    def _call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, **packed: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute out and LSE: of a block as in `Kernel.forward`, of packed rows as in `_varlen_forward`."""

    @abstractmethod
    def _call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, gradients: Gradients,
        scale: float, causal: bool, **packed: Any,
    ) -> None:  # fmt: skip
        """Write dq, dk and dv into ``gradients``."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return self._call_forward(q, k, v, scale, causal)

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool, into: Gradients | None = None,
    ) -> Gradients:  # fmt: skip
        gradients = into or (torch.empty_like(q), *allocate_adjacent(k, v))
        self._call_backward(dout, q, k, v, out, lse, gradients, scale, causal)
        return gradients

    def _varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._call_forward(q, k, v, scale, batch.causal, **_packed(lengths, batch))

    def _varlen_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Lengths, batch: Batch,
        scale: float, into: Gradients | None = None,
    ) -> Gradients:  # fmt: skip
        gradients = into or (torch.empty_like(q), *allocate_adjacent(k, v))
        self._call_backward(dout, q, k, v, out, lse, gradients, scale, batch.causal, **_packed(lengths, batch))
        return gradients


def _packed(lengths: Lengths, batch: Batch) -> dict[str, Any]:
    """Return the keyword arguments that describe packed sequences."""
    return {
        "cu_seqlens_q": lengths.cumulative_q, "cu_seqlens_k": lengths.cumulative_kv,
        "max_seqlen_q": batch.most_queries, "max_seqlen_k": batch.most_keys,
        "window_size_left": batch.left, "window_size_right": batch.right,
    }  # fmt: skip


class FlashAttn3Kernel(_NewerFlashAttn):
    """Kernel of flash-attn 3 for Hopper (module ``flash_attn_interface``), with the features of the installed build."""

    name = "flash-attn-3"
    takes_windows = "LOCAL" not in _DISABLED
    takes_softcap = "SOFTCAP" not in _DISABLED
    # A smaller head_dim is computed with the next larger size that was compiled.
    most_head_dim = max((size for size in (64, 96, 128, 192, 256) if f"HDIM{size}" not in _DISABLED), default=0)
    packages = ("flash_attn_interface", "flash_attn_3", "flash_attn_config")
    dtypes = (torch.bfloat16,) if "FP16" in _DISABLED else (torch.bfloat16, torch.float16)
    _takes_192_and_128 = "HDIMDIFF192" not in _DISABLED

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        if find_spec("flash_attn_interface") is None:
            return "needs flash-attn 3: build hopper/ of github.com/Dao-AILab/flash-attention"
        for feature in ("BACKWARD", "VARLEN"):
            if feature in _DISABLED:
                return f"needs a flash-attn 3 that was built without FLASHATTENTION_DISABLE_{feature}"
        return None if torch.cuda.get_device_capability(device)[0] == 9 else "needs a Hopper GPU (capability 9.0)"

    @classmethod
    def takes_v_head_dim(cls, head_dim: int, v_head_dim: int) -> bool:
        if not cls._takes_192_and_128 or v_head_dim == head_dim:
            return v_head_dim == head_dim
        return 128 < head_dim <= 192 and 96 < v_head_dim <= 128 and v_head_dim % cls.head_dim_step == 0

    def _call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, **packed: Any
    ) -> tuple[Tensor, Tensor]:
        # By default the operator may split the keys where there are few queries, which not every build can do.
        out, lse, *_ = _operators().fwd.default(
            q, k, v, softmax_scale=scale, is_causal=causal, softcap=self.softcap, num_splits=1, **packed
        )
        return out, lse

    def _call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, gradients: Gradients,
        scale: float, causal: bool, **packed: Any,
    ) -> None:  # fmt: skip
        _operators().bwd.default(
            dout, q, k, v, out, lse, *gradients, softmax_scale=scale, is_causal=causal, softcap=self.softcap,
            deterministic=self.deterministic, **packed,
        )  # fmt: skip


@cache
def _operators() -> Any:
    """Return the compiled operators of flash-attn 3. Its Python functions take twice their host time per call."""
    import flash_attn_interface

    return flash_attn_interface.flash_attn_3_gpu


class FlashAttn4Kernel(_NewerFlashAttn):
    """Kernel of flash-attn 4, written in CuTe's Python (package ``flash_attn.cute``).

    It compiles its operators when they are first called with a new set of features, in 2 to 7 seconds on H100. The
    environment variable FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them for later processes.
    """

    name = "flash-attn-4"
    takes_windows = True
    takes_softcap = True
    most_head_dim = 256
    packages = ("flash_attn.cute", "cutlass", "quack")

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        package = find_spec("flash_attn")
        folders = [] if package is None else list(package.submodule_search_locations or ())
        if not any(os.path.isdir(os.path.join(folder, "cute")) for folder in folders) or find_spec("cutlass") is None:
            return "needs flash-attn 4: pip install --pre 'flash-attn-4[cu13]'"
        # On 12 (GeForce), 4.0.0b36 has neither a deterministic backward pass nor one with a softcap.
        taken = torch.cuda.get_device_capability(device)[0] in (9, 10, 11)
        return None if taken else "needs a Hopper or data-center Blackwell GPU (capability 9 to 11)"

    @classmethod
    def why_unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = super().why_unsupported(device, dtype, head_dim)
        if reason is not None:
            return reason
        if torch.cuda.get_device_capability(device)[0] > 9:
            taken = head_dim <= 128 or head_dim == 256
            return None if taken else f"takes head_dim up to 128, or 256, on GPUs newer than Hopper: not {head_dim}"
        # 4.0.0b36 rounds sizes up to 128 to a multiple of 16 in the backward kernel, to one of 32 before and after it.
        # Where the two differ, dQ is wrong (pull request 2896 there; seen on H100: 8, 16, 72, 80), or nothing compiles.
        taken = head_dim > 128 or -(-head_dim // 16) % 2 == 0
        return None if taken else f"takes head_dim 24, 32, 56, 64, 88, 96, or from 120, on Hopper: not {head_dim}"

    @classmethod
    def head_dims(cls) -> str:
        return f"{super().head_dims()}, fewer by GPU"

    @classmethod
    def takes_v_head_dim(cls, head_dim: int, v_head_dim: int) -> bool:
        # What it takes on Hopper and on newer GPUs.
        return v_head_dim == head_dim or (head_dim, v_head_dim) == (192, 128)

    def _call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, **packed: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _interface()._flash_attn_fwd(
            q, k, v, softmax_scale=scale, causal=causal, softcap=self.softcap, return_lse=True, **_bounded(packed)
        )
        return out, lse

    def _call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, gradients: Gradients,
        scale: float, causal: bool, **packed: Any,
    ) -> None:  # fmt: skip
        dq, dk, dv = gradients
        missing = q.shape[-1] - v.shape[-1] if q.shape[-2] != k.shape[-2] else 0
        if missing:
            # The backward pass takes grouped heads of one size only. Zeros in v change no gradient.
            assert out is not None
            v, out, dout, dv = (pad(x, (0, missing)) for x in (v, out, dout, dv))
        _interface()._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale, causal=causal, softcap=self.softcap,
            deterministic=self.deterministic, dq=dq, dk=dk, dv=dv, **_bounded(packed),
        )  # fmt: skip
        if missing:
            gradients[2].copy_(dv[..., :-missing])


def _bounded(packed: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of packed sequences without the sides of a window that have no limit (-1)."""
    return {name: value for name, value in packed.items() if not (name.startswith("window") and value < 0)}


def _interface() -> Any:
    """Return the module of flash-attn 4's functions."""
    from flash_attn.cute import interface

    return interface
