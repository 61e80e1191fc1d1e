"""Interface of a recurrence's kernel: one rank's computation, and how stretches of tokens combine.

Every head keeps a state S (K, V). Token t updates it and reads from it:

    gated delta rule   S_t = exp(g_t) (S_{t-1} - beta_t k_t k_t^T S_{t-1}) + beta_t k_t v_t^T
    linear attention   S_t = exp(g_t) S_{t-1} + k_t v_t^T, with g_t one number per head, or one per row of S
    output             o_t = scale * S_t^T q_t

Each update is affine in the state, so a stretch of tokens acts on the state before it as S_end = M S_start + C. M, the
transition, is a K x K matrix for the delta rule, and a decay for linear attention. For gradients the stretch acts in
reverse: dS_start = M^T dS_end + D. A `Carry` holds (C, M), or (D, M^T).

Sources: Gated Delta Networks (arXiv 2412.06464); gated linear attention (arXiv 2312.06635); Mamba-2, the structured
state space duality (arXiv 2405.21060, section 8.2 for the split over ranks).

Shapes: B batch, S tokens of this rank, H heads, K and V the sizes of a head's keys and values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a recurrence: q and k (B, S, H, K), v (B, S, H, V), g (B, S, H, 1 or K), beta (B, S, H) or None.

    g is the logarithm of the decay, at most 0. Without beta the recurrence is linear attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    scale: float

    @classmethod
    def of(cls, tensors: Sequence[Tensor], scale: float) -> Inputs:
        """Return the inputs whose `tensors` these are: q, k, v, g and, for the delta rule, beta."""
        q, k, v, g, *beta = tensors
        return cls(q, k, v, g, beta[0] if beta else None, scale)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that can have gradients, in the order of the fields."""
        return (self.q, self.k, self.v, self.g) if self.beta is None else (self.q, self.k, self.v, self.g, self.beta)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape (B, H, K, V) of the states of all batch entries and heads."""
        batch, _, heads, key_dim = self.k.shape
        return batch, heads, key_dim, self.v.shape[-1]

    @property
    def transition_shape(self) -> tuple[int, int, int, int]:
        """Shape of a transition: (B, H, K, K) for the delta rule, else (B, H, 1 or K, 1)."""
        batch, heads, key_dim, _ = self.state_shape
        return (batch, heads, self.g.shape[-1], 1) if self.beta is None else (batch, heads, key_dim, key_dim)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the packed documents that one rank holds."""

    bounds: tuple[int, ...]
    """Cumulative lengths of the documents' parts on this rank, from 0 to S."""
    receives: bool
    """Whether the first part continues from a state."""
    sends: bool
    """Whether the state after the last part is needed."""

    @property
    def spans(self) -> bool:
        """Whether the state after the last token depends on the state before the first."""
        return self.receives and self.sends and len(self.bounds) == 2


@lru_cache(maxsize=64)
def shard_of(documents: tuple[int, ...], rank: int, size: int, *, initial: bool, final: bool) -> Shard:
    """Return the shard of ``rank`` of ``size`` for documents with these cumulative lengths, split contiguously.

    ``initial``: whether the first document continues from a state. ``final``: whether the last state is needed.
    """
    local = documents[-1] // size
    first, end = rank * local, (rank + 1) * local
    inner = documents[bisect_right(documents, first) : bisect_left(documents, end)]
    bounds = tuple(sorted({0, *(bound - first for bound in inner), local}))
    receives = initial if rank == 0 else not _is_bound(documents, first)
    sends = final if rank == size - 1 else not _is_bound(documents, end)
    return Shard(bounds, receives, sends)


