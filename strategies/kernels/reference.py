"""Dense attention in float64, and the key ranges that queries see: the references of all checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringprof.workload.mask import NO_LIMIT, Mask

from ..masks.mask_blocks import AttnRectangle, band_mask
from .kernel import Gradients, Kernel
from .merge import row_product, wide_type


class ReferenceKernel(Kernel):
    """Dense attention in float64 for checks: slow, but for any device and type."""

    name = "reference"
    takes_delta = True
    takes_windows = True
    takes_softcap = True
    grouped_heads = False
    production = False

    dtypes = None
    head_dim_step = 1

    @classmethod
    def takes_v_head_dim(cls, head_dim: int, v_head_dim: int) -> bool:
        return True

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return self.forward_masked(q, k, v, scale, self._visible_keys(q, causal))

    def _forward_band(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, part: AttnRectangle
    ) -> tuple[Tensor, Tensor]:
        return self.forward_masked(q, k, v, scale, band_mask(part, q.device))

    def forward_masked(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute output and LSE with as many kv heads as heads.

        ``mask``: bool (Sq, Sk), the keys that each query sees; None: all keys.
        """
        scores, _ = self._scores(q, k, scale, mask)
        lse = torch.logsumexp(scores, dim=-1)
        out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse.unsqueeze(-1)).exp(), v.double())
        return out.to(q.dtype), lse.to(wide_type(q))

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Gradients:  # fmt: skip
        return self.backward_masked(dout, q, k, v, lse, out, delta, scale, self._visible_keys(q, causal))

    def _backward_band(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, part: AttnRectangle,
    ) -> Gradients:  # fmt: skip
        return self.backward_masked(dout, q, k, v, lse, out, delta, scale, band_mask(part, q.device))

    def backward_masked(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, mask: Tensor | None,
    ) -> Gradients:  # fmt: skip
        """Compute the gradients dq, dk, dv; ``mask`` is that of `forward_masked`."""
        if delta is None:
            assert out is not None
            delta = row_product(dout.double(), out.double())
        scores, slope = self._scores(q, k, scale, mask)
        weights = (scores - lse.double().unsqueeze(-1)).exp()
        dweights = torch.einsum("bqhd,bkhd->bhqk", dout.double(), v.double())
        dscores = weights * (dweights - delta.double().unsqueeze(-1)) * scale * slope
        dq = torch.einsum("bhqk,bkhd->bqhd", dscores, k.double())
        dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.double())
        dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout.double())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _visible_keys(self, q: Tensor, causal: bool) -> Tensor | None:
        return torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril() if causal else None

    def _scores(self, q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor | float]:
        return masked_scores(torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale, mask, self.softcap)


class MaskedReference(ReferenceKernel):
    """Dense attention in float64 over a whole sequence with an arbitrary mask, for checks."""

    def __init__(self, mask: Mask, *, softcap: float = 0.0) -> None:
        super().__init__(softcap=softcap)
        self._mask = mask

    def _visible_keys(self, q: Tensor, causal: bool) -> Tensor:
        positions = torch.arange(q.shape[1], device=q.device)
        return KeyStretches.of(self._mask, positions, q.shape[1]).shown(positions)


def masked_scores(products: Tensor, shown: Tensor | None, softcap: float = 0.0) -> tuple[Tensor, Tensor | float]:
    """Return the scores of scaled products of queries and keys, and the scores' derivative by the products.

    A score is ``softcap`` · tanh(product / ``softcap``), or the product if ``softcap`` is 0; minus infinity where
    ``shown`` is false (None: nowhere). Writes into ``products``.
    """
    scores: Tensor = products
    slope: Tensor | float = 1.0
    if softcap:
        scores = softcap * torch.tanh(products / softcap)
        slope = 1 - (scores / softcap).square()
    return scores if shown is None else scores.masked_fill_(~shown, float("-inf")), slope


class KeyStretches(NamedTuple):
    """Ranges of keys that each of R query rows sees, as int64 positions."""

    stretches: tuple[tuple[Tensor, Tensor], ...]
    """First key (R) and end (R) of each range; there are one or two ranges per row."""

    @classmethod
    def of(cls, mask: Mask, positions: Tensor, seq: int) -> KeyStretches:
        """Return the ranges of ``seq`` keys that queries at these positions see."""
        mask.check(seq)
        bounds = torch.tensor(mask.documents or (0, seq), device=positions.device)
        document = torch.searchsorted(bounds, positions, right=True)
        document_start, document_end = bounds[document - 1], bounds[document]
        first = document_start if mask.left == NO_LIMIT else torch.maximum(document_start, positions - mask.left)
        end = document_end if mask.right == NO_LIMIT else torch.minimum(document_end, positions + mask.right + 1)
        if not mask.prefix:
            return cls(((first, end),))
        return cls(
            (
                (first, end),
                (document_start, torch.minimum(document_start + mask.prefix, end if mask.causal else document_end)),
            )
        )

    def repeated(self, times: int) -> KeyStretches:
        """Return the ranges with all rows repeated ``times`` times, for the heads of a group."""
        return KeyStretches(tuple((first.repeat(times), end.repeat(times)) for first, end in self.stretches))

    def bounds(self) -> tuple[int, int]:
        """Return the first key that any row sees, and the end of the keys that any row sees."""
        return min(int(first.min()) for first, _ in self.stretches), max(int(end.max()) for _, end in self.stretches)

    def shown(self, keys: Tensor) -> Tensor:
        """Return which of the keys at these positions (K) each row sees: bool (R, K)."""
        masks = [(keys >= first[:, None]) & (keys < end[:, None]) for first, end in self.stretches]
        return masks[0] if len(masks) == 1 else masks[0] | masks[1]
