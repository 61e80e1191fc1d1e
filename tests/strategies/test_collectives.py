"""Collectives of the communicator: what arrives, in every type, and what the meter counts."""

from __future__ import annotations

import pytest
import torch

from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.ring_channel import Collective
from tests.strategies.ranks import run_ranks

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MEMBERS = {4: [[0, 1, 2, 3]], 2: [[0, 2], [1, 3]]}


def piece(sender: int, receiver: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the piece that one member sends to another: small whole numbers, exact in every type."""
    return torch.full((2, 3), 8 * sender + receiver, dtype=dtype)


def channel_of(comm: Communicator, size: int) -> tuple[Collective, list[int]]:
    members = next(group for group in MEMBERS[size] if comm.rank in group)
    return comm.collective(f"test{size}", members), members


def trades(rank: int) -> list[str]:
    """Run all three collectives in all types, two of each in flight, and wait for them in the other order."""
    wrong = []
    comm = Communicator()
    for size in MEMBERS:
        channel, members = channel_of(comm, size)
        # As of a group that has NCCL for other tensors than these.
        vars(channel.transport)["_has_nccl"] = size == 2
        for dtype in TYPES:
            mine = torch.stack([piece(rank, other, dtype) for other in members])
            hops = [
                [channel.all_to_all(mine + n), channel.all_gather(mine[0] + n), channel.reduce_scatter(mine + n)]
                for n in (0, 1)
            ]
            theirs = torch.stack([piece(other, rank, dtype) for other in members])
            gathered = torch.stack([piece(other, members[0], dtype) for other in members])
            for n in (1, 0):
                arrived = [hop.wait()[0] for hop in hops[n]]
                expected = [theirs + n, gathered + n, (theirs + n).sum(0)]
                for name, got, right in zip(
                    ("all_to_all", "all_gather", "reduce_scatter"), arrived, expected, strict=True
                ):
                    if got.dtype != dtype or not torch.equal(got, right):
                        wrong.append(f"{name} {size} {dtype}")
    return wrong


@pytest.mark.processes
def test_received_tensors_equal_those_sent():
    assert run_ranks(4, trades) == [[]] * 4


def sums(rank: int) -> float:
    """Sum numbers whose bf16 sum shows the rounding: 256 + 1 + 1 + 1 is 259 rounded once, 256 rounded each time."""
    values = torch.full((4, 1), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    return float(Communicator().collective("sums").reduce_scatter(values).wait()[0])


@pytest.mark.processes
def test_sum_added_by_ranks_is_rounded_once():
    # 259 lies between the bf16 neighbours 258 and 260; halves go to the even one.
    assert run_ranks(4, sums) == [260.0] * 4


def counts(rank: int) -> dict[tuple[str, str, str, str], list[int]]:
    comm = Communicator(ranks_per_host=2)
    channel = comm.collective("test")
    x = torch.zeros(4, 5, dtype=torch.bfloat16)
    for hop in (channel.all_to_all(x), channel.all_gather(x[0]), channel.reduce_scatter(x)):
        hop.wait()
    return comm.meter.sent


@pytest.mark.processes
def test_bytes_are_counted_per_link_class():
    for rank, sent in enumerate(run_ranks(4, counts)):
        # Pieces of 5 bf16 are 10 bytes. An all-to-all sends one to the neighbour on the host and two to the other host.
        assert sent["test", "forward", "all_to_all", "same_host"] == [0, 10]
        assert sent["test", "forward", "all_to_all", "other_host"] == [1, 20]
        # The others go round a ring: all three pieces to the next rank, which for ranks 1 and 3 is on the other host.
        link = "other_host" if rank in (1, 3) else "same_host"
        assert sent["test", "forward", "all_gather", link] == [1, 30]
        assert sent["test", "forward", "reduce_scatter", link] == [1, 30]
        assert len(sent) == 4


def channels(rank: int) -> list[bool]:
    comm = Communicator()
    first, other, again = (vars(comm.collective(name).transport)["group"] for name in ("kv", "dkv", "kv"))
    return [first is other, first is again]


@pytest.mark.processes
def test_channels_share_a_process_group_by_name():
    assert run_ranks(2, channels) == [[False, True]] * 2


def test_hop_transport_is_inferred_from_counted_traffic():
    comm = Communicator()
    for operation, carrier in (("send_recv", "nccl"), ("copy", "copy")):
        comm.meter.add("kv", operation, "same_host", 10)
        assert comm.hop_transport == carrier


def test_one_rank_sends_nothing():
    comm = Communicator()
    channel = comm.collective("alone")
    x = torch.arange(6.0).view(1, 2, 3)
    assert torch.equal(channel.all_to_all(x).wait()[0], x)
    assert torch.equal(channel.all_gather(x[0]).wait()[0], x)
    assert torch.equal(channel.reduce_scatter(x).wait()[0], x[0])
    assert comm.meter.sent == {}


def test_received_tensors_can_be_taken_once():
    hop = Communicator().collective("alone").all_to_all(torch.zeros(1, 2))
    hop.wait()
    with pytest.raises(RuntimeError, match="twice"):
        hop.wait()
