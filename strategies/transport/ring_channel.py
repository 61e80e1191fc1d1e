"""Channels in which each rank sends to the next: a ring, and a ring of rings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..annotate import annotate
from ..errors import Unsupported
from .copy_engine import CopyHop, copy_if_in_other_slot, copy_ring
from .groups import uses_nccl
from .hosts import Hosts
from .message import Message, Shapes
from .meter import Meter


def async_options(kind: str) -> Any:
    """Return a collective's options of the class ``kind``, as `torch.distributed` makes them for ``async_op=True``."""
    options = getattr(c10d, kind)()
    options.asyncOp = True
    return options


ALL_TO_ALL_OPTIONS = async_options("AllToAllOptions")
_MOST_NAMED = 30
"""Largest ring, in members, whose hops are sent as all-to-alls. Up to this size torch's profiler records how much goes
to each member; beyond it a trace does not tell such a hop from a real all-to-all."""


class Hop:
    """One transfer in flight. `wait` returns what arrived, once."""

    def __init__(
        self, works: list[Any], sent: Sequence[Tensor], received: Any, channel: str = "", keeps: list[Any] | None = None
    ) -> None:
        """Hold ``sent`` and ``received`` until `wait`, which also clears ``keeps``: works held for this transfer."""
        self._works: list[Any] | None = works
        self._channel, self._keeps = channel, keeps
        # The tensors in flight must outlive the transfer.
        self._sent = sent
        self._received = received

    def wait(self) -> Any:
        """Return what was received: a `Message` of a ring, a list of tensors of a collective.

        Work queued after this call can use it. On a GPU the host does not block; the current stream waits. Raises
        RuntimeError when called twice.
        """
        if self._works is None:
            raise RuntimeError("wait called twice on one hop")
        with annotate("wait", self._channel):
            for work in self._works:
                work.wait()
        if self._keeps:
            self._keeps.clear()
        # Held until here because the transfer needs it; freed before the next hop allocates memory.
        received, self._works, self._sent, self._received = self._received, None, (), None
        return received


AnyHop = Hop | CopyHop


class RankGroup(Protocol):
    """A group of ranks as rings and collectives see it; a `Communicator` is one."""

    rank: int
    size: int
    hops: str
    can_copy: bool
    meter: Meter
    hosts: Hosts
    processes: dict[int, int | None]

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a position in the group."""

    def ring(self, channel: str, members: Sequence[int] | None = None) -> HopRing:
        """Return the ring of these members under this name."""


class Routing(Protocol):
    """A choice of the rows that each hop carries, such as `RowRouting`."""

    def tour(
        self, inner: HopRing, outer: HopRing | None, tensors: Sequence[Tensor], dims: Sequence[int] = ()
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (position, tensors) of every member whose rows this rank needs."""


