"""Check of the first gradients of each cuDNN plan, because another library in the process may have built the plan.

torch (2.11) caches the plan of a cuDNN backward pass by the sizes and strides of q, k and v, but builds it for the
strides of O, dO and the LSE in the first call. Ours always have the strides that torch's own autograd uses. A plan that
another library caused to be built for other strides silently reads wrong memory. When a plan is first used, the last
query's dQ and the first key's dK and dV, of the last batch entry and kv head, are compared with the plain formula.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ..errors import WrongGradient

_FACTOR = 0.1
"""Tolerance relative to the sum's expected size for independent terms; rounding to bf16 changes it by 1/200 of that."""
_CANCELLED = 2.0**-6
"""Tolerance relative to what cancels within a term: for a softmax over one key, dP - delta is only rounding."""


class PlanCheck:
    """Plans that this process has found to be correct, by thread, because torch has one cache per thread."""

    def __init__(self) -> None:
        self._correct: set[Any] = set()

    def check(
        self, gradients: tuple[Tensor, Tensor, Tensor], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, scale: float, causal: bool,
    ) -> None:  # fmt: skip
        """Check the gradients of a plan at its first use, which waits for the device.

        Tensors are (B, S, H, D), the LSE (B, H, S). Raises `WrongGradient`.
        """
        key = threading.get_ident(), q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, causal
        if key in self._correct or torch.cuda.is_current_stream_capturing():
            return
        with torch.no_grad():
            is_correct = bool(plausible(gradients, dout, q, k, v, out, lse, scale, causal))
        if not is_correct:
            raise WrongGradient(
                "cuDNN gives wrong gradients for these shapes: another part of this program has had torch make the plan"
                " with other strides of the output or its gradient. Use another kernel (kernel='flash-attn' or"
                " 'torch-flash'), or call ringprof first"
            )
        self._correct.add(key)


def plausible(
    gradients: tuple[Tensor, Tensor, Tensor], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Return whether one row of each gradient is near the plain formula, as a tensor of one bool.

    Also true if the inputs make the formula give a value that is not finite.
    """
    group = q.shape[2] // k.shape[2]
    heads = slice(q.shape[2] - group, None)
    keys, values = k[-1, :, -1].float(), v[-1, :, -1].float()
    queries, douts, outs = (x[-1, :, heads].float() for x in (q, dout, out))
    rows = lse[-1, heads].float().transpose(0, 1)
    delta = (douts * outs).sum(-1)
    # The last query of the last head sees every key.
    weights = (keys @ queries[-1, -1] * scale - rows[-1, -1]).exp()
    checks = [_near(gradients[0][-1, -1, -1], keys, weights * scale, values @ douts[-1, -1], delta[-1, -1])]
    # Every query sees the first key.
    weights = (queries @ keys[0] * scale - rows).exp()
    checks.append(_near(gradients[1][-1, 0, -1], queries, weights * scale, douts @ values[0], delta))
    checks.append(_near(gradients[2][-1, 0, -1], douts, weights, torch.ones_like(weights), torch.zeros_like(weights)))
    return torch.stack(checks).all()


def _near(row: Tensor, vectors: Tensor, weights: Tensor, plus: Tensor, minus: Tensor) -> Tensor:
    """Return whether ``row`` is near the sum of ``vectors``, each times weight · (plus - minus)."""
    terms = (vectors * (weights * (plus - minus)).unsqueeze(-1)).flatten(0, -2)
    cancelling = (vectors * (weights * (plus.abs() + minus.abs())).unsqueeze(-1)).flatten(0, -2)
    expected = terms.sum(0)
    tolerance = _FACTOR * torch.maximum(_independent_size(terms), expected.norm()) + _CANCELLED * _independent_size(
        cancelling
    )
    # Differences below the smallest normal number of the type mean nothing.
    tiny = torch.finfo(row.dtype).tiny * row.numel()
    is_near: Tensor = ((row.float() - expected).norm() <= tolerance + tiny) | ~expected.isfinite().all()
    return is_near


def _independent_size(terms: Tensor) -> Tensor:
    """Return the expected size of the sum of ``terms`` if they were independent."""
    size: Tensor = terms.square().sum(0).sqrt().norm()
    return size
