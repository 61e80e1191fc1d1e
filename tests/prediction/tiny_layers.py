"""A model of attention layers, as `ringprof calibrate --model` takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class _Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.stack = nn.Sequential(*(_Layer() for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stack(x)
        return out


def layers(count: int) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """Return a model of ``count`` layers, and a function of the number of tokens that returns its arguments."""
    return _Stack(count), lambda tokens: {"x": torch.randn(1, tokens, 8)}
