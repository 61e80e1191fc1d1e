"""Which rows of a rank travel round a ring, and how far: no more of them than some rank still needs.

What other ranks' queries see of a rank's keys, or other ranks' keys are seen by of its queries, are stretches of its
rows, which lie side by side in a message. A hop carries of it what any rank that is still to come needs. A window over
the zigzag layout on 4 ranks, where rank 1 holds chunks b and g: the end of b is needed by rank 2, one hop away, and
that of g by rank 0, three hops away.

    hop 0   b-end g-end      rank 2 takes b-end
    hop 1         g-end
    hop 2         g-end      rank 0 takes it

Gradients have the same places: a hop of theirs carries what ranks so far had, here b-end, and on the way home both. All
ranks' messages have the same places, so that a ring's hops stay alike: where a rank has nothing it is filled up.

On a ring of rings steps are counted through: what ranks of the same inner ring need goes on there, and what those of
later ones need goes to the next on the outer ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ringprof.strategies.masks.layouts import ALL, Block, block_of, part
from ringprof.strategies.transport.message import Message

if TYPE_CHECKING:
    from ringprof.strategies.masks.sharded_mask import ShardedMask
    from ringprof.strategies.transport.ring_channel import HopRing

_FINEST = 16
"""Stretches that are closer than this part of a rank's rows are one: each is cut out and put back by kernels."""
_MOST = 0.75
"""Of what whole shards would be; where more would travel they go whole, with nothing to cut and put back."""


class _Need(NamedTuple):
    """Rows of which the rank to which they come in a step needs some."""

    first: int
    end: int
    step: int


class _Place(NamedTuple):
    """A stretch of a rank's rows, and where it begins in a message."""

    first: int
    end: int
    at: int


