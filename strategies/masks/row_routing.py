"""Row routing: the K/V rows that each hop of a ring must carry, so that no rank sends rows nobody downstream needs.

The rows of a rank that others need (its keys, or its queries) form a few stretches. They lie side by side in a message.
A hop carries those rows of a message that any rank further along the ring still needs. Example: a sliding window over
the zigzag layout on 4 ranks, where rank 1 holds chunks b and g. Rank 2, one hop away, needs the end of b; rank 0, three
hops away, needs the end of g:

    hop 0   b-end g-end      rank 2 takes b-end
    hop 1         g-end
    hop 2         g-end      rank 0 takes it

Gradients lie at the same offsets. A hop of theirs carries the rows that the ranks so far have used: here b-end, and on
the way home both. All ranks' messages have the same offsets, so that the hops of a ring have equal sizes; where a rank
has nothing to send, the gap is filled.

On a ring of rings the steps are counted through all inner rings. Rows that ranks of the same inner ring need go on
there; rows that ranks of later inner rings need go on by the outer ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..transport.message import Message
from .layouts import ALL, Block, block_of, part
from .sharded_mask import ShardedMask

if TYPE_CHECKING:
    from ..transport.ring_channel import HopRing

_FINEST = 16
"""Stretches are joined where the gap between them is at most this fraction (1/16) of a rank's rows: each stretch costs
kernels that cut it out and put it back."""
_MOST = 0.75
"""Largest share of the bytes of whole shards for which rows travel alone. Above it whole shards travel, with nothing to
cut out and put back."""


class _Need(NamedTuple):
    """Rows of one rank, some of which are needed by the rank that they reach in a step."""

    first: int
    end: int
    step: int


class _Stretch(NamedTuple):
    """Consecutive rows of one rank, and the offset in rows at which they begin in its message."""

    first: int
    end: int
    offset: int


class RowRouting:
    """The rows that leave each rank of a ring, and which of them each hop carries."""

    def __init__(
        self, sharded_mask: ShardedMask, window: int, needs: Sequence[list[_Need]], gap: int, *, queries: bool
    ) -> None:
        """Lay out the messages; ``needs`` lists, per rank, the rows of it that others need.

        Needed rows that are at most ``gap`` rows apart become one stretch. With ``queries`` the queries travel, else
        the keys.
        """
        size = sharded_mask.size
        self._sharded_mask, self.window, self._queries = sharded_mask, window, queries
        self._blocks: dict[tuple[int, int], Block | None] = {}
        joined_needs = [_joined(needs_of_rank, gap) for needs_of_rank in needs]
        self._stretches, hulls = min(
            ((stretches, _Hulls(stretches, needs)) for stretches in (_dense(joined_needs), _by_reach(joined_needs))),
            key=lambda candidate: candidate[1].rows_sent(size, window),
        )
        local = sharded_mask.queries if queries else sharded_mask.keys
        self.share = hulls.rows_sent(size, window) / (2 * (size - 1) * local)
        """Rows sent, as a share of those that whole shards would send."""
        self.rows = hulls.of(0, size).stop
        """Rows of a complete message."""
        self.last_step = max(need.step for rank in needs for need in rank)
        """The last step in which a rank needs rows of another."""
        begins = range(0, size, window)
        steps = [(first, step) for first in begins for step in range(first, first + window)]
        self.inner_slices = [hulls.of(step + 1, first + window) for first, step in steps]
        """Rows of a message that travel on in the inner ring, per step."""
        self.outer_slices = [hulls.of(first + window, size) for first in begins]
        """Rows of a message that travel on to the next inner ring, per inner ring."""
        self.inner_gradient_slices = [hulls.of(first, step + 1) for first, step in steps]
        """Rows of the message's gradients that leave a rank, per step."""
        self.outer_gradient_slices = [hulls.of(0, first + window) for first in begins]
        """Rows of the message's gradients that leave the inner ring, per inner ring."""

    def received_rows(self, step: int) -> range:
        """Return the rows of another rank's message that are present in a step."""
        return self.inner_slices[step - 1] if step % self.window else self.outer_slices[step // self.window - 1]

    def pack_rows(self, rank: int, x: Tensor, dim: int = 1) -> Tensor:
        """Return the rows of ``x`` that leave ``rank``, in message order, as a view where they lie so in ``x``.

        Gaps are filled with any row. ``dim`` is the dimension of rows of ``x``.
        """
        stretches = self._stretches[rank]
        if len(stretches) == 1 and stretches[0].offset == 0 and stretches[0].first + self.rows <= x.shape[dim]:
            # Where a single stretch is all, nothing needs a copy: the rows that follow it fill the message up.
            return x if self.rows == x.shape[dim] else x.narrow(dim, stretches[0].first, self.rows)
        pieces, end, one_row = [], 0, x.narrow(dim, 0, 1)
        for stretch in [*stretches, _Stretch(0, 0, self.rows)]:
            filling = one_row.expand(*(stretch.offset - end if axis == dim else -1 for axis in range(x.dim())))
            pieces += [filling, x.narrow(dim, stretch.first, stretch.end - stretch.first)]
            end = stretch.offset + stretch.end - stretch.first
        return torch.cat(pieces, dim)

    def block(self, rank: int, sender: int) -> Block | None:
        """Return the block that ``rank`` computes with the rows it received from ``sender``; None where it needs none.

        The block counts these rows in the order in which they arrived.
        """
        key = rank, sender
        if key not in self._blocks:
            mask, window = self._sharded_mask, self.window
            # The step in which the rows of the sender reach the rank.
            step = (rank // window - sender // window) % (mask.size // window) * window + (rank - sender) % window
            count = len(self.received_rows(step))
            if self._queries:
                parts = [x.shifted(self._shift(sender, x.q_first, step), 0) for x in mask.parts(sender, rank)]
                self._blocks[key] = block_of(parts, count, mask.keys)
            else:
                parts = [x.shifted(0, self._shift(sender, x.kv_first, step)) for x in mask.parts(rank, sender)]
                self._blocks[key] = block_of(parts, mask.queries, count)
        return self._blocks[key]

    def _shift(self, rank: int, row: int, step: int) -> int:
        """Return the offset of ``rank``'s ``row`` among the rows received in a step, minus ``row``."""
        stretch = next(x for x in self._stretches[rank] if x.first <= row < x.end)
        return stretch.offset - stretch.first - self.received_rows(step).start

    def split_by_own_rows(self, rank: int, x: Tensor) -> list[tuple[slice, Tensor]]:
        """Split a complete message ``x`` into (rows of ``rank``, their part of the message)."""
        return [
            (slice(first, end), part(x, slice(offset, offset + end - first)))
            for first, end, offset in self._stretches[rank]
        ]

    def rows_in_gradients(self, rows: slice, step: int) -> slice:
        """Translate ``rows`` of those received in a step into rows of the gradients that leave after it."""
        received, outgoing = self.received_rows(step), self.inner_gradient_slices[step]
        if rows == ALL and received == outgoing:
            return rows
        start, end, _ = rows.indices(len(received))
        return slice(start + received.start - outgoing.start, end + received.start - outgoing.start)

    def tour(
        self, inner: HopRing, outer: HopRing | None, tensors: Sequence[Tensor], dims: Sequence[int] = ()
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (rank, tensors) step by step, like `HopRing.tour`: first this rank's whole tensors, then what arrives.

        The tensors of another rank hold only the rows that travel; the list is empty where nothing arrived. ``dims``
        are the dimensions of rows of the tensors, if these are not all 1.
        """
        dims = dims or [1] * len(tensors)
        position, ring_number = inner.rank, 0 if outer is None else outer.rank
        rank, handed_out = ring_number * self.window + position, list(tensors)
        current = inner.pack([self.pack_rows(rank, x, dim) for x, dim in zip(tensors, dims, strict=True)])
        received = range(self.rows)
        for turn, to_next_ring in enumerate(self.outer_slices):
            out = None
            if to_next_ring and outer is not None:
                out = outer.post(_narrowed(current, received, to_next_ring, dims))
            for inner_step in range(self.window):
                outgoing = self.inner_slices[turn * self.window + inner_step]
                hop = inner.post(_narrowed(current, received, outgoing, dims)) if outgoing else None
                sender_ring = (ring_number - turn) % len(self.outer_slices)
                yield sender_ring * self.window + (position - inner_step) % self.window, handed_out
                handed_out.clear()
                if hop is not None:
                    current.clear()
                    current, received = hop.wait(), outgoing
                    handed_out = list(current.tensors)
            if out is not None:
                current, received = out.wait(), to_next_ring
                handed_out = list(current.tensors)


def _narrowed(message: Message, held: range, target: range, dims: Sequence[int]) -> Message:
    """Cut a message that holds the rows ``held`` down to the rows ``target``."""
    if target == held:
        return message
    first = target.start - held.start
    return Message.pack([x.narrow(dim, first, len(target)) for x, dim in zip(message.tensors, dims, strict=True)])


def routing_of(sharded_mask: ShardedMask, window: int, *, queries: bool = False) -> RowRouting | None:
    """Select the keys, or ``queries``, that each hop carries over inner rings of ``window`` ranks.

    ``window`` divides the number of ranks. Returns None where no rows need to travel, and where so many do that whole
    shards are cheaper. The mask keeps the result.
    """
    key, known = (window, queries), sharded_mask.routings
    if key not in known:
        known[key] = _select_rows(sharded_mask, window, queries=queries)
    routing: RowRouting | None = known[key]
    return routing


def _select_rows(sharded_mask: ShardedMask, window: int, *, queries: bool) -> RowRouting | None:
    size, local = sharded_mask.size, sharded_mask.queries if queries else sharded_mask.keys
    ranks = range(size)

    def needed(rank: int, step: int) -> list[_Need]:
        other = (rank // window + step // window) * window % size + (rank + step) % window
        if queries:
            return _joined([_Need(x.q_first, x.q_end, step) for x in sharded_mask.parts(rank, other)], 0)
        return _joined([_Need(x.kv_first, x.kv_end, step) for x in sharded_mask.parts(other, rank)], 0)

    last = next((step for step in reversed(ranks[1:]) if any(needed(rank, step) for rank in ranks)), 0)
    # Often the whole shard of the last rank is still needed in the last step: checked first, that decides at once.
    if last > 1 and any(needed(rank, last) == [_Need(0, local, last)] for rank in reversed(ranks)):
        return None
    needs = [[need for step in range(1, last + 1) for need in needed(rank, step)] for rank in ranks]
    routing = RowRouting(sharded_mask, window, needs, local // _FINEST, queries=queries) if last else None
    if routing is None or routing.share <= _MOST:
        return routing
    # Even where whole shards travel, a single hop returns their gradients from the next rank.
    return RowRouting(sharded_mask, window, [[_Need(0, local, 1)]] * size, 0, queries=queries) if last == 1 else None


def _joined(needs: Sequence[_Need], gap: int) -> list[_Need]:
    """Join needs that overlap or are at most ``gap`` rows apart, sorted by row; a joined need has the latest step."""
    result: list[_Need] = []
    for need in sorted(needs):
        last = result.pop() if result and need.first <= result[-1].end + gap else need
        result.append(_Need(last.first, max(last.end, need.end), max(last.step, need.step)))
    return result


def _dense(needs: Sequence[list[_Need]]) -> list[list[_Stretch]]:
    """Lay out each rank's rows one after another, without gaps."""
    result = []
    for needs_of_rank in needs:
        offsets = accumulate((need.end - need.first for need in needs_of_rank), initial=0)
        result.append([
            _Stretch(need.first, need.end, offset) for need, offset in zip(needs_of_rank, offsets, strict=False)
        ])  # fmt: skip
    return result


def _by_reach(needs: Sequence[list[_Need]]) -> list[list[_Stretch]]:
    """Lay out the rows sorted by their last step.

    Rows that travel equally far begin at the same offset on all ranks.
    """
    result: list[list[_Stretch]] = [[] for _ in needs]
    begin = 0
    for reach in sorted({need.step for needs_of_rank in needs for need in needs_of_rank}):
        group = _dense([[need for need in needs_of_rank if need.step == reach] for needs_of_rank in needs])
        for stretches, added in zip(result, group, strict=True):
            stretches += [stretch._replace(offset=begin + stretch.offset) for stretch in added]
        begin += max(stretch.offset + stretch.end - stretch.first for added in group for stretch in added)
    return result


class _Hulls:
    """The message rows that ranks need in a range of steps, from the first such row to the last."""

    def __init__(self, stretches: list[list[_Stretch]], needs: Sequence[list[_Need]]) -> None:
        self._in: dict[int, tuple[int, int]] = {}
        """First row and end of the rows needed, by step."""
        for stretches_of_rank, needs_of_rank in zip(stretches, needs, strict=True):
            for need in needs_of_rank:
                stretch = next(x for x in stretches_of_rank if x.first <= need.first < x.end)
                shift = stretch.offset - stretch.first
                first, end = need.first + shift, need.end + shift
                low, high = self._in.get(need.step, (first, end))
                self._in[need.step] = min(low, first), max(high, end)

    def of(self, begin: int, end: int) -> range:
        """Return the rows needed in the steps ``begin`` to ``end`` - 1."""
        spans = [self._in[step] for step in range(begin, end) if step in self._in]
        return range(min((first for first, _ in spans), default=0), max((last for _, last in spans), default=0))

    def rows_sent(self, size: int, window: int) -> int:
        """Count the rows sent in the forward and the backward pass."""
        begins = range(0, size, window)
        inner = [(self.of(step + 1, a + window), self.of(a, step + 1)) for a in begins for step in range(a, a + window)]
        outer = [(self.of(a + window, size), self.of(0, a + window)) for a in begins if window < size]
        return sum(len(forward) + len(backward) for forward, backward in inner + outer)
