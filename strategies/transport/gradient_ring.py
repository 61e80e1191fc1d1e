"""Gradients that travel behind the rows they belong to, and home."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringprof.strategies.annotate import ring_step
from ringprof.strategies.kernels.kernel import Gradients
from ringprof.strategies.kernels.merge import Sum, accumulate, settled, started
from ringprof.strategies.masks.layouts import ALL, Block, part
from ringprof.strategies.masks.row_routing import RowRouting
from ringprof.strategies.transport.message import Message, side_by_side
from ringprof.strategies.transport.ring_channel import AnyHop, HopRing

if TYPE_CHECKING:
    from ringprof.strategies.base import AttentionCall, Rows, Strategy


class GradientRing:
    """Gradients of rows that travel. They begin anew in each inner ring, are joined with the earlier ones' at its end,
    go to the next one, and from the last one hop home."""

    def __init__(
        self, routing: RowRouting, inner: HopRing, outer: HopRing | None, like: Sequence[Tensor], wire: torch.dtype,
        straight: HopRing | None = None,
    ) -> None:  # fmt: skip
        """Of tensors ``like`` these, in the type ``wire``; by the ring ``straight`` at once, where one hop has brought
        all rows."""
        self._travel, self._inner, self._outer, self._straight = routing, inner, outer, straight
        self._like, self._wire = like, wire
        self._hop: AnyHop | None = None
        self._out: AnyHop | None = None

    def add(self, step: int, grads: Sequence[Tensor] | None, rows: slice) -> None:
        """Send on what has come, with a block's gradients, where there is one, of ``rows`` that came in this step."""
        routing = self._travel
        turn, inner_step = divmod(step, routing.window)
        if self._straight is not None and step > 1:
            return
        message = self._with(step, grads, rows) if routing.back[step] else None
        if self._straight is not None:
            self._out = None if message is None else self._straight.post(message)
        elif inner_step + 1 < routing.window:
            self._hop = None if message is None else self._inner.post(message)
        else:
            self._hop = None
            self._leave(turn, step, message)

    def home(self, rank: int, own: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of ``rank``, rounded once: its ``own``, of all rows, and what has come home."""
        assert self._out is not None, "some row has travelled"
        came: Message = self._out.wait()
        if self._straight is None and self._outer is not None:
            came = self._inner.post(came).wait()
        with ring_step("bwd", len(self._travel.back), "merge"):
            return [
                settled(total, self._travel.home(rank, x), like.dtype)
                for total, x, like in zip(own, came.tensors, self._like, strict=True)
            ]

    def _with(self, step: int, grads: Sequence[Tensor] | None, rows: slice) -> Message:
        goes, ring = self._travel.back[step], self._straight or self._inner
        arrived = None if self._hop is None else _widened(self._hop.wait(), self._travel.back[step - 1], goes)
        with ring_step("bwd", step, "merge"):
            like = [x[:, :1].expand(-1, len(goes), -1, -1) for x in self._like]
            there = ALL if grads is None else self._travel.in_gradients(rows, step)
            return onward(ring, arrived, grads, there, like, self._wire)

    def _leave(self, turn: int, step: int, message: Message | None) -> None:
        """To the next inner ring, with what came from the one before."""
        rows = self._travel.back_outward
        if self._out is not None:
            earlier, joined = _widened(self._out.wait(), rows[turn - 1], rows[turn]), message
            message, first = earlier, self._travel.back[step].start - rows[turn].start
            with ring_step("bwd", step, "merge"):
                for total, x in zip(earlier.tensors, joined.tensors if joined else (), strict=False):
                    accumulate(part(total, slice(first, first + x.shape[-3])), x)
        if message is not None:
            self._out = (self._outer or self._inner).post(message)


def backward_of_rows(
    strategy: Strategy, blocks: AttentionCall, rows: Rows, q: Tensor, tour: Iterable[tuple[int, Sequence[Tensor]]],
    gradient_ring: GradientRing,
) -> Gradients:  # fmt: skip
    """A backward pass over the K and V of a `RowRouting.tour`; dK and dV go home."""
    dq = Sum(q, strategy.ring_size)
    own: Sequence[Tensor] = ()
    for step, (kv_rank, kv) in enumerate(tour):
        block, grads = strategy.block(blocks, kv_rank, q), None
        if block is not None:
            with ring_step("bwd", step, "block"):
                grads = blocks.backward(rows, q, kv[0], kv[1], block)
            with ring_step("bwd", step, "merge"):
                dq.add(grads[0], block.q)
        if step == 0:
            assert grads is not None, "a token sees itself"
            own = grads[1:]
        else:
            gradient_ring.add(step, *of_keys(grads, block))
    dk, dv = gradient_ring.home(strategy.ring_rank, own)
    return dq.result(q.dtype), dk, dv


def of_keys(grads: Gradients | None, block: Block | None) -> tuple[Sequence[Tensor] | None, slice]:
    """dK and dV of a block, where there is one, and their rows."""
    return (None, ALL) if grads is None or block is None else (grads[1:], block.kv)


def _widened(dkv: Message, held: range, goes: range) -> Message:
    """The rows ``held`` of a message as its rows ``goes``, with 0 around them."""
    if held == goes:
        return dkv
    around = (0, 0, 0, 0, held.start - goes.start, goes.stop - held.stop)
    return Message.holding([pad(x, around) for x in dkv.tensors])


Home = list[tuple[Block, Sequence[Tensor]]]
"""Blocks whose dK and dV stay on the rank, and these two."""


def onward(
    ring: HopRing, arrived: Message | None, grads: Sequence[Tensor] | None, rows: slice, like: Sequence[Tensor],
    wire: torch.dtype,
) -> Message:  # fmt: skip
    """Gradients of ``like`` as they travel on, in the type ``wire``: what has arrived, if anything, and a block's."""
    if arrived is None and grads is not None and rows == ALL and grads[0].dtype == wire:
        return Message.holding(grads)
    going = ring.begun(tuple((wire, x.shape) for x in like), like[0].device) if arrived is None else arrived
    add(going, grads, rows, first=arrived is None)
    return going


def add(going: Message, grads: Sequence[Tensor] | None, rows: slice, *, first: bool = False) -> None:
    """Add a block's gradients, where there is one, to those that travel; the ``first`` is written, with 0 around it."""
    if grads is None:
        for message in going.messages if first else ():
            message.zero_()
        return
    for total, gradient in zip(*_as_few(going, [grads]), strict=True):
        if first:
            started(total, rows, gradient[0])
        else:
            accumulate(part(total, rows), gradient[0])


def settled_dkv(dkv: Message | None, home: Home, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dK and dV come home (None: they never left), in ``dtype``, with those that stayed, which are used up."""
    if dkv is None or (len(home) == 1 and home[0][0].kv == ALL):
        ((_, (dk, dv)),) = home
        for total, (gradient,) in zip(*_as_few(dkv, [(dk, dv)]), strict=True) if dkv else ():
            accumulate(gradient, total)
        return dk.to(dtype), dv.to(dtype)
    rows = [block.kv for block, _ in home]
    settlements = [
        settled(total, list(zip(rows, gradients, strict=True)), dtype)
        for total, gradients in zip(*_as_few(dkv, [pair for _, pair in home]), strict=True)
    ]
    dk, dv = settlements if len(settlements) == 2 else settlements[0]
    return dk, dv


def _as_few(dkv: Message, gradients: list[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """dK and dV, and each block's; both as one tensor of twice as much where all of them are cut from one."""
    together = [side_by_side(*one) if len(one) == 2 else None for one in gradients]
    whole = [x for x in together if x is not None]
    # A message of one dimension holds tensors of different sizes.
    if len(dkv.messages) == 1 and dkv.messages[0].dim() > 1 and len(whole) == len(together):
        return dkv.messages, [whole]
    return dkv.tensors, [[one[which] for one in gradients] for which in range(len(dkv.tensors))]
