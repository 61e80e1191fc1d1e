"""Hops by copy engine: the same bits and bytes as hops by NCCL, for every strategy, call after call.

Without GPUs only the refusals can be tested; the transfers need two GPUs of one host that can reach each other.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from ringprof.strategies import create
from ringprof.strategies.errors import PeerLost, Unsupported
from ringprof.strategies.transport import copy_engine
from ringprof.strategies.transport.message import Message, layout_of
from tests.strategies.cases import CASES, Case
from tests.strategies.cpu_transports import Driver
from tests.strategies.gpu_ranks import GPUS, SIZES, needs_two_gpus, run_gpu_ranks


def test_unknown_hop_transport_is_refused_by_name():
    with pytest.raises(Unsupported, match="hops 'pigeon': write one of auto, nccl, copy"):
        create("ring", hops="pigeon")


class _Streams(Driver):
    """Streams of several ranks in one process: operations are queued, and run in any order that is allowed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._waiting: dict[Any, list[tuple[Callable[[], bool], Callable[[], object]]]] = {}
        self._recorded: dict[Any, int] = {}
        self._over: dict[Any, int] = {}

    def queue(self, stream: Any, operation: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> int:
        self._waiting.setdefault(stream, []).append((ready, operation))
        return 0

    def write(self, stream: Any, address: int, value: int, _: int) -> int:
        return self.queue(stream, partial(super().write, stream, address, value, 0))

    def wait_for(self, stream: Any, counter: ctypes.c_uint32, value: int) -> None:
        self.queue(stream, bool, lambda: counter.value >= value)

    def record(self, event: Any, stream: Any) -> int:
        number = self._recorded[event] = self._recorded.get(event, 0) + 1
        return self.queue(stream, lambda: self._over.update({event: number}))

    def wait_event(self, stream: Any, event: Any, _: int) -> int:
        number = self._recorded[event]
        return self.queue(stream, bool, lambda: self._over.get(event, 0) >= number)

    def run_all(self) -> None:
        """Run all operations; fails where none can run any more."""
        while waiting := [queue for queue in self._waiting.values() if queue]:
            able = [queue for queue in waiting if queue[0][0]()]
            assert able, "streams wait for each other"
            self._random.choice(able).pop(0)[1]()


class _Member:
    """One rank of a ring of `copy_engine.CopyRing` over `_Streams`, which logs the sums of the messages it reads."""

    def __init__(self, rank: int, streams: _Streams, memory: list[torch.Tensor]) -> None:
        self.size, self._streams, self._compute = len(memory), streams, ("compute", rank)
        own, following, previous = (memory[(rank + step) % self.size].data_ptr() for step in (0, 1, -1))
        stream = SimpleNamespace(cuda_stream=("copy", rank), device_index=rank)
        with patch.object(torch.cuda, "Stream", lambda priority: stream):
            self._ring = cast(Any, copy_engine.CopyRing(cast(Any, None), 0, 0, {}))
        self.slots: Any = SimpleNamespace(
            slot_bytes=256, counters=2 * 256, number=0, own=own, following=following, previous=previous,
            memory=memory[rank],
            received=lambda layout, number: Message(*copy_engine.views_in_slot(memory[rank], 256, layout, number % 2)),
        )  # fmt: skip
        self._ring.slots = self.slots
        self._tensors = [torch.empty(4, dtype=torch.float64) for _ in range(2)]
        self.log: list[float] = []

    def post_pass(self, value: float) -> None:
        """Queue a tour of a message of ``value``, and a hop of ``value`` + 0.5 beside the last of the tour."""
        for tensor, number in zip(self._tensors, (value, value + 0.5), strict=True):
            self._streams.queue(self._compute, partial(tensor.fill_, number))
        current, late = Message(self._tensors[:1]), None
        for step in range(self.size - 1):
            hop = self._ring.post(current)
            self._read(current)
            if step + 2 == self.size:
                late = self._ring.post(Message(self._tensors[1:]))
            current = hop.wait()
        self._read(current)
        assert late is not None
        self._read(late.wait())

    def _read(self, message: Message) -> None:
        buffer = message.buffers[0]
        self._streams.queue(self._compute, lambda: self.log.append(float(buffer.mean())))


def _members(size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[_Streams, list[_Member]]:
    events, streams = itertools.count(), _Streams(seed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(copy_engine, "_event", lambda: SimpleNamespace(cuda_event=next(events), query=lambda: False))
    monkeypatch.setattr(copy_engine, "_current_stream", lambda device: ("compute", device))
    monkeypatch.setattr(copy_engine, "_cuda", lambda: streams)
    monkeypatch.setattr(copy_engine, "timeout", lambda: timedelta(1))
    memory = [torch.zeros(2 * 256 + 256, dtype=torch.uint8) for _ in range(size)]
    return streams, [_Member(rank, streams, memory) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(10))
def test_copied_hops_bring_every_message_in_whichever_order_streams_run(size, seed, monkeypatch):
    streams, members = _members(size, seed, monkeypatch)
    for number in range(6):
        for rank, member in enumerate(members):
            member.post_pass(10.0 * number + rank)
    streams.run_all()
    for rank, member in enumerate(members):
        tour = [float((rank - step) % size) for step in range(size)]
        assert member.log == [10 * number + x for number in range(6) for x in [*tour, tour[1] + 0.5]]


def test_streams_go_on_with_nan_when_a_ring_is_released(monkeypatch):
    """The other member posts nothing: its hops never arrive, and it tells of no free slot."""
    streams, (member, _) = _members(2, 0, monkeypatch)
    member.post_pass(1.0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream="other"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    member._ring.release()
    # Another thread releases the ring, so that this one may still post hops.
    member.post_pass(2.0)
    streams.run_all()
    assert [x for x in member.log if not math.isnan(x)] == [1.0, 2.0] and len(member.log) == 6


def test_finished_hops_are_forgotten_without_the_watchdog(monkeypatch):
    streams, members = _members(2, 0, monkeypatch)
    monkeypatch.setattr(copy_engine, "_event", lambda: SimpleNamespace(cuda_event=object(), query=lambda: True))
    for _ in range(2 * copy_engine._MOST_IN_FLIGHT):
        for member in members:
            member.post_pass(0.0)
        streams.run_all()
    assert len(members[0]._ring._in_flight) <= copy_engine._MOST_IN_FLIGHT


def test_outgrown_copy_buffers_are_freed_at_once(monkeypatch):
    """The memory is freed at once, not at the next garbage collection: a GPU would run out before that."""
    handle = SimpleNamespace(rank=0, buffer_ptrs=[0, 0])
    monkeypatch.setattr(symmetric, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, group: handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    group: Any = None
    slots = copy_engine._Slots(1024, group, 1, 1)
    assert copy_engine.held_bytes() == 2 * 1024 + 256
    assert [x.shape for x in slots.received(layout_of(((torch.float32, (2, 64)),)), 1).tensors] == [(2, 64)]
    gc.disable()
    try:
        del slots
        assert copy_engine.held_bytes() == 0
    finally:
        gc.enable()


@pytest.mark.skipif(GPUS > 0, reason="needs a machine without CUDA")
def test_without_cuda_there_are_no_copy_engines():
    with pytest.raises(Unsupported, match="hops by copy engine need CUDA"):
        create("zigzag", hops="copy")


@pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")
def test_a_single_hardware_queue_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(Unsupported, match="CUDA_DEVICE_MAX_CONNECTIONS of at least 8, which is 1"):
        create("zigzag", hops="copy")


def _calls(strategy: Any, seeds: range, heads: int, kv_heads: int) -> list[list[torch.Tensor]]:
    """Return output and gradients of several calls, posted without waiting for each other."""
    results = []
    for seed in seeds:
        torch.manual_seed(seed)
        q, k, v, dout = (
            torch.randn(1, 1024, count, 64, device="cuda", dtype=torch.bfloat16)
            for count in (heads, kv_heads, kv_heads, heads)
        )
        mine = [strategy.shard(tensor).requires_grad_() for tensor in (q, k, v)]
        out = strategy.attention(*mine, causal=True)
        results.append([out.detach(), *torch.autograd.grad(out, mine, strategy.shard(dout))])
    return results


def _compared(case: Case) -> str:
    """Compare a case over NCCL and copy engines in bits and counted bytes. Return the difference; empty: none."""
    params = {**case.params, "deterministic": True}
    ways = {way: create(case.name, kernel="torch-flash", hops=way, **params) for way in ("nccl", "copy")}
    results = {way: _calls(strategy, range(6), 8, 4) for way, strategy in ways.items()}
    for call, pair in enumerate(zip(*results.values(), strict=True)):
        for name, expected, other in zip(("out", "dq", "dk", "dv"), *pair, strict=True):
            if not torch.equal(expected, other):
                return f"{case}: {name} of call {call} differs by {(expected - other).abs().max().item()}"
    sent = {
        way: {(*key[:2], key[3]): value for key, value in strategy.comm.meter.sent.items()}
        for way, strategy in ways.items()
    }
    if sent["nccl"] != sent["copy"]:
        return f"{case}: counted {sent}"
    copied = [key for key in ways["copy"].comm.meter.sent if key[2] == "copy"]
    return "" if bool(copied) == bool(copy_engine.held_bytes()) else f"{case}: memory is held for {copied}"


def _differences(rank: int, size: int) -> list[str]:
    differences = []
    for case in CASES:
        differences += [_compared(case)] if size in case.worlds else []
        # The memory of one case must be freed before the next case counts its own.
        gc.collect()
    return [problem for problem in differences if problem]


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("size", SIZES)
def test_copies_and_nccl_give_equal_bits_and_bytes(size):
    assert run_gpu_ranks(size, _differences, size) == [[]] * size


def _bucketed(rank: int) -> tuple[list[int], bool]:
    """Run strategies on one ring over many lengths. Return (memory held after each, whether all results were right)."""
    strategies = [create("zigzag", kernel="torch-flash", hops="copy") for _ in range(3)]
    plain = create("zigzag", kernel="torch-flash")
    held, right = [], True
    for turn, seq in enumerate([512, 1024, 256, 2048, 768, 2048, 128, 1536, *range(256, 1280, 64)]):
        torch.manual_seed(turn)
        q, k, v = (torch.randn(1, seq, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        outs = []
        for strategy in (*strategies, plain):
            leaves = [strategy.shard(x).requires_grad_() for x in (q, k, v)]
            out = strategy.attention(*leaves)
            outs.append([out, *torch.autograd.grad(out.sum(), leaves)])
        pairs = [(x, outs[-1][index]) for results in outs for index, x in enumerate(results)]
        right = right and all(torch.allclose(x, own, atol=1e-2) for x, own in pairs)
        held.append(copy_engine.held_bytes())
    return held, right


@pytest.mark.gpu
@needs_two_gpus
def test_ring_reserves_two_slots_of_its_largest_hop():
    for held, right in run_gpu_ranks(2, _bucketed):
        # K and V of 1024 tokens of 8 heads of 64 in bf16 are 2 MiB, as dK and dV on their only hop.
        assert held[3] == held[-1] == 2 * 2 * 2**20 + 256
        assert right


def _after_a_peer_died(rank: int, dead: int) -> str:
    """Return the error of the other rank after ``dead`` has exited between two calls: it must not wait forever."""
    strategy = create("zigzag", kernel="torch-flash", hops="copy")
    q = torch.randn(1, 1024, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    strategy.attention(q, q, q).sum().backward()
    torch.cuda.synchronize()
    if rank == dead:
        os._exit(0)
    try:
        for _ in range(100):
            out = strategy.attention(q, q, q)
            torch.cuda.synchronize()
    except PeerLost as lost:
        return f"{lost}; the last output has NaN: {bool(out.isnan().any())}"
    return "nothing"


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("dead", [0, 1])
def test_wait_for_a_hop_ends_when_the_peer_dies(dead):
    """On the first GPU and on another: a new thread's current device is the first."""
    results = run_gpu_ranks(2, _after_a_peer_died, dead, limit_s=90)
    assert results[dead] == "gone"
    message = results[1 - dead]
    assert message.startswith(f"rank {dead} has ended (process ") and message.endswith("the last output has NaN: True")


def _captured(rank: int) -> str:
    strategy = create("zigzag", kernel="torch-flash", hops="copy")
    q = torch.randn(1, 1024, 8, 64, device="cuda", dtype=torch.bfloat16)
    strategy.attention(q, q, q)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            strategy.attention(q, q, q)
    except Unsupported as refusal:
        return str(refusal)
    return ""


@pytest.mark.gpu
@needs_two_gpus
def test_copied_hops_are_refused_inside_a_cuda_graph():
    assert all("cannot be captured in a CUDA graph" in said for said in run_gpu_ranks(2, _captured))


def _auto(rank: int) -> dict[str, set[str]]:
    operations = {}
    for kernel in ("cudnn", "torch-flash"):
        strategy = create("zigzag", kernel=kernel)
        _calls(strategy, range(2), 8, 4)
        operations[kernel] = {operation for _, _, operation, _ in strategy.comm.meter.sent}
    return operations


@pytest.mark.gpu
@needs_two_gpus
def test_auto_uses_copies_beside_any_kernel_on_gpus():
    assert run_gpu_ranks(2, _auto) == [{"cudnn": {"copy"}, "torch-flash": {"copy"}}] * 2
