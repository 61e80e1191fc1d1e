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
from ringprof.strategies.recurrent.pieces import convolve
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


def test_a_second_call_launches_the_compiled_kernels_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla")
    from ringprof.strategies.recurrent.fla import FlaLinearAttention
    from ringprof.strategies.recurrent.launches import CachedKernel

    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 512, 16, SIZE, device="cuda").bfloat16() for _ in range(4))
    g = -torch.rand(1, 512, 16, 1, device="cuda")
    kernel, shard = FlaLinearAttention(), Shard((0, 512), True, False)
    if choose_kernel("auto", Inputs.of([q, k, v, g], 1.0)).name != "fla":
        pytest.skip("these kernels do not run here")
    state = torch.randn(1, 16, SIZE, SIZE, device="cuda")

    def compute(x: Inputs) -> list[Tensor]:
        return [tensor for tensor in phases(kernel, x, shard, state, dout, None) if tensor is not None]

    first = compute(Inputs.of([q, k, v, g], 1.0))
    searches: list[Any] = []
    search = CachedKernel._search

    def search_and_count(kernel: CachedKernel, *call: Any) -> None:
        searches.append(call)
        search(kernel, *call)

    monkeypatch.setattr(CachedKernel, "_search", search_and_count)
    # Other memory, the same numbers.
    second = compute(Inputs.of([tensor.clone() for tensor in (q, k, v, g)], 1.0))
    assert not searches
    for expected, actual in zip(first, second, strict=True):
        assert torch.equal(actual, expected)
    # Another scale is another set of arguments.
    third = compute(Inputs.of([q, k, v, g], 0.5))
    assert searches and not torch.equal(third[0], first[0])


@pytest.mark.parametrize(("bounds", "batch"), [((0, 700), 2), ((0, 1, 300, 302, 700), 1)])
def test_the_convolution_of_fla_equals_float64(bounds: tuple[int, ...], batch: int) -> None:
    pytest.importorskip("fla")
    torch.manual_seed(0)
    tokens, channels, width = bounds[-1], 6144, 4
    shapes = [(batch, tokens, channels), (batch, width - 1, channels), (channels, width), (channels,)]
    tensors = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    dout = torch.randn(shapes[0], device="cuda").bfloat16()
    results = []
    for by_fla, dtype in ((True, torch.bfloat16), (False, torch.float64)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        x, halo, weight, bias = leaves
        out = convolve(x, halo, weight, bias, bounds, by_fla=by_fla)
        results.append([out, *torch.autograd.grad(out, leaves, dout.to(dtype))])
    for result, truth in zip(*results, strict=True):
        assert float((result.double() - truth).abs().max() / truth.abs().max()) < 1e-2


def test_arithmetic_of_grids_is_that_of_triton() -> None:
    triton = pytest.importorskip("triton")
    from ringprof.strategies.recurrent.launches import _HostTriton

    for number, size in product(range(1, 200), (1, 2, 3, 64, 65)):
        assert _HostTriton.cdiv(number, size) == triton.cdiv(number, size)
        assert _HostTriton.next_power_of_2(number) == triton.next_power_of_2(number)
    assert _HostTriton().Config is triton.Config
