"""Hops by the GPU's copy engines, between GPUs of one host that write into each other's memory.

NCCL moves a hop with a kernel on multiprocessors that the attention kernel beside it then lacks. Here every member of
a ring owns two slots to receive in, in symmetric memory; the one before it copies straight into them, and counters in
the same memory say what has arrived and which slot is free. Streams wait for counters and set them without a kernel
(CUDA stream memory operations), so a hop takes no multiprocessor at all.

A received tensor lies in a slot: it holds until the second next hop of the same shapes is posted on the ring.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .annotate import annotate

SLOTS = 2
FEWEST_QUEUES = 8
_ALIGNED = 256
# Counters at the end of a member's memory: hops that arrived here, and hops that the next member has room for.
_ARRIVED, _ROOM, _COUNTERS = 0, 64, 256

_Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


_owners: WeakValueDictionary[int, _Box] = WeakValueDictionary()
"""By the address of its memory."""


def can_copy() -> str | None:
    """Why hops cannot go by copy engine here; None where they can, at least within a host.

    With few hardware queues a stream that waits would hold up others.
    """
    if not torch.cuda.is_available() or _driver() is None:
        return "need CUDA"
    if dist.is_initialized() and "nccl" not in dist.get_backend():
        return "need NCCL's process groups"
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if queues.isdigit() and int(queues) < FEWEST_QUEUES:
        return f"need CUDA_DEVICE_MAX_CONNECTIONS of at least {FEWEST_QUEUES}, which is {queues}"
    return None


def held_bytes() -> int:
    """Symmetric memory that all rings of this process hold now, which no allocator statistics count."""
    return sum(box.size_bytes for box in _owners.values())


def owned(tensor: Tensor, ring: CopyRing | None) -> Tensor:
    """The tensor, or a copy where it lies in a slot of another ring, which may fill the slot while this one reads."""
    if not _owners or not tensor.is_cuda:
        return tensor
    box = _owners.get(tensor.untyped_storage().data_ptr())
    return tensor if box is None or (ring is not None and ring.has(box)) else tensor.clone()


class CopyHop:
    """One transfer under way. `wait` returns what arrived, once."""

    def __init__(self, box: _Box, number: int, sent: Sequence[Tensor], done: Any) -> None:
        self._box: _Box | None = box
        self._number = number
        # The tensors under way must outlive the transfer.
        self._sent = sent
        self._done = done

    def wait(self) -> list[Tensor]:
        """As `communicator.Hop.wait`: the host does not block, the current stream waits."""
        if self._box is None:
            raise RuntimeError("wait called twice on one hop")
        box, self._box = self._box, None
        with annotate("wait"):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            _wait_value(stream, box.here + box.counters + _ARRIVED, self._number)
        self._sent = ()
        return box.received[self._number % SLOTS]


class CopyRing:
    """The hops of one ring over one group."""

    def __init__(self, channel: str, group: dist.ProcessGroup, following: int, previous: int) -> None:
        """``following`` and ``previous`` are global ranks."""
        self._channel, self._group = channel, group
        self._next, self._previous = dist.get_group_rank(group, following), dist.get_group_rank(group, previous)
        self._boxes: dict[_Shapes, _Box] = {}
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    def has(self, box: _Box) -> bool:
        """Whether it is one of this ring's."""
        return any(mine is box for mine in self._boxes.values())

    def post(self, tensors: Sequence[Tensor]) -> CopyHop:
        """Start copying contiguous ``tensors`` to the next member. All members post the same shapes in one order."""
        shapes = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        if shapes not in self._boxes:
            self._boxes[shapes] = _Box(shapes, self._group, self._next, self._previous)
        box, stream = self._boxes[shapes], self._stream
        box.number += 1
        number = box.number
        with annotate(f"send/{self._channel}"):
            # What is sent is there, and what lay in the slot to be filled is no longer read.
            stream.wait_stream(torch.cuda.current_stream())
            _write_value(stream, box.previous + box.counters + _ROOM, number)
            _wait_value(stream, box.here + box.counters + _ROOM, number)
            with torch.cuda.stream(stream):
                for tensor, place in zip(tensors, box.there[number % SLOTS], strict=True):
                    place.copy_(tensor, non_blocking=True)
            _write_value(stream, box.following + box.counters + _ARRIVED, number)
            done = stream.record_event()
        return CopyHop(box, number, tensors, done)


class _Box:
    """Where the hops of some shapes arrive: this member's slots, the next member's, and the counters."""

    def __init__(self, shapes: _Shapes, group: dist.ProcessGroup, following: int, previous: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        offsets, end = [], 0
        for _ in range(SLOTS):
            places = []
            for dtype, shape in shapes:
                places.append(end)
                end += -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
            offsets.append(places)
        self.counters, self.number = end, 0
        memory = symmetric.empty(end + _COUNTERS, dtype=torch.uint8, device=torch.device("cuda"))
        memory[end:].zero_()
        # The exchange of handles below is what tells the others that the counters are at zero.
        torch.cuda.synchronize()
        handle = symmetric.rendezvous(memory, group)
        self._kept = memory, handle
        self.size_bytes = end + _COUNTERS
        _owners[memory.untyped_storage().data_ptr()] = self
        pointers = handle.buffer_ptrs
        self.here, self.following, self.previous = (pointers[at] for at in (handle.rank, following, previous))
        theirs = handle.get_buffer(following, (end,), torch.uint8)
        self.received, self.there = (
            [[_at(base, offset, *shape) for offset, shape in zip(places, shapes, strict=True)] for places in offsets]
            for base in (memory, theirs)
        )


def _at(base: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return base[offset : offset + size].view(dtype).view(shape)


# --- stream memory operations ------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _driver() -> Any:
    """libcuda, or None where it lacks the operations."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
            function = getattr(library, name)
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
            function.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library


def _wait_value(stream: Any, address: int, value: int) -> None:
    """The stream goes on when the counter has reached ``value``."""
    _check(_driver().cuStreamWaitValue32_v2(stream.cuda_stream, address, value, 0))


def _write_value(stream: Any, address: int, value: int) -> None:
    """Set the counter when all before it on the stream is done and can be seen by the other GPU."""
    _check(_driver().cuStreamWriteValue32_v2(stream.cuda_stream, address, value, 0))


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"a CUDA stream memory operation failed with error {result}")
