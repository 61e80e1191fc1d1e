"""LoongTrain's double ring: inner rings within an outer ring, optionally combined with Ulysses groups.

The ranks of a ring are split into windows of w ranks (the ranks of a host). Within a window, K and V go round the inner
ring. Once per window, the tensors at the start of the window go to the next window on the outer ring; this hop has the
duration of the window to arrive.

In the backward pass, dK and dV start from zero in every window and make one full turn of the inner ring, w hops behind
their K and V, so they end on the rank where they started. They are then added to the earlier windows' gradients and
follow K and V over the outer ring. The closing inner hop overlaps the next window's first block, and the outer hop the
rest of that window. After the last window, both overlap the held-back pieces of the rank's own block. (The original
waits for the closing hop at once, and overlaps the outer hop with the next window's first block; the messages are the
same.)

Source: LoongTrain (arXiv 2406.18485), InternEvo. The layout on the ring is zigzag; placement follows the source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..annotate import ring_step
from ..base import (
    DOCUMENTS_LAYOUT_HELP,
    AttentionCall,
    Context,
    DocumentsLayout,
    Rows,
    Shape,
    Strategy,
    wire_type,
)
from ..errors import Unsupported
from ..kernels.kernel import Gradients
from ..kernels.merge import Sum, accumulate
from ..masks.layouts import LAYOUTS, Block, Grid, Grouped, Layout
from ..transport.gradient_ring import (
    GradientRing,
    LocalGrads,
    add_and_cast_dkv,
    backward_of_rows,
    forward_grads,
    kv_grads,
)
from ..transport.message import Message
from ..transport.ring_channel import AnyHop, DoubleRing
from .ulysses import HeadExchange, why_heads_unsupported


class LoongDoubleRing(Strategy):
    """Double ring that sends K and V in both passes; dK and dV follow on a second double ring."""

    layout = LAYOUTS["zigzag"]
    takes_masks = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        "ring_window": "ranks in an inner ring (default: those of the ring that share a host)",
        "placement": "which groups get neighbouring ranks: Ulysses groups, or rings",
        "ulysses_degree": "ranks that split the heads",
        "grad_wire": "type of dK and dV: fp32 in the first window and the input's own after it (mixed), fp32, or input",
        "documents_layout": DOCUMENTS_LAYOUT_HELP,
        **Strategy.PARAMETERS,
    }

    def __init__(
        self, context: Context, *, ring_window: int | None = None,
        placement: Literal["head-first", "context-first"] = "head-first", ulysses_degree: int = 1,
        grad_wire: Literal["mixed", "fp32", "input"] = "mixed",
        documents_layout: DocumentsLayout = "packed", deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(context, deterministic=deterministic)
        grouped = self.layout_for(self.comm.size, ulysses_degree=ulysses_degree, placement=placement)
        self.layout, grid = grouped, grouped.grid
        window = ring_window or default_window(grid, self.comm.ranks_per_host())
        self.parameters |= {
            "ring_window": window, "placement": placement, "ulysses_degree": ulysses_degree, "grad_wire": grad_wire,
            "documents_layout": documents_layout,
        }  # fmt: skip
        self.exchange = HeadExchange(self.comm.collective("heads", grid.ulysses_group(self.comm.rank)))
        self.kv = DoubleRing(self.comm, "kv", window, grid.ring(self.comm.rank))
        self.dkv = DoubleRing(self.comm, "dkv", window, grid.ring(self.comm.rank))

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Grouped:
        head_first = params.get("placement", "head-first") == "head-first"
        grid = Grid.of(size, params.get("ulysses_degree") or 1, None, head_first=head_first)
        window = params.get("ring_window")
        if window is not None and (window < 1 or grid.ring_degree % window):
            raise Unsupported(f"ring_window {window} does not divide the ring of {grid.ring_degree}")
        return Grouped(LAYOUTS["zigzag"], grid)

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        return super().why_unsupported(shape, size, **params) or why_heads_unsupported(
            shape, params.get("ulysses_degree") or 1
        )

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_over_ring(call, q, self._tour(call, k, v))

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        routing = self.routing(call)
        if routing is not None:
            # "mixed" means fp32 here: with row routing, only few rows are sent.
            wire = wire_type("input" if self.parameters["grad_wire"] == "input" else "fp32", k)
            gradient_ring = GradientRing(routing, self.dkv.inner, self.dkv.outer, (k, v), wire)
            return backward_of_rows(self, call, rows, q, self._tour(call, k, v), gradient_ring)
        first_block, held_back = self.split_local_block(call, q, k)
        dq = Sum(q, 2 if held_back else self.kv.size)
        gradients = _CirculatingDkv(self.dkv, (k, v), self.parameters["grad_wire"])
        for step, (kv_rank, kv) in enumerate(self._tour(call, k, v)):
            block = first_block if step == 0 else self.block(call, kv_rank, q)
            grads = None
            if block is not None:
                with ring_step("bwd", step, "block"):
                    grads = call.backward(rows, q, kv[0], kv[1], block)
                with ring_step("bwd", step, "merge"):
                    dq.add(grads[0], block.q)
            gradients.add(step, grads, block)
        local_grads: LocalGrads = []
        local_dq = []
        for block in held_back:
            with ring_step("bwd", self.kv.size, "block"):
                block_dq, *dkv = call.backward(rows, q, k, v, block)
            local_grads.append((block, dkv))
            local_dq.append((block.q, block_dq))
            gradients.finish_window()
        received = gradients.receive_own()
        with ring_step("bwd", self.kv.size, "merge"):
            return dq.result(q.dtype, local_dq), *add_and_cast_dkv(received, local_grads, k.dtype)

    def _tour(self, call: AttentionCall, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        return self.kv.tour([k, v], self.routing(call))

    @property
    def hop_window(self) -> int:
        return self.kv.window

    @property
    def ring_size(self) -> int:
        return self.kv.size

    @property
    def ring_rank(self) -> int:
        return self.kv.rank

    @classmethod
    def layout_while_computing(cls, layout: Layout, size: int) -> tuple[Layout, int]:
        assert isinstance(layout, Grouped)
        return layout.ring, layout.grid.ring_degree


class _CirculatingDkv:
    """Ring transfers of dK and dV: zero at the start of a window, a turn of the inner ring, a hop of the outer ring."""

    def __init__(self, rings: DoubleRing, kv: tuple[Tensor, Tensor], grad_wire: str) -> None:
        self._rings, self._kv, self._grad_wire = rings, kv, grad_wire
        self._inner: AnyHop | None = None
        self._outer: AnyHop | None = None

    def add(self, step: int, grads: Gradients | None, block: Block | None) -> None:
        """Add a block's dK and dV, if there is one, to the received partial sums, and send these on."""
        window, inner_step = divmod(step, self._rings.window)
        if inner_step == 0:
            self.finish_window()
        received = None if self._inner is None else self._inner.wait()
        with ring_step("bwd", step, "merge"):
            dkv = forward_grads(self._rings.inner, received, *kv_grads(grads, block), self._kv, self._wire_type(window))
        self._inner = self._rings.inner.post(dkv)

    def receive_own(self) -> Message:
        """Wait for this rank's own dK and dV; the held-back pieces are not in them."""
        self.finish_window()
        assert self._outer is not None
        dkv: Message = self._outer.wait()
        return dkv

    def finish_window(self) -> None:
        """Add the gradients returned by the inner ring to those of earlier windows; send the sum to the next window."""
        if self._inner is None:
            return
        dkv = self._inner.wait()
        self._inner = None
        if self._outer is not None:
            for total, earlier in zip(dkv.tensors, self._outer.wait().tensors, strict=True):
                accumulate(total, earlier)
        self._outer = self._rings.outer.post(dkv)

    def _wire_type(self, window: int) -> torch.dtype:
        """Return the type in which dK and dV are sent in a window."""
        narrow = self._grad_wire == "input" or (self._grad_wire == "mixed" and window > 0)
        return wire_type("input" if narrow else "fp32", self._kv[0])


def default_window(grid: Grid, per_host: int) -> int:
    """Return the number of ranks of a ring on one host, reduced to a divisor of the ring size."""
    on_host = max(1, per_host // grid.ulysses_degree) if grid.head_first else per_host
    return math.gcd(grid.ring_degree, on_host)
