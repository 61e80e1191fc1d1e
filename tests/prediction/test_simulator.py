"""The simulator against closed formulas, and against a recurrence that does not use events."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pytest

from ringprof.dryrun.schedule import AttentionOp, CommStart, CommWait, ComputeOp, MemoryOp, Op, Program, StreamWait
from ringprof.prediction.simulator import BlockTime, LinkTransfer, Timeline, simulate
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
    """Return a program that starts a hop, computes and waits; the last block sends nothing."""
    ops: list[Op] = []
    for step in range(size):
        last = step + 1 == size
        ops += [block()] if last else [hop(step, size), block(), CommWait(id=step)]
    return program(rank, *ops)


@dataclass
class Machine:
    """Machine whose figures are set by hand; 1 byte per nanosecond."""

    blocks: Callable[[int, int], float] = lambda rank, op_index: 100.0
    fills: bool = False
    lead_ns: float = 0.0
    tail_ns: float = 0.0
    rate: float = 1.0
    latency_ns: float = 0.0
    handover_ns: float = 0.0
    transfer_share: float = 0.0
    hops_first: bool = True
    host_ns: float = 0.0
    collective_time_ns: float = 70.0

    def compute_time(self, rank: int, op_index: int, block: ComputeOp) -> BlockTime:
        return BlockTime(self.blocks(rank, op_index), self.lead_ns, self.tail_ns, self.fills)

    def memory_op_ns(self, rank: int, op_index: int, op: MemoryOp) -> float:
        return float(op.bytes)

    def host_ns_per_op(self, program: Program) -> list[float]:
        return [self.host_ns] * len(program.ops)

    def transfer(self, comm_op: CommStart, sender: int, receiver: int) -> LinkTransfer:
        return LinkTransfer(sum(comm_op.messages), self.rate, self.latency_ns, (("out", sender), ("in", receiver)))

    def collective_ns(self, comm_op: CommStart) -> float:
        return self.collective_time_ns

    def device_share(self, comm_op: CommStart) -> float:
        return 0.0 if comm_op.operation == "copy" else self.transfer_share

    def capacity(self, link: Hashable) -> float:
        return self.rate

    def hop_starts_first(self, rank: int, op_index: int) -> bool:
        return self.hops_first


def end_times(programs: list[Program], machine: Machine, lead_ns: float = math.inf) -> list[float]:
    return [timeline.end_ns for timeline in simulate(programs, machine, lead_ns=lead_ns)]


def rings(size: int) -> list[Program]:
    return [ring(rank, size) for rank in range(size)]


def test_hidden_hops_cost_nothing_and_longer_ones_their_excess() -> None:
    """Four blocks of 100; three hops of 1000 bytes take 50 at 20 bytes per nanosecond, and 200 at 5."""
    assert end_times(rings(4), Machine(rate=20)) == [400] * 4
    assert end_times(rings(4), Machine(rate=5)) == [3 * 200 + 100] * 4
    assert end_times(rings(4), Machine(rate=5, latency_ns=7)) == [3 * 207 + 100] * 4


@pytest.mark.parametrize("seed", range(20))
def test_simulated_ring_follows_its_recurrence(seed: int) -> None:
    """A step starts when the previous one is done and its hop has arrived (max-plus).

    A hop takes its time from the moment when both ends have started it.
    """
    generator = random.Random(seed)
    size, hop_ns = generator.choice((2, 3, 5, 8)), generator.uniform(10, 200)
    block_ns = {(rank, step): generator.uniform(20, 200) for rank in range(size) for step in range(size)}
    starts = {(rank, 0): 0.0 for rank in range(size)}
    for step in range(1, size):
        for rank in range(size):
            left = (rank - 1) % size
            right = (rank + 1) % size
            # A rank's kernel ends when what it sends has arrived, too.
            started = {other: starts[other, step - 1] for other in (left, rank, right)}
            arrived = max(started[left], started[rank]) + hop_ns
            sent = max(started[rank], started[right]) + hop_ns
            starts[rank, step] = max(starts[rank, step - 1] + block_ns[rank, step - 1], arrived, sent)
    expected = [starts[rank, size - 1] + block_ns[rank, size - 1] for rank in range(size)]
    op_indices = [op_index for op_index, op in enumerate(ring(0, size).ops) if isinstance(op, AttentionOp)]
    machine = Machine(blocks=lambda rank, op_index: block_ns[rank, op_indices.index(op_index)], rate=1000 / hop_ns)
    assert end_times(rings(size), machine) == pytest.approx(expected)


def test_slow_rank_delays_the_ring() -> None:
    """Rank 2's blocks take 150, the others' 100.

    It starts its last hop when it begins its third block, at 300. All ranks then have what they wait for, and one block
    left.
    """
    slow = Machine(blocks=lambda rank, op_index: 150.0 if rank == 2 else 100.0, rate=1e9)
    assert end_times(rings(4), slow) == pytest.approx([400, 400, 600, 400])
    assert end_times(rings(8), slow)[3] == pytest.approx(6 * 150 + 100)


def test_hop_behind_a_full_block_begins_in_the_block_tail() -> None:
    """The hop becomes ready with the block, loses by the handover, and waits for the block's tail."""
    programs = [program(rank, hop(0, 2), block(), CommWait(id=0)) for rank in range(2)]
    late = Machine(fills=True, tail_ns=10, rate=20, hops_first=False, handover_ns=1, transfer_share=0.25)
    for timeline in simulate(programs, late):
        assert timeline.kernels[0] == (90, 90, 140)
    # Where it is first, it is hidden, and the block has the rest of the device meanwhile.
    assert end_times(programs, Machine(fills=True, tail_ns=10, rate=20, transfer_share=0.25)) == [112.5, 112.5]


