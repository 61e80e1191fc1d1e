"""The causal depthwise convolution of one rank's tokens, after its halo: the tokens before them.

Sources: causal_conv1d of flash-linear-attention 0.6 (Triton), in bfloat16 on a GPU; elsewhere plain torch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from ..first_order import only_first_order
from .pieces import CHUNK, pieces_of

_LONGEST = CHUNK * 2**24
"""Tokens of a document that is never split into pieces."""


def convolve(
    x: Tensor, halo: Tensor, weight: Tensor, bias: Tensor | None, bounds: tuple[int, ...], *, by_fla: bool
) -> Tensor:
    """Convolve x (B, S, C), which follows halo (B, W - 1, C), with weight (C, W); add bias (C). Return (B, S, C).

    ``bounds`` are the cumulative lengths of the documents' parts in x, of which only the first sees the halo.
    ``by_fla`` allows the kernel of flash-linear-attention. Several documents in several batch entries are computed by
    torch, and so are weights with W = 1.
    """
    if by_fla and weight.shape[1] > 1 and (len(bounds) == 2 or x.shape[0] == 1):
        return _convolve_by_fla(x, halo, weight, bias, bounds)
    width, tokens = weight.shape[1], x.shape[1]
    rows = torch.cat([halo, x], 1)
    if len(bounds) == 2:
        return conv1d(rows.mT, weight.unsqueeze(1), bias, groups=weight.shape[0]).mT
    since = _tokens_since_border(bounds, width, x.device)
    terms = [
        torch.where((since >= back)[:, None], rows[:, width - 1 - back :][:, :tokens], 0) * weight[:, width - 1 - back]
        for back in range(width)
    ]
    out: Tensor = sum(terms[1:], terms[0])
    return out if bias is None else out + bias


def _convolve_by_fla(
    x: Tensor, halo: Tensor, weight: Tensor, bias: Tensor | None, bounds: tuple[int, ...]
) -> Tensor:  # fmt: skip
    from fla.modules.causal_conv1d import causal_conv1d  # imports Triton

    # One state (C, W) per document: the tokens before its first, of which the earliest is never read.
    states = pad(halo.mT, (1, 0, 0, 0, 0, len(bounds) - 2))
    # One piece per document, or one only.
    options = pieces_of(bounds, x.shape[0], _LONGEST, x.device).options
    x, weight, bias, states = only_first_order(x, weight, bias, states)
    out: Tensor = causal_conv1d(x, weight, bias, initial_state=states, **options)[0]
    return out


@lru_cache(maxsize=8)
def _tokens_since_border(bounds: tuple[int, ...], most: int, device: torch.device) -> Tensor:
    """Return each token's distance from the start of its document (int64, S); ``most`` in the first document."""
    positions = torch.arange(bounds[-1], device=device)
    inner = torch.tensor(bounds[1:-1], device=device)
    index = torch.searchsorted(inner, positions, right=True)
    return torch.where(index > 0, positions - inner[(index - 1).clamp(min=0)], most)
