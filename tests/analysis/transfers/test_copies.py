"""Rings whose hops are peer-to-peer copies, against the same ring over NCCL."""

from __future__ import annotations

from ringprof.analysis.findings.summary import summarise
from ringprof.analysis.transfers.hops import hop_totals
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, MAIN, NCCL, Builder, collective

COPY = "Memcpy PtoP (Device -> Device)"
WORLD, HOPS, ELEMENTS = 4, 5, 1 << 20
BYTES = 2 * ELEMENTS  # of K, and of V


def ring(kind):
    """Build ranks that compute 700 of every 1000 ns and exchange K and V for 900 ns; no rank is late."""
    builders = []
    for rank in range(WORLD):
        b = Builder(rank=rank, world_size=WORLD)
        to, source = (rank + 1) % WORLD, (rank - 1) % WORLD
        for step in range(HOPS):
            start, launched = 1000 * step, 100 * (step + 1)
            b.run(FLASH, start, start + 700, launched=launched - 45)
            if kind == "nccl":
                b.batch(launched, start, start + 900, to=to, source=source, elements=ELEMENTS)
            else:
                b.run(COPY, start, start + 450, launched=launched, stream=20, category=1, size=BYTES)
                b.run(COPY, start + 450, start + 900, launched=launched + 6, stream=20, category=1, size=BYTES)
        builders.append(b)
    return attribute([b.trace() for b in builders])


def test_copy_bytes_wire_and_exposed_totals_equal_nccl():
    nccl, copies = ring("nccl"), ring("copies")
    for a, b in zip(nccl.ranks, copies.ranks, strict=True):
        assert hop_totals(a.hops) == hop_totals(b.hops)
        assert hop_totals(b.hops).count == HOPS
        assert hop_totals(b.hops).sent_bytes == HOPS * 2 * BYTES
        assert [hop.exposed_ns for hop in a.hops] == [hop.exposed_ns for hop in b.hops] == [200] * HOPS
        for figure in ("compute_ns", "comm_ns", "overlapped_ns", "exposed_comm_ns", "idle_ns", "wall_ns"):
            assert getattr(a.breakdown, figure) == getattr(b.breakdown, figure)
    assert nccl.warnings == copies.warnings == ()


def test_copy_has_no_wait_and_needs_no_peer():
    attribution = attribute([Builder(world_size=1).run(COPY, 0, 500, launched=1, category=1, size=1000).trace()])
    (part,) = attribution.ranks[0].splits
    assert (part.wait_ns, part.wire_ns, part.link, part.transfer.source) == (0, 500, "same_host", "copy")
    (row,) = summarise(attribution).communication
    assert (row.kind, row.wire_gbps, row.best_gbps) == ("copy_engine", 2.0, 2.0)


def test_a_copy_of_unknown_size_has_no_rate():
    (rank,) = attribute([Builder(world_size=1).run(COPY, 0, 500, launched=1, category=1).trace()]).ranks
    totals = hop_totals(rank.hops)
    assert (totals.sent_bytes, totals.wire_ns, totals.wire_gbps) == (0, 500, None)


def test_copies_separated_by_work_are_separate_hops():
    b = Builder(world_size=1)
    b.run(COPY, 0, 500, launched=1, category=1, size=1000)
    b.run(FLASH, 0, 100, launched=2)
    b.run(COPY, 500, 1000, launched=3, category=1, size=1000)
    (rank,) = attribute([b.trace()]).ranks
    assert [hop.sent_bytes for hop in rank.hops] == [1000, 1000]


def test_wire_of_a_hop_is_the_union_of_its_copies():
    b = Builder(world_size=1)
    for number, (start, end) in enumerate([(0, 100), (50, 200), (300, 400)]):
        b.run(COPY, start, end, launched=number + 1, category=1, size=10)
    (hop,) = attribute([b.trace()]).ranks[0].hops
    assert (hop.start_ns, hop.end_ns, hop.wire_ns, hop.wait_ns, hop.sent_bytes) == (0, 400, 300, 0, 30)
    assert hop.busy_ns() == [(0, 200), (300, 400)]


def test_copies_outside_hops_are_memory_operations():
    b = Builder(world_size=1).run("Memcpy DtoD (Device -> Device)", 0, 500, launched=1, category=1, size=1000)
    b.run(NCCL, 500, 600, launched=9, own=collective("send", destination_rank=1), thread=MAIN)
    (rank,) = attribute([b.trace()]).ranks
    assert set(rank.breakdown.kinds) == {"memcpy", "send_recv"}
