"""Fakes for dry runs: a kernel that computes nothing and a communicator that sends nothing; both record their calls."""

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
from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.copy_engine import SLOTS, slot_offsets, views_in_slot
from ringprof.strategies.transport.hosts import SAME_HOST, Hosts
from ringprof.strategies.transport.message import Message, Shapes, shapes_of
from ringprof.strategies.transport.meter import Meter
from ringprof.strategies.transport.ring_channel import Hop, HopRing

KNOWN_KERNELS = ("cudnn", "flash-attn", "torch-flash", "cpu-flash", "reference")
"""Kernels whose temporary memory is known; others are assumed to hold what flash attention holds."""
_RESIDENT_BLOCKS = 2 * 132
"""Number of thread blocks that flash-attn 2 assumes to run at once on a Hopper GPU."""


def recording_kernel(
    kind: type[Kernel], recorder: Recorder, *, deterministic: bool, softcap: float = 0.0
) -> Kernel:  # fmt: skip
    """Return a kernel that records the calls of ``kind`` and returns results of the right shapes."""
    kernel_class: Any = type("Recording", (_RecordingKernel, kind), {"recorder": recorder})
    kernel: Kernel = kernel_class(deterministic=deterministic, softcap=softcap)
    return kernel


class _RecordingKernel(Kernel):
    """Mix-in before a kernel's class: its checks and preparations stay, its computation is replaced."""

    recorder: Recorder

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, *_: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not self.production:
            # A reference kernel of torch operations: the dispatcher records what they hold.
            self.recorder.attention("forward", q, k, 0, causal=causal)
            return super()._forward(q, k, v, scale, causal)  # type: ignore[safe-super]
        batch, seq, heads = q.shape[:3]
        out = _like(q)
        lse = torch.empty(batch, heads, seq, dtype=wide_type(q), device=q.device)
        self.recorder.attention("forward", q, k, _split_bytes(self.name, q, k), causal=causal)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool, *_: Tensor,
    ) -> Gradients:  # fmt: skip
        if not self.production:
            self.recorder.attention("backward", q, k, 0, causal=causal)
            return super()._backward(dout, q, k, v, lse, out, delta, scale, causal)  # type: ignore[safe-super]
        dq, (dk, dv) = _like(q), allocate_adjacent(k) if self.pairs_gradients else (_like(k), _like(v))
        self.recorder.attention("backward", q, k, _scratch_bytes(self.name, q, k), causal=causal)
        return dq, dk, dv

    # Varlen kernels get all sequences at once, packed: q (T, H, D), k and v (T', Hkv, D).

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
        self.recorder.attention(
            "forward", q[None], k[None], 0, *_pairs_and_sequences(batch, q.shape[0]), causal=batch.causal
        )
        return out, lse

    def _packed_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Lengths, batch: Batch,
        scale: float,
    ) -> Gradients:  # fmt: skip
        gradients = _like(q), _like(k), _like(v)
        pairs, sequences = _pairs_and_sequences(batch, q.shape[0])
        scratch = _scratch_bytes(self.name, q[None], k[None], sequences)
        self.recorder.attention("backward", q[None], k[None], scratch, pairs, sequences, causal=batch.causal)
        return gradients


def _pairs_and_sequences(batch: Batch, rows: int) -> tuple[int, int]:
    """Return pairs and sequences of a packed call of ``rows`` queries, which may hold several copies of the batch."""
    copies = rows // sum(part.queries for part in batch.parts)
    return copies * sum(part.area for part in batch.parts), copies * len(batch.parts)


