"""The recurrences in plain torch, chunk by chunk: on every device, and exact in float64.

Within a chunk of C tokens let G_i be the sum of g up to token i, and u_j what token j writes. Then

    o_i   = scale (exp(G_i) q_i^T S + sum over j <= i of exp(G_i - G_j) (q_i . k_j) u_j)
    S_end = exp(G_C) S + sum over j of exp(G_C - G_j) k_j u_j^T

For linear attention u = v. For the delta rule u solves the unit lower triangular system

    u_i + beta_i sum over j < i of exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i)

Exponents are differences that are at most 0, so nothing overflows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels.merge import wide_type
from .kernel import Carry, Inputs, Saved, Shard, zero_state

CHUNK = 32
"""Tokens per chunk."""


class ReferenceRecurrence:
    """`RecurrenceKernel` in plain torch, in at least float32.

    The backward pass repeats the forward pass under autograd.
    """

    name = "reference"

    def begin(self, x: Inputs, shard: Shard) -> tuple[Any, Carry]:
        rows = _Rows(x)
        first, end = shard.bounds[-2:]
        state = rows.compute(first, end, zero_state(x, rows.dtype))[1] if shard.sends else None
        return None, Carry(state, rows.transition(first, end) if shard.spans else None)

    def finish(self, x: Inputs, shard: Shard, local: Any, incoming: Tensor | None) -> tuple[Tensor, Saved]:
        return _forward(x, shard, incoming)[0], (incoming,)

    def begin_backward(self, x: Inputs, shard: Shard, saved: Saved, dout: Tensor) -> tuple[Any, Tensor | None]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in x.tensors]
            before = None if saved[0] is None else saved[0].detach().requires_grad_()
            out, outgoing = _forward(Inputs.of(leaves, x.scale), shard, before)
        local = leaves, (out, outgoing), dout
        if before is None:
            return local, None
        return local, torch.autograd.grad(out, before, dout, retain_graph=True)[0]

    def finish_backward(
        self, x: Inputs, shard: Shard, saved: Saved, local: Any, doutgoing: Tensor | None
    ) -> tuple[Tensor, ...]:
        leaves, results, dout = local
        count = 1 if doutgoing is None else 2
        return tuple(torch.autograd.grad(results[:count], leaves, (dout, doutgoing)[:count]))


def _forward(x: Inputs, shard: Shard, incoming: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output (B, S, H, V) in v's type, and the state after the last token."""
    rows = _Rows(x)
    outputs, state = [], zero_state(x, rows.dtype) if incoming is None else incoming
    for first, end in pairwise(shard.bounds):
        if first:
            state = zero_state(x, rows.dtype)
        out, state = rows.compute(first, end, state)
        outputs += out
    return torch.cat(outputs, 2).transpose(1, 2).to(x.v.dtype).contiguous(), state


class _Rows:
    """Inputs with heads before tokens, (B, H, S, ...), in at least float32."""

    def __init__(self, x: Inputs) -> None:
        self.dtype, self.scale = wide_type(x.q), x.scale
        self.q, self.k, self.v, self.g = (tensor.to(self.dtype).transpose(1, 2) for tensor in x.tensors[:4])
        self.beta = None if x.beta is None else x.beta.to(self.dtype).transpose(1, 2).unsqueeze(-1)

    def compute(self, first: int, end: int, state: Tensor, v: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Return the outputs of the chunks from token ``first`` to ``end``, and the state after them."""
        outputs = []
        v = self.v if v is None else v
        for start in range(first, end, CHUNK):
            q, k, values, g = (y[:, :, start : min(start + CHUNK, end)] for y in (self.q, self.k, v, self.g))
            total = g.cumsum(2)
            apart = total.unsqueeze(3) - total.unsqueeze(2)
            seen = torch.ones(apart.shape[2:4], dtype=torch.bool, device=q.device).tril()
            decay = apart.masked_fill(~seen[..., None], -torch.inf).exp()
            if self.beta is not None:
                beta = self.beta[:, :, start : start + k.shape[2]]
                values = torch.linalg.solve_triangular(
                    (beta * _pairs(k, k, decay)).tril(-1), beta * (values - (k * total.exp()) @ state),
                    upper=False, unitriangular=True,
                )  # fmt: skip
            outputs.append(self.scale * ((q * total.exp()) @ state + _pairs(q, k, decay) @ values))
            end_of_chunk = total[:, :, -1:]
            state = end_of_chunk.exp().mT * state + (k * (end_of_chunk - total).exp()).mT @ values
        return outputs, state

    def transition(self, first: int, end: int) -> Tensor:
        """Return the transition of the tokens from ``first`` to ``end``: of the delta rule, by an identity."""
        if self.beta is None:
            return self.g[:, :, first:end].sum(2).exp().unsqueeze(-1)
        identity = torch.eye(self.k.shape[-1], dtype=self.dtype, device=self.k.device)
        return self.compute(first, end, identity.expand(*self.k.shape[:2], -1, -1), torch.zeros_like(self.k))[1]


def _pairs(rows: Tensor, columns: Tensor, decay: Tensor) -> Tensor:
    """Return the products of rows and columns (B, H, C, K), each with its decay (B, H, C, C, 1 or K): (B, H, C, C)."""
    if decay.shape[-1] == 1:
        return rows @ columns.mT * decay[..., 0]
    return torch.einsum("bhik,bhjk,bhijk->bhij", rows, columns, decay)
