"""The communicator: a strategy's access to the other ranks, and the count of what it sends.

A strategy asks it for channels: a `HopRing` posts one hop at a time, a `Collective` exchanges data among all its
members. The communicator connects every channel by a `Transport`: usually a process group of its own, and with it an
NCCL stream of its own, so that two rings of one strategy run at the same time, and a trace tells them apart. Baselines
and dry runs connect their channels by fakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import Unsupported
from .call_comparison import compare_call, compares_calls, raise_if_refused
from .copy_engine import can_copy
from .handshake import check_same_call, perform_handshake, require_same_call
from .hop_comparison import hash_of_hops
from .hosts import Hosts
from .passes import NO_PASS, GroupPasses, Pass, passes_of
from .ring_channel import Channel, Collective, Connect, HopRing, Meter
from .torch_transport import torch_transport

HOPS = ("auto", "nccl", "copy")
"""Transports for hops within a host: NCCL's send/recv kernels (gloo on a CPU), or copy engines (see `copy_engine`).

``auto`` uses copy engines where all ranks support them: on 4 H200 they were faster than NCCL or within 2 % of it,
whatever the shape (docs/speed.md)."""


class Communicator:
    """One rank's access to a group of ranks. Ranks below are positions in that group."""

    group: Any = None
    """The process group; None where torch.distributed is not in use."""

    def __init__(
        self, group: Any = None, *, ranks_per_host: int | None = None, hops: str = "nccl",
        hosts: Sequence[int] | None = None, request: str = "a communicator", problem: Exception | None = None,
        connect: Connect = torch_transport, dry_run: tuple[int, Hosts] | None = None,
    ) -> None:  # fmt: skip
        """Connect this rank to ``group``: a process group or a DeviceMesh of one dimension; None is the world.

        ``hops`` is the transport of rings within a host, one of `HOPS`. ``hosts`` numbers the host of every global
        rank, for launchers that do not say it (see `Hosts`). ``request`` is what this rank was asked for, and
        ``problem`` why it cannot do it. ``connect`` makes the transport of each channel. ``dry_run`` is a rank, and the
        hosts of all ranks: this process stands for that rank, and torch.distributed is not used.

        Collective, the first time for a group and request. Raises `Unsupported` on every rank where one rank has a
        problem, or where they do not ask for the same; raises ``problem`` itself where there is one.
        """
        self.hops, self.connect = hops, connect
        self.can_copy = False
        """Whether ``auto`` may use copy engines: all ranks support them and can access each other's memory."""
        self.meter = Meter()
        self.channels: list[ref[Channel]] = []
        """Channels in the order in which they were made. They refer to this object, too."""
        self.passes: GroupPasses | None = None
        """The state of the group's passes; None where there is no other rank."""
        self.rank, self.size, self.token = 0, 1, ""
        self._ranks: Sequence[int] = [0]
        self.hosts = Hosts({0: 0})
        self.processes: dict[int, int | None] = {}
        self.recipe: Any = None
        """(callable, arguments) to make a strategy over the world again, for `object.__reduce__`; None for others."""
        if dry_run is not None:
            self.rank, self.hosts = dry_run
            self._ranks, self.size = range(len(self.hosts.numbers)), len(self.hosts.numbers)
            return
        world_size = dist.get_world_size() if _initialised() else 1
        problem = problem or _problem(world_size, ranks_per_host, hops, hosts)
        if _initialised():
            self.group = own_group = _process_group(group)
            self._world = dist.group.WORLD
            self.rank, self.size = dist.get_rank(own_group), dist.get_world_size(own_group)
            self._ranks = dist.get_process_group_ranks(own_group)
            self._perform_handshake(f"{request}, {ranks_per_host=}, {hops=}, {hosts=}", problem)
            self.hosts = Hosts.from_arguments(world_size, ranks_per_host, hosts) or self.hosts
            if self.size > 1:
                self.passes = passes_of(own_group, self.token)
                self._handshake_token = self.token
                self._join_generation(self.passes.generation)
        elif problem is not None:
            raise copy(problem)  # the caller holds the other, and must not hold its own frame

    def _perform_handshake(self, request: str, problem: Exception | None) -> None:
        try:
            handshake = perform_handshake(self.group, request, None if problem is None else str(problem))
        except Unsupported as refusal:
            raise (problem or refusal) from None
        self.token, self.hosts, self.processes = handshake.token, Hosts(handshake.hosts), handshake.processes
        self.can_copy = handshake.can_copy

    def check_alive(self) -> None:
        """Raise `Unsupported` where torch.distributed was shut down after this communicator was created.

        Raises it also where an earlier call turned out to differ between the ranks, and `RankRaised` where a rank has
        left a pass in the middle. Connects the channels anew where the ranks have recovered from that.
        """
        if self.group is None:
            return
        if dist.group.WORLD is not self._world:
            raise Unsupported("torch.distributed was shut down since this strategy was created: create it again")
        raise_if_refused(self.group)
        if self.passes is not None:
            self.passes.check()
            if self.passes.generation != self._generation:
                self._join_generation(self.passes.generation)

    def _join_generation(self, generation: int) -> None:
        """Connect all channels anew after the ranks have recovered so many times."""
        self._generation, self.token = generation, f"{self._handshake_token}:{generation}"
        self.channels = [channel for channel in self.channels if channel() is not None]
        for reference in self.channels:
            if (channel := reference()) is not None:
                channel.connect()

    def passing(self, phase: str) -> AbstractContextManager[None]:
        """Return a context manager for one pass: ``forward`` (a call), ``backward``, or a ``step`` of several passes.

        Where an exception leaves it, the group's other ranks raise, too (see `passes`). Raises as `check_alive`.
        """
        self.check_alive()
        if phase != "step":
            self.meter.phase = phase
        return NO_PASS if self.passes is None else Pass(self.passes, phase, self.meter)

    def check_same_call(self, call: str) -> None:
        """Check that all ranks make the same ``call`` (see `handshake.check_same_call`).

        The check is skipped while a CUDA graph is captured, because ranks cannot talk to each other then.
        """
        if self._can_talk():
            if self.passes is not None:
                self.passes.look()
                self.passes.check()
            check_same_call(self.group, call)

    def require_same_call(self, call: str, problem: str | None) -> None:
        """Check that all ranks make the same ``call``, each time (see `handshake.require_same_call`).

        Raises `Unsupported` for a ``problem`` of this rank where the ranks cannot talk, too.
        """
        if self._can_talk():
            require_same_call(self.group, call, problem)
        elif problem:
            raise Unsupported(problem)

    def compares_calls(self) -> bool:
        """Return whether the ranks of the group compare every call, which `compare_call` begins."""
        return self.group is not None and compares_calls(self.group)

    def compare_call(self, call: dict[str, Any], *, may_pass: bool = False) -> None:
        """Check that all ranks make the same ``call`` (see `call_comparison.compare_call`).

        Nothing is compared while a CUDA graph is captured.
        """
        if self._can_talk():
            compare_call(self.group, call, self.processes, may_pass=may_pass, hops=hash_of_hops(self.group))

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather a small ``value`` of every rank, in rank order; this rank's alone where the ranks cannot talk."""
        if not self._can_talk():
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _can_talk(self) -> bool:
        """Return whether there are other ranks, and this one can exchange messages with them now."""
        if self.size == 1 or self.group is None:
            return False
        # A process that has not initialised CUDA, or was forked after that, must not query the capture.
        initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return not (initialised and torch.cuda.is_current_stream_capturing())

    @property
    def is_world(self) -> bool:
        """Whether the group holds all ranks of the world."""
        return not _initialised() or self.size == dist.get_world_size()

    @property
    def hop_transport(self) -> str:
        """The transport of hops within a host: ``nccl`` or ``copy``. For ``auto`` it is known once hops were sent."""
        copied = any(operation == "copy" for _, _, operation, _ in self.meter.sent)
        return "copy" if self.hops == "copy" or copied else "nccl"

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a position in this group."""
        return self._ranks[rank]

    def ranks_per_host(self) -> int:
        """Return the ranks of this group per host, if they are consecutive and equally many per host; else all."""
        return self.hosts.per_host(self._ranks)

    def ring(
        self, channel: str, members: Sequence[int] | None = None, *, shares: HopRing | None = None, keeps: bool = False
    ) -> HopRing:
        """Return a ring over ``members`` (None: all ranks of the group).

        With ``shares``, a ring of the same members, both use one process group: their hops then run one after another.
        With ``keeps``, received memory stays valid for as long as it is referenced, also on other streams. Every rank
        of the group must ask for its rings in the same order.
        """
        ring = HopRing(channel, range(self.size) if members is None else members, self, shares=shares, keeps=keeps)
        self.meter.goes_to[channel] = ring.following
        return ring

    def collective(self, channel: str, members: Sequence[int] | None = None) -> Collective:
        """Return a channel for collectives over ``members`` (None: all ranks of the group)."""
        return Collective(channel, range(self.size) if members is None else members, self, keeps=True)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather the ``tensor`` of every rank, in rank order.

        The meter does not count this traffic, which serves checks and `unshard`. In a dry run nothing is gathered.
        """
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        if self.group is not None:
            dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _process_group(group: Any) -> Any:
    """Return the process group of ``group``.

    Raises `Unsupported` on a rank outside it, and for a mesh of several dimensions.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = ", ".join(repr(name) for name in group.mesh_dim_names or ())
            raise Unsupported(
                f"a mesh of {group.ndim} dimensions: give one of them, as mesh[NAME] of {names or 'its names'}"
            )
        group = group.get_group() if group.get_coordinate() is not None else dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and dist.get_rank(group) < 0:
        raise Unsupported(f"rank {dist.get_rank()} is not in the group: only its members can have a strategy over it")
    return dist.group.WORLD if group is None else group


def _problem(world_size: int, ranks_per_host: int | None, hops: str, hosts: Sequence[int] | None) -> Unsupported | None:
    """Return why this rank cannot use these options; None where it can."""
    if hops not in HOPS:
        return Unsupported(f"hops {hops!r}: write one of {', '.join(HOPS)}")
    problem = can_copy() if hops == "copy" else None
    if problem:
        return Unsupported(f"hops by copy engine {problem}")
    try:
        Hosts.from_arguments(world_size, ranks_per_host, hosts)
    except Unsupported as refusal:
        return refusal
    return None


class Recoverable:
    """Base of strategies: how a program goes on after an exception on some ranks."""

    comm: Communicator

    def recoverable(self) -> AbstractContextManager[None]:
        """Return a context manager for a training step: an exception that leaves it stops the group's other ranks.

        They raise `RankRaised` in this or their next call. Without it, only exceptions inside of calls and their
        backward passes do so.
        """
        return self.comm.passing("step")

    def recover(self) -> None:
        """Make the next call right on all ranks after an exception in a call, on one rank or on all. Collective.

        Drops unfinished hops, which raise `RankRaised` on the ranks that wait for them, and connects the ranks anew.
        All strategies over the group have then recovered. Raises `PeerLost` where a rank does not call it within the
        group's timeout.
        """
        if self.comm.passes is not None:
            self.comm.passes.recover(self.comm.group)
