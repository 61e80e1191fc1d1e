"""A small transformer in pure torch (RoPE, grouped-query attention, gated MLP), and its attention functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 8
Attention = Callable[..., Tensor]


def visible(
    positions: Tensor, documents: Tensor | None = None, window: int | None = None, padding: Tensor | None = None
) -> Tensor:
    """Return the mask (B or 1, 1, S, S) of causal attention; ``documents`` (S) numbers the document of each token."""
    rows, columns = positions[:, None], positions[None, :]
    mask = columns <= rows
    if documents is not None:
        mask &= documents[:, None] == documents[None, :]
    if window is not None:
        mask &= columns > rows - window
    mask = mask[None, None]
    if padding is not None:
        # A padded query sees itself, so that no row is empty.
        mask = mask & padding[:, None, None, :].bool() | torch.eye(len(positions), dtype=torch.bool)
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention of (B, S, H, D) on one device, causal where there is no mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary embeddings to (B, S, H, D) at positions (B, S) or (S)."""
    half = x.shape[-1] // 2
    angles = positions.double()[..., None] * 100.0 ** -(torch.arange(half, device=positions.device).double() / half)
    angles = (angles if angles.dim() == 3 else angles[None])[:, :, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention, **mask: Any) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (-1, HEAD_DIM)) for part in (self.q, self.k, self.v))
        out = attention(rotate(q, positions), rotate(k, positions), v, **mask)
        x = x + self.o(out.flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        down: Tensor = self.down(silu(gate) * up)
        return x + down


class Model(nn.Module):
    """``attention(q, k, v, **mask)`` gets the keyword arguments of `forward` that are not positions."""

    def __init__(self, attention: Attention, *, layers: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.attention, self.recompute = attention, recompute
        self.embedding, self.layers = nn.Embedding(VOCAB, HIDDEN), nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **mask: Any) -> Tensor:
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        x = self.embedding(input_ids)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, positions, self.attention, use_reentrant=False, **mask)
            else:
                x = layer(x, positions, self.attention, **mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def shifted(ids: Tensor) -> Tensor:
    """Return the labels of next-token prediction: those of the last token are ignored."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)


def total_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
