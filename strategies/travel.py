"""Which of a rank's keys travel round a ring, and how far: no more of them than some rank still needs.

What other ranks' queries see of a rank's keys are stretches of its rows, which lie side by side in a message. A hop
carries of it what any rank that is still to come needs. A window over the zigzag layout on 4 ranks, where rank 1 holds
chunks b and g: the end of b is needed by rank 2, one hop away, and that of g by rank 0, three hops away.

    hop 0   b-end g-end      rank 2 takes b-end
    hop 1         g-end
    hop 2         g-end      rank 0 takes it

Gradients have the same places: a hop of theirs carries what ranks so far had, here b-end, and on the way home both. All
ranks' messages have the same places, so that a ring's hops stay alike: where a rank has nothing it is filled up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .hops import Ring
from .layouts import Block, part
from .parcels import Parcel

if TYPE_CHECKING:
    from .cut import Cut

_FINEST = 64
"""Stretches that are closer than this part of a rank's rows are one."""


class _Need(NamedTuple):
    """Rows of a rank's keys that a rank so many hops away sees some of."""

    first: int
    end: int
    hops: int


class _Place(NamedTuple):
    """A stretch of a rank's rows, and where it begins in a message."""

    first: int
    end: int
    at: int


class Travel:
    """The rows that leave each rank of a ring, and what of them each hop carries."""

    def __init__(self, needs: Sequence[list[_Need]], gap: int) -> None:
        """``needs`` of each rank's rows by the others; what is at most ``gap`` rows apart is one stretch."""
        stretches = [_joined(one, gap) for one in needs]
        self._places, self.kv, self.dkv = min(
            (_with_hops(places, needs) for places in (_dense(stretches), _by_reach(stretches))),
            key=lambda found: sum(len(hop) for hops in found[1:] for hop in hops),
        )
        self.rows = self.kv[0].stop
        """Of a whole message."""

    def taken(self, rank: int, x: Tensor) -> Tensor:
        """The rows of ``x`` (B, S, H, D) that leave ``rank``, and any where it has none."""
        pieces, end = [], 0
        for one in [*self._places[rank], _Place(0, 0, self.rows)]:
            pieces += [part(x, slice(0, 1)).expand(-1, one.at - end, -1, -1), part(x, slice(one.first, one.end))]
            end = one.at + one.end - one.first
        return torch.cat(pieces, 1)

    def move(self, rank: int, row: int, hops: int) -> int:
        """How much further on in what comes from ``rank``, so many hops away, its ``row`` lies."""
        place = next(one for one in self._places[rank] if one.first <= row < one.end)
        return place.at - place.first - self.kv[hops - 1].start

    def home(self, rank: int, x: Tensor) -> list[tuple[slice, Tensor]]:
        """What of a whole message belongs to which rows of ``rank``."""
        return [(slice(first, end), part(x, slice(at, at + end - first))) for first, end, at in self._places[rank]]

    def in_message(self, block: Block, hops: int) -> Block:
        """The block of a rank so many hops away, its keys counted in the message of gradients that leaves it."""
        came, goes = self.kv[hops - 1], self.dkv[hops]
        start, end, _ = block.kv.indices(len(came))
        return Block(kv=slice(start + came.start - goes.start, end + came.start - goes.start))

    def tour(self, ring: Ring, steps: int, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """As `Ring.tour`: a rank's own tensors whole, and of the others' what travels."""
        handed_out = list(tensors)
        onward = Parcel.holding([self.taken(ring.rank, x) for x in tensors])
        for step in range(steps):
            hop = ring.post(onward) if step + 1 < steps else None
            yield (ring.rank - step) % ring.size, handed_out
            if hop is not None:
                passed, onward = onward, hop.wait()
                passed.clear()
                handed_out.clear()
                hop, handed_out = None, list(onward.tensors)
                came, goes = self.kv[step : step + 2]
                if 0 < len(goes) < len(came):
                    rows = slice(goes.start - came.start, goes.stop - came.start)
                    onward = Parcel.holding([part(x, rows) for x in handed_out])


def travel_of(cut: Cut) -> Travel | None:
    """What travels of a mask's keys; None where all rows do on every hop, or none."""
    local, needs = cut.seq // cut.size, list[list[_Need]]()
    # The first rank's last rows often see all of the last rank's: then that is known at once.
    for rank in reversed(range(cut.size)):
        needs.insert(0, [])
        for hops in reversed(range(1, cut.steps)):
            parts = cut.parts((rank + hops) % cut.size, rank)
            needs[0] += _joined([_Need(one.kv_first, one.kv_end, hops) for one in parts], 0)
            if 2 < cut.steps == hops + 1 and needs[0] == [_Need(0, local, hops)]:
                return None
    return Travel(needs, local // _FINEST) if any(needs) else None


def _joined(needs: Sequence[_Need], gap: int) -> list[_Need]:
    """Those that overlap, or are at most ``gap`` apart, as one, for the one farthest away; in their order."""
    found: list[_Need] = []
    for one in sorted(needs):
        last = found.pop() if found and one.first <= found[-1].end + gap else one
        found.append(_Need(last.first, max(last.end, one.end), max(last.hops, one.hops)))
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
    for reach in sorted({x.hops for rows in stretches for x in rows}):
        alike = _dense([[x for x in rows if x.hops == reach] for rows in stretches])
        for rows, places in zip(found, alike, strict=True):
            rows += [one._replace(at=begin + one.at) for one in places]
        begin += max(one.at + one.end - one.first for places in alike for one in places)
    return found


def _with_hops(
    places: list[list[_Place]], needs: Sequence[list[_Need]]
) -> tuple[list[list[_Place]], list[range], list[range]]:
    """What of a message each hop of keys and values carries, and what gradients bring that leave a rank so far away."""
    ranges = [
        (need.hops, place.at + need.first - place.first, place.at + need.end - place.first)
        for rows, others in zip(places, needs, strict=True) for need in others for place in rows
        if place.first <= need.first < place.end
    ]  # fmt: skip
    hops = range(len(places))
    kv = [_hull([(first, end) for away, first, end in ranges if away > hop]) for hop in hops]
    return places, kv, [_hull([(first, end) for away, first, end in ranges if away <= hop]) for hop in hops]


def _hull(ranges: list[tuple[int, int]]) -> range:
    return range(min((first for first, _ in ranges), default=0), max((end for _, end in ranges), default=0))
