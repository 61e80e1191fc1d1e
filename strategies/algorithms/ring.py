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

import torch
from torch import Tensor

from ..annotate import ring_step
from ..base import AttentionCall, Context, Rows, Strategy, wire_type
from ..kernels.kernel import Gradients
from ..kernels.merge import accumulate, merge_into, zero_other_rows
from ..masks.expected import contiguous_imbalance
from ..masks.layouts import LAYOUTS, as_contiguous, part
from ..transport.gradient_ring import GradientRing
from ..transport.message import ALIGNED, Message
from ..transport.ring_channel import AnyHop, HopRing

RingWire = Literal["exact", "fp32", "input"]
_LOOPS = "tour", "routing", "forward_over_ring", "backward_over_ring", "split_local_block", "split_in_place"
"""Methods of the loops over a ring, which a user's strategy may replace."""


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
        if self.ring_size == 2 and call.sharded_mask is None and self._has_own_loops:
            return self._forward_of_pair(call, q, k, v)
        return self.forward_over_ring(call, q, self.tour(call, k, v))

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        routing = self.routing(call)
        direct_ring = self.back_ring if routing is not None and routing.last_step == 1 else None
        wire, single_hop = self.parameters["grad_wire"], self.ring_size == 2
        if single_hop and call.sharded_mask is not None:
            single_hop = not call.sharded_mask.shares_keys
        # Over a single hop, "exact" is the input's type, because the kernel has already rounded to it.
        wire_dtype = wire_type("input" if wire == "exact" and single_hop else wire, k)
        if self.ring_size == 2 and wire_dtype == k.dtype and self._writes_messages(call, q, k, v):
            return self._backward_of_pair(call, rows, q, k, v)
        gradient_ring = GradientRing(self.dkv_ring, None, (k, v), wire_dtype, routing, direct_ring)
        tour = self.tour(call, k, v)
        return self.backward_over_ring(call, rows, q, k, v, tour, gradient_ring, sends_first=routing is None)

    def _writes_messages(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether the kernel can write dK and dV where they are sent from, and nothing overlaps their hop."""
        writes = call.kernel.writes_into and call.sharded_mask is None and k.shape == v.shape and q.is_contiguous()
        # Other ranks may decide otherwise by their kernel and strides, and send messages of the same layout: a pair.
        return writes and not k.nbytes % ALIGNED and self._has_own_loops and not self.overlaps_last_hop(k)

    @cached_property
    def _has_own_loops(self) -> bool:
        """Whether no subclass replaces a method that rings of two ranks do without."""
        return all(getattr(type(self), name) is getattr(Ring, name) for name in _LOOPS)

    def _post_own(self, k: Tensor, v: Tensor) -> tuple[AnyHop, Tensor, Tensor]:
        """Post k and v to the next rank; return the hop, and both as dense tensors."""
        message = self.kv_ring.pack((k, v))
        hop = self.kv_ring.post(message)
        if not (k.is_contiguous() and v.is_contiguous()):
            k, v = message.tensors
        return hop, k, v

    def _forward_of_pair(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Run `forward` on a ring of two ranks with few calls, since the host decides how long small tensors take."""
        hop, k, v = self._post_own(k, v)
        with ring_step("fwd", 0, "block"):
            out, lse = call.forward(q, k, v, self.local_block(call, q))
        block, arrived = self.block(call, 1 - self.ring_rank, q), hop.wait()
        if block is None:
            return out, lse
        with ring_step("fwd", 1, "block"):
            k, v = arrived.tensors
            block_out, block_lse = call.forward(q, k, v, block)
        with ring_step("fwd", 1, "merge"):
            out, lse = as_contiguous(out), as_contiguous(lse)
            merge_into(out, out, lse, block_out, block_lse, block.q)
        return out, lse

    def _backward_of_pair(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """Run `backward` on a ring of two ranks with few calls.

        The kernel writes dK and dV of the other rank's keys into the message that returns them.
        """
        hop, k, v = self._post_own(k, v)
        dq, dkv = torch.empty_like(q), k.new_empty((2, *k.shape))
        dk, dv = dkv.unbind(0)
        with ring_step("bwd", 0, "block"):
            call.backward_into((dq, dk, dv), rows, q, k, v, self.local_block(call, q))
        block, arrived = self.block(call, 1 - self.ring_rank, q), hop.wait()
        sent = torch.empty_like(dkv)
        if block is not None:
            k, v = arrived.tensors
            block_dq, (block_dk, block_dv) = torch.empty_like(q), sent.unbind(0)
            with ring_step("bwd", 1, "block"):
                call.backward_into((block_dq, block_dk, block_dv), rows, q, k, v, block)
        layout = arrived.layout
        del arrived, k, v
        with ring_step("bwd", 1, "merge"):
            zero_other_rows(sent, slice(0, 0) if block is None else block.kv)
        hop = self.dkv_ring.post(Message([sent], layout))
        if block is not None:
            with ring_step("bwd", 1, "merge"):
                accumulate(part(dq, block.q), part(block_dq, block.q))
        returned = hop.wait()
        with ring_step("bwd", 2, "merge"):
            accumulate(dkv, returned.buffers[0])
        return dq, dk, dv

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
