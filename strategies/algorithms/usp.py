"""USP: Ulysses within groups, and a ring across the groups.

The all-to-all gives every rank of a group the group's tokens for its part of the heads. The ring then runs among the
ranks that hold the same heads. A ring of R ranks has R - 1 hops with as many bytes as those of the flat ring, and U
times the computation to overlap each. The placement determines which of the two uses neighbouring ranks: ``head-first``
puts the Ulysses groups, which nothing overlaps, on the fast links; ``ring-first`` puts the rings there.

Source: USP (arXiv 2405.07719), feifeibear/long-context-attention. There, layouts other than zigzag are sharded by the
global rank, so ring-first placement puts tokens in the wrong order; here, the layout takes the placement into account.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..base import DOCUMENTS_LAYOUT_HELP, Context, DocumentsLayout, Shape, Strategy
from ..masks.expected import contiguous_imbalance
from ..masks.layouts import LAYOUTS, Grid, Grouped, Layout
from .ring import Ring, RingWire
from .ulysses import HeadExchange, why_heads_unsupported

Placement = Literal["head-first", "ring-first"]
RingLayout = Literal["zigzag", "contiguous", "stripe"]


class USP(Ring):
    """`Ring` among the ranks that hold the same heads, within Ulysses groups."""

    PARAMETERS: ClassVar[dict[str, str]] = {
        "ulysses_degree": "ranks that split the heads (default: a host's ranks, or 2 where there is one host)",
        "ring_degree": "ranks in a ring (default: what is left)",
        "placement": "which of the two gets neighbouring ranks",
        "layout": "layout of the ring",
        "documents_layout": DOCUMENTS_LAYOUT_HELP,
        **Ring.PARAMETERS,
    }

    def __init__(
        self, context: Context, *, ulysses_degree: int | None = None, ring_degree: int | None = None,
        placement: Placement = "head-first", layout: RingLayout = "zigzag", grad_wire: RingWire = "exact",
        documents_layout: DocumentsLayout = "auto", deterministic: bool = False,
    ) -> None:  # fmt: skip
        Strategy.__init__(self, context, deterministic=deterministic)
        size = self.comm.size
        degrees = {"ulysses_degree": ulysses_degree, "ring_degree": ring_degree}
        resolved = self.with_placement(size, self.comm.ranks_per_host(), placement=placement, **degrees)
        grouped = self.layout_for(size, layout=layout, **resolved)
        self.layout, grid = grouped, grouped.grid
        self._ring_members = grid.ring(self.comm.rank)
        self.parameters |= {
            "ulysses_degree": grid.ulysses_degree, "ring_degree": grid.ring_degree, "placement": placement,
            "layout": layout, "grad_wire": grad_wire, "documents_layout": documents_layout,
        }  # fmt: skip
        self.exchange = HeadExchange(self.comm.collective("heads", grid.ulysses_group(self.comm.rank)))
        self.kv_ring = self.comm.ring("kv", self._ring_members)
        self.dkv_ring = self.comm.ring("dkv", self._ring_members, shares=self.kv_ring)

    @classmethod
    def with_placement(cls, size: int, per_host: int, **params: Any) -> dict[str, Any]:
        if params.get("ulysses_degree") is None and params.get("ring_degree") is None:
            placement = params.get("placement", "head-first")
            params["ulysses_degree"] = default_ulysses_degree(size, per_host, placement)
        return params

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Grouped:
        # The hosts are not known yet, so assume a single host.
        params = cls.with_placement(size, size, **params)
        head_first = params.get("placement", "head-first") == "head-first"
        grid = Grid.of(size, params.get("ulysses_degree"), params.get("ring_degree"), head_first=head_first)
        return Grouped(LAYOUTS[params.get("layout", "zigzag")], grid)

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        ring = cls.layout_for(size, **params).grid.ring_degree
        return contiguous_imbalance(ring) if causal and params.get("layout") == "contiguous" else 1.0

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        reason = super().why_unsupported(shape, size, **params)
        return reason or why_heads_unsupported(shape, cls.layout_for(size, **params).grid.ulysses_degree)

    @property
    def ring_size(self) -> int:
        return self.kv_ring.size

    def ring_members(self) -> list[int]:
        return self._ring_members

    @classmethod
    def layout_while_computing(cls, layout: Layout, size: int) -> tuple[Layout, int]:
        assert isinstance(layout, Grouped)
        return layout.ring, layout.grid.ring_degree


def default_ulysses_degree(size: int, per_host: int, placement: Placement) -> int:
    """Return the default Ulysses degree: the groups on neighbouring ranks get the ranks of a host.

    On a single host, they get the smallest divisor of ``size`` above 1.
    """
    smallest = next((divisor for divisor in range(2, size + 1) if size % divisor == 0), 1)
    neighbours = per_host if per_host < size else smallest
    return neighbours if placement == "head-first" else size // neighbours
