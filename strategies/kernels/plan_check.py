"""A look at the first gradients that a cuDNN plan gives, because others in the process may have made the plan.

torch (2.11) keeps the plan of a cuDNN backward pass by the sizes and strides of q, k and v, and builds it for the
strides that O, dO and the LSE happen to have in the first call. Ours always have those that torch's own autograd gives
them. A plan that another library made for others reads wrong memory, in silence: so the last query's dQ, and the first
key's dK and dV, of the last batch entry and kv head, are held against the plain formula when a plan is first used.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ringprof.strategies.errors import WrongGradient

_FACTOR = 0.1
"""Of the size that the sum would have if its terms were independent: rounding to bf16 moves it by 1 in 200 of that."""
_CANCELLED = 2.0**-6
"""Of what cancels in a term: where a softmax has one key, dP - delta is rounding alone."""


class PlanCheck:
    """The plans that this process has seen to be right, by thread: torch's cache is one a thread."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def see(
        self, gradients: tuple[Tensor, Tensor, Tensor], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, scale: float, causal: bool,
    ) -> None:  # fmt: skip
        """Look at the gradients of a plan that has not been seen; waits for the device then. (B, S, H, D), (B, H, S).

        Raises `WrongGradient`.
        """
        key = threading.get_ident(), q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, causal
        if key in self._seen or torch.cuda.is_current_stream_capturing():
            return
        with torch.no_grad():
            right = bool(plausible(gradients, dout, q, k, v, out, lse, scale, causal))
        if not right:
            raise WrongGradient(
                "cuDNN gives wrong gradients for these shapes: another part of this program has had torch make the plan"
                " with other strides of the output or its gradient. Use another kernel (kernel='flash-attn' or"
                " 'torch-flash'), or call ringprof first"
            )
        self._seen.add(key)


def plausible(
    gradients: tuple[Tensor, Tensor, Tensor], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Whether one row of each gradient is near the formula's, as a tensor of one truth value.

    True, too, where the inputs are such that the formula gives no finite number.
    """
    group = q.shape[2] // k.shape[2]
    heads = slice(q.shape[2] - group, None)
    keys, values = k[-1, :, -1].float(), v[-1, :, -1].float()
    queries, douts, outs = (x[-1, :, heads].float() for x in (q, dout, out))
    rows = lse[-1, heads].float().transpose(0, 1)
    delta = (douts * outs).sum(-1)
    # The last query, of the last head: it sees every key.
    weights = (keys @ queries[-1, -1] * scale - rows[-1, -1]).exp()
    found = [_near(gradients[0][-1, -1, -1], keys, weights * scale, values @ douts[-1, -1], delta[-1, -1])]
    # The first key: every query sees it.
    weights = (queries @ keys[0] * scale - rows).exp()
    found.append(_near(gradients[1][-1, 0, -1], queries, weights * scale, douts @ values[0], delta))
    found.append(_near(gradients[2][-1, 0, -1], douts, weights, torch.ones_like(weights), torch.zeros_like(weights)))
    return torch.stack(found).all()


def _near(row: Tensor, vectors: Tensor, weights: Tensor, plus: Tensor, minus: Tensor) -> Tensor:
    """Whether ``row`` is near the sum of ``vectors``, each times weight · (plus - minus)."""
    terms = (vectors * (weights * (plus - minus)).unsqueeze(-1)).flatten(0, -2)
    cancelling = (vectors * (weights * (plus.abs() + minus.abs())).unsqueeze(-1)).flatten(0, -2)
    truth = terms.sum(0)
    allowed = _FACTOR * torch.maximum(_independent(terms), truth.norm()) + _CANCELLED * _independent(cancelling)
    # Below what the type can hold nothing can be said.
    tiny = torch.finfo(row.dtype).tiny * row.numel()
    near: Tensor = ((row.float() - truth).norm() <= allowed + tiny) | ~truth.isfinite().all()
    return near


def _independent(terms: Tensor) -> Tensor:
    """The size that a sum of these would have if they were independent."""
    size: Tensor = terms.square().sum(0).sqrt().norm()
    return size
