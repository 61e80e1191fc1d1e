"""LoongTrain's double ring: inner rings in an outer ring, with Ulysses groups on top where wanted.

The ranks of a ring are cut into windows of w (the ranks of a host). Inside a window K and V go round the inner ring;
once a window, what the window began with goes to the next window on the outer ring, with the whole window to arrive.

Backward, dK and dV start afresh in every window and make one full turn of the inner ring, w hops behind their K and V,
so that they end where the window found them. Then they are joined with the earlier windows' and follow K and V over
the outer ring. The closing inner hop is hidden by the next window's first block, the outer hop by the rest of that
window, and after the last window both by what the rank kept of its own block. (The original waits for the closing hop
at once and gives the outer hop the next window's first block; the messages are the same.)

Source: LoongTrain (arXiv 2406.18485), InternEvo. Zigzag over the ring; placement as there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ringprof.strategies.algorithms.ulysses import HeadExchange, why_heads_unsupported
from ringprof.strategies.annotate import ring_step
from ringprof.strategies.base import (
    DOCUMENTS_LAYOUT_HELP,
    AttentionCall,
    Context,
    DocumentsLayout,
    Rows,
    Shape,
    Strategy,
    wire_type,
)
from ringprof.strategies.errors import Unsupported
from ringprof.strategies.kernels.kernel import Gradients
from ringprof.strategies.kernels.merge import Sum, accumulate
from ringprof.strategies.masks.layouts import LAYOUTS, Block, Grid, Grouped, Layout
from ringprof.strategies.transport.gradient_ring import (
    GradientRing,
    LocalGrads,
    add_and_cast_dkv,
    backward_of_rows,
    forward_grads,
    kv_grads,
)
from ringprof.strategies.transport.message import Message
from ringprof.strategies.transport.ring_channel import AnyHop, DoubleRing


class LoongDoubleRing(Strategy):
    """K and V travel on a double ring in both passes; dK and dV follow on another."""

    layout = LAYOUTS["zigzag"]
    takes_masks = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        "ring_window": "ranks in an inner ring (default: those of the ring that share a host)",
        "placement": "which has neighbouring ranks: Ulysses groups, or rings",
        "ulysses_degree": "ranks that share out the heads",
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
            # Mixed: rows that travel alone are few.
            wire = wire_type("input" if self.parameters["grad_wire"] == "input" else "fp32", k)
            gradient_ring = GradientRing(routing, self.dkv.inner, self.dkv.outer, (k, v), wire)
            return backward_of_rows(self, call, rows, q, self._tour(call, k, v), gradient_ring)
        early, rest = self.split_local_block(call, q, k)
        dq = Sum(q, 2 if rest else self.kv.size)
        travelling = _TravellingDkv(self.dkv, (k, v), self.parameters["grad_wire"])
        for step, (kv_rank, kv) in enumerate(self._tour(call, k, v)):
            block = early if step == 0 else self.block(call, kv_rank, q)
            grads = None
            if block is not None:
                with ring_step("bwd", step, "block"):
                    grads = call.backward(rows, q, kv[0], kv[1], block)
                with ring_step("bwd", step, "merge"):
                    dq.add(grads[0], block.q)
            travelling.add(step, grads, block)
        home: LocalGrads = []
        late = []
        for block in rest:
            with ring_step("bwd", self.kv.size, "block"):
                own, *pair = call.backward(rows, q, k, v, block)
            home.append((block, pair))
            late.append((block.q, own))
            travelling.leave_window()
        arrived = travelling.home()
        with ring_step("bwd", self.kv.size, "merge"):
            return dq.result(q.dtype, late), *add_and_cast_dkv(arrived, home, k.dtype)

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


class _TravellingDkv:
    """dK and dV on their way: fresh in each window, one turn of the inner ring, one hop on the outer ring."""

    def __init__(self, rings: DoubleRing, kv: tuple[Tensor, Tensor], grad_wire: str) -> None:
        self._rings, self._kv, self._grad_wire = rings, kv, grad_wire
        self._inner: AnyHop | None = None
        self._outer: AnyHop | None = None

    def add(self, step: int, grads: Gradients | None, block: Block | None) -> None:
        """Add one block's dK and dV, where there is one, to those that came with their keys, and send these on."""
        window, inner_step = divmod(step, self._rings.window)
        if inner_step == 0:
            self.leave_window()
        arrived = None if self._inner is None else self._inner.wait()
        with ring_step("bwd", step, "merge"):
            dkv = forward_grads(self._rings.inner, arrived, *kv_grads(grads, block), self._kv, self._type_in(window))
        self._inner = self._rings.inner.post(dkv)

    def home(self) -> Message:
        """This rank's own dK and dV, without what the rank kept to the end."""
        self.leave_window()
        assert self._outer is not None
        dkv: Message = self._outer.wait()
        return dkv

    def leave_window(self) -> None:
        """Join what came back on the inner ring with the earlier windows' gradients and send it to the next window."""
        if self._inner is None:
            return
        dkv = self._inner.wait()
        self._inner = None
        if self._outer is not None:
            for total, earlier in zip(dkv.tensors, self._outer.wait().tensors, strict=True):
                accumulate(total, earlier)
        self._outer = self._rings.outer.post(dkv)

    def _type_in(self, window: int) -> torch.dtype:
        narrow = self._grad_wire == "input" or (self._grad_wire == "mixed" and window > 0)
        return wire_type("input" if narrow else "fp32", self._kv[0])


def default_window(grid: Grid, per_host: int) -> int:
    """How many ranks of a ring share a host, as far as that divides the ring."""
    on_host = max(1, per_host // grid.ulysses_degree) if grid.head_first else per_host
    return math.gcd(grid.ring_degree, on_host)
