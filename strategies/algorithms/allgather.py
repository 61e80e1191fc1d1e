"""All-gather: every rank gathers all keys and values once, and computes its queries against them.

There is no ring, so no step waits for the previous one. The strategy is also a baseline that shows the value of a
ring's overlap. During the gather, the rank computes the block with its own keys; then one or two full rectangles with
the keys of all other ranks. With packed documents too, these are two at most for each document, and varlen kernels
compute the same one of all documents in one call. The backward pass gathers again, because keeping all keys would cost
their memory in every layer. It computes a part of its own block meanwhile, and returns dK and dV by reduce-scatter,
overlapped with the rest of its own block. The gradients that are summed take the memory of the gathered keys.

Keys of other ranks that rank r of N needs with a causal mask:

    contiguous   all queries: ranks 0 .. r-1                      r rectangles of S x S: the last rank does the most
    zigzag       first half of the queries: chunks 0 .. r-1       2N-2 chunk squares together, on every rank
                 second half: those and chunks r+1 .. 2N-2-r

With ``heads_at_a_time``, that many kv heads are gathered per message, and at most two gathers are in memory at once.
The bytes sent are the same, in more messages; the memory is that of two gathers instead of all heads.

Source: Llama 3 (arXiv 2407.21783), contiguous; Transformer Engine's all_gather, zigzag. Both call a kernel that aligns
its mask to the end of a key prefix. Our blocks are full or square causal, so the own block is separate.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..annotate import ring_step
from ..base import (
    DOCUMENTS_LAYOUT_HELP,
    AttentionCall,
    Context,
    DocumentsLayout,
    GradWire,
    Rows,
    Shape,
    Strategy,
    wire_type,
)
from ..kernels.kernel import Gradients
from ..kernels.merge import Partial, Sum, accumulate, add_and_cast, write_rows
from ..masks.expected import contiguous_imbalance
from ..masks.layouts import LAYOUTS, Block, Layout, part
from ..masks.sharded_mask import ShardedMask
from ..transport.ring_channel import Hop


class AllGather(Strategy):
    """All-gather of K and V, reduce-scatter of dK and dV."""

    layout = LAYOUTS["contiguous"]
    takes_masks = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        "layout": "contiguous as in Llama 3, or zigzag for balanced causal work",
        "documents_layout": DOCUMENTS_LAYOUT_HELP,
        "heads_at_a_time": "kv heads per gather (default: all)",
        "grad_wire": "type of dK and dV in the reduce-scatter: fp32, or the input's own",
        **Strategy.PARAMETERS,
    }

    def __init__(
        self, context: Context, *, layout: Literal["contiguous", "zigzag"] = "contiguous",
        documents_layout: DocumentsLayout = "auto", heads_at_a_time: int | None = None,
        grad_wire: GradWire = "input", deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(context, deterministic=deterministic)
        self.layout = LAYOUTS[layout]
        self.parameters |= {"layout": layout, "documents_layout": documents_layout, "grad_wire": grad_wire}
        self.parameters["heads_at_a_time"] = heads_at_a_time
        self._captured: set[_RemoteKeys] = set()
        self.kv = self.comm.collective("kv")
        self.dkv = self.comm.collective("dkv")

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return contiguous_imbalance(size) if causal and params.get("layout", "contiguous") == "contiguous" else 1.0

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Layout:
        return LAYOUTS[params.get("layout", "contiguous")]

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        heads = params.get("heads_at_a_time")
        if heads is not None and (heads < 1 or shape.kv_heads % heads):
            return f"heads_at_a_time {heads} does not divide {shape.kv_heads} kv heads"
        return super().why_unsupported(shape, size, **params)

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        results = [self._forward(call, *chunk) for chunk in self._by_heads(q, k, v)]
        if len(results) == 1:
            return results[0]
        return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        gradients = [
            self._backward(call, select_heads(rows, index, q, k, some_k), some_q, some_k, some_v, gathers)
            for index, (some_q, some_k, some_v, gathers) in enumerate(self._by_heads(q, k, v))
        ]
        if len(gradients) == 1:
            return gradients[0]
        dq, dk, dv = (torch.cat(chunks, 2) for chunks in zip(*gradients, strict=True))
        return dq, dk, dv

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, list[Hop]]]:
        """Yield q, k and v of each chunk of kv heads with the gathers of k and v.

        The next chunk's gathers already run.
        """
        count = self.parameters["heads_at_a_time"] or k.shape[2]
        if count == k.shape[2]:
            yield q, k, v, [self.kv.all_gather(x) for x in (k, v)]
            return
        groups, following = q.shape[2] // k.shape[2], None
        for first in range(0, k.shape[2], count):
            current = following or self._start_gather(k, v, first, count)
            following = self._start_gather(k, v, first + count, count) if first + count < k.shape[2] else None
            yield q[:, :, first * groups : (first + count) * groups].contiguous(), *current

    def _start_gather(self, k: Tensor, v: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, list[Hop]]:
        """Start the gathers of ``count`` kv heads from ``first`` on; return these heads of k and v, too."""
        k, v = (x[:, :, first : first + count].contiguous() for x in (k, v))
        return k, v, [self.kv.all_gather(x) for x in (k, v)]

    def _forward(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, gathers: list[Hop]
    ) -> tuple[Tensor, Tensor]:
        result = Partial()
        with ring_step("fwd", 0, "block"):
            result.merge(*call.forward(q, k, v, self.local_block(call, q)))
        remote = self._remote_keys(q.shape[1], call)
        k_others, v_others = (remote.select(gather.wait()[0]) for gather in gathers)
        for step, block in enumerate(remote.blocks, 1):
            with ring_step("fwd", step, "block"):
                out, lse = call.forward(q, k_others, v_others, block)
            with ring_step("fwd", step, "merge"):
                result.merge(out, lse, block.q)
        with ring_step("fwd", len(remote.blocks), "merge"):
            return result.result(q.dtype)

    def _backward(
        self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor, gathers: list[Hop]
    ) -> Gradients:
        first_block, held_back = self.split_local_block(call, q, k)
        dq = Sum(q)
        with ring_step("bwd", 0, "block"):
            local_grads = [(first_block, call.backward(rows, q, k, v, first_block))]
        remote = self._remote_keys(q.shape[1], call)
        k_others, v_others = (remote.select(gather.wait()[0]) for gather in gathers)
        remote_dk: list[tuple[slice, Tensor]] = []
        remote_dv: list[tuple[slice, Tensor]] = []
        for step, block in enumerate(remote.blocks, 1):
            with ring_step("bwd", step, "block"):
                block_dq, dk, dv = call.backward(rows, q, k_others, v_others, block)
            with ring_step("bwd", step, "merge"):
                dq.add(block_dq, block.q)
            remote_dk.append((block.kv, dk))
            remote_dv.append((block.kv, dv))
            del block_dq, dk, dv
        # The sums of all ranks' gradients take the place of the gathered keys.
        del k_others, v_others
        wire, scatters = wire_type(self.parameters["grad_wire"], k), []
        for like, parts in ((k, remote_dk), (v, remote_dv)):
            with ring_step("bwd", len(remote.blocks), "merge"):
                sums = remote.scatter(parts, like, wire)
            scatters.append(self.dkv.reduce_scatter(sums))
            parts.clear()
            del sums
        for block in held_back:
            with ring_step("bwd", self.comm.size, "block"):
                local_grads.append((block, call.backward(rows, q, k, v, block)))
        dk, dv = (scatter.wait()[0] for scatter in scatters)
        with ring_step("bwd", self.comm.size, "merge"):
            for block, grads in local_grads:
                dq.add(grads[0], block.q)
            dk, dv = (
                add_and_cast(x, [(block.kv, grads[index]) for block, grads in local_grads], k.dtype)
                for index, x in enumerate((dk, dv), start=1)
            )
            return dq.result(q.dtype), dk, dv

    def _remote_keys(self, local_seq: int, call: AttentionCall) -> _RemoteKeys:
        """Return the blocks of this rank's queries with the keys of all other ranks."""
        is_zigzag = self.parameters["layout"] == "zigzag"
        remote = _remote_keys(self.comm.rank, self.comm.size, local_seq, call.causal, is_zigzag, call.sharded_mask)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            # A CUDA graph reads the rows at each replay, when the cache may have dropped them.
            self._captured.add(remote)
        return remote


