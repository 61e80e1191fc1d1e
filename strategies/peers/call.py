"""Base class of strategies that wrap another package's attention, called as in its authors' own examples.

The package computes and communicates by itself, without our kernels and communicator, which therefore count nothing. It
shares the checks, the layout, and the choice of a kernel by name with our strategies.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from ..base import AttentionCall, OutAndLse, Rows, Shape, Strategy
from ..errors import Unsupported
from ..kernels.kernel import Gradients, as_kernel_input


class PeerStrategy(Strategy):
    """Context-parallel attention by one call of another package's function."""

    takes_softcap = False
    CAUSAL_ONLY: ClassVar[bool] = False
    WORLD_ONLY: ClassVar[bool] = False
    """Whether the package creates its own process groups, over all ranks of the job."""
    SINGLE_SEQUENCE: ClassVar[bool] = False
    """Whether the package supports only batch size 1."""

    @abstractmethod
    def call(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionCall) -> Tensor:
        """Compute the differentiable output (B, S/N, H, D) of this rank's queries.

        The package runs its own kernel; that of ``attention`` only has the name of the one that it shall run.
        """

    def differentiable(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> OutAndLse:
        name = type(self).__name__
        if call.lse_wanted:
            raise Unsupported(f"return_lse is not supported by {name}")
        if self.CAUSAL_ONLY and not call.causal:
            raise Unsupported(f"{name} takes a causal mask only")
        if self.WORLD_ONLY and not self.comm.is_world:
            raise Unsupported(f"{name} makes groups of all ranks: it cannot run over some of them")
        q, k, v = (as_kernel_input(x) for x in (q, k, v))
        return self.call(q, k, v, call), None

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        if cls.SINGLE_SEQUENCE and shape.batch > 1:
            return f"takes one sequence at a time: batch 1, not {shape.batch}"
        return super().why_unsupported(shape, size, **params)

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("computed by `call`")

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        raise NotImplementedError("computed by `call`")