@lru_cache(maxsize=64)
def reach_of(documents: tuple[int, ...], size: int) -> int:
    """Return the largest number of rank borders that lie inside one document; 0 where none does.

    A rank depends on at most that many ranks before it.
    """
    share = documents[-1] // size
    return max((end - 1) // share - first // share for first, end in pairwise(documents) if first < end)


def _is_bound(documents: tuple[int, ...], position: int) -> bool:
    return documents[bisect_left(documents, position)] == position


@dataclass(frozen=True, slots=True)
class Carry:
    """Effect of a stretch of tokens on a state S, as the pair (C, M): `after` returns M S + C."""

    state: Tensor | None = None
    """C (B, H, K, V), in at least float32; None where it is not needed."""
    transition: Tensor | None = None
    """M, of `Inputs.transition_shape`; None where the stretch does not depend on the state before it."""

    def after(self, before: Tensor | None) -> Tensor:
        """Return the state after the stretch; ``before`` is the state before it, None for zeros."""
        state, transition = self.state, self.transition
        assert state is not None
        if before is None or transition is None:
            return state
        if transition.shape[-1] == 1:
            return torch.addcmul(state, transition, before)
        batches = (x.flatten(0, 1) for x in (state, transition, before))
        return torch.baddbmm(*batches).view(state.shape)

    def then(self, later: Carry) -> Carry:
        """Return the effect of this stretch and, after it, ``later``."""
        transition = later.transition
        if transition is not None and self.transition is not None:
            transition = apply_transition(transition, self.transition)
        return Carry(later.after(self.state), transition if self.transition is not None else None)


def apply_transition(transition: Tensor, state: Tensor) -> Tensor:
    """Apply a transition, of `Inputs.transition_shape`, to a state (B, H, K, V) or to an earlier transition."""
    return transition * state if transition.shape[-1] == 1 else transition @ state


def transposed(transition: Tensor | None) -> Tensor | None:
    """Return M^T, the transition that gradients take in reverse; None for None."""
    return transition if transition is None or transition.shape[-1] == 1 else transition.mT


def states_between(
    pieces: Sequence[Carry], starts: Collection[int], first: Tensor | None
) -> tuple[list[Tensor | None], Tensor | None]:
    """Compute the state before each of the pieces, which follow each other, and the one after the last piece.

    A piece of ``starts`` begins a document's part, so the state before it is None, which stands for zeros. ``first`` is
    the state before the first piece. A piece whose state C is None must be the last, or come before one of ``starts``.
    """
    before: list[Tensor | None] = []
    current = first
    for index, piece in enumerate(pieces):
        if index in starts and index:
            current = None
        before.append(current)
        current = None if piece.state is None else piece.after(current)
    return before, current


Saved = tuple[Tensor | None, ...]
"""Tensors that a forward pass keeps for the backward pass."""


class RecurrenceKernel(Protocol):
    """Computation of one rank's part, in two phases each way, so that a state can travel between the phases.

    ``local`` is whatever the kernel passes from the first phase to the second.
    """

    name: str

    def begin(self, x: Inputs, shard: Shard) -> tuple[Any, Carry]:
        """Compute what needs no incoming state. Return (local, carry).

        The carry holds C where ``shard.sends``, and M where ``shard.spans``.
        """

    def finish(self, x: Inputs, shard: Shard, local: Any, incoming: Tensor | None) -> tuple[Tensor, Saved]:
        """Compute the output (B, S, H, V) in v's type. Return it and what the backward pass needs."""

    def begin_backward(self, x: Inputs, shard: Shard, saved: Saved, dout: Tensor) -> tuple[Any, Tensor | None]:
        """Compute what needs no gradient of the outgoing state. Return (local, D).

        D (B, H, K, V) is None unless ``shard.receives``.
        """

    def finish_backward(
        self, x: Inputs, shard: Shard, saved: Saved, local: Any, doutgoing: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of `Inputs.tensors`, in their order."""


def zero_state(x: Inputs, dtype: torch.dtype) -> Tensor:
    """Return zeros of `Inputs.state_shape`, on the device of q."""
    return torch.zeros(x.state_shape, dtype=dtype, device=x.q.device)
