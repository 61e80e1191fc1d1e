"""Ring attention: every rank keeps its queries; keys and values travel round the ring.

Step 0 computes the rank's own block; step s the block with the keys of rank r - s, which arrived while step s - 1 was
computed. In the backward pass dK and dV travel behind their K and V, from the first rank that is not their own, and
come home after N - 1 hops, where those of the rank's own block are added; a part of that block is kept to the end, so
that the last hop is hidden too.

With the contiguous layout and a causal mask, rank r has work in r + 1 of the N steps and waits in the others: that is
this strategy, and what zigzag and stripe mend.

Source: Ring Attention (arXiv 2310.01889); zhuzilin/ring-flash-attention, whose dK and dV travel in float32, N hops.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ringprof.strategies.annotate import ring_step
from ringprof.strategies.base import AttentionCall, Context, Rows, Strategy, wire_type
from ringprof.strategies.kernels.kernel import Gradients
from ringprof.strategies.kernels.merge import Sum
from ringprof.strategies.masks.expected import contiguous_imbalance
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.strategies.transport.gradient_ring import (
    GradientRing,
    LocalGrads,
    add_and_cast_dkv,
    backward_of_rows,
    forward_grads,
    kv_grads,
)
from ringprof.strategies.transport.ring_channel import HopRing

RingWire = Literal["exact", "fp32", "input"]


class Ring(Strategy):
    """K and V travel; the layout decides which block each step is."""

    layout = LAYOUTS["contiguous"]
    takes_masks = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        "grad_wire": "type of travelling dK and dV: fp32 (exact: but the input's own for a single hop), or input",
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
        if routing is not None:
            straight = self.back_ring if routing.last_step == 1 else None
            gradient_ring = GradientRing(routing, self.dkv_ring, None, (k, v), self._wire(call, k), straight)
            return backward_of_rows(self, call, rows, q, self.tour(call, k, v), gradient_ring)
        early, rest = self.split_local_block(call, q, k)
        wire = self._wire(call, k)
        dq = Sum(q, 2 if rest else self.ring_size)
        home: LocalGrads = []
        late: list[tuple[slice, Tensor]] = []
        hop: Any = None
        for step, (kv_rank, kv) in enumerate(self.tour(call, k, v)):
            block = early if step == 0 else self.block(call, kv_rank, q)
            grads = None
            if block is not None:
                with ring_step("bwd", step, "block"):
                    grads = call.backward(rows, q, kv[0], kv[1], block)
                if step == 0:
                    # Without dQ, which would outlive its sum.
                    home.append((block, grads[1:]))
            if step > 0:
                arrived = None if hop is None else hop.wait()
                with ring_step("bwd", step, "merge"):
                    dkv = forward_grads(self.dkv_ring, arrived, *kv_grads(grads, block), (k, v), wire)
                hop = self.dkv_ring.post(dkv)
                del dkv
            if block is not None and grads is not None:
                # When dK and dV are on their way, and no longer held here.
                own, grads = grads[0], None
                with ring_step("bwd", step, "merge"):
                    dq.add(own, block.q)
                del own
        del kv
        for _ in range(step + 1, self.ring_size if step else 0):
            hop = self.dkv_ring.post(hop.wait())
        for block in rest:
            # Computed while dK and dV make their last hop.
            with ring_step("bwd", self.ring_size, "block"):
                own, *pair = call.backward(rows, q, k, v, block)
            home.append((block, pair))
            late.append((block.q, own))
        arrived = None if hop is None else hop.wait()
        with ring_step("bwd", self.ring_size, "merge"):
            return dq.result(q.dtype, late), *add_and_cast_dkv(arrived, home, k.dtype)

    @property
    def hop_window(self) -> int:
        return self.ring_size

    @property
    def ring_rank(self) -> int:
        return self.kv_ring.rank

    def ring_members(self) -> list[int]:
        """The ranks on this rank's ring."""
        return list(range(self.comm.size))

    @cached_property
    def back_ring(self) -> HopRing:
        """The ring the other way round, on which gradients of rows that went one hop go straight home."""
        return self.comm.ring("dkv_back", self.ring_members()[::-1], shares=self.kv_ring)

    def tour(self, call: AttentionCall, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """K and V of the ranks that a rank may need, its own first; of the others the rows that travel."""
        routing = self.routing(call)
        if routing is not None:
            return routing.tour(self.kv_ring, None, [k, v])
        return self.kv_ring.tour([k, v], None if call.sharded_mask is None else call.sharded_mask.steps)

    def _wire(self, call: AttentionCall, like: Tensor) -> torch.dtype:
        """The type that dK and dV travel in. On a single hop they are one kernel call's, which has rounded them."""
        wire, once = self.parameters["grad_wire"], self.ring_size == 2 and call.sharded_mask is None
        return wire_type("input" if wire == "exact" and once else wire, like)
