"""Adapter that calls a user's attention function with one rank's tokens, in the function's tensor format."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringprof.errors import UsageError
from ringprof.proof.dense import MOST_TOKENS, TOKENS_PER_RANK, Tensors
from ringprof.ranks.process_group import GroupRanks
from ringprof.strategies.masks.layouts import LAYOUTS

_SWAPPED: dict[str, tuple[int, int] | None] = {"bshd": None, "bhsd": (1, 2), "sbhd": (0, 1)}
"""The two dimensions to swap to convert (B, S, H, D) to a format and back; None: no conversion."""

DOCUMENT_ARGUMENTS = ("cu_seqlens", "documents")
"""Names of arguments through which a function can receive the documents' cumulative lengths."""

AttentionResults = dict[str, Tensor]
"""``out``, and with a backward pass ``dq``, ``dk``, ``dv``: (B, S/N, H, D) for one rank's tokens."""


@dataclass(frozen=True)
class UserAttention:
    """A user's attention function, with the tokens that each rank holds."""

    function: Callable[..., Any]
    ranks: GroupRanks
    order: Tensor
    """Positions of every rank's tokens (N, S/N), in local order, on the ranks' device."""
    tensor_format: str
    documents: tuple[int, ...] | None = None
    """Cumulative lengths of the documents; None: the sequence is one document."""
    requires_grad: bool = True
    """Whether the inputs require gradients, in forward-only calls, too."""

    @property
    def positions(self) -> Tensor:
        """Positions of this rank's tokens (S/N)."""
        own_positions: Tensor = self.order[self.ranks.rank]
        return own_positions

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's tokens (B, S/N, H, D) of a full tensor (B, S, H, D)."""
        return full.index_select(1, self.positions)

    def run(
        self, full: Tensors, *, backward: bool, between: Tensors | None = None, strided_dout: bool = False
    ) -> tuple[AttentionResults, str]:
        """Call the function with this rank's tokens; return the results and an empty message.

        Where the output has another shape than q, the results are empty and the message describes the shape. With
        ``between``, forward and backward passes with these inputs are made between the forward and the backward pass,
        as by a second layer. With ``strided_dout`` the output's gradient has its 2nd and 3rd dimension in the other
        order in memory. Raises every error of the function, and `UsageError` where it returns no tensor.
        """
        q, k, v, dout = (self._formatted(self.shard(x)) for x in (full.q, full.k, full.v, full.dout))
        if strided_dout:
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        inputs = [x.requires_grad_(self.requires_grad) for x in (q, k, v)]
        out = self.function(*inputs, **self._document_arguments())
        out = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(out, Tensor):
            raise UsageError(f"the attention returned {type(out).__name__}, not a tensor")
        if out.dim() == 3 and out.shape[-1] == q.shape[-1] * q.shape[-2]:
            # Attention modules of models return the heads concatenated.
            out = out.view(*out.shape[:2], *q.shape[-2:])
        if between:
            self.run(between, backward=backward)
        results = [out, *_gradients(out, inputs, dout)] if backward else [out]
        if out.shape != q.shape:
            return {}, self._wrong_shape(out, q, full.q.shape[1])
        names = ("out", "dq", "dk", "dv")
        return {name: self._formatted(x.to(q.device)) for name, x in zip(names, results, strict=False)}, ""

    def misread_dout(self, full: Tensors) -> Tensor:
        """Return dout (B, S, H, D) if each rank reads that of ``strided_dout`` as if its memory were contiguous."""
        dout = full.dout.clone()
        for positions in self.order:
            own = self._formatted(full.dout.index_select(1, positions))
            dout[:, positions] = self._formatted(own.transpose(1, 2).contiguous().view(own.shape))
        return dout

    def _document_arguments(self) -> dict[str, Tensor]:
        """Return the documents as keyword arguments, for those `DOCUMENT_ARGUMENTS` that the function takes."""
        if self.documents is None:
            return {}
        with suppress(TypeError, ValueError):  # a callable without a signature gets no documents
            parameters = inspect.signature(self.function).parameters
            cumulative = torch.tensor(self.documents, dtype=torch.int32, device=self.order.device)
            return {name: cumulative for name in DOCUMENT_ARGUMENTS if name in parameters}
        return {}

    def _wrong_shape(self, out: Tensor, q: Tensor, seq: int) -> str:
        """Describe an output whose shape is not that of q, the rank's shard of ``seq`` tokens in all."""
        message = f"the output is {tuple(out.shape)}, and q {tuple(q.shape)}"
        if self.ranks.size > 1 and out.numel() == q.numel() * self.ranks.size and seq in out.shape:
            return f"{message}: the whole sequence on every rank, not the rank's own tokens"
        return message

    def _formatted(self, x: Tensor) -> Tensor:
        swapped = _SWAPPED[self.tensor_format]
        return (x if swapped is None else x.transpose(*swapped)).detach().contiguous()


def _gradients(out: Tensor, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Return the gradient of each input; zeros for an input that no gradient reaches.

    The backward pass also runs for an output of the wrong shape, since other ranks may wait for it.
    """
    gradients: list[Any] = [None] * len(inputs)
    if out.requires_grad:
        grad_output = dout.to(out) if dout.shape == out.shape else torch.zeros_like(out)
        gradients = list(torch.autograd.grad(out, inputs, grad_output, allow_unused=True))
    return [
        torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(inputs, gradients, strict=True)
    ]


def order_of_layout(name: str, seq: int | None, size: int, device_type: str) -> Tensor:
    """Return every rank's positions (N, S/N) in the named layout; ``seq`` None stands for a short sequence.

    Raises `UsageError` for an unknown layout and for a length that the layout cannot divide.
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


def order_of_positions(own_positions: Tensor, ranks: GroupRanks) -> Tensor:
    """Gather every rank's positions (N, S/N) from this rank's own. Collective.

    Raises `UsageError` on all ranks where the positions together are not 0 to S - 1, each once.
    """
    own_positions = own_positions.to(device=ranks.device, dtype=torch.int64).flatten()
    lengths = [int(length) for length in ranks.gather_tensor(torch.tensor([len(own_positions)], device=ranks.device))]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise UsageError(f"every rank must hold as many tokens as the others: not {', '.join(map(str, lengths))}")
    order = torch.stack(ranks.gather_tensor(own_positions))
    holders = torch.bincount(order.flatten().clamp(-1, order.numel()) + 1, minlength=order.numel() + 2)[1:-1]
    wrong = (holders != 1).nonzero()
    if len(wrong):
        raise UsageError(
            f"the ranks' positions together must be 0 to {order.numel() - 1}, each once: {int(wrong[0])} is not"
        )
    return order
