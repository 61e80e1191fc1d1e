"""One rank's tape: a strategy's own code, run on shapes alone, writes down every block, hop and byte.

Strategies run unchanged on ``meta`` tensors, which have shapes and no values, over a kernel that computes nothing and a
communicator that sends nothing (`seams`), under a recorder of everything else (`recorder`). What looks at values cannot
be foreseen, and is refused.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from ringprof.errors import UnsupportedWorkloadError
from ringprof.json_object import Params
from ringprof.record.dryrun.dispatch import LooksAtValues, RecordedKernels, RecordedStreams, Recorder
from ringprof.record.dryrun.fakes import RecordingCommunicator, recording_kernel
from ringprof.record.dryrun.schedule import Program
from ringprof.record.measure import WorkloadShard, counted_work, reset_counts
from ringprof.run import Workload
from ringprof.strategies.annotate import redirect_annotations
from ringprof.strategies.base import Context, Strategy
from ringprof.strategies.kernels.builtin import KERNELS
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.kernels.merge import FUSED
from ringprof.strategies.transport.streams import SIDE_STREAMS

META = torch.device("meta")


def dry_run_rank(
    kind: type[Strategy],
    params: Params,
    workload: Workload,
    place: tuple[int, int, int],
    kernel: str,
    hops: str,
    *,
    prepare: Callable[[Strategy], None] | None = None,
) -> tuple[Program, Strategy]:
    """The program of one rank, and the strategy that it was made with, which ``prepare`` may change before it runs.

    ``place``: the rank, the number of ranks, and how many share a host. Raises whatever the strategy does: see
    `refusals`.
    """
    recorder = Recorder()
    with recording(recorder):
        strategy, blocks = recorded(kind, params, RecordingCommunicator(recorder, *place, hops), kernel)
        if prepare is not None:
            prepare(strategy)
        problem = WorkloadShard.create(strategy, workload, META)
        for _ in iterations(problem, hops):
            recorder.start()
            reset_counts([strategy])
            blocks.flops, blocks.calls = 0, dict.fromkeys(blocks.calls, 0)
            problem.run_iteration()
    # The recording kernel is none of the strategy's own.
    work = msgspec.structs.replace(counted_work([strategy]), block_flops=blocks.flops, block_calls=dict(blocks.calls))
    return Program(
        rank=place[0], ops=recorder.ops, work=work, peak_bytes=recorder.peak_bytes, peak_label=recorder.peak_label
    ), strategy


def iterations(problem: WorkloadShard, hops: str) -> range:
    """Those to run, of which the last is like all that follow.

    What is made once and kept is there from the second on: the memory that copied hops arrive in, how a mask is cut, a
    step's gradients.
    """
    return range(2 if hops == "copy" or problem.attention_options or type(problem) is not WorkloadShard else 1)


def recorded(
    kind: type[Strategy], params: Params, comm: RecordingCommunicator, kernel: str, softcap: float | None = None
) -> tuple[Any, Kernel]:
    """A strategy that is not given devices, and the kernel that stands for the one called ``kernel``."""
    strategy: Any = kind(Context(comm, kernel), **params)
    deterministic = bool(params.get("deterministic"))
    blocks = recording_kernel(KERNELS[kernel], comm.recorder, deterministic=deterministic, softcap=softcap or 0.0)
    strategy.kernel_for = lambda q, **asks: blocks
    return strategy, blocks


@contextmanager
def recording(recorder: Recorder, *, on_gpus: bool = True) -> Iterator[None]:
    """Write down what is run inside.

    What GPUs do otherwise than ``meta`` tensors would is done their way: merges in one kernel, and streams beside the
    current one. On a CPU merges are taken for one, too: torch would load its compiler to say what shapes they have.
    """
    kernels = RecordedKernels(recorder, fused=on_gpus)
    with recorder, redirect_annotations(recorder.named):
        FUSED["meta"] = lambda: kernels
        if on_gpus:
            SIDE_STREAMS["meta"] = lambda device, count: RecordedStreams(recorder, count)
        try:
            yield
        finally:
            FUSED.pop("meta", None)
            SIDE_STREAMS.pop("meta", None)


@contextmanager
def refusals(strategy: str) -> Iterator[None]:
    """Turn what a strategy does on shapes alone and cannot into one line."""
    try:
        yield
    except LooksAtValues as error:
        raise UnsupportedWorkloadError(
            f"strategy {strategy!r} looks at values{_where(error)}: from shapes alone its course cannot be foreseen"
        ) from None
    except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError, AttributeError) as error:
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent == Path(__file__).parent:
            # Not the strategy's fault, but ours.
            raise
        brief = " ".join(str(error).split())[:200]
        raise UnsupportedWorkloadError(
            f"strategy {strategy!r} fails on shapes alone{_where(error)}: {type(error).__name__}: {brief}"
        ) from None


def _where(error: BaseException) -> str:
    """The last line outside torch and this package that the error came through."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and Path(frame.filename).parent != Path(__file__).parent
    ]  # fmt: skip
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
