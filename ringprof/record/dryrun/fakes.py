"""A kernel that computes nothing and a communicator that sends nothing; both tell a `Recorder` what they were asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ringprof.record.dryrun.dispatch import Recorder
from ringprof.strategies.kernels import varlen
from ringprof.strategies.kernels.kernel import Gradients, Kernel, allocate_adjacent
from ringprof.strategies.kernels.merge import wide_type
from ringprof.strategies.masks.mask_blocks import Batch, Lengths, MaskBlocks
from ringprof.strategies.transport.collectives import Collective
from ringprof.strategies.transport.communicator import Communicator, Meter
from ringprof.strategies.transport.copy_engine import SLOTS, slot_offsets, views_in_slot
from ringprof.strategies.transport.hosts import SAME_HOST, Hosts
from ringprof.strategies.transport.message import Message, Shapes, shapes_of
from ringprof.strategies.transport.ring_channel import Hop, HopRing

KNOWN_KERNELS = ("cudnn", "flash-attn", "torch-flash", "cpu-flash", "reference")
"""Those of which it is known what they hold beside their results; others are taken to hold what flash attention does.
"""
_RESIDENT = 2 * 132
"""Blocks that flash-attn 2 counts on at once, on a Hopper GPU."""


def recording_kernel(
    kind: type[Kernel], recorder: Recorder, *, deterministic: bool, softcap: float = 0.0
) -> Kernel:  # fmt: skip
    """A kernel that records the calls of ``kind`` and returns results of the right shapes."""
    recording: Any = type("Recording", (_Recording, kind), {"recorder": recorder})
    made: Kernel = recording(deterministic=deterministic, softcap=softcap)
    return made


class _Recording(Kernel):
    """What is put before a kernel's own class: its checks and preparations stay, its computation goes."""

    recorder: Recorder

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, *_: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not self.production:
            # Made of torch's operations, which say for themselves what they hold.
            self.recorder.block("forward", q, k, 0, causal=causal)
            return super()._forward(q, k, v, scale, causal)  # type: ignore[safe-super]
        batch, seq, heads = q.shape[:3]
        out = _like(q)
        lse = torch.empty(batch, heads, seq, dtype=wide_type(q), device=q.device)
        self.recorder.block("forward", q, k, _split_bytes(self.name, q, k), causal=causal)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool, *_: Tensor,
    ) -> Gradients:  # fmt: skip
        if not self.production:
            self.recorder.block("backward", q, k, 0, causal=causal)
            return super()._backward(dout, q, k, v, lse, out, delta, scale, causal)  # type: ignore[safe-super]
        dq, (dk, dv) = _like(q), allocate_adjacent(k) if self.pairs_gradients else (_like(k), _like(v))
        self.recorder.block("backward", q, k, _scratch_bytes(self.name, q, k), causal=causal)
        return dq, dk, dv

    # Kernels for sequences of several lengths get them all at once, packed: q (T, H, D), k and v (T', Hkv, D).

    def _forward_parts(self, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: MaskBlocks) -> tuple[Tensor, Tensor]:
        if not self.varlen:
            return super()._forward_parts(q, k, v, scale, parts)
        return varlen.forward(self._packed_forward, q, k, v, scale, parts)

    def _backward_parts(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, parts: MaskBlocks,
    ) -> Gradients:  # fmt: skip
        if not self.varlen:
            return super()._backward_parts(dout, q, k, v, lse, out, delta, scale, parts)
        assert out is not None
        return varlen.backward(self._packed_backward, dout, q, k, v, lse, out, scale, parts)

    def _packed_forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _like(q), torch.empty(q.shape[1], q.shape[0], dtype=wide_type(q), device=q.device)
        self.recorder.block("forward", q[None], k[None], 0, *_seen(batch, q.shape[0]), causal=batch.causal)
        return out, lse

    def _packed_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Lengths, batch: Batch,
        scale: float,
    ) -> Gradients:  # fmt: skip
        gradients = _like(q), _like(k), _like(v)
        pairs, sequences = _seen(batch, q.shape[0])
        scratch = _scratch_bytes(self.name, q[None], k[None], sequences)
        self.recorder.block("backward", q[None], k[None], scratch, pairs, sequences, causal=batch.causal)
        return gradients


