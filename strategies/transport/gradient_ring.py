"""Gradients that travel around a ring behind the rows they belong to, and return to the rank that owns these rows.

One `GradientRing` serves all strategies whose gradients make hops of their own: dK and dV of rings and double rings, dQ
of Burst. With a `RowRouting` only the rows travel that some rank needs; without one, whole shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..annotate import ring_step
from ..kernels.merge import accumulate, add_and_cast, write_rows
from ..masks.layouts import ALL, part
from ..masks.row_routing import RowRouting
from .message import Message, side_by_side
from .ring_channel import AnyHop, HopRing

LocalGrads = list[tuple[slice, Sequence[Tensor]]]
"""Gradients that stay on the rank: those of one block each, with their rows."""


class GradientRing:
    """Sums of the blocks' gradients, which each rank adds to and sends on, and the gradients that stay on the rank.

    The sums start anew in each inner ring. At its end they are added to those of the earlier inner rings, and sent to
    the next inner ring. After the last one they return to the rank that owns the rows. The block of a rank with its own
    rows is the first; its gradients stay on the rank unless they ``start_at_owner``.
    """

    def __init__(
        self, inner: HopRing, outer: HopRing | None, like: Sequence[Tensor], wire: torch.dtype,
        routing: RowRouting | None = None, return_ring: HopRing | None = None, *, later_wire: torch.dtype | None = None,
        start_at_owner: bool = False, full_turns: bool = False,
    ) -> None:  # fmt: skip
        """Prepare gradients of the tensors ``like``, sent in ``wire``; ``later_wire`` after the first inner ring.

        With a ``return_ring`` they return by it at once: all rows have travelled a single hop. With ``full_turns`` the
        sums start at their owner and make one hop more in each inner ring, so that they leave it from their owner; else
        they leave it from the rank before, and one hop of the inner ring follows the last of the outer ring. Only whole
        shards start at their owner.
        """
        self._full_turns = full_turns and routing is None
        self._start_at_owner = (start_at_owner or full_turns) and routing is None
        # Where whole shards have a single inner ring, their last hop on it is posted with the others.
        posts_at_once = routing is None and not full_turns and outer is not None and outer.size == 1
        self._outer = None if posts_at_once else outer
        self._routing, self._inner, self._return_ring, self._like = routing, inner, return_ring, like
        self._wires = wire, wire if later_wire is None else later_wire
        self._inner_hop: AnyHop | None = None
        self._outer_hop: AnyHop | None = None
        self._step = 0
        self._local: LocalGrads = []

    @property
    def single_last_hop(self) -> bool:
        """Whether a single hop follows the last block with another rank's rows, and gradients of own rows stay."""
        return self._outer is None and not self._start_at_owner and not self._full_turns

    def add(self, step: int, grads: Sequence[Tensor] | None, rows: slice) -> None:
        """Send on the gradients that have arrived, plus those of this step's block.

        ``grads`` are the block's gradients, None where there is no block; ``rows`` are their rows among those that
        arrived in this step.
        """
        self._step = step
        if step == 0 and not self._start_at_owner:
            assert grads is not None, "a token sees itself"
            self.keep(grads, rows)
            return
        if self._return_ring is not None and step > 1:
            return
        turn, inner_step = divmod(step, self._inner.size)
        if inner_step == 0 and self._full_turns:
            self.post_last_hop()
        message = self._sum_of_step(turn, step, grads, rows)
        if self._full_turns or self._outer is None or inner_step + 1 < self._inner.size:
            self._inner_hop = None if message is None else (self._return_ring or self._inner).post(message)
        else:
            self._inner_hop = None
            self._leave_inner_ring(turn, step, message)

    def keep(self, grads: Sequence[Tensor], rows: slice) -> None:
        """Keep gradients of ``rows`` of the rank itself, for `total`."""
        self._local.append((rows, grads))

    def post_last_hop(self) -> None:
        """Post the last hop of the sums, or of a full turn, once the hop before it has arrived.

        Blocks that are kept to the end overlap both hops: each is followed by this call; once posted, it does nothing.
        """
        if self._full_turns:
            if self._inner_hop is not None:
                sums: Message = self._inner_hop.wait()
                if self._outer_hop is not None:
                    for total, earlier in zip(sums.tensors, self._outer_hop.wait().tensors, strict=True):
                        accumulate(total, earlier)
                assert self._outer is not None
                self._inner_hop, self._outer_hop = None, self._outer.post(sums)
        elif self._outer_hop is not None:
            self._inner_hop, self._outer_hop = self._inner.post(self._outer_hop.wait()), None

    def receive(self) -> Message | None:
        """Return the sums for the rank's own rows, once they are back; None where none have travelled."""
        # Where no rank needs another's keys any more, the sums still go on to their owners.
        for _ in range(self._step + 1, self._inner.size if self._step else 0):
            assert self._inner_hop is not None
            self._inner_hop = self._inner.post(self._inner_hop.wait())
        self.post_last_hop()
        last_hop = self._outer_hop if self._full_turns else self._inner_hop
        return None if last_hop is None else last_hop.wait()

    def total(self, returned: Message | None) -> list[Tensor]:
        """Return the gradients of all rows of the rank: those it kept, plus those that `receive` returned.

        The sums are rounded once, to the type of the tensors.
        """
        if self._routing is None:
            return add_and_cast_all(returned, self._local, self._like[0].dtype)
        assert returned is not None, "some row has travelled"
        rank = self._inner.rank + (0 if self._outer is None else self._outer.rank * self._inner.size)
        ((_, own),) = self._local
        totals = []
        for total, x, like in zip(own, returned.tensors, self._like, strict=True):
            parts = self._routing.split_by_own_rows(rank, x)
            if total.dtype == like.dtype:
                # The parts have no row in common, so that each is added and rounded once.
                for rows, gradient in parts:
                    accumulate(part(total, rows), gradient)
            totals.append(total if total.dtype == like.dtype else add_and_cast(total, parts, like.dtype))
        return totals

    def _sum_of_step(self, turn: int, step: int, grads: Sequence[Tensor] | None, rows: slice) -> Message | None:
        """Return the gradients that have arrived plus those of a block; None where none of their rows leave."""
        routing, like = self._routing, self._like
        if routing is not None and not routing.inner_gradient_slices[step]:
            return None
        arrived: Message | None = None if self._inner_hop is None else self._inner_hop.wait()
        if routing is not None and arrived is not None:
            arrived = _widened(arrived, *routing.inner_gradient_slices[step - 1 : step + 1])
        with ring_step("bwd", step, "merge"):
            if routing is not None:
                count = len(routing.inner_gradient_slices[step])
                like = [x[:, :1].expand(-1, count, -1, -1) for x in like]
                rows = ALL if grads is None else routing.rows_in_gradients(rows, step)
            # A whole dQ of Burst is copied to start its way, also where it could be sent from where it is.
            copies = routing is None and len(like) == 1
            ring, wire = self._return_ring or self._inner, self._wires[turn > 0]
            return forward_grads(ring, arrived, grads, rows, like, wire, copies=copies)

    def _leave_inner_ring(self, turn: int, step: int, message: Message | None) -> None:
        """Send the gradients of this inner ring to the next one, added to those of the earlier inner rings."""
        if self._outer_hop is not None:
            earlier: Message = self._outer_hop.wait()
            if self._routing is None:
                assert message is not None
                with ring_step("bwd", step, "merge"):
                    for total, x in zip(message.tensors, earlier.tensors, strict=True):
                        accumulate(total, x)
            else:
                rows = self._routing.outer_gradient_slices
                earlier, latest = _widened(earlier, rows[turn - 1], rows[turn]), message
                message, first = earlier, self._routing.inner_gradient_slices[step].start - rows[turn].start
                with ring_step("bwd", step, "merge"):
                    for total, x in zip(earlier.tensors, latest.tensors if latest else (), strict=False):
                        accumulate(part(total, slice(first, first + x.shape[-3])), x)
        if message is not None:
            assert self._outer is not None
            self._outer_hop = self._outer.post(message)


