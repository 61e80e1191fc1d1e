"""The event model against closed formulas, and against a recurrence that knows nothing of events."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pytest

from ringprof.prediction.simulator import BlockTime, Timeline, Transfer, simulate
from ringprof.record.dryrun.schedule import AttentionOp, CommStart, CommWait, MemoryOp, Op, Program, StreamWait
from ringprof.run import Work

NOTHING = Work(block_flops=0, block_calls={}, sent=[])


def block(causal: bool = False, stream: int = 0) -> AttentionOp:
    return AttentionOp(
        label="", phase="forward", batch=1, q=1, kv=1, heads=1, kv_heads=1, head_dim=1, causal=causal, stream=stream
    )


def program(rank: int, *ops: Op) -> Program:
    return Program(rank=rank, ops=list(ops), work=NOTHING, peak_bytes=0, peak_label="")


def hop(number: int, size: int, messages: int = 1000, operation: str = "send_recv", channel: str = "kv") -> CommStart:
    return CommStart(
        id=number, channel=channel, phase="forward", operation=operation, members=tuple(range(size)),
        communicator=channel, messages=(messages,),
    )  # fmt: skip


def ring(rank: int, size: int) -> Program:
    """Post, compute, wait; the last block sends nothing on."""
    ops: list[Op] = []
    for step in range(size):
        last = step + 1 == size
        ops += [block()] if last else [hop(step, size), block(), CommWait(id=step)]
    return program(rank, *ops)


@dataclass
class Machine:
    """Every figure by hand; 1 byte a nanosecond."""

    blocks: Callable[[int, int], float] = lambda rank, place: 100.0
    fills: bool = False
    lead_ns: float = 0.0
    tail_ns: float = 0.0
    rate: float = 1.0
    latency_ns: float = 0.0
    handover_ns: float = 0.0
    taken: float = 0.0
    first: bool = True
    host_ns: float = 0.0
    collective_ns: float = 70.0

    def block(self, rank: int, place: int, block: AttentionOp) -> BlockTime:
        return BlockTime(self.blocks(rank, place), self.lead_ns, self.tail_ns, self.fills)

    def touch(self, rank: int, place: int, touch: MemoryOp) -> float:
        return float(touch.bytes)

    def host(self, program: Program) -> list[float]:
        return [self.host_ns] * len(program.ops)

    def leg(self, post: CommStart, sender: int, receiver: int) -> Transfer:
        return Transfer(sum(post.messages), self.rate, self.latency_ns, (("out", sender), ("in", receiver)))

    def collective(self, post: CommStart) -> float:
        return self.collective_ns

    def share(self, post: CommStart) -> float:
        return 0.0 if post.operation == "copy" else self.taken

    def capacity(self, link: Hashable) -> float:
        return self.rate

    def hop_is_first(self, rank: int, place: int) -> bool:
        return self.first


def ends(programs: list[Program], machine: Machine, lead_ns: float = math.inf) -> list[float]:
    return [one.end_ns for one in simulate(programs, machine, lead_ns=lead_ns)]


def rings(size: int) -> list[Program]:
    return [ring(rank, size) for rank in range(size)]


def test_hidden_hops_cost_nothing_and_others_their_excess() -> None:
    """Four blocks of 100; three hops of 1000 bytes at 20 a nanosecond take 50, at 5 they take 200."""
    assert ends(rings(4), Machine(rate=20)) == [400] * 4
    assert ends(rings(4), Machine(rate=5)) == [3 * 200 + 100] * 4
    assert ends(rings(4), Machine(rate=5, latency_ns=7)) == [3 * 207 + 100] * 4


@pytest.mark.parametrize("seed", range(20))
def test_a_ring_follows_its_recurrence(seed: int) -> None:
    """A step begins when the one before is done and its hop has arrived, which takes its time from when both ends have
    posted it: max-plus, in a line."""
    chance = random.Random(seed)
    size, hop_ns = chance.choice((2, 3, 5, 8)), chance.uniform(10, 200)
    took = {(rank, step): chance.uniform(20, 200) for rank in range(size) for step in range(size)}
    begins = {(rank, 0): 0.0 for rank in range(size)}
    for step in range(1, size):
        for rank in range(size):
            left = (rank - 1) % size
            right = (rank + 1) % size
            # A rank's kernel ends when what it sends has arrived, too.
            posted = {other: begins[other, step - 1] for other in (left, rank, right)}
            arrived = max(posted[left], posted[rank]) + hop_ns
            gone = max(posted[rank], posted[right]) + hop_ns
            begins[rank, step] = max(begins[rank, step - 1] + took[rank, step - 1], arrived, gone)
    expected = [begins[rank, size - 1] + took[rank, size - 1] for rank in range(size)]
    places = [place for place, op in enumerate(ring(0, size).ops) if isinstance(op, AttentionOp)]
    machine = Machine(blocks=lambda rank, place: took[rank, places.index(place)], rate=1000 / hop_ns)
    assert ends(rings(size), machine) == pytest.approx(expected)


def test_a_slow_rank_holds_up_the_ring() -> None:
    """Rank 2's blocks take 150, the others' 100. It posts its last hop when it begins its third block, at 300: all
    have what they wait for then, and one block to do."""
    slow = Machine(blocks=lambda rank, place: 150.0 if rank == 2 else 100.0, rate=1e9)
    assert ends(rings(4), slow) == pytest.approx([400, 400, 600, 400])
    assert ends(rings(8), slow)[3] == pytest.approx(6 * 150 + 100)


def test_a_hop_posted_into_a_block_that_fills_the_device_begins_when_it_drains() -> None:
    """The hop becomes ready with the block, loses the race by the handover, and waits for the block's tail."""
    programs = [program(rank, hop(0, 2), block(), CommWait(id=0)) for rank in range(2)]
    late = Machine(fills=True, tail_ns=10, rate=20, first=False, handover_ns=1, taken=0.25)
    for one in simulate(programs, late):
        assert one.kernels[0] == (90, 90, 140)
    # Where it is first, it is hidden, and the block has the rest of the device meanwhile.
    assert ends(programs, Machine(fills=True, tail_ns=10, rate=20, taken=0.25)) == [112.5, 112.5]


