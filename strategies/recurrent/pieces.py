"""A recurrence in pieces of a rank's tokens that run side by side, in the two phases of `RecurrenceKernel`.

Kernels pass states from chunk to chunk in few thread blocks: 32 or 64 for the delta rule with 16 heads of 128, on the
132 multiprocessors of an H100. So each document's part on a rank is split once more, into pieces that run side by side.
A first pass computes what each piece does to a state, and stores nothing else. The pieces are combined like the parts
of ranks, here on one GPU. Then all pieces run with the states before them known.

Source: the idea is flash-linear-attention's intra-card context parallelism (0.6), there for inference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from ..first_order import only_first_order
from .kernel import Carry, Inputs, Saved, Shard, states_between, transposed

CHUNK = 64
"""Tokens per chunk."""
LEAST_CHUNKS = 64
"""Least number of chunks in a piece: shorter pieces would spend their time on combining."""


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
    chunks: Tensor
    """Piece, and position in the piece, of every chunk (int64, chunks x 2)."""
    offsets: tuple[Tensor, Tensor]
    """Cumulative numbers of the pieces' chunks, and of the pieces themselves (int64, pieces + 1)."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that tell fla's kernels where the pieces are."""
        return {} if self.even else {"cu_seqlens": self.bounds, "chunk_indices": self.chunks}

    @property
    def scan_options(self) -> dict[str, Any]:
        """Keyword arguments that tell fla's kernels of the delta rule, which pass states, where the pieces are."""
        return {} if self.even else {**self.options, "chunk_offsets": self.offsets[0]}

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
    chunk_offsets = [0, *accumulate(map(len, chunk_ends))]
    cumulative = torch.tensor(every, device=device)
    return Pieces(
        len(cuts), frozenset(starts), len(cuts) == 1 or (len(bounds) == 2 and bounds[-1] % piece == 0), cumulative,
        torch.tensor([[*ends, *[0] * (most - len(ends))] for ends in chunk_ends], device=device),
        torch.tensor([[1.0] * len(ends) + [0.0] * (most - len(ends)) for ends in chunk_ends], device=device),
        torch.tensor([[i, chunk] for i, ends in enumerate(chunk_ends) for chunk in range(len(ends))], device=device),
        (torch.tensor(chunk_offsets, device=device), torch.arange(len(every), device=device)),
    )  # fmt: skip


class PieceKernel(ABC):
    """`RecurrenceKernel` in pieces."""

    name: str
    BLOCKS_PER_PROCESSOR: ClassVar[int]
    """Thread blocks that should run side by side on a multiprocessor while states pass."""

    def begin(self, x: Inputs, shard: Shard) -> tuple[Any, Carry]:
        pieces = self.pieces(x, shard)
        local = self.prepare(x, pieces)
        every, transitions = [Carry()] * pieces.count, None
        if shard.sends or pieces.count > len(pieces.starts):
            states, transitions = self.effects(x, pieces, local)
            every = _carries(states, transitions)
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
        pieces = self.pieces(x, shard)
        local = self.prepare_backward(x, pieces, kept, initial, pieces.whole(dout))
        every = [Carry()] * pieces.count
        if shard.receives or pieces.count > len(pieces.starts):
            batch, *shape = x.state_shape
            states = self.effects_backward(x, pieces, local).view(batch, -1, *shape)
            every = _carries(states, transitions, reverse=True)
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

    def pieces(self, x: Inputs, shard: Shard) -> Pieces:
        """Return as many pieces as keep the GPU busy."""
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
    def effects_backward(self, x: Inputs, pieces: Pieces, local: Any) -> Tensor:
        """Return the gradients (B P, H, K, V) of the states before all pieces, where those after them have none."""

    @abstractmethod
    def backward(self, x: Inputs, pieces: Pieces, local: Any, terminal: Tensor | None) -> Sequence[Tensor]:
        """Return the gradients of `Inputs.tensors`; ``terminal`` (B P, H, K, V) are those after the pieces."""


def _carries(states: Tensor, transitions: Tensor | None, *, reverse: bool = False) -> list[Carry]:
    """Return the effects of the pieces, in reverse with transposed transitions, from the last piece to the first."""
    if transitions is None:
        carries = [Carry(state) for state in states.unbind(1)]
    else:
        maps = transposed(transitions) if reverse else transitions
        assert maps is not None
        carries = [Carry(*pair) for pair in zip(states.unbind(1), maps.unbind(1), strict=True)]
    return carries[::-1] if reverse else carries


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


# --- the causal depthwise convolution of one rank's tokens, after its halo: the tokens before them ---

_LONGEST = CHUNK * 2**24
"""Tokens of a document that is never split into pieces."""


def convolve(
    x: Tensor, halo: Tensor, weight: Tensor, bias: Tensor | None, bounds: tuple[int, ...], *, by_fla: bool
) -> Tensor:
    """Convolve x (B, S, C), which follows halo (B, W - 1, C), with weight (C, W); add bias (C). Return (B, S, C).

    ``bounds`` are the cumulative lengths of the documents' parts in x, of which only the first sees the halo.
    ``by_fla`` allows the kernel of flash-linear-attention. Several documents in several batch entries are computed by
    torch, and so are weights with W = 1.
    """
    if by_fla and weight.shape[1] > 1 and (len(bounds) == 2 or x.shape[0] == 1):
        return _convolve_by_fla(x, halo, weight, bias, bounds)
    width, tokens = weight.shape[1], x.shape[1]
    rows = torch.cat([halo, x], 1)
    if len(bounds) == 2:
        return conv1d(rows.mT, weight.unsqueeze(1), bias, groups=weight.shape[0]).mT
    since = _tokens_since_border(bounds, width, x.device)
    terms = [
        torch.where((since >= back)[:, None], rows[:, width - 1 - back :][:, :tokens], 0) * weight[:, width - 1 - back]
        for back in range(width)
    ]
    out: Tensor = sum(terms[1:], terms[0])
    return out if bias is None else out + bias


def _convolve_by_fla(
    x: Tensor, halo: Tensor, weight: Tensor, bias: Tensor | None, bounds: tuple[int, ...]
) -> Tensor:  # fmt: skip
    from fla.modules.causal_conv1d import causal_conv1d  # imports Triton

    # One state (C, W) per document: the tokens before its first, of which the earliest is never read.
    states = pad(halo.mT, (1, 0, 0, 0, 0, len(bounds) - 2))
    # One piece per document, or one only.
    options = pieces_of(bounds, x.shape[0], _LONGEST, x.device).options
    x, weight, bias, states = only_first_order(x, weight, bias, states)
    out: Tensor = causal_conv1d(x, weight, bias, initial_state=states, **options)[0]
    return out


@lru_cache(maxsize=8)
def _tokens_since_border(bounds: tuple[int, ...], most: int, device: torch.device) -> Tensor:
    """Return each token's distance from the start of its document (int64, S); ``most`` in the first document."""
    positions = torch.arange(bounds[-1], device=device)
    inner = torch.tensor(bounds[1:-1], device=device)
    index = torch.searchsorted(inner, positions, right=True)
    return torch.where(index > 0, positions - inner[(index - 1).clamp(min=0)], most)
