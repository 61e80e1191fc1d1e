"""Wait and wire of hops and collectives on rings with known times."""

from __future__ import annotations

import pytest

from ringprof.analysis.transfers.hops import _merged_spans, hop_totals
from ringprof.analysis.transfers.matching import collective_mismatch
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, NCCL, Builder, collective

SIZE = 4
BYTES = 2000  # of one tensor of 1000 bf16 numbers


def ring(starts, ends, tensors=2, world=SIZE, **fields):
    """Build one batched hop on each rank of a ring; ``starts`` and ``ends`` are by rank."""
    builders = [Builder(rank=rank, world_size=world) for rank in range(world)]
    for rank, b in enumerate(builders):
        b.batch(
            100, starts[rank], ends[rank], to=(rank + 1) % world, source=(rank - 1) % world, tensors=tensors,
            group_ranks=tuple(range(world)), group_size=world, **fields,
        )  # fmt: skip
    return builders


def attribution_of(builders, **options):
    return attribute([b.trace() for b in builders], **options)


def splits(attribution):
    return [(split.wait_ns, split.wire_ns) for rank in attribution.ranks for split in rank.splits]


def codes(attribution):
    return [warning.code for warning in attribution.warnings]


def test_peers_and_bytes_come_from_the_cpu_records_of_the_launch():
    attribution = attribution_of(ring([1000] * 4, [2000] * 4))
    (split,) = attribution.ranks[1].splits
    assert split.transfer.source == "cpu_records"
    assert [(message.peer, message.size_bytes) for message in split.transfer.sends] == [(2, BYTES), (2, BYTES)]
    assert [(message.peer, message.size_bytes) for message in split.transfer.receives] == [(0, BYTES), (0, BYTES)]
    assert split.transfer.sent_bytes == 2 * BYTES
    assert split.transfer.group == ("cp", (0, 1, 2, 3))


def test_no_wait_when_all_ranks_start_together():
    assert splits(attribution_of(ring([1000] * 4, [2000] * 4))) == [(0, 1000)] * 4


def test_one_message_per_peer_waits_for_direct_peers_only():
    # Rank 3 is 500 late. Its neighbours 0 and 2 wait for it, rank 1 does not.
    attribution = attribution_of(ring([1000, 1000, 1000, 1500], [2500, 2000, 2500, 2500], tensors=1))
    assert splits(attribution) == [(500, 1000), (0, 1000), (500, 1000), (0, 1000)]


def test_two_messages_per_peer_wait_for_peers_of_peers():
    # Rank 1, two hops away, is delayed too: its peers' V cannot move before their K has.
    attribution = attribution_of(ring([1000, 1000, 1000, 1500], [2500] * 4, tensors=2))
    assert splits(attribution) == [(500, 1000)] * 3 + [(0, 1000)]


@pytest.mark.parametrize(("tensors", "waited_for"), [(1, [{3: 500}, {}, {3: 500}, {}]), (2, [{3: 500}] * 3 + [{}])])
def test_wait_is_attributed_to_the_last_rank_it_depends_on(tensors, waited_for):
    # With two messages per peer, rank 1 waits for rank 3, which is not one of its own peers 0 and 2.
    starts, ends = [1000, 1000, 1000, 1500], [2500, 2500 if tensors == 2 else 2000, 2500, 2500]
    attribution = attribution_of(ring(starts, ends, tensors=tensors))
    assert [rank.exposed.waited_for for rank in attribution.ranks] == waited_for


def test_wire_is_never_faster_than_the_best_rate_seen():
    # Six ranks; rank 3 is last by far. Rank 1, whose peer's peer is rank 3, ends soon after. It cannot have sent all
    # its bytes in the 10 ns left: a kernel of its own direct peers took 100 ns at best.
    starts = [1000, 1000, 1000, 1990, 1000, 1000]
    ends = [1100, 2000, 2090, 2090, 2090, 1100]
    builders = ring(starts, ends, world=6)
    for b in builders:
        b.run(FLASH, 0, 3000, launched=90)
    attribution = attribution_of(builders)
    best = attribution.best_gbps["send_recv", "unknown"]
    assert best == pytest.approx(2 * BYTES / 100)
    for rank in attribution.ranks:
        for part in rank.splits:
            assert part.wait_ns + part.wire_ns == part.transfer.duration_ns
            assert part.transfer.sent_bytes / part.wire_ns <= best + 1e-9
    assert splits(attribution)[1] == (900, 100)


