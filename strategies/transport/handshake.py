"""What the ranks of a group agree on before they make anything together: that they ask for the same, and their hosts.

Once for each group and request: every rank tells the others what it was asked for, what stands against it, and what its
launcher says of its host. All then come to the same answer, or all refuse in one line.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ringprof.strategies.errors import Unsupported
from ringprof.strategies.transport.copy_engine import can_copy, sees_peers
from ringprof.strategies.transport.hosts import told


@dataclass(frozen=True)
class HandshakeRequest:
    """What one rank says of itself. Numbers that its launcher does not give are None."""

    rank: int
    """In the world."""
    request: str
    problem: str | None
    token: str
    host: str
    local_world_size: int | None
    local_rank: int | None
    node: int | None
    """Slurm's number of the host."""
    process: tuple[str, int] | None = None
    """Its number, and where that number is good for: the host's boot and namespace."""
    can_copy: bool = False
    """Whether it can have hops by copy engine, and sees its peers' GPUs."""

    @classmethod
    def here(cls, request: str, problem: str | None) -> HandshakeRequest:
        return cls(
            dist.get_rank(), request, problem, uuid.uuid4().hex, socket.gethostname(),
            told("LOCAL_WORLD_SIZE"), told("LOCAL_RANK"), told("SLURM_NODEID"), _process(),
            can_copy() is None and sees_peers(),
        )  # fmt: skip

    def first_on_host(self) -> int | None:
        """The host's first rank, as torchrun numbers them; None where this rank was not told."""
        if self.local_rank is None or self.local_world_size is None or self.local_rank >= self.local_world_size:
            return None
        return self.rank - self.local_rank


@dataclass(frozen=True)
class Handshake:
    """What all ranks of a group hold to be so."""

    token: str
    """A name for this agreement that no other has."""
    hosts: dict[int, int]
    """The host of each of the group's global ranks, counted from 0."""
    processes: dict[int, int | None]
    """The process of each, where this rank can see it by its number."""
    can_copy: bool = False
    """Whether every rank can have hops by copy engine."""


WARNED_AFTER_S = 30.0
"""How long a rank waits for the others' word before it says so: they may be making another call."""

_agreements: WeakKeyDictionary[Any, dict[str, Handshake]] = WeakKeyDictionary()
_calls: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""What the ranks of a group have agreed to call."""


def agree(group: dist.ProcessGroup, request: str, problem: str | None = None) -> Handshake:
    """The agreement of ``group``'s ranks on ``request``; collective the first time, known after it.

    ``problem`` is why this rank cannot do what is asked. Raises `Unsupported` on every rank where one cannot, where
    they ask
    for different things, and where their launchers' words do not fit together.
    """
    known = _agreements.setdefault(group, {})
    if request not in known or problem is not None:
        said = _standings(group, request, problem)
        known[request] = Handshake(
            said[0].token, agreed_hosts(said, dist.get_world_size()), _processes(said),
            all(rank.can_copy for rank in said),
        )  # fmt: skip
    return known[request]


def agree_on_call(group: dist.ProcessGroup, call: str) -> None:
    """Collective the first time for a group and ``call``, in parts with "; " between them. Raises `Unsupported` where
    not all
    ranks make the same call, and tells the parts that differ."""
    known = _calls.setdefault(group, set())
    if call in known:
        return
    try:
        _standings(group, call, None)
    except RuntimeError as error:
        raise Unsupported(
            "this rank comes with a call that it has not made before, and another rank has not, or has ended: all must"
            f" make the same ({call}; {' '.join(str(error).split())[:200]})"
        ) from error
    known.add(call)


def _standings(group: dist.ProcessGroup, request: str, problem: str | None) -> list[HandshakeRequest]:
    """What every rank says. Raises `Unsupported` on every rank where one has a problem, or asks for something else."""
    said: list[Any] = [None] * dist.get_world_size(group)
    waits = f"rank {dist.get_rank()} waits for the others to ask for the same, as all must the first time: {request}"
    warning = threading.Timer(WARNED_AFTER_S, warnings.warn, (waits,))
    warning.daemon = True
    warning.start()
    try:
        dist.all_gather_object(said, HandshakeRequest.here(request, problem), group=group)
    finally:
        warning.cancel()
    _refuse_differences(said)
    return said


def agreed_hosts(ranks: Sequence[HandshakeRequest], world_size: int) -> dict[int, int]:
    """The host of each rank, counted from 0: as the launcher says, where it says so on all; else by the hosts' names.

    torchrun gives each rank its number on the host, or at least the host's number of ranks; Slurm the host's number.
    Raises `Unsupported` where hosts of unequal size cannot be told apart.
    """
    firsts = [rank.first_on_host() for rank in ranks]
    sizes = [rank.local_world_size for rank in ranks]
    nodes = [rank.node for rank in ranks]
    if None not in firsts:
        keys: list[Any] = firsts
    elif None not in sizes:
        keys = _hosts_by_size({rank.rank: size for rank, size in zip(ranks, sizes, strict=True) if size}, world_size)
    else:
        keys = nodes if None not in nodes else [rank.host for rank in ranks]
    return {rank.rank: number for rank, number in zip(ranks, numbered(keys), strict=True)}


def numbered(keys: Sequence[Any]) -> list[int]:
    """Each key's number, counted from 0 in the order in which they first come."""
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [order[key] for key in keys]


def _hosts_by_size(sizes: dict[int, int], world_size: int) -> list[int]:
    """The first rank of each rank's host, from the ranks' words on how many share it: neighbours do."""
    if len(set(sizes.values())) == 1:
        (size,) = set(sizes.values())
        return [rank // size * size for rank in sizes]
    firsts: dict[int, int] = {}
    for rank in range(world_size):
        if rank not in sizes:
            raise Unsupported(
                f"the ranks say LOCAL_WORLD_SIZE {' and '.join(map(str, sorted(set(sizes.values()))))}, and some of the"
                " world are not in the group: which share a host cannot be told (give ranks_per_host, or LOCAL_RANK)"
            )
        start = firsts.get(rank - 1, rank)
        firsts[rank] = start if rank - start < sizes[start] else rank
    return [firsts[rank] for rank in sizes]


def _refuse_differences(ranks: Sequence[HandshakeRequest]) -> None:
    for rank in ranks:
        if rank.problem is not None:
            own = rank.rank == dist.get_rank()
            raise Unsupported(rank.problem if own else f"rank {rank.rank} refused: {rank.problem}")
    for rank in ranks:
        if rank.request != ranks[0].request:
            pairs = list(zip(ranks[0].request.split("; "), rank.request.split("; "), strict=False))
            one, other = ("; ".join(pair[i] for pair in pairs if pair[0] != pair[1]) for i in range(2))
            raise Unsupported(
                f"the ranks do not ask for the same: rank {ranks[0].rank} for {one}, rank {rank.rank} for {other}"
            )


def _process() -> tuple[str, int] | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid()
    except OSError:
        return None


def _processes(ranks: Sequence[HandshakeRequest]) -> dict[int, int | None]:
    here = _process()
    return {
        rank.rank: rank.process[1] if rank.process and here and rank.process[0] == here[0] else None for rank in ranks
    }
