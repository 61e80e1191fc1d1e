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

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from .annotate import ring_step
from .base import Blocks, Context, Rows, Strategy, wire_type
from .expected import Load, contiguous_imbalance, ring_bytes
from .hops import Ring as HopRing
from .kernel import Gradients
from .layouts import ALL, LAYOUTS, Block, part
from .merge import Sum, accumulate, settled, started
from .parcels import Parcel, side_by_side
from .travel import Travel

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
    def memory_bytes(cls, load: Load, **params: Any) -> int | None:
        return ring_bytes(load)

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return contiguous_imbalance(size) if causal else 1.0

    def forward(self, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.over(blocks, q, self.tour(blocks, k, v))

    def backward(self, blocks: Blocks, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        if blocks.cut is not None and blocks.cut.travel is not None:
            return self._backward_of_rows(blocks, rows, q, k, v, blocks.cut.travel)
        early, rest = self.home_blocks(blocks, q, k)
        wire = self._wire(blocks, k)
        dq = Sum(q, 2 if rest else self.ring_size)
        home: Home = []
        late: list[tuple[slice, Tensor]] = []
        hop: Any = None
        for step, (kv_rank, kv) in enumerate(self.tour(blocks, k, v)):
            block = early if step == 0 else self.block(blocks, kv_rank, q)
            grads = None
            if block is not None:
                with ring_step("bwd", step, "block"):
                    grads = blocks.backward(rows, q, kv[0], kv[1], block)
                if step == 0:
                    # Without dQ, which would outlive its sum.
                    home.append((block, grads[1:]))
            if step > 0:
                arrived = None if hop is None else hop.wait()
                with ring_step("bwd", step, "merge"):
                    dkv = onward_dkv(self.dkv_ring, arrived, grads, block, (k, v), wire)
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
                own, *pair = blocks.backward(rows, q, k, v, block)
            home.append((block, pair))
            late.append((block.q, own))
        arrived = None if hop is None else hop.wait()
        with ring_step("bwd", self.ring_size, "merge"):
            return dq.result(q.dtype, late), *settled_dkv(arrived, home, k.dtype)

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

    def tour(self, blocks: Blocks, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """K and V of the ranks that a rank may need, its own first; of the others the rows that travel."""
        cut = blocks.cut
        if cut is not None and cut.travel is not None:
            return cut.travel.tour(self.kv_ring, cut.steps, [k, v])
        return self.kv_ring.tour([k, v], None if cut is None else cut.steps)

    def _backward_of_rows(
        self, blocks: Blocks, rows: Rows, q: Tensor, k: Tensor, v: Tensor, travel: Travel
    ) -> Gradients:
        """Where not all rows travel: what went one hop alone comes straight home, what went further goes round."""
        assert blocks.cut is not None
        back, dq = blocks.cut.steps == 2, Sum(q, self.ring_size)
        ring, wire = self.back_ring if back else self.dkv_ring, self._wire(blocks, k)
        own: Sequence[Tensor] = ()
        hop: Any = None
        for step, (kv_rank, kv) in enumerate(self.tour(blocks, k, v)):
            block, grads = self.block(blocks, kv_rank, q), None
            if block is not None:
                with ring_step("bwd", step, "block"):
                    grads = blocks.backward(rows, q, kv[0], kv[1], block)
                with ring_step("bwd", step, "merge"):
                    dq.add(grads[0], block.q)
            if step == 0:
                assert grads is not None, "a token sees itself"
                own = grads[1:]
            elif goes := travel.dkv[step]:
                arrived = None if hop is None else _widened(hop.wait(), travel.dkv[step - 1], goes)
                with ring_step("bwd", step, "merge"):
                    there = None if block is None else travel.in_message(block, step)
                    like = [x[:, :1].expand(-1, len(goes), -1, -1) for x in kv]
                    dkv = onward_dkv(ring, arrived, grads, there, like, wire)
                hop = ring.post(dkv)
        for _ in range(0 if back else self.ring_size - blocks.cut.steps):
            hop = ring.post(hop.wait())
        returned = hop.wait().tensors
        with ring_step("bwd", self.ring_size, "merge"):
            dk, dv = (settled(x, travel.home(self.ring_rank, y), k.dtype) for x, y in zip(own, returned, strict=True))
            return dq.result(q.dtype), dk, dv

    def _wire(self, blocks: Blocks, like: Tensor) -> torch.dtype:
        """The type that dK and dV travel in. On a single hop they are one kernel call's, which has rounded them."""
        wire, once = self.parameters["grad_wire"], self.ring_size == 2 and blocks.cut is None
        return wire_type("input" if wire == "exact" and once else wire, like)

    def block(self, blocks: Blocks, kv_rank: int, q: Tensor) -> Block | None:
        """What this rank's queries see of ``kv_rank``'s keys, as far as they have come."""
        if blocks.cut is not None and blocks.cut.travel is not None and kv_rank != self.ring_rank:
            return blocks.cut.travelling_block(self.ring_rank, kv_rank)
        return super().block(blocks, kv_rank, q)


def _widened(dkv: Parcel, held: range, goes: range) -> Parcel:
    """The rows ``held`` of a message as its rows ``goes``, with 0 around them."""
    if held == goes:
        return dkv
    around = (0, 0, 0, 0, held.start - goes.start, goes.stop - held.stop)
    return Parcel.holding([pad(x, around) for x in dkv.tensors])


Home = list[tuple[Block, Sequence[Tensor]]]
"""Blocks whose dK and dV stay on the rank, and these two."""


def onward_dkv(
    ring: HopRing, arrived: Parcel | None, grads: Gradients | None, block: Block | None, kv: Sequence[Tensor],
    wire: torch.dtype,
) -> Parcel:  # fmt: skip
    """dK and dV of ``kv`` as they travel on, in the type ``wire``: what has arrived, if anything, and a block's own."""
    if arrived is None and grads is not None and block is not None and block.kv == ALL and grads[1].dtype == wire:
        return Parcel.holding(grads[1:])
    dkv = ring.begun(tuple((wire, x.shape) for x in kv), kv[0].device) if arrived is None else arrived
    add_dkv(dkv, grads, block, first=arrived is None)
    return dkv


def add_dkv(dkv: Parcel, grads: Gradients | None, block: Block | None, *, first: bool = False) -> None:
    """Add a block's dK and dV, where there is one, to those that travel; the ``first`` is written, with 0 around it."""
    if grads is None or block is None:
        for message in dkv.messages if first else ():
            message.zero_()
        return
    for total, gradient in zip(*_as_few(dkv, [grads[1:]]), strict=True):
        if first:
            started(total, block.kv, gradient[0])
        else:
            accumulate(part(total, block.kv), gradient[0])


def settled_dkv(dkv: Parcel | None, home: Home, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dK and dV come home (None: they never left), in ``dtype``, with those that stayed, which are used up."""
    if dkv is None or (len(home) == 1 and home[0][0].kv == ALL):
        ((_, (dk, dv)),) = home
        for total, (gradient,) in zip(*_as_few(dkv, [(dk, dv)]), strict=True) if dkv else ():
            accumulate(gradient, total)
        return dk.to(dtype), dv.to(dtype)
    rows = [block.kv for block, _ in home]
    settlements = [
        settled(total, list(zip(rows, gradients, strict=True)), dtype)
        for total, gradients in zip(*_as_few(dkv, [pair for _, pair in home]), strict=True)
    ]
    dk, dv = settlements if len(settlements) == 2 else settlements[0]
    return dk, dv


def _as_few(dkv: Parcel, gradients: list[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """dK and dV, and each block's; both as one tensor of twice as much where all of them are cut from one."""
    together = [side_by_side(dk, dv) for dk, dv in gradients]
    whole = [x for x in together if x is not None]
    # A message of one dimension holds tensors of different sizes.
    if len(dkv.messages) == 1 and dkv.messages[0].dim() > 1 and len(whole) == len(together):
        return dkv.messages, [whole]
    return dkv.tensors, [[one[which] for one in gradients] for which in range(2)]
