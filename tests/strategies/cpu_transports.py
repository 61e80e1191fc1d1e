"""Transports of hops on a CPU with the worst timing that their contract allows, for strategies on forked ranks.

`copies_on_cpu` runs the product's own copy engine: only the driver under it is replaced. Copies are memmoves into
memory that the ranks map, counters are words there, and streams are queues. `poisoned_nccl` wraps the hops of process
groups. In both, memory is NaN from the end of its contract on, and in either of two timings:

    early   a hop is over when it is posted: what it sends is read, and what it brings overwrites a slot, at once
    late    a hop begins in its wait: what it sends is read, and what it brings arrives, only then
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from ringprof.strategies.transport import copy_engine, handshake, torch_transport
from ringprof.strategies.transport.copy_watchdog import CopyWatchdog
from ringprof.strategies.transport.message import Message, MessageLayout
from ringprof.strategies.transport.ring_channel import HopRing
from ringprof.strategies.transport.torch_transport import TorchTransport

LAST_S = 20.0
"""Seconds after which a wait for another rank fails."""
COMPUTE = "compute"
"""The stream on which the test itself runs: what is queued there runs at once."""
Posted = list[tuple[str, str]]
"""(channel, types and shapes) of every hop that a rank has posted."""


class Driver:
    """The calls of `copy_engine._Cuda` over ordinary memory."""

    def __init__(self, timing: str) -> None:
        self._timing = timing
        self._queues: dict[Any, list[Callable[[], object]]] = {}
        self._recorded_on: dict[Any, Any] = {}
        """Stream that each event was last recorded on."""

    def write(self, stream: Any, address: int, value: int, _: int) -> int:
        ctypes.c_uint32.from_address(address).value = value  # on a stream of its own, beside those that wait
        return 0

    def operations(self, stream: Any, count: int, words: Any, _: int) -> int:
        for kind, address, value, *_rest in [list(words[number]) for number in range(count)]:
            counter = ctypes.c_uint32.from_address(address)
            if kind == copy_engine._WRITE:
                self.queue(stream, partial(setattr, counter, "value", value))
            else:
                self.wait_for(stream, counter, value)
        return 0

    def wait_for(self, stream: Any, counter: ctypes.c_uint32, value: int) -> None:
        self.queue(stream, partial(_wait_for_value, counter, value))

    def copy(self, target: int, source: int, size_bytes: int, _: int, stream: Any) -> int:
        return self.queue(stream, partial(ctypes.memmove, target, source, size_bytes))

    def record(self, event: Any, stream: Any) -> int:
        self._recorded_on[event] = stream
        if self._timing == "early":
            self.run(stream)
        return 0

    def wait_event(self, stream: Any, event: Any, _: int) -> int:
        if stream == COMPUTE:
            self.run(self._recorded_on[event])
        return 0

    def synchronize(self) -> None:
        """Run all that is queued."""
        for stream in list(self._queues):
            self.run(stream)

    def run(self, stream: Any) -> bool:
        """Run what is queued on a stream; return that it is idle."""
        queue = self._queues.get(stream, [])
        while queue:
            queue.pop(0)()
        return True

    def queue(self, stream: Any, operation: Callable[[], object]) -> int:
        if stream == COMPUTE:
            operation()
        else:
            self._queues.setdefault(stream, []).append(operation)
        return 0


def _wait_for_value(counter: ctypes.c_uint32, value: int) -> None:
    until = time.monotonic() + LAST_S
    while counter.value < value:
        assert time.monotonic() < until, f"a counter stays at {counter.value} and should reach {value}"
        time.sleep(0)


class SharedMemory:
    """Symmetric memory in files of a ``folder`` that the ranks share."""

    def __init__(self, folder: str) -> None:
        self._folder, self._numbers = Path(folder), itertools.count()
        self._meetings: dict[str, int] = {}

    def empty(self, size: int, dtype: torch.dtype, device: Any) -> Any:
        path = self._folder / f"memory-{dist.get_rank()}-{next(self._numbers)}"
        memory: Any = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
        memory.fill_(255)
        memory.path = path
        return memory

    def rendezvous(self, memory: Any, group: Any) -> Any:
        """Map the memory of all ranks of a group. All must bring the same size."""
        number = self._meetings[group.group_name] = self._meetings.get(group.group_name, 0) + 1
        brought: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(brought, (number, memory.numel(), str(memory.path)), group=group)
        assert len({entry[:2] for entry in brought}) == 1, f"the ranks make different slots: {brought}"
        rank, size = dist.get_rank(group), memory.numel()
        maps = [
            memory if other == rank else torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            for other, (*_, path) in enumerate(brought)
        ]
        return SimpleNamespace(rank=rank, buffer_ptrs=[x.data_ptr() for x in maps], maps=maps)


@contextmanager
def noted_hops() -> Iterator[Posted]:
    """Note the hops of this rank. Ranks of one strategy post hops of the same layouts in the same order."""
    posted: Posted = []
    post = HopRing.post

    def noted(ring: HopRing, message: Message, *, into: Message | None = None) -> Any:
        posted.append((ring.channel, str([(dtype, tuple(shape)) for dtype, shape in message.layout.shapes])))
        return post(ring, message, into=into)

    with patch.object(HopRing, "post", noted):
        yield posted


@contextmanager
def copies_on_cpu(timing: str, folder: str, *, can: bool = True) -> Iterator[None]:
    """Let copy engines carry this rank's hops, by a `Driver` with this timing, if all ranks ``can`` copy."""
    driver, memory, numbers = Driver(timing), SharedMemory(folder), itertools.count()
    post, free_slot = copy_engine.CopyRing.post, copy_engine.CopyRing.free_slot
    copy_if_in_other_slot = copy_engine.copy_if_in_other_slot

    def post_over_nan(ring: copy_engine.CopyRing, message: Message) -> Any:
        slots = ring._slots_of(message.layout.slot_bytes)
        assert slots.slot_bytes >= message.layout.slot_bytes, "a slot is smaller than its message"
        start = (slots.number + 1) % copy_engine.SLOTS * slots.slot_bytes
        slots.memory[start : start + slots.slot_bytes] = 255
        return post(ring, message)

    def reserve_nan(ring: copy_engine.CopyRing, layout: MessageLayout) -> list[torch.Tensor]:
        slots = ring.slots
        if slots is None or ring.grows_for(layout):
            return free_slot(ring, layout)
        start = slots.number % copy_engine.SLOTS * slots.slot_bytes
        slots.memory[start : start + slots.slot_bytes] = 255
        return free_slot(ring, layout)

    def copy_if_needed(message: Message, ring: copy_engine.CopyRing | None) -> Message:
        with patch.object(torch.Tensor, "is_cuda", True):
            return copy_if_in_other_slot(message, ring)

    def stream(*_: Any, **__: Any) -> Any:
        name = "copies", next(numbers)
        return SimpleNamespace(cuda_stream=name, device_index=0, query=partial(driver.run, name))

    watchdog = CopyWatchdog()
    vars(watchdog)["_check_forever"] = lambda: None
    with ExitStack() as stack:
        for target, name, value in (
            (handshake, "can_copy", lambda: None if can else "need CUDA"), (handshake, "sees_peers", lambda: True),
            (torch.cuda, "Stream", stream), (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "synchronize", driver.synchronize),
            (copy_engine, "_event", lambda: SimpleNamespace(cuda_event=next(numbers), query=lambda: True)),
            (copy_engine, "_current_stream", lambda device: COMPUTE), (copy_engine, "_cuda", lambda: driver),
            (torch.cuda, "stream", nullcontext), (copy_engine, "_watchdog", watchdog),
            (copy_engine.CopyRing, "post", post_over_nan), (copy_engine.CopyRing, "free_slot", reserve_nan),
            (symmetric, "empty", memory.empty), (symmetric, "rendezvous", memory.rendezvous),
            (torch_transport, "copy_if_in_other_slot", copy_if_needed), (copy_engine, "_rings", {}),
            (copy_engine, "_GROWS_BY", 1040), (copy_engine, "_DEVICE", "cpu"),
        ):  # fmt: skip
            stack.enter_context(patch.object(target, name, value))
        yield