def test_total_rate_is_all_bytes_over_all_wire_time():
    totals = hop_totals(attribution_of(ring([1000] * 4, [2000] * 4)).ranks[0].hops)
    assert (totals.count, totals.sent_bytes, totals.wait_ns, totals.wire_ns) == (1, 2 * BYTES, 0, 1000)
    assert totals.wire_gbps == 4.0


def test_a_missing_rank_leaves_its_neighbours_without_a_split():
    attribution = attribution_of(ring([1000] * 4, [2000] * 4)[:3])
    assert splits(attribution) == [(None, None)] * 3
    assert set(codes(attribution)) == {"missing_ranks", "peer_missing"}


def test_single_rank_has_bytes_and_no_wait_split():
    attribution = attribution_of(ring([1000] * 4, [2000] * 4)[:1])
    assert splits(attribution) == [(None, None)]
    assert hop_totals(attribution.ranks[0].hops).sent_bytes == 2 * BYTES
    assert "peer_missing" in codes(attribution)


def test_unequal_counts_are_reported_and_not_matched():
    builders = ring([1000] * 4, [2000] * 4)
    builders[0].batch(500, 3000, 4000, to=1, source=3)
    attribution = attribution_of(builders)
    assert "counts_differ" in codes(attribution)
    assert splits(attribution) == [(None, None)] * 5


def test_unequal_bytes_are_reported():
    builders = ring([1000] * 4, [2000] * 4)
    builders[2] = Builder(rank=2).batch(100, 1000, 2000, to=3, source=1, elements=999)
    assert "bytes_differ" in codes(attribution_of(builders))


def test_a_kernel_without_records_gets_a_warning():
    b = Builder(world_size=1).run(FLASH, 0, 10, launched=1).run(NCCL, 10, 30, launched=2)
    attribution = attribution_of([b])
    assert codes(attribution) == ["no_record"]
    assert hop_totals(attribution.ranks[0].hops).wire_gbps is None


def test_two_rings_are_separated_by_group():
    builders = ring([1000] * 4, [2000] * 4)
    for rank, b in enumerate(builders):
        # The other ring runs backwards, later, on its own stream.
        b.batch(600, 5000, 5000 + 100 * (rank + 1), to=(rank - 1) % 4, source=(rank + 1) % 4, group="back")
    attribution = attribution_of(builders)
    assert codes(attribution) == []
    assert [rank.hops[1].parts[0].transfer.group[0] for rank in attribution.ranks] == ["back"] * 4


def test_a_send_and_a_receive_launched_together_are_one_hop():
    builders = [Builder(rank=rank, world_size=2) for rank in range(2)]
    pair = {"group_ranks": (0, 1), "group_size": 2}
    for rank, b in enumerate(builders):
        other = 1 - rank
        b.run(NCCL, 1000, 2000, launched=10, own=collective("send", destination_rank=other, **pair), stream=20)
        b.run(NCCL, 1500, 2500, launched=20, own=collective("recv", source_rank=other, **pair), stream=21)
    attribution = attribution_of(builders)
    (hop,) = attribution.ranks[0].hops
    assert len(hop.parts) == 2
    assert (hop.start_ns, hop.end_ns, hop.sent_bytes) == (1000, 2500, BYTES)
    # Each send is ready when the peer's receive starts, 500 ns in; both kernels are on the wire from 1500 to 2500.
    assert (hop.wait_ns, hop.wire_ns) == (500, 1000)


def test_a_send_and_a_receive_of_two_groups_are_two_hops():
    b = Builder(world_size=2)
    pair = {"group_ranks": (0, 1), "group_size": 2}
    b.run(NCCL, 1000, 2000, launched=10, own=collective("send", destination_rank=1, **pair), stream=20)
    b.run(NCCL, 1500, 2500, launched=20, own=collective("recv", source_rank=1, group="pp", **pair), stream=21)
    assert [(hop.sent_to, hop.received_from) for hop in attribution_of([b]).ranks[0].hops] == [((1,), ()), ((), (1,))]


