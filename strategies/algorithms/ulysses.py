"""Ulysses: an all-to-all turns a part of the sequence with all heads into the whole sequence with some heads.

Every rank then computes ordinary attention for its heads in one block, and a final all-to-all returns the output to the
rank that holds the tokens. The backward pass does the same in reverse. Nothing overlaps the all-to-alls, but their
volume does not grow with the number of ranks.

If the degree U does not divide the Hkv kv heads, each kv head is repeated lcm(Hkv, U) / Hkv times. Every rank then has
the same number of heads per kv head. The gradients of the repeats are added in float32 on the rank that owns the
tokens.

Source: DeepSpeed Ulysses (arXiv 2309.14509); the repeated kv heads are verl's and VeOmni's rule, for any ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..annotate import ring_step
from ..base import AttentionCall, Context, GradWire, OutAndLse, Rows, Shape, Strategy, wire_type
from ..first_order import first_order
from ..kernels.kernel import Gradients
from ..masks.layouts import LAYOUTS, Layout
from ..transport.passes import in_pass
from ..transport.ring_channel import Collective, Hop


class Ulysses(Strategy):
    """Attention over the whole sequence for a part of the heads on each rank, with all-to-alls before and after."""

    layout = LAYOUTS["contiguous"]
    takes_masks = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        "grad_wire": "type of dQ, dK and dV in the all-to-all: fp32, or the input's own",
        **Strategy.PARAMETERS,
    }

    def __init__(self, context: Context, *, grad_wire: GradWire = "input", deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        self.parameters["grad_wire"] = grad_wire
        self.exchange = HeadExchange(self.comm.collective("heads"), grad_wire)

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        return why_heads_unsupported(shape, size) or super().why_unsupported(shape, size, **params)

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with ring_step("fwd", 0, "block"):
            out, lse = call.forward(q, k, v, call.whole_block())
            return out.to(q.dtype), lse

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        with ring_step("bwd", 0, "block"):
            dq, dk, dv = call.backward(rows, q, k, v, call.whole_block())
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @classmethod
    def layout_while_computing(cls, layout: Layout, size: int) -> tuple[Layout, int]:
        return layout, 1


def why_heads_unsupported(shape: Shape, ulysses_degree: int) -> str | None:
    """Return why the heads cannot be split over a Ulysses group of this degree; None if they can."""
    if shape.heads % ulysses_degree:
        return f"a Ulysses degree of {ulysses_degree} does not divide {shape.heads} heads"
    return None


class HeadExchange:
    """All-to-all between sequence shards and head shards in one Ulysses group, differentiable in both directions.

    With S tokens per rank and degree U, (B, S, H, D) on every rank becomes (B, U·S, H/U, D), with the tokens in the
    order of the group's ranks.
    """

    def __init__(self, channel: Collective, grad_wire: GradWire = "input") -> None:
        self.channel = channel
        self.degree = channel.size
        self.grad_wire: GradWire = grad_wire
        self.meter = channel.meter

    def around(
        self, attention: Callable[..., OutAndLse], call: AttentionCall, q: Tensor, k: Tensor, v: Tensor
    ) -> OutAndLse:
        """Run ``attention`` on head shards: exchange q, k and v before it, the output and LSE after it."""
        if self.degree == 1:
            return attention(call, q, k, v)
        repeats = math.lcm(k.shape[2], self.degree) // k.shape[2]
        q, k, v = self.exchange(True, q, _repeat(k, repeats), _repeat(v, repeats))
        out, lse = attention(call, q, k, v)
        if lse is None:
            return self.exchange(False, out)[0], None
        # Exchange both in one call. A rank whose loss uses only one of them then still exchanges both gradients.
        out, rows = self.exchange(False, out, lse.transpose(1, 2).unsqueeze(-1))
        return out, rows.squeeze(-1).transpose(1, 2)

    def exchange(self, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange tensors with autograd support; ``to_heads``: from sequence shards to head shards, else back."""
        result: tuple[Tensor, ...] = _Exchange.apply(self, to_heads, *tensors)  # type: ignore[no-untyped-call]
        return result

    def all_to_all(self, tensors: list[Tensor], *, to_heads: bool) -> list[Tensor]:
        """Exchange several tensors; each is packed while the previous one is being sent."""
        pack, unpack = (self._split_heads, _join_sequence) if to_heads else (self._split_sequence, _join_heads)
        hops: list[Hop] = [self.channel.all_to_all(pack(tensor)) for tensor in tensors]
        return [unpack(hop.wait()[0]) for hop in hops]

    def _split_heads(self, x: Tensor) -> Tensor:
        """Split a tensor by heads: one part per rank of the group, in a new first dimension."""
        return torch.stack(x.chunk(self.degree, dim=2))

    def _split_sequence(self, x: Tensor) -> Tensor:
        """Split a tensor by tokens: one part per rank of the group, in a new first dimension. No copy if B is 1."""
        batch, seq, heads, head_dim = x.shape
        return x.contiguous().view(batch, self.degree, seq // self.degree, heads, head_dim).transpose(0, 1)


class _Exchange(torch.autograd.Function):
    """Autograd function of an exchange; its gradient is the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.comm, ctx.to_heads = exchange, exchange.channel.comm, to_heads
        ctx.types = [tensor.dtype for tensor in tensors]
        return tuple(exchange.all_to_all(list(tensors), to_heads=to_heads))

    @staticmethod
    @first_order
    @in_pass("backward")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        if ctx.to_heads:
            gradients = tuple(g.to(wire_type(exchange.grad_wire, g)) for g in gradients)
        exchanged = exchange.all_to_all(list(gradients), to_heads=not ctx.to_heads)
        return (None, None, *(g.to(dtype) for g, dtype in zip(exchanged, ctx.types, strict=True)))


def _repeat(kv: Tensor, times: int) -> Tensor:
    """Repeat each kv head ``times`` times; the gradient adds the repeats in float32 before rounding."""
    if times == 1:
        return kv
    return kv.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


def _join_sequence(pieces: Tensor) -> Tensor:
    """Join parts of the sequence: (U, B, S, H/U, D) -> (B, U·S, H/U, D). No copy if B is 1."""
    return pieces.transpose(0, 1).flatten(1, 2)


def _join_heads(pieces: Tensor) -> Tensor:
    """Join parts of the heads: (U, B, S, H/U, D) -> (B, S, H, D)."""
    return pieces.movedim(0, 2).flatten(2, 3)
