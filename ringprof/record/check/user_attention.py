"""A user's attention function, called as a check calls it: with a rank's own tokens, in the function's own format."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringprof.errors import UsageError
from ringprof.record.process_group import GroupRanks
from ringprof.record.verify import MOST_TOKENS, TOKENS_PER_RANK, Tensors
from ringprof.strategies.masks.layouts import LAYOUTS

_SWAPPED: dict[str, tuple[int, int] | None] = {"bshd": None, "bhsd": (1, 2), "sbhd": (0, 1)}
"""The dimensions to swap between (B, S, H, D) and a format, either way."""

DOCUMENT_ARGUMENTS = ("cu_seqlens", "documents")

Answers = dict[str, Tensor]
"""``out``, and with a backward pass ``dq``, ``dk``, ``dv``: (B, S/N, H, D), of one rank's tokens."""


@dataclass(frozen=True)
class UserAttention:
    """The function, and which tokens each rank holds."""

    function: Callable[..., Any]
    ranks: GroupRanks
    order: Tensor
    """(N, S/N): the positions of every rank's tokens, in local order, on the ranks' device."""
    tensor_format: str
    documents: tuple[int, ...] | None = None
    """Cumulative lengths of the documents; None: one."""
    trains: bool = True
    """Whether its inputs want gradients, in whichever call."""

    @property
    def positions(self) -> Tensor:
        """Of this rank's tokens (S/N)."""
        own: Tensor = self.order[self.ranks.rank]
        return own

    def shard(self, full: Tensor) -> Tensor:
        """This rank's tokens of (B, S, H, D)."""
        return full.index_select(1, self.positions)

    def answers(self, full: Tensors, *, backward: bool) -> tuple[Answers, str]:
        """What the function makes of this rank's tokens; or nothing, and what is wrong with the output's form.

        Raises what the function raises, and `UsageError` where it returns no tensor.
        """
        q, k, v, dout = (self._formatted(self.shard(x)) for x in (full.q, full.k, full.v, full.dout))
        inputs = [x.requires_grad_(self.trains) for x in (q, k, v)]
        out = self.function(*inputs, **self._lengths())
        out = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(out, Tensor):
            raise UsageError(f"the attention returned {type(out).__name__}, not a tensor")
        if out.dim() == 3 and out.shape[-1] == q.shape[-1] * q.shape[-2]:
            # Modules of whole models return their heads side by side.
            out = out.view(*out.shape[:2], *q.shape[-2:])
        found = [out, *_gradients(out, inputs, dout)] if backward else [out]
        if out.shape != q.shape:
            return {}, self._other_form(out, q, full.q.shape[1])
        names = ("out", "dq", "dk", "dv")
        return {name: self._formatted(x.to(q.device)) for name, x in zip(names, found, strict=False)}, ""

    def _lengths(self) -> dict[str, Tensor]:
        """The documents, for a function that takes an argument of one of these names."""
        if self.documents is None:
            return {}
        with suppress(TypeError, ValueError):  # what has no signature takes no such argument
            known = inspect.signature(self.function).parameters
            cumulative = torch.tensor(self.documents, dtype=torch.int32, device=self.order.device)
            return {name: cumulative for name in DOCUMENT_ARGUMENTS if name in known}
        return {}

    def _other_form(self, out: Tensor, q: Tensor, seq: int) -> str:
        said = f"the output is {tuple(out.shape)}, and q {tuple(q.shape)}"
        if self.ranks.size > 1 and out.numel() == q.numel() * self.ranks.size and seq in out.shape:
            return f"{said}: the whole sequence on every rank, not the rank's own tokens"
        return said

    def _formatted(self, x: Tensor) -> Tensor:
        swapped = _SWAPPED[self.tensor_format]
        return (x if swapped is None else x.transpose(*swapped)).detach().contiguous()


def _gradients(out: Tensor, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Zeros for an input that no gradient reaches. An output of another form goes back, too: other ranks may wait."""
    found: list[Any] = [None] * len(inputs)
    if out.requires_grad:
        given = dout.to(out) if dout.shape == out.shape else torch.zeros_like(out)
        found = list(torch.autograd.grad(out, inputs, given, allow_unused=True))
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(inputs, found, strict=True)]


def order_of_layout(name: str, seq: int | None, size: int, device_type: str) -> Tensor:
    """(N, S/N): every rank's positions by a layout's name, of a short sequence where ``seq`` is None.

    Raises `UsageError`.
    """
    if name not in LAYOUTS:
        raise UsageError(f"layout {name!r} is not one of {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    divisor = layout.divisor(size)
    if seq is None:
        seq = max(1, min(TOKENS_PER_RANK[device_type] * size, MOST_TOKENS) // divisor) * divisor
    if seq % divisor:
        raise UsageError(f"the {name} layout on {size} ranks needs a sequence divisible by {divisor}: not {seq}")
    return layout.order(seq, size).view(size, -1)


def order_of_positions(own: Tensor, ranks: GroupRanks) -> Tensor:
    """(N, S/N): every rank's positions, from this rank's own. Collective; raises `UsageError` on all ranks alike."""
    own = own.to(device=ranks.device, dtype=torch.int64).flatten()
    lengths = [int(length) for length in ranks.gather_tensor(torch.tensor([len(own)], device=ranks.device))]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise UsageError(f"every rank must hold as many tokens as the others: not {', '.join(map(str, lengths))}")
    order = torch.stack(ranks.gather_tensor(own))
    held = torch.bincount(order.flatten().clamp(-1, order.numel()) + 1, minlength=order.numel() + 2)[1:-1]
    wrong = (held != 1).nonzero()
    if len(wrong):
        raise UsageError(
            f"the ranks' positions together must be 0 to {order.numel() - 1}, each once: {int(wrong[0])} is not"
        )
    return order
