"""Messages of a ring: tensors that travel side by side in one buffer, so that a hop sends one NCCL message.

NCCL moves one large message faster than two of half the size. On 4 H200, 128 MiB each way travel at 272 GB/s as one
tensor of 256 MiB. As two tensors of 128 MiB they travel at 150 GB/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
_Unpack = Callable[[Tensor], list[Tensor]]
ALIGNED = 16
"""Bytes: kernels want a tensor to begin at a multiple of this. Tensors of other sizes travel in buffers of their own,
because padding would be sent, too."""
_ALIGNED_APART = 256
"""Bytes: tensors that are no single buffer begin at a multiple of this in memory that copy engines write to."""


@dataclass(frozen=True, eq=False, slots=True)
class MessageLayout:
    """The arrangement of a message's tensors in memory, which every rank derives from their types and shapes alone.

    `layout_of` returns one object per process for the same shapes while they are in use, so that it is its own key.
    """

    shapes: Shapes
    """Type and shape of each tensor."""
    buffers: Shapes
    """Type and shape of each buffer: one where the tensors' sizes allow it, else those of the tensors."""
    offsets: list[int]
    """Byte offset of each tensor in a slot: without gaps where one buffer holds all tensors."""
    slot_bytes: int
    """Bytes of a slot that holds the tensors."""
    size_bytes: int
    """Bytes of all tensors, which are sent."""
    unpack: _Unpack | None
    """Splits the one buffer into the tensors; None where each tensor is a buffer."""


class Message:
    """Tensors that travel together, and the dense buffers that they are sent from.

    Either one buffer holds all tensors, as in their `MessageLayout`, or each tensor is a buffer. Where they arrive
    depends on the layout alone: a rank whose tensors lie apart sends to the same addresses as one that packs them.
    """

    __slots__ = ("_tensors", "buffers", "layout")

    def __init__(
        self, buffers: list[Tensor], layout: MessageLayout | None = None, tensors: list[Tensor] | None = None
    ) -> None:
        """``layout`` is that of the tensors, by default the buffers; ``tensors`` are known where they are unpacked."""
        self.buffers = buffers
        self.layout = layout_of(shapes_of(buffers)) if layout is None else layout
        self._tensors = buffers if tensors is None and len(buffers) == len(self.layout.shapes) else tensors

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, unpacked on first use: a message that a rank only passes on is never unpacked."""
        if self._tensors is None:
            assert self.layout.unpack is not None
            self._tensors = self.layout.unpack(self.buffers[0])
        return self._tensors

    @classmethod
    def empty(cls, layout: MessageLayout, allocate: Callable[[MessageLayout], list[Tensor]]) -> Message:
        """Return an uninitialised message; ``allocate`` makes the buffers of a layout."""
        return cls(allocate(layout), layout)

    @classmethod
    def pack(cls, tensors: Sequence[Tensor]) -> Message:
        """Pack the tensors into one buffer, without a copy where they already lie side by side.

        Where their sizes do not allow one buffer, each tensor is a buffer of its own.
        """
        layout = layout_of(shapes_of(tensors))
        if layout.unpack is None:
            return cls([tensor.contiguous() for tensor in tensors], layout)
        if layout.unpack is unstacked:
            whole = side_by_side(tensors[0], tensors[1]) if len(tensors) == 2 else None
            buffer = torch.stack(list(tensors)) if whole is None else whole
        else:
            dtype, _ = layout.buffers[0]
            buffer = torch.cat([tensor.contiguous().view(-1).view(dtype) for tensor in tensors])
        return cls([buffer], layout)

    @property
    def is_packed(self) -> bool:
        """Whether the buffers are those of the layout: tensors that one buffer could hold do not lie apart."""
        return len(self.buffers) == len(self.layout.buffers)

    def empty_like(self) -> Message:
        """Return another message of the same shapes, uninitialised."""
        return Message([torch.empty_like(buffer) for buffer in self.buffers], self.layout)

    def with_buffers(self, buffers: list[Tensor]) -> Message:
        """Return a message of the same shapes over other buffers."""
        return Message(buffers, self.layout)

    def clear(self) -> None:
        """Release the memory."""
        self.buffers, self._tensors = [], []

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.layout.size_bytes


def side_by_side(first: Tensor, second: Tensor) -> Tensor | None:
    """Return the dense tensor (2, ...) whose two halves are these tensors; None where there is no such tensor."""
    whole = first._base
    if whole is None or whole is not second._base or not whole.dtype == first.dtype == second.dtype:
        return None
    if first.shape != second.shape or whole.shape != (2, *first.shape):
        return None
    offset = whole.storage_offset()
    if first.storage_offset() != offset or second.storage_offset() != offset + first.numel():
        return None
    return whole if whole.is_contiguous() and first.is_contiguous() and second.is_contiguous() else None


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Return the type and shape of each tensor."""
    return tuple([(tensor.dtype, tensor.shape) for tensor in tensors])


def size_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize


@lru_cache(maxsize=256)
def layout_of(shapes: Shapes) -> MessageLayout:
    """Return how a message arranges tensors of these types and shapes."""
    sizes = [size_bytes(*shape) for shape in shapes]
    if len(shapes) == 1 or any(size % ALIGNED for size in sizes):
        room = [-(-size // _ALIGNED_APART) * _ALIGNED_APART for size in sizes]
        *offsets, slot_bytes = accumulate(room, initial=0)
        return MessageLayout(shapes, shapes, offsets, slot_bytes, sum(sizes), None)
    *offsets, slot_bytes = accumulate(sizes, initial=0)
    if len(set(shapes)) == 1:
        dtype, shape = shapes[0]
        buffer, unpack = (dtype, (len(shapes), *shape)), unstacked
    else:
        buffer, unpack = (torch.int32, (slot_bytes // torch.int32.itemsize,)), partial(_split_buffer, shapes)
    return MessageLayout(shapes, (buffer,), offsets, slot_bytes, slot_bytes, unpack)


def unstacked(buffer: Tensor) -> list[Tensor]:
    """Split a buffer into the tensors that were stacked to it."""
    return list(buffer.unbind(0))


def _split_buffer(shapes: Shapes, buffer: Tensor) -> list[Tensor]:
    pieces = torch.split(buffer, [size_bytes(*shape) // buffer.element_size() for shape in shapes])
    return [piece.view(dtype).view(shape) for piece, (dtype, shape) in zip(pieces, shapes, strict=True)]
