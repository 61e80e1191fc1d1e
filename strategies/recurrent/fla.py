"""The kernels of flash-linear-attention (Triton) for the gated delta rule, in the two phases of `RecurrenceKernel`.

They pass states from chunk to chunk, one thread block per head and 32 or 64 columns: 16 heads of 128 keep 32 or 64 of
an H100's 132 multiprocessors busy. So each document's part on a rank is split once more, into pieces that run side by
side. The pieces' transitions are computed first, and combined like those of ranks, here on one GPU.

Source: flash-linear-attention 0.6, whose functions do the work; the split within a GPU is its intra-card context
parallelism, there for inference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum, prepare_chunk_indices
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from .kernel import Carry, Inputs, Saved, Shard, entering, fold

CHUNK = 64
LEAST_CHUNKS = 32
"""Least number of chunks in a piece: shorter pieces would spend their time on combining."""


@dataclass(frozen=True)
class Pieces:
    """The pieces of every document's part on a rank, for all batch entries one after another."""

    count: int
    """Pieces of one batch entry."""
    starts: frozenset[int]
    """Pieces that begin a document's part."""
    bounds: Tensor
    """Cumulative lengths (int64, on the device) of all pieces."""
    chunks: Any
    """Index of every chunk, as the kernels want it."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that tell the kernels where the pieces are."""
        return {"cu_seqlens": self.bounds, "chunk_indices": self.chunks}


@lru_cache(maxsize=32)
def pieces_of(bounds: tuple[int, ...], batch: int, piece: int, device: torch.device) -> Pieces:
    """Split the parts of the documents into pieces of at most ``piece`` tokens.

    ``bounds`` are the cumulative lengths of the parts in one of ``batch`` entries, as in `Shard`.
    """
    cuts: list[int] = []
    starts: list[int] = []
    for first, end in pairwise(bounds):
        starts.append(len(cuts))
        cuts += range(first, end, piece)
    every = [entry * bounds[-1] + cut for entry in range(batch) for cut in cuts]
    cumulative = torch.tensor([*every, batch * bounds[-1]], device=device)
    return Pieces(len(cuts), frozenset(starts), cumulative, prepare_chunk_indices(cumulative, CHUNK))


def _flat(x: Tensor) -> Tensor:
    """Return a dense tensor of one batch entry, (1, B S, ...)."""
    return x.flatten(0, 1).unsqueeze(0).contiguous()


