"""The measurement on one or two GPUs that is most likely to overturn the order of two predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from ringprof.common.formatting import percent, rounded_percent, significant
from ringprof.prediction.predict import PredictionResult

_LEAST_PROBABILITY = 0.01
"""Probability below which a measurement counts as unable to overturn the order."""
_EQUAL = 1e-6
"""Difference of shifts up to which an input moves both times alike."""


@dataclass(frozen=True)
class Experiment:
    """A measurement of one input, and the result of it that would make the second choice the faster one."""

    measured: str
    """Name of the measured quantity, such as ``the rate of hops inside a node``."""
    command: str
    gpus: int
    """Number of GPUs that it needs."""
    overturned_by: str
    """Result that would put the second choice first, with the assumed value."""
    probability: float
    """Probability of such a result, by the input's spread."""

    def sentence(self) -> str:
        """Return the experiment as one sentence."""
        where = {1: "on one GPU", 2: "on two GPUs"}[self.gpus]
        return (
            f"{self.measured} ({where}: {self.command}): {self.overturned_by} would put it first,"
            f" with a probability of {percent(self.probability, 0)}"
        )


@dataclass(frozen=True)
class _Input:
    """An uncertain input that one or two GPUs can measure."""

    measured: str
    command: str
    gpus: int
    gb_s: Callable[[PredictionResult], float | None] = lambda prediction: None
    """Assumed rate in GB/s; None for times of kernels and hosts."""


_CALIBRATE = "ringprof calibrate --parts {} -o machine.json"
_INPUTS = {
    "forward kernel": _Input("the kernel's forward time on the blocks of {}", _CALIBRATE.format("kernels"), 1),
    "backward kernel": _Input("the kernel's backward time on the blocks of {}", _CALIBRATE.format("kernels"), 1),
    "memory": _Input(
        "the rate of merges and copies", _CALIBRATE.format("memory"), 1,
        lambda prediction: prediction.machine.memory_gb_s.value,
    ),
    "host": _Input("the host's launch times", _CALIBRATE.format("host"), 1),
    "same_host": _Input(
        "the rate of hops inside a node", _CALIBRATE.format("links"), 2,
        lambda prediction: prediction.machine.same_host.hop_gb_s.value,
    ),
    "other_host": _Input(
        "the rate between two nodes",
        "ringprof record --strategy ring on two nodes, then ringprof calibrate RUN", 2,
        lambda prediction: (
            prediction.machine.other_host.total_gb_s.value if prediction.query.cluster.nic_gbit is None
            else prediction.query.cluster.nic_gbit / 8
        ),
    ),
}  # fmt: skip


def deciding_experiment(first: PredictionResult, second: PredictionResult) -> Experiment | None:
    """Return the measurement that most likely makes ``second`` the faster one; None if no input is likely to.

    An input's standard deviation moves both times, each by the share that depends on it. So the log ratio of the times
    shifts by the difference of the two, and a shift as large as the predicted log ratio overturns the order.
    """
    log_ratio = math.log(second.median_ns / first.median_ns)
    variances = first.variance_by_input, second.variance_by_input
    experiments = []
    for name, measured in _INPUTS.items():
        shifts = [math.sqrt(by_input.get(name, 0.0)) for by_input in variances]
        shift = shifts[1] - shifts[0]
        if abs(shift) < _EQUAL:
            continue
        deviations = -log_ratio / shift
        probability = NormalDist().cdf(-abs(deviations))
        spread = _spread(name, first, second, shifts)
        if probability >= _LEAST_PROBABILITY and spread:
            result = _result(measured.gb_s(first), math.exp(deviations * spread))
            less_known = (first, second)[shifts[1] > shifts[0]].query.strategy
            experiments.append(
                Experiment(measured.measured.format(less_known), measured.command, measured.gpus, result, probability)
            )
    # Of equally likely ones, the one with fewer GPUs is cheaper.
    return max(experiments, key=lambda experiment: (round(experiment.probability, 2), -experiment.gpus), default=None)


def _spread(name: str, first: PredictionResult, second: PredictionResult, shifts: list[float]) -> float:
    """Return the standard deviation of an input's log time: its shift over the share of the time that depends on it."""
    prediction, shift = max(zip((first, second), shifts, strict=True), key=lambda pair: pair[1])
    breakdown = prediction.breakdown
    if name == "host":
        return prediction.time.host.spread
    if name.endswith(" kernel"):
        part = breakdown.phases.get(name.removesuffix(" kernel"), {}).get("kernel", 0.0)
    else:
        part = breakdown.total(name)
    return shift * breakdown.whole_ns / part if part else 0.0


def _result(gb_s: float | None, factor: float) -> str:
    """Describe the measured value that changes a time by ``factor``; a rate changes by its inverse."""
    if gb_s is None:
        return f"a time {rounded_percent(abs(factor - 1))} {'longer' if factor > 1 else 'shorter'} than assumed"
    limit = "at most" if factor > 1 else "at least"
    return f"{limit} {significant(gb_s / factor, 3)} GB/s ({significant(gb_s, 3)} assumed)"
