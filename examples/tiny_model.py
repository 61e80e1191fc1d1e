"""A small Llama-like model and its batches, shared by the examples. The attention function is the only seam."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 256, 64, 4, 2, 2
HEAD_DIM = WIDTH // HEADS

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention over q (B, S, H, D) and k, v (B, S, Hkv, D); returns the shape of q."""


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply RoPE to x (B, S, H, D). ``positions`` are those in the whole sequence, not in the local part."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


class Layer(nn.Module):
    """One transformer layer: attention, then a two-layer MLP."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        normed = self.norm1(x)
        q = self.q(normed).unflatten(-1, (HEADS, HEAD_DIM))
        k, v = (part.unflatten(-1, (KV_HEADS, HEAD_DIM)) for part in self.kv(normed).chunk(2, -1))
        x = x + self.out(self.attention(rotate(q, positions), rotate(k, positions), v).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Embedding, layers and head. Weights depend on the seed alone, so they are equal on all ranks."""

    def __init__(self, attention: Attention, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one process."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def batch(step: int, seq: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and next-token labels (1, seq) of one step. Replicas of data parallelism have their own.

    The first eighth is a prompt, whose labels are ignored (-100).
    """
    generator = torch.Generator().manual_seed(1000 * replica + step)
    row = torch.randint(VOCABULARY, (1, seq + 1), generator=generator)
    return row[:, :-1], row[:, 1:].index_fill(1, torch.arange(seq // 8), -100)
