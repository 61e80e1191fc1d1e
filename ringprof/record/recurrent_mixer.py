"""Token mixing of a recurrent layer: projections, short convolution, recurrence over the ranks, and gated norm.

The layers of hybrid models in their simplest form, with as many heads of keys as of values:

* ``gdn``: as in Qwen3-Next. Convolution and SiLU of q, k and v; keys of length 1 (the norm cancels the length of
  queries); beta = sigmoid(b), g = -exp(A) softplus(a + bias); the output is RMSNorm(out) * SiLU(z) per head.
* ``mamba2``: as in Mamba-2. Convolution and SiLU of x, B and C; dt = softplus(dt + bias), a = -exp(A), a weight d of x
  in the output; RMSNorm(out * SiLU(z)).
* ``simple-gla`` and ``gla``: no convolution; g = logsigmoid(projection) / 16; RMSNorm(out) * SiLU(z) per head.

Sources: the modelling code of Qwen3-Next in transformers; "Transformers are SSMs" (arXiv 2405.21060, section 7); "Gated
Linear Attention" (arXiv 2312.06635, section 4.4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringprof.record.recurrence import call_operator
from ringprof.run import Workload
from ringprof.strategies.kernels.merge import wide_type

_GATE_DIVISOR = 16
"""Divisor of the logarithm of the decay of gated linear attention, which makes it slow."""


class RecurrentMixer(nn.Module):
    """Mixes tokens (B, S/N, hidden) by a recurrence over all ranks."""

    def __init__(self, part: Workload, strategy: Any) -> None:
        """Create the parameters; ``part`` is the recurrence, ``strategy`` one for recurrences."""
        super().__init__()
        self.part, self.strategy, operator = part, strategy, part.operator
        heads, size, groups = self.part.heads, self.part.head_dim, self.part.kv_heads
        hidden = heads * size
        self.channels = hidden + 2 * groups * size
        gates = {"gdn": 2 * heads, "mamba2": heads, "simple-gla": heads, "gla": hidden}[operator]
        self.gates = gates
        self.projection = nn.Linear(hidden, self.channels + hidden + gates, bias=False)
        self.norm = nn.RMSNorm(hidden if operator == "mamba2" else size)
        self.out = nn.Linear(hidden, hidden, bias=False)
        if self.part.conv_width is not None:
            self.conv = nn.Parameter(torch.randn(self.channels, self.part.conv_width) / self.part.conv_width**0.5)
            self.log_rates = nn.Parameter(torch.linspace(0.0, 2.0, heads))
            self.bias = nn.Parameter(torch.linspace(-5.0, -2.0, heads))
        if operator == "mamba2":
            self.skip = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, kept: Any = None) -> Tensor:
        """Return the mixed tokens (B, S/N, hidden); ``kept.keep`` gets the tensors of the recurrence by name."""
        part = self.part
        hidden = part.heads * part.head_dim
        channels, z, gates = self.projection(x).split([self.channels, hidden, self.gates], -1)
        inputs = self._inputs(channels, gates.to(wide_type(gates)))
        out = call_operator(self.strategy, part, inputs)
        if kept is not None:
            kept.keep(**inputs, out=out)
        if part.operator == "mamba2":
            mixed = self.norm(out.flatten(2) * functional.silu(z))
        else:
            mixed = (self.norm(out) * functional.silu(z.unflatten(-1, out.shape[2:]))).flatten(2)
        projected: Tensor = self.out(mixed)
        return projected

    def _inputs(self, channels: Tensor, gates: Tensor) -> dict[str, Tensor]:
        """Return the inputs of `call_operator` from the convolution's channels and the gates, in at least float32."""
        part = self.part
        if part.conv_width is None:
            shape = (*channels.shape[:2], part.heads, part.head_dim)
            q, k, v = (x.reshape(shape) for x in channels.chunk(3, -1))
            g = functional.logsigmoid(gates) / _GATE_DIVISOR
            return {"q": q, "k": k, "v": v, "g": g.view(shape) if part.operator == "gla" else g}
        # Copies outlive what FSDP frees, and have gradients of their own, before data parallelism reduces them.
        inputs = {"channels": channels.contiguous(), "weight": self.conv.clone()}
        rates, bias = -self.log_rates.to(gates.dtype).exp(), self.bias.to(gates.dtype)
        if part.operator == "mamba2":
            skip = self.skip.to(gates.dtype, copy=True)
            return inputs | {"dt": functional.softplus(gates + bias), "a": rates, "d": skip}
        decay, beta = gates.chunk(2, -1)
        return inputs | {"g": rates * functional.softplus(decay + bias), "beta": beta.sigmoid()}
