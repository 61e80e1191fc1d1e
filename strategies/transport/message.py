"""What travels together: tensors side by side in one stretch of memory, so that a hop is one message.

NCCL moves one large message faster than two of half the size: on 4 H200, 128 MiB each way go at 272 GB/s as one tensor
of 256 MiB and at 150 GB/s as two of 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
_Cut = Callable[[Tensor], list[Tensor]]
_ALIGNED = 16
"""Bytes that kernels want a tensor to begin at a multiple of. Tensors of other sizes travel as messages of their own:
padding would be sent, too."""


class Message:
    """Tensors, and the messages that they are views of: one where their sizes allow, else one each."""

    __slots__ = ("_cut", "_tensors", "messages")

    def __init__(self, messages: list[Tensor], cut: _Cut | None = None) -> None:
        """``cut`` makes the tensors of a single message; without one they are the messages."""
        self.messages, self._cut = messages, cut
        self._tensors = messages if cut is None else None

    @property
    def tensors(self) -> list[Tensor]:
        """Cut when they are first asked for: what a rank only passes on, or takes as a whole, is never."""
        if self._tensors is None:
            assert self._cut is not None
            self._tensors = self._cut(self.messages[0])
        return self._tensors

    @classmethod
    def empty(cls, shapes: Shapes, room: Callable[[Shapes], list[Tensor]]) -> Message:
        """Room for tensors of these types and shapes; ``room`` makes the messages of such that they travel in."""
        cut, *message = _message(shapes)
        return cls(room(shapes) if cut is None else room((tuple(message),)), cut)  # type: ignore[arg-type]

    @classmethod
    def holding(cls, tensors: Sequence[Tensor]) -> Message:
        """The tensors in one message, copied where they are not side by side; where they do not fit, each as it is."""
        cut, dtype, _ = _message(shapes_of(tensors))
        if cut is None:
            return cls([tensor.contiguous() for tensor in tensors])
        if cut is unstacked:
            whole = side_by_side(tensors[0], tensors[1]) if len(tensors) == 2 else None
            message = torch.stack(list(tensors)) if whole is None else whole
        else:
            message = torch.cat([tensor.contiguous().view(-1).view(dtype) for tensor in tensors])
        return cls([message], cut)

    def room(self) -> Message:
        """Another parcel of the same shapes, not initialised."""
        return Message([torch.empty_like(message) for message in self.messages], self._cut)

    def over(self, messages: list[Tensor]) -> Message:
        """The same shapes over other memory."""
        return Message(messages, self._cut)

    def clear(self) -> None:
        """Let go of the memory."""
        self.messages, self._tensors = [], []

    @property
    def size_bytes(self) -> int:
        return sum([message.nbytes for message in self.messages])


def side_by_side(first: Tensor, second: Tensor) -> Tensor | None:
    """The dense tensor (2, ...) that is cut into these two dense ones; None where there is none."""
    whole = first._base
    if whole is None or whole is not second._base or not whole.dtype == first.dtype == second.dtype:
        return None
    if first.shape != second.shape or whole.shape != (2, *first.shape):
        return None
    begins = whole.storage_offset()
    if first.storage_offset() != begins or second.storage_offset() != begins + first.numel():
        return None
    return whole if whole.is_contiguous() and first.is_contiguous() and second.is_contiguous() else None


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Types and shapes."""
    return tuple([(tensor.dtype, tensor.shape) for tensor in tensors])


def size_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize


@lru_cache(maxsize=64)
def _message(shapes: Shapes) -> tuple[_Cut | None, torch.dtype, tuple[int, ...]]:
    """How one message holds tensors of these shapes (the cut into them, its type and shape); no cut where none does."""
    if len(shapes) == 1 or any(size_bytes(*shape) % _ALIGNED for shape in shapes):
        return None, *shapes[0]
    if len(set(shapes)) == 1:
        dtype, shape = shapes[0]
        return unstacked, dtype, (len(shapes), *shape)
    count = sum(size_bytes(*shape) for shape in shapes) // torch.int32.itemsize
    return partial(_apart, shapes), torch.int32, (count,)


def unstacked(message: Tensor) -> list[Tensor]:
    """The tensors that were stacked to a message."""
    return list(message.unbind(0))


def _apart(shapes: Shapes, message: Tensor) -> list[Tensor]:
    pieces = torch.split(message, [size_bytes(*shape) // message.element_size() for shape in shapes])
    return [piece.view(dtype).view(shape) for piece, (dtype, shape) in zip(pieces, shapes, strict=True)]
