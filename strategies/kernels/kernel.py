"""Kernel interface: one block of attention on one device, forward and backward.

Tensors are (B, S, H, D) for q, out and dout, (B, S, Hkv, D) for k and v, and (B, H, S) for the LSE (natural logarithm,
in float32; float64 for float64). A block is full, or causal and square, or a set of rectangles (`MaskBlocks`). Every
kernel counts its FLOPs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import Unsupported
from ..masks.mask_blocks import AttnRectangle, MaskBlocks
from .merge import accumulate, merge_rows, output_with_delta, wide_type

Gradients = tuple[Tensor, Tensor, Tensor]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLOPS_PER_PAIR = {"forward": (2, 2), "backward": (6, 4)}
"""FLOPs per query-key pair, by pass: per number of a head of q and k, and per number of a head of v."""


class Kernel(ABC):
    """Base class of attention kernels. It counts FLOPs and prepares tensors; subclasses compute."""

    name: str
    takes_delta = False
    """Whether the backward pass accepts delta = rowsum(dO * O) instead of O."""
    has_deterministic_mode = True
    production = True
    """Whether ``auto`` may choose the kernel; a kernel for checks is chosen only by name."""
    dense_rows = True
    """Whether the backward pass needs contiguous O and dO, as torch's own autograd passes them. torch caches cuDNN's
    plans only by the strides of q, k and v: O, dO and LSE must always have the strides that match such a q."""
    varlen = False
    """Whether one call computes packed documents of any lengths; otherwise each document needs a call."""
    tested = True
    """Whether the authors have run the kernel; otherwise, tests use fakes with its public signatures."""
    takes_windows = False
    """Whether the kernel computes rectangles with a sliding window (bands)."""
    takes_softcap = False
    """Whether the kernel can replace a score with softcap · tanh(score / softcap)."""
    pairs_gradients = False
    """Whether dK and dV of one block are adjacent in memory, as `allocate_adjacent` returns them."""
    writes_into = False
    """Whether the backward pass can write its gradients into views of larger tensors, such as of some heads or rows.

    Other kernels allocate them, and they are copied."""
    grouped_heads = True
    """Whether fewer kv heads than heads are supported directly.

    Otherwise, kv heads are repeated and gradients summed.
    """
    packages: ClassVar[tuple[str, ...]] = ("torch.lib",)
    """Importable names of the packages whose files the results depend on."""
    compiles_by_heads = False
    """Whether the kernel is compiled on a GPU for each batch and number of heads."""

    def __init__(self, *, deterministic: bool = False, softcap: float = 0.0) -> None:
        if softcap and not self.takes_softcap:
            raise Unsupported(f"kernel {self.name!r} takes no softcap")
        self.deterministic, self.softcap = deterministic, softcap
        self.flops = 0
        self.calls = {"forward": 0, "backward": 0}

    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = (torch.bfloat16, torch.float16)
    """Supported data types; None: any."""
    most_head_dim: ClassVar[int | None] = None
    """Largest supported head_dim; None: any."""
    head_dim_step: ClassVar[int] = 8
    """Divisor of every supported head_dim."""

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Return why the kernel does not run on a device with the installed packages; None if it does."""
        return None

    @classmethod
    def why_unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why the kernel cannot run a problem on a device; None if it can."""
        missing = cls.missing(device)
        if missing:
            return missing
        if head_dim % cls.head_dim_step or (cls.most_head_dim is not None and head_dim > cls.most_head_dim):
            return f"takes head_dim {cls.head_dims()}, not {head_dim}"
        if cls.dtypes is not None and dtype not in cls.dtypes:
            return f"takes {cls.types()}, not {dtype}"
        return None

    @classmethod
    def takes_v_head_dim(cls, head_dim: int, v_head_dim: int) -> bool:
        """Return whether heads of v may have ``v_head_dim``, where those of q and k have ``head_dim``.

        Otherwise the caller pads v with zeros to ``head_dim``.
        """
        return v_head_dim == head_dim

    @classmethod
    def head_dims(cls) -> str:
        """Describe the supported values of head_dim."""
        most = "" if cls.most_head_dim is None else f"up to {cls.most_head_dim}"
        steps = "" if cls.head_dim_step == 1 else f"in steps of {cls.head_dim_step}"
        return " ".join(filter(None, (most, steps))) or "any"

    @classmethod
    def types(cls) -> str:
        """Describe the supported data types."""
        if cls.dtypes is None:
            return "any"
        *others, last = (NAMES[dtype] for dtype in cls.dtypes)
        return f"{', '.join(others)} and {last}" if others else last

    def again(self) -> Kernel:
        """Create a kernel with the same settings and counters at zero."""
        return type(self)(deterministic=self.deterministic, softcap=self.softcap)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, parts: MaskBlocks | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute output (B, Sq, H, D) in q's type and LSE (B, H, Sq) in float32 (float64 for float64 input).

        With ``parts``, compute only those rectangles. The output may then have a wider type. In rows outside of all
        rectangles, the output is 0 and the LSE is -inf.
        """
        self._count("forward", q, k, v, causal, parts)
        q, k, v = as_kernel_input(q), as_kernel_input(k), as_kernel_input(v)
        if not self.grouped_heads:
            k, v = self._match_heads(q, k, v)
        return self._forward(q, k, v, scale, causal) if parts is None else self._forward_parts(q, k, v, scale, parts)

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
        parts: MaskBlocks | None = None,
        into: Gradients | None = None,
    ) -> Gradients:
        """Compute the gradients dq, dk, dv of one block, in the inputs' type, and write them ``into`` tensors if given.

        With ``parts``, compute only those rectangles; the gradients may then have a wider type. ``lse`` and ``out``
        (or ``delta``, (B, H, Sq) float32) are those of the whole row over all blocks. This makes the gradient of each
        block independent of the others.
        """  # fmt: skip
        self._count("backward", q, k, v, causal, parts)
        if delta is not None and not self.takes_delta:
            out, delta = output_with_delta(dout, delta), None
        dout, q, k, v = as_kernel_input(dout), as_kernel_input(q), as_kernel_input(k), as_kernel_input(v)
        original_k = k
        if not self.grouped_heads:
            k, v = self._match_heads(q, k, v)
        writes = into is not None and self.writes_into and k is original_k
        options: dict[str, Any] = {"into": into} if writes else {}
        if parts is None:
            dq, dk, dv = self._backward(dout, q, k, v, lse, out, delta, scale, causal, **options)
        else:
            dq, dk, dv = self._backward_parts(dout, q, k, v, lse, out, delta, scale, parts, **options)
        if k is not original_k:
            dk, dv = (_sum_groups(x, original_k.shape[2]) for x in (dk, dv))
        if into is None:
            return dq, dk, dv
        for target, gradient in zip(into, (dq, dk, dv), strict=True):
            if gradient is not target:
                target.copy_(gradient)
        return into

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients: ...  # fmt: skip

    # --- blocks of several rectangles: one call per rectangle, unless a kernel is varlen ---------------------------

    def _forward_parts(self, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: MaskBlocks) -> tuple[Tensor, Tensor]:
        batch, seq, heads, _ = q.shape
        wide = wide_type(q)
        out = q.new_zeros((batch, seq, heads, v.shape[3]), dtype=wide if parts.share_queries else q.dtype)
        lse = q.new_full((batch, heads, seq), float("-inf"), dtype=wide)
        for part in parts:
            part_out, part_lse = self._forward_part(q[:, part.q], k[:, part.kv], v[:, part.kv], scale, part)
            if parts.share_queries:
                merge_rows(out, lse, part_out, part_lse, part.q)
            else:
                out[:, part.q] = part_out
                lse[..., part.q] = part_lse
        return out, lse

    def _backward_parts(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, parts: MaskBlocks,
    ) -> Gradients:  # fmt: skip
        wide = wide_type(q)
        dq = torch.zeros_like(q, dtype=wide if parts.share_queries else q.dtype)
        dk, dv = (torch.zeros_like(x, dtype=wide if parts.share_keys else x.dtype) for x in (k, v))
        for part in parts:
            rows = part.q
            gradients = self._backward_part(
                dout[:, rows].contiguous(), q[:, rows], k[:, part.kv], v[:, part.kv], lse[..., rows].contiguous(),
                None if out is None else out[:, rows].contiguous(),
                None if delta is None else delta[..., rows].contiguous(), scale, part,
            )  # fmt: skip
            for total, sum_rows, gradient in zip((dq, dk, dv), (rows, part.kv, part.kv), gradients, strict=True):
                accumulate(total[:, sum_rows], gradient)
        return dq, dk, dv

    def _forward_part(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, part: AttnRectangle
    ) -> tuple[Tensor, Tensor]:
        if part.full or part.causal:
            return self._forward(q, k, v, scale, part.causal)
        return self._forward_band(q, k, v, scale, part)

    def _backward_part(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, part: AttnRectangle,
    ) -> Gradients:  # fmt: skip
        if part.full or part.causal:
            return self._backward(dout, q, k, v, lse, out, delta, scale, part.causal)
        return self._backward_band(dout, q, k, v, lse, out, delta, scale, part)

    def _forward_band(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, part: AttnRectangle
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(f"kernel {self.name} takes no windows")

    def _backward_band(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, part: AttnRectangle,
    ) -> Gradients:  # fmt: skip
        raise NotImplementedError(f"kernel {self.name} takes no windows")

    def _count(self, phase: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, parts: MaskBlocks | None) -> None:
        """Add one call and its FLOPs to the counters; ``phase`` is ``forward`` or ``backward``."""
        batch, seq, heads, head_dim = q.shape
        pairs = parts.area if parts else seq * (seq + 1) // 2 if causal else seq * k.shape[1]
        per_qk, per_v = FLOPS_PER_PAIR[phase]
        self.flops += (per_qk * head_dim + per_v * v.shape[3]) * batch * heads * pairs
        self.calls[phase] += 1

    def _match_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v with as many heads as q, repeated if necessary."""
        if q.shape[2] == k.shape[2]:
            return k, v
        groups = q.shape[2] // k.shape[2]
        return k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)


def as_kernel_input(x: Tensor) -> Tensor:
    """Return ``x`` (B, S, H, D), copied where kernels would read wrong elements without an error.

    They assume that D is the innermost dimension and that no stride is 0; on a GPU also that every row begins at a
    multiple of 16 bytes, as in no view from an odd offset of a flat buffer.
    """
    if x.is_contiguous() and not (x.is_cuda and (x.data_ptr() | x.size(-1) * x.element_size()) % _ALIGNMENT):
        return x
    strides = x.stride()
    dense = strides[-1] == 1 and 0 not in strides
    if dense and x.is_cuda and (x.data_ptr() % _ALIGNMENT or gcd(*strides[:-1]) * x.element_size() % _ALIGNMENT):
        return x.clone(memory_format=torch.contiguous_format)
    return x if dense else x.contiguous()


_ALIGNMENT = 16
"""Bytes that GPU kernels load at once."""


def allocate_adjacent(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate dK and dV; where k and v have one shape, adjacent in memory, so that one operation can process both."""
    if k.shape != v.shape:
        return k.new_empty(k.shape), v.new_empty(v.shape)
    dk, dv = torch.empty((2, *k.shape), dtype=k.dtype, device=k.device).unbind(0)
    return dk, dv


def _sum_groups(gradient: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradients of repeated kv heads."""
    batch, seq, heads, head_dim = gradient.shape
    grouped = gradient.view(batch, seq, kv_heads, heads // kv_heads, head_dim)
    return grouped.sum(3, dtype=wide_type(gradient)).to(gradient.dtype)
