"""What is asked: which strategy, on which problem, on which cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringprof.errors import InputError, UnsupportedWorkloadError, UsageError
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.network import Cluster
from ringprof.run import Run, Workload, read_run
from ringprof.trace.inputs import detect


def run_at(path: str | os.PathLike[str]) -> Run:
    """The run of a folder or a ``run.json``. Raises `InputError` where it is something else."""
    found = detect([path])
    if found.run is None:
        raise InputError(f"{os.fspath(path)}: not a recorded run: name its folder or its run.json")
    return read_run(found.run)


def is_older(run: Run) -> bool:
    """Whether dK and dV of its ring made as many hops as there are ranks, as until November 2026: today one less."""
    hops = {
        (sent.channel, sent.phase): sent.count
        for work in run.work or () for sent in work.sent or ()
    }  # fmt: skip
    keys, gradients = hops.get(("kv", "backward")), hops.get(("dkv", "backward"))
    return keys is not None and gradients == keys + 1


def busy_s(run: Run, share: float = 0.5) -> float | None:
    """Seconds from the first iteration of a recording to a ``share`` of those that were timed."""
    timings = run.timings
    if timings is None or not timings.median_ns():
        return None
    return (timings.warmup + share * len(timings.iterations_ns[0])) * (timings.median_ns() or 0.0) / 1e9


def cluster_of(run: Run) -> Cluster:
    """Hosts and GPUs of a run, as its strategy saw them. Raises `UnsupportedWorkloadError` for hosts of unlike
    numbers."""
    size, per_host = run.topology.world_size, min(run.topology.ranks_per_host, run.topology.world_size)
    if size % per_host:
        raise UnsupportedWorkloadError(f"run {run.name}: {size} ranks are not hosts of {per_host}: unlike hosts")
    return Cluster(hosts=size // per_host, gpus_per_host=per_host)


@dataclass(frozen=True)
class Query:
    """One run that nobody has made."""

    strategy: str
    """A bundled one's name, or ``package.module:Class``."""
    workload: Workload
    cluster: Cluster
    kernel: str = "auto"
    """``auto``: the first of the machine's that has been measured, with heads of this size where one has."""
    hops: str = "nccl"
    """``auto``: as the recorder chooses them, copy engines where the machine has a rate of them."""
    params: Mapping[str, Any] = field(default_factory=dict)
    older: bool = False
    """As runs of before were recorded; see `is_older`."""
    busy_s: float | None = None
    """For how long the devices have computed when the time is taken; None: for long, as in training."""

    @classmethod
    def like(cls, run: Run) -> Query:
        """What a recorded run did. Raises `InputError` for one that does not say, `UnsupportedWorkloadError` for CPU
        runs."""
        if run.strategy is None or run.workload is None or run.kernel is None:
            raise InputError(f"run {run.name}: it does not name its strategy, kernel and workload")
        if run.topology.device_type != "cuda":
            raise UnsupportedWorkloadError(f"run {run.name}: recorded on CPU processes, whose speed cannot be foreseen")
        used = run.strategy
        return cls(
            used.name, run.workload, cluster_of(run), run.kernel, used.hops, used.params, is_older(run),
            busy_s=busy_s(run),
        )  # fmt: skip

    def hops_on(self, machine: Calibration) -> str:
        """``nccl`` or ``copy``. Raises `UsageError` where the question names something else."""
        if self.hops not in ("auto", "nccl", "copy"):
            raise UsageError(f"hops {self.hops!r} is not one of auto, nccl, copy")
        if self.hops != "auto":
            return self.hops
        return "nccl" if machine.same_host.copy_gb_s is None else "copy"

    def kernel_on(self, machine: Calibration) -> str:
        """The kernel's name."""
        if self.kernel != "auto":
            return self.kernel
        masked = not self.workload.mask().plain
        of = [
            (kernel.name, sample.head_dim) for kernel in machine.kernels
            for sample in kernel.samples if sample.pairs is not None or not masked
        ]  # fmt: skip
        fitting = [name for name, head_dim in of if head_dim == self.workload.head_dim]
        if masked and not of:
            raise UnsupportedWorkloadError(
                f"machine {machine.name!r}: no kernel is calibrated for packed documents and windows"
                " (ringprof calibrate, with flash-attn installed)"
            )
        if not of:
            raise InputError(f"machine {machine.name!r}: no kernel has been measured on it")
        return (fitting or [name for name, _ in of])[0]