@lru_cache(maxsize=16)
def _remote_keys(
    rank: int, size: int, local_seq: int, causal: bool, is_zigzag: bool, mask: ShardedMask | None
) -> _RemoteKeys:
    """Return the blocks of a rank's queries with the keys of all other ranks; cached for all layers and passes."""
    if mask is not None:
        block, ranges = mask.block_with_others(rank)
        return _RemoteKeys(size, local_seq, [] if block is None else [block], ranges)
    if not causal or not is_zigzag:
        first_own, end_own = rank * local_seq, (rank + 1) * local_seq
        blocks = [Block(kv=slice(0, first_own))] if first_own else []
        if not causal and end_own < size * local_seq:
            blocks.append(Block(kv=slice(end_own, size * local_seq)))
        return _RemoteKeys(size, local_seq, blocks, [(0, first_own if causal else size * local_seq)])
    half = local_seq // 2
    chunks = [*range(rank), *range(rank + 1, 2 * size - 1 - rank)]
    blocks = [Block(slice(0, half), slice(0, rank * half))] if rank else []
    if chunks:
        blocks.append(Block(slice(half, local_seq), slice(0, len(chunks) * half)))
    firsts = (chunk * local_seq if chunk < size else (2 * size - 1 - chunk) * local_seq + half for chunk in chunks)
    return _RemoteKeys(size, local_seq, blocks, [(first, first + half) for first in firsts])


