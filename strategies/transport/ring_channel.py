"""Channels: a ring, a ring of rings, a line of ranks and collectives; and what every channel consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from ..annotate import annotate
from ..errors import Unsupported
from .copy_engine import CopyHop
from .groups import waiting
from .hosts import OTHER_HOST, SAME_HOST, Hosts
from .message import Message, MessageLayout, Shapes, layout_of, shapes_of


class Hop:
    """One transfer in flight. `wait` returns what arrived, once."""

    def __init__(self, works: list[Any], sent: Sequence[Tensor], received: Any, channel: str = "") -> None:
        """Hold ``sent`` and ``received`` until `wait`."""
        self._works: list[Any] | None = works
        self._channel = channel
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
        waiting.add(self)
        try:
            with annotate("wait", self._channel):
                for work in self._works:
                    work.wait()
        finally:
            waiting.discard(self)
        # Held until here because the transfer needs it; freed before the next hop allocates memory.
        received, self._works, self._sent, self._received = self._received, None, (), None
        return received


@dataclass
class Meter:
    """Counts and bytes of what this rank has sent."""

    phase: str = "forward"
    goes_to: dict[str, int] = field(default_factory=dict)
    """The global rank that the hops of a channel go to."""
    sent: dict[tuple[str, str, str, str], list[int]] = field(default_factory=dict)
    """[count, bytes] by (channel, phase, operation, link)."""
    operations: int = 0
    """Number of times that something was counted, which `clear` does not reset."""
    compares: bool = False
    """Whether this rank compares its next hop with those of the other ranks, and may be waiting for them."""

    def add(self, channel: str, operation: str, link: str, size_bytes: int, count: int = 1) -> None:
        """Add ``count`` operations of ``size_bytes`` together, in the current phase."""
        entry = self.sent.setdefault((channel, self.phase, operation, link), [0, 0])
        self.operations += 1
        self.compares = False
        entry[0] += count
        entry[1] += size_bytes

    def clear(self) -> None:
        """Reset the counts."""
        self.sent.clear()


AnyHop = Hop | CopyHop


class Transport(Protocol):
    """Carrier of the transfers of one channel: torch.distributed, copy engines, or a fake that sends nothing.

    A transport that sends also counts what it sends, in the channel's meter.
    """

    free_slot: Callable[[MessageLayout], list[Tensor]] | None
    """Memory to write the next message to, where copy engines send from memory of their own; else None."""

    def hop(self, ring: Channel, message: Message, into: Message | None) -> AnyHop:
        """Start a hop on a ring of several ranks; the arguments are those of `HopRing.post`."""

    def collective(self, channel: Channel, operation: str, tensor: Tensor) -> Hop:
        """Start the `Collective` method called ``operation`` among several ranks; ``tensor`` is contiguous."""

    def send(self, chain: Channel, tensor: Tensor) -> Hop:
        """Start to send a contiguous tensor to the next rank of a `Chain`."""

    def receive(self, chain: Channel, like: Tensor) -> Tensor:
        """Receive a contiguous tensor like ``like`` from the previous rank of a `Chain`; wait for it."""


Connect = Callable[["Channel", "RankGroup", Transport | None, bool], Transport]
"""A function or a class that returns the transport of a new channel of a communicator; collective over the channel.