def _widened(message: Message, held: range, target: range) -> Message:
    """Pad a message that holds the rows ``held`` with zeros, so that it holds the rows ``target``."""
    if held == target:
        return message
    padding = (0, 0, 0, 0, held.start - target.start, target.stop - held.stop)
    return Message.pack([pad(x, padding) for x in message.tensors])


def forward_grads(
    ring: HopRing, arrived: Message | None, grads: Sequence[Tensor] | None, rows: slice, like: Sequence[Tensor],
    wire: torch.dtype, *, copies: bool = False,
) -> Message:  # fmt: skip
    """Return the message to send next: the gradients that arrived, if any, plus those of a block.

    The gradients have the shapes of ``like`` and the type ``wire``; ``grads`` are those of the block's ``rows``. With
    ``copies`` they are never sent from where the block left them.
    """
    if arrived is None and grads is not None and rows == ALL and grads[0].dtype == wire and not copies:
        return Message.pack(grads)
    totals = ring.reserve(tuple((wire, x.shape) for x in like), like[0].device) if arrived is None else arrived
    add_block_grads(totals, grads, rows, first=arrived is None)
    return totals


def add_block_grads(totals: Message, grads: Sequence[Tensor] | None, rows: slice, *, first: bool = False) -> None:
    """Add the gradients of a block's ``rows`` to ``totals``, the sums that travel round the ring.

    The ``first`` block writes its gradients, and zeros in all other rows. ``grads`` are None where the mask leaves no
    block: nothing is added, and a ``first`` one writes zeros.
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


def add_and_cast_all(returned: Message | None, local: LocalGrads, dtype: torch.dtype) -> list[Tensor]:
    """Add the ``local`` gradients to those that returned, and cast the sums to ``dtype``.

    ``returned`` is None where none have travelled. The local gradients are overwritten.
    """
    if returned is None or (len(local) == 1 and local[0][0] == ALL):
        ((_, own),) = local
        for total, (gradient,) in zip(*_in_pairs(returned, [own]), strict=True) if returned else ():
            accumulate(gradient, total)
        return [gradient.to(dtype) for gradient in own]
    sums = [
        add_and_cast(total, list(zip([rows for rows, _ in local], gradients, strict=True)), dtype)
        for total, gradients in zip(*_in_pairs(returned, [grads for _, grads in local]), strict=True)
    ]
    # A sum of five dimensions is that of a pair.
    return sums if sums[0].dim() == 4 else list(sums[0])


def _in_pairs(message: Message, gradients: list[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return (tensors of the message, gradients of each block for each of them), as few tensors as possible.

    Where dK and dV of every block lie side by side in one tensor, that tensor stands for the pair: half as many kernels
    add them.
    """
    stacked = [side_by_side(*pair) if len(pair) == 2 else None for pair in gradients]
    whole = [x for x in stacked if x is not None]
    # A message of one dimension holds tensors of different sizes.
    if len(message.buffers) == 1 and message.buffers[0].dim() > 1 and len(whole) == len(stacked):
        return message.buffers, [whole]
    return message.tensors, [[pair[which] for pair in gradients] for which in range(len(message.tensors))]