def test_small_kernels_at_the_beginning_of_a_backward_block_leave_room() -> None:
    programs = [program(rank, hop(0, 2), block(), CommWait(id=0)) for rank in range(2)]
    early = Machine(fills=True, lead_ns=5, tail_ns=10, rate=20, first=False, handover_ns=1, taken=0.25)
    assert [one.kernels[0][0] for one in simulate(programs, early)] == [1, 1]


def test_a_block_beside_a_hop_has_what_the_hop_leaves() -> None:
    """A quarter is taken for 50: the block has done 37.5 of its 100 by then, and ends at 112.5. Copies take nothing."""
    for operation, expected in (("send_recv", 112.5), ("copy", 100.0)):
        programs = [program(rank, hop(0, 2, operation=operation), block(), CommWait(id=0)) for rank in range(2)]
        assert ends(programs, Machine(rate=20, taken=0.25)) == [expected] * 2


def test_two_rings_share_a_link() -> None:
    """1000 bytes each over one link of 10 a nanosecond: 200 together, or 100 each after the other."""
    both = [program(r, hop(0, 2), hop(1, 2, channel="other"), CommWait(id=0), CommWait(id=1)) for r in range(2)]
    assert ends(both, Machine(rate=10)) == [200, 200]
    queued = [program(r, hop(0, 2), hop(1, 2), CommWait(id=0), block(), CommWait(id=1)) for r in range(2)]
    assert ends(queued, Machine(rate=10)) == [200, 200]


def test_a_collective_begins_with_its_last_member() -> None:
    gather = hop(0, 3, operation="all_gather")
    late = Machine(blocks=lambda rank, place: 10.0 * rank)
    programs = [program(rank, block(), gather, CommWait(id=0)) for rank in range(3)]
    assert ends(programs, late) == [20 + 70] * 3


def test_streams_run_beside_each_other_until_they_meet() -> None:
    meet: list[Op] = [
        StreamWait(stream=0, after=1),
        StreamWait(stream=0, after=2),
        MemoryOp(label="", name="", bytes=7),
    ]
    machine = Machine(blocks=lambda rank, place: 100.0 + 50 * place)
    assert ends([program(0, block(stream=1), block(stream=2), *meet)], machine) == [157]


def test_a_stream_that_waited_for_another_goes_on_after_the_handover() -> None:
    ops: list[Op] = [block(stream=1), StreamWait(stream=0, after=1), MemoryOp(label="", name="", bytes=7)]
    assert ends([program(0, *ops)], Machine(handover_ns=3)) == [100 + 3 + 7]


def test_the_host_is_the_bound_where_it_takes_longer() -> None:
    """Ten blocks of 100 that take the host 300 each to launch: the last begins at 3000."""
    programs = [program(0, *(block() for _ in range(10)))]
    assert ends(programs, Machine(host_ns=300), lead_ns=0) == [3100]
    assert ends(programs, Machine(host_ns=300)) == [1000]
    assert ends(programs, Machine(host_ns=20), lead_ns=0) == [1020]


def test_a_transfer_that_a_peer_never_posts_is_an_error_and_no_short_run() -> None:
    programs = [program(0, hop(0, 2), CommWait(id=0)), program(1, block())]
    with pytest.raises(RuntimeError, match="rank 0 waits"):
        simulate(programs, Machine())


def test_ranks_without_a_program_come_with_those_that_trade_with_them() -> None:
    """Of a ring of 8, ranks 2 and 3; the others are there when they are."""
    assert ends([ring(2, 8), ring(3, 8)], Machine(rate=5)) == [7 * 200 + 100] * 2


def test_timelines_say_when_everything_was() -> None:
    (one,) = simulate([program(0, block(), MemoryOp(label="", name="", bytes=5))], Machine())
    assert one == Timeline([(0.0, 100.0), (100.0, 105.0)], {})
