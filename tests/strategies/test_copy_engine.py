"""Hops by copy engine: the same bits and bytes as hops by NCCL, for every strategy, call after call.

Without GPUs only the refusals can be tested; the transfers need two GPUs of one host that can reach each other.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
from collections.abc import Callable
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
from ringprof.strategies.transport import copy_engine, handshake, torch_transport
from ringprof.strategies.transport.message import Message, Shapes, shapes_of
from ringprof.workload.mask import Mask
from tests.strategies.cases import CASES, Case, WorkloadShard, dense, inputs, relative_error
from tests.strategies.gpu_ranks import GPUS, SIZES, needs_two_gpus, run_gpu_ranks
from tests.strategies.ranks import run_ranks
from tests.strategies.test_masks import dense as masked

PLAIN = Mask()


def test_unknown_hop_transport_is_refused_by_name():
    with pytest.raises(Unsupported, match="hops 'pigeon': write one of auto, nccl, copy"):
        create("ring", hops="pigeon")


class _ByGloo:
    """A stand-in for `CopyRing` over gloo, with two slots and the worst timing that copy engines may have.

    The memory that a hop arrives in is overwritten as soon as it is posted. What it sends is read only in its wait.
    """

    def __init__(self, group: Any, following: int, previous: int) -> None:
        self.group, self.following, self.previous = group, following, previous
        self._memory, self._size, self._number = torch.empty(0, dtype=torch.uint8), 0, 0

    def post(self, message: Message) -> _LateHop:
        shapes = shapes_of(message.buffers)
        self._grow(shapes)
        self._number += 1
        return _LateHop(self, message, self._overwritten(shapes))

    def free_slot(self, shapes: Shapes) -> list[torch.Tensor]:
        self._grow(shapes)
        return self._overwritten(shapes)

    def holds(self, buffer: torch.Tensor) -> bool:
        return buffer.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def _grow(self, shapes: Shapes) -> None:
        size = copy_engine.slot_offsets(shapes)[1]
        if size > self._size:
            self._memory, self._size, self._number = torch.empty(2 * size, dtype=torch.uint8), size, 0

    def _overwritten(self, shapes: Shapes) -> list[torch.Tensor]:
        slot = self._number % 2
        self._memory[slot * self._size : (slot + 1) * self._size] = 255
        return copy_engine.views_in_slot(self._memory, self._size, shapes, slot)


class _LateHop:
    """A hop of `_ByGloo`, with the interface of `copy_engine.CopyHop`."""

    def __init__(self, ring: _ByGloo, sent: Message, places: list[torch.Tensor]) -> None:
        self._ring, self._sent, self._places = ring, sent, places

    def wait(self) -> Message:
        ring, buffers = self._ring, self._sent.buffers
        assert buffers, "the message in flight was released"
        arrived = [torch.empty_like(x) for x in buffers]
        # gloo supports few types, so bytes are sent.
        works = [ring.group.send([x.view(torch.uint8)], ring.following, 0) for x in buffers]
        works += [ring.group.recv([x.view(torch.uint8)], ring.previous, 0) for x in arrived]
        for work in works:
            work.wait()
        for target, buffer in zip(self._places, arrived, strict=True):
            target.copy_(buffer)
        return self._sent.with_buffers(self._places)


def _carried(rank: int, can: list[bool], cases: list[Case], mask: Mask = PLAIN) -> dict[str, tuple[set[str], float]]:
    """Return the operations of each case's hops, and its error. ``can`` says which ranks have copy engines."""
    rings: list[_ByGloo] = []

    def make_ring(group: Any, following: int, previous: int, *_: Any) -> _ByGloo:
        rings.append(_ByGloo(group, following, previous))
        return rings[-1]

    def copy_if_in_other_slot(message: Message, ring: _ByGloo | None) -> Message:
        """Copy a message that lies in the memory of another ring, like the function of this name in `copy_engine`."""
        if any(other.holds(buffer) for other in rings if other is not ring for buffer in message.buffers):
            return message.with_buffers([buffer.clone() for buffer in message.buffers])
        return message

    with (
        patch.object(handshake, "can_copy", lambda: None if can[rank] else "need CUDA"),
        patch.object(handshake, "sees_peers", lambda: True),
        patch.object(copy_engine, "CopyRing", make_ring),
        patch.object(copy_engine, "_watchdog", SimpleNamespace(add=lambda ring: None)),
        patch.object(torch_transport, "copy_if_in_other_slot", copy_if_in_other_slot),
    ):
        return {str(case): _one_carried(case, mask) for case in cases}


def _one_carried(case: Case, mask: Mask) -> tuple[set[str], float]:
    problem = WorkloadShard(seq=32, heads=8, kv_heads=4)
    *qkv, dout = inputs(problem)
    strategy = create(case.name, kernel="reference", **case.params)
    for _ in range(2):
        # The second pass uses the memory that the first has left.
        mine = [strategy.shard(x, documents=mask.documents).requires_grad_() for x in qkv]
        out = strategy.attention(*mine, documents=mask.documents, window_size=mask.window, prefix=mask.prefix)
        out.backward(strategy.shard(dout, documents=mask.documents))
    results = [strategy.unshard(x, documents=mask.documents) for x in (out, *(x.grad for x in mine))]
    exact = dense(problem) if mask.plain else masked(problem, mask)
    error = max(relative_error(x, true) for x, true in zip(results, exact, strict=True))
    return {operation for _, _, operation, _ in strategy.comm.meter.sent}, error


