"""Dry run of one rank: run a strategy's own code on shapes and record every block, hop and byte.

Strategies run unchanged on ``meta`` tensors, which have shapes and no values. The kernel computes nothing and the
communicator sends nothing (`fakes`); a recorder writes down everything else (`dispatch`). Strategies that read tensor
values are refused.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from ringprof.common.json_object import Params
from ringprof.dryrun.dispatch import ReadsTensorValues, RecordedKernels, RecordedStreams, Recorder
from ringprof.dryrun.fakes import DryRunNetwork, dry_run_communicator, recording_kernel
from ringprof.dryrun.schedule import Program
from ringprof.errors import UnsupportedWorkloadError
from ringprof.iteration.shard import WorkloadShard, counted_work, reset_counts
from ringprof.strategies.annotate import redirect_annotations
from ringprof.strategies.base import Context, Strategy
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.kernels.merge import FUSED
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.streams import SIDE_STREAMS
from ringprof.workload.workload import Workload

META = torch.device("meta")


def dry_run_rank(
    strategy_class: type[Strategy],
    params: Params,
    workload: Workload,
    rank_position: tuple[int, int, int],
    kernel: str,
    hops: str,
    *,
    prepare: Callable[[Strategy], None] | None = None,
) -> tuple[Program, Strategy]:
    """Return the program of one rank, and the strategy that ran, which ``prepare`` may change first.

    ``rank_position`` is the rank, the number of ranks and the number of ranks per host. Raises whatever the strategy
    raises: see `refuse_on_failure`.
    """
    recorder = Recorder()
    with recording(recorder):
        comm = dry_run_communicator(DryRunNetwork(recorder).connect, *rank_position, hops)
        strategy, fake_kernel = recording_strategy(strategy_class, params, recorder, comm, kernel)
        if prepare is not None:
            prepare(strategy)
        shard = WorkloadShard.create(strategy, workload, META)
        for _ in dry_run_iterations(shard, hops):
            recorder.start()
            reset_counts([strategy])
            fake_kernel.flops, fake_kernel.calls = 0, dict.fromkeys(fake_kernel.calls, 0)
            shard.run_iteration()
    # The recording kernel does not belong to the strategy, so its counts replace the strategy's.
    work = msgspec.structs.replace(
        counted_work([strategy]), block_flops=fake_kernel.flops, block_calls=dict(fake_kernel.calls)
    )
    return Program(
        rank=rank_position[0],
        ops=recorder.ops,
        work=work,
        peak_bytes=recorder.peak_bytes,
        peak_label=recorder.peak_label,
    ), strategy


def dry_run_iterations(shard: WorkloadShard, hops: str) -> range:
    """Return the iterations to run; the last one is like all later ones.

    Two are needed if the first one creates cached data: receive memory of copied hops, mask blocks, gradients of a
    step.
    """
    return range(2 if hops == "copy" or shard.attention_options or type(shard) is not WorkloadShard else 1)


def recording_strategy(
    strategy_class: type[Strategy],
    params: Params,
    recorder: Recorder,
    comm: Communicator,
    kernel: str,
    softcap: float | None = None,
) -> tuple[Any, Kernel]:
    """Return a strategy without devices, and the kernel that replaces ``kernel``."""
    strategy: Any = strategy_class(Context(comm, kernel), **params)
    deterministic = bool(params.get("deterministic"))
    fake_kernel = recording_kernel(KERNELS[kernel], recorder, deterministic=deterministic, softcap=softcap or 0.0)
    strategy.kernel_for = lambda q, **options: fake_kernel
    return strategy, fake_kernel


@contextmanager
def recording(recorder: Recorder, *, on_gpus: bool = True) -> Iterator[None]:
    """Record everything that runs inside the context.

    Where GPUs behave differently from ``meta`` tensors, GPU behaviour is recorded: fused merges and side streams. On a
    CPU, merges are also recorded as one kernel, because torch would load its compiler to infer their shapes.
    """
    kernels = RecordedKernels(recorder, fused=on_gpus)
    with recorder, redirect_annotations(recorder.annotated):
        FUSED["meta"] = lambda: kernels
        if on_gpus:
            SIDE_STREAMS["meta"] = lambda device, count: RecordedStreams(recorder, count)
        try:
            yield
        finally:
            FUSED.pop("meta", None)
            SIDE_STREAMS.pop("meta", None)


@contextmanager
def refuse_on_failure(strategy: str) -> Iterator[None]:
    """Turn the failure of a strategy on shapes into an `UnsupportedWorkloadError` of one line."""
    try:
        yield
    except ReadsTensorValues as error:
        raise UnsupportedWorkloadError(
            f"strategy {strategy!r} looks at values{_source_line(error)}: a dry run has only shapes"
        ) from None
    except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError, AttributeError) as error:
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent == Path(__file__).parent:
            # A bug of the dry run, not of the strategy.
            raise
        message = " ".join(str(error).split())[:200]
        raise UnsupportedWorkloadError(
            f"strategy {strategy!r} fails on shapes alone{_source_line(error)}: {type(error).__name__}: {message}"
        ) from None


def _source_line(error: BaseException) -> str:
    """Return the last source line outside torch and this package that the error came through."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and Path(frame.filename).parent != Path(__file__).parent
    ]  # fmt: skip
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
