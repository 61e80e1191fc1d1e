"""Messages of a ring: tensors that travel side by side in one buffer, so that a hop sends one NCCL message.

NCCL moves one large message faster than two of half the size. On 4 H200, 128 MiB each way travel at 272 GB/s as one
tensor of 256 MiB. As two tensors of 128 MiB they travel at 150 GB/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
_Unpack = Callable[[Tensor], list[Tensor]]
_ALIGNED = 16
"""Bytes: kernels want a tensor to begin at a multiple of this. Tensors of other sizes travel in buffers of their own,
because padding would be sent, too."""


class Message:
    """Tensors, and the buffers that are sent for them: one buffer where their sizes allow it, else one per tensor."""

    __slots__ = ("_tensors", "_unpack", "buffers")

    def __init__(self, buffers: list[Tensor], unpack: _Unpack | None = None) -> None:
        """``unpack`` splits a single buffer into the tensors; without it, the buffers are the tensors."""
        self.buffers, self._unpack = buffers, unpack
        self._tensors = buffers if unpack is None else None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, unpacked on first use: a message that a rank only passes on is never unpacked."""
        if self._tensors is None:
            assert self._unpack is not None
            self._tensors = self._unpack(self.buffers[0])
        return self._tensors

    @classmethod
    def empty(cls, shapes: Shapes, allocate: Callable[[Shapes], list[Tensor]]) -> Message:
        """Return an uninitialised message for tensors of these types and shapes; ``allocate`` makes its buffers."""
        unpack, *buffer = _buffer_layout(shapes)
        return cls(allocate(shapes) if unpack is None else allocate((tuple(buffer),)), unpack)  # type: ignore[arg-type]

    @classmethod
    def pack(cls, tensors: Sequence[Tensor]) -> Message:
        """Pack the tensors into one buffer, without a copy where they already lie side by side.

        Where their sizes do not allow one buffer, each tensor is a buffer of its own.
        """
        unpack, dtype, _ = _buffer_layout(shapes_of(tensors))
        if unpack is None:
            return cls([tensor.contiguous() for tensor in tensors])
        if unpack is unstacked:
            whole = side_by_side(tensors[0], tensors[1]) if len(tensors) == 2 else None
            buffer = torch.stack(list(tensors)) if whole is None else whole
        else:
            buffer = torch.cat([tensor.contiguous().view(-1).view(dtype) for tensor in tensors])
        return cls([buffer], unpack)

    def empty_like(self) -> Message:
        """Return another message of the same shapes, uninitialised."""
        return Message([torch.empty_like(buffer) for buffer in self.buffers], self._unpack)

    def with_buffers(self, buffers: list[Tensor]) -> Message:
        """Return a message of the same shapes over other buffers."""
        return Message(buffers, self._unpack)

    def clear(self) -> None:
        """Release the memory."""
        self.buffers, self._tensors = [], []

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum([buffer.nbytes for buffer in self.buffers])


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


@lru_cache(maxsize=64)
def _buffer_layout(shapes: Shapes) -> tuple[_Unpack | None, torch.dtype, tuple[int, ...]]:
    """Return (function that unpacks it, type, shape) of the one buffer that holds tensors of these shapes.

    The function is None where the tensors need a buffer each.
    """
    if len(shapes) == 1 or any(size_bytes(*shape) % _ALIGNED for shape in shapes):
        return None, *shapes[0]
    if len(set(shapes)) == 1:
        dtype, shape = shapes[0]
        return unstacked, dtype, (len(shapes), *shape)
    count = sum(size_bytes(*shape) for shape in shapes) // torch.int32.itemsize
    return partial(_split_buffer, shapes), torch.int32, (count,)


def unstacked(buffer: Tensor) -> list[Tensor]:
    """Split a buffer into the tensors that were stacked to it."""
    return list(buffer.unbind(0))


def _split_buffer(shapes: Shapes, buffer: Tensor) -> list[Tensor]:
    pieces = torch.split(buffer, [size_bytes(*shape) // buffer.element_size() for shape in shapes])
    return [piece.view(dtype).view(shape) for piece, (dtype, shape) in zip(pieces, shapes, strict=True)]