def _seen(batch: Batch, rows: int) -> tuple[int, int]:
    """Pairs and sequences of a packed call of ``rows`` queries, which may hold the batch of parts several times."""
    entries = rows // sum(part.queries for part in batch.parts)
    return entries * sum(part.area for part in batch.parts), entries * len(batch.parts)


def _scratch_bytes(kernel: str, q: Tensor, k: Tensor, sequences: int = 0) -> int:
    """What a backward call holds beside its results.

    Flash attention adds up dQ in float32, and keeps rowsum(dO · O) of its rows. flash-attn 2 rounds the rows up to a
    tile's 128, or adds as many for each packed sequence (``mha_bwd`` and ``mha_varlen_bwd`` of its flash_api.cpp). It
    and cuDNN have dK and dV of every query head before they add those of a group up.
    """
    if kernel == "cpu-flash":
        # A buffer a thread, however long the block is.
        return 0
    batch, rows, heads, head_dim = q.shape
    rounded = -(-rows // 128) * 128 if kernel == "flash-attn" and not sequences else rows + 128 * sequences
    groups = 2 * q.nbytes // rows * k.shape[1] if heads != k.shape[2] else 0
    return 4 * batch * rounded * heads * (head_dim + 1) + groups


def _split_bytes(kernel: str, q: Tensor, k: Tensor) -> int:
    """What a forward call of flash-attn 2 holds beside its results, in torch, too: where few blocks of queries leave
    multiprocessors idle it cuts the keys into parts, whose outputs and LSE it keeps in float32 until it adds them up
    (``num_splits_heuristic`` of its flash_api.cpp): the fewest that fill the last wave nearly as well as any number.
    """
    if kernel == "cpu-flash":
        # Keys and values in another order, for matrix products in bfloat16.
        return 2 * k.nbytes if k.itemsize == 2 else 0
    batch, rows, heads, head_dim = q.shape
    tiles = batch * heads * -(-rows // 64)
    if kernel not in ("flash-attn", "torch-flash") or tiles >= 0.8 * _RESIDENT:
        return 0
    blocks = -(-k.shape[1] // (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64))
    fills = {}
    for splits in range(1, min(128, _RESIDENT, blocks) + 1):
        if splits == 1 or -(-blocks // splits) != -(-blocks // (splits - 1)):
            waves = tiles * splits / _RESIDENT
            fills[splits] = waves / math.ceil(waves)
    splits = next(splits for splits, full in fills.items() if full >= 0.85 * max(fills.values()))
    return 4 * splits * batch * heads * rows * (head_dim + 1) if splits > 1 else 0


class RecordingCommunicator(Communicator):
    """One rank of ``size``, alone: every transfer is recorded, and nothing travels."""

    def __init__(self, recorder: Recorder, rank: int, size: int, per_host: int, hops: str) -> None:
        self.hops, self.meter, self.recorder = hops, Meter(), recorder
        self.rank, self.size, self._per_host = rank, size, per_host
        self.hosts = _hosts(size, per_host)
        self.slots: dict[StorageWeakRef, _Slots] = {}
        """By their memory, those that rings receive in."""
        self.spread: dict[str, int] = {}
        """By channel, over hosts, the most members that are on one; 0 where all are."""

    def global_rank(self, rank: int) -> int:
        return rank

    def ranks_per_host(self) -> int:
        return self._per_host

    def ring(
        self, channel: str, members: Sequence[int] | None = None, *, shares: Any = None, keeps: bool = False
    ) -> HopRing:
        return RecordingRing(channel, self._spread_over(channel, members), self, shares, keeps=keeps)

    def collective(self, channel: str, members: Sequence[int] | None = None) -> Collective:
        return RecordingCollective(channel, self._spread_over(channel, members), self)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [_like(tensor) for _ in range(self.size)]

    def _spread_over(self, channel: str, members: Sequence[int] | None) -> list[int]:
        found = list(range(self.size)) if members is None else list(members)
        most = Counter(member // self._per_host for member in found)
        self.spread[channel] = max(most.values()) if len(most) > 1 else 0
        return found


@lru_cache(maxsize=4)
def _hosts(size: int, per_host: int) -> Hosts:
    """Shared by all ranks of a tape."""
    return Hosts({rank: rank // per_host for rank in range(size)})


class RecordingRing(HopRing):
    """A ring whose hops are recorded; what arrives is fresh memory, or a slot where copy engines carry the hop."""

    _comm: RecordingCommunicator

    def __init__(
        self, channel: str, members: Sequence[int], comm: RecordingCommunicator, shares: Any, *, keeps: bool
    ) -> None:
        super().__init__(channel, members, None, comm, keeps=keeps)
        self._comm, self._everyone = comm, tuple(members)
        self.communicator: str = shares.communicator if shares is not None else _name(channel, members)
        alone = all(comm.hosts.link(members[0], other) == SAME_HOST for other in members)
        self.copied = comm.hops == "copy" and alone and not keeps
        # Two members have one ring of copies for all channels, as in
        # `ringprof.strategies.transport.copy_engine.copy_ring`.
        pair = self.size == 2
        self.slots: _Slots = shares.slots if shares is not None and pair else _Slots(comm.slots)
        if self.copied:
            self.communicator = f"{self.communicator if pair else _name(channel, members)}/copy"

    def post(self, message: Message, *, into: Message | None = None) -> Any:
        if self.size == 1:
            return super().post(message, into=into)
        message = self._owned(message)
        operation = "copy" if self.copied else "send_recv"
        self.slots.number += 1
        buffers = self.slots.last(shapes_of(message.buffers)) if self.copied else [_like(x) for x in message.buffers]
        arriving = message.with_buffers(buffers)
        self._meter.add(self.channel, operation, self._link, message.size_bytes)
        sizes = [buffer.nbytes for buffer in message.buffers]
        recorder = self._comm.recorder
        number = recorder.post(self.channel, self._meter.phase, operation, self._everyone, self.communicator, sizes)
        return _Arriving(recorder, number, list(message.buffers), arriving if into is None else into)

    def _owned(self, message: Message) -> Message:
        """As `ringprof.strategies.transport.copy_engine.owned`."""
        owners = [self._comm.slots.get(_memory(buffer)) for buffer in message.buffers]
        if all(slots is None or slots is self.slots for slots in owners):
            return message
        return message.with_buffers([buffer.clone() for buffer in message.buffers])

    def reserve(self, shapes: Shapes, device: torch.device) -> Message:
        return Message.empty(shapes, self.slots.last) if self.copied else super().reserve(shapes, device)


class _Slots:
    """Where copied hops arrive in turns."""

    def __init__(self, owners: dict[StorageWeakRef, _Slots]) -> None:
        """``owners`` will have it by its memory."""
        self._owners, self._memory, self.number = owners, torch.empty(0, dtype=torch.uint8, device="meta"), 0

    def last(self, shapes: Shapes) -> list[Tensor]:
        """The slot of the last hop that was counted: all are made anew where it is too small."""
        size = slot_offsets(shapes)[1]
        if self._memory.numel() < SLOTS * size:
            self._memory = torch.empty(SLOTS * size, dtype=torch.uint8, device="meta")
            self._owners[_memory(self._memory)] = self
        return views_in_slot(self._memory, self._memory.numel() // SLOTS, shapes, self.number % SLOTS)


def _memory(tensor: Tensor) -> StorageWeakRef:
    """What stands for a tensor's memory, also when it is gone: its address alone would be given again."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class RecordingCollective(Collective):
    """A group whose collectives are recorded."""

    def __init__(self, channel: str, members: Sequence[int], comm: RecordingCommunicator) -> None:
        super().__init__(channel, members, None, comm)
        self._comm, self._everyone = comm, tuple(members)

    def all_to_all(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return super().all_to_all(tensor)
        tensor = tensor.contiguous()
        piece = tensor.nbytes // self.size
        self._count("all_to_all", self._links, piece)
        return self._arriving("all_to_all", tensor, _like(tensor), piece)

    def all_gather(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return super().all_gather(tensor)
        tensor = tensor.contiguous()
        piece = tensor.nbytes
        self._count("all_gather", self._links[:1] * (self.size - 1), piece)
        received = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        return self._arriving("all_gather", tensor, received, piece)

    def reduce_scatter(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return super().reduce_scatter(tensor)
        tensor = tensor.contiguous()
        piece = tensor.nbytes // self.size
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


def _name(channel: str, members: Sequence[int]) -> str:
    """A process group is made for each channel and members, and NCCL has a communicator for each group."""
    return f"{channel}:{','.join(map(str, members))}"
