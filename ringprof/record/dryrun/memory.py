"""What a rank of a recording will hold at its peak: its own iterations, run on shapes alone."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ringprof.errors import UnsupportedWorkloadError
from ringprof.record.baselines import baseline_bodies
from ringprof.record.dryrun.dispatch import Recorder
from ringprof.record.dryrun.fakes import RecordingCommunicator
from ringprof.record.dryrun.forked import in_fork
from ringprof.record.dryrun.run import META, iterations, recorded, recording, refusals
from ringprof.record.dynamic_cp import DynamicCpShard
from ringprof.record.measure import WorkloadShard
from ringprof.record.request import RecordRequest
from ringprof.record.resolve import load_strategy, strategy_errors, torch_dtype, why_unsupported
from ringprof.run import Workload
from ringprof.strategies.masks.expected import is_bundled
from ringprof.strategies.peers.call import PeerStrategy
from ringprof.strategies.transport.baselines import NullCommunicator

ALL, DIRECT = 8, 48
"""Ranks up to which each is run, and up to which a few of them are."""
_STEP = 8
"""At least so many ranks, of whole hosts: five and six times as many stand for more, for longer rings are alike."""
_STRANGERS_S = 10.0
"""For a user's own strategy: a bundled one takes less than a second."""
_CUBLAS_BYTES = 32 << 20
"""Matrix products, as those of the check, and cuDNN leave a workspace that torch's allocator counts: so much on Hopper.
"""


def peak_bytes(request: RecordRequest, workload: Workload, kernel: str, per_host: int) -> int:
    """The most that a rank holds in the iterations of a resolved request, of ``workload`` in place of its own.

    ``kernel`` is the one that will run, ``per_host`` the ranks that share a host. A user's own strategy is run in a
    fork. Raises `UnsupportedWorkloadError` where a strategy cannot be run on shapes alone.
    """
    kind, assumed = load_strategy(request.strategy), _Assumed(request, kernel, per_host)
    work = partial(_of_all_ranks, assumed, workload)
    if is_bundled(kind):
        return work()
    if kind.__module__.startswith(PeerStrategy.__module__.rpartition(".")[0]):
        raise UnsupportedWorkloadError("other people's code computes and sends by itself")
    return in_fork(work, _STRANGERS_S)


class _Assumed(NamedTuple):
    """What the ranks run with."""

    request: RecordRequest
    kernel: str
    per_host: int

    @property
    def world(self) -> int:
        return self.request.world or 1

    @property
    def hops(self) -> str:
        return "copy" if self.request.device == "cuda" and self.request.hops != "nccl" else "nccl"