The last arguments are ``shares``, as the transport of that channel, and ``keeps`` of `Communicator.ring`. ``keeps`` is
True for collectives, which always keep what they receive."""


class RankGroup(Protocol):
    """A group of ranks as channels see it; a `Communicator` is one."""

    rank: int
    size: int
    hops: str
    can_copy: bool
    meter: Meter
    hosts: Hosts
    processes: dict[int, int | None]
    group: Any
    token: str
    connect: Connect
    channels: list[ref[Channel]]

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


class Channel:
    """Ranks that send to each other under one name, and the transport between them."""

    def __init__(
        self, channel: str, members: Sequence[int], comm: RankGroup, *,
        shares: Channel | None = None, keeps: bool = False,
    ) -> None:  # fmt: skip
        """Connect this rank; ``members`` are positions in the communicator's group, in the order of the ring."""
        self.channel, self.meter, self.hosts = channel, comm.meter, comm.hosts
        self.size, self.rank = len(members), list(members).index(comm.rank)
        self.ranks = tuple(map(comm.global_rank, members))
        """Global ranks of the members."""
        self.following, self.previous = (self.ranks[(self.rank + step) % self.size] for step in (1, -1))
        self.link = self.hosts.link(self.ranks[self.rank], self.following)
        self.comm, self._shares, self._keeps = comm, shares, keeps
        comm.channels.append(ref(self))
        self.connect()

    def connect(self) -> None:
        """Connect this rank to the others, once more where the ranks have recovered. Collective over the members."""
        shared = None if self._shares is None else self._shares.transport
        self.transport: Transport = self.comm.connect(self, self.comm, shared, self._keeps)

    @cached_property
    def links(self) -> list[str]:
        """Class of the link to every other member in ring order, the next member first."""
        others = (self.ranks[(self.rank + step) % self.size] for step in range(1, self.size))
        return [self.hosts.link(self.ranks[self.rank], other) for other in others]

    def count_collective(self, operation: str, piece_bytes: int) -> None:
        """Count one collective under its slowest link, and the bytes of each piece under the link that it takes.

        An all-to-all sends one piece to every other member; the others send size - 1 pieces to the next one, as NCCL's
        ring does.
        """
        links = self.links if operation == "all_to_all" else self.links[:1] * (self.size - 1)
        for link in links:
            self.meter.add(self.channel, operation, link, piece_bytes, count=0)
        self.meter.add(self.channel, operation, OTHER_HOST if OTHER_HOST in links else SAME_HOST, 0)


class HopRing(Channel):
    """A ring of ranks in which every hop goes from each member to the next."""

    def post(self, message: Message, *, into: Message | None = None) -> AnyHop:
        """Start sending a message to the next member and receiving one of the same layout from the previous member.

        All buffers of the message travel in one batch: one kernel with NCCL. They must not be written to before
        `Hop.wait`. On a ring that keeps what it receives, ``into`` says where to receive. Otherwise the memory is
        allocated here, and may be used until the second next hop is posted.
        """
        return Hop([], message.buffers, message) if self.size == 1 else self.transport.hop(self, message, into)

    def reserve(self, shapes: Shapes, device: torch.device) -> Message:
        """Return an uninitialised message to be posted next on this ring: the free slot, where the ring has slots."""
        return Message.empty(layout_of(shapes), self.transport.free_slot or partial(_allocate, device))

    def pack(self, tensors: Sequence[Tensor]) -> Message:
        """Pack tensors for this ring: one buffer for NCCL; copy engines copy contiguous tensors from where they lie.

        The message has the same layout either way, so that each rank may choose by its own tensors.
        """
        if self.transport.free_slot is not None and all([tensor.is_contiguous() for tensor in tensors]):
            return Message(list(tensors), layout_of(shapes_of(tensors)))
        return Message.pack(tensors)

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


def _allocate(device: torch.device, layout: MessageLayout) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in layout.buffers]


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


class Chain(Channel):
    """Line of ranks, along which one message passes from the first to the last, each rank adding to it.

    The first rank only sends, and the last only receives.
    """

    def receive(self, like: Tensor) -> Tensor:
        """Receive a tensor of the shape and type of ``like`` from the rank before this one; wait for it."""
        return self.transport.receive(self, like)

    def send(self, tensor: Tensor) -> Hop:
        """Start to send a tensor to the rank after this one; do not write to the tensor before `Hop.wait`."""
        return self.transport.send(self, tensor.contiguous())


class Collective(Channel):
    """A channel in which every member exchanges data with all others at once, with a process group of its own."""

    def all_to_all(self, tensor: Tensor) -> Hop:
        """Start an all-to-all: ``tensor[i]`` goes to member i; piece i of the tensor that arrives is from member i."""
        tensor = tensor.contiguous()
        alone = self.size == 1
        return Hop([], [tensor], [tensor]) if alone else self.transport.collective(self, "all_to_all", tensor)

    def all_gather(self, tensor: Tensor) -> Hop:
        """Start an all-gather: the one tensor that arrives is (size, *shape), with piece i from member i."""
        tensor = tensor.contiguous()
        if self.size == 1:
            return Hop([], [tensor], [tensor.unsqueeze(0)])
        return self.transport.collective(self, "all_gather", tensor)

    def reduce_scatter(self, tensor: Tensor) -> Hop:
        """Start a reduce-scatter: what arrives is the sum over all members of their ``tensor[i]``, i this rank's index.

        The sum has the tensor's type; NCCL rounds to it at every addition, other backends once.
        """
        tensor = tensor.contiguous()
        alone = self.size == 1
        return Hop([], [tensor], [tensor[0]]) if alone else self.transport.collective(self, "reduce_scatter", tensor)
