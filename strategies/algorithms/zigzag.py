"""Zigzag ring attention: the ring with two chunks per rank, so every causal step has the same work on every rank.

With 4 ranks and chunks a .. h, rank 0 holds a h, rank 1 b g, rank 2 c f, rank 3 d e. With keys of a lower rank, all
queries see the first half of the keys. With keys of a higher rank, the second half of the queries sees all keys. Either
block is half a square.

Source: zhuzilin/ring-flash-attention, issue 2; the same split is "load balancing" in Transformer Engine and Megatron.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..base import DOCUMENTS_LAYOUT_HELP, Context, DocumentsLayout
from ..masks.layouts import LAYOUTS
from .ring import Ring, RingWire


class Zigzag(Ring):
    """Ring attention over the zigzag layout."""

    layout = LAYOUTS["zigzag"]
    PARAMETERS: ClassVar[dict[str, str]] = {
        "documents_layout": DOCUMENTS_LAYOUT_HELP,
        **Ring.PARAMETERS,
    }

    def __init__(
        self, context: Context, *, grad_wire: RingWire = "exact", documents_layout: DocumentsLayout = "auto",
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(context, grad_wire=grad_wire, deterministic=deterministic)
        self.parameters["documents_layout"] = documents_layout

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0
