"""The convolution by another package's operator, by a stand-in that computes as that does, and in plain torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from ringprof.strategies.recurrent.pieces import convolve


class StandIn(torch.autograd.Function):
    """Convolution whose backward pass, like that of a Triton kernel, returns tensors without a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, states: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias, states)
        return StandIn.computed(x, weight, bias, states)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = StandIn.computed(*leaves)
        return torch.autograd.grad(out, leaves, dout.detach())

    @staticmethod
    def computed(x: Tensor, weight: Tensor, bias: Tensor, states: Tensor) -> Tensor:
        rows = torch.cat([states[..., 1:].mT, x], 1)
        return conv1d(rows.mT, weight.unsqueeze(1), bias, groups=weight.shape[0]).mT


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor) -> tuple[Tensor, None]:
        return StandIn.apply(x, weight, bias, initial_state), None

    for name in ("fla", "fla.modules"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", SimpleNamespace(causal_conv1d=causal_conv1d))


def leaves_of() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (2, 7, 5), (2, 3, 5), (5, 4), (5,)
    x, halo, weight, bias = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    return x, halo, weight, bias


def test_gradients_are_those_of_plain_torch() -> None:
    results = []
    for by_fla in (True, False):
        leaves = leaves_of()
        out = convolve(*leaves, (0, 7), by_fla=by_fla)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for result, truth in zip(*results, strict=True):
        torch.testing.assert_close(result, truth)


@pytest.mark.parametrize("number", range(4))
def test_second_order_gradients_are_refused_and_not_dropped(number: int) -> None:
    leaves = leaves_of()
    out = convolve(*leaves, (0, 7), by_fla=True)
    gradient = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)[number]
    with pytest.raises(RuntimeError, match="second-order gradients"):
        (out.sum() + gradient.square().sum()).backward()