def test_a_lone_send_with_work_before_the_receive_is_its_own_hop():
    b = Builder(world_size=1)
    b.run(NCCL, 1000, 2000, launched=10, own=collective("send", destination_rank=1), stream=20)
    b.run(FLASH, 2000, 3000, launched=15)
    b.run(NCCL, 3000, 4000, launched=20, own=collective("recv", source_rank=3), stream=20)
    assert len(attribution_of([b]).ranks[0].hops) == 2


def test_a_collective_waits_for_its_whole_group():
    builders = [Builder(rank=rank) for rank in range(4)]
    for rank, b in enumerate(builders):
        b.run(NCCL, 1000 + 100 * rank, 2000, launched=10, own=collective("all_to_all"), stream=20)
    attribution = attribution_of(builders)
    assert splits(attribution) == [(300, 700), (200, 700), (100, 700), (0, 700)]
    assert attribution.ranks[0].hops == ()
    assert attribution.ranks[0].splits[0].transfer.sent_bytes == BYTES * 3 // 4


def test_hops_of_named_hosts_have_a_link_class():
    attribution = attribution_of(ring([1000] * 4, [2000] * 4), ranks_per_host=2)
    assert [rank.splits[0].link for rank in attribution.ranks] == ["other_host"] * 4
    attribution = attribution_of(ring([1000] * 4, [2000] * 4), ranks_per_host=4)
    assert [rank.splits[0].link for rank in attribution.ranks] == ["same_host"] * 4


def test_clocks_of_several_hosts_are_not_assumed_equal():
    # One hop bounds the offset to within its own length, and no rank waits that long.
    builders = ring([1000] * 4, [2000] * 4)
    for rank, b in enumerate(builders):
        b.host = f"node{rank // 2}"
    attribution = attribution_of(builders)
    assert codes(attribution) == ["clocks_fitted", "clocks_inconclusive"]
    assert splits(attribution) == [(None, None)] * 4


def test_a_transfer_that_ends_before_its_partner_begins_disproves_a_common_clock():
    elements = 1 << 26
    starts, ends = [1000, 1000, 1000, 10_000], [2000, 2000, 20_000, 20_000]
    builders = ring(starts, ends, elements=elements)
    for b in builders:
        b.run(FLASH, 0, 30_000, launched=50)
    attribution = attribution_of(builders)
    assert "clocks_disagree" in codes(attribution)
    assert splits(attribution) == [(None, None)] * 4


def all_reduces(offset):
    """Build a small and a long all-reduce on four ranks; the clocks of ranks 2 and 3 are ahead by ``offset``."""
    builders = [Builder(rank=rank) for rank in range(4)]
    for rank, b in enumerate(builders):
        ahead = offset if rank >= 2 else 0
        for number, (start, end) in enumerate([(1000, 20_000), (900_000, 9_000_000)]):
            own = collective("all_reduce")
            b.run(NCCL, start + ahead + 10 * rank, end + ahead, launched=10 + 50_000 * number, own=own, stream=20)
    return builders


def test_a_collective_that_ends_before_a_rank_begins_disproves_a_common_clock():
    assert splits(attribution_of(all_reduces(0)))[:2] == [(30, 18_970), (30, 8_099_970)]
    apart = attribution_of(all_reduces(5_000_000))
    assert splits(apart) == [(None, None)] * 8
    (warning,) = (notice for notice in apart.warnings if notice.code == "clocks_disagree")
    assert warning.message.endswith("if these ranks are of several nodes, --ranks-per-node has their clocks fitted")
    named = attribution_of(all_reduces(5_000_000), ranks_per_host=2)
    assert "clocks_disagree" not in codes(named) and splits(named)[1][1] is not None


def test_exposed_time_of_a_hop_excludes_computation():
    builders = ring([1000] * 4, [2000] * 4)
    for b in builders:
        b.run(FLASH, 500, 1600, launched=90)
    assert [rank.hops[0].exposed_ns for rank in attribution_of(builders).ranks] == [400] * 4


