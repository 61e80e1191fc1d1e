"""Other people's context-parallel attention as a strategy, called as its authors' own examples call it.

It computes and sends by itself, past kernel and communicator, which count nothing of it. What it shares with ours: the
checks, the layout, and that a kernel is asked for by name.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from ringprof.strategies.base import AttentionCall, OutAndLse, Rows, Shape, Strategy
from ringprof.strategies.errors import Unsupported
from ringprof.strategies.kernels.kernel import Gradients


class PeerStrategy(Strategy):
    """Attention over the whole sequence by one call of somebody else's function."""

    takes_softcap = False
    CAUSAL_ONLY: ClassVar[bool] = False
    WORLD_ONLY: ClassVar[bool] = False
    """Whether it makes its own groups, of all ranks that there are."""
    SINGLE_SEQUENCE: ClassVar[bool] = False
    """Whether it takes batch 1 alone."""

    @abstractmethod
    def call(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        """Output (B, S/N, H, D) of this rank's queries, differentiable, from such as `Strategy.attention` has."""

    def differentiable(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> OutAndLse:
        name = type(self).__name__
        if call.lse_wanted:
            raise Unsupported(f"return_lse is not supported by {name}")
        if self.CAUSAL_ONLY and not call.causal:
            raise Unsupported(f"{name} takes a causal mask only")
        if self.WORLD_ONLY and not self.comm.is_world:
            raise Unsupported(f"{name} makes groups of all ranks: it cannot run over some of them")
        return self.call(q, k, v, causal=call.causal, scale=call.scale), None

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        if cls.SINGLE_SEQUENCE and shape.batch > 1:
            return f"takes one sequence at a time: batch 1, not {shape.batch}"
        return super().why_unsupported(shape, size, **params)

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("computed by `call`")

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        raise NotImplementedError("computed by `call`")
