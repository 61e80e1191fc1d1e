"""Backward passes whose own gradient is refused, not dropped."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass of a `torch.autograd.Function` that refuses to be differentiated.

    torch's ``once_differentiable`` refuses only where a gradient that came in needs one itself. A gradient penalty's
    does not: the gradients of q, k and v then depend on q, k and v alone, and the penalty's own would be dropped.
    """

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return tuple(backward(ctx, *gradients))
        with torch.no_grad():
            results = backward(ctx, *gradients)
        depends = [x for x in (*ctx.saved_tensors, *gradients) if isinstance(x, Tensor) and x.requires_grad]
        return tuple(_refused(x, depends) for x in results)

    return refusing


def _refused(result: Any, depends: list[Tensor]) -> Any:
    if not isinstance(result, Tensor):
        return result
    return _Refused.apply(result, *depends)  # type: ignore[no-untyped-call]


class _Refused(torch.autograd.Function):
    """Says of a gradient what it depends on, and raises when that is asked for."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *depends: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("second-order gradients: no bundled strategy can give the gradient of a gradient")
