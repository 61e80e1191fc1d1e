"""Ring attention: every rank keeps its queries; keys and values are sent round the ring.

Step 0 computes the rank's own block. Step s computes the block with the keys of rank r - s, which arrive during step
s - 1. In the backward pass, dK and dV follow their K and V from the first other rank on, and return to their own rank
after N - 1 hops. There, the gradients of the own block are added. A part of that block is held back to the end, to
overlap the last hop.

With the contiguous layout and a causal mask, rank r has work in r + 1 of the N steps and waits in the others. The
zigzag and stripe layouts avoid this imbalance.

Source: Ring Attention (arXiv 2310.01889); zhuzilin/ring-flash-attention, which sends dK and dV in float32 over N hops.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..base import AttentionCall, Context, Rows, Strategy, wire_type
from ..kernels.kernel import Gradients
from ..masks.expected import contiguous_imbalance
from ..masks.layouts import LAYOUTS
from ..transport.gradient_ring import GradientRing
from ..transport.ring_channel import HopRing

RingWire = Literal["exact", "fp32", "input"]


class Ring(Strategy):
    """Ring that sends K and V; the layout determines the block of each step."""

    layout = LAYOUTS["contiguous"]
    takes_masks = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        "grad_wire": "type in which dK and dV are sent: fp32 (exact: the input's own for a single hop), or input",
        **Strategy.PARAMETERS,
    }

    def __init__(self, context: Context, *, grad_wire: RingWire = "exact", deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        self.parameters["grad_wire"] = grad_wire
        self.kv_ring = self.comm.ring("kv")
        self.dkv_ring = self.comm.ring("dkv", shares=self.kv_ring)

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return contiguous_imbalance(size) if causal else 1.0

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_over_ring(call, q, self.tour(call, k, v))

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        routing = self.routing(call)
        direct_ring = self.back_ring if routing is not None and routing.last_step == 1 else None
        wire, single_hop = self.parameters["grad_wire"], self.ring_size == 2
        if single_hop and call.sharded_mask is not None:
            single_hop = not call.sharded_mask.shares_keys
        # Over a single hop, "exact" is the input's type, because the kernel has already rounded to it.
        wire_dtype = wire_type("input" if wire == "exact" and single_hop else wire, k)
        gradient_ring = GradientRing(self.dkv_ring, None, (k, v), wire_dtype, routing, direct_ring)
        tour = self.tour(call, k, v)
        return self.backward_over_ring(call, rows, q, k, v, tour, gradient_ring, sends_first=routing is None)

    @property
    def hop_window(self) -> int:
        return self.ring_size

    @property
    def ring_rank(self) -> int:
        return self.kv_ring.rank

    def ring_members(self) -> list[int]:
        """Return the ranks of this rank's ring, in ring order."""
        return list(range(self.comm.size))

    @cached_property
    def back_ring(self) -> HopRing:
        """Ring in the opposite direction, on which gradients of rows sent over a single hop return directly."""
        return self.comm.ring("dkv_back", self.ring_members()[::-1], shares=self.kv_ring)

    def tour(self, call: AttentionCall, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield a rank and its K and V for each ring step, the own rank first; with row routing, only the rows sent."""
        routing = self.routing(call)
        if routing is not None:
            return routing.tour(self.kv_ring, None, [k, v])
        return self.kv_ring.tour([k, v], None if call.sharded_mask is None else call.sharded_mask.steps)