class HopRing:
    """A ring of ranks in which every hop goes from each member to the next."""

    def __init__(
        self, channel: str, members: Sequence[int], group: dist.ProcessGroup | None, comm: RankGroup,
        *, keeps: bool = False,
    ) -> None:  # fmt: skip
        """Set up this rank's hops; with ``keeps``, received memory stays valid for as long as it is referenced.

        ``members`` are positions in the communicator's group, in the order of the ring.
        """
        self.channel = channel
        self.size = len(members)
        self.rank = list(members).index(comm.rank)
        self.group = group
        self._meter = comm.meter
        following, previous = (comm.global_rank(members[(self.rank + step) % self.size]) for step in (1, -1))
        self._link = comm.hosts.link(comm.global_rank(comm.rank), following)
        comm.meter.goes_to[channel] = following
        self._peers, self._copies = (following, previous), None
        # gloo cancels a transfer whose work nobody holds, such as one abandoned by an exception; the peers would hang.
        self._posted: list[Any] = []
        self.all_to_all_device: str | None = None  # Device type whose hops are sent as all-to-alls.
        if group is not None:
            to, source = (dist.get_group_rank(group, rank) for rank in self._peers)
            self._splits = lru_cache(maxsize=4)(partial(_splits, self.size, source, to))
            self.all_to_all_device = "cuda" if uses_nccl() and self.size <= _MOST_NAMED else None
        same_host = len({comm.hosts.number(comm.global_rank(member)) for member in members}) == 1
        may_copy = comm.hops == "copy" or (comm.hops == "auto" and comm.can_copy)
        if may_copy and group is not None and same_host and not keeps:
            self._copies = copy_ring(channel, group, to, source, {rank: comm.processes[rank] for rank in self._peers})
        # A trace of a copy does not record the destination rank, so the range around it names the rank.
        self._copied_to = f"{channel}/to={following}"
        self.copied = self._copies is not None
        """Whether copy engines carry the hops."""

    def post(self, message: Message, *, into: Message | None = None) -> AnyHop:
        """Start sending a message to the next member and receiving one of the same shapes from the previous member.

        All buffers of the message travel in one batch: one kernel with NCCL. They must not be written to before
        `Hop.wait`. On a ring that keeps what it receives, ``into`` says where to receive. Otherwise the memory is
        allocated here, and may be used until the second next hop is posted.
        """
        if self.size == 1:
            return Hop([], message.buffers, message)
        message = copy_if_in_other_slot(message, self._copies)
        if self._copies is not None:
            assert into is None, "copy engines write where they may, not where they are told"
            self._meter.add(self.channel, "copy", self._link, message.size_bytes)
            with annotate("send", self._copied_to):
                # The hop gets its own message: a tour clears the caller's, which another ring may still be sending.
                return self._copies.post(message.with_buffers(list(message.buffers)))
        arriving = message.empty_like() if into is None else into
        self._meter.add(self.channel, "send_recv", self._link, message.size_bytes)
        with annotate("send", self.channel):
            works = self._exchange(message.buffers, arriving.buffers)
        return Hop(works, message.buffers, arriving, self.channel, self._posted)

    def reserve(self, shapes: Shapes, device: torch.device) -> Message:
        """Return an uninitialised message to be posted next on this ring: the free slot, where the ring has slots."""
        return Message.empty(shapes, partial(_allocate, device) if self._copies is None else self._copies.free_slot)

    def pack(self, tensors: Sequence[Tensor]) -> Message:
        """Pack tensors for this ring: one buffer for NCCL; copy engines copy contiguous tensors from where they lie."""
        if self.copied and all([tensor.is_contiguous() for tensor in tensors]):
            return Message(list(tensors))
        return Message.pack(tensors)

    def _exchange(self, outgoing: list[Tensor], incoming: list[Tensor]) -> list[Any]:
        """Start sending and receiving. With NCCL that is an all-to-all in which each member sends only to the next.

        An all-to-all is one call and the same kernel; a batch of a send and a receive is four calls.
        """
        pairs = zip(outgoing, incoming, strict=True)
        if outgoing[0].device.type == self.all_to_all_device:
            group: Any = self.group
            return [
                group.alltoall_base(into, out, *self._splits(out.shape[0]), ALL_TO_ALL_OPTIONS) for out, into in pairs
            ]
        to, source = self._peers
        ops = [
            (dist.P2POp(dist.isend, x, to, self.group), dist.P2POp(dist.irecv, y, source, self.group)) for x, y in pairs
        ]
        works = dist.batch_isend_irecv([op for pair in ops for op in pair])
        self._posted += works
        return works

    def tour(self, tensors: Sequence[Tensor] | Message, steps: int | None = None) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (position, tensors) of every member: this rank's own first, then the previous member's, and so on.

        With ``steps``, stop after that many members; no further hops are made. Each hop is posted before the tensors
        that it sends on are yielded, so that the caller's computation hides it. A yielded list is emptied when the next
        one comes: a reference kept longer would hold a third set of tensors, beside the two of the next hop.
        """
        if self.size == 1:
            yield self.rank, list(tensors.tensors if isinstance(tensors, Message) else tensors)
            return
        current = tensors if isinstance(tensors, Message) else self.pack(tensors)
        # The rank's own tensors are yielded as they came if they are dense, as the others' are.
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
    """Return how many ``rows`` come from each member, and how many go to each."""
    return [[rows if member == peer else 0 for member in range(size)] for peer in (source, to)]


def _allocate(device: torch.device, shapes: Shapes) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes]


class DoubleRing:
    """A ring of rings: each inner ring has ``window`` consecutive ranks, each outer ring one rank of every inner ring.

    A window of all ranks makes it the plain ring. ``members`` are all ranks by default.
    """

    def __init__(self, comm: RankGroup, channel: str, window: int, members: Sequence[int] | None = None) -> None:
        """Make both rings. Raises `Unsupported` where ``window`` does not divide the number of members."""
        members = list(range(comm.size)) if members is None else list(members)
        if window < 1 or len(members) % window:
            whole = "the world size" if len(members) == comm.size else "the ring of"
            raise Unsupported(f"ring_window {window} does not divide {whole} {len(members)}")
        self.window = window
        self.size, self.rank = len(members), members.index(comm.rank)
        first, position = self.rank // window * window, self.rank % window
        self.inner = comm.ring(f"{channel}_inner", members[first : first + window])
        self.outer = comm.ring(f"{channel}_outer", members[position::window])

    def tour(
        self, tensors: Sequence[Tensor], routing: Routing | None = None, dims: Sequence[int] = ()
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (position, tensors) of every member, like `HopRing.tour`.

        Each window makes its hops on the inner ring and one hop on the outer ring. The outer hop carries what the
        window began with, and has the whole window to arrive. With a ``routing`` the hops carry only its rows; see
        `Routing.tour`.
        """
        if routing is not None:
            yield from routing.tour(self.inner, self.outer, tensors, dims)
            return
        if self.size == 1:
            yield 0, list(tensors)
            return
        windows = self.size // self.window
        current = Message.pack(tensors)
        for turn in range(windows):
            hop = self.outer.post(current) if turn + 1 < windows else None
            sender_window = (self.outer.rank - turn) % windows
            for position, travelled in self.inner.tour(current):
                yield sender_window * self.window + position, travelled
            if hop is not None:
                current = hop.wait()
