"""Collectives without a record, matched by their ends, on ranks with known groups."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from ringprof.analysis.transfers.match_by_end import StreamCalls, find_communicators
from ringprof.scale.pipeline import attribute
from tests.analysis.build import Builder, collective

REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
GATHER = "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)"
US, MS = 1_000, 1_000_000


def reduces(rank, spans, stream=20, name=REDUCE, host=None, world=2, builder=None):
    """Build all-reduces without a record, as older PyTorch writes them."""
    b = builder or Builder(rank=rank, world_size=world, host=host)
    for start, end in spans:
        b.run(name, start, end, stream=stream, launched=start - US)
    return b


def splits(attribution):
    return [[(part.wait_ns, part.wire_ns) for part in rank.splits] for rank in attribution.ranks]


def codes(attribution):
    return {warning.code for warning in attribution.warnings}


def attribution_of(*builders, **options):
    return attribute([b.trace() for b in builders], **options)


def test_kernels_that_end_together_wait_for_the_last_to_begin():
    # Rank 1 arrives 2 ms, then 0.5 ms after rank 0; the ends are 4 us apart.
    first = [(1 * MS, 4 * MS), (6 * MS, 7 * MS)]
    second = [(3 * MS, 4 * MS + 4 * US), (6 * MS + 500 * US, 7 * MS - 4 * US)]
    attribution = attribution_of(reduces(0, first), reduces(1, second))
    assert [[wait for wait, _ in rank_splits] for rank_splits in splits(attribution)] == [[2 * MS, 500 * US], [0, 0]]
    (warning,) = (notice for notice in attribution.warnings if notice.code == "matched_by_ends")
    assert "within 4.0 us" in warning.message and warning.count == 4
    assert "no_record" not in codes(attribution)


@pytest.mark.parametrize(
    "second",
    [
        # An eighth of the shorter kernel (1.14 ms) is less than this difference.
        pytest.param([(3 * MS, 4 * MS + 143 * US), (6 * MS, 7 * MS)], id="ends apart"),
        pytest.param([(3 * MS, 4 * MS)], id="another count"),
        pytest.param([(4 * MS - US, 4 * MS), (7 * MS + 60 * US, 7 * MS + 61 * US)], id="begins after the other ended"),
    ],
)
def test_kernels_that_do_not_end_together_are_not_matched(second):
    attribution = attribution_of(reduces(0, [(1 * MS, 4 * MS), (6 * MS, 7 * MS)]), reduces(1, second))
    assert splits(attribution)[0] == [(None, None)] * 2
    assert "no_record" in codes(attribution) and "matched_by_ends" not in codes(attribution)


def test_kernels_of_another_kind_are_not_matched():
    spans = [(1 * MS, 4 * MS)]
    assert "no_record" in codes(attribution_of(reduces(0, spans), reduces(1, spans, name=GATHER)))


def test_two_communicators_of_a_rank_are_distinguished():
    """Check three communicators: ranks 0 and 1 reduce, ranks 2 and 3 reduce, and all four gather."""
    pairs = {0: (1 * MS, 4 * MS), 1: (3 * MS, 4 * MS), 2: (1 * MS, 2 * MS), 3: (1_200 * US, 2 * MS)}
    gather_starts = {0: 5 * MS, 1: 5 * MS, 2: 5 * MS, 3: 6 * MS}
    builders = [reduces(rank, [span], world=4) for rank, span in pairs.items()]
    for rank, start in gather_starts.items():
        reduces(rank, [(start, 8 * MS)], stream=24, name=GATHER, builder=builders[rank])
    attribution = attribution_of(*builders)
    waits = [[wait for wait, _ in rank_splits] for rank_splits in splits(attribution)]
    assert waits == [[2 * MS, 1 * MS], [0, 1 * MS], [200 * US, 1 * MS], [0, 0]]
    groups = [part.transfer.group[1] for part in attribution.ranks[2].splits]
    assert groups == [(2, 3), (0, 1, 2, 3)]


def test_missing_rank_may_belong_to_any_communicator():
    spans = [(1 * MS, 4 * MS), (6 * MS, 7 * MS)]
    attribution = attribution_of(reduces(0, spans, world=3), reduces(1, spans, world=3))
    assert "matched_by_ends" not in codes(attribution) and "no_record" in codes(attribution)


def test_records_take_precedence_over_matching_by_ends():
    builders = [Builder(rank=rank, world_size=2) for rank in range(2)]
    for rank, builder in enumerate(builders):
        ranks = collective("allreduce", group="dp", group_ranks=(0, 1), group_size=2)
        builder.run(REDUCE, (1 + rank) * MS, 4 * MS, launched=US, own=ranks)
    attribution = attribution_of(*builders)
    assert [part.transfer.group for part in attribution.ranks[0].splits] == [("dp", (0, 1))]
    assert "matched_by_ends" not in codes(attribution)


@pytest.mark.parametrize("count", [2, 3])
def test_separate_host_clocks_need_several_kernels(count):
    """Check that two kernels are not enough: one offset fits any single pair, but three within 50 us are no chance."""
    clock_offset = 40 * MS
    first = [((10 * number + 1) * MS, (10 * number + 4) * MS) for number in range(1, 1 + count)]
    second = [(start + MS + clock_offset, end + clock_offset) for start, end in first]
    attribution = attribution_of(reduces(0, first, host="a"), reduces(1, second, host="b"))
    assert ("matched_by_ends" in codes(attribution)) == (count == 3)


def test_spread_of_ends_is_measured_from_the_first_rank():
    # 4 us after rank 0 and 3 us before it: 7 us apart from each other.
    ends = [4 * MS, 4 * MS + 4 * US, 4 * MS - 3 * US]
    attribution = attribution_of(*(reduces(rank, [(1 * MS, end)] * 2, world=3) for rank, end in enumerate(ends)))
    (warning,) = (notice for notice in attribution.warnings if notice.code == "matched_by_ends")
    assert "within 4.0 us" in warning.message


def over_pcie(rank, count=6, world=2, **options):
    """Build kernels of 3 to 4 ms; rank r ends r x 73 to r x 388 us after rank 0, and rank 1 waits 2 ms for rank 0."""
    end_differences = [73, 388, 208, 250, 348, 192, 241]
    spans = []
    for number in range(count):
        begin, end = 10 * number * MS + (2 - 2 * (rank == 1)) * MS, (10 * number + 6) * MS
        spans.append((begin, end + rank * end_differences[number % len(end_differences)] * US))
    return reduces(rank, spans, world=world, **options)


def test_ends_over_pcie_match_with_one_communicator():
    """Check two GPUs without group records: the kernel that waits least takes 4 ms, and ends are 10 % apart."""
    attribution = attribution_of(over_pcie(0), over_pcie(1))
    assert [[wait for wait, _ in rank_splits] for rank_splits in splits(attribution)] == [[0] * 6, [2 * MS] * 6]
    (warning,) = (notice for notice in attribution.warnings if notice.code == "matched_by_ends")
    assert "within 388.0 us" in warning.message and warning.count == 12
    assert "no_record" not in codes(attribution)


def test_ends_over_pcie_of_three_ranks():
    spans = [(10 * number * MS, (10 * number + 4) * MS) for number in range(3)]
    ranks = [[(begin, end + rank * 200 * US) for begin, end in spans] for rank in range(3)]
    attribution = attribution_of(*(reduces(rank, ranks[rank], world=3) for rank in range(3)))
    assert {part.transfer.group[1] for rank in attribution.ranks for part in rank.splits} == {(0, 1, 2)}
    # Ranks 0 and 2 are more than an eighth apart.
    far = [ranks[0], ranks[1], [(begin, end + 501 * US) for begin, end in spans]]
    assert "matched_by_ends" not in codes(attribution_of(*(reduces(rank, far[rank], world=3) for rank in range(3))))


def test_groups_in_lockstep_are_not_joined():
    """Check two pairs of ranks that reduce almost at the same time, like replicas of a model."""

    def pair(first, second, difference):
        """Build two ranks; the second ends ``difference`` us after the first, and each pair 200 us after the last."""
        return [
            reduces(
                rank,
                [
                    (
                        (10 * number + 1) * MS,
                        (10 * number + 5) * MS + (100 * first + difference * (rank == second)) * US,
                    )
                    for number in range(6)
                ],
                world=4,
            )
            for rank in (first, second)
        ]

    apart = attribution_of(*pair(0, 1, 90), *pair(2, 3, 90))
    assert "matched_by_ends" not in codes(apart) and "no_record" in codes(apart)
    one_close_pair = attribution_of(*pair(0, 1, 20), *pair(2, 3, 90))
    groups = [{part.transfer.group[1] for part in rank.splits} for rank in one_close_pair.ranks]
    assert groups == [{(0, 1)}, {(0, 1)}, {()}, {()}]


def test_two_communicators_of_the_same_ranks_are_separated():
    """Check two communicators that reduce equally often on separate streams, with ends at different times."""
    builders = [over_pcie(rank) for rank in (0, 1)]
    for rank, builder in enumerate(builders):
        spans = [((10 * number + 1) * MS, (10 * number + 6) * MS + (100 + 90 * rank) * US) for number in range(6)]
        reduces(rank, spans, stream=24, builder=builder)
    attribution = attribution_of(*builders)
    assert "matched_by_ends" not in codes(attribution) and "no_record" in codes(attribution)


def test_separate_host_clocks_need_closely_agreeing_ends():
    hosts = (over_pcie(0, host="a"), over_pcie(1, host="b"))
    assert "matched_by_ends" not in codes(attribution_of(*hosts))


def streams_of(random, communicators):
    """Draw the streams of communicators in lockstep, with their communicators: five reductions of about 4 ms each."""
    streams: list[tuple[int, StreamCalls]] = []
    for number, ranks in enumerate(communicators):
        delay = random.integers(-400, 400) * US
        ends = [(10 * call + 8) * MS + delay + random.integers(-100, 100) * US for call in range(5)]
        for rank in ranks:
            last = np.array([end + random.integers(0, 350) * US for end in ends], np.int64)
            first = last - random.integers(3, 5, 5) * MS
            streams.append(
                (number, StreamCalls(rank, ("all_reduce",) * 5, first, last, tuple(range(len(streams) + 1))))
            )
    return streams


@pytest.mark.parametrize("seed", range(200))
def test_random_communicators_are_never_joined(seed):
    """Check random groups of ranks in lockstep within 0.4 ms, with ends up to 0.35 ms apart."""
    random = np.random.default_rng(seed)
    world = int(random.integers(2, 7))
    communicators = [
        tuple(sorted(random.choice(world, int(random.integers(2, world + 1)), replace=False).tolist()))
        for _ in range(int(random.integers(1, 4)))
    ]
    streams = streams_of(random, communicators)
    # The index of a transfer stands for its stream here.
    calls = [msgspec.structs.replace(stream, indices=(index,) * 5) for index, (_, stream) in enumerate(streams)]
    group_of, _ = find_communicators(calls, dict.fromkeys(range(world), "one"))
    members: dict[str | None, set[int]] = {}
    for groups in group_of.values():
        for index, (name, _) in groups.items():
            members.setdefault(name, set()).add(streams[index][0])
    assert all(len(numbers) == 1 for numbers in members.values())
    if world <= 3 and communicators == [tuple(range(world))]:
        assert len(members) <= 1
