"""Hops that ranks lay out differently: every rank refuses them by name, for every strategy and on every transport."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringprof.strategies import Unsupported, create
from ringprof.strategies.errors import PeerLost
from ringprof.strategies.transport import hop_comparison
from ringprof.strategies.transport.hop_comparison import HopComparison
from ringprof.strategies.transport.message import Message, layout_of, shapes_of
from ringprof.strategies.transport.ring_channel import HopRing
from tests.strategies.cpu_transports import copies_on_cpu
from tests.strategies.ranks import refusal, run_ranks
from tests.strategies.test_call_comparison import BY_STORE

RINGS = ["ring", "zigzag", "stripe", "usp", "double-ring", "burst", "megatron"]
TWO, ONE = ((torch.float32, (4,)), (torch.float32, (4,))), ((torch.float32, (8,)),)


def with_another_hop(rank: int, transport: str, folder: str, names: list[str]) -> list[tuple[str, str]]:
    """Let rank 1 lay out a hop of each strategy as one tensor of bytes; return (name, refusal).

    It is the second hop, or on several hosts the first: ranks gather layouts that are new to each.
    """
    refusals = []
    post = HopRing.post

    def other(ring: HopRing, message: Message, *, into: Message | None = None) -> Any:
        posted.append(ring.channel)
        if rank == 1 and len(posted) == (1 if transport == "hosts" else 2):
            rows = torch.cat([x.reshape(-1).view(torch.uint8) for x in message.buffers])
            message = into = Message([rows])
        return post(ring, message, into=into if into is None or rank == 0 else message)

    with ExitStack() as stack:
        stack.enter_context(patch.object(HopRing, "post", other))
        if transport == "copy":
            stack.enter_context(copies_on_cpu("late", folder))
        if transport == "hosts":
            stack.enter_context(BY_STORE)
        for name in names:
            params: dict[str, Any] = {"ulysses_degree": 1} if name == "usp" else {}
            posted: list[str] = []
            strategy = create(name, kernel="reference", **params)
            q = torch.randn(1, 16, 4, 8).requires_grad_()
            try:
                strategy.attention(q, q, q).sum().backward()
                refusals.append((name, ""))
            except Unsupported as error:
                refusals.append((name, str(error)))
            hop_comparison.forget_hops(strategy.comm.group)
    return refusals


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["copy", "nccl", "hosts"])
def test_every_rank_refuses_a_hop_that_another_lays_out_differently(transport, tmp_path):
    number = 1 if transport == "hosts" else 2
    channels = {"double-ring": "kv_inner", "burst": "read_inner", "megatron": "kv" if number == 1 else "kv_dkv"}
    for rank, refusals in enumerate(run_ranks(2, with_another_hop, transport, str(tmp_path), RINGS)):
        assert [name for name, _ in refusals] == RINGS
        for name, text in refusals:
            assert f"rank {1 - rank}" in text and f"channel {channels.get(name, 'kv')!r}" in text, text
            assert f"hop {number}" in text


def unequal_hops(rank: int, hops: dict[int, list[Any]], waits: bool) -> tuple[int, str]:
    """Compare hops; return how many, and the refusal of this rank."""
    group: Any = dist.group.WORLD
    comparison = HopComparison(group, create("ring").comm.processes)
    with patch.object(hop_comparison, "compares_calls", lambda group: not waits):
        for number, shapes in enumerate(hops[rank], 1):
            time.sleep(0.02 * rank * (number < 6))
            if text := refusal(comparison.check, group, "kv", layout_of(shapes)):
                return number, text
    return 0, ""


@pytest.mark.processes
def test_a_known_hop_in_the_place_of_another_is_refused_where_it_differs():
    equal = [TWO, ONE, TWO]
    hops = {0: [*equal, TWO, ONE, ONE], 1: [*equal, ONE, ONE, ONE], 2: [*equal, TWO, ONE, ONE]}
    refusals = {text for _, text in run_ranks(3, unequal_hops, hops, False)} - {""}  # the first rank need not know yet
    assert any(text.startswith("the ranks post different hops: rank") for text in refusals)
    assert all("'s hop 4, of channel 'kv'" in text or "has refused hop 4, " in text for text in refusals)


@pytest.mark.processes
def test_equal_hops_are_never_refused_and_new_ones_not_waited_for_where_calls_are_compared():
    hops = [((torch.float32, (number % 97 + 1,)),) for number in range(2500)]
    assert run_ranks(2, unequal_hops, {rank: hops for rank in range(2)}, True) == [(0, "")] * 2
    began = time.monotonic()
    assert run_ranks(2, unequal_hops, {0: hops[:200], 1: []}, False) == [(0, "")] * 2
    assert time.monotonic() - began < 20


def hops_between_documents(rank: int) -> str:
    """Post a hop of which the ranks make different ones, between two calls that they compare in the store."""
    with BY_STORE:
        strategy = create("ring")
        q = torch.randn(1, 16, 4, 8)
        strategy.attention(q, q, q, documents=[0, 8, 32])
        strategy.kv_ring.transport._check(layout_of(shapes_of([q[:, : 8 + rank]])))
        return refusal(strategy.attention, q, q, q, documents=[0, 9, 32])


@pytest.mark.processes
def test_ranks_of_several_hosts_compare_their_hops_with_the_next_documents():
    texts = run_ranks(2, hops_between_documents)
    assert texts[0] == texts[1] and "hash of the hops before" in texts[0]


def beside_one_that_has_left(rank: int) -> str:
    group: Any = dist.group.WORLD
    comparison = HopComparison(group, create("ring").comm.processes)
    if rank == 1:
        os._exit(0)
    with pytest.raises(PeerLost) as lost:
        comparison.check(group, "kv", layout_of(TWO))
    raise RuntimeError(str(lost.value))


@pytest.mark.processes
def test_a_rank_that_has_ended_is_named_with_the_hop():
    with pytest.raises(AssertionError, match="rank 1 has ended before rank 0's hop 1, of channel 'kv'"):
        run_ranks(2, beside_one_that_has_left)


def on_another_device(rank: int) -> str:
    q = torch.randn(1, 8, 2, 8, device="meta" if rank else "cpu")
    return refusal(create("ring", kernel="reference").attention, q, q, q)


def test_tensors_on_devices_of_two_kinds_are_refused():
    message = "the ranks do not ask for the same: rank 0 for device cpu, rank 1 for device meta"
    assert run_ranks(2, on_another_device) == [message] * 2


def test_a_layout_follows_from_shapes_and_not_from_buffers():
    """Tensors that lie apart begin where they would in one buffer, which the receiver reads."""
    pair = [torch.rand(2, 3, 4), torch.rand(2, 3, 4)]
    apart, packed = Message(pair, layout_of(shapes_of(pair))), Message.pack(pair)
    assert apart.layout is packed.layout and (len(apart.buffers), len(packed.buffers)) == (2, 1)
    assert apart.layout.offsets == [0, 96] and apart.layout.slot_bytes == 192
    odd = layout_of(((torch.float32, (3,)), (torch.float64, (5,))))
    assert (odd.offsets, odd.slot_bytes, odd.buffers) == ([0, 256], 512, odd.shapes)
    assert not apart.is_packed and packed.is_packed
