"""Peak memory of a rank of a recording, from a dry run of its own iterations."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ringprof.dryrun.dispatch import Recorder
from ringprof.dryrun.fakes import DryRunNetwork, dry_run_communicator
from ringprof.dryrun.recurrences import dry_run_recurrent_strategy
from ringprof.dryrun.run import META, dry_run_iterations, recording, recording_strategy, refuse_on_failure
from ringprof.errors import UnsupportedWorkloadError
from ringprof.iteration.baselines import baseline_bodies
from ringprof.iteration.request import RecordRequest
from ringprof.iteration.resolve import (
    load_recurrent_strategy,
    load_strategy,
    strategy_errors,
    torch_dtype,
    why_unsupported,
)
from ringprof.iteration.shard import DynamicCpShard, WorkloadShard
from ringprof.ranks.process_group import one_line
from ringprof.strategies.masks.expected import is_bundled
from ringprof.strategies.peers.call import PeerStrategy
from ringprof.strategies.transport.baselines import NullTransport
from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.ring_channel import Connect
from ringprof.workload.workload import Workload

MAX_ALL_RANKS, MAX_SAMPLED_RANKS = 8, 48
"""Number of ranks up to which each is run, and up to which a few of them are."""
_MIN_EXTRAPOLATION_RANKS = 8
"""Minimum step of ranks, in whole hosts, for the extrapolation to more ranks.

Five and six times as many ranks stand for more, because longer rings repeat the same steps.
"""
USER_STRATEGY_LIMIT_S = 10.0
"""Time limit of a user's own strategy; a bundled one takes less than a second."""
_CUBLAS_BYTES = 32 << 20
"""Workspace of matrix products (as in the check) and of cuDNN on Hopper, which torch's allocator counts."""


def peak_bytes(request: RecordRequest, workload: Workload, kernel: str, per_host: int) -> int:
    """Return the peak memory over the ranks of a resolved request, for ``workload`` in place of its own.

    ``kernel`` is the one that will run, ``per_host`` the ranks that share a host. A user's own strategy is run in a
    fork. Raises `UnsupportedWorkloadError` if a strategy cannot be dry-run.
    """
    strategy_class, setup = load_strategy(request.strategy), _Setup(request, kernel, per_host)
    work = partial(_peak_over_ranks, setup, workload)
    if is_bundled(strategy_class):
        return work()
    if strategy_class.__module__.startswith(PeerStrategy.__module__.rpartition(".")[0]):
        raise UnsupportedWorkloadError("other people's code computes and sends by itself")
    return _run_in_fork(work, USER_STRATEGY_LIMIT_S)


class _Setup(NamedTuple):
    """Request, kernel and ranks per host of the dry runs."""

    request: RecordRequest
    kernel: str
    per_host: int

    @property
    def world(self) -> int:
        return self.request.world or 1

    @property
    def hops(self) -> str:
        return "copy" if self.request.device == "cuda" and self.request.hops != "nccl" else "nccl"


