"""Striped attention: the ring with token i on rank i mod N, so every causal step is a triangle on every rank.

With keys of the same or a lower rank, query i sees keys 0 .. i. With keys of a higher rank, their token i comes after
query i, so the triangle shifts by one and query i sees keys 0 .. i-1. The work is balanced, but every block is masked.

Source: Striped Attention (arXiv 2311.09431); zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

from typing import Any

from ..masks.layouts import LAYOUTS
from .ring import Ring


class Stripe(Ring):
    """Ring attention over the stripe layout."""

    layout = LAYOUTS["stripe"]

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0
