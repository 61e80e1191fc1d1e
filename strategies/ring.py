"""Ring attention: every rank keeps its queries; keys and values travel round the ring.

Step 0 computes the rank's own block; step s the block with the keys of rank r - s, which arrived while step s - 1 was
computed. In the backward pass dK and dV travel behind their K and V and come home after N hops; a part of the rank's
own block is kept to the end, so that the last hop is hidden too.

With the contiguous layout and a causal mask, rank r has work in r + 1 of the N steps and waits in the others: that is
this strategy, and what zigzag and stripe mend.

Source: Ring Attention (arXiv 2310.01889); zhuzilin/ring-flash-attention, whose dK and dV travel in float32.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .annotate import ring_step
from .base import Blocks, Context, GradWire, Rows, Strategy, wire_type
from .expected import Load, contiguous_imbalance, ring_bytes
from .kernel import Gradients
from .layouts import LAYOUTS, Block, part
from .merge import Partial, Sum, accumulate, settled, started
from .parcels import Parcel


class Ring(Strategy):
    """K and V travel; the layout decides which block each step is."""

    layout = LAYOUTS["contiguous"]
    PARAMETERS: ClassVar[dict[str, str]] = {
        "grad_wire": "type of travelling dK and dV: fp32, or the input's own",
        **Strategy.PARAMETERS,
    }

    def __init__(self, context: Context, *, grad_wire: GradWire = "fp32", deterministic: bool = False) -> None:
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
        result = Partial()
        for step, (kv_rank, kv) in enumerate(self.kv_ring.tour([k, v])):
            block = self.block(kv_rank, q, blocks.causal)
            if block is None:
                continue
            with ring_step("fwd", step, "block"):
                out, lse = blocks.forward(q, kv[0], kv[1], block)
            with ring_step("fwd", step, "merge"):
                result.merge(out, lse, block.q)
        with ring_step("fwd", step, "merge"):
            return result.result(q.dtype)

    def backward(self, blocks: Blocks, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        early, rest = self.home_blocks(q.shape[1], causal=blocks.causal, travelling=k)
        wire = wire_type(self.parameters["grad_wire"], k)
        dq = Sum(q)
        hop: Any = None
        for step, (kv_rank, kv) in enumerate(self.kv_ring.tour([k, v])):
            block = early if step == 0 else self.block(kv_rank, q, blocks.causal)
            grads = None
            if block is not None:
                with ring_step("bwd", step, "block"):
                    grads = blocks.backward(rows, q, kv[0], kv[1], block)
            dkv = begun_dkv(k, wire) if hop is None else hop.wait()
            if block is not None and grads is not None:
                with ring_step("bwd", step, "merge"):
                    dq.add(grads[0], block.q)
                    add_dkv(dkv, grads, block, first=hop is None)
            grads = None
            hop = self.dkv_ring.post(dkv)
        home = []
        for block in rest:
            # Computed while dK and dV make their last hop.
            with ring_step("bwd", self.ring_size, "block"):
                home.append((block, blocks.backward(rows, q, k, v, block)))
        dkv = hop.wait()
        with ring_step("bwd", self.ring_size, "merge"):
            return dq.result(q.dtype, rows_of(home, "q", 0)), *settled_dkv(dkv, home, k.dtype)

    def block(self, kv_rank: int, q: Tensor, causal: bool) -> Block | None:
        """What this rank's queries see of ``kv_rank``'s keys."""
        return self.layout.block(self.comm.rank, kv_rank, q.shape[1], causal=causal)


Home = list[tuple[Block, Gradients]]
"""The last blocks of a backward pass, with their gradients."""


def begun_dkv(k: Tensor, wire: torch.dtype) -> Parcel:
    """Room for dK and dV, which will travel in the type ``wire``."""
    return Parcel.empty(((wire, tuple(k.shape)),) * 2, k.device)


def add_dkv(dkv: Parcel, grads: Gradients, block: Block, *, first: bool = False) -> None:
    """Add one block's dK and dV to those that travel; the ``first`` is written, with 0 around it."""
    for total, gradient in zip(dkv.tensors, grads[1:], strict=True):
        if first:
            started(total, block.kv, gradient)
        else:
            accumulate(part(total, block.kv), gradient)


def settled_dkv(dkv: Parcel, home: Home, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dK and dV that have come home, in ``dtype``, with the last blocks' added."""
    if not home and len(dkv.messages) == 1:
        # In one copy; also where the type is the same, for the memory is the hop's.
        dk, dv = dkv.over([dkv.messages[0].to(dtype, copy=True)]).tensors
        return dk, dv
    dk, dv = (settled(x, rows_of(home, "kv", 1 + i), dtype) for i, x in enumerate(dkv.tensors))
    return dk, dv


def rows_of(home: Home, rows: str, which: int) -> list[tuple[slice, Tensor]]:
    """One gradient of each of the last blocks, and the rows (``q`` or ``kv``) that it belongs to."""
    return [(getattr(block, rows), grads[which]) for block, grads in home]
