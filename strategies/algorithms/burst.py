"""BurstAttention: keys and values circulate on a (double) ring in the forward pass, queries in the backward pass.

The forward pass is the zigzag ring. In the backward pass, K, V, dK and dV stay on their rank. Q, dO, LSE and delta
circulate on one ring, and dQ follows on a second ring one step behind, in the input's type. A hop sends 3 tensors of
the size of q instead of 4 of the size of k, which is faster unless there are fewer kv heads. Without
``optimized_backward``, O is sent instead of delta.

The double ring splits the ranks into windows (the ranks of a host). Within a window, hops go round the inner ring. Once
per window, a copy of the tensors at the start of the window goes to the next window on the outer ring; this hop has the
duration of the window to arrive. dQ starts from zero in every window and is added to the earlier windows' dQ at its
end.

Source: BurstEngine (arXiv 2509.19836) and MayDomine/Burst-Attention.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..annotate import ring_step
from ..base import (
    DOCUMENTS_LAYOUT_HELP,
    AttentionCall,
    Context,
    DocumentsLayout,
    GradWire,
    Rows,
    Shape,
    Strategy,
    wire_type,
)
from ..kernels.kernel import Gradients
from ..kernels.merge import Sum, row_product
from ..masks.layouts import ALL, LAYOUTS, Block
from ..transport.gradient_ring import GradientRing
from ..transport.ring_channel import DoubleRing


class Burst(Strategy):
    """Ring or double ring that sends K and V in the forward pass, and Q and dQ in the backward pass."""

    layout = LAYOUTS["zigzag"]
    takes_masks = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        "double_ring": "use a ring of rings (default: with more than one host)",
        "ring_window": "ranks in an inner ring (default: the ranks of a host)",
        "optimized_backward": "send delta, one number per row, instead of O",
        "grad_wire": "type in which dQ is sent: fp32, or the input's own",
        "documents_layout": DOCUMENTS_LAYOUT_HELP,
        **Strategy.PARAMETERS,
    }

    def __init__(
        self, context: Context, *, double_ring: bool | None = None, ring_window: int | None = None,
        optimized_backward: bool = True, grad_wire: GradWire = "input",
        documents_layout: DocumentsLayout = "auto", deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(context, deterministic=deterministic)
        per_host = self.comm.ranks_per_host()
        if double_ring is None:
            double_ring = per_host < self.comm.size or ring_window is not None
        window = (ring_window or per_host) if double_ring else self.comm.size
        self.parameters |= {
            "double_ring": double_ring, "ring_window": window,
            "optimized_backward": optimized_backward, "grad_wire": grad_wire, "documents_layout": documents_layout,
        }  # fmt: skip
        self.read = DoubleRing(self.comm, "read", window)
        self.dq = DoubleRing(self.comm, "dq", window)

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        window = params.get("ring_window")
        if window is not None and (window < 1 or size % window):
            return f"ring_window {window} does not divide the world size {size}"
        if window not in (None, size) and params.get("double_ring") is False:
            return f"ring_window {window} has no meaning with double_ring=false"
        return super().why_unsupported(shape, size, **params)

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_over_ring(call, q, self.read.tour([k, v], self.routing(call)))

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        if self.parameters["optimized_backward"] and rows.delta is None:
            assert rows.out is not None
            rows = Rows(rows.dout, rows.lse, delta=row_product(rows.dout, rows.out))
        routing, dk, dv = self.routing(call, queries=True), Sum(k), Sum(v)
        wire = wire_type(self.parameters["grad_wire"], q)
        dq_ring = GradientRing(self.dq.inner, self.dq.outer, (q,), wire, routing, start_at_owner=True)
        first_block, held_back = self.split_local_block(call, q, q)
        term, dims = (rows.out, (1, 1, 2, 1)) if rows.delta is None else (rows.delta, (1, 1, 2, 2))
        assert term is not None
        for step, (q_rank, received) in enumerate(self.read.tour([q, rows.dout, rows.lse, term], routing, dims)):
            if step == 0:
                block: Block | None = first_block
            elif routing is not None:
                block = routing.block(self.comm.rank, q_rank)
            else:
                block = call.block_between(self.layout, q_rank, self.comm.rank, q.shape[1])
            if block is None:
                dq_ring.add(step, None, ALL)
                continue
            block_dq = _block_dq(call, block, step, received, rows, (k, v), (dk, dv))
            dq_ring.add(step, (block_dq,), block.q)
        # The held-back pieces of this rank's own block overlap the last hops of dQ.
        local_dk, local_dv = [], []
        for block in held_back:
            with ring_step("bwd", self.comm.size, "block"):
                own_dq, own_dk, own_dv = call.backward(rows, q, k, v, block)
            dq_ring.keep((own_dq,), block.q)
            local_dk.append((block.kv, own_dk))
            local_dv.append((block.kv, own_dv))
            dq_ring.post_last_hop()
        returned = dq_ring.receive()
        with ring_step("bwd", self.comm.size, "merge"):
            (dq,) = dq_ring.total(returned)
            if routing is None:
                return dq, dk.result(k.dtype, local_dk), dv.result(v.dtype, local_dv)
        return dq, dk.result(k.dtype), dv.result(v.dtype)

    @property
    def hop_window(self) -> int:
        return self.read.window


def _block_dq(
    call: AttentionCall, block: Block, step: int, received: list[Tensor], rows: Rows, kv: tuple[Tensor, Tensor],
    sums: tuple[Sum, Sum],
) -> Tensor:  # fmt: skip
    """Compute dQ of a block of received queries, and add its dK and dV to ``sums``.

    ``received`` are q, dO, LSE and, like ``rows``, either delta or O.
    """
    their_q, dout, lse, term = received
    their_rows = Rows(dout, lse, out=term) if rows.delta is None else Rows(dout, lse, delta=term)
    with ring_step("bwd", step, "block"):
        dq, *dkv = call.backward(their_rows, their_q, *kv, block)
    with ring_step("bwd", step, "merge"):
        for total, gradient in zip(sums, dkv, strict=True):
            total.add(gradient, block.kv)
    return dq