def _scratch_bytes(kernel: str, q: Tensor, k: Tensor, sequences: int = 0) -> int:
    """Return the bytes that a backward call holds besides its results.

    Flash attention accumulates dQ in float32 and keeps rowsum(dO · O) of its rows. flash-attn 2 rounds the rows up to a
    tile's 128, or adds as many for each packed sequence (``mha_bwd`` and ``mha_varlen_bwd`` of its flash_api.cpp). It
    and cuDNN keep dK and dV of every query head before they reduce them over a group.
    """
    if kernel == "cpu-flash":
        # One buffer per thread, independent of the block's length.
        return 0
    batch, rows, heads, head_dim = q.shape
    rounded_rows = -(-rows // 128) * 128 if kernel == "flash-attn" and not sequences else rows + 128 * sequences
    group_bytes = 2 * q.nbytes // rows * k.shape[1] if heads != k.shape[2] else 0
    return 4 * batch * rounded_rows * heads * (head_dim + 1) + group_bytes


def _split_bytes(kernel: str, q: Tensor, k: Tensor) -> int:
    """Return the bytes that a forward call of flash-attn 2 holds besides its results, also inside torch.

    If few blocks of queries leave multiprocessors idle, it splits the keys. It keeps the outputs and LSE of the splits
    in float32 until it combines them (``num_splits_heuristic`` of its flash_api.cpp). It chooses the smallest number of
    splits that fills the last wave nearly as well as any number.
    """
    if kernel == "cpu-flash":
        # Reordered keys and values, for matrix products in bfloat16.
        return 2 * k.nbytes if k.itemsize == 2 else 0
    batch, rows, heads, head_dim = q.shape
    tiles = batch * heads * -(-rows // 64)
    if kernel not in ("flash-attn", "torch-flash") or tiles >= 0.8 * _RESIDENT_BLOCKS:
        return 0
    key_blocks = -(-k.shape[1] // (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64))
    fill_by_splits = {}
    for splits in range(1, min(128, _RESIDENT_BLOCKS, key_blocks) + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = tiles * splits / _RESIDENT_BLOCKS
            fill_by_splits[splits] = waves / math.ceil(waves)
    splits = next(splits for splits, fill in fill_by_splits.items() if fill >= 0.85 * max(fill_by_splits.values()))
    return 4 * splits * batch * heads * rows * (head_dim + 1) if splits > 1 else 0


class RecordingCommunicator(Communicator):
    """Communicator of one rank of ``size``: every transfer is recorded, and nothing is sent."""

    def __init__(self, recorder: Recorder, rank: int, size: int, per_host: int, hops: str) -> None:
        self.hops, self.meter, self.recorder = hops, Meter(), recorder
        self.rank, self.size, self._per_host = rank, size, per_host
        self.hosts = _hosts(size, per_host)
        self.slots: dict[StorageWeakRef, _ReceiveSlots] = {}
        """Receive slots of rings, by their memory."""
        self.spread: dict[str, int] = {}
        """Largest number of members on one host per channel; 0 if all are on one host."""

    def global_rank(self, rank: int) -> int:
        return rank

    def ranks_per_host(self) -> int:
        return self._per_host

    def ring(
        self, channel: str, members: Sequence[int] | None = None, *, shares: Any = None, keeps: bool = False
    ) -> HopRing:
        return RecordingRing(channel, self._members_of(channel, members), self, shares, keeps=keeps)

    def collective(self, channel: str, members: Sequence[int] | None = None) -> Collective:
        return RecordingCollective(channel, self._members_of(channel, members), self)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [_like(tensor) for _ in range(self.size)]

    def _members_of(self, channel: str, members: Sequence[int] | None) -> list[int]:
        """Return the members of a channel and record how they lie over the hosts."""
        ranks = list(range(self.size)) if members is None else list(members)
        per_host_counts = Counter(member // self._per_host for member in ranks)
        self.spread[channel] = max(per_host_counts.values()) if len(per_host_counts) > 1 else 0
        return ranks


@lru_cache(maxsize=4)
def _hosts(size: int, per_host: int) -> Hosts:
    """Return the hosts of all ranks, shared by all ranks of a dry run."""
    return Hosts({rank: rank // per_host for rank in range(size)})


class RecordingRing(HopRing):
    """Ring whose hops are recorded. Received data is fresh memory, or a slot if copy engines carry the hop."""

    _comm: RecordingCommunicator

    def __init__(
        self, channel: str, members: Sequence[int], comm: RecordingCommunicator, shares: Any, *, keeps: bool
    ) -> None:
        super().__init__(channel, members, None, comm, keeps=keeps)
        self._comm, self._all_members = comm, tuple(members)
        self.communicator: str = shares.communicator if shares is not None else _communicator_name(channel, members)
        on_one_host = all(comm.hosts.link(members[0], other) == SAME_HOST for other in members)
        self.copied = comm.hops == "copy" and on_one_host and not keeps
        # Two members have one ring of copies for all channels, as in
        # `ringprof.strategies.transport.copy_engine.copy_ring`.
        pair = self.size == 2
        self.slots: _ReceiveSlots = shares.slots if shares is not None and pair else _ReceiveSlots(comm.slots)
        if self.copied:
            self.communicator = f"{self.communicator if pair else _communicator_name(channel, members)}/copy"

    def post(self, message: Message, *, into: Message | None = None) -> Any:
        """Record the start of a hop without sending. Return a hop that hands out ``into`` or an empty message."""
        if self.size == 1:
            return super().post(message, into=into)
        message = self._owned(message)
        operation = "copy" if self.copied else "send_recv"
        self.slots.number += 1
        buffers = self.slots.last(shapes_of(message.buffers)) if self.copied else [_like(x) for x in message.buffers]
        received = message.with_buffers(buffers)
        self._meter.add(self.channel, operation, self._link, message.size_bytes)
        sizes = [buffer.nbytes for buffer in message.buffers]
        recorder = self._comm.recorder
        number = recorder.comm_start(
            self.channel, self._meter.phase, operation, self._all_members, self.communicator, sizes
        )
        return _RecordedHop(recorder, number, list(message.buffers), received if into is None else into)

    def _owned(self, message: Message) -> Message:
        """Return a message that lies in no other ring's receive slots; copy it if needed.

        `ringprof.strategies.transport.copy_engine.copy_if_in_other_slot` does the same in a run.
        """
        owners = [self._comm.slots.get(_storage_key(buffer)) for buffer in message.buffers]
        if all(slots is None or slots is self.slots for slots in owners):
            return message
        return message.with_buffers([buffer.clone() for buffer in message.buffers])

    def reserve(self, shapes: Shapes, device: torch.device) -> Message:
        return Message.empty(shapes, self.slots.last) if self.copied else super().reserve(shapes, device)


class _ReceiveSlots:
    """Memory that copied hops are received in, in rotation."""

    def __init__(self, owners: dict[StorageWeakRef, _ReceiveSlots]) -> None:
        """Create empty slots; ``owners`` maps their memory to them."""
        self._owners, self._memory, self.number = owners, torch.empty(0, dtype=torch.uint8, device="meta"), 0

    def last(self, shapes: Shapes) -> list[Tensor]:
        """Return the slot of the last counted hop; reallocate all slots if they are too small."""
        size = slot_offsets(shapes)[1]
        if self._memory.numel() < SLOTS * size:
            self._memory = torch.empty(SLOTS * size, dtype=torch.uint8, device="meta")
            self._owners[_storage_key(self._memory)] = self
        return views_in_slot(self._memory, self._memory.numel() // SLOTS, shapes, self.number % SLOTS)


def _storage_key(tensor: Tensor) -> StorageWeakRef:
    """Return a key of a tensor's memory that stays unique after it is freed; an address would be reused."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class RecordingCollective(Collective):
    """Group whose collectives are recorded."""

    def __init__(self, channel: str, members: Sequence[int], comm: RecordingCommunicator) -> None:
        super().__init__(channel, members, None, comm)
        self._comm, self._all_members = comm, tuple(members)

    def all_to_all(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return super().all_to_all(tensor)
        tensor = tensor.contiguous()
        piece = tensor.nbytes // self.size
        self._count("all_to_all", self._links, piece)
        return self._start_transfer("all_to_all", tensor, _like(tensor), piece)

    def all_gather(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return super().all_gather(tensor)
        tensor = tensor.contiguous()
        piece = tensor.nbytes
        self._count("all_gather", self._links[:1] * (self.size - 1), piece)
        received = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        return self._start_transfer("all_gather", tensor, received, piece)

    def reduce_scatter(self, tensor: Tensor) -> Any:
        if self.size == 1:
            return super().reduce_scatter(tensor)
        tensor = tensor.contiguous()
        piece = tensor.nbytes // self.size
        self._count("reduce_scatter", self._links[:1] * (self.size - 1), piece)
        return self._start_transfer("reduce_scatter", tensor, _like(tensor[0]), piece)

    def _start_transfer(self, operation: str, sent: Tensor, received: Tensor, piece_bytes: int) -> Any:
        recorder, name = self._comm.recorder, _communicator_name(self.channel, self._all_members)
        number = recorder.comm_start(self.channel, self.meter.phase, operation, self._all_members, name, [piece_bytes])
        return _RecordedHop(recorder, number, [sent], [received])


class _RecordedHop(Hop):
    """A started transfer of a dry run."""

    def __init__(self, recorder: Recorder, number: int, sent: Sequence[Tensor], received: Any) -> None:
        super().__init__([], sent, received)
        self._recorder, self._number = recorder, number

    def wait(self) -> Any:
        arrived = super().wait()
        self._recorder.comm_wait(self._number)
        return arrived


def _like(tensor: Tensor) -> Tensor:
    """Return a dense empty tensor, like `torch.empty_like`, which takes ten times as long on ``meta``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _communicator_name(channel: str, members: Sequence[int]) -> str:
    """Return the name of a communicator: one process group per channel and members, one NCCL communicator each."""
    return f"{channel}:{','.join(map(str, members))}"
