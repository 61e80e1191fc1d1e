"""The tape: a strategy's own code, run on shapes alone, writes down every block, hop and byte.

Strategies run unchanged on ``meta`` tensors, which have shapes and no values, over a kernel that computes nothing and a
communicator that sends nothing (`seams`), under a recorder of everything else (`recorder`). What looks at values cannot
be foreseen, and is refused.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from ringprof.errors import UnfitWorkloadError, UsageError
from ringprof.foresee.links import Cluster
from ringprof.foresee.older import make_older
from ringprof.foresee.program import Program, Tape
from ringprof.foresee.question import Question
from ringprof.foresee.recorder import LooksAtValues, RecordedKernels, RecordedStreams, Recorder
from ringprof.foresee.seams import RecordingCommunicator, recording_kernel
from ringprof.json_object import JsonObject, Params
from ringprof.record.measure import Problem, counted_work, reset_counts
from ringprof.record.resolve import fits, load_strategy, strategy_errors, typed_params
from ringprof.run import MOST_RANKS, Workload
from ringprof.strategies import find
from ringprof.strategies.annotate import heard_by
from ringprof.strategies.base import Context, Strategy
from ringprof.strategies.kernels import KERNELS
from ringprof.strategies.merge import FUSED
from ringprof.strategies.streams import SIDE_STREAMS

MOST_PACKED = 64
"""Ranks that documents are foreseen on: on more, fewer ranks stand for all, and these hold other documents."""
_MOST_ELEMENTS = 1 << 58
_LIKE = {"flash-attn-3": "flash-attn", "flash-attn-4": "flash-attn", "ffa": "flash-attn"}
"""Kernels of calibrations that others made, and which of ringprof's own takes and gives the like."""


def tape(
    strategy: str, workload: Workload, size: int, *, ranks_per_host: int | None = None, kernel: str = "cudnn",
    hops: str = "nccl", params: Params | None = None, ranks: Iterable[int] | None = None,
    older: bool = False,
) -> Tape:  # fmt: skip
    """The programs of ``ranks`` (all where None) of ``size``, of which ``ranks_per_host`` share a host.

    ``strategy`` is a bundled one's name or ``package.module:Class``; ``older`` is for `older.make_older`. Raises
    `UnknownStrategyError`, `UsageError` and `UnfitWorkloadError`; the last also where its course depends on values.
    """
    behaves = _LIKE.get(kernel, kernel)
    if behaves not in KERNELS:
        raise UsageError(f"no kernel {kernel!r}; there are: {', '.join(dict.fromkeys((*KERNELS, *_LIKE)))}")
    _refuse_unforeseen(workload)
    if workload.batch * workload.seq * workload.heads * workload.head_dim > _MOST_ELEMENTS:
        raise UnfitWorkloadError("a tensor of so many heads and tokens has more bytes than 64 bits count")
    per_host = ranks_per_host or size
    if size % per_host:
        raise UnfitWorkloadError(f"{per_host} ranks a host do not divide {size} ranks")
    kind = load_strategy(strategy)
    if kind.phase != "training":
        raise UnfitWorkloadError(f"strategy {strategy!r} is for {kind.phase}; training's attention alone is foreseen")
    given = kind.placed(size, per_host, **typed_params(kind, strategy, params or {}))
    with strategy_errors():
        reason = fits(kind, workload, size, given)
    if reason:
        raise UnfitWorkloadError(f"strategy {strategy!r} cannot run this: {reason}")
    programs, made = [], None
    for rank in range(size) if ranks is None else ranks:
        with _refusals(strategy), strategy_errors():
            program, made = _program(kind, given, workload, (rank, size, per_host), behaves, hops, older=older)
        programs.append(program)
    assert made is not None
    return Tape(
        target=find(strategy).target, params=dict(made.parameters), layout=made.layout.name, workload=workload,
        programs=programs,
    )  # fmt: skip


def _refuse_unforeseen(workload: Workload) -> None:
    if workload.kv_length is not None or workload.layer is not None or workload.sequences is not None:
        raise UnfitWorkloadError(
            "training's attention alone is foreseen: no prefill, decode, whole layers and changing sizes"
        )
    if workload.softcap:
        raise UnfitWorkloadError("a softcap cannot be foreseen: no kernel is calibrated with one")


def tape_of(question: Question, cluster: Cluster, ranks: Sequence[int] | None) -> Tape:
    """For `predict`: a question's programs on its own cluster, or on a smaller one that stands for it."""
    workload, params = shared(question, cluster)
    return tape(
        question.strategy, workload, cluster.size, ranks_per_host=cluster.gpus_per_host, kernel=question.kernel,
        hops=question.hops, params=params, ranks=ranks, older=question.older,
    )  # fmt: skip


