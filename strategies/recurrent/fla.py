"""The kernels of flash-linear-attention (Triton) for recurrences, in the two phases of `RecurrenceKernel`.

They pass states from chunk to chunk, and only few thread blocks run side by side: 32 or 64 for the delta rule with 16
heads of 128, on the 132 multiprocessors of an H100. So each document's part on a rank is split once more, into pieces
that run side by side. A first pass computes what each piece does to a state, and stores nothing else. The pieces are
combined like the parts of ranks, here on one GPU. Then all pieces run with the states before them known.

Source: flash-linear-attention 0.6, whose functions do the work; the split within a GPU is its intra-card context
parallelism, there for inference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Any, ClassVar

import torch
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.common.chunk_h import chunk_bwd_dh, chunk_fwd_h
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv, chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.gla.chunk import (
    chunk_gla_bwd_dA,
    chunk_gla_bwd_dqk_intra,
    chunk_gla_bwd_dqkg,
    chunk_gla_bwd_dv,
    chunk_gla_fwd_intra_gk,
    chunk_gla_fwd_o_gk,
)
from fla.ops.utils import chunk_local_cumsum, prepare_chunk_indices
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from .kernel import Carry, Inputs, Saved, Shard, states_between, transposed

CHUNK = 64
LEAST_CHUNKS = 32
"""Least number of chunks in a piece: shorter pieces would spend their time on combining."""
_WHOLE = 2**30
"""Split size, in tokens, at which the kernels of linear attention store one state per piece."""


@dataclass(frozen=True)
class Pieces:
    """The pieces of every document's part on a rank, in all batch entries."""

    count: int
    """Pieces of one batch entry."""
    starts: frozenset[int]
    """Pieces that begin a document's part."""
    even: bool
    """Whether all pieces have the same length: whole chunks, unless there is one piece only."""
    bounds: Tensor
    """Cumulative lengths (int64, on the device) of the pieces of all batch entries, one after another."""
    ends: Tensor
    """Position of the last token of each chunk of each piece (int64, pieces x chunks), 0 beyond a piece's chunks."""
    counted: Tensor
    """1 for each chunk of a piece, else 0 (float32, pieces x chunks)."""
    chunks: Any
    """Index of every chunk, as the kernels want it."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that tell the kernels where the pieces are."""
        return {} if self.even else {"cu_seqlens": self.bounds, "chunk_indices": self.chunks}

    def whole(self, x: Tensor) -> Tensor:
        """Return a dense tensor (B, S, ...) for kernels that compute chunks apart: if not even, (1, B S, ...)."""
        return x.contiguous() if self.even else x.contiguous().view(1, -1, *x.shape[2:])

    def split(self, x: Tensor) -> Tensor:
        """Return what `whole` returned for kernels that pass states: (B P, S/P, ...), or unchanged if not even."""
        return x.view(x.shape[0] * self.count, -1, *x.shape[2:]) if self.even else x


@lru_cache(maxsize=32)
def pieces_of(bounds: tuple[int, ...], batch: int, piece: int, device: torch.device) -> Pieces:
    """Split the parts of the documents into pieces of at most ``piece`` tokens, a multiple of `CHUNK`.

    ``bounds`` are the cumulative lengths of the parts in one of ``batch`` entries, as in `Shard`.
    """
    cuts: list[int] = []
    starts: list[int] = []
    for first, end in pairwise(bounds):
        starts.append(len(cuts))
        cuts += range(first, end, piece)
    every = [*(entry * bounds[-1] + cut for entry in range(batch) for cut in cuts), batch * bounds[-1]]
    chunk_ends = [[min(start + CHUNK, end) - 1 for start in range(first, end, CHUNK)] for first, end in pairwise(every)]
    most = max(map(len, chunk_ends))
    cumulative = torch.tensor(every, device=device)
    return Pieces(
        len(cuts), frozenset(starts), len(cuts) == 1 or (len(bounds) == 2 and bounds[-1] % piece == 0), cumulative,
        torch.tensor([[*ends, *[0] * (most - len(ends))] for ends in chunk_ends], device=device),
        torch.tensor([[1.0] * len(ends) + [0.0] * (most - len(ends)) for ends in chunk_ends], device=device),
        prepare_chunk_indices(cumulative, CHUNK),
    )  # fmt: skip


