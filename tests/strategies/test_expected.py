"""Memory by formula, against sums that can be reckoned in the head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringprof.strategies.allgather import AllGather
from ringprof.strategies.burst import Burst
from ringprof.strategies.expected import Load, forward_bytes, ring_bytes
from ringprof.strategies.usp import USP
from ringprof.strategies.zigzag import Zigzag

# A rank of two holds 4 tokens of 2 heads of 4 numbers of 2 bytes: 64 bytes of queries, 128 of keys and values.
LOAD = Load(batch=1, seq=8, heads=2, kv_heads=2, head_dim=4, item_bytes=2, size=2)


def test_a_ring_holds_three_sets_of_keys_and_two_of_their_gradients() -> None:
    own = 4 * 64 + 2 * 128
    assert ring_bytes(LOAD) == own + 2 * 128 + 3 * 128 + 2 * 256


def test_two_ranks_hold_narrow_gradients_where_keys_and_values_were() -> None:
    own = 4 * 64 + 2 * 128
    assert Zigzag.memory_bytes(LOAD) == own + 2 * 128 + 3 * 128
    assert Zigzag.memory_bytes(LOAD, grad_wire="fp32") == ring_bytes(LOAD)
    four = replace(LOAD, size=4, seq=16)
    assert Zigzag.memory_bytes(four) == ring_bytes(four) == ring_bytes(LOAD)


MIB = 2**20


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "held"),
    [(8192, 40, 40, 721), (8192, 32, 8, 329), (16384, 40, 40, 1443), (16384, 64, 1, 1046), (32768, 32, 8, 1253),
     (65536, 40, 40, 5770), (131072, 24, 4, 3471)],
)  # fmt: skip
def test_the_plan_of_two_h200_is_at_most_a_sixth_above_what_they_held(
    tokens: int, heads: int, kv_heads: int, held: int
) -> None:
    """Copied hops, flash-attn; 32 MiB are torch's own."""
    load = Load(batch=1, seq=tokens, heads=heads, kv_heads=kv_heads, head_dim=128, item_bytes=2, size=2)
    assert 1 <= (Zigzag.memory_bytes(load) or 0) / MIB / (held - 32) < 7 / 6


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
