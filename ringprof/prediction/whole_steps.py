"""Predict a whole training step: attention by the simulator, everything else by measured steps of one and two layers.

Both passes of a layer take the measured time outside attention over the rank's tokens, plus the predicted attention.
FSDP2 gathers a layer's parameters in both passes and reduce-scatters its gradients; DDP reduces them in the backward
pass. This traffic overlaps with the computation of neighbouring layers, whose kernels it slows down; a step waits for
what is longer, for the first gather and for the last reduction. Among the layers' kernels, both copy parameters and
gradients into and out of the buffers of their collectives. All ranks wait for the slowest device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import msgspec

from ringprof.common.json_object import JsonObject
from ringprof.dryrun.schedule import CommStart
from ringprof.errors import UnsupportedWorkloadError
from ringprof.prediction.calibration import Calibration, ModelFigures
from ringprof.prediction.network import Links
from ringprof.prediction.predict import Lognormal, PredictionResult, ScheduleOf, predict
from ringprof.prediction.query import Query

LAYER_SPREAD, TRAFFIC_SPREAD = 0.03, 0.3
"""Assumed relative standard deviations of a layer's time on another device and in a deeper model, and of exposed
traffic of parameters."""
STEP_SPREAD = 0.03
"""Relative standard deviation of a whole step, beside that of its parts, on another host than the layers'.

With so much, five of the six steps of dev/benchmarks/data/h200_steps.csv lie inside where each is left out, and four
where both of a host are.
"""
_NORMAL_80 = 1.2816
"""Standard deviations from the median to the ends of the middle 80 %."""


@dataclass(frozen=True)
class StepPrediction:
    """Predicted time of one training step of a whole model."""

    attention: PredictionResult
    """Prediction of the attention of one layer."""
    figures: ModelFigures
    layers: int
    parallel: str
    """``ddp`` or ``fsdp2``."""
    parts_ns: Mapping[str, float]
    """Nanoseconds by part: ``attention``, ``layers``, ``optimizer``, ``once`` (embeddings, head and loss), ``traffic``
    (exposed)."""
    time: Lognormal

    @cached_property
    def interval_ns(self) -> tuple[float, float, float]:
        """Nanoseconds per step as 10th, 50th and 90th percentile."""
        low, middle, high = map(self.time.quantile_ns, (0.1, 0.5, 0.9))
        return low, middle, high


def predict_step(query: Query, machine: Calibration, schedule_of: ScheduleOf, *, draws: int = 15) -> StepPrediction:
    """Predict a step of a query whose workload has whole layers.

    Raises like `ringprof.prediction.predict.predict`, and `UnsupportedWorkloadError` for a machine whose file has no
    model, or a model with other heads, and for other numbers of tokens per rank than were measured.
    """
    workload, layer = query.workload, query.workload.layer
    assert layer is not None
    figures = model_of(machine, query)
    alone = msgspec.structs.replace(workload, layer=None, layers=1)
    attention = predict(replace(query, workload=alone), machine, schedule_of, draws=draws)
    tokens = workload.batch * workload.seq // query.cluster.size
    parts, variances = {"attention": 0.0, "layers": 0.0, "optimizer": 0.0, "once": 0.0, "traffic": 0.0}, 0.0
    calls = figures.attention_calls
    # The median of the slowest of so many devices; the layers were measured on one.
    slowest = 1 + machine.device_variation.value * NormalDist().inv_cdf(0.5 ** (1 / query.cluster.size))
    total_ns = {phase: sum(getattr(attention.breakdown, phase).values()) for phase in ("forward", "backward")}
    per_pass = {phase: attention.median_ns * ns / sum(total_ns.values()) for phase, ns in total_ns.items()}
    # A layer that is computed again has a second forward call, in the backward pass.
    attention_ns = {
        "forward": per_pass["forward"],
        "backward": (calls["forward"] - 1) * per_pass["forward"] + calls["backward"] * per_pass["backward"],
    }
    for phase in ("forward", "backward") if workload.backward else ("forward",):
        layer_ns, once_ns, spread = _slower(figures.times_ns(phase, tokens), slowest)
        computing_ns = layer_ns + attention_ns[phase]
        slowed, exposed = _traffic_ns(figures, machine, query, layer.parallel, phase, computing_ns)
        parts["attention"] += workload.layers * attention_ns[phase]
        parts["layers"] += workload.layers * (layer_ns + slowed)
        parts["once"] += once_ns
        parts["traffic"] += exposed
        variances += (workload.layers * layer_ns * spread) ** 2
    if workload.backward:
        layer_ns, once_ns, spread = _slower(figures.times_ns("optimizer", tokens), slowest)
        share = 1 / query.cluster.size if layer.parallel == "fsdp2" else 1.0
        parts["optimizer"] = share * (workload.layers * layer_ns + once_ns)
        variances += (share * workload.layers * layer_ns * spread) ** 2
    median_ns = sum(parts.values())
    low, _, high = attention.interval_ns
    variances += (parts["attention"] * math.log(high / low) / (2 * _NORMAL_80)) ** 2
    variances += ((parts["layers"] + parts["optimizer"] + parts["once"]) * LAYER_SPREAD) ** 2
    variances += (parts["traffic"] * TRAFFIC_SPREAD) ** 2 + (median_ns * STEP_SPREAD) ** 2
    return StepPrediction(
        attention, figures, workload.layers, layer.parallel, parts, Lognormal(median_ns, variances**0.5 / median_ns)
    )


def _slower(times: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    """Return the times of `ModelFigures.times_ns` on a device that is slower by ``factor``."""
    layer_ns, rest_ns, spread = times
    return factor * layer_ns, factor * rest_ns, spread


def model_of(machine: Calibration, query: Query) -> ModelFigures:
    """Return the measured model of a machine's file that fits a query. Raises `UnsupportedWorkloadError`."""
    workload, figures = query.workload, machine.model
    if figures is None:
        raise UnsupportedWorkloadError(
            f"machine {machine.name!r} has no measured layers: ringprof calibrate --model MODULE:FUNCTION on one GPU"
        )
    if figures.device != machine.device:
        raise UnsupportedWorkloadError(
            f"the layers of {figures.target} were measured on {figures.device}, machine {machine.name!r} is"
            f" {machine.device}"
        )
    if (workload.heads, workload.kv_heads, workload.head_dim) != (figures.heads, figures.kv_heads, figures.head_dim):
        raise UnsupportedWorkloadError(
            f"{workload.heads_in_words()}: the attention of {figures.target} has {figures.heads} heads,"
            f" {figures.kv_heads} kv heads, head_dim {figures.head_dim}"
        )
    return figures


