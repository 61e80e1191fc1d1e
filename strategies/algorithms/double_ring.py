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

from torch import Tensor

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
from ..masks.layouts import LAYOUTS, Grid, Grouped, Layout
from ..transport.gradient_ring import GradientRing
from ..transport.ring_channel import DoubleRing
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
        documents_layout: DocumentsLayout = "auto", deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(context, deterministic=deterministic)
        grouped = self.layout_for(self.comm.size, ulysses_degree=ulysses_degree, placement=placement)
        self.layout, grid = grouped, grouped.grid
        per_host = self.comm.ranks_per_host()
        on_host = max(1, per_host // grid.ulysses_degree) if grid.head_first else per_host
        # By default the ranks of a ring on one host, reduced to a divisor of the ring's size.
        window = ring_window or math.gcd(grid.ring_degree, on_host)
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
        grad_wire, routing = self.parameters["grad_wire"], self.routing(call)
        wire = wire_type("input" if grad_wire == "input" else "fp32", k)
        # With row routing, "mixed" means fp32, because only few rows are sent.
        later_wire = wire_type("input", k) if grad_wire == "mixed" and routing is None else wire
        gradient_ring = GradientRing(
            self.dkv.inner, self.dkv.outer, (k, v), wire, routing, later_wire=later_wire, full_turns=True
        )
        return self.backward_over_ring(call, rows, q, k, v, self._tour(call, k, v), gradient_ring)

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
