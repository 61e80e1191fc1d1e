"""Hops by the GPU's copy engines, between GPUs of one host that write into each other's memory.

NCCL moves a hop with a kernel on multiprocessors that the attention kernel beside it then lacks. Here every member of
a ring owns two slots to receive in, in symmetric memory; the one before it copies straight into them, and counters in
the same memory say what has arrived and which slot is free. Streams wait for counters and set them without a kernel
(CUDA stream memory operations), so a hop takes no multiprocessor at all.

What is received lies in a slot: it holds until a parcel is begun on the ring, or the second next hop posted. A slot has
room for the largest hop so far, and all strategies of a process that use one ring share its slots.

No library ends a wait for a peer that has died: see `watch`. The streams then go on with NaN, and the next hop raises.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ringprof.strategies.annotate import annotate
from ringprof.strategies.errors import Unsupported
from ringprof.strategies.transport.copy_watchdog import CopyWatchdog
from ringprof.strategies.transport.groups import timeout, uses_nccl
from ringprof.strategies.transport.hosts import int_from_environment
from ringprof.strategies.transport.message import Message, Shapes, shapes_of, size_bytes

SLOTS = 2
FEWEST_QUEUES = 8
_ALIGNED = 256
_GROWS_BY = 2**21
# Counters at the end of a member's memory: hops that arrived here, and hops that the next member has room for.
_ARRIVED, _ROOM, _COUNTERS = 0, 64, 256
_DEVICE_TO_DEVICE = 3
_RELEASED = 2**30
"""Beyond every hop's number."""
_UNDER_WAY_AT_MOST = 32
"""Hops that are remembered before those that are over are looked for; the watch looks for them, too."""

_rings: WeakValueDictionary[tuple[dist.ProcessGroup, str], CopyRing] = WeakValueDictionary()
_owners: WeakValueDictionary[int, _Slots] = WeakValueDictionary()
"""By the address of its memory."""
_watch = CopyWatchdog()


def can_copy() -> str | None:
    """Why hops cannot go by copy engine here; None where they can, at least within a host.

    With few hardware queues a stream that waits would hold up others.
    """
    if not torch.cuda.is_available() or _cuda() is None:
        return "need CUDA, and a torch that shares its runtime library"
    if dist.is_initialized() and not uses_nccl():
        return "need NCCL's process groups"
    queues = int_from_environment("CUDA_DEVICE_MAX_CONNECTIONS")
    if queues is not None and queues < FEWEST_QUEUES:
        return f"need CUDA_DEVICE_MAX_CONNECTIONS of at least {FEWEST_QUEUES}, which is {queues}"
    return None


def sees_peers() -> bool:
    """Whether this process's GPU can reach the memory of the others, as far as they can be seen: none is no."""
    here, count = torch.cuda.current_device(), torch.cuda.device_count()
    return count > 1 and all(torch.cuda.can_device_access_peer(here, other) for other in range(count) if other != here)


def copy_ring(
    channel: str, group: dist.ProcessGroup, following: int, previous: int, processes: Mapping[int, int | None]
) -> CopyRing:
    """The ring of a channel over a group, shared by all strategies of this process that have it.

    Two members have one ring for all channels of their group: there is one hop at a time, and two slots are enough.
    ``following`` and ``previous`` are places in the group; ``processes`` their processes by global rank.
    """
    key = group, "" if following == previous else channel
    ring = _rings.get(key)
    if ring is None:
        _rings[key] = ring = CopyRing(group, following, previous, processes)
        _watch.add(ring)
    return ring


def held_bytes() -> int:
    """Symmetric memory that all rings of this process hold now, which no allocator statistics count."""
    return sum(slots.size_bytes for slots in _owners.values())


def slots_in_use() -> dict[int, tuple[int, int]]:
    """By the address of a ring's slots: their bytes, as `held_bytes` counts them, and how many hops they have had."""
    return {address: (slots.size_bytes, slots.number) for address, slots in _owners.items()}


def copy_if_in_other_slot(message: Message, ring: CopyRing | None) -> Message:
    """The parcel, or a copy where it lies in a slot of another ring, which may fill the slot while this one reads."""
    if not _Slots.made or not message.buffers[0].is_cuda:
        return message
    owners = [_owners.get(buffer.untyped_storage().data_ptr()) for buffer in message.buffers]
    if all(slots is None or (ring is not None and ring.slots is slots) for slots in owners):
        return message
    return message.with_buffers([buffer.clone() for buffer in message.buffers])


class CopyHop:
    """One transfer under way. `wait` returns what arrived, once."""

    def __init__(self, ring: CopyRing, slots: _Slots, sent: Message, shapes: Shapes) -> None:
        self._ring, self._slots, self._number, self._shapes = ring, slots, slots.number, shapes
        # What is under way must outlive the transfer.
        self._sent: Message | None = sent

    def wait(self) -> Message:
        """As `hops.Hop.wait`: the host does not block, the current stream waits. Raises `PeerLost`."""
        if self._sent is None:
            raise RuntimeError("wait called twice on one hop")
        sent, self._sent = self._sent, None
        with annotate("wait"):
            self._ring.wait(self._slots.here + self._slots.counters + _ARRIVED, self._number)
        return sent.with_buffers(self._slots.received(self._shapes, self._number))


class CopyRing:
    """The hops of one ring over one group."""

    def __init__(
        self, group: dist.ProcessGroup, following: int, previous: int, processes: Mapping[int, int | None]
    ) -> None:
        self._group, self._next, self._previous = group, following, previous
        self.processes = processes
        self.timeout_s = timeout().total_seconds()
        self.slots: _Slots | None = None
        self._stream: Any = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        # Recorded anew for every hop: a wait for it means what was recorded when the wait was queued.
        self._ready, self._sent = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        self._under_way: deque[tuple[float, Any]] = deque()
        self._lock = threading.Lock()

    def post(self, message: Message) -> CopyHop:
        """Start copying a parcel to the next member. All members post the same shapes in one order.

        Raises `PeerLost`, and `Unsupported` while a CUDA graph is captured: counters count on, a graph repeats itself.
        """
        if torch.cuda.is_current_stream_capturing():
            raise Unsupported("hops by copy engine cannot be captured in a CUDA graph: use hops='nccl'")
        _watch.refuse()
        wait, write, copy = _cuda()
        shapes = shapes_of(message.buffers)
        slots, stream = self._slots_for(shapes), self._stream.cuda_stream
        slots.number += 1
        # What is sent is there, and what lay in the slot to be filled is no longer read.
        self._ready.record(torch.cuda.current_stream())
        self._ready.wait(self._stream)
        failed = write(stream, slots.previous + slots.counters + _ROOM, slots.number, 0)
        failed |= wait(stream, slots.here + slots.counters + _ROOM, slots.number, 0)
        place = slots.following + slots.number % SLOTS * slots.slot_bytes
        for buffer, at in zip(message.buffers, slot_offsets(shapes)[0], strict=True):
            assert buffer.is_contiguous()
            failed |= copy(place + at, buffer.data_ptr(), buffer.nbytes, _DEVICE_TO_DEVICE, stream)
        # When all before it is done, and can be seen by the other GPU.
        _check(failed | write(stream, slots.following + slots.counters + _ARRIVED, slots.number, 0))
        self._sent.record(self._stream)
        return CopyHop(self, slots, message, shapes)

    def wait(self, counter: int, number: int) -> None:
        """Make the current stream wait until hops have been sent from here, and a counter has reached a number."""
        _watch.refuse()
        stream = torch.cuda.current_stream()
        self._sent.wait(stream)
        _check(_cuda()[0](stream.cuda_stream, counter, number, 0))
        if len(self._under_way) >= _UNDER_WAY_AT_MOST:
            self.waiting_since()
        self._under_way.append((time.monotonic(), stream.record_event()))

    def free_slot(self, shapes: Shapes) -> list[Tensor]:
        """Where the last hop arrived, for tensors that the next hop will send: it arrives in the other slot."""
        slots = self._slots_for(shapes)
        return slots.received(shapes, slots.number)

    def waiting_since(self) -> float | None:
        """As `watch.Watched`, whose thread also calls it."""
        with self._lock:
            while self._under_way and self._under_way[0][1].query():
                self._under_way.popleft()
            return self._under_way[0][0] if self._under_way else None

    def release(self) -> None:
        """As `watch.Watched`. Any stream may stand behind one that waits, so several are tried."""
        if self.slots is None:
            return
        for _ in range(FEWEST_QUEUES):
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                # Bytes of 255 are NaN in every type that travels.
                self.slots.memory[: self.slots.counters].fill_(255)
            for counter in (_ARRIVED, _ROOM):
                at = self.slots.here + self.slots.counters + counter
                _check(_cuda()[1](stream.cuda_stream, at, self.slots.number + _RELEASED, 0))

    def _slots_for(self, shapes: Shapes) -> _Slots:
        """Slots with room for a hop; all members of the ring come here with the same shapes, and so make new ones."""
        size = slot_offsets(shapes)[1]
        if self.slots is None or self.slots.slot_bytes < size:
            # When every member has come to here with its device idle, nobody uses the old slots any more.
            torch.cuda.synchronize()
            self.slots = _Slots(-(-size // _GROWS_BY) * _GROWS_BY, self._group, self._next, self._previous)
        return self.slots


class _Slots:
    """Where hops arrive: this member's slots, the next member's, and the counters."""

    made = False  # Whether there have ever been any in this process.

    def __init__(self, slot_bytes: int, group: dist.ProcessGroup, following: int, previous: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        end = SLOTS * slot_bytes
        _Slots.made = True
        self.slot_bytes, self.counters, self.number = slot_bytes, end, 0
        self.memory = symmetric.empty(end + _COUNTERS, dtype=torch.uint8, device=torch.device("cuda"))
        self.memory[end:].zero_()
        # The exchange of handles below is what tells the others that the counters are at zero.
        torch.cuda.synchronize()
        handle = symmetric.rendezvous(self.memory, group)
        self._handle = handle
        self.size_bytes = end + _COUNTERS
        _owners[self.memory.untyped_storage().data_ptr()] = self
        pointers = handle.buffer_ptrs
        self.here, self.following, self.previous = (pointers[at] for at in (handle.rank, following, previous))
        # Of the shapes that were asked for last: views are small, but lengths may be many. Bound to the memory, not to
        # this object: a circle would keep slots that were outgrown until the next collection.
        self._received = lru_cache(maxsize=8)(partial(views_in_slot, self.memory, slot_bytes))

    def received(self, shapes: Shapes, number: int) -> list[Tensor]:
        """What hop ``number`` brings, here."""
        return self._received(shapes, number % SLOTS)


def views_in_slot(memory: Tensor, slot_bytes: int, shapes: Shapes, slot: int) -> list[Tensor]:
    """Tensors of these shapes in a slot."""
    base = memory[slot * slot_bytes :]
    cuts = zip(slot_offsets(shapes)[0], shapes, strict=True)
    return [base[at : at + size_bytes(*shape)].view(shape[0]).view(shape[1]) for at, shape in cuts]


@lru_cache(maxsize=64)
def slot_offsets(shapes: Shapes) -> tuple[list[int], int]:
    """Where tensors of these shapes begin in a slot, and where they end."""
    begins, end = [], 0
    for shape in shapes:
        begins.append(end)
        end += -(-size_bytes(*shape) // _ALIGNED) * _ALIGNED
    return begins, end


# --- what is asked of CUDA itself ---------------------------------------------------------------------


@lru_cache(maxsize=1)
def _cuda() -> Any:
    """(cuStreamWaitValue32, cuStreamWriteValue32, cudaMemcpyAsync), or None where one of them is not there.

    They are queued, and give 0 or an error's number; a stream waits until a counter has at least the value. The copy is
    the runtime's, of the library that torch itself has loaded: a profiler links nothing else to the call.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = driver.cuStreamWaitValue32_v2, driver.cuStreamWriteValue32_v2
        copy = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10_cuda.so")).cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    for function in found:
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return *found, copy


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"a copy or a CUDA stream memory operation failed with error {result}")