@pytest.mark.processes
@pytest.mark.parametrize(
    ("can", "way"), [([True, True], "copy"), ([True, False], "send_recv"), ([False, False], "send_recv")]
)
def test_auto_uses_copies_if_every_rank_supports_them(can, way):
    for carried in run_ranks(2, _carried, can, [Case("zigzag")]):
        assert all(ways == {way} and error < 1e-13 for ways, error in carried.values())


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 4])
def test_every_strategy_is_exact_with_reused_copy_buffers(size):
    cases = [case for case in CASES if size in case.worlds]
    for carried in run_ranks(size, _carried, [True] * size, cases):
        assert {case: error for case, (_, error) in carried.items() if not error < 1e-12} == {}
        assert "copy" in carried["zigzag"][0] and "copy" not in carried["megatron"][0]


@pytest.mark.processes
@pytest.mark.parametrize(
    "mask", [Mask.of(window=(3, 0)), Mask.of(window=(3, 0), prefix=2), Mask.of(documents=[0, 3, 21, 32])]
)
def test_routed_rows_are_exact_with_reused_copy_buffers(mask):
    cases = [Case("ring"), Case("zigzag"), Case("usp", {"ulysses_degree": 1})]
    for carried in run_ranks(4, _carried, [True] * 4, cases, mask):
        assert {case: error for case, (_, error) in carried.items() if not error < 1e-12} == {}


def _reached(counter: ctypes.c_uint32, value: int) -> bool:
    return counter.value >= value


class _Streams:
    """CUDA's streams and events over ordinary memory: operations are queued, and run in any order that is allowed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._queues: dict[Any, list[tuple[Callable[[], bool], Callable[[], object]]]] = {}
        self._recorded: dict[Any, int] = {}
        self._over: dict[Any, int] = {}

    def queue(self, stream: Any, run: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> int:
        self._queues.setdefault(stream, []).append((ready, run))
        return 0

    def operations(self, stream: Any, count: int, words: Any, _: int) -> int:
        for kind, address, value, *_rest in [list(words[number]) for number in range(count)]:
            counter = ctypes.c_uint32.from_address(address)
            if kind == copy_engine._WAIT:
                self.queue(stream, bool, partial(_reached, counter, value))
            else:
                self.queue(stream, partial(setattr, counter, "value", value))
        return 0

    def copy(self, target: int, source: int, size_bytes: int, _: int, stream: Any) -> int:
        return self.queue(stream, lambda: ctypes.memmove(target, source, size_bytes))

    def record(self, event: Any, stream: Any) -> int:
        number = self._recorded[event] = self._recorded.get(event, 0) + 1
        return self.queue(stream, lambda: self._over.update({event: number}))

    def wait_event(self, stream: Any, event: Any, _: int) -> int:
        number = self._recorded[event]
        return self.queue(stream, lambda: None, lambda: self._over.get(event, 0) >= number)

    def run(self) -> None:
        """Run all operations; fails where none can run any more."""
        while waiting := [queue for queue in self._queues.values() if queue]:
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
            received=lambda shapes, number: copy_engine.views_in_slot(memory[rank], 256, shapes, number % 2),
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


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(10))
def test_copied_hops_bring_every_message_in_whichever_order_streams_run(size, seed, monkeypatch):
    events, streams = itertools.count(), _Streams(seed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(copy_engine, "_event", lambda: SimpleNamespace(cuda_event=next(events), query=lambda: False))
    monkeypatch.setattr(copy_engine, "_current_stream", lambda device: ("compute", device))
    monkeypatch.setattr(copy_engine, "_cuda", lambda: streams)
    monkeypatch.setattr(copy_engine, "timeout", lambda: timedelta(1))
    memory = [torch.zeros(2 * 256 + 256, dtype=torch.uint8) for _ in range(size)]
    members = [_Member(rank, streams, memory) for rank in range(size)]
    for number in range(6):
        for rank, member in enumerate(members):
            member.post_pass(10.0 * number + rank)
    streams.run()
    for rank, member in enumerate(members):
        tour = [float((rank - step) % size) for step in range(size)]
        assert member.log == [10 * number + x for number in range(6) for x in [*tour, tour[1] + 0.5]]


def test_outgrown_copy_buffers_are_freed_at_once(monkeypatch):
    """The memory is freed at once, not at the next garbage collection: a GPU would run out before that."""
    handle = SimpleNamespace(rank=0, buffer_ptrs=[0, 0])
    monkeypatch.setattr(symmetric, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, group: handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    group: Any = None
    slots = copy_engine._Slots(1024, group, 1, 1)
    assert copy_engine.held_bytes() == 2 * 1024 + 256
    shapes = ((torch.float32, (2, 64)),)
    assert [x.shape for x in slots.received(shapes, 1)] == [(2, 64)]
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
