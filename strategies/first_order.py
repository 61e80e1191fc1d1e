"""Backward passes that refuse second-order gradients, instead of silently dropping them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward pass of a `torch.autograd.Function`: differentiating its results raises RuntimeError.

    torch's ``once_differentiable`` refuses only where an incoming gradient requires a gradient itself. With a gradient
    penalty it does not: the gradients of q, k and v depend on q, k and v alone, and the penalty's gradient would be
    dropped.
    """

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return tuple(backward(ctx, *gradients))
        with torch.no_grad():
            results = backward(ctx, *gradients)
        inputs = [x for x in (*ctx.saved_tensors, *gradients) if isinstance(x, Tensor) and x.requires_grad]
        return tuple(_refused(x, inputs) for x in results)

    return refusing


def _refused(result: Any, inputs: list[Tensor]) -> Any:
    """Return ``result`` as a tensor that depends on ``inputs``, and whose gradient raises."""
    if not isinstance(result, Tensor):
        return result
    return _Refused.apply(result, *inputs)  # type: ignore[no-untyped-call]


class _Refused(torch.autograd.Function):
    """An identity that makes a gradient depend on its inputs, and raises when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *inputs: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("second-order gradients: no bundled strategy can give the gradient of a gradient")


def only_first_order(*inputs: Tensor | None) -> tuple[Any, ...]:
    """Return the same tensors for an operator of another package, whose own backward pass drops such gradients."""
    tensors = [x for x in inputs if x is not None]
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return inputs
    guarded = iter(_FirstOrder.apply(*tensors))  # type: ignore[no-untyped-call]
    return tuple(None if x is None else next(guarded) for x in inputs)


class _FirstOrder(torch.autograd.Function):
    """An identity whose gradients cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients
