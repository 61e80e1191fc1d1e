"""Hops by the GPU's copy engines, between GPUs of one host that write into each other's memory.

NCCL moves a hop with a kernel, whose multiprocessors the attention kernel beside it then lacks. Here every member of a
ring owns two slots to receive in, in symmetric memory. The previous member copies directly into them, and counters in
the same memory say what has arrived and which slot is free. Streams wait for the counters and set them without a kernel
(CUDA stream memory operations), so a hop takes no multiprocessor at all.

The ring's own stream waits for what arrives, too, so that the computation waits for a single event.

A received message lies in a slot. It is valid until a message is reserved on the ring, or the second next hop is
posted. A slot is as large as the largest hop so far; all strategies of a process that use a ring share its slots.

No library ends a wait for a peer that has died, so a `copy_watchdog` does: the streams then continue with NaN, and the
next hop raises `PeerLost`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..annotate import annotate
from ..errors import Unsupported
from .copy_watchdog import CopyWatchdog
from .groups import timeout, uses_nccl
from .hosts import int_from_environment
from .message import Message, MessageLayout, size_bytes

SLOTS = 2
"""Slots of a member that hops arrive in, used alternately."""
FEWEST_QUEUES = 8
"""Fewest hardware queues: with fewer, a waiting stream could block other streams."""
_GROWS_BY = 2**21
"""Bytes: the size of a slot is a multiple of this."""
_ARRIVED, _FREE, _COUNTERS = 0, 64, 256
"""Byte offsets of the two counters at the end of a member's memory, and bytes of all counters.

The first counts hops that have arrived here, the second hops that the next member can receive."""
_DEVICE_TO_DEVICE = 3
"""CUDA's ``cudaMemcpyDeviceToDevice``."""
_WAIT, _WRITE = 1, 2
"""CUDA's kinds of stream memory operations: wait for at least a value of 32 bits, and write one."""
_OPERATION_WORDS = 6
"""64-bit words of a CUstreamBatchMemOpParams: the kind of operation, address, value, flags, and two more."""
_RELEASED = 2**30
"""Added to a counter to release the streams that wait for it: more than any number of hops."""
_DEVICE = "cuda"
_MOST_IN_FLIGHT = 32
"""Hops remembered before finished ones are removed; the watchdog removes finished hops, too."""

_DRAIN_INTERVAL_S = 0.01

_rings: WeakValueDictionary[tuple[dist.ProcessGroup, str], CopyRing] = WeakValueDictionary()
_owners: WeakValueDictionary[int, _Slots] = WeakValueDictionary()
"""Slots by the address of their memory."""
_watchdog = CopyWatchdog()


def stop_copies(reason: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Let streams that wait for copied hops of these groups continue with NaN; further hops raise ``reason``."""
    for ring in _rings_of(groups):
        ring.stopped = ring.stopped or reason
        ring.release()


def drain_copies(groups: Sequence[dist.ProcessGroup]) -> None:
    """Wait until the streams of these groups' stopped rings are idle."""
    for ring in _rings_of(groups):
        while not ring.is_idle():
            # Peers that have not stopped may have overwritten the counters that release the streams.
            ring.release()
            time.sleep(_DRAIN_INTERVAL_S)


def _rings_of(groups: Sequence[dist.ProcessGroup]) -> list[CopyRing]:
    return [ring for (group, _), ring in list(_rings.items()) if group in groups]


def can_copy() -> str | None:
    """Return why copy engines cannot carry hops here; None where they can, at least within a host."""
    if not torch.cuda.is_available() or _cuda() is None:
        return "need CUDA, and a torch that shares its runtime library"
    if dist.is_initialized() and not uses_nccl():
        return "need NCCL's process groups"
    queues = int_from_environment("CUDA_DEVICE_MAX_CONNECTIONS")
    if queues is not None and queues < FEWEST_QUEUES:
        return f"need CUDA_DEVICE_MAX_CONNECTIONS of at least {FEWEST_QUEUES}, which is {queues}"
    return None


def sees_peers() -> bool:
    """Return whether this process's GPU can access the memory of all other visible GPUs; False if it sees no other."""
    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    return count > 1 and all(torch.cuda.can_device_access_peer(own, other) for other in range(count) if other != own)


def copy_ring(
    channel: str, group: dist.ProcessGroup, following: int, previous: int, processes: Mapping[int, int | None]
) -> CopyRing:
    """Return the ring of a channel over a group, shared by all strategies of this process that use it.

    Two members have one ring for all channels of their group: only one hop runs at a time, and two slots suffice.
    ``following`` and ``previous`` are ranks within the group; ``processes`` are their process IDs by global rank.
    """
    key = group, "" if following == previous else channel
    ring = _rings.get(key)
    if ring is None:
        _rings[key] = ring = CopyRing(group, following, previous, processes)
        _watchdog.add(ring)
    return ring


def held_bytes() -> int:
    """Return the bytes of symmetric memory that this process's rings hold. Allocator statistics do not count them."""
    return sum(slots.size_bytes for slots in _owners.values())


def slots_in_use() -> dict[int, tuple[int, int]]:
    """Return (bytes, number of hops so far) of each ring's slots, by address. The bytes add up to `held_bytes`."""
    return {address: (slots.size_bytes, slots.number) for address, slots in _owners.items()}


def copy_if_in_other_slot(message: Message, ring: CopyRing | None) -> Message:
    """Return the message, or a copy if it lies in a slot of another ring.

    That ring may overwrite the slot while ``ring`` sends from it.
    """
    # Where the only slots of this process are the ring's own, there are none of another ring.
    only_own = ring is not None and ring.slots is not None and len(_owners) == 1
    if only_own or not _owners or not message.buffers[0].is_cuda:
        return message
    owners = [_owners.get(buffer.untyped_storage().data_ptr()) for buffer in message.buffers]
    if all(slots is None or (ring is not None and ring.slots is slots) for slots in owners):
        return message
    return message.with_buffers([buffer.clone() for buffer in message.buffers])


class CopyHop:
    """One transfer in flight. `wait` returns what arrived, once."""

    def __init__(self, ring: CopyRing, sent: Message, received: Message, over: Any) -> None:
        """Keep ``sent`` alive until `wait`; ``over`` is the event recorded after the hop on the ring's stream."""
        self._ring, self._received, self._over = ring, received, over
        # The message in flight must outlive the transfer.
        self._sent: Message | None = sent

    def wait(self) -> Message:
        """Return the message that arrived, usable by work queued after this call.

        The host does not block; the current stream waits. Raises `PeerLost`, and RuntimeError when called twice.
        """
        if self._sent is None:
            raise RuntimeError("wait called twice on one hop")
        with annotate("wait"):
            self._ring.wait(self._over)
        self._sent = None
        return self._received


class CopyRing:
    """One ring of a process group, whose hops copy engines carry."""

    def __init__(
        self, group: dist.ProcessGroup, following: int, previous: int, processes: Mapping[int, int | None]
    ) -> None:
        self._group, self._next, self._previous = group, following, previous
        self.processes = processes
        self.timeout_s = timeout().total_seconds()
        self.slots: _Slots | None = None
        self.stopped: str | None = None
        """Why nothing is sent over this ring any more; None while hops can be made."""
        self._stream: Any = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._raw_stream, self._device = self._stream.cuda_stream, self._stream.device_index
        self._operations = (ctypes.c_uint64 * _OPERATION_WORDS * 2)()
        self._write, self._wait = self._operations
        self._write[0], self._wait[0] = _WRITE, _WAIT
        # Recorded again for every hop: a wait covers what was recorded before the wait was queued.
        self._ready = _event()
        self._in_flight: deque[tuple[float, Any]] = deque()
        """(time of the wait, event after the hop) of each hop that may not be over."""
        self._free_events: list[Any] = []
        """Events of hops that are over, to be recorded again."""
        self._lock = threading.Lock()

    def post(self, message: Message) -> CopyHop:
        """Start copying a message to the next member. All members post messages of the same layouts in the same order.

        Buffers are copied to the offsets of the layout, whether the message is packed or its tensors lie apart.
        Raises `PeerLost`. Raises `Unsupported` while a CUDA graph is captured: a graph would repeat the same counter
        values, which must increase.
        """
        if torch.cuda.is_current_stream_capturing():
            raise Unsupported("hops by copy engine cannot be captured in a CUDA graph: use hops='nccl'")
        _watchdog.raise_if_lost(self)
        cuda, layout, stream = _cuda(), message.layout, self._raw_stream
        slots = self._slots_of(layout.slot_bytes)
        slots.number += 1
        ready = self._ready.cuda_event
        # The message to send is computed, and the slot that the previous member will fill is no longer read.
        failed = cuda.record(ready, _current_stream(self._device)) | cuda.wait_event(stream, ready, 0)
        failed |= self._write_and_wait(slots, slots.previous, _FREE)
        target = slots.following + slots.number % SLOTS * slots.slot_bytes
        # A single buffer begins where its first tensor does.
        for buffer, offset in zip(message.buffers, layout.offsets, strict=False):
            assert buffer.is_contiguous()
            failed |= cuda.copy(target + offset, buffer.data_ptr(), buffer.nbytes, _DEVICE_TO_DEVICE, stream)
        # The counter is written after all copies before it, which are then visible to the other GPU.
        failed |= self._write_and_wait(slots, slots.following, _ARRIVED)
        over = self._free_events.pop() if self._free_events else _event()
        _check(failed | cuda.record(over.cuda_event, stream))
        return CopyHop(self, message, slots.received(layout, slots.number), over)

    def grows_for(self, layout: MessageLayout) -> bool:
        """Return whether a message of this layout needs larger slots."""
        return self.slots is None or self.slots.slot_bytes < layout.slot_bytes

    def _write_and_wait(self, slots: _Slots, peer: int, counter: int) -> int:
        """Let the ring's stream set a ``counter`` of the member at the address ``peer``, then wait for this rank's own.

        Returns 0, or CUDA's error code.
        """
        offset = slots.counters + counter
        self._write[1], self._write[2] = peer + offset, slots.number
        self._wait[1], self._wait[2] = slots.own + offset, slots.number
        failed: int = _cuda().operations(self._raw_stream, 2, self._operations, 0)
        return failed

    def wait(self, over: Any) -> None:
        """Make the current stream wait for the event ``over``, after a hop that has been sent and has arrived."""
        _watchdog.raise_if_lost(self)
        _check(_cuda().wait_event(_current_stream(self._device), over.cuda_event, 0))
        if len(self._in_flight) >= _MOST_IN_FLIGHT:
            self.waiting_since()
        self._in_flight.append((time.monotonic(), over))

    def free_slot(self, layout: MessageLayout) -> list[Tensor]:
        """Return the buffers of a message in the slot where the last hop arrived, to be sent next.

        The next hop arrives in the other slot. Where slots are too small, the buffers lie elsewhere: slots grow only in
        `post`, since a rank that reserves would wait there for ranks that do not.
        """
        if self.slots is None or self.grows_for(layout):
            return [torch.empty(shape, dtype=dtype, device=torch.device(_DEVICE)) for dtype, shape in layout.buffers]
        return self.slots.received(layout, self.slots.number).buffers

    def waiting_since(self) -> float | None:
        """Return when the wait for the oldest unfinished hop began; None where there is none.

        The watchdog's thread calls it, too.
        """
        with self._lock:
            while self._in_flight and self._in_flight[0][1].query():
                self._free_events.append(self._in_flight.popleft()[1])
            return self._in_flight[0][0] if self._in_flight else None

    def is_idle(self) -> bool:
        """Return whether the ring's stream has done everything."""
        idle: bool = self._stream.query()
        return idle

    def release(self) -> None:
        """Let the waiting streams continue with NaN.

        A new stream may queue behind one that waits, so several are tried. The watchdog's thread calls it: there, the
        current device is the first one, whichever this rank uses.
        """
        if self.slots is None:
            return
        for _ in range(FEWEST_QUEUES):
            stream: Any = torch.cuda.Stream(self.slots.memory.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                # Bytes of 255 are NaN in every type that is sent.
                self.slots.memory[: self.slots.counters].fill_(255)
                for counter in (_ARRIVED, _FREE):
                    address = self.slots.own + self.slots.counters + counter
                    _check(_cuda().write(stream.cuda_stream, address, self.slots.number + _RELEASED, 0))

    def _slots_of(self, size: int) -> _Slots:
        """Return slots of at least ``size`` bytes.

        All members get here with the same size, and so make new slots together.
        """
        if self.slots is None or self.slots.slot_bytes < size:
            # Once every member is here with its GPU idle, nobody uses the old slots any more.
            torch.cuda.synchronize()
            self.slots = _Slots(-(-size // _GROWS_BY) * _GROWS_BY, self._group, self._next, self._previous)
        return self.slots


class _Slots:
    """Memory that hops arrive in: this member's slots and counters, and the addresses of its neighbours'."""

    @torch.inference_mode(False)
    def __init__(self, slot_bytes: int, group: dist.ProcessGroup, following: int, previous: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        end = SLOTS * slot_bytes
        self.slot_bytes, self.counters, self.number = slot_bytes, end, 0
        self.memory = symmetric.empty(end + _COUNTERS, dtype=torch.uint8, device=torch.device("cuda"))
        self.memory[end:].zero_()
        # The exchange of handles below tells the others that the counters are zero.
        torch.cuda.synchronize()
        handle = symmetric.rendezvous(self.memory, group)
        self._handle = handle
        self.size_bytes = end + _COUNTERS
        _owners[self.memory.untyped_storage().data_ptr()] = self
        pointers = handle.buffer_ptrs
        self.own, self.following, self.previous = (pointers[rank] for rank in (handle.rank, following, previous))
        # The views of the last few layouts are cached. The cache refers to the memory, not to this object: a reference
        # cycle would keep outgrown slots until the next garbage collection.
        self._views = lru_cache(maxsize=8)(partial(views_in_slot, self.memory, slot_bytes))

    def received(self, layout: MessageLayout, number: int) -> Message:
        """Return the message that hop ``number`` brings."""
        return Message(*self._views(layout, number % SLOTS))


def views_in_slot(
    memory: Tensor, slot_bytes: int, layout: MessageLayout, slot: int
) -> tuple[list[Tensor], MessageLayout, list[Tensor]]:
    """Return (buffers, layout, tensors) of a message as views into slot number ``slot`` of the memory."""
    base = memory[slot * slot_bytes :]
    pairs = zip(layout.offsets, layout.buffers, strict=False)
    buffers = [base[start : start + size_bytes(*shape)].view(shape[0]).view(shape[1]) for start, shape in pairs]
    return buffers, layout, buffers if layout.unpack is None else layout.unpack(buffers[0])


# --- direct calls to CUDA -----------------------------------------------------------------------------


class _Cuda(NamedTuple):
    """Functions of CUDA; each queues its operation and returns 0 or an error code.

    The copy is that of the CUDA runtime that torch has loaded: only such a call is linked to its kernel by a profiler.
    """

    write: Any
    """cuStreamWriteValue32"""
    operations: Any
    """cuStreamBatchMemOp"""
    copy: Any
    """cudaMemcpyAsync"""
    record: Any
    """cudaEventRecord"""
    wait_event: Any
    """cudaStreamWaitEvent"""


@lru_cache(maxsize=1)
def _cuda() -> Any:
    """Return the functions of CUDA, a `_Cuda`; None where one of them is missing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        runtime = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10_cuda.so"))
        cuda = _Cuda(
            driver.cuStreamWriteValue32_v2, driver.cuStreamBatchMemOp_v2, runtime.cudaMemcpyAsync,
            runtime.cudaEventRecord, runtime.cudaStreamWaitEvent,
        )  # fmt: skip
    except (OSError, AttributeError):
        return None
    pointer = ctypes.c_void_p
    cuda.write.argtypes = [pointer, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    cuda.operations.argtypes = [pointer, ctypes.c_uint, pointer, ctypes.c_uint]
    cuda.copy.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]
    cuda.record.argtypes, cuda.wait_event.argtypes = [pointer, pointer], [pointer, pointer, ctypes.c_uint]
    return cuda


def _current_stream(device: int) -> int:
    """Return the address of the current stream; `torch.cuda.current_stream` makes an object first."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def _event() -> Any:
    """Return an event that CUDA has created: torch creates one only when it is first recorded."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"a copy or a CUDA stream memory operation failed with error {result}")
