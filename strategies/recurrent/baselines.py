"""Kernels of recurrences for baselines: one that computes nothing, and one that records its calls to replay them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.merge import wide_type
from .kernel import Carry, Inputs, RecurrenceKernel, Saved, Shard
from .state_strategies import RecurrentStrategy


@contextmanager
def use_kernel(strategy: RecurrentStrategy, kernel: RecurrenceKernel) -> Iterator[None]:
    """Make ``strategy`` compute with ``kernel`` inside the context, whatever the inputs are."""
    before = strategy.kernel_for
    strategy.kernel_for = lambda x: kernel  # type: ignore[method-assign]
    try:
        yield
    finally:
        strategy.kernel_for = before  # type: ignore[method-assign]


class NoOpRecurrence:
    """`RecurrenceKernel` that computes nothing: its results have the right shapes and types, and undefined values.

    States and transitions are zeros, so that combining them meets no NaN, which would change its speed.
    """

    name = "idle"

    def begin(self, x: Inputs, shard: Shard) -> tuple[Any, Carry]:
        dtype, device = wide_type(x.q), x.q.device
        state = torch.zeros(x.state_shape, dtype=dtype, device=device) if shard.sends else None
        return None, Carry(state, torch.zeros(x.transition_shape, dtype=dtype, device=device) if shard.spans else None)

    def finish(self, x: Inputs, shard: Shard, local: Any, incoming: Tensor | None) -> tuple[Tensor, Saved]:
        return torch.empty_like(x.v), ()

    def begin_backward(self, x: Inputs, shard: Shard, saved: Saved, dout: Tensor) -> tuple[Any, Tensor | None]:
        zeros = torch.zeros(x.state_shape, dtype=wide_type(x.q), device=x.q.device)
        return None, zeros if shard.receives else None

    def finish_backward(
        self, x: Inputs, shard: Shard, saved: Saved, local: Any, doutgoing: Tensor | None
    ) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in x.tensors)


class RecordingRecurrence:
    """`RecurrenceKernel` that computes with another one and keeps the inputs of each pass, for `replay`."""

    def __init__(self, kernel: RecurrenceKernel) -> None:
        self.kernel, self.name = kernel, kernel.name
        self.forward_calls: list[tuple[Inputs, Shard]] = []
        self.gradients: list[Tensor] = []
        """Output gradient of each forward call; empty without a backward pass."""

    def begin(self, x: Inputs, shard: Shard) -> tuple[Any, Carry]:
        self.forward_calls.append((Inputs.of([tensor.detach() for tensor in x.tensors], x.scale), shard))
        return self.kernel.begin(x, shard)

    def finish(self, x: Inputs, shard: Shard, local: Any, incoming: Tensor | None) -> tuple[Tensor, Saved]:
        return self.kernel.finish(x, shard, local, incoming)

    def begin_backward(self, x: Inputs, shard: Shard, saved: Saved, dout: Tensor) -> tuple[Any, Tensor | None]:
        self.gradients.append(dout.detach())
        return self.kernel.begin_backward(x, shard, saved, dout)

    def finish_backward(
        self, x: Inputs, shard: Shard, saved: Saved, local: Any, doutgoing: Tensor | None
    ) -> tuple[Tensor, ...]:
        return self.kernel.finish_backward(x, shard, saved, local, doutgoing)

    def replay(self) -> None:
        """Compute the recorded passes again, as if this rank's tokens were a whole sequence: without states.

        Measures the kernel alone: nothing is sent, and no state of another rank is added.
        """
        with torch.no_grad():
            saved_of_call = []
            for x, shard in self.forward_calls:
                alone = replace(shard, receives=False, sends=False)
                local, _ = self.kernel.begin(x, alone)
                saved_of_call.append((x, alone, self.kernel.finish(x, alone, local, None)[1]))
            # The backward passes run in the opposite order.
            for dout in self.gradients:
                x, alone, saved = saved_of_call.pop()
                local, _ = self.kernel.begin_backward(x, alone, saved, dout)
                self.kernel.finish_backward(x, alone, saved, local, None)
