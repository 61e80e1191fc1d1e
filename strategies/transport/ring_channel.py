"""Channels in which each rank sends to the next: a ring, and a ring of rings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ringprof.strategies.annotate import annotate
from ringprof.strategies.errors import Unsupported
from ringprof.strategies.transport.copy_engine import CopyHop, copy_ring, owned
from ringprof.strategies.transport.groups import by_nccl
from ringprof.strategies.transport.message import Message, Shapes

if TYPE_CHECKING:
    from ringprof.strategies.masks.row_routing import RowRouting
    from ringprof.strategies.transport.communicator import Communicator


def while_computing(kind: str) -> Any:
    """A collective's options as `torch.distributed` makes them of ``async_op=True``."""
    options = getattr(c10d, kind)()
    options.asyncOp = True
    return options


TRADE = while_computing("AllToAllOptions")
_MOST_NAMED = 30
"""Members to whom torch's profiler tells what goes: of more, a trace does not tell such a hop from an all-to-all."""


class Hop:
    """One transfer under way. `wait` returns what arrived, once."""

    def __init__(
        self, works: list[Any], sent: Sequence[Tensor], received: Any, channel: str = "", keeps: list[Any] | None = None
    ) -> None:
        """``keeps`` is what must outlive the wait for this one: it is over then, too."""
        self._works: list[Any] | None = works
        self._channel, self._keeps = channel, keeps
        # The tensors under way must outlive the transfer.
        self._sent = sent
        self._received = received

    def wait(self) -> Any:
        """What was received, usable by work queued after this call: a `Message` of a ring, the tensors of a collective.

        On GPU the host does not block: the current stream waits. Raises RuntimeError when called twice.
        """
        if self._works is None:
            raise RuntimeError("wait called twice on one hop")
        with annotate("wait", self._channel):
            for work in self._works:
                work.wait()
        if self._keeps:
            self._keeps.clear()
        # Held to here for the transfer's sake; freed before the next hop asks for room.
        received, self._works, self._sent, self._received = self._received, None, (), None
        return received


AnyHop = Hop | CopyHop


