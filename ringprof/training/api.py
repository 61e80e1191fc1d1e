"""Functions that a user's own program calls on its ranks: `capture` profiles a block, `check` checks an attention.

`monitor` samples the steps of a training loop over time: exposed communication and stragglers.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.common.formatting import percent
from ringprof.common.json_object import JsonObject
from ringprof.common.validation import refuse_below_one
from ringprof.errors import RingprofError, UsageError, require_packages
from ringprof.proof.result import CALLS, TIME_LIMIT_S, Check, CheckRequest, ModelCheck
from ringprof.scale.pipeline import attribute
from ringprof.strategies.catalog import LAYOUT_ALIASES
from ringprof.trace.kineto import read_trace
from ringprof.trace.reduced import parse_reduced, reduce_trace
from ringprof.training.appended_log import AppendedLog
from ringprof.training.sinks import Sink
from ringprof.training.sinks import tensorboard as tensorboard_sink
from ringprof.workload.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ringprof.strategies.base import Strategy
    from ringprof.training.monitor import Monitor
    from ringprof.training.prover import Prover

_log = logging.getLogger("ringprof.monitor")


def capture(
    folder: str | os.PathLike[str],
    workload: Workload | None = None,
    *,
    name: str | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    strategy: Strategy | Sequence[Strategy] | None = None,
    model: torch.nn.Module | None = None,
    record_shapes: bool = False,
    strict: bool = False,
) -> AbstractContextManager[None]:
    """Profile a block of your own program on every rank that runs it; see `ringprof.training.capture.capture`.

    Every rank also writes a reduced form of its trace, which makes reports of many ranks fast. Raises
    `MissingExtraError` without torch.
    """
    require_packages("torch")
    from ringprof.training.capture import capture as profile  # here, because it imports torch

    return profile(
        folder, workload, name=name, group=group, strategy=strategy, model=model, record_shapes=record_shapes,
        strict=strict,
    )  # fmt: skip


def check(
    attention: Callable[..., Any],
    layout: str | torch.Tensor | Sequence[int],
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    batch: int | None = None,
    seq: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: str | torch.dtype = "bf16",
    causal: bool = True,
    documents: Sequence[int] | None = None,
    window_size: int | None = None,
    prefix: int | None = None,
    softmax_scale: float | None = None,
    backward: bool = True,
    tensor_format: str = "bshd",
    calls: int = CALLS,
    extra_calls: bool = True,
    time_limit: float = TIME_LIMIT_S,
) -> Check:
    """Check whether an attention over several ranks equals dense attention over the whole sequence.

    All ranks of ``group`` (a process group or a DeviceMesh of one dimension; None: the world) call this with the same
    arguments, for example in a program started by torchrun. All get the same answer. ``check.equal`` is the verdict.
    ``print(check)`` shows the error of each tensor, the first wrong rank and token, the bytes sent, and what a wrong
    result equals instead.

    ``attention(q, k, v)`` receives this rank's tokens: q of shape (B, S/N, H, D), k and v of shape (B, S/N, Hkv, D)
    with ``tensor_format`` ``bshd``; ``bhsd`` and ``sbhd`` are the other orders of these dimensions. It returns the
    output in the shape of q, alone or first in a tuple, and must be differentiable unless ``backward`` is False. It
    must itself apply the mask and ``softmax_scale`` (None: 1/√D).

    ``documents`` are the lengths of the packed documents, none of which may attend to another. If the function has an
    argument ``cu_seqlens`` or ``documents``, it receives their cumulative lengths (int32, from 0). ``window_size`` is
    the number of keys that a token attends to, its own included. With ``prefix``, it also attends to the first
    ``prefix`` tokens of its document; without a window and without ``causal`` this is the mask of a prefix LM.

    ``layout`` says which tokens a rank holds: ``contiguous``, ``zigzag``, ``stripe`` (or ``striped``), or this rank's
    positions in the sequence in local order (as for RoPE). ``seq`` is the length over all ranks; the default is 64
    tokens per rank on CPU and 256 on GPU, at most 8192 in total. ``dtype`` is ``bf16``, ``fp16`` or ``fp32``; fp32 has
    the tightest tolerance. By default there are 2 batch entries and 8 heads with 2 kv heads; where ``heads`` is given,
    ``kv_heads`` is the same number by default.

    Each of the ``calls`` has new random inputs, and all are compared. With ``extra_calls`` two more follow: one with
    queries that make scores large (root mean square 32), and one in fp32, which the attention may refuse on all ranks:
    ``check.skipped`` then has its reason.

    Raises `UsageError` for unsupported arguments and `MissingExtraError` without torch. Raises `RecordError`, on every
    rank that can still act, if a call fails on some rank or returns more than ``time_limit`` seconds after the others.
    """
    require_packages("torch")
    from torch import as_tensor  # here, because it takes seconds

    from ringprof.proof.on_ranks import check_on_ranks

    named, dtypes = (
        isinstance(layout, str),
        {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"},
    )
    request = CheckRequest(
        layout=LAYOUT_ALIASES.get(str(layout), str(layout)) if named else "positions",
        batch=batch, seq=seq, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, dtype=dtypes.get(str(dtype), str(dtype)), causal=causal, softmax_scale=softmax_scale,
        backward=backward, documents=None if documents is None else tuple(map(int, documents)), window=window_size,
        prefix=prefix, tensor_format=tensor_format, calls=calls, extra_calls=extra_calls,
        time_limit=time_limit,
    )  # fmt: skip
    return check_on_ranks(attention, request, None if named else as_tensor(layout), group)


def check_model(
    parallel: Callable[..., Any],
    reference: Callable[..., Any],
    batch: Any,
    *,
    shard: Callable[[Any], Any] | None = None,
    positions: torch.Tensor | Sequence[int] | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    time_limit: float = TIME_LIMIT_S,
) -> ModelCheck:
    """Check whether a training step over several ranks equals the step of one process with the same weights and batch.

    All ranks of ``group`` (None: the world) call this with the same ``batch``, which holds all tokens, and get the same
    answer. ``check.equal`` is the verdict: every token's logits, the loss, every parameter's gradient. ``print(check)``
    shows their errors, the first module whose output differs, and causes that a measurement decides: local positions,
    a mask that is dropped, labels shifted across shard borders, scaled gradients, context parallelism silently off.

    ``parallel(batch)`` runs one training step of this rank without the optimizer: it takes the rank's tokens, calls the
    model once, computes the loss, and reduces the gradients. It returns the loss or an object with ``loss``; the
    backward pass may be left to this function. With ``shard``, ``parallel`` is called as ``parallel(**shard(batch))``,
    so that it may be the model itself. ``reference(batch)``, or a module called as ``reference(**batch)``, is the same
    step on one process; every rank runs it. Neither may be random: switch dropout off.

    ``positions`` are those of this rank's tokens in the sequence, in local order; None: they are found from the values
    of ``input_ids``, or else of the first tensor (rows, tokens) that the model is called with. The model's calls are
    seen by module hooks.

    Raises `UsageError` for steps that cannot be compared and `MissingExtraError` without torch. Raises `RecordError`
    on every rank that can still act, if a step fails on some rank or returns ``time_limit`` seconds after the others.
    """
    require_packages("torch")
    from ringprof.proof.model import check_model_on_ranks  # here, because it imports torch

    return check_model_on_ranks(
        parallel, reference, batch, shard=shard, positions=positions, group=group, time_limit=time_limit
    )


@contextmanager
def monitor(
    log: str | os.PathLike[str] | None = None,
    *,
    every: int = 200,
    group: ProcessGroup | DeviceMesh | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    sinks: Sequence[Sink] = (),
) -> Iterator[Monitor]:
    """Profile one step of the loop in the block every ``every`` steps, and report the cost of its communication.

    Every rank of ``group`` (None: the world, or this process alone) enters the block. A step is a step of the first
    optimizer that takes one; in other loops, call ``step()`` of the yielded monitor. After ``every`` steps, one step
    warms the profiler up and the next is profiled: one sample. Each rank reduces its own trace, the first rank analyses
    all of them, and no trace is kept. Overhead is capped at 1 %: the interval grows with the cost on the slowest rank.

    For every sample, the first rank appends a line of JSON to ``log``: ``step``, ``time``, ``ranks``, ``step_ms``
    (without the profiler), ``wall_ms`` (slowest rank), ``exposed_comm_share`` (``mean``, ``worst``, ``rank``),
    ``wait_ms`` and ``wire_ms`` (mean over ranks; null if unknown), ``waited_for`` (by rank, the ms that others waited
    for it), ``straggler`` (the rank waited for most), ``looks`` (consecutive samples with this straggler) and
    ``interval`` (steps). The logger ``ringprof.monitor`` writes a sentence per sample. Each of the ``sinks`` is called
    with the figures by name and the step; `ringprof.training.sinks` has those for Weights & Biases, MLflow,
    TensorBoard, Prometheus and OpenTelemetry. ``tensorboard``, a folder, stands for ``sinks.tensorboard(folder)``.

    No sample is taken while a rank uses its own torch.profiler, or has one scheduled: a process can have only one.

    A sink that fails is logged and ends nothing.

    Raises `MissingExtraError` without torch or, with ``tensorboard``, without TensorBoard. Raises `UsageError` on a
    rank outside ``group``, for ``every`` below 1, and on the first rank if ``log`` cannot be written.
    """
    require_packages("torch")
    refuse_below_one({"every": every})
    from ringprof.ranks.process_group import GroupRanks
    from ringprof.training.monitor import Monitor

    ranks = GroupRanks(group)
    samples = SampleLog(None)
    if ranks.rank == 0:
        samples = SampleLog(log, [*sinks, *([] if tensorboard is None else [tensorboard_sink(tensorboard)])])
    running = Monitor(every, ranks, reduced_or_empty, samples.add)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def prove(
    attention: Any,
    layout: str | torch.Tensor | Sequence[int] = "contiguous",
    *,
    every: int = 1000,
    log: str | os.PathLike[str] | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    causal: bool = True,
    window_size: int | None = None,
    softmax_scale: float | None = None,
    memory_bytes: int = 1 << 30,
) -> Iterator[Prover]:
    """Prove at intervals, in a running training loop, that an attention over several ranks equals dense attention.

    Every rank enters the block. ``attention`` is a strategy; a module that calls strategies in its forward pass, such
    as a transformers model; or any function of q, k and v, which the loop then calls through the yielded object. For a
    function, ``layout``, ``causal``, ``window_size`` and ``softmax_scale`` say what it computes, as for `check`, and
    ``group`` is its context-parallel group. A strategy's calls and group say all that by themselves.

    A step is a step of the first optimizer that takes one; in other loops, call ``step()`` of the yielded object. The
    first proof waits until its cost, estimated from the shapes, is 1 % of the time so far; then one is made every
    ``every`` steps. It takes q, k, v and the output's gradient of one call of a real batch, for one sequence and one kv
    head with its query heads; these take turns. Output and gradients are compared with dense attention over gathered
    keys, with about ``memory_bytes`` of scores at a time. Recorded, too, are bytes sent, the softmax weight on other
    ranks' keys, whether the ranks' positions (and the model's ``position_ids``) partition the sequence, and whether all
    ranks sharded the same batch. Overhead is capped at 1 %: the interval grows with the cost of the last proof on the
    slowest rank.

    The first rank of the group appends a line of JSON per proof to ``log``, with the SHA-256 of itself and of the line
    before it. The logger ``ringprof.prove`` writes a sentence per proof, as a warning where something is wrong; what
    was not seen, such as the ``position_ids`` of a function, is named. A proof that fails on a rank is such a warning,
    too: it never ends the loop, and no rank waits for another. A block without a proof ends with a warning that says
    why.

    Raises `MissingExtraError` without torch and `UsageError` for arguments that no proof can have.
    """
    require_packages("torch")
    refuse_below_one({"every": every, "window_size": window_size, "memory_bytes": memory_bytes})
    from torch import as_tensor  # here, because it takes seconds

    from ringprof.ranks.process_group import GroupRanks
    from ringprof.strategies.masks.layouts import LAYOUTS
    from ringprof.training.prover import Prover

    if not callable(attention) and not hasattr(attention, "attention"):
        raise UsageError(f"{type(attention).__name__} is neither a strategy nor a module nor a function")
    if isinstance(layout, str) and layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if log is not None and GroupRanks(None).rank == 0:
        refuse_unwritable(log)
    window = (-1, -1) if window_size is None else (window_size - 1, 0 if causal else window_size - 1)
    stated = {"causal": causal, "window_size": window, "prefix": 0, "softmax_scale": softmax_scale}
    positions = layout if isinstance(layout, str) else as_tensor(layout)
    running = Prover(attention, every, group, positions, stated, memory_bytes, log)
    try:
        yield running
    finally:
        running.close()


def refuse_unwritable(log: str | os.PathLike[str]) -> None:
    """Raise `UsageError` where a log cannot be written."""
    if Path(log).is_dir() or not os.access(Path(log).absolute().parent, os.W_OK):
        raise UsageError(f"{os.fspath(log)}: cannot write samples here: name a file in an existing folder")


def reduced_or_empty(path: Path) -> bytes:
    """Return the reduced form of a trace; empty if it cannot be read."""
    try:
        return reduce_trace(read_trace(path))
    except RingprofError:
        return b""


class SampleLog:
    """Log of samples on the first rank: JSON lines, log messages, and sinks."""

    def __init__(self, log: str | os.PathLike[str] | None, sinks: Sequence[Sink] = ()) -> None:
        self._file, self._sinks = AppendedLog(log), sinks
        if log is not None:
            refuse_unwritable(log)
        self._straggler: int | None = None
        self._in_a_row = 0

    def add(self, step: int, traces: list[bytes], cost: dict[str, float]) -> None:
        """Write one sample from every rank's reduced trace (empty if a rank has none) and the cost of sampling."""
        readable = [parse_reduced(data) for data in traces if data]
        if not readable:
            _log.warning("step %d: no rank has a trace that can be read, or they are too large together", step)
            return
        line: JsonObject = {"step": step, "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
        line |= sample_figures(attribute(readable)) | cost
        self._in_a_row = self._in_a_row + 1 if line["straggler"] == self._straggler else 1
        self._straggler = line["straggler"]
        line["looks"] = self._in_a_row
        self._file.add(line)
        _log.info("%s", _sentence(line))
        figures = _numbers(line)
        for sink in self._sinks:
            try:
                sink(figures, step)
            except Exception as error:  # one sink must neither end the training nor keep figures from the others
                _log.warning("step %d: the sink %s failed: %s", step, getattr(sink, "__name__", sink), error)


def sample_figures(attribution: Attribution) -> JsonObject:
    """Compute the figures of one sample: wall time, exposed communication, wait, wire and straggler."""
    summary, ranks = findings_in_memory(attribution).summary, attribution.ranks
    waited = waited_for(attribution)
    rows = [row for rank in ranks for row in rank.link_totals]
    all_timed = bool(rows) and all(row.timed == row.kernels for row in rows)
    wait, wire = (sum(getattr(row, name) for row in rows) / len(ranks) / 1e6 for name in ("wait_ns", "wire_ns"))
    return {
        "ranks": len(ranks),
        "wall_ms": summary.slowest_wall_ns / 1e6,
        "exposed_comm_share": {
            "mean": summary.exposed_mean, "worst": summary.exposed_worst, "rank": summary.exposed_worst_rank
        },
        "wait_ms": wait if all_timed else None,
        "wire_ms": wire if all_timed else None,
        "waited_for": {str(rank): time / 1e6 for rank, time in waited.most_common()},
        "straggler": waited.most_common(1)[0][0] if waited else None,
    }  # fmt: skip


def waited_for(attribution: Attribution) -> Counter[int]:
    """Sum, by rank, the nanoseconds that transfers of other ranks waited for it as their last partner to start."""
    waited: Counter[int] = Counter()
    for rank in attribution.ranks:
        waited.update(rank.exposed.waited_for)
    return waited


def _sentence(line: JsonObject) -> str:
    """Describe one sample in one line."""
    share = line["exposed_comm_share"]
    text = f"step {line['step']}: {percent(share['mean'])} exposed communication (rank {share['rank']}: "
    text += f"{percent(share['worst'])}), {line['step_ms']:,.1f} ms per step"
    if line["straggler"] is not None:
        times = f", for {line['looks']} samples" if line["looks"] > 1 else ""
        text += f"; most waited for: rank {line['straggler']}{times}"
    return text


def _numbers(line: JsonObject) -> dict[str, float]:
    """Return the figures of one sample that are known numbers, by the names that sinks show."""
    share, straggler = line["exposed_comm_share"], line["straggler"]
    figures = {name: line[name] for name in ("step_ms", "wall_ms", "wait_ms", "wire_ms")}
    figures |= {"exposed_comm_share": share["mean"], "exposed_comm_share_worst": share["worst"], "straggler": straggler}
    figures["straggler_ms"] = None if straggler is None else line["waited_for"][str(straggler)]
    return {name: float(value) for name, value in figures.items() if value is not None}
