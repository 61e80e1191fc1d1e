"""The kernel seam: one block of attention on one device, forward and backward.

Tensors are (B, S, H, D) for q, out and dout, (B, S, Hkv, D) for k and v, and (B, H, S) float32 for the LSE, natural
logarithm. A block is full, or causal and square, or made of `Parts`. Every kernel counts the FLOPs of what it computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ringprof.strategies.errors import Unsupported
from ringprof.strategies.kernels.merge import accumulate, merge_rows, output_with_delta, wide_type
from ringprof.strategies.masks.mask_blocks import AttnRectangle, MaskBlocks

Gradients = tuple[Tensor, Tensor, Tensor]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLOPS_PER_PAIR = {"forward": 4, "backward": 10}
"""Of one query, one key and one number of their heads."""


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
    several_lengths = False
    """Whether one call computes packed documents of any lengths; otherwise there is a call a document."""
    tried = True
    """Whether the authors have run it; otherwise stand-ins with its public signatures hold what it is given."""
    takes_windows = False
    """Whether it computes parts that are bands."""
    takes_softcap = False
    """Whether it computes softcap · tanh(score / softcap) in place of a score."""
    pairs_gradients = False
    """Whether dK and dV of one block lie side by side, as `beside` makes them."""
    grouped_heads = True
    """Whether fewer kv heads than heads are taken as they are; otherwise they are repeated, gradients summed."""

    def __init__(self, *, deterministic: bool = False, softcap: float = 0.0) -> None:
        if softcap and not self.takes_softcap:
            raise Unsupported(f"kernel {self.name!r} takes no softcap")
        self.deterministic, self.softcap = deterministic, softcap
        self.flops = 0
        self.calls = {"forward": 0, "backward": 0}

    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = (torch.bfloat16, torch.float16)
    """The types that it takes; None: any."""
    most_head_dim: ClassVar[int | None] = None
    """The largest head_dim that it takes; None: any."""
    head_dim_step: ClassVar[int] = 8
    """What divides every head_dim that it takes."""

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Why it does not run on such a device here; None where it does."""
        return None

    @classmethod
    def why_unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this kernel cannot run such a problem here; None where it can."""
        absent = cls.missing(device)
        if absent:
            return absent
        if head_dim % cls.head_dim_step or (cls.most_head_dim is not None and head_dim > cls.most_head_dim):
            return f"takes head_dim {cls.head_dims()}, not {head_dim}"
        if cls.dtypes is not None and dtype not in cls.dtypes:
            return f"takes {cls.types()}, not {dtype}"
        return None

    @classmethod
    def head_dims(cls) -> str:
        """Those that it takes, in words."""
        most = "" if cls.most_head_dim is None else f"up to {cls.most_head_dim}"
        steps = "" if cls.head_dim_step == 1 else f"in steps of {cls.head_dim_step}"
        return " ".join(filter(None, (most, steps))) or "any"

    @classmethod
    def types(cls) -> str:
        """Those that it takes, in words."""
        if cls.dtypes is None:
            return "any"
        *others, last = (NAMES[dtype] for dtype in cls.dtypes)
        return f"{', '.join(others)} and {last}" if others else last

    def again(self) -> Kernel:
        """Another one of the same settings, which has counted nothing."""
        return type(self)(deterministic=self.deterministic, softcap=self.softcap)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, parts: MaskBlocks | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output (B, Sq, H, D) in q's type and LSE (B, H, Sq) in float32 (float64 for float64 input).

        Of ``parts`` alone where they are given: the output, which may be wider, is 0 and the LSE -inf in rows that no
        part has.
        """
        self._count("forward", q, k, causal, parts)
        if not self.grouped_heads:
            k, v = self._heads_for(q, k, v)
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
    ) -> Gradients:
        """Gradients dq, dk, dv of one block, in the inputs' type; of ``parts`` alone where they are given, and wider.

        ``lse`` and ``out`` (or ``delta``, (B, H, Sq) float32) are those of the whole row over all blocks, which makes
        every block's gradient independent of the others.
        """  # fmt: skip
        self._count("backward", q, k, causal, parts)
        if delta is not None and not self.takes_delta:
            out, delta = output_with_delta(dout, delta), None
        given = k
        if not self.grouped_heads:
            k, v = self._heads_for(q, k, v)
        if parts is None:
            dq, dk, dv = self._backward(dout, q, k, v, lse, out, delta, scale, causal)
        else:
            dq, dk, dv = self._backward_parts(dout, q, k, v, lse, out, delta, scale, parts)
        return (dq, dk, dv) if k is given else (dq, *(_sum_groups(x, given.shape[2]) for x in (dk, dv)))  # type: ignore[return-value]

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients: ...  # fmt: skip

    # --- blocks of parts: one call each, unless a kernel takes several sequences of any length in one ---------------

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
            found = self._backward_part(
                dout[:, rows].contiguous(), q[:, rows], k[:, part.kv], v[:, part.kv], lse[..., rows].contiguous(),
                None if out is None else out[:, rows].contiguous(),
                None if delta is None else delta[..., rows].contiguous(), scale, part,
            )  # fmt: skip
            for total, where, gradient in zip((dq, dk, dv), (rows, part.kv, part.kv), found, strict=True):
                accumulate(total[:, where], gradient)
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

    def _count(self, phase: str, q: Tensor, k: Tensor, causal: bool, parts: MaskBlocks | None = None) -> None:
        batch, seq, heads, head_dim = q.shape
        pairs = parts.area if parts else seq * (seq + 1) // 2 if causal else seq * k.shape[1]
        self.flops += FLOPS_PER_PAIR[phase] * batch * heads * head_dim * pairs
        self.calls[phase] += 1

    def _heads_for(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v with as many heads as q: themselves, or repeated."""
        if q.shape[2] == k.shape[2]:
            return k, v
        groups = q.shape[2] // k.shape[2]
        return k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)


def beside(k: Tensor) -> tuple[Tensor, Tensor]:
    """Room for dK and dV side by side: what comes after takes both in one step."""
    dk, dv = torch.empty((2, *k.shape), dtype=k.dtype, device=k.device).unbind(0)
    return dk, dv


def _sum_groups(gradient: Tensor, kv_heads: int) -> Tensor:
    batch, seq, heads, head_dim = gradient.shape
    grouped = gradient.view(batch, seq, kv_heads, heads // kv_heads, head_dim)
    return grouped.sum(3, dtype=wide_type(gradient)).to(gradient.dtype)
