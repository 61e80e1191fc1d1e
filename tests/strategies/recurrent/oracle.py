"""The recurrences token by token, as their papers write them; reads nothing of the implementation.

Tensors are (B, S, H, ...) of the whole sequence; keys have as many heads as values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float, documents: Sequence[int],
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output of every token and the last state; g is (B, S, H) or (B, S, H, K)."""
    batch, seq, heads, keys = k.shape
    state = torch.zeros(batch, heads, keys, v.shape[3], dtype=v.dtype) if initial is None else initial
    starts, outputs = set(documents) - {0}, []
    for t in range(seq):
        if t in starts:
            state = torch.zeros_like(state)
        decay = g[:, t].exp()
        state = decay.reshape(batch, heads, -1, 1) * state
        if beta is None:
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        else:
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, documents: Sequence[int],
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y and the last state (B, H, N, P) of h_t = exp(dt A) h_{t-1} + dt B_t x_t, y_t = C_t h_t + D x_t."""
    batch, seq, heads, size = x.shape
    h = torch.zeros(batch, heads, b.shape[3], size, dtype=x.dtype) if initial is None else initial
    group = [head * b.shape[2] // heads for head in range(heads)]
    starts, outputs = set(documents) - {0}, []
    for t in range(seq):
        if t in starts:
            h = torch.zeros_like(h)
        step = dt[:, t]
        h = (step * a).exp()[..., None, None] * h
        h = h + step[..., None, None] * b[:, t, group][..., :, None] * x[:, t][..., None, :]
        y = (c[:, t, group][..., :, None] * h).sum(2)
        outputs.append(y if d is None else y + d[:, None] * x[:, t])
    return torch.stack(outputs, 1), h


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Sequence[int]) -> Tensor:
    """Return the causal depthwise convolution of x (B, S, C), document by document."""
    width, outputs = weight.shape[1], []
    for first, end in pairwise(sorted(set(documents))):
        for t in range(first, end):
            total = torch.zeros_like(x[:, 0])
            for back in range(width):
                if t - back >= first:
                    total = total + weight[:, width - 1 - back] * x[:, t - back]
            outputs.append(total if bias is None else total + bias)
    return torch.stack(outputs, 1)
