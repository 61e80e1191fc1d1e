"""A query: which strategy, on which workload, on which cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ringprof.errors import InputError, UnsupportedWorkloadError, UsageError
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.network import Cluster
from ringprof.run import Run, read_run
from ringprof.strategies.catalog import PEERS
from ringprof.trace.inputs import detect
from ringprof.workload.combinations import raise_if_refused
from ringprof.workload.workload import Workload


def find_run(path: str | os.PathLike[str]) -> Run:
    """Read the run of a folder or a ``run.json``. Raises `InputError` if the path is something else."""
    inputs = detect([path])
    if inputs.run is None:
        raise InputError(f"{os.fspath(path)}: not a recorded run: name its folder or its run.json")
    return read_run(inputs.run)


def uses_legacy_schedule(run: Run) -> bool:
    """Return whether dK and dV made one hop per rank, as they did until November 2026; today it is one hop less."""
    hops = {
        (sent.channel, sent.phase): sent.count
        for work in run.work or () for sent in work.sent or ()
    }  # fmt: skip
    key_hops, gradient_hops = hops.get(("kv", "backward")), hops.get(("dkv", "backward"))
    return key_hops is not None and gradient_hops == key_hops + 1


def busy_s(run: Run, share: float = 0.5) -> float | None:
    """Return the seconds from the first iteration of a recording to a ``share`` of its timed iterations."""
    timings = run.timings
    if timings is None or not timings.median_ns():
        return None
    return (timings.warmup + share * len(timings.iterations_ns[0])) * (timings.median_ns() or 0.0) / 1e9


def cluster_of(run: Run) -> Cluster:
    """Return hosts and GPUs of a run as its strategy saw them.

    Raises `UnsupportedWorkloadError` if hosts have different numbers of ranks.
    """
    size, per_host = run.topology.world_size, min(run.topology.ranks_per_host, run.topology.world_size)
    if size % per_host:
        raise UnsupportedWorkloadError(f"run {run.name}: {size} ranks are not hosts of {per_host}: unlike hosts")
    return Cluster(hosts=size // per_host, gpus_per_host=per_host)


@dataclass(frozen=True)
class Query:
    """A run whose performance is to be predicted."""

    strategy: str
    """Name of a bundled strategy, or ``package.module:Class``."""
    workload: Workload
    cluster: Cluster
    kernel: str = "auto"
    """Name of the kernel; ``auto`` is the one of those measured on the machine, if possible with this head size, that
    ``auto`` prefers at run time where all of them are installed."""
    hops: str = "nccl"
    """``nccl``, ``copy`` or ``auto``, which selects copy engines if the machine has a rate for them."""
    params: Mapping[str, Any] = field(default_factory=dict)
    legacy_schedule: bool = False
    """Whether to use the legacy backward schedule; see `uses_legacy_schedule`."""
    pairwise: bool = False
    """Whether hops are sent as by Transformer Engine, by torch's ``isend`` and ``irecv`` outside a batch.

    Each hop then has a communicator of its two ranks, and it starts before the block that becomes ready with it: copies
    of half tensors and the block counts of variable-length calls run between the two."""
    one_stream: bool = False
    """Whether all blocks run on the stream of the hops, which a strategy of two compute streams does not do."""
    repacks: bool = False
    """Whether each attention call gathers its inputs from padded rows, and scatters its results to padded rows."""
    busy_s: float | None = None
    """Seconds for which the devices have computed when the time is taken; None means a long time, as in training."""
    stands_for: str | None = None
    """Name of another project's strategy that this query stands for (`stand_in`)."""

    @classmethod
    def of_run(cls, run: Run) -> Query:
        """Return the query for the performance of a recorded run.

        Raises `InputError` for a run that does not name its strategy, `UnsupportedWorkloadError` for CPU runs.
        """
        if run.strategy is None or run.workload is None or run.kernel is None:
            raise InputError(f"run {run.name}: it does not name its strategy, kernel and workload")
        if run.topology.device_type != "cuda":
            raise UnsupportedWorkloadError(
                f"run {run.name}: recorded on CPU processes, whose speed cannot be predicted"
            )
        used = run.strategy
        peer = used.name in PEERS
        # Earlier recordings of torch-cp name a type of gradients, which is no parameter.
        params = {name: value for name, value in used.params.items() if not (peer and name == "grad_wire")}
        return cls(
            used.name, run.workload, cluster_of(run), run.kernel, "nccl" if peer else used.hops, params,
            uses_legacy_schedule(run), busy_s=busy_s(run),
        )  # fmt: skip

    def hops_on(self, machine: Calibration) -> str:
        """Return ``nccl`` or ``copy``. Raises `UsageError` if the query names another transport."""
        if self.hops not in ("auto", "nccl", "copy"):
            raise UsageError(f"hops {self.hops!r} is not one of auto, nccl, copy")
        raise_if_refused({"operator": self.workload.operator, "hops": self.hops})
        if self.workload.recurrent:
            return "nccl"
        if self.hops != "auto":
            return self.hops
        return "nccl" if machine.same_host.copy_gb_s is None else "copy"

    def kernel_on(self, machine: Calibration) -> str:
        """Return the kernel's name. Raises `InputError` or `UnsupportedWorkloadError` if none is calibrated."""
        if self.workload.recurrent:
            if self.kernel not in ("auto", "fla"):
                raise UsageError(f"--kernel {self.kernel}: recurrences are predicted with kernel fla alone")
            return "fla"
        if self.kernel != "auto":
            return self.kernel
        from ringprof.strategies.kernels.registry import KERNELS, auto_order

        mask = self.workload.mask()
        if self.workload.phase == "decode":
            from ringprof.strategies.algorithms.dcp import SPLITTING

            rated = [kernel.name for kernel in machine.kernels if kernel.cache_gb_s is not None]
            if not rated:
                raise UnsupportedWorkloadError(
                    f"machine {machine.name!r} has no rate at which a kernel reads a cache of keys: decode cannot be"
                    " predicted on it"
                )
            return next((name for name in SPLITTING if name in rated), rated[0])
        calibrated = [
            (kernel.name, sample.head_dim) for kernel in machine.kernels
            for sample in kernel.samples if sample.pairs is not None or mask.plain
        ] or [
            # Those that compute several lengths in one call, from their plain curves.
            (kernel.name, sample.head_dim) for kernel in machine.kernels
            if kernel.name in KERNELS and KERNELS[kernel.name].varlen for sample in kernel.samples
        ]  # fmt: skip
        same_head_dim = [name for name, head_dim in calibrated if head_dim == self.workload.head_dim]
        if not calibrated and not mask.plain:
            raise UnsupportedWorkloadError(
                f"machine {machine.name!r}: no kernel is calibrated for packed documents and windows"
                " (ringprof calibrate, with flash-attn installed)"
            )
        if not calibrated:
            raise InputError(f"machine {machine.name!r}: no kernel has been measured on it")
        if not same_head_dim:
            return calibrated[0][0]
        documents, deterministic = self.workload.documents is not None, is_set(self.params.get("deterministic"))
        at_run_time = (
            kernel.name for kernel in auto_order(self.workload.head_dim, documents=documents)
            if kernel.name in same_head_dim and (kernel.has_deterministic_mode or not deterministic)
        )  # fmt: skip
        return next(at_run_time, same_head_dim[0])