class RowRouting:
    """The rows that leave each rank of a ring, and what of them each hop carries."""

    def __init__(self, cut: ShardedMask, window: int, needs: Sequence[list[_Need]], gap: int, *, queries: bool) -> None:
        """``needs`` of each rank's rows by the others; what is at most ``gap`` rows apart is one stretch."""
        self._cut, self.window, self._queries = cut, window, queries
        self._blocks: dict[tuple[int, int], Block | None] = {}
        stretches = [_joined(one, gap) for one in needs]
        self._places, hulls = min(
            ((places, _Hulls(places, needs)) for places in (_dense(stretches), _by_reach(stretches))),
            key=lambda found: found[1].rows_sent(cut.size, window),
        )
        self.share = hulls.rows_sent(cut.size, window) / (2 * (cut.size - 1) * (cut.queries if queries else cut.keys))
        """Of what whole shards would be."""
        self.rows = hulls.of(0, cut.size).stop
        """Of a whole message."""
        self.last_step = max(need.step for rank in needs for need in rank)
        begins = range(0, cut.size, window)
        self.onward = [hulls.of(step + 1, first + window) for first in begins for step in range(first, first + window)]
        """What of a message goes on in the inner ring after each step."""
        self.outward = [hulls.of(first + window, cut.size) for first in begins]
        """And to each next inner ring."""
        self.back = [hulls.of(first, step + 1) for first in begins for step in range(first, first + window)]
        """What of the message's gradients leaves a rank after each step."""
        self.back_outward = [hulls.of(0, first + window) for first in begins]
        """And each inner ring."""

    def held(self, step: int) -> range:
        """What of another rank's message is there in a step."""
        return self.onward[step - 1] if step % self.window else self.outward[step // self.window - 1]

    def taken(self, rank: int, x: Tensor, dim: int = 1) -> Tensor:
        """The rows of ``x``, in its dimension ``dim``, that leave ``rank``, and any where it has none."""
        if self._places[rank] == [_Place(0, x.shape[dim], 0)]:
            return x
        pieces, end, one_row = [], 0, x.narrow(dim, 0, 1)
        for one in [*self._places[rank], _Place(0, 0, self.rows)]:
            filling = one_row.expand(*(one.at - end if at == dim else -1 for at in range(x.dim())))
            pieces += [filling, x.narrow(dim, one.first, one.end - one.first)]
            end = one.at + one.end - one.first
        return torch.cat(pieces, dim)

    def block(self, rank: int, sender: int) -> Block | None:
        """What ``rank`` computes with the rows that came from another, these counted as they came."""
        key = rank, sender
        if key not in self._blocks:
            self._blocks[key] = self._block(*key)
        return self._blocks[key]

    def _block(self, rank: int, sender: int) -> Block | None:
        cut, step = self._cut, step_of(sender, rank, self._cut.size, self.window)
        if self._queries:
            parts = [one.moved(self._move(sender, one.q_first, step), 0) for one in cut.parts(sender, rank)]
            return block_of(parts, len(self.held(step)), cut.keys)
        parts = [one.moved(0, self._move(sender, one.kv_first, step)) for one in cut.parts(rank, sender)]
        return block_of(parts, cut.queries, len(self.held(step)))

    def _move(self, rank: int, row: int, step: int) -> int:
        """How much further on in what comes from ``rank`` its ``row`` lies."""
        place = next(one for one in self._places[rank] if one.first <= row < one.end)
        return place.at - place.first - self.held(step).start

    def home(self, rank: int, x: Tensor) -> list[tuple[slice, Tensor]]:
        """What of a whole message belongs to which rows of ``rank``."""
        return [(slice(first, end), part(x, slice(at, at + end - first))) for first, end, at in self._places[rank]]

    def in_gradients(self, rows: slice, step: int) -> slice:
        """Rows of what is there in a step, counted in the message of gradients that leaves after it."""
        came, goes = self.held(step), self.back[step]
        if rows == ALL and came == goes:
            return rows
        start, end, _ = rows.indices(len(came))
        return slice(start + came.start - goes.start, end + came.start - goes.start)

    def tour(
        self, inner: HopRing, outer: HopRing | None, tensors: Sequence[Tensor], dims: Sequence[int] = ()
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """As `HopRing.tour`: a rank's own tensors whole, and of the others' what travels; none where nothing came.

        ``dims`` are the tensors' dimensions of rows, where these are not all the second.
        """
        dims = dims or [1] * len(tensors)
        place, home = inner.rank, 0 if outer is None else outer.rank
        rank, handed_out = home * self.window + place, list(tensors)
        current = inner.parcel([self.taken(rank, x, dim) for x, dim in zip(tensors, dims, strict=True)])
        came = range(self.rows)
        for turn, outward in enumerate(self.outward):
            out = outer.post(_cut_to(current, came, outward, dims)) if outward and outer is not None else None
            for inner_step in range(self.window):
                goes = self.onward[turn * self.window + inner_step]
                hop = inner.post(_cut_to(current, came, goes, dims)) if goes else None
                sender = (home - turn) % len(self.outward) * self.window + (place - inner_step) % self.window
                yield sender, handed_out
                handed_out.clear()
                if hop is not None:
                    current.clear()
                    current, came = hop.wait(), goes
                    handed_out = list(current.tensors)
            if out is not None:
                current, came = out.wait(), outward
                handed_out = list(current.tensors)


def _cut_to(parcel: Message, came: range, goes: range, dims: Sequence[int]) -> Message:
    """Of the rows that came those that go on."""
    if goes == came:
        return parcel
    first = goes.start - came.start
    return Message.holding([x.narrow(dim, first, len(goes)) for x, dim in zip(parcel.tensors, dims, strict=True)])


def step_of(sender: int, rank: int, size: int, window: int) -> int:
    """The step in which what ``sender`` sends round comes to ``rank``."""
    return (rank // window - sender // window) % (size // window) * window + (rank - sender) % window


def routing_of(cut: ShardedMask, window: int, *, queries: bool) -> RowRouting | None:
    """What travels of a mask's keys, or queries, over inner rings of ``window`` ranks; None where most do, or none."""
    ranks, local = range(cut.size), cut.queries if queries else cut.keys

    def needed(rank: int, step: int) -> list[_Need]:
        other = (rank // window + step // window) * window % cut.size + (rank + step) % window
        if queries:
            return _joined([_Need(one.q_first, one.q_end, step) for one in cut.parts(rank, other)], 0)
        return _joined([_Need(one.kv_first, one.kv_end, step) for one in cut.parts(other, rank)], 0)

    last = next((step for step in reversed(ranks[1:]) if any(needed(rank, step) for rank in ranks)), 0)
    # The first rank's last rows often see all of the last rank's: then that is known at once.
    if last > 1 and any(needed(rank, last) == [_Need(0, local, last)] for rank in reversed(ranks)):
        return None
    needs = [[one for step in range(1, last + 1) for one in needed(rank, step)] for rank in ranks]
    routing = RowRouting(cut, window, needs, local // _FINEST, queries=queries) if last else None
    if routing is None or routing.share <= _MOST:
        return routing
    # Of whole shards gradients still go straight home from the next rank.
    return RowRouting(cut, window, [[_Need(0, local, 1)]] * cut.size, 0, queries=queries) if last == 1 else None


def _joined(needs: Sequence[_Need], gap: int) -> list[_Need]:
    """Those that overlap, or are at most ``gap`` apart, as one, for the latest of their steps; in their order."""
    found: list[_Need] = []
    for one in sorted(needs):
        last = found.pop() if found and one.first <= found[-1].end + gap else one
        found.append(_Need(last.first, max(last.end, one.end), max(last.step, one.step)))
    return found


def _dense(stretches: Sequence[list[_Need]]) -> list[list[_Place]]:
    """One after the other."""
    found = []
    for rows in stretches:
        begins = accumulate((one.end - one.first for one in rows), initial=0)
        found.append([_Place(one.first, one.end, at) for one, at in zip(rows, begins, strict=False)])
    return found


def _by_reach(stretches: Sequence[list[_Need]]) -> list[list[_Place]]:
    """The same, but at the same place on all ranks what goes equally far."""
    found: list[list[_Place]] = [[] for _ in stretches]
    begin = 0
    for reach in sorted({x.step for rows in stretches for x in rows}):
        alike = _dense([[x for x in rows if x.step == reach] for rows in stretches])
        for rows, places in zip(found, alike, strict=True):
            rows += [one._replace(at=begin + one.at) for one in places]
        begin += max(one.at + one.end - one.first for places in alike for one in places)
    return found


class _Hulls:
    """What of the messages ranks need in some steps, from the first row to the last."""

    def __init__(self, places: list[list[_Place]], needs: Sequence[list[_Need]]) -> None:
        self._in: dict[int, tuple[int, int]] = {}
        for rows, others in zip(places, needs, strict=True):
            for need in others:
                place = next(one for one in rows if one.first <= need.first < one.end)
                first, end = need.first + place.at - place.first, need.end + place.at - place.first
                low, high = self._in.get(need.step, (first, end))
                self._in[need.step] = min(low, first), max(high, end)

    def of(self, begin: int, end: int) -> range:
        """In these steps, but the last one."""
        found = [self._in[step] for step in range(begin, end) if step in self._in]
        return range(min((first for first, _ in found), default=0), max((last for _, last in found), default=0))

    def rows_sent(self, size: int, window: int) -> int:
        """There and back."""
        begins = range(0, size, window)
        inner = [(self.of(step + 1, a + window), self.of(a, step + 1)) for a in begins for step in range(a, a + window)]
        outer = [(self.of(a + window, size), self.of(0, a + window)) for a in begins if window < size]
        return sum(len(there) + len(back) for there, back in inner + outer)
