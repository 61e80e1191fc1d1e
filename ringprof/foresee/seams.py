"""A kernel that computes nothing and a communicator that sends nothing; both tell a `Recorder` what they were asked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringprof.foresee.recorder import Recorder
from ringprof.strategies.collectives import Collective
from ringprof.strategies.communicator import Communicator, Meter
from ringprof.strategies.copies import SLOTS
from ringprof.strategies.hops import Hop, Ring
from ringprof.strategies.hosts import SAME_HOST, Hosts
from ringprof.strategies.kernel import Gradients, Kernel
from ringprof.strategies.merge import wide_type
from ringprof.strategies.parcels import Parcel


def recording_kernel(kind: type[Kernel], recorder: Recorder, *, deterministic: bool) -> Kernel:
    """A kernel that records the calls of ``kind`` and returns results of the right shapes."""
    made: Kernel = type("Recording", (_Recording, kind), {"recorder": recorder})(deterministic=deterministic)
    return made


class _Recording(Kernel):
    """What is put before a kernel's own class: its checks and preparations stay, its computation goes."""

    recorder: Recorder

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        batch, seq, heads, _ = q.shape
        out = _like(q)
        lse = torch.empty(batch, heads, seq, dtype=wide_type(q), device=q.device)
        self.recorder.block("forward", q, k, causal, 0)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        dq, dk, dv = _like(q), _like(k), _like(v)
        # Flash attention adds up dQ in float32, and keeps rowsum(dO · O) of its rows.
        scratch = 4 * q.numel() + 4 * lse.numel()
        self.recorder.block("backward", q, k, causal, scratch)
        return dq, dk, dv


class RecordingCommunicator(Communicator):
    """One rank of ``size``, alone: every transfer is recorded, and nothing travels."""

    def __init__(self, recorder: Recorder, rank: int, size: int, per_host: int, hops: str) -> None:
        self.hops, self.meter, self.recorder = hops, Meter(), recorder
        self.large_hops = False
        self.rank, self.size, self._per_host = rank, size, per_host
        self.hosts = _hosts(size, per_host)
        self.slots: dict[int, RecordingRing] = {}
        """By the memory of slots, the ring that receives in it."""

    def global_rank(self, rank: int) -> int:
        return rank

    def ranks_per_host(self) -> int:
        return self._per_host

    def ring(
        self, channel: str, members: Sequence[int] | None = None, *, shares: Any = None, keeps: bool = False
    ) -> Ring:
        return RecordingRing(channel, self._members(members), self, shares, keeps)

    def collective(self, channel: str, members: Sequence[int] | None = None) -> Collective:
        return RecordingCollective(channel, self._members(members), self)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [_like(tensor) for _ in range(self.size)]

    def _members(self, members: Sequence[int] | None) -> list[int]:
        return list(range(self.size)) if members is None else list(members)