class FlaDeltaRule:
    """`RecurrenceKernel` for the gated delta rule in bfloat16, on a GPU, by flash-linear-attention."""

    name = "fla"

    def _pieces(self, x: Inputs, shard: Shard) -> Pieces:
        batch, tokens, heads = x.v.shape[:3]
        parallel = 2 * heads * batch
        wanted = max(1, torch.cuda.get_device_properties(x.q.device).multi_processor_count // parallel)
        chunks = max(LEAST_CHUNKS, -(-tokens // (wanted * CHUNK)))
        return pieces_of(shard.bounds, batch, chunks * CHUNK, x.q.device)

    def begin(self, x: Inputs, shard: Shard) -> tuple[Any, Carry]:
        assert x.beta is not None
        pieces = self._pieces(x, shard)
        k, v, g, beta = (_flat(tensor) for tensor in (x.k, x.v, x.g.squeeze(-1), x.beta))
        total = chunk_local_cumsum(g, CHUNK, scale=RCP_LN2, **pieces.options)
        w, u, solved = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=total, beta=beta, **pieces.options)
        maps, before, carry = None, None, Carry()
        if shard.sends or pieces.count > len(pieces.starts):
            batch, heads, keys, values = x.state_shape
            maps = k.new_empty(batch * pieces.count, heads, keys, values + keys, dtype=torch.float32)
            chunk_cp_fwd_h(k=k, w=w, u=u, hm=maps, g=total, cu_seqlens=pieces.bounds, multi_seqs=True)
            combined = maps.view(batch, -1, *maps.shape[1:])
            states, transitions = combined[..., :values], combined[..., values:]
            before, after = fold(states, transitions, range(pieces.count), pieces.starts, depends=shard.receives)
            carry = Carry(after[..., :values].contiguous(), after[..., values:] if shard.spans else None)
        return (pieces, k, w, u, total, solved, maps, before), carry

    def finish(self, x: Inputs, shard: Shard, local: Any, incoming: Tensor | None) -> tuple[Tensor, Saved]:
        pieces, k, w, u, total, solved, maps, before = local
        initial = None
        if before is not None or incoming is not None:
            batch, heads, keys, values = x.state_shape
            like = k.new_empty(batch, pieces.count, heads, keys, values, dtype=torch.float32)
            initial = entering(before or [None] * pieces.count, range(pieces.count), incoming, like)
        h, written, _ = chunk_gated_delta_rule_fwd_h(k=k, w=w, u=u, g=total, initial_state=initial, **pieces.options)
        out = chunk_fwd_o(q=_flat(x.q), k=k, v=written, h=h, g=total, scale=x.scale, **pieces.options)
        return out.view(x.v.shape), (total, solved, maps, initial)

    def begin_backward(self, x: Inputs, shard: Shard, saved: Saved, dout: Tensor) -> tuple[Any, Tensor | None]:
        assert x.beta is not None
        total, solved, maps, initial = saved
        pieces = self._pieces(x, shard)
        q, k, v, beta, dout = (_flat(tensor) for tensor in (x.q, x.k, x.v, x.beta, dout))
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=total, **pieces.options)
        h, written, _ = chunk_gated_delta_rule_fwd_h(k=k, w=w, u=u, g=total, initial_state=initial, **pieces.options)
        dwritten = chunk_bwd_dv_local(q=q, k=k, g=total, do=dout, scale=x.scale, **pieces.options)
        local = pieces, q, k, v, beta, dout, w, h, written, dwritten
        if not shard.receives and pieces.count == len(pieces.starts):
            return (*local, None), None
        batch, heads, keys, values = x.state_shape
        zeros = k.new_zeros(batch, pieces.count, heads, keys, values, dtype=torch.float32)
        gradients = self._states_backward(x, local, total, zeros.flatten(0, 1), None)[1].view_as(zeros)
        if maps is None:
            return (*local, None), gradients[:, 0]
        transitions = maps.view(batch, -1, *maps.shape[1:])[..., values:].mT
        # Backward a part begins with its last piece.
        starts = frozenset((start - 1) % pieces.count for start in pieces.starts)
        order = range(pieces.count)[::-1]
        before, after = fold(gradients, transitions, order, starts, depends=shard.sends)
        return (*local, before), after[..., :values] if shard.receives else None

    def finish_backward(
        self, x: Inputs, shard: Shard, saved: Saved, local: Any, doutgoing: Tensor | None
    ) -> tuple[Tensor, ...]:
        total, solved, _, _ = saved
        *local, before = local
        pieces, q, k, v, beta, dout, w, h, written, _ = local
        terminal = None
        if before is not None or doutgoing is not None:
            batch, heads, keys, values = x.state_shape
            like = k.new_empty(batch, pieces.count, heads, keys, values, dtype=torch.float32)
            order = range(pieces.count)[::-1]
            terminal = entering(before or [None] * pieces.count, order, doutgoing, like)
        dh, _, dwritten = self._states_backward(x, local, total, None, terminal)
        dq, dk, dw, dg = chunk_bwd_dqkwg(
            q=q, k=k, v=written, w=w, g=total, h=h, dv=dwritten, do=dout, dh=dh, scale=x.scale, **pieces.options
        )
        dk_too, dv, dbeta, dg_too = prepare_wy_repr_bwd(
            k=k, v=v, beta=beta, g=total, A=solved, dw=dw, du=dwritten, **pieces.options
        )
        dg = chunk_local_cumsum(dg.add_(dg_too), CHUNK, reverse=True, **pieces.options)
        gradients = (dq, dk.add_(dk_too), dv, dg, dbeta)
        return tuple(dx.view(y.shape).to(y.dtype) for dx, y in zip(gradients, x.tensors, strict=True))

    @staticmethod
    def _states_backward(x: Inputs, local: Any, total: Any, zeros: Tensor | None, terminal: Tensor | None) -> Any:
        """Return the gradients of all chunks' states, of the first ones (where ``zeros`` are given), and of u."""
        pieces, q, k, _, _, dout, w, _, _, dwritten = local
        return chunk_gated_delta_rule_bwd_dhu(
            q=q, k=k, w=w, g=total, h0=zeros, dht=terminal, do=dout, dv=dwritten, scale=x.scale, **pieces.options
        )
