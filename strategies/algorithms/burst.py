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

from collections.abc import Sequence
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
    Shape,
    Strategy,
    wire_type,
)
from ..kernels.kernel import Gradients
from ..kernels.merge import Sum, accumulate, add_and_cast, row_product, write_rows
from ..masks.layouts import ALL, LAYOUTS, Block, part
from ..masks.row_routing import RowRouting
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
        documents_layout: DocumentsLayout = "packed", deterministic: bool = False,
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
        wire, dk, dv = wire_type(self.parameters["grad_wire"], q), Sum(k), Sum(v)
        routing = self.routing(call, queries=True)
        if routing is not None:
            gradient_ring = GradientRing(routing, self.dq.inner, self.dq.outer, (q,), wire)
            return self._backward_of_rows(call, rows, q, k, v, routing, gradient_ring)
        first_block, held_back = self.split_local_block(call, q, q)
        circulating_dq = _CirculatingDq(self.dq, q, wire)
        for step, (q_rank, received) in enumerate(self.read.tour(_pack(q, rows))):
            block = first_block if step == 0 else call.block_between(self.layout, q_rank, self.comm.rank, q.shape[1])
            if block is None:
                circulating_dq.add(step, None)
                continue
            block_dq = _block_dq(call, block, step, received, rows, (k, v), (dk, dv))
            circulating_dq.add(step, (block.q, block_dq))
        # The held-back pieces of this rank's own block overlap the last hops of dQ.
        local_grads = []
        for block in held_back:
            with ring_step("bwd", self.comm.size, "block"):
                local_grads.append((block, call.backward(rows, q, k, v, block)))
            circulating_dq.post_closing_hop()
        dq = circulating_dq.receive_own()
        with ring_step("bwd", self.comm.size, "merge"):
            return (
                add_and_cast(dq, [(block.q, grads[0]) for block, grads in local_grads], q.dtype),
                dk.result(k.dtype, [(block.kv, grads[1]) for block, grads in local_grads]),
                dv.result(v.dtype, [(block.kv, grads[2]) for block, grads in local_grads]),
            )

    def _backward_of_rows(
        self,
        call: AttentionCall,
        rows: Rows,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        routing: RowRouting,
        gradient_ring: GradientRing,
    ) -> Gradients:
        """Compute the backward pass for a mask with which only some rows of the queries are sent."""
        dk, dv = Sum(k), Sum(v)
        local_dq: Sequence[Tensor] = ()
        dims = (1, 1, 2, 1 if rows.delta is None else 2)
        for step, (q_rank, received) in enumerate(self.read.tour(_pack(q, rows), routing, dims)):
            block = routing.block(self.comm.rank, q_rank) if step else self.local_block(call, q)
            if block is None:
                gradient_ring.add(step, None, ALL)
                continue
            block_dq = _block_dq(call, block, step, received, rows, (k, v), (dk, dv))
            if step:
                gradient_ring.add(step, (block_dq,), block.q)
            else:
                local_dq = (block_dq,)
        (dq,) = gradient_ring.receive_own(self.comm.rank, local_dq)
        return dq, dk.result(k.dtype), dv.result(v.dtype)

    @property
    def hop_window(self) -> int:
        return self.read.window


def _block_dq(
    call: AttentionCall, block: Block, step: int, received: list[Tensor], rows: Rows, kv: tuple[Tensor, Tensor],
    sums: tuple[Sum, Sum],
) -> Tensor:  # fmt: skip
    """Compute dQ of a block of received queries, and add its dK and dV to ``sums``."""
    their_q, their_rows = _unpack(received, rows)
    with ring_step("bwd", step, "block"):
        dq, *dkv = call.backward(their_rows, their_q, *kv, block)
    with ring_step("bwd", step, "merge"):
        for total, gradient in zip(sums, dkv, strict=True):
            total.add(gradient, block.kv)
    return dq


class _CirculatingDq:
    """Ring transfers of dQ: zero at the start of each window, along the inner ring, then over the outer ring."""

    def __init__(self, rings: DoubleRing, q: Tensor, dtype: torch.dtype) -> None:
        self._rings = rings
        self._like, self._dtype = q, dtype
        self._inner: Any = None
        self._outer: Any = None

    def add(self, step: int, dq: tuple[slice, Tensor] | None) -> None:
        """Add a block's dQ, if there is one, to the received partial sum, and send the sum on.

        ``dq``: rows of the block and their gradient.
        """
        window, inner_step = divmod(step, self._rings.window)
        like = self._like
        total = (
            self._inner.wait() if inner_step else self._rings.inner.reserve(((self._dtype, like.shape),), like.device)
        )
        with ring_step("bwd", step, "merge"):
            if dq is None:
                if not inner_step:
                    total.tensors[0].zero_()
            elif inner_step:
                accumulate(part(total.tensors[0], dq[0]), dq[1])
            else:
                write_rows(total.tensors[0], *dq)
        if inner_step + 1 < self._rings.window:
            self._inner = self._rings.inner.post(total)
            return
        if window > 0:
            earlier = self._outer.wait()
            with ring_step("bwd", step, "merge"):
                accumulate(total.tensors[0], earlier.tensors[0])
        self._inner = None
        self._outer = self._rings.outer.post(total)
        if self._rings.outer.size == 1:
            self.post_closing_hop()

    def post_closing_hop(self) -> None:
        """Post the closing hop of the inner ring, once the outer ring's last hop has arrived."""
        if self._inner is None:
            self._inner = self._rings.inner.post(self._outer.wait())

    def receive_own(self) -> Tensor:
        """Wait for this rank's own dQ; the held-back pieces are not in it."""
        self.post_closing_hop()
        dq: Tensor = self._inner.wait().tensors[0]
        return dq


def _pack(q: Tensor, rows: Rows) -> list[Tensor]:
    """Return the tensors that a query block sends: q, dO, LSE, and delta or O."""
    term = rows.out if rows.delta is None else rows.delta
    assert term is not None
    return [q, rows.dout, rows.lse, term]


def _unpack(received: list[Tensor], like: Rows) -> tuple[Tensor, Rows]:
    """Return q and the rows of received tensors, which are packed like ``like``."""
    q, dout, lse, term = received
    return q, Rows(dout, lse, out=term) if like.delta is None else Rows(dout, lse, delta=term)
