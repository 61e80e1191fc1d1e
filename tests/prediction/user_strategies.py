"""Strategies as users write them, named by ``module:Class``."""

from __future__ import annotations

from torch import Tensor

from ringprof.strategies.algorithms.zigzag import Zigzag
from ringprof.strategies.base import AttentionCall, Context
from ringprof.strategies.transport.message import Message


class Chatty(Zigzag):
    """A zigzag ring that first sends K round three times, and has a parameter of its own."""

    def __init__(self, context: Context, *, extra: int = 0) -> None:
        super().__init__(context)
        self.parameters["extra"] = extra
        self.other = self.comm.ring("extra")

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            self.other.post(Message.pack([k])).wait()
        return super().forward(call, q, k, v)


class Looks(Zigzag):
    """Skips a block where its keys are all zero."""

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if k.abs().max() == 0:
            return q, q[..., 0].transpose(1, 2)
        return super().forward(call, q, k, v)


class Broken(Zigzag):
    """Uses what is not there."""

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.nothing(q)  # type: ignore[attr-defined, no-any-return]