def shared(question: Question, cluster: Cluster) -> tuple[Workload, Params]:
    """The problem and the parameters on the question's own cluster, or on a smaller one that stands for it.

    There every rank has the same share of the sequence, and the parameters that the whole cluster gave the strategy are
    kept, as far as they fit.
    """
    size, params, workload = question.cluster.size, dict(question.params), question.workload
    _refuse_unforeseen(workload)
    if size > MOST_RANKS:
        raise UnfitWorkloadError(f"{size} ranks cannot be foreseen: at most {MOST_RANKS}")
    if workload.seq < size:
        raise UnfitWorkloadError(f"{workload.seq} tokens on {size} ranks are less than one each")
    if cluster.size != size:
        if workload.documents is not None:
            raise UnfitWorkloadError(f"packed documents on {size} ranks cannot be foreseen: on {MOST_PACKED} at most")
        workload = msgspec.structs.replace(workload, seq=workload.seq // size * cluster.size)
        params = _fitting(question, workload, cluster)
    return workload, params


def _fitting(question: Question, workload: Workload, cluster: Cluster) -> JsonObject:
    """The whole cluster's parameters, without a number that follows from its size: a ring degree, a window of all.

    Raises `UnfitWorkloadError` where fewer ranks cannot have those, or would have rings and groups that lie otherwise
    over the hosts.
    """
    kind = load_strategy(question.strategy)
    typed = typed_params(kind, question.strategy, dict(question.params))
    made, spread = _arranged(question, question.cluster, typed)
    derived = (name for name, value in made.items() if type(value) is int and name not in typed)
    numbers = sorted(derived, key=lambda name: int(made[name]))
    # The largest number is the likeliest to follow from the number of ranks; what the user gave stays.
    without = [{key: value for key, value in made.items() if key != name} for name in reversed(numbers)]
    for params in (typed, made, *without):
        placed = kind.placed(cluster.size, cluster.gpus_per_host, **params)
        if fits(kind, workload, cluster.size, placed) is None and _arranged(question, cluster, placed)[1] == spread:
            return dict(params)
    given = ", ".join(f"{name}={value}" for name, value in made.items())
    raise UnfitWorkloadError(
        f"strategy {question.strategy!r}: {cluster.size} ranks cannot stand for {question.cluster.size} with {given}"
    )


def _arranged(question: Question, cluster: Cluster, params: JsonObject) -> tuple[JsonObject, dict[str, int]]:
    """The parameters that a strategy takes on a cluster, and how its channels lie over the hosts."""
    comm = RecordingCommunicator(Recorder(), 0, cluster.size, cluster.gpus_per_host, question.hops)
    with strategy_errors():
        made = load_strategy(question.strategy)(Context(comm, question.kernel), **params)
    return made.parameters, comm.spread


def _program(
    kind: type[Strategy],
    params: Params,
    workload: Workload,
    place: tuple[int, int, int],
    kernel: str,
    hops: str,
    *,
    older: bool,
) -> tuple[Program, Any]:
    """One rank's program, and the strategy that it was made with."""
    recorder = Recorder()
    comm = RecordingCommunicator(recorder, *place, hops)
    with recorder, heard_by(recorder.named), _recorded_by(recorder):
        strategy: Any = kind(Context(comm, kernel), **params)
        if older:
            make_older(strategy)
        problem = Problem.of(strategy, workload, torch.device("meta"))
        recording = recording_kernel(KERNELS[kernel], recorder, deterministic=bool(params.get("deterministic")))
        strategy.kernel_for = lambda q, **asks: recording
        # What is made once and kept, as the memory that copied hops arrive in, is there when iterations are timed.
        for _ in range(2 if hops == "copy" or problem.options else 1):
            recorder.start()
            reset_counts([strategy])
            recording.flops, recording.calls = 0, dict.fromkeys(recording.calls, 0)
            problem.iteration()
    # The recording kernel is none of the strategy's own.
    work = msgspec.structs.replace(
        counted_work([strategy]), block_flops=recording.flops, block_calls=dict(recording.calls)
    )
    return Program(
        rank=place[0], ops=recorder.ops, work=work, peak_bytes=recorder.peak_bytes, peak_label=recorder.peak_label
    ), strategy


@contextmanager
def _recorded_by(recorder: Recorder) -> Iterator[None]:
    """What GPUs do otherwise than ``meta`` tensors would: merges in one kernel, and streams beside the current one."""
    kernels = RecordedKernels(recorder)
    FUSED["meta"] = lambda: kernels
    SIDE_STREAMS["meta"] = lambda device, count: RecordedStreams(recorder, count)
    try:
        yield
    finally:
        del FUSED["meta"], SIDE_STREAMS["meta"]


@contextmanager
def _refusals(strategy: str) -> Iterator[None]:
    """Turn what a strategy does on shapes alone and cannot into one line."""
    try:
        yield
    except LooksAtValues as error:
        raise UnfitWorkloadError(
            f"strategy {strategy!r} looks at values{_where(error)}: from shapes alone its course cannot be foreseen"
        ) from None
    except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError, AttributeError) as error:
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent == Path(__file__).parent:
            # Not the strategy's fault, but ours.
            raise
        brief = " ".join(str(error).split())[:200]
        raise UnfitWorkloadError(
            f"strategy {strategy!r} fails on shapes alone{_where(error)}: {type(error).__name__}: {brief}"
        ) from None


def _where(error: BaseException) -> str:
    """The last line outside torch and this package that the error came through."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and Path(frame.filename).parent != Path(__file__).parent
    ]  # fmt: skip
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
