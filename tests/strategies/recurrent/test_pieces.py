"""Recurrences in pieces, with pieces computed in plain torch, against the whole recurrence in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.strategies.recurrent.kernel import Carry, Inputs, RecurrenceKernel, Saved, Shard, states_between
from ringprof.strategies.recurrent.pieces import CHUNK, PieceKernel, Pieces, pieces_of
from ringprof.strategies.recurrent.reference import ReferenceRecurrence
from tests.pairs import pairs


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("starts", [{0}, {0, 2}, {0, 1, 4}])
def test_pieces_combine_to_the_states_between_them(starts: set[int], decays: bool) -> None:
    torch.manual_seed(0)
    states = torch.randn(5, 2, 3, 4, 6, dtype=torch.float64)
    transitions = torch.randn(5, 2, 3, 4, 1 if decays else 4, dtype=torch.float64)
    first = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    pieces = [Carry(state, transition) for state, transition in zip(states, transitions, strict=True)]
    before, after = states_between(pieces, starts, first)
    state = first
    for step in range(5):
        if step in starts and step:
            state = torch.zeros_like(state)
        known = before[step]
        assert torch.allclose(torch.zeros_like(state) if known is None else known, state)
        matrix = torch.diag_embed(transitions[step][..., 0]) if decays else transitions[step]
        state = matrix @ state + states[step]
    assert after is not None and torch.allclose(after, state)
    whole = reduce(Carry.then, pieces)
    if starts == {0}:
        assert torch.allclose(whole.after(first), state)


def phases(kernel: RecurrenceKernel, x: Inputs, shard: Shard, *tensors: Tensor | None) -> list[Tensor | None]:
    """Return every result of all phases."""
    incoming, dout, doutgoing = tensors
    assert dout is not None
    with torch.no_grad():
        local, carry = kernel.begin(x, shard)
        out, saved = kernel.finish(x, shard, local, incoming)
        local, dincoming = kernel.begin_backward(x, shard, saved, dout)
        gradients = kernel.finish_backward(x, shard, saved, local, doutgoing)
    return [carry.state if shard.sends else None, carry.transition, out, dincoming, *gradients]


class PlainPieces(PieceKernel):
    """Kernel of pieces of at most one chunk."""

    name = "plain"
    reference = ReferenceRecurrence()

    def pieces(self, x: Inputs, shard: Shard) -> Pieces:
        return pieces_of(shard.bounds, x.v.shape[0], CHUNK, x.q.device)

    def blocks(self, x: Inputs) -> int:
        raise NotImplementedError

    def prepare(self, x: Inputs, pieces: Pieces) -> Any:
        return None

    def _of_each(self, x: Inputs, pieces: Pieces) -> list[Inputs]:
        bounds = pieces.bounds.tolist()[: pieces.count + 1]
        return [Inputs.of([y[:, first:end] for y in x.tensors], x.scale) for first, end in pairwise(bounds)]

    def effects(self, x: Inputs, pieces: Pieces, local: Any) -> tuple[Tensor, Tensor]:
        shards = [(y, Shard((0, y.v.shape[1]), True, True)) for y in self._of_each(x, pieces)]
        carries = [self.reference.begin(*call)[1] for call in shards]
        states, transitions = zip(*((carry.state, carry.transition) for carry in carries), strict=True)
        return torch.stack(states, 1), torch.stack(transitions, 1)

    def _compute(self, x: Inputs, pieces: Pieces, initial: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the states (B P, H, K, V) after the pieces."""
        outputs, states = [], []
        before = initial.view(x.v.shape[0], pieces.count, *initial.shape[1:])
        for index, y in enumerate(self._of_each(x, pieces)):
            shard = Shard((0, y.v.shape[1]), True, True)
            outputs.append(self.reference.finish(y, shard, None, before[:, index])[0])
            carry = self.reference.begin(y, shard)[1]
            states.append(carry.after(before[:, index]))
        return torch.cat(outputs, 1), torch.stack(states, 1).flatten(0, 1)

    def _states(self, x: Inputs, pieces: Pieces, initial: Tensor | None) -> Tensor:
        batch, *shape = x.state_shape
        return torch.zeros(batch * pieces.count, *shape, dtype=x.q.dtype) if initial is None else initial

    def forward(self, x: Inputs, pieces: Pieces, local: Any, initial: Tensor | None) -> tuple[Tensor, Saved]:
        return self._compute(x, pieces, self._states(x, pieces, initial))[0], ()

    def prepare_backward(self, x: Inputs, pieces: Pieces, kept: Any, initial: Tensor | None, dout: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [y.detach().requires_grad_() for y in x.tensors]
            before = self._states(x, pieces, initial).detach().requires_grad_()
            out, states = self._compute(Inputs.of(leaves, x.scale), pieces, before)
        return leaves, before, out, states, dout.view_as(out)

    def effects_backward(self, x: Inputs, pieces: Pieces, local: Any) -> Tensor:
        _, before, out, _, dout = local
        gradients: Tensor = torch.autograd.grad(out, before, dout, retain_graph=True)[0]
        return gradients

    def backward(self, x: Inputs, pieces: Pieces, local: Any, terminal: Tensor | None) -> Sequence[Tensor]:
        leaves, _, out, states, dout = local
        count = 1 if terminal is None else 2
        gradients: Sequence[Tensor] = torch.autograd.grad((out, states)[:count], leaves, (dout, terminal)[:count])
        return gradients


@pytest.mark.parametrize("operator", ["gated_delta_rule", "simple_gla", "gla"])
def test_a_recurrence_in_pieces_equals_the_whole(operator: str) -> None:
    torch.manual_seed(0)
    # One piece, three equal pieces, a shorter last piece, and documents of one and several pieces.
    bounds_of_cases = [(0, 40), (0, 192), (0, 150), (0, 30, 70, 200), (0, 100, 150)]
    for bounds, receives, sends, batch in pairs(bounds_of_cases, [False, True], [False, True], [1, 2]):

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64)

        tokens, heads, keys, values = bounds[-1], 2, 3, 4
        q, k, v = (
            normal(batch, tokens, heads, keys),
            normal(batch, tokens, heads, keys),
            normal(batch, tokens, heads, values),
        )
        g = -0.1 * normal(batch, tokens, heads, keys if operator == "gla" else 1).abs()
        beta = [normal(batch, tokens, heads).sigmoid()] if operator == "gated_delta_rule" else []
        x = Inputs.of([q, torch.nn.functional.normalize(k, dim=-1), v, g, *beta], 0.5)
        incoming, doutgoing = (normal(batch, heads, keys, values) if known else None for known in (receives, sends))
        shard, dout = Shard(bounds, receives, sends), torch.randn_like(v)
        actual = phases(PlainPieces(), x, shard, incoming, dout, doutgoing)
        expected = phases(ReferenceRecurrence(), x, shard, incoming, dout, doutgoing)
        for result, truth in zip(actual, expected, strict=True):
            assert (result is None) == (truth is None)
            assert result is None or truth is None or torch.allclose(result, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bounds", [(0, 192), (0, 150), (0, 30, 70, 300)])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_indices_of_pieces_are_those_found_token_by_token(bounds: tuple[int, ...], batch: int) -> None:
    """Walk over all tokens; a piece ends at a border of documents or after 128 tokens, a chunk after `CHUNK`."""
    pieces = pieces_of(bounds, batch, 2 * CHUNK, torch.device("cpu"))
    chunks: list[tuple[int, int]] = []
    ends: list[int] = []
    piece = -1
    for entry in range(batch):
        start = 0
        for token in range(bounds[-1]):
            if token in bounds or token - start == 2 * CHUNK:
                piece, start = piece + 1, token
            if (token - start) % CHUNK == 0:
                chunks.append((piece, (token - start) // CHUNK))
                ends.append(0)
            ends[-1] = entry * bounds[-1] + token
    assert pieces.chunks.tolist() == [list(chunk) for chunk in chunks]
    first, each = (offsets.tolist() for offsets in pieces.offsets)
    assert each == list(range(piece + 2)) and pieces.count * batch == piece + 1
    assert [index for index, (_, chunk) in enumerate(chunks) if chunk == 0] == first[:-1] and first[-1] == len(chunks)
    assert pieces.ends[pieces.counted.bool()].tolist() == ends
