"""Megatron's context parallelism, as Transformer Engine's "p2p": a zigzag ring with its own schedule.

K and V are sent in one packed message. In the forward pass, the blocks of odd and even steps run on two CUDA streams,
so the last wave of one attention kernel overlaps the first wave of the next. The output of every step is kept, and
all are merged at the end. The memory therefore grows with the number of ranks.

The backward pass starts with the keys of the last forward step and goes round in the opposite direction, so every
rank's own block, the diagonal one, comes last. dK and dV follow one step behind their K and V in the same message:

    step 0          sends K V                    computes with the next rank's keys
    step 1 .. N-2   sends K V and dK dV
    step N-1        sends dK dV                  computes the diagonal block, which overlaps the hop

With a mask that needs only some rows to be sent, the last step holds no complete keys: both passes then go in the same
direction.

Source: NVIDIA/TransformerEngine, attn_forward_func_with_cp with cp_comm_type="p2p". There (2.20) each output is merged
while the next block runs, and outputs and dQ accumulate in the input's type. Here, sums that stay on a rank accumulate
in float32.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..annotate import ring_step
from ..base import (
    DOCUMENTS_LAYOUT_HELP,
    AttentionCall,
    Context,
    DocumentsLayout,
    GradWire,
    Rows,
    Strategy,
    wire_type,
)
from ..kernels.kernel import Gradients
from ..kernels.merge import Partial, Sum
from ..masks.layouts import ALL, LAYOUTS, Block
from ..transport.gradient_ring import GradientRing, add_and_cast_all, add_block_grads
from ..transport.message import Message, side_by_side, unstacked
from ..transport.streams import SideStreams, side_streams


class Megatron(Strategy):
    """Zigzag ring with K and V in one message, merges at the end, and a reversed backward pass, diagonal last."""

    layout = LAYOUTS["zigzag"]
    takes_masks = True
    sends_smaller_v = False
    PARAMETERS: ClassVar[dict[str, str]] = {
        "grad_wire": "type in which dK and dV are sent: fp32, or the input's own",
        "documents_layout": DOCUMENTS_LAYOUT_HELP,
        **Strategy.PARAMETERS,
    }

    def __init__(
        self, context: Context, *, grad_wire: GradWire = "input", documents_layout: DocumentsLayout = "auto",
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(context, deterministic=deterministic)
        self.parameters |= {"grad_wire": grad_wire, "documents_layout": documents_layout}
        ranks = range(self.comm.size)
        self.ring = self.comm.ring("kv", ranks, keeps=True)
        self.back_ring = self.comm.ring("kv_dkv", ranks[::-1], shares=self.ring, keeps=True)
        self._streams: dict[torch.device, SideStreams] = {}

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # The blocks run on two streams; the current stream is used for hops only.
        if self.comm.size > 1 and q.device not in self._streams:
            self._streams[q.device] = side_streams(q, 2)
        streams = SideStreams() if self.comm.size == 1 else self._streams[q.device]
        steps: list[tuple[Block, Tensor, Tensor, Any]] = []
        routing = self.routing(call)
        tour = self.ring.tour([torch.stack([k, v])]) if routing is None else routing.tour(self.ring, None, [k, v])
        for step, (kv_rank, tensors) in enumerate(tour):
            block, kv = self.block(call, kv_rank, q), tensors[0] if routing is None else tuple(tensors)
            if block is None:
                continue
            with ring_step("fwd", step, "block"), streams.on(step):
                out, lse = call.forward(q, kv[0], kv[1], block)
            # Keep K and V with the result: their memory must not be reused before the streams join.
            steps.append((block, out, lse, kv))
        streams.join(result for _, out, lse, _ in steps for result in (out, lse))
        call.saved = (q, kv[0], kv[1]) if routing is None else ()
        with ring_step("fwd", self.comm.size, "merge"):
            result = Partial()
            for block, out, lse, _ in steps:
                result.merge(out, lse, block.q)
            return result.result(q.dtype)

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """Compute dq, dk and dv. ``k`` and ``v`` are those of the last forward step, which belong to the next rank.

        With row routing, they are the rank's own, and the ring has the direction of the forward pass.
        """
        routing, wire = self.routing(call), wire_type(self.parameters["grad_wire"], k)
        if routing is not None:
            gradient_ring = GradientRing(self.ring, None, (k, v), wire, routing)
            tour = routing.tour(self.ring, None, [k, v])
            return self.backward_over_ring(call, rows, q, k, v, tour, gradient_ring)
        dq, last = Sum(q), self.comm.size - 1
        # K and V of the forward pass are sent from where they lie, next to each other, whatever their size.
        own_kv, keys_and_values = side_by_side(k, v), (k, v)
        outgoing = Message([torch.stack([k, v]) if own_kv is None else own_kv])
        for step in range(self.comm.size):
            incoming = _StepMessage(k, wire)
            part = "whole" if 0 < step < last else "dkv" if step else "kv"
            hop = self.back_ring.post(outgoing, into=incoming.message(part))
            kv_rank = (self.comm.rank + 1 + step) % self.comm.size
            block, grads = call.block_between(self.layout, self.comm.rank, kv_rank, q.shape[1]), None
            if block is not None:
                with ring_step("bwd", step, "block"):
                    grads = call.backward(rows, q, *keys_and_values, block)
            hop.wait()
            with ring_step("bwd", step, "merge"):
                if block is not None and grads is not None:
                    dq.add(grads[0], block.q)
                dkv = Message([incoming.dkv], None, unstacked(incoming.dkv))
                if step < last:
                    add_block_grads(dkv, grads and grads[1:], block.kv if block else ALL, first=step == 0)
                    part = "whole" if step + 1 < last else "dkv"
                    outgoing, keys_and_values = incoming.message(part), (incoming.kv[0], incoming.kv[1])
        assert block is not None and grads is not None, "a token sees itself"
        with ring_step("bwd", last, "merge"):
            whole_dq, returned = dq.result(q.dtype), None if self.comm.size == 1 else dkv
            dk, dv = add_and_cast_all(returned, [(block.kv, grads[1:])], k.dtype)
            return whole_dq, dk, dv

    @property
    def hop_window(self) -> int:
        return self.comm.size


class _StepMessage:
    """Memory of K and V followed by dK and dV, contiguous, so that one message per hop has both types."""

    def __init__(self, like: Tensor, wire: torch.dtype) -> None:
        count = 2 * like.numel()
        kv_bytes = count * like.element_size()
        self.whole = torch.empty(kv_bytes + count * wire.itemsize, dtype=torch.uint8, device=like.device)
        self.kv = self.whole[:kv_bytes].view(like.dtype).view(2, *like.shape)
        self.dkv = self.whole[kv_bytes:].view(wire).view(2, *like.shape)

    def message(self, part: str) -> Message:
        """Return a message of one part of the memory: ``whole``, ``kv`` or ``dkv``."""
        tensor: Tensor = getattr(self, part)
        return Message([tensor])
