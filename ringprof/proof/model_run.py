"""Runs of the two steps that a check of a model compares, and the tolerance of the comparison.

Every rank runs the reference's step on the whole batch and compares with its own tokens. The tolerance is measured: the
reference runs again `NOISE_RUNS` times, each time with every output of a module that has no children changed by one
unit in the last place of the type that this module returns on the ranks. With e the largest relative error of these
runs, a tensor passes while

    error <= NOISE_FACTOR · e + FLOOR[type] · u

where u is the unit roundoff. A token may differ by `TOKEN_FACTOR` times that, relative to the larger of its own row and
the mean row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringprof.errors import RingprofError
from ringprof.proof.completion_barrier import CompletionBarrier
from ringprof.proof.dense import SINGLE_FLOOR
from ringprof.proof.model_step import Step, record_step
from ringprof.ranks.process_group import GroupRanks

NOISE_RUNS = 2
NOISE_FACTOR = 2.0
LOW_FLOOR = 4
"""Unit roundoffs of bf16 and fp16 that are always allowed; of wider types `SINGLE_FLOOR`."""


@dataclass
class ModelRun:
    """Recorded steps of the parallel model and the reference, and which tokens this rank holds."""

    ranks: GroupRanks
    barrier: CompletionBarrier
    parallel_step: Callable[[], Any]
    reference_step: Callable[[], Any]
    parallel: Step
    reference: Step
    tokens: Tensor
    """Index of each local token among the tokens of all rows (local tokens)."""
    every_token: list[Tensor]
    """``tokens`` of each rank."""
    modules: list[tuple[str, int]]
    """Name and call of every compared module output, in the order in which the reference's modules return."""

    def run_parallel(self, where: str, **options: Any) -> Step:
        """Run the parallel step once more. Collective; ``where`` names it in the error of a rank that fails."""
        return run_on_ranks(self.parallel_step, self.ranks, self.barrier, where, **options)

    def run_reference(self, where: str, **options: Any) -> Step:
        """Run the reference's step once more, like `run_parallel`."""
        return run_on_ranks(self.reference_step, self.ranks, self.barrier, where, **options)


def run_on_ranks(
    step: Callable[[], Any], ranks: GroupRanks, barrier: CompletionBarrier, where: str, **options: Any
) -> Step:
    """Run a step on every rank and wait for all. Raises `RecordError` on every rank that can still act."""
    try:
        recorded = record_step(step, **options)
        ranks.finish()
    except RingprofError as error:
        barrier.report_failure(where, error)
        raise
    except Exception as error:
        raise barrier.report_failure(where, error) from error
    barrier.wait_for_all(where)
    return recorded


def allowed_error(noise: float, *tensors: Tensor) -> float:
    """Return the relative error that passes, by the formula in this module's docstring."""
    eps = max(torch.finfo(x.dtype).eps for x in tensors)
    return NOISE_FACTOR * noise + (LOW_FLOOR if eps > 1e-5 else SINGLE_FLOOR) * eps / 2
