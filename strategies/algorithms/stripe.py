"""Striped attention: the ring with token i on rank i mod N, so that every causal step is a triangle everywhere.

Keys of a lower rank, or the same: my query i sees their keys 0 .. i. Keys of a higher rank: their token i lies after
mine, so the triangle shifts by one and my query i sees their keys 0 .. i-1. The work is even, but all of it is masked.

Source: Striped Attention (arXiv 2311.09431); zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

from typing import Any

from ringprof.strategies.algorithms.ring import Ring
from ringprof.strategies.masks.layouts import LAYOUTS


class Stripe(Ring):
    """The ring over the stripe layout."""

    layout = LAYOUTS["stripe"]

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0
