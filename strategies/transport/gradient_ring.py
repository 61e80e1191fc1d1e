"""Gradients that travel around a ring behind the rows they belong to, and return to the rank that owns these rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..annotate import ring_step
from ..kernels.kernel import Gradients
from ..kernels.merge import Sum, accumulate, add_and_cast, write_rows
from ..masks.layouts import ALL, Block, part
from ..masks.row_routing import RowRouting
from .message import Message, side_by_side
from .ring_channel import AnyHop, HopRing

if TYPE_CHECKING:
    from ..base import AttentionCall, Rows, Strategy


class GradientRing:
    """Gradients of the rows that a `RowRouting` sends around.

    They start from zero in each inner ring. At the end of the inner ring they are added to those of the earlier inner
    rings and sent to the next one. From the last inner ring one hop returns them to the rank that owns the rows.
    """

    def __init__(
        self, routing: RowRouting, inner: HopRing, outer: HopRing | None, like: Sequence[Tensor], wire: torch.dtype,
        return_ring: HopRing | None = None,
    ) -> None:  # fmt: skip
        """Prepare gradients of the tensors ``like``, sent in the type ``wire``.

        With a ``return_ring`` they return by it at once: all rows have travelled a single hop.
        """
        self._routing, self._inner, self._outer, self._return_ring = routing, inner, outer, return_ring
        self._like, self._wire = like, wire
        self._inner_hop: AnyHop | None = None
        self._outer_hop: AnyHop | None = None

    def add(self, step: int, grads: Sequence[Tensor] | None, rows: slice) -> None:
        """Send on the gradients that have arrived, plus those of this step's block.

        ``grads`` are the block's gradients, None where there is no block; ``rows`` are their rows among those that
        arrived in this step.
        """
        routing = self._routing
        turn, inner_step = divmod(step, routing.window)
        if self._return_ring is not None and step > 1:
            return
        message = self._sum_of_step(step, grads, rows) if routing.inner_gradient_slices[step] else None
        if self._return_ring is not None:
            self._outer_hop = None if message is None else self._return_ring.post(message)
        elif inner_step + 1 < routing.window:
            self._inner_hop = None if message is None else self._inner.post(message)
        else:
            self._inner_hop = None
            self._leave_inner_ring(turn, step, message)

    def receive_own(self, rank: int, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of all rows of ``rank``: those it computed itself, ``own``, plus those that return.

        The sums are rounded once, to the type of the tensors.
        """
        assert self._outer_hop is not None, "some row has travelled"
        returned: Message = self._outer_hop.wait()
        if self._return_ring is None and self._outer is not None:
            returned = self._inner.post(returned).wait()
        with ring_step("bwd", len(self._routing.inner_gradient_slices), "merge"):
            return [
                add_and_cast(total, self._routing.split_by_own_rows(rank, x), like.dtype)
                for total, x, like in zip(own, returned.tensors, self._like, strict=True)
            ]

    def _sum_of_step(self, step: int, grads: Sequence[Tensor] | None, rows: slice) -> Message:
        slices, ring = self._routing.inner_gradient_slices, self._return_ring or self._inner
        outgoing = slices[step]
        arrived = None if self._inner_hop is None else _widened(self._inner_hop.wait(), slices[step - 1], outgoing)
        with ring_step("bwd", step, "merge"):
            like = [x[:, :1].expand(-1, len(outgoing), -1, -1) for x in self._like]
            block_rows = ALL if grads is None else self._routing.rows_in_gradients(rows, step)
            return forward_grads(ring, arrived, grads, block_rows, like, self._wire)

    def _leave_inner_ring(self, turn: int, step: int, message: Message | None) -> None:
        """Send the gradients of this inner ring to the next one, added to those of the earlier inner rings."""
        rows = self._routing.outer_gradient_slices
        if self._outer_hop is not None:
            earlier, latest = _widened(self._outer_hop.wait(), rows[turn - 1], rows[turn]), message
            message, first = earlier, self._routing.inner_gradient_slices[step].start - rows[turn].start
            with ring_step("bwd", step, "merge"):
                for total, x in zip(earlier.tensors, latest.tensors if latest else (), strict=False):
                    accumulate(part(total, slice(first, first + x.shape[-3])), x)
        if message is not None:
            self._outer_hop = (self._outer or self._inner).post(message)


