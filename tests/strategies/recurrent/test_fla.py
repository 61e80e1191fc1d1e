"""The kernels of flash-linear-attention in phases, against the reference in float64, on a GPU."""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.strategies.recurrent.kernel import Carry, Inputs, RecurrenceKernel, Shard, states_between
from ringprof.strategies.recurrent.kernels import choose_kernel
from ringprof.strategies.recurrent.reference import ReferenceRecurrence

SIZE = 128


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("operator", ["gated_delta_rule", "simple_gla", "gla"])
def test_phases_of_fla_equal_the_reference(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla")
    from ringprof.strategies.recurrent import fla

    # Several pieces even of short sequences.
    monkeypatch.setattr(fla, "LEAST_CHUNKS", 2)
    torch.manual_seed(0)
    bounds_of_cases = [(0, 768), (0, 700), (0, 300, 310, 700)]
    for bounds, receives, sends, batch in product(bounds_of_cases, [False, True], [False, True], [1, 2]):

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda")

        tokens, heads = bounds[-1], 16
        q, k, v, dout = (normal(batch, tokens, heads, SIZE).bfloat16() for _ in range(4))
        k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
        g = -0.1 * torch.rand(batch, tokens, heads, SIZE if operator == "gla" else 1, device="cuda")
        beta = [torch.rand(batch, tokens, heads, device="cuda")] if operator == "gated_delta_rule" else []
        x = Inputs.of([q, k, v, g, *beta], SIZE**-0.5)
        states = [normal(batch, heads, SIZE, SIZE) if present else None for present in (receives, sends)]
        shard = Shard(bounds, receives, sends)
        try:
            kernel: Any = choose_kernel("fla", x)
        except ValueError as error:
            pytest.skip(str(error))
        actual = phases(kernel, x, shard, states[0], dout, states[1])
        exact = [None if state is None else state.double() for state in states]
        x = Inputs.of([tensor.double() for tensor in x.tensors], x.scale)
        expected = phases(ReferenceRecurrence(), x, shard, exact[0], dout.double(), exact[1])
        for result, truth in zip(actual, expected, strict=True):
            assert (result is None) == (truth is None)
            if result is not None and truth is not None:
                assert float((result.double() - truth).abs().max() / truth.abs().max()) < 3e-2