def select_heads(rows: Rows, index: int, q: Tensor, k: Tensor, some_k: Tensor) -> Rows:
    """Return the rows of the heads of one chunk, ``some_k``; unchanged if the chunk has all heads of ``k``."""
    count = some_k.shape[2] * (q.shape[2] // k.shape[2])
    if count == q.shape[2]:
        return rows
    heads = slice(index * count, (index + 1) * count)
    dout, out = (None if x is None else x[:, :, heads].contiguous() for x in (rows.dout, rows.out))
    delta = None if rows.delta is None else rows.delta[:, heads].contiguous()
    assert dout is not None
    return Rows(dout, rows.lse[:, heads].contiguous(), out, delta)


class _RemoteKeys:
    """Blocks of a rank's queries with the gathered keys of the other ranks that they see."""

    def __init__(self, size: int, local_seq: int, blocks: list[Block], ranges: list[tuple[int, int]]) -> None:
        """Select the keys in ``ranges`` (first, end) of all ranks' rows, in the order in which blocks index them."""
        self.blocks, self._size, self._seq = blocks, size, local_seq
        self._ranges = [(first, end) for first, end in ranges if first < end]
        self._rows: dict[tuple[int, torch.device], Tensor | slice] = {}

    def select(self, gathered: Tensor) -> Tensor:
        """Select the needed keys (B, S', Hkv, D) from the gathered ones (N, B, S, Hkv, D)."""
        batch, *head = gathered.shape[1], *gathered.shape[3:]
        rows, flat = self._rows_on(gathered.device, batch), gathered.flatten(0, 2)
        if not isinstance(rows, slice):
            some = flat.index_select(0, rows)
        else:
            # A view keeps all gathered keys in memory: not for less than half of them.
            some = flat[rows] if 2 * (rows.stop - rows.start) >= len(flat) else flat[rows].clone()
        return some.view(batch, len(some) // batch, *head)

    def scatter(self, parts: list[tuple[slice, Tensor]], like: Tensor, wire: torch.dtype) -> Tensor:
        """Return the sum of gradients of the needed keys as (N, B, S, Hkv, D) in ``wire``, zero for all other keys.

        ``parts`` are gradients and their rows among the needed keys; they are overwritten. ``like`` is (B, S, Hkv, D).
        """
        batch, _, *head = like.shape
        full = like.new_zeros((self._size * batch * self._seq, *head), dtype=wire)
        rows = self._rows_on(like.device, batch)
        # The largest first: the others are added to it where it covers all needed keys.
        parts = sorted(parts, key=lambda x: -x[1].shape[1])
        if isinstance(rows, slice):
            for kv, gradient in parts:
                accumulate(part(full[None, rows], kv), gradient)
        elif parts:
            kv, total = parts[0]
            if total.dtype != wire or total.shape[1] * batch < len(rows):
                total = write_rows(like.new_empty((batch, len(rows) // batch, *head), dtype=wire), kv, total)
            for kv, gradient in parts[1:]:
                accumulate(part(total, kv), gradient)
            full.index_copy_(0, rows, total.flatten(0, 1))
        return full.view(self._size, batch, self._seq, *head)

    def _rows_on(self, device: torch.device, batch: int) -> Tensor | slice:
        """Return the rows of the needed keys among the gathered ones of a batch, one rank's entries after another's.

        They are a slice where one entry's follow each other, else int64 on the device.
        """
        if (batch, device) not in self._rows:
            ranges = self._ranges or [(0, 0)]
            self._rows[batch, device] = slice(ranges[0][0], ranges[-1][1])
            if batch > 1 or any(end != first for (_, end), (first, _) in pairwise(ranges)):
                row = torch.cat([torch.arange(*span, device="cpu") for span in ranges])
                entry = torch.arange(batch, device="cpu")[:, None]
                index = row // self._seq * (batch * self._seq) + row % self._seq + entry * self._seq
                self._rows[batch, device] = index.flatten().to(device, non_blocking=True)
        return self._rows[batch, device]
