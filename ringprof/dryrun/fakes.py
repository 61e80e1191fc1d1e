"""Fakes for dry runs: a kernel that computes nothing and a transport that sends nothing; both record their calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ringprof.dryrun.dispatch import Recorder
from ringprof.strategies.kernels import varlen
from ringprof.strategies.kernels.kernel import Gradients, Kernel, allocate_adjacent
from ringprof.strategies.kernels.merge import wide_type
from ringprof.strategies.masks.mask_blocks import Batch, Lengths, MaskBlocks
from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.copy_engine import SLOTS, views_in_slot
from ringprof.strategies.transport.hosts import Hosts
from ringprof.strategies.transport.message import Message, MessageLayout
from ringprof.strategies.transport.ring_channel import Channel, Connect, Hop, RankGroup

KNOWN_KERNELS = ("cudnn", "flash-attn-3", "flash-attn-4", "flash-attn", "torch-flash", "cpu-flash", "reference")
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
        out = self.recorder.empty((*q.shape[:3], v.shape[3]), q.dtype, q.device)
        lse = self.recorder.empty((batch, heads, seq), wide_type(q), q.device)
        self.recorder.attention("forward", q, k, _split_bytes(self.name, q, k), causal=causal)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool, *_: Tensor,
        into: Gradients | None = None,
    ) -> Gradients:  # fmt: skip
        if not self.production:
            self.recorder.attention("backward", q, k, 0, causal=causal)
            return super()._backward(dout, q, k, v, lse, out, delta, scale, causal)  # type: ignore[safe-super]
        dq, dk, dv = into or (self._like(q), *self._kv_gradients(k, v))
        self.recorder.attention("backward", q, k, _scratch_bytes(self.name, q, k), causal=causal)
        return dq, dk, dv

    def _kv_gradients(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate dK and dV as the kernel does: see `allocate_adjacent`."""
        if not self.pairs_gradients:
            return self._like(k), self._like(v)
        if k.shape != v.shape:
            return allocate_adjacent(k, v)
        dk, dv = self.recorder.empty((2, *k.shape), k.dtype, k.device).unbind(0)
        return dk, dv

    def _like(self, tensor: Tensor) -> Tensor:
        return self.recorder.empty(tensor.shape, tensor.dtype, tensor.device)

    # Varlen kernels get all sequences at once, packed: q (T, H, D), k and v (T', Hkv, D).

    def _forward_parts(self, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: MaskBlocks) -> tuple[Tensor, Tensor]:
        if not self.varlen:
            return super()._forward_parts(q, k, v, scale, parts)
        return varlen.forward(self._packed_forward, q, k, v, scale, parts)

    def _backward_parts(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, parts: MaskBlocks, into: Gradients | None = None,
    ) -> Gradients:  # fmt: skip
        if not self.varlen:
            return super()._backward_parts(dout, q, k, v, lse, out, delta, scale, parts)
        assert out is not None
        return varlen.backward(self._packed_backward, dout, q, k, v, lse, out, scale, parts, into)

    def _packed_forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = self.recorder.empty((*q.shape[:2], v.shape[2]), q.dtype, q.device)
        lse = self.recorder.empty((q.shape[1], q.shape[0]), wide_type(q), q.device)
        self.recorder.attention(
            "forward", q[None], k[None], 0, *_pairs_and_sequences(batch, q.shape[0]), causal=batch.causal
        )
        return out, lse

    def _packed_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Lengths, batch: Batch,
        scale: float, into: Gradients | None = None,
    ) -> Gradients:  # fmt: skip
        gradients = into or (self._like(q), self._like(k), self._like(v))
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
    and cuDNN keep dK and dV of every query head before they reduce them over a group; flash-attn 3 and 4 accumulate
    those of a group in float32.
    """
    if kernel == "cpu-flash":
        # One buffer per thread, independent of the block's length.
        return 0
    batch, rows, heads, head_dim = q.shape
    rounded_rows = -(-rows // 128) * 128 if kernel == "flash-attn" and not sequences else rows + 128 * sequences
    group_bytes = 0
    if heads != k.shape[2]:
        newer = kernel in ("flash-attn-3", "flash-attn-4")
        group_bytes = 2 * 4 * k.numel() if newer else 2 * q.nbytes // rows * k.shape[1]
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


@dataclass
class DryRunNetwork:
    """State that the transports of one rank's dry run share."""

    recorder: Recorder
    slots: dict[StorageWeakRef, _ReceiveSlots] = field(default_factory=dict)
    """Receive slots of rings, by their memory."""
    spread: dict[str, int] = field(default_factory=dict)
    """Largest number of members on one host per channel; 0 if all are on one host."""

    def connect(self, channel: Channel, comm: RankGroup, shares: Any, keeps: bool) -> RecordingTransport:
        """Return the transport of a new channel; a `Connect`."""
        return RecordingTransport(self, channel, comm, shares, keeps)


def dry_run_communicator(connect: Connect, rank: int, size: int, per_host: int, hops: str) -> Communicator:
    """Return the communicator of one rank of ``size``, of which ``per_host`` share a host, over fake transports."""
    return Communicator(hops=hops, connect=connect, dry_run=(rank, _hosts(size, per_host)))