class FlaKernel(ABC):
    """`RecurrenceKernel` by the functions of flash-linear-attention, in bfloat16, on a GPU."""

    name = "fla"
    BLOCKS_PER_PROCESSOR: ClassVar[int]
    """Thread blocks that should run side by side on a multiprocessor while states pass."""

    def begin(self, x: Inputs, shard: Shard) -> tuple[Any, Carry]:
        pieces = self._pieces(x, shard)
        local = self.prepare(x, pieces)
        every, transitions = [Carry()] * pieces.count, None
        if shard.sends or pieces.count > len(pieces.starts):
            states, transitions = self.effects(x, pieces, local)
            every = _carries(states, transitions, range(pieces.count))
        if shard.spans:
            return (pieces, local, every, transitions, None), reduce(Carry.then, every)
        before, after = None, None
        if shard.sends or not shard.receives:
            before, after = states_between(every if shard.sends else [*every[:-1], Carry()], pieces.starts, None)
        return (pieces, local, every, transitions, None if shard.receives else before), Carry(after)

    def finish(self, x: Inputs, shard: Shard, local: Any, incoming: Tensor | None) -> tuple[Tensor, Saved]:
        pieces, local, every, transitions, before = local
        if before is None:
            before = states_between([*every[:-1], Carry()], pieces.starts, incoming)[0]
        initial = _joined(before)
        out, kept = self.forward(x, pieces, local, initial)
        return out.view(x.v.shape).to(x.v.dtype), (initial, transitions, *kept)

    def begin_backward(self, x: Inputs, shard: Shard, saved: Saved, dout: Tensor) -> tuple[Any, Tensor | None]:
        initial, transitions, *kept = saved
        pieces = self._pieces(x, shard)
        local = self.prepare_backward(x, pieces, kept, initial, pieces.whole(dout))
        every = [Carry()] * pieces.count
        if shard.receives or pieces.count > len(pieces.starts):
            batch, *shape = x.state_shape
            states = x.q.new_empty(batch * pieces.count, *shape, dtype=torch.float32)
            states = self.effects_backward(x, pieces, local, states).view(batch, -1, *shape)
            every = _carries(states, transitions, range(pieces.count)[::-1])
        before, after = None, None
        if shard.receives or not shard.sends:
            before, after = states_between(every if shard.receives else [*every[:-1], Carry()], _reversed(pieces), None)
        return (pieces, local, every, None if shard.sends else before), after

    def finish_backward(
        self, x: Inputs, shard: Shard, saved: Saved, local: Any, doutgoing: Tensor | None
    ) -> tuple[Tensor, ...]:
        pieces, local, every, before = local
        if before is None:
            before = states_between([*every[:-1], Carry()], _reversed(pieces), doutgoing)[0]
        gradients = self.backward(x, pieces, local, _joined(before[::-1]))
        return tuple(dx.view(y.shape).to(y.dtype) for dx, y in zip(gradients, x.tensors, strict=True))

    def _pieces(self, x: Inputs, shard: Shard) -> Pieces:
        processors = torch.cuda.get_device_properties(x.q.device).multi_processor_count
        wanted = max(1, int(self.BLOCKS_PER_PROCESSOR * processors) // self.blocks(x))
        chunks = max(LEAST_CHUNKS, -(-x.v.shape[1] // (wanted * CHUNK)))
        return pieces_of(shard.bounds, x.v.shape[0], chunks * CHUNK, x.q.device)

    @abstractmethod
    def blocks(self, x: Inputs) -> int:
        """Return how many thread blocks pass the states of one piece of every batch entry."""

    @abstractmethod
    def prepare(self, x: Inputs, pieces: Pieces) -> Any:
        """Compute what every chunk needs of its own tokens."""

    @abstractmethod
    def effects(self, x: Inputs, pieces: Pieces, local: Any) -> tuple[Tensor, Tensor]:
        """Return C (B, P, H, K, V) and M (B, P, ...) of all pieces, as in `Carry`."""

    @abstractmethod
    def forward(self, x: Inputs, pieces: Pieces, local: Any, initial: Tensor | None) -> tuple[Tensor, Saved]:
        """Return the output and tensors to keep; ``initial`` (B P, H, K, V) precedes the pieces, None for zeros."""

    @abstractmethod
    def prepare_backward(self, x: Inputs, pieces: Pieces, kept: Any, initial: Tensor | None, dout: Tensor) -> Any:
        """Compute what needs no gradient of a state after a piece."""

    @abstractmethod
    def effects_backward(self, x: Inputs, pieces: Pieces, local: Any, like: Tensor) -> Tensor:
        """Return the gradients of the states before all pieces, where those after them have none.

        They have the shape (B P, H, K, V) and type of ``like``.
        """

    @abstractmethod
    def backward(self, x: Inputs, pieces: Pieces, local: Any, terminal: Tensor | None) -> Sequence[Tensor]:
        """Return the gradients of `Inputs.tensors`; ``terminal`` (B P, H, K, V) are those after the pieces."""


class FlaDeltaRule(FlaKernel):
    """Kernel for the gated delta rule."""

    BLOCKS_PER_PROCESSOR = 1

    def blocks(self, x: Inputs) -> int:
        batch, heads, _, values = x.state_shape
        return batch * heads * -(-values // 64)

    def prepare(self, x: Inputs, pieces: Pieces) -> Any:
        assert x.beta is not None
        k, v, g, beta = (pieces.whole(tensor) for tensor in (x.k, x.v, x.g.squeeze(-1), x.beta))
        total = chunk_local_cumsum(g, CHUNK, scale=RCP_LN2, **pieces.options)
        w, u, solved = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=total, beta=beta, **pieces.options)
        return k, w, u, total, solved

    def effects(self, x: Inputs, pieces: Pieces, local: Any) -> tuple[Tensor, Tensor]:
        batch, heads, keys, values = x.state_shape
        maps = x.k.new_empty(batch * pieces.count, heads, keys, values + keys, dtype=torch.float32)
        k, w, u, total = (tensor.flatten(0, 1).unsqueeze(0) for tensor in local[:4])
        chunk_cp_fwd_h(k=k, w=w, u=u, hm=maps, g=total, cu_seqlens=pieces.bounds, multi_seqs=True)
        maps = maps.view(batch, -1, *maps.shape[1:])
        return maps[..., :values], maps[..., values:]

    def forward(self, x: Inputs, pieces: Pieces, local: Any, initial: Tensor | None) -> tuple[Tensor, Saved]:
        k, w, u, total, solved = local
        h, written = _delta_states(pieces, k, w, u, total, initial)
        out = chunk_fwd_o(q=pieces.whole(x.q), k=k, v=written, h=h, g=total, scale=x.scale, **pieces.options)
        return out, (total, solved)

    def prepare_backward(self, x: Inputs, pieces: Pieces, kept: Any, initial: Tensor | None, dout: Tensor) -> Any:
        assert x.beta is not None
        total, solved = kept
        q, k, v, beta = (pieces.whole(tensor) for tensor in (x.q, x.k, x.v, x.beta))
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=total, **pieces.options)
        h, written = _delta_states(pieces, k, w, u, total, initial)
        dwritten = chunk_bwd_dv_local(q=q, k=k, g=total, do=dout, scale=x.scale, **pieces.options)
        return q, k, v, total, beta, solved, w, h, written, dout, dwritten

    def effects_backward(self, x: Inputs, pieces: Pieces, local: Any, like: Tensor) -> Tensor:
        gradients: Tensor = self._pass_back(x, pieces, local, like, None)[1]
        return gradients

    def backward(self, x: Inputs, pieces: Pieces, local: Any, terminal: Tensor | None) -> Sequence[Tensor]:
        q, k, v, total, beta, solved, w, h, written, dout, _ = local
        dh, _, dwritten = self._pass_back(x, pieces, local, None, terminal)
        dq, dk, dw, dg = chunk_bwd_dqkwg(
            q=q, k=k, v=written, w=w, g=total, h=h, dv=dwritten, do=dout, dh=dh, scale=x.scale, **pieces.options
        )
        dk_too, dv, dbeta, dg_too = prepare_wy_repr_bwd(
            k=k, v=v, beta=beta, g=total, A=solved, dw=dw, du=dwritten, **pieces.options
        )
        dg = chunk_local_cumsum(dg.add_(dg_too), CHUNK, reverse=True, **pieces.options)
        return dq, dk.add_(dk_too), dv, dg, dbeta

    @staticmethod
    def _pass_back(x: Inputs, pieces: Pieces, local: Any, like: Tensor | None, terminal: Tensor | None) -> Any:
        """Return the gradients of all chunks' states, of the first ones where ``like`` is given, and of u."""
        q, k, _, total, _, _, w, _, _, *rest = local
        q, k, total, w, dout, dwritten = (pieces.split(tensor) for tensor in (q, k, total, w, *rest))
        dh, dfirst, dwritten = chunk_gated_delta_rule_bwd_dhu(
            q=q, k=k, w=w, g=total, h0=like, dht=terminal, do=dout, dv=dwritten, scale=x.scale, **pieces.options
        )
        return dh, dfirst, dwritten.view_as(rest[1])


class FlaLinearAttention(FlaKernel):
    """Kernel for linear attention with a decay per head, or per head and key channel."""

    BLOCKS_PER_PROCESSOR = 4

    def blocks(self, x: Inputs) -> int:
        batch, heads, keys, values = x.state_shape
        return batch * heads * -(-keys // 64) * -(-values // 64)

    def prepare(self, x: Inputs, pieces: Pieces) -> Any:
        k, v, g = (pieces.whole(tensor) for tensor in (x.k, x.v, x.g))
        return k, v, chunk_local_cumsum(g if _by_channel(x) else g.squeeze(-1), CHUNK, scale=RCP_LN2, **pieces.options)

    def effects(self, x: Inputs, pieces: Pieces, local: Any) -> tuple[Tensor, Tensor]:
        _, _, total = local
        states = self._states(x, pieces, local, None, output_final_state=True, split_size=_WHOLE)[1]
        batch, *shape = x.state_shape
        ends = total.view(-1, *x.g.shape[2:])[pieces.ends]
        decay = (ends * pieces.counted[..., None, None]).sum(1).exp2()
        return states.view(batch, -1, *shape), decay.view(batch, -1, *x.transition_shape[1:])

    def forward(self, x: Inputs, pieces: Pieces, local: Any, initial: Tensor | None) -> tuple[Tensor, Saved]:
        k, v, total = local
        q = pieces.whole(x.q)
        h = self._states(x, pieces, local, initial)[0]
        options = {"h": h, "g": total, "scale": x.scale, **pieces.options}
        if not _by_channel(x):
            return chunk_fwd_o(q=q, k=k, v=v, **options), (total,)
        scores = chunk_gla_fwd_intra_gk(q=q, k=k, g=total, scale=x.scale, **pieces.options)
        return chunk_gla_fwd_o_gk(q=q, v=v, A=scores, **options), (total, scores)

    def prepare_backward(self, x: Inputs, pieces: Pieces, kept: Any, initial: Tensor | None, dout: Tensor) -> Any:
        q, k, v = (pieces.whole(tensor) for tensor in (x.q, x.k, x.v))
        h = self._states(x, pieces, (k, v, kept[0]), initial, states_in_fp32=True)[0]
        return q, k, v, kept, h, dout

    def effects_backward(self, x: Inputs, pieces: Pieces, local: Any, like: Tensor) -> Tensor:
        gradients: Tensor = self._pass_back(x, pieces, local, like, None, split_size=_WHOLE)[1]
        return gradients

    def backward(self, x: Inputs, pieces: Pieces, local: Any, terminal: Tensor | None) -> Sequence[Tensor]:
        q, k, v, (total, *scores), h, dout = local
        dh = self._pass_back(x, pieces, local, None, terminal)[0]
        common = {"do": dout, "g": total, **pieces.options}
        if scores:
            dv = chunk_gla_bwd_dv(k=k, A=scores[0], dh=dh, **common)
            dscores = chunk_gla_bwd_dA(v=v, do=dout, scale=x.scale, **pieces.options)
            dq, dk = chunk_gla_bwd_dqk_intra(q=q, k=k, g=total, dA=dscores, **pieces.options)
            dq, dk, dg = chunk_gla_bwd_dqkg(q=q, k=k, v=v, h=h, dh=dh, dq=dq, dk=dk, scale=x.scale, **common)
            return dq, dk, dv, dg
        dq, dk, _, dg = chunk_bwd_dqkwg(q=q, k=k, v=v, h=h, dh=dh, scale=x.scale, **common)
        dv = chunk_bwd_dv(q=q, k=k, dh=dh, scale=x.scale, **common)
        return dq, dk, dv, chunk_local_cumsum(dg, CHUNK, reverse=True, **pieces.options)

    @staticmethod
    def _states(x: Inputs, pieces: Pieces, local: Any, initial: Tensor | None, **options: Any) -> Any:
        """Return the states before all chunks, and the last ones of all pieces where the options want them."""
        k, v, total = map(pieces.split, local)
        return chunk_fwd_h(k=k, v=v, **_gates(x, total), h0=initial, **_lengths(pieces), **options)

    @staticmethod
    def _pass_back(
        x: Inputs, pieces: Pieces, local: Any, like: Tensor | None, terminal: Tensor | None, **options: Any
    ) -> Any:
        """Return the gradients of the states after all chunks, and of the first states where ``like`` is given."""
        q, k, v, (total, *_), _, dout = local
        q, k, v, total, dout = map(pieces.split, (q, k, v, total, dout))
        return chunk_bwd_dh(
            q=q, k=k, v=v, **_gates(x, total), do=dout, h0=like, dht=terminal, scale=x.scale, states_in_fp32=True,
            **_lengths(pieces), **options,
        )  # fmt: skip


def _delta_states(
    pieces: Pieces, k: Tensor, w: Tensor, u: Tensor, total: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the states before all chunks, and what the tokens write, of u's shape."""
    k, w, values, total = map(pieces.split, (k, w, u, total))
    h, written, _ = chunk_gated_delta_rule_fwd_h(k=k, w=w, u=values, g=total, initial_state=initial, **pieces.options)
    return h, written.view_as(u)


def _by_channel(x: Inputs) -> bool:
    return x.g.shape[-1] > 1


def _gates(x: Inputs, total: Tensor) -> dict[str, Tensor]:
    return {"gk" if _by_channel(x) else "g": total}


def _lengths(pieces: Pieces) -> dict[str, Any]:
    return {} if pieces.even else {"cu_seqlens": pieces.bounds}


def _carries(states: Tensor, transitions: Tensor | None, order: range) -> list[Carry]:
    """Return the effects of the pieces in this order; in reverse the transitions are transposed."""
    return [
        Carry(
            states[:, piece],
            None
            if transitions is None
            else transposed(transitions[:, piece])
            if order.step < 0
            else transitions[:, piece],
        )
        for piece in order
    ]


def _reversed(pieces: Pieces) -> set[int]:
    """Return which pieces begin a document's part in reverse: those that end it."""
    return {(pieces.count - start) % pieces.count for start in pieces.starts}


def _joined(states: list[Tensor | None]) -> Tensor | None:
    """Return the states (B P, H, K, V) of all pieces, zeros in place of None; None where all are."""
    known = [state for state in states if state is not None]
    if not known:
        return None
    zeros = torch.zeros_like(known[0]) if len(known) < len(states) else known[0]
    return torch.stack([zeros if state is None else state for state in states], 1).flatten(0, 1)
