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
from .kernels import Gradients
from .layouts import LAYOUTS, Block
from .merge import Partial, accumulate, settled, started, wide_type


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
        return result.result(q.dtype)

    def backward(self, blocks: Blocks, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        early, rest = self.home_blocks(q.shape[1], causal=blocks.causal)
        wire = wire_type(self.parameters["grad_wire"], k)
        hop = None
        for step, (kv_rank, kv) in enumerate(self.kv_ring.tour([k, v])):
            block = early if step == 0 else self.block(kv_rank, q, blocks.causal)
            grads = None
            if block is not None:
                with ring_step("bwd", step, "block"):
                    grads = blocks.backward(rows, q, kv[0], kv[1], block)
            if hop is None:
                assert grads is not None, "a rank has work with its own keys"
                with ring_step("bwd", step, "merge"):
                    dq = started(q, early.q, grads[0], wide_type(q))
                    dkv = [started(k, early.kv, part, wire) for part in grads[1:]]
            else:
                dkv = hop.wait()
                if block is not None and grads is not None:
                    with ring_step("bwd", step, "merge"):
                        add_gradients(dq, dkv, grads, block)
            grads = None
            hop = self.dkv_ring.post(dkv)
        return self._finish(blocks, rows, (q, k, v), rest, dq, hop)

    def _finish(self, blocks: Blocks, rows: Rows, qkv: Gradients, rest: list[Block], dq: Tensor, hop: Any) -> Gradients:
        """The rest of the rank's own block, computed while its dK and dV make their last hop."""
        home = []
        for block in rest:
            with ring_step("bwd", self.comm.size, "block"):
                home.append((block, blocks.backward(rows, *qkv, block)))
        dkv = hop.wait()
        with ring_step("bwd", self.comm.size, "merge"):
            return settle_gradients(dq, dkv, home, qkv[0].dtype)

    def block(self, kv_rank: int, q: Tensor, causal: bool) -> Block | None:
        """What this rank's queries see of ``kv_rank``'s keys."""
        return self.layout.block(self.comm.rank, kv_rank, q.shape[1], causal=causal)


def settle_gradients(
    dq: Tensor, dkv: list[Tensor], home: list[tuple[Block, Gradients]], dtype: torch.dtype
) -> Gradients:
    """The gradients in ``dtype``, with those of the last blocks added."""
    return (
        settled(dq, [(block.q, grads[0]) for block, grads in home], dtype),
        settled(dkv[0], [(block.kv, grads[1]) for block, grads in home], dtype),
        settled(dkv[1], [(block.kv, grads[2]) for block, grads in home], dtype),
    )


def add_gradients(dq: Tensor, dkv: list[Tensor], grads: Gradients, block: Block) -> None:
    """Add one block's gradients where they belong."""
    accumulate(dq[:, block.q], grads[0])
    accumulate(dkv[0][:, block.kv], grads[1])
    accumulate(dkv[1][:, block.kv], grads[2])