def is_set(value: object) -> bool:
    """Return whether a parameter of a strategy, as a value or as typed by a user, is true."""
    return value is True or str(value).lower() in ("true", "1", "yes", "on")


# --- strategies of other projects (peers) ---

# A dry run needs code that communicates through ringprof's channels. torch's ring does, in a dry run; the others are
# predicted as the bundled strategy with the same blocks and transfers, or refused.
_FP32_RING: Mapping[str, Any] = {"grad_wire": "fp32"}
_ZIGZAG_USP: Mapping[str, Any] = {**_FP32_RING, "layout": "zigzag"}
_STAND_INS: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    # These rings send dK and dV in float32 from the first block on, one hop per rank.
    "ring-flash-attn/ring": ("ring", _FP32_RING, {"legacy_schedule": True}),
    "ring-flash-attn/zigzag": ("zigzag", _FP32_RING, {"legacy_schedule": True}),
    "ring-flash-attn/stripe": ("stripe", _FP32_RING, {"legacy_schedule": True}),
    "yunchang/ulysses": ("ulysses", {}, {}),
    "yunchang/usp": ("usp", _ZIGZAG_USP, {"legacy_schedule": True}),
    "transformer-engine/p2p": ("megatron", {}, {"pairwise": True}),
    "transformer-engine/a2a": ("ulysses", {}, {}),
    "transformer-engine/all_gather": ("allgather", {"layout": "zigzag"}, {}),
    "transformer-engine/a2a+p2p": ("usp", {"layout": "zigzag"}, {"pairwise": True}),
}


def stand_in(query: Query) -> Query:
    """Return the query that predicts a query of a peer; any other query unchanged.

    Raises `UnsupportedWorkloadError` for a peer that no bundled strategy stands for.
    """
    peer = query.strategy
    if peer not in PEERS:
        return query
    if query.hops == "copy":
        raise UnsupportedWorkloadError(f"strategy {peer!r} sends by its own NCCL calls: no hops by copy engine")
    if peer == "torch-cp":
        return replace(query, hops="nccl")
    if peer not in _STAND_INS:
        raise UnsupportedWorkloadError(
            f"strategy {peer!r} cannot be predicted: its code runs on GPUs alone, and no bundled strategy sends alike"
        )
    name, params, options = _STAND_INS[peer]
    own = {"deterministic", *(("ulysses_degree", "ring_degree", "placement") if name == "usp" else ())}
    unknown = next((key for key in query.params if key not in own), None)
    if unknown is not None:
        raise UnsupportedWorkloadError(f"strategy {peer!r} has no parameter {unknown!r}")
    return replace(query, strategy=name, params={**params, **query.params}, hops="nccl", stands_for=peer, **options)