def test_hop_is_exactly_one_send_and_one_receive():
    builders = [Builder(rank=rank, world_size=2) for rank in range(2)]
    pair = {"group_ranks": (0, 1), "group_size": 2}
    for rank, b in enumerate(builders):
        send = collective("send", destination_rank=1 - rank, **pair)
        receive = collective("recv", source_rank=1 - rank, **pair)
        for number, own in enumerate((send, receive, send, receive, receive)):
            b.run(NCCL, 1000 * number, 1000 * number + 900, launched=10 + 10 * number, own=own, stream=20)
    hops = attribution_of(builders).ranks[0].hops
    assert [(hop.start_ns, hop.end_ns, len(hop.parts)) for hop in hops] == [
        (0, 1900, 2), (2000, 3900, 2), (4000, 4900, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "element"),
    [
        ("Byte", 1), ("Char", 1), ("Bool", 1), ("Short", 2), ("Int", 4), ("Long", 8), ("Half", 2), ("BFloat16", 2),
        ("Float", 4), ("Double", 8), ("ComplexFloat", 8), ("ComplexDouble", 16), ("Float8_e4m3fn", 1),
        ("float8_e5m2", 1), ("Quux", None), (None, None),
    ],
)  # fmt: skip
def test_bytes_of_every_type(dtype, element):
    own = collective("send", destination_rank=1, dtype=dtype)
    b = Builder(world_size=2).run(NCCL, 0, 10, launched=1, own=own, stream=20)
    (part,) = attribution_of([b]).ranks[0].splits
    assert part.transfer.sent_bytes == (None if element is None else 1000 * element)


@pytest.mark.parametrize(
    ("to", "source", "fields", "peers"),
    [
        ((0, 5, 0), (0, 0, 5), {}, (1, 2)),
        ((0, 5, 0), (0, 0, 5), {"group_ranks": (0, 4, 8), "group_size": 3}, (4, 8)),
        ((0, 5, 0), (0, 0, 5), {"group_ranks": None, "group_size": None}, (1, 2)),
        ((0, 5, 5), (0, 0, 5), {}, None),
        ((5, 0, 0), (0, 5, 0), {}, None),
    ],
)
def test_all_to_all_with_one_peer_each_way_is_a_hop(to, source, fields, peers):
    values = {"group_ranks": (0, 1, 2), "group_size": 3, **fields}
    own = collective("all_to_allv", in_split=to, out_split=source, **values)
    b = Builder(world_size=3).run(NCCL, 0, 10, launched=1, own=own, stream=20)
    (split,) = attribution_of([b]).ranks[0].splits
    if peers is None:
        assert (split.transfer.kind, split.transfer.sends) == ("all_to_all", ())
    else:
        assert split.transfer.kind == "send_recv"
        assert (
            [message.peer for message in split.transfer.sends],
            [message.peer for message in split.transfer.receives],
        ) == (
            [peers[0]],
            [peers[1]],
        )


@pytest.mark.parametrize(("split", "sent"), [((2, 1, 1), 1000), ((4, 0, 0), 0), ((), 1333)])
def test_bytes_sent_in_an_all_to_all(split, sent):
    # 2000 bytes on each of 3 ranks: the rank's own split stays; without splits, two thirds leave.
    own = collective("all_to_all", group_ranks=(0, 1, 2), group_size=3, in_split=split)
    b = Builder(world_size=3).run(NCCL, 0, 10, launched=1, own=own, stream=20)
    assert attribution_of([b]).ranks[0].splits[0].transfer.sent_bytes == sent


def test_touching_spans_are_merged():
    assert _merged_spans([(5, 9), (0, 5), (11, 12)]) == [(0, 9), (11, 12)]


@pytest.mark.parametrize(
    ("counts", "reason"), [({0: 3, 1: 3}, ""), ({0: 3, 1: 4}, "counts_differ"), ({0: 3}, "counts_differ")]
)
def test_ranks_of_a_group_must_make_equally_many_calls(counts, reason):
    assert collective_mismatch(("cp", (0, 1)), {0, 1}, counts) == reason
