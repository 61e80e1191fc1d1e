"""Memory by formula, against sums that can be reckoned in the head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringprof.strategies.allgather import AllGather
from ringprof.strategies.burst import Burst
from ringprof.strategies.expected import Load, forward_bytes, ring_bytes
from ringprof.strategies.usp import USP

# A rank of two holds 4 tokens of 2 heads of 4 numbers of 2 bytes: 64 bytes of queries, 128 of keys and values.
LOAD = Load(batch=1, seq=8, heads=2, kv_heads=2, head_dim=4, item_bytes=2, size=2)


def test_a_ring_holds_three_sets_of_keys_and_two_of_their_gradients() -> None:
    own = 4 * 64 + 2 * 128
    assert ring_bytes(LOAD) == own + 2 * 128 + 3 * 128 + 2 * 256


def test_one_rank_holds_the_larger_of_two_sums() -> None:
    # All 8 tokens: 128 bytes of queries, 256 of keys and values, the sums 256 and 512.
    assert ring_bytes(replace(LOAD, size=1)) == 4 * 128 + 2 * 256 + 512
    # One head of keys and values for both: 128 of them, the sums 256 and 256.
    assert ring_bytes(replace(LOAD, size=1, kv_heads=1)) == 4 * 128 + 2 * 128 + 256


def test_a_forward_pass_merges_where_more_ranks_are() -> None:
    assert forward_bytes(replace(LOAD, backward=False, size=1)) == 2 * 128 + 256
    assert ring_bytes(replace(LOAD, backward=False)) == 2 * 64 + 128 + 64 + 128 + 3 * 128


@pytest.mark.parametrize(
    ("layout", "causal", "busiest"),
    [("contiguous", True, 7 / 4), ("contiguous", False, 1.0), ("zigzag", True, 1.0), ("zigzag", False, 1.0)],
)
def test_the_last_of_four_ranks_sees_most_of_a_causal_mask(layout: str, causal: bool, busiest: float) -> None:
    """Of a quarter of the queries the last sees 3 1/2 quarters of the keys, the mean is 2 quarters."""
    assert AllGather.imbalance(4, causal=causal, layout=layout) == busiest


def test_burst_holds_three_sets_of_what_travels_in_its_backward_pass() -> None:
    own = 4 * 64 + 2 * 128
    assert Burst.memory_bytes(LOAD) == own + 256 + 3 * 3 * 64 + 64 + 128


def test_one_rank_exchanges_no_heads() -> None:
    for load, exchanged in ((replace(LOAD, size=1), 0), (LOAD, 2 * 64 + 128)):
        assert USP.memory_bytes(load) == ring_bytes(load) + exchanged