def _peak_over_ranks(setup: _Setup, workload: Workload) -> int:
    """Return the peak memory over all ranks, extrapolated from fewer ranks if there are many."""
    world, per_host = setup.world, setup.per_host
    if world > MAX_SAMPLED_RANKS:
        if workload.documents is not None:
            raise UnsupportedWorkloadError(
                f"packed documents on {world} ranks: memory is estimated for at most {MAX_SAMPLED_RANKS}"
            )
        step = per_host * -(-_MIN_EXTRAPOLATION_RANKS // per_host) if per_host < world else _MIN_EXTRAPOLATION_RANKS
        with suppress(UnsupportedWorkloadError):
            low, high = (
                _largest_peak(setup, _on_fewer_ranks(setup, workload, size), size) for size in (5 * step, 6 * step)
            )
            return low + (high - low) * (world - 5 * step) // step
    return _largest_peak(setup, workload, world)


def _on_fewer_ranks(setup: _Setup, workload: Workload, size: int) -> Workload:
    """Return the workload with as many tokens per rank on ``size`` ranks.

    Raises `UnsupportedWorkloadError` if there is none.
    """
    seq, kv_length = workload.seq // setup.world * size, None
    if workload.kv_length is not None:
        kv_length = seq + (workload.kv_length - workload.seq) // setup.world * size
    fewer = msgspec.structs.replace(workload, seq=seq, kv_length=kv_length)
    with strategy_errors():
        strategy_class = load_strategy(setup.request.strategy)
        reason = why_unsupported(strategy_class, fewer, size, setup.request.params) if seq else "less than one token"
    if reason:
        raise UnsupportedWorkloadError(reason)
    return fewer


def _largest_peak(setup: _Setup, workload: Workload, world: int) -> int:
    """Return the bytes of the rank that holds most; of many ranks, the first, the last and the middle one are run."""
    ranks = (0, world // 2, world - 1) if world > MAX_ALL_RANKS else range(world)
    return max(_RankDryRun(setup, workload, rank, world).run() for rank in ranks) + _untracked_bytes(setup, workload)


class _RankDryRun:
    """Dry run of one rank of a recording; it creates strategies over parts of the ranks like
    `ringprof.strategies.Dynamic`."""

    def __init__(self, setup: _Setup, workload: Workload, rank: int, world: int) -> None:
        self._setup, self._workload, self._rank, self._world = setup, workload, rank, world
        self._recorder, self._strategies = Recorder(), dict[int, Any]()

    def run(self) -> int:
        """Return the bytes at the peak."""
        request = self._setup.request
        with refuse_on_failure(request.strategy), recording(self._recorder, on_gpus=request.device == "cuda"):
            shard = self._shard()
            for _ in dry_run_iterations(shard, self._setup.hops):
                self._recorder.start()
                shard.run_for_verification()
            if request.controls:
                ordinary, *others = baseline_bodies(shard, self._create(self._world, NullTransport))[0]
                for body in (*others, ordinary):
                    body()
        return self._recorder.peak_bytes

    def of(self, size: int) -> Any:
        """Return the strategy over this rank's part of ``size`` ranks."""
        if size not in self._strategies:
            self._strategies[size] = self._create(size)
        return self._strategies[size]

    @property
    def comm(self) -> Any:
        """Communicator of all ranks."""
        return self.of(self._world).comm

    def _create(self, size: int, connect: Connect | None = None) -> Any:
        request, kernel, _ = self._setup
        comm = self._communicator(size, connect)
        return recording_strategy(
            load_strategy(request.strategy), request.params, self._recorder, comm, kernel, self._workload.softcap
        )[0]

    def _communicator(self, size: int, connect: Connect | None = None) -> Communicator:
        ranks_per_host = min(self._setup.per_host, size)
        rank_position = self._rank % size, size, size if size % ranks_per_host else ranks_per_host
        connect = connect or DryRunNetwork(self._recorder).connect
        return dry_run_communicator(connect, *rank_position, self._setup.hops)

    def _shard(self) -> WorkloadShard:
        workload, world = self._workload, self._world
        if workload.sequences is not None:
            return DynamicCpShard.from_dynamic(
                self, workload, tuple(world // count for count in workload.sequences), META
            )
        if workload.layer is not None:
            # Imported late: it loads FSDP, which takes half a second.
            from ringprof.iteration.layer import LayersShard

            recurrent = None
            if workload.layer.recurrent_strategy:
                kind = load_recurrent_strategy(workload.layer.recurrent_strategy, "recurrences")
                recurrent = dry_run_recurrent_strategy(kind, self._recorder, self._communicator(world))
            shard = LayersShard.create(self.of(world), workload, META, recurrent=recurrent)
            return _with_fused_norms(shard)
        return WorkloadShard.create(self.of(world), workload, META)


def _untracked_bytes(setup: _Setup, workload: Workload) -> int:
    """Return memory that no operation of a strategy shows: cuBLAS workspaces (one per thread) and data-parallel
    buffers.

    DDP holds its gradient buckets. FSDP2 shards the parameters, but gathers one layer and the next.
    """
    layer, (request, kernel, _) = workload.layer, setup
    if request.device != "cuda":
        return 0
    matmul_workspaces = 1 + workload.backward if layer is not None or kernel == "reference" else 0
    workspace_bytes = (matmul_workspaces or int(request.verify or kernel == "cudnn")) * _CUBLAS_BYTES
    if layer is None:
        return workspace_bytes
    layer_parameters, all_parameters = max(map(workload.parameters, workload.pattern)), workload.all_parameters()
    extra_elements = (
        all_parameters
        if layer.parallel == "ddp"
        else 3 * layer_parameters - all_parameters * (setup.world - 1) // setup.world
    )
    return workspace_bytes + torch_dtype(workload).itemsize * extra_elements


def _with_fused_norms(shard: Any) -> WorkloadShard:
    """Return the layers with each norm fused into one kernel, as on GPUs."""
    for module in shard.model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.forward = partial(_FusedRMSNorm.apply, module.weight)  # type: ignore[method-assign]
    return shard  # type: ignore[no-any-return]


class _FusedRMSNorm(torch.autograd.Function):
    """Tensors that RMSNorm's fused kernels keep and return."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight, x, _ = ctx.saved_tensors
        return weight.new_empty(weight.shape), x.new_empty(x.shape)


def _run_in_fork(work: Callable[[], int], limit_s: float) -> int:
    """Run user code, which has ``limit_s`` seconds, in a fork of this process, and return its result.

    It prints nothing, and what it changes, starts or begins on a GPU ends with it. Raises `UnsupportedWorkloadError`
    with the reason if it raises, exceeds the limit or ends the process.
    """
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_and_send, args=(work, sender, limit_s), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 and later warn about threads, which the fork does not need.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    group = child.pid
    assert group is not None
    try:
        if not receiver.poll(limit_s):
            raise UnsupportedWorkloadError(f"it does not end within {limit_s:.0f} s on shapes alone")
        result, reason = receiver.recv()
    except EOFError:
        raise UnsupportedWorkloadError("it ends the process on shapes alone") from None
    finally:
        child.kill()
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        child.join()
        receiver.close()
    if reason:
        raise UnsupportedWorkloadError(reason)
    return int(result)


def _run_and_send(work: Callable[[], int], sender: Any, limit_s: float) -> None:
    """Run ``work`` and send its result or the reason of its failure."""
    os.setsid()
    # Limit the time even if the waiting process is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s + 1)
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)
    # In a notebook, Python's streams do not write to the file descriptors.
    sys.stdout = sys.stderr = os.fdopen(null_fd, "w")
    # Torch's compute threads do not exist in the fork.
    torch.set_num_threads(1)
    try:
        sender.send((work(), ""))
    except UnsupportedWorkloadError as error:
        reason = str(error)[:500]
        if "autograd's threading" in str(error):
            reason = "this process has computed gradients on devices, and torch computes none in a fork of it then"
        sender.send((0, reason))
    except Exception as error:  # user code may raise anything
        sender.send((0, one_line(error)))