def test_small_leading_kernels_of_a_block_let_a_hop_begin() -> None:
    programs = [program(rank, hop(0, 2), block(), CommWait(id=0)) for rank in range(2)]
    early = Machine(fills=True, lead_ns=5, tail_ns=10, rate=20, hops_first=False, handover_ns=1, transfer_share=0.25)
    assert [timeline.kernels[0][0] for timeline in simulate(programs, early)] == [1, 1]


def test_block_beside_a_hop_slows_by_the_share_of_the_hop() -> None:
    """A hop takes a quarter for 50: the block has done 37.5 of its 100 by then, and ends at 112.5.

    Copies take nothing.
    """
    for operation, expected in (("send_recv", 112.5), ("copy", 100.0)):
        programs = [program(rank, hop(0, 2, operation=operation), block(), CommWait(id=0)) for rank in range(2)]
        assert end_times(programs, Machine(rate=20, transfer_share=0.25)) == [expected] * 2


def test_two_rings_share_a_link() -> None:
    """1000 bytes each over one link of 10 per nanosecond: 200 together, or 100 each one after the other."""
    both = [program(r, hop(0, 2), hop(1, 2, channel="other"), CommWait(id=0), CommWait(id=1)) for r in range(2)]
    assert end_times(both, Machine(rate=10)) == [200, 200]
    queued = [program(r, hop(0, 2), hop(1, 2), CommWait(id=0), block(), CommWait(id=1)) for r in range(2)]
    assert end_times(queued, Machine(rate=10)) == [200, 200]


def test_a_collective_begins_with_its_last_member() -> None:
    gather = hop(0, 3, operation="all_gather")
    late = Machine(blocks=lambda rank, op_index: 10.0 * rank)
    programs = [program(rank, block(), gather, CommWait(id=0)) for rank in range(3)]
    assert end_times(programs, late) == [20 + 70] * 3


def test_streams_run_concurrently_until_a_stream_wait() -> None:
    meet: list[Op] = [
        StreamWait(stream=0, after=1),
        StreamWait(stream=0, after=2),
        MemoryOp(label="", name="", bytes=7),
    ]
    machine = Machine(blocks=lambda rank, op_index: 100.0 + 50 * op_index)
    assert end_times([program(0, block(stream=1), block(stream=2), *meet)], machine) == [157]


def test_stream_wait_adds_the_handover_time() -> None:
    ops: list[Op] = [block(stream=1), StreamWait(stream=0, after=1), MemoryOp(label="", name="", bytes=7)]
    assert end_times([program(0, *ops)], Machine(handover_ns=3)) == [100 + 3 + 7]


def test_host_is_the_bound_where_it_takes_longer() -> None:
    """Ten blocks of 100 that take the host 300 each to launch: the last begins at 3000."""
    programs = [program(0, *(block() for _ in range(10)))]
    assert end_times(programs, Machine(host_ns=300), lead_ns=0) == [3100]
    assert end_times(programs, Machine(host_ns=300)) == [1000]
    assert end_times(programs, Machine(host_ns=20), lead_ns=0) == [1020]


def test_transfer_never_posted_by_a_peer_is_an_error() -> None:
    programs = [program(0, hop(0, 2), CommWait(id=0)), program(1, block())]
    with pytest.raises(RuntimeError, match="rank 0 waits"):
        simulate(programs, Machine())


def test_ranks_without_a_program_are_ready_with_their_peers() -> None:
    """Ranks 2 and 3 of a ring of 8; the others are ready when these two are."""
    assert end_times([ring(2, 8), ring(3, 8)], Machine(rate=5)) == [7 * 200 + 100] * 2


def test_timeline_has_start_and_end_of_each_operation() -> None:
    (timeline,) = simulate([program(0, block(), MemoryOp(label="", name="", bytes=5))], Machine())
    assert timeline == Timeline([(0.0, 100.0), (100.0, 105.0)], {})