def _traffic_ns(
    figures: ModelFigures, machine: Calibration, query: Query, parallel: str, phase: str, layer_ns: float
) -> tuple[float, float]:
    """Return by how much a layer's computation of ``layer_ns`` is slowed down by the traffic of parameters and
    gradients, and the exposed time of all layers, both in nanoseconds, by the closed formulas of ring collectives."""
    size, links = query.cluster.size, Links(machine, query.cluster)
    if parallel == "fsdp2":
        # A shard is copied into the buffer of a gather and the result out of it, and gradients into the buffer of a
        # reduction; on one GPU also out of it, and a gather is one copy (`torch.distributed.fsdp._fully_shard`).
        copies = {"all_gather": 1 + (1 / size if size > 1 else 0), "reduce_scatter": 1 if size > 1 else 2}
        chosen = ["all_gather", "reduce_scatter"] if phase == "backward" else ["all_gather"]
    else:
        # DDP copies gradients into its buckets and back (``gradient_as_bucket_view=False``).
        copies = {"all_gather": 1, "reduce_scatter": 1}
        # An all-reduce is a reduce-scatter and an all-gather.
        chosen = ["reduce_scatter", "all_gather"] if phase == "backward" else []
    # FSDP2 keeps the parameters of the outermost module between the passes.
    of_rest = ["reduce_scatter"] if (parallel, phase) == ("fsdp2", "backward") else chosen

    def copies_ns(operations: Sequence[str], whole_bytes: int) -> float:
        return sum(2 * copies[operation] * whole_bytes / machine.memory_gb_s.value for operation in operations)

    def collective(operation: str, whole_bytes: int) -> tuple[float, float]:
        """Return a collective's nanoseconds, and the share of a kernel's rate that it takes."""
        started = CommStart(
            id=0, channel="parameters", phase="", operation=operation, members=tuple(range(size)),
            communicator="parameters", messages=(max(1, whole_bytes // size),),
        )  # fmt: skip
        return links.collective_ns(started), links.device_share(started)

    layer_copies_ns, rest_copies_ns = copies_ns(chosen, figures.layer_bytes), copies_ns(of_rest, figures.rest_bytes)
    if size == 1 or not chosen:
        return layer_copies_ns, rest_copies_ns
    layer_ns += layer_copies_ns
    per_layer = [collective(operation, figures.layer_bytes) for operation in chosen]
    rest_ns = sum(collective(operation, figures.rest_bytes)[0] for operation in of_rest)
    traffic_ns = sum(ns for ns, _ in per_layer)
    slowed_ns = sum(min(ns, layer_ns) * share for ns, share in per_layer) + layer_copies_ns
    # Forward, the first gather has nothing to overlap with; backward, the last reduction.
    edge_ns = per_layer[-1][0]
    longer_ns = query.workload.layers * max(0.0, traffic_ns - layer_ns - slowed_ns + layer_copies_ns)
    return slowed_ns, longer_ns + edge_ns + rest_ns + rest_copies_ns


def step_dict(step: StepPrediction) -> JsonObject:
    """Return what a prediction's JSON has of a whole step."""
    low, middle, high = step.interval_ns
    return {
        "model": step.figures.target, "layers": step.layers, "parallel": step.parallel,
        "step_ms": {"p10": round(low / 1e6, 4), "p50": round(middle / 1e6, 4), "p90": round(high / 1e6, 4)},
        "parts_ms": {part: round(ns / 1e6, 4) for part, ns in step.parts_ns.items()},
    }  # fmt: skip