def _of_all_ranks(assumed: _Assumed, workload: Workload) -> int:
    world, per_host = assumed.world, assumed.per_host
    if world > DIRECT:
        if workload.documents is not None:
            raise UnsupportedWorkloadError(f"packed documents on {world} ranks: reckoned on at most {DIRECT}")
        step = per_host * -(-_STEP // per_host) if per_host < world else _STEP
        with suppress(UnsupportedWorkloadError):
            low, high = (_most(assumed, _on_fewer(assumed, workload, size), size) for size in (5 * step, 6 * step))
            return low + (high - low) * (world - 5 * step) // step
    return _most(assumed, workload, world)


def _on_fewer(assumed: _Assumed, workload: Workload, size: int) -> Workload:
    """The workload with as many tokens a rank on ``size`` ranks. Raises `UnsupportedWorkloadError` where there is
    none."""
    seq, cached = workload.seq // assumed.world * size, None
    if workload.kv_length is not None:
        cached = seq + (workload.kv_length - workload.seq) // assumed.world * size
    fewer = msgspec.structs.replace(workload, seq=seq, kv_length=cached)
    with strategy_errors():
        kind = load_strategy(assumed.request.strategy)
        reason = why_unsupported(kind, fewer, size, assumed.request.params) if seq else "less than one token"
    if reason:
        raise UnsupportedWorkloadError(reason)
    return fewer


def _most(assumed: _Assumed, workload: Workload, world: int) -> int:
    """Bytes of the rank that holds the most, which of many is the first, the last or in their middle."""
    ranks = (0, world // 2, world - 1) if world > ALL else range(world)
    return max(_Rank(assumed, workload, rank, world).run() for rank in ranks) + _beside(assumed, workload)


class _Rank:
    """One rank of a recording; it makes strategies over parts of the ranks as `ringprof.strategies.Dynamic` does."""

    def __init__(self, assumed: _Assumed, workload: Workload, rank: int, world: int) -> None:
        self._assumed, self._workload, self._rank, self._world = assumed, workload, rank, world
        self._recorder, self._made = Recorder(), dict[int, Any]()

    def run(self) -> int:
        """Bytes at the peak."""
        request = self._assumed.request
        with refusals(request.strategy), recording(self._recorder, on_gpus=request.device == "cuda"):
            problem = self._problem()
            for _ in iterations(problem, self._assumed.hops):
                self._recorder.start()
                problem.run_for_verification()
            if request.controls:
                ordinary, *others = baseline_bodies(problem, self._make(self._world, _Silent))[0]
                for body in (*others, ordinary):
                    body()
        return self._recorder.peak_bytes

    def of(self, size: int) -> Any:
        """The strategy over this rank's part of ``size`` ranks."""
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size]

    @property
    def comm(self) -> Any:
        """That of all ranks."""
        return self.of(self._world).comm

    def _make(self, size: int, kind_of_comm: type[RecordingCommunicator] = RecordingCommunicator) -> Any:
        request, kernel, per_host = self._assumed
        together = min(per_host, size)
        place = self._rank % size, size, size if size % together else together
        comm = kind_of_comm(self._recorder, *place, self._assumed.hops)
        return recorded(load_strategy(request.strategy), request.params, comm, kernel, self._workload.softcap)[0]

    def _problem(self) -> WorkloadShard:
        workload, world = self._workload, self._world
        if workload.sequences is not None:
            return DynamicCpShard.from_dynamic(
                self, workload, tuple(world // count for count in workload.sequences), META
            )
        if workload.layer is not None:
            # Loads FSDP, for half a second.
            from ringprof.record.layer import LayersShard

            return _as_on_gpus(LayersShard.create(self.of(world), workload, META))
        return WorkloadShard.create(self.of(world), workload, META)


class _Silent(NullCommunicator, RecordingCommunicator):
    """One rank alone, which sends nothing and records no transfer."""


def _beside(assumed: _Assumed, workload: Workload) -> int:
    """What no operation of a strategy shows: cuBLAS's workspaces, one a thread, and what makes layers parallel.

    DDP has its buckets of gradients. FSDP2 has one share of parameters alone, but gathers a layer and the next.
    """
    layer, (request, kernel, _) = workload.layer, assumed
    if request.device != "cuda":
        return 0
    multiplies = 1 + workload.backward if layer is not None or kernel == "reference" else 0
    held = (multiplies or int(request.verify or kernel == "cudnn")) * _CUBLAS_BYTES
    if layer is None:
        return held
    one, of_all = workload.parameters(), workload.parameters() * workload.layers
    more = of_all if layer.parallel == "ddp" else 3 * one - of_all * (assumed.world - 1) // assumed.world
    return held + torch_dtype(workload).itemsize * more


def _as_on_gpus(problem: Any) -> WorkloadShard:
    """Layers with each norm in one kernel."""
    for module in problem.model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.forward = partial(_Norm.apply, module.weight)  # type: ignore[method-assign]
    return problem  # type: ignore[no-any-return]


class _Norm(torch.autograd.Function):
    """What RMSNorm's fused kernels keep and return."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight, x, _ = ctx.saved_tensors
        return weight.new_empty(weight.shape), x.new_empty(x.shape)
