"""Collectives without a record, matched by when they end, on ranks whose truth is known."""

from __future__ import annotations

import pytest

from ringprof.scale.pipeline import attribute
from tests.analysis.build import Builder, collective

REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
GATHER = "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)"
US, MS = 1_000, 1_000_000


def reduces(rank, spans, stream=20, name=REDUCE, host=None, world=2, builder=None):
    """All-reduces without a record, as older PyTorch leaves them."""
    b = builder or Builder(rank=rank, world_size=world, host=host)
    for start, end in spans:
        b.run(name, start, end, stream=stream, launched=start - US)
    return b


def splits(attribution):
    return [[(part.wait_ns, part.wire_ns) for part in rank.splits] for rank in attribution.ranks]


def codes(attribution):
    return {warning.code for warning in attribution.warnings}


def of(*builders, **options):
    return attribute([b.trace() for b in builders], **options)


def test_kernels_that_end_together_wait_for_the_last_to_begin():
    # Rank 1 comes 2 ms, then 0.5 ms after rank 0; both end 4 us apart.
    first = [(1 * MS, 4 * MS), (6 * MS, 7 * MS)]
    second = [(3 * MS, 4 * MS + 4 * US), (6 * MS + 500 * US, 7 * MS - 4 * US)]
    attribution = of(reduces(0, first), reduces(1, second))
    assert [[wait for wait, _ in of_rank] for of_rank in splits(attribution)] == [[2 * MS, 500 * US], [0, 0]]
    (said,) = (warning for warning in attribution.warnings if warning.code == "matched_by_ends")
    assert "within 4.0 us" in said.message and said.count == 4
    assert "no_record" not in codes(attribution)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param([(3 * MS, 4 * MS + 60 * US), (6 * MS, 7 * MS)], id="ends apart"),
        pytest.param([(3 * MS, 4 * MS)], id="another count"),
        pytest.param([(4 * MS - US, 4 * MS), (7 * MS + 60 * US, 7 * MS + 61 * US)], id="begins after the other ended"),
    ],
)
def test_kernels_that_do_not_end_together_are_not_matched(second):
    attribution = of(reduces(0, [(1 * MS, 4 * MS), (6 * MS, 7 * MS)]), reduces(1, second))
    assert splits(attribution)[0] == [(None, None)] * 2
    assert "no_record" in codes(attribution) and "matched_by_ends" not in codes(attribution)


def test_kernels_of_another_kind_are_not_matched():
    spans = [(1 * MS, 4 * MS)]
    assert "no_record" in codes(of(reduces(0, spans), reduces(1, spans, name=GATHER)))


def test_two_communicators_of_a_rank_are_told_apart():
    """Ranks 0 and 1 reduce, 2 and 3 reduce, and all four gather: three communicators, each with waits of its own."""
    pairs = {0: (1 * MS, 4 * MS), 1: (3 * MS, 4 * MS), 2: (1 * MS, 2 * MS), 3: (1_200 * US, 2 * MS)}
    everyone = {0: 5 * MS, 1: 5 * MS, 2: 5 * MS, 3: 6 * MS}
    builders = [reduces(rank, [span], world=4) for rank, span in pairs.items()]
    for rank, start in everyone.items():
        reduces(rank, [(start, 8 * MS)], stream=24, name=GATHER, builder=builders[rank])
    attribution = of(*builders)
    waits = [[wait for wait, _ in of_rank] for of_rank in splits(attribution)]
    assert waits == [[2 * MS, 1 * MS], [0, 1 * MS], [200 * US, 1 * MS], [0, 0]]
    groups = [part.transfer.group[1] for part in attribution.ranks[2].splits]
    assert groups == [(2, 3), (0, 1, 2, 3)]


def test_a_rank_without_a_trace_may_be_in_any_communicator():
    spans = [(1 * MS, 4 * MS), (6 * MS, 7 * MS)]
    attribution = of(reduces(0, spans, world=3), reduces(1, spans, world=3))
    assert "matched_by_ends" not in codes(attribution) and "no_record" in codes(attribution)


def test_records_go_before_ends():
    b = [Builder(rank=rank, world_size=2) for rank in range(2)]
    for rank, one in enumerate(b):
        ranks = collective("allreduce", group="dp", group_ranks=(0, 1), group_size=2)
        one.run(REDUCE, (1 + rank) * MS, 4 * MS, launched=US, own=ranks)
    attribution = of(*b)
    assert [part.transfer.group for part in attribution.ranks[0].splits] == [("dp", (0, 1))]
    assert "matched_by_ends" not in codes(attribution)


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_with_clocks_of_their_own_need_several_kernels(count):
    """One offset fits any single pair of kernels; three that agree to 50 us are no chance."""
    later = 40 * MS
    first = [((10 * at + 1) * MS, (10 * at + 4) * MS) for at in range(1, 1 + count)]
    second = [(start + MS + later, end + later) for start, end in first]
    attribution = of(reduces(0, first, host="a"), reduces(1, second, host="b"))
    assert ("matched_by_ends" in codes(attribution)) == (count == 3)


def test_the_spread_is_that_around_the_first_rank():
    # 4 us after rank 0 and 3 us before it: 7 us apart from each other.
    ends = [4 * MS, 4 * MS + 4 * US, 4 * MS - 3 * US]
    attribution = of(*(reduces(rank, [(1 * MS, end)] * 2, world=3) for rank, end in enumerate(ends)))
    (said,) = (warning for warning in attribution.warnings if warning.code == "matched_by_ends")
    assert "within 4.0 us" in said.message
