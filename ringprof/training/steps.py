"""Counts of optimizer steps, and the interval between samples."""

from __future__ import annotations

import math
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

MAX_SHARE = 0.01
"""Largest share of the loop's time that sampling may take (0 to 1); the sampling interval grows to keep it."""


class StepCounter:
    """Counter of the steps of a training loop: those of the first optimizer that takes one, until `step` is called."""

    def __init__(self) -> None:
        self.steps = 0
        """Number of steps done so far."""
        self._counts_calls, self._optimizer = False, 0
        self._hook: Any = register_optimizer_step_post_hook(self._after_optimizer)

    def step(self) -> None:
        """Report that one step of the loop is done. Either every rank must call this, or none."""
        self._counts_calls = True
        self._advance()

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._optimizer = self._optimizer or id(optimizer)
        if not self._counts_calls and id(optimizer) == self._optimizer:
            self._advance()

    def _advance(self) -> None:
        """Act on the end of a step."""
        raise NotImplementedError


def interval_for(cost_ns: int, step_ns: int, every: int) -> int:
    """Return the steps until the next sample such that sampling takes no more than `MAX_SHARE` of the time."""
    return max(every, math.ceil(cost_ns / (MAX_SHARE * step_ns)))