@lru_cache(maxsize=4)
def _hosts(size: int, per_host: int) -> Hosts:
    """Return the hosts of all ranks, shared by all ranks of a dry run."""
    return Hosts({rank: rank // per_host for rank in range(size)})


class RecordingTransport:
    """Transport that records transfers. Received data is fresh memory, or a slot if copy engines carry the hops."""

    def __init__(self, network: DryRunNetwork, channel: Channel, comm: RankGroup, shares: Any, keeps: bool) -> None:
        self._network, self._recorder = network, network.recorder
        per_host_counts = Counter(map(comm.hosts.number, channel.ranks))
        network.spread[channel.channel] = max(per_host_counts.values()) if len(per_host_counts) > 1 else 0
        # One process group per channel and members, one NCCL communicator each.
        own_name = f"{channel.channel}:{','.join(map(str, channel.ranks))}"
        self.communicator: str = own_name if shares is None else shares.communicator
        self.slots: _ReceiveSlots | None = None
        self.free_slot: Callable[[MessageLayout], list[Tensor]] | None = None
        if comm.hops == "copy" and len(per_host_counts) == 1 and not keeps:
            # Two members have one ring of copies for all channels, as in
            # `ringprof.strategies.transport.copy_engine.copy_ring`.
            pair = channel.size == 2
            self.communicator = f"{self.communicator if pair else own_name}/copy"
            self.slots = shares.slots if shares is not None and pair else _ReceiveSlots(network)
            self.free_slot = self.slots.last

    def hop(self, ring: Channel, message: Message, into: Message | None) -> Hop:
        """Record the start of a hop. Return one that hands out ``into`` or an empty message."""
        # A message in another ring's receive slots is copied: see
        # `ringprof.strategies.transport.copy_engine.copy_if_in_other_slot`.
        owners = [self._network.slots.get(_storage_key(buffer)) for buffer in message.buffers]
        if not all(slots is None or slots is self.slots for slots in owners):
            message = message.with_buffers([buffer.clone() for buffer in message.buffers])
        if self.slots is None:
            operation, buffers = "send_recv", [self._like(x) for x in message.buffers]
        else:
            self.slots.number += 1
            operation, buffers = "copy", self.slots.last(message.layout)
        received = message.with_buffers(buffers)
        ring.meter.add(ring.channel, operation, ring.link, message.size_bytes)
        sizes = [buffer.nbytes for buffer in message.buffers]
        return self._start(ring, operation, sizes, list(message.buffers), received if into is None else into)

    def collective(self, channel: Channel, operation: str, tensor: Tensor) -> Hop:
        """Record the start of a collective."""
        piece_bytes = tensor.nbytes if operation == "all_gather" else tensor.nbytes // channel.size
        channel.count_collective(operation, piece_bytes)
        if operation == "all_gather":
            received = self._recorder.empty((channel.size, *tensor.shape), tensor.dtype, tensor.device)
        else:
            received = self._like(tensor if operation == "all_to_all" else tensor[0])
        return self._start(channel, operation, [piece_bytes], [tensor], [received])

    def send(self, chain: Channel, tensor: Tensor) -> Hop:
        """Record the start of a message to the next rank of a chain."""
        chain.meter.add(chain.channel, "send_recv", chain.link, tensor.nbytes)
        return self._chained(chain, (chain.ranks[chain.rank], chain.following), tensor, None)

    def receive(self, chain: Channel, like: Tensor) -> Tensor:
        """Record a message from the previous rank of a chain, and the wait for it."""
        hop = self._chained(chain, (chain.previous, chain.ranks[chain.rank]), like, self._like(like))
        return hop.wait()  # type: ignore[no-any-return]

    def _chained(self, chain: Channel, ends: tuple[int, int], tensor: Tensor, received: Tensor | None) -> Hop:
        # torch gives each pair of ranks that send outside a batch a communicator of its own.
        pair = f"{self.communicator}/{min(ends)},{max(ends)}"
        number = self._recorder.comm_start(chain.channel, chain.meter.phase, "chain", ends, pair, [tensor.nbytes])
        return _RecordedHop(self._recorder, number, [tensor], received)

    def _like(self, tensor: Tensor) -> Tensor:
        return self._recorder.empty(tensor.shape, tensor.dtype, tensor.device)

    def _start(self, channel: Channel, operation: str, sizes: list[int], sent: list[Tensor], received: Any) -> Hop:
        number = self._recorder.comm_start(
            channel.channel, channel.meter.phase, operation, channel.ranks, self.communicator, sizes
        )
        return _RecordedHop(self._recorder, number, sent, received)


class _ReceiveSlots:
    """Memory that copied hops are received in, in rotation."""

    def __init__(self, network: DryRunNetwork) -> None:
        """Create empty slots; ``network.slots`` maps their memory to them."""
        self._owners, self._recorder, self.number = network.slots, network.recorder, 0
        self._memory = torch.empty(0, dtype=torch.uint8, device="meta")
        self._views: dict[tuple[MessageLayout, int], tuple[list[Tensor], int]] = {}

    def last(self, layout: MessageLayout) -> list[Tensor]:
        """Return the buffers in the slot of the last counted hop; reallocate all slots if they are too small."""
        size = layout.slot_bytes
        if self._memory.numel() < SLOTS * size:
            self._memory = torch.empty(SLOTS * size, dtype=torch.uint8, device="meta")
            self._owners[_storage_key(self._memory)] = self
            self._views.clear()
        key = layout, self.number % SLOTS
        if key in self._views:
            views, calls = self._views[key]
            self._recorder.repeated(calls)
        else:
            calls = self._recorder.calls
            views, *_ = views_in_slot(self._memory, self._memory.numel() // SLOTS, layout, self.number % SLOTS)
            self._views[key] = views, self._recorder.calls - calls
        return list(views)


def _storage_key(tensor: Tensor) -> StorageWeakRef:
    """Return a key of a tensor's memory that stays unique after it is freed; an address would be reused."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _RecordedHop(Hop):
    """A started transfer of a dry run."""

    def __init__(self, recorder: Recorder, number: int, sent: Sequence[Tensor], received: Any) -> None:
        super().__init__([], sent, received)
        self._recorder, self._number = recorder, number

    def wait(self) -> Any:
        arrived = super().wait()
        self._recorder.comm_wait(self._number)
        return arrived
