"""Expected load imbalance of strategies, against sums that can be checked by hand."""

from __future__ import annotations

import pytest

from ringprof.strategies.algorithms.allgather import AllGather


@pytest.mark.parametrize(
    ("layout", "causal", "busiest"),
    [("contiguous", True, 7 / 4), ("contiguous", False, 1.0), ("zigzag", True, 1.0), ("zigzag", False, 1.0)],
)
def test_all_gather_imbalance_by_hand(layout: str, causal: bool, busiest: float) -> None:
    """Each rank has a quarter of the queries: the last rank sees 3 1/2 quarters of the keys, the mean is 2 quarters."""
    assert AllGather.imbalance(4, causal=causal, layout=layout) == busiest