class HopRing:
    """A ring of ranks in which every hop goes from each member to the next."""

    def __init__(
        self, channel: str, members: Sequence[int], group: dist.ProcessGroup | None, comm: Communicator,
        *, keeps: bool = False,
    ) -> None:  # fmt: skip
        self.channel = channel
        self.size = len(members)
        self.rank = list(members).index(comm.rank)
        self.group = group
        self._meter = comm.meter
        following, previous = (comm.global_rank(members[(self.rank + step) % self.size]) for step in (1, -1))
        self._link = comm.hosts.link(comm.global_rank(comm.rank), following)
        comm.meter.goes_to[channel] = following
        self._peers, self._copies = (following, previous), None
        # gloo takes back what nobody holds, as hops that an exception left behind; the peers' next ones would hang.
        self._posted: list[Any] = []
        self.trades_on: str | None = None  # The type of device whose hops are all-to-alls.
        if group is not None:
            to, source = (dist.get_group_rank(group, rank) for rank in self._peers)
            self._splits = lru_cache(maxsize=4)(partial(_splits, self.size, source, to))
            self.trades_on = "cuda" if by_nccl() and self.size <= _MOST_NAMED else None
        same_host = len({comm.hosts.number(comm.global_rank(member)) for member in members}) == 1
        may_copy = comm.hops == "copy" or (comm.hops == "auto" and comm.can_copy)
        if may_copy and group is not None and same_host and not keeps:
            self._copies = copy_ring(channel, group, to, source, {rank: comm.processes[rank] for rank in self._peers})
        # A copy leaves no record of the rank that it goes to, so the range around it names that.
        self._copied_to = f"{channel}/to={following}"
        self.copied = self._copies is not None
        """Whether copy engines carry the hops."""

    def post(self, parcel: Message, *, into: Message | None = None) -> AnyHop:
        """Start sending a parcel to the next member and receiving the like from the previous one.

        All that is in it travels in one batch: one kernel with NCCL. It must not be written to before `Hop.wait`.
        ``into`` is where to receive, on a ring that keeps; otherwise room is made, which may be used until the second
        next hop is posted.
        """
        if self.size == 1:
            return Hop([], parcel.messages, parcel)
        parcel = owned(parcel, self._copies)
        if self._copies is not None:
            assert into is None, "copy engines write where they may, not where they are told"
            self._meter.add(self.channel, "copy", self._link, parcel.size_bytes)
            with annotate("send", self._copied_to):
                # A parcel of the hop's own: a tour clears the caller's, which another ring may still send.
                return self._copies.post(parcel.over(list(parcel.messages)))
        arriving = parcel.room() if into is None else into
        self._meter.add(self.channel, "send_recv", self._link, parcel.size_bytes)
        with annotate("send", self.channel):
            works = self._exchange(parcel.messages, arriving.messages)
        return Hop(works, parcel.messages, arriving, self.channel, self._posted)

    def begun(self, shapes: Shapes, device: torch.device) -> Message:
        """Room for what is posted next here, not initialised: the slot that is free now, where there are slots."""
        return Message.empty(shapes, partial(_fresh, device) if self._copies is None else self._copies.free_slot)

    def parcel(self, tensors: Sequence[Tensor]) -> Message:
        """Tensors as they are to travel here: for NCCL in one message, while copy engines fetch them where they are."""
        if self.copied and all([tensor.is_contiguous() for tensor in tensors]):
            return Message(list(tensors))
        return Message.holding(tensors)

    def _exchange(self, outgoing: list[Tensor], incoming: list[Tensor]) -> list[Any]:
        """Start sending and receiving: by NCCL as an all-to-all in which a member has something for the next alone.

        That is one call, where a batch of a send and a receive is four, and the same kernel.
        """
        pairs = zip(outgoing, incoming, strict=True)
        if outgoing[0].device.type == self.trades_on:
            group: Any = self.group
            return [group.alltoall_base(into, out, *self._splits(out.shape[0]), TRADE) for out, into in pairs]
        to, source = self._peers
        ops = [
            (dist.P2POp(dist.isend, x, to, self.group), dist.P2POp(dist.irecv, y, source, self.group)) for x, y in pairs
        ]
        works = dist.batch_isend_irecv([op for pair in ops for op in pair])
        self._posted += works
        return works

    def tour(self, tensors: Sequence[Tensor] | Message, steps: int | None = None) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (position, tensors) of every member, this rank's own first, then the previous member's, and so on.

        Of the first ``steps`` alone where they are given: no more hops are made.

        Each hop is posted before the tensors that it carries on are handed out, so that what the caller computes with
        them hides it. A list that was handed out is empty when the next one comes: whoever still held the tensors then
        would hold a third set beside the two of the next hop.
        """
        if self.size == 1:
            yield self.rank, list(tensors.tensors if isinstance(tensors, Message) else tensors)
            return
        current = tensors if isinstance(tensors, Message) else self.parcel(tensors)
        # A rank's own are handed out as they came, where they lie as the others' will: dense.
        own = None if isinstance(tensors, Message) or not all([x.is_contiguous() for x in tensors]) else tensors
        steps = steps or self.size
        for step in range(steps):
            hop = self.post(current) if step + 1 < steps else None
            handed_out = list(own if own is not None and step == 0 else current.tensors)
            yield (self.rank - step) % self.size, handed_out
            if hop is not None:
                passed, current = current, hop.wait()
                passed.clear()
                handed_out.clear()
                hop = None


def _splits(size: int, source: int, to: int, rows: int) -> list[list[int]]:
    """How many ``rows`` come from each member, and go to each."""
    return [[rows if place == peer else 0 for place in range(size)] for peer in (source, to)]


def _fresh(device: torch.device, shapes: Shapes) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes]


class DoubleRing:
    """A ring of rings: windows of ``window`` consecutive ranks, and rings of the ranks with the same place in each.

    With as many ranks in a window as there are, it is the plain ring. ``members`` are all ranks where not given.
    """

    def __init__(self, comm: Communicator, channel: str, window: int, members: Sequence[int] | None = None) -> None:
        members = list(range(comm.size)) if members is None else list(members)
        if window < 1 or len(members) % window:
            whole = "the world size" if len(members) == comm.size else "the ring of"
            raise Unsupported(f"ring_window {window} does not divide {whole} {len(members)}")
        self.window = window
        self.size, self.rank = len(members), members.index(comm.rank)
        first, place = self.rank // window * window, self.rank % window
        self.inner = comm.ring(f"{channel}_inner", members[first : first + window])
        self.outer = comm.ring(f"{channel}_outer", members[place::window])

    def tour(
        self, tensors: Sequence[Tensor], routing: RowRouting | None = None, dims: Sequence[int] = ()
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """As `HopRing.tour` over all ranks: each window's hops on the inner ring, one hop a window on the outer ring.

        The outer hop carries what the window began with and has the whole window to arrive. Of a ``travel`` what it
        says, as `RowRouting.tour`.
        """
        if routing is not None:
            yield from routing.tour(self.inner, self.outer, tensors, dims)
            return
        if self.size == 1:
            yield 0, list(tensors)
            return
        windows = self.size // self.window
        current = Message.holding(tensors)
        for turn in range(windows):
            hop = self.outer.post(current) if turn + 1 < windows else None
            home_window = (self.outer.rank - turn) % windows
            for place, travelled in self.inner.tour(current):
                yield home_window * self.window + place, travelled
            if hop is not None:
                current = hop.wait()