def backward_of_rows(
    strategy: Strategy, call: AttentionCall, rows: Rows, q: Tensor, tour: Iterable[tuple[int, Sequence[Tensor]]],
    gradient_ring: GradientRing,
) -> Gradients:  # fmt: skip
    """Run a backward pass over the K and V of a `RowRouting.tour`; dK and dV return by the ``gradient_ring``."""
    dq = Sum(q, strategy.ring_size)
    own: Sequence[Tensor] = ()
    for step, (kv_rank, kv) in enumerate(tour):
        block, grads = strategy.block(call, kv_rank, q), None
        if block is not None:
            with ring_step("bwd", step, "block"):
                grads = call.backward(rows, q, kv[0], kv[1], block)
            with ring_step("bwd", step, "merge"):
                dq.add(grads[0], block.q)
        if step == 0:
            assert grads is not None, "a token sees itself"
            own = grads[1:]
        else:
            gradient_ring.add(step, *kv_grads(grads, block))
    dk, dv = gradient_ring.receive_own(strategy.ring_rank, own)
    return dq.result(q.dtype), dk, dv


def kv_grads(grads: Gradients | None, block: Block | None) -> tuple[Sequence[Tensor] | None, slice]:
    """Return dK and dV of a block with their rows; (None, all rows) where there is no block."""
    return (None, ALL) if grads is None or block is None else (grads[1:], block.kv)


def _widened(dkv: Message, held: range, target: range) -> Message:
    """Pad a message that holds the rows ``held`` with zeros, so that it holds the rows ``target``."""
    if held == target:
        return dkv
    padding = (0, 0, 0, 0, held.start - target.start, target.stop - held.stop)
    return Message.pack([pad(x, padding) for x in dkv.tensors])


LocalGrads = list[tuple[Block, Sequence[Tensor]]]
"""Blocks whose dK and dV stay on the rank, each with its dK and dV."""


def forward_grads(
    ring: HopRing, arrived: Message | None, grads: Sequence[Tensor] | None, rows: slice, like: Sequence[Tensor],
    wire: torch.dtype,
) -> Message:  # fmt: skip
    """Return the message to send next: the gradients that arrived, if any, plus those of a block.

    The gradients have the shapes of ``like`` and the type ``wire``; ``grads`` are those of the block's ``rows``.
    """
    if arrived is None and grads is not None and rows == ALL and grads[0].dtype == wire:
        return Message.pack(grads)
    totals = ring.reserve(tuple((wire, x.shape) for x in like), like[0].device) if arrived is None else arrived
    add_block_grads(totals, grads, rows, first=arrived is None)
    return totals


def add_block_grads(totals: Message, grads: Sequence[Tensor] | None, rows: slice, *, first: bool = False) -> None:
    """Add the gradients of a block's ``rows`` to travelling ``totals``; ``grads`` are None where there is no block.

    The ``first`` block writes its gradients, and zeros in all other rows.
    """
    if grads is None:
        for buffer in totals.buffers if first else ():
            buffer.zero_()
        return
    for total, gradient in zip(*_in_pairs(totals, [grads]), strict=True):
        if first:
            write_rows(total, rows, gradient[0])
        else:
            accumulate(part(total, rows), gradient[0])


def add_and_cast_dkv(dkv: Message | None, local: LocalGrads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Add the ``local`` dK and dV to those that returned, and cast the sums to ``dtype``.

    ``dkv`` is None where none have travelled. The local gradients are overwritten.
    """
    if dkv is None or (len(local) == 1 and local[0][0].kv == ALL):
        ((_, (dk, dv)),) = local
        for total, (gradient,) in zip(*_in_pairs(dkv, [(dk, dv)]), strict=True) if dkv else ():
            accumulate(gradient, total)
        return dk.to(dtype), dv.to(dtype)
    rows = [block.kv for block, _ in local]
    sums = [
        add_and_cast(total, list(zip(rows, gradients, strict=True)), dtype)
        for total, gradients in zip(*_in_pairs(dkv, [pair for _, pair in local]), strict=True)
    ]
    dk, dv = sums if len(sums) == 2 else sums[0]
    return dk, dv


def _in_pairs(dkv: Message, gradients: list[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return (dK and dV of the message, dK and dV of each block), as few tensors as possible.

    Where every pair lies side by side in one tensor, that tensor stands for the pair: half as many kernels add them.
    """
    stacked = [side_by_side(*pair) if len(pair) == 2 else None for pair in gradients]
    whole = [x for x in stacked if x is not None]
    # A message of one dimension holds tensors of different sizes.
    if len(dkv.buffers) == 1 and dkv.buffers[0].dim() > 1 and len(whole) == len(stacked):
        return dkv.buffers, [whole]
    return dkv.tensors, [[pair[which] for pair in gradients] for which in range(len(dkv.tensors))]
