"""Kernels and a transport for baselines, which measure a strategy without communication or without computation.

A strategy runs unchanged over a `NullTransport`, which sends nothing, or with a `NoOpKernel`, which computes nothing.
A `RecordingKernel` computes and records its calls, so that the same blocks can be timed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.kernel import Gradients, Kernel, allocate_adjacent
from ..kernels.merge import wide_type
from ..masks.mask_blocks import MaskBlocks
from .message import Message, MessageLayout
from .ring_channel import Channel, Hop

_SLOTS = 2


@contextmanager
def use_kernel(strategy: Any, kernel: Kernel) -> Iterator[None]:
    """Make ``strategy`` compute with ``kernel`` inside the context, whatever the tensors are."""
    before = vars(strategy).get("kernel_for")
    strategy.kernel_for = lambda q, **needs: kernel
    try:
        yield
    finally:
        del strategy.kernel_for
        if before is not None:
            strategy.kernel_for = before


# --- kernels ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorView:
    """The memory layout of a tensor: size, strides in elements, and type."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorView:
        """Describe ``tensor``."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def span(self) -> int:
        """Elements of memory from the first to the last element, both included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True)
class KernelCall:
    """The arguments of one kernel call, without the values. ``rows`` is None for a forward call."""

    q: TensorView
    k: TensorView
    v: TensorView
    scale: float
    causal: bool
    parts: MaskBlocks | None = None
    rows: RowViews | None = None


@dataclass(frozen=True)
class RowViews:
    """The arguments of a backward call per query row: with ``out`` or ``delta``, whichever the kernel takes."""

    dout: TensorView
    lse: TensorView
    out: TensorView | None
    delta: TensorView | None


class RecordingKernel(Kernel):
    """A kernel that computes with another one, and records the calls."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(deterministic=kernel.deterministic)
        self.kernel = kernel
        self.name, self.takes_delta, self.dense_rows = kernel.name, kernel.takes_delta, kernel.dense_rows
        self.writes_into = kernel.writes_into
        self.takes_v_head_dim = kernel.takes_v_head_dim  # type: ignore[method-assign]
        self.recorded_calls: list[KernelCall] = []
        """All calls so far, in order."""

    @classmethod
    def why_unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, parts: MaskBlocks | None = None
    ) -> tuple[Tensor, Tensor]:
        self.recorded_calls.append(
            KernelCall(TensorView.of(q), TensorView.of(k), TensorView.of(v), scale, causal, parts)
        )
        return self.kernel.forward(q, k, v, scale=scale, causal=causal, parts=parts)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, *,
        out: Tensor | None = None, delta: Tensor | None = None, scale: float, causal: bool,
        parts: MaskBlocks | None = None, into: Gradients | None = None,
    ) -> Gradients:  # fmt: skip
        by_delta = delta is not None and self.takes_delta
        # Turning delta into an output is extra work: a replay of the block passes such an output directly.
        term = delta if by_delta else torch.empty_like(dout, device="meta") if out is None else out
        assert term is not None
        view = TensorView.of(term)
        rows = RowViews(TensorView.of(dout), TensorView.of(lse), None if by_delta else view, view if by_delta else None)
        self.recorded_calls.append(
            KernelCall(TensorView.of(q), TensorView.of(k), TensorView.of(v), scale, causal, parts, rows)
        )
        return self.kernel.backward(
            dout, q, k, v, lse, out=out, delta=delta, scale=scale, causal=causal, parts=parts, into=into
        )

    def _forward(self, *_: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the other kernel computes")

    def _backward(self, *_: Any) -> Gradients:
        raise NotImplementedError("the other kernel computes")


class NoOpKernel(Kernel):
    """A kernel that computes nothing: its results have the right shapes and types, and undefined values."""

    name = "idle"
    takes_delta = True
    dense_rows = False

    def __init__(self, *, writes_into: bool = False) -> None:
        """Create the kernel; ``writes_into`` is that of the kernel in whose place it is, so that merges are alike."""
        super().__init__()
        self.writes_into = writes_into

    @classmethod
    def why_unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    @classmethod
    def takes_v_head_dim(cls, head_dim: int, v_head_dim: int) -> bool:
        return True

    def _count(self, phase: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, parts: MaskBlocks | None) -> None:
        """Count nothing: there is no work."""

    def _forward_parts(self, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: MaskBlocks) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, scale, False)

    def _backward_parts(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, parts: MaskBlocks, into: Gradients | None = None,
    ) -> Gradients:  # fmt: skip
        return self._backward(dout, q, k, v, lse, out, delta, scale, False, into)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        batch, seq, heads, _ = q.shape
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        return out, torch.empty(batch, heads, seq, dtype=wide_type(q), device=q.device)

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool, into: Gradients | None = None,
    ) -> Gradients:  # fmt: skip
        return into or (torch.empty_like(q), *allocate_adjacent(k, v))


# --- transport ----------------------------------------------------------------------------------------


class NullTransport:
    """A transport that sends nothing, counts nothing and has no process group: every member keeps its own data."""

    free_slot: Callable[[MessageLayout], list[Tensor]] | None = None

    def __init__(self, *_: Any) -> None:
        self._gathered: dict[TensorView, list[Tensor]] = {}

    def hop(self, ring: Channel, message: Message, into: Message | None) -> Hop:
        """Return a hop on which the message that was sent arrives, in the same memory: nothing is copied.

        Only with ``into`` are the values copied there: the speed of a kernel depends on the values that it computes
        with, and fresh memory may hold NaN.
        """
        if into is None:
            # `data` has a version counter of its own: a write to the received tensor must not count as one to the sent.
            return Hop([], message.buffers, message.with_buffers([buffer.data for buffer in message.buffers]))
        for target, buffer in zip(into.buffers, message.buffers, strict=True):
            target.copy_(buffer)
        return Hop([], message.buffers, into)

    def send(self, chain: Channel, tensor: Tensor) -> Hop:
        """Return a hop that sends nothing."""
        return Hop([], [tensor], None)

    def receive(self, chain: Channel, like: Tensor) -> Tensor:
        """Return zeros: fresh memory may hold NaN, which changes the speed of what is computed with it."""
        return torch.zeros_like(like, memory_format=torch.contiguous_format)

    def collective(self, channel: Channel, operation: str, tensor: Tensor) -> Hop:
        """Return a hop on which this rank's piece arrives in place of every member's, or of their sum.

        The pieces of an all-gather are written when a shape is first seen. What arrives is valid until the second next
        gather of the same shape.
        """
        if operation != "all_gather":
            return Hop([], [tensor], [tensor if operation == "all_to_all" else tensor[0]])
        slots = self._gathered.setdefault(TensorView.of(tensor), [])
        full = len(slots) == _SLOTS
        slots.append(slots.pop(0) if full else tensor.expand(channel.size, *tensor.shape).contiguous())
        return Hop([], [tensor], [slots[-1]])