@contextmanager
def poisoned_nccl(timing: str) -> Iterator[None]:
    """Carry this rank's hops by process groups, with NaN wherever the contract of `HopRing.post` does not reach."""
    init, start, empty_like = HopRing.__init__, TorchTransport.hop, Message.empty_like
    received: dict[HopRing, list[Message]] = {}
    keeping: set[HopRing] = set()

    def noting_keeps(ring: HopRing, *args: Any, keeps: bool = False, **options: Any) -> None:
        init(ring, *args, keeps=keeps, **options)
        keeping.update([ring] if keeps else [])

    def nan_like(message: Message) -> Message:
        return message.with_buffers([_fill(buffer) for buffer in empty_like(message).buffers])

    def hop(transport: TorchTransport, ring: HopRing, message: Message, into: Message | None) -> Any:
        earlier = received.setdefault(ring, [])
        if len(earlier) == copy_engine.SLOTS and ring not in keeping:
            for buffer in earlier.pop(0).buffers:
                # A process group's hop of another ring holds what it still sends.
                if buffer.data_ptr() not in _Hop.sending:
                    _fill(buffer)
        message = message.with_buffers(list(message.buffers))  # the caller may clear its own
        hop = _Hop(partial(start, transport, ring, message, into), message, earlier)
        if timing == "early":
            hop.begin()
        return hop

    with (
        patch.object(HopRing, "__init__", noting_keeps), patch.object(TorchTransport, "hop", hop),
        patch.object(Message, "empty_like", nan_like),
    ):  # fmt: skip
        yield


class _Hop:
    """A hop over a process group that begins when it is told to, and checks that what it sends does not change."""

    sending: ClassVar[list[int]] = []
    """Addresses of the buffers that hops of this rank still send."""

    def __init__(self, start: Callable[[], Any], message: Message, received: list[Message]) -> None:
        self._start, self._message, self._hop = start, message, None
        self._bytes, self._addresses = _bytes_of(message), [buffer.data_ptr() for buffer in message.buffers]
        self.sending.extend(self._addresses)
        self._arrived = Message([])
        received.append(self._arrived)

    def begin(self) -> None:
        if self._hop is None:
            hop = self._hop = self._start()
            for work in hop._works:
                work.wait()
            hop._works = []  # gloo waits for ever if asked twice

    def wait(self) -> Message:
        self.begin()
        assert _bytes_of(self._message) == self._bytes, "a buffer was written to while it was sent"
        for address in self._addresses:
            self.sending.remove(address)
        arrived: Message = self._hop.wait()  # type: ignore[attr-defined]
        self._arrived.buffers = list(arrived.buffers)
        return arrived


def _bytes_of(message: Message) -> list[bytes]:
    return [buffer.view(-1).view(torch.uint8).numpy().tobytes() for buffer in message.buffers]


def _fill(buffer: torch.Tensor) -> torch.Tensor:
    """Fill a buffer with bytes of 255, which are NaN in every type that is sent."""
    buffer.detach().view(-1).view(torch.uint8).fill_(255)
    return buffer