@lru_cache(maxsize=4)
def _hosts(size: int, per_host: int) -> Hosts:
    """Shared by all ranks of a tape."""
    return Hosts({rank: rank // per_host for rank in range(size)})


class RecordingRing(Ring):
    _comm: RecordingCommunicator

    """A ring whose hops are recorded; what arrives is fresh memory, or a slot where copy engines carry the hop."""

    def __init__(
        self, channel: str, members: Sequence[int], comm: RecordingCommunicator, shares: Any, keeps: bool
    ) -> None:
        super().__init__(channel, members, None, comm, keeps=keeps)
        self._comm, self._everyone = comm, tuple(members)
        self.communicator: str = shares.communicator if shares is not None else _name(channel, members)
        alone = all(comm.hosts.link(members[0], other) == SAME_HOST for other in members)
        self._may_copy = comm.hops == "copy" and alone and not keeps
        self._slots: Tensor | None = None
        self._number = 0

    def post(self, parcel: Parcel, *, into: Parcel | None = None) -> Any:
        if self.size == 1:
            return super().post(parcel, into=into)
        parcel = self._owned(parcel)
        copied = self._may_copy and self._copying()
        operation = "copy" if copied else "send_recv"
        arriving = self._slot(parcel) if copied else parcel.over([_like(x) for x in parcel.messages])
        self._meter.add(self.channel, operation, self._link, parcel.size_bytes)
        communicator = f"{_name(self.channel, self._everyone)}/copy" if copied else self.communicator
        sizes = [_size_bytes(message) for message in parcel.messages]
        recorder = self._comm.recorder
        number = recorder.post(self.channel, self._meter.phase, operation, self._everyone, communicator, sizes)
        return _Arriving(recorder, number, list(parcel.messages), arriving if into is None else into)

    def _owned(self, parcel: Parcel) -> Parcel:
        """As `ringprof.strategies.copies.owned`."""
        owners = [self._comm.slots.get(message.untyped_storage()._cdata) for message in parcel.messages]
        if all(ring is None or ring is self for ring in owners):
            return parcel
        return parcel.over([message.clone() for message in parcel.messages])

    def _slot(self, parcel: Parcel) -> Parcel:
        """The memory where the next hop arrives: slots are made anew where a larger parcel comes."""
        size, device = parcel.size_bytes, parcel.messages[0].device
        if self._slots is None or self._slots.numel() < SLOTS * size:
            self._slots = torch.empty(SLOTS * size, dtype=torch.uint8, device=device)
            self._comm.slots[self._slots.untyped_storage()._cdata] = self
        self._number += 1
        at = self._number % SLOTS * (self._slots.numel() // SLOTS)
        messages = []
        for message in parcel.messages:
            until = at + _size_bytes(message)
            messages.append(self._slots[at:until].view(message.dtype).view(message.shape))
            at = until
        return parcel.over(messages)


class RecordingCollective(Collective):
    """A group whose collectives are recorded."""

    def __init__(self, channel: str, members: Sequence[int], comm: RecordingCommunicator) -> None:
        super().__init__(channel, members, None, comm)
        self._comm, self._everyone = comm, tuple(members)

    def all_to_all(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return super().all_to_all(tensor)
        tensor = tensor.contiguous()
        piece = _size_bytes(tensor) // self.size
        self._count("all_to_all", self._links, piece)
        return self._arriving("all_to_all", tensor, _like(tensor), piece)

    def all_gather(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return super().all_gather(tensor)
        tensor = tensor.contiguous()
        piece = _size_bytes(tensor)
        self._count("all_gather", self._links[:1] * (self.size - 1), piece)
        received = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        return self._arriving("all_gather", tensor, received, piece)

    def reduce_scatter(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return super().reduce_scatter(tensor)
        tensor = tensor.contiguous()
        piece = _size_bytes(tensor) // self.size
        self._count("reduce_scatter", self._links[:1] * (self.size - 1), piece)
        return self._arriving("reduce_scatter", tensor, _like(tensor[0]), piece)

    def _arriving(self, operation: str, sent: Tensor, received: Tensor, piece_bytes: int) -> Any:
        recorder, name = self._comm.recorder, _name(self.channel, self._everyone)
        number = recorder.post(self.channel, self.meter.phase, operation, self._everyone, name, [piece_bytes])
        return _Arriving(recorder, number, [sent], [received])


class _Arriving(Hop):
    """A transfer under way on the tape."""

    def __init__(self, recorder: Recorder, number: int, sent: Sequence[Tensor], received: Any) -> None:
        super().__init__([], sent, received)
        self._recorder, self._number = recorder, number

    def wait(self) -> Any:
        arrived = super().wait()
        self._recorder.wait(self._number)
        return arrived


def _like(tensor: Tensor) -> Tensor:
    """As `torch.empty_like`, dense; on ``meta`` that takes ten times as long."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name(channel: str, members: Sequence[int]) -> str:
    """A process group is made for each channel and members, and NCCL has a communicator for each group."""
    return f"{channel}:{','.join(map(str, members))}"
