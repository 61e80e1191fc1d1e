"""The kernels of flash-linear-attention in phases, against the reference in float64, on a GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.strategies.recurrent import pieces
from ringprof.strategies.recurrent.kernel import Inputs, Shard
from ringprof.strategies.recurrent.kernels import choose_kernel
from ringprof.strategies.recurrent.reference import ReferenceRecurrence
from tests.strategies.recurrent.test_pieces import phases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # fla imports parts of torch that warn of each other.
    pytest.mark.filterwarnings("default"),
]
SIZE = 128


@pytest.mark.parametrize("operator", ["gated_delta_rule", "simple_gla", "gla"])
def test_phases_of_fla_equal_the_reference(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla")
    # Several pieces even of short sequences.
    monkeypatch.setattr(pieces, "LEAST_CHUNKS", 2)
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
