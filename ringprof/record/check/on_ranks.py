"""The check as it runs on the ranks: each calls the attention with its own tokens and compares with dense attention.

Every call gets different random inputs, so that data left over from an earlier call shows as an error. All calls are
made, whatever the first one gives, and each is compared before the next. The last call runs under the profiler, which
records what the ranks send.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from ringprof.common.validation import refuse_below_one
from ringprof.errors import RingprofError, UsageError
from ringprof.record.check.completion_barrier import CompletionBarrier
from ringprof.record.check.dense import (
    MOST_TOKENS,
    SEED,
    References,
    Tensors,
    compare_results,
    draw_inputs,
    severity,
)
from ringprof.record.check.diagnose import WrongCall
from ringprof.record.check.result import TENSOR_FORMATS, Check, CheckRequest, Seen, SentInCall, TensorCheck
from ringprof.record.check.user_attention import AttentionResults, UserAttention, order_of_layout, order_of_positions
from ringprof.record.check.weights import read_weights
from ringprof.record.measure import profiler_is_busy
from ringprof.record.process_group import GroupRanks
from ringprof.record.progress import Reporter, SilentReporter
from ringprof.record.request import DTYPES, from_json
from ringprof.record.resolve import torch_dtype
from ringprof.run import Workload
from ringprof.strategies import Unsupported
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import choose_kernel


class _ShapeProblem(msgspec.Struct, frozen=True):
    """Description of an output of the wrong shape on one rank, for the other ranks; empty where the shape is right."""

    text: str


class _CallResult(msgspec.Struct, frozen=True):
    """Result of one call, the same on all ranks."""

    number: int
    errors: dict[str, TensorCheck]
    """Errors by tensor; empty where the output has another shape."""
    reasons: list[str]
    """Explanations of a wrong result, one sentence each."""

    @property
    def equal(self) -> bool:
        """Whether every tensor of the call equals dense attention."""
        return bool(self.errors) and all(error.equal for error in self.errors.values())

    def severity(self) -> float:
        """Return the largest error relative to its bound; infinity where the output has another shape."""
        return max(map(severity, self.errors.values()), default=math.inf)


def check_on_ranks(
    function: Callable[..., Any], request: CheckRequest, positions: Tensor | None = None, group: Any = None,
    reporter: Reporter | None = None,
) -> Check:  # fmt: skip
    """Check an attention function on the ranks of ``group`` (None: the world); all of them must call this.

    The result is the same on all ranks. Raises `UsageError`, and `RecordError` where a call fails or does not return
    on some rank.
    """
    ranks, reporter = GroupRanks(group), reporter or SilentReporter()
    _validate_request(request)
    barrier = CompletionBarrier(ranks, request.time_limit)
    if len(set(ranks.gather_structs(request))) > 1:
        raise UsageError("the ranks do not ask for the same check: the arguments must be alike on all")
    if positions is None:
        order = order_of_layout(request.layout, request.seq, ranks.size, ranks.device.type).to(ranks.device)
    else:
        order = order_of_positions(positions, ranks)
    workload = _workload(request, order.numel())
    attention = UserAttention(
        function, ranks, order, request.tensor_format, workload.mask().documents, requires_grad=workload.backward
    )
    calls, sent = list[_CallResult](), list[SentInCall]()
    for number in range(1, request.calls + 1):
        full = draw_inputs(workload, ranks.device, SEED + number)
        reporter.start(f"call {number} of {request.calls}", 1)
        sent_in_call = sent if number == request.calls else None
        results, shape_problem = _run_call(attention, full, workload, barrier, number, sent_in_call)
        reporter.start(f"after call {number} of {request.calls}", 1)
        barrier.wait_for_all(f"call {number} of the attention")
        explain, scale = all(call.equal for call in calls), request.softmax_scale
        calls.append(_compare_call(attention, full, workload, scale, results, shape_problem, number, explain=explain))
    reported = next((call for call in calls if not call.equal), None) or max(calls, key=_CallResult.severity)
    seen, reasons = None, reported.reasons
    if reported.errors:
        reporter.start("what queries see", 1)
        seen, reasons_from_weights = _check_visible_keys(attention, workload, request, barrier)
        reasons = reasons or ([] if seen and seen.right and reported.equal else reasons_from_weights)
    own_sent = sent[0] if sent else SentInCall(operations={}, size_bytes=-1)
    sent_by_rank = [from_json(part, SentInCall) for part in ranks.gather_structs(own_sent)]
    # The size is -1 where another profiler was running on a rank.
    known = all(rank.size_bytes != -1 for rank in sent_by_rank)
    return Check(
        equal=all(call.equal for call in calls) and (seen is None or seen.right), workload=workload, ranks=ranks.size,
        layout=request.layout, device=ranks.device.type, calls=len(calls), call=reported.number, errors=reported.errors,
        sent=sent_by_rank if known else None, seen=seen, reasons=reasons,
    )  # fmt: skip


def _check_visible_keys(
    attention: UserAttention, workload: Workload, request: CheckRequest, barrier: CompletionBarrier
) -> tuple[Seen | None, list[str]]:
    """Compare the keys that queries see with the mask, by extra forward calls. Collective.

    Returns None where the output differs from call to call, and the mistakes that the weights reveal.
    """
    forward_only = msgspec.structs.replace(workload, backward=False)
    numbers = itertools.count(request.calls + 1)

    def call(full: Tensors) -> AttentionResults:
        number = next(numbers)
        results, _ = _run_call(attention, full, forward_only, barrier, number, None)
        barrier.wait_for_all(f"call {number} of the attention")
        return results

    full = draw_inputs(workload, attention.ranks.device, SEED)
    return read_weights(call, attention, full, workload, request.softmax_scale)


def _validate_request(request: CheckRequest) -> None:
    """Raise `UsageError` for values that no check can have."""
    sizes = ("batch", "seq", "heads", "kv_heads", "head_dim", "calls", "window", "prefix")
    refuse_below_one({name: getattr(request, name) for name in sizes})
    if request.heads % (request.kv_heads or request.heads):
        raise UsageError(f"{request.heads} heads are not a multiple of {request.kv_heads} kv heads")
    if request.dtype not in DTYPES:
        raise UsageError(f"dtype {request.dtype!r} is not one of {', '.join(DTYPES)}")
    if request.tensor_format not in TENSOR_FORMATS:
        raise UsageError(f"tensor_format {request.tensor_format!r} is not one of {', '.join(TENSOR_FORMATS)}")
    if not request.time_limit > 0:
        raise UsageError(f"time_limit must be above 0 seconds, not {request.time_limit}")


def _workload(request: CheckRequest, seq: int) -> Workload:
    """Build the workload of a check over ``seq`` tokens. Raises `UsageError` where the request does not fit it."""
    if request.seq not in (None, seq):
        raise UsageError(f"seq {request.seq}: the ranks' positions are of {seq} tokens")
    if seq > MOST_TOKENS:
        raise UsageError(f"a check of {seq} tokens: at most {MOST_TOKENS}, since its reference is dense")
    try:
        return Workload(
            batch=request.batch, seq=seq, heads=request.heads, kv_heads=request.kv_heads or request.heads,
            head_dim=request.head_dim, causal=request.causal, dtype=request.dtype, backward=request.backward,
            documents=request.documents, window=request.window, prefix=request.prefix,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None


def _run_call(
    attention: UserAttention,
    full: Tensors,
    workload: Workload,
    barrier: CompletionBarrier,
    number: int,
    sent: list[SentInCall] | None,
) -> tuple[AttentionResults, str]:
    """Call the attention once; return its results, and a description of a wrong shape.

    Where ``sent`` is a list, the data that this rank sends is recorded and appended to it.
    """
    where = f"call {number} of the attention"
    try:
        if sent is None:
            results = attention.run(full, backward=workload.backward)
        else:
            with record_sent(sent):
                results = attention.run(full, backward=workload.backward)
        attention.ranks.finish()
    except RingprofError as error:
        barrier.report_failure(where, error)
        raise
    except Exception as error:
        raise barrier.report_failure(where, error) from error
    return results


def _compare_call(
    attention: UserAttention, full: Tensors, workload: Workload, scale: float | None, results: AttentionResults,
    shape_problem: str, number: int, *, explain: bool,
) -> _CallResult:  # fmt: skip
    """Compare one call's results with the references on all ranks, and explain a wrong result if asked. Collective."""
    gathered = attention.ranks.gather_structs(_ShapeProblem(shape_problem))
    shape_problems = [from_json(encoded, _ShapeProblem).text for encoded in gathered]
    if any(shape_problems):
        rank, text = next((rank, text) for rank, text in enumerate(shape_problems) if text)
        return _CallResult(number, {}, [f"on rank {rank} {text}"])
    try:
        requirements: Any = workload.mask().asks_of_kernels()
        kernel = choose_kernel("auto", full.q.device, full.q.dtype, workload.head_dim, **requirements)()
    except Unsupported:
        # With an exact kernel, only the rounding of the result is allowed for.
        kernel = ReferenceKernel()
    ranks, reference = attention.ranks, References.of(full, workload, kernel, attention.shard, scale)
    # It is unknown in which type a user's code sends its partial results: each hop may round, in the output, too.
    hops = ranks.size if ranks.size > 1 else 0
    errors, wrong_on_this_rank = compare_results(
        results, reference, attention.positions, torch_dtype(workload), lambda name: hops, ranks
    )
    call = _CallResult(number, errors, [])
    if call.equal or not explain:
        return call
    wrong_call = WrongCall(attention, full, workload, scale, results, reference, errors, wrong_on_this_rank)
    return msgspec.structs.replace(call, reasons=wrong_call.reasons())


_GLOO_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "short": 2}
_NCCL_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2}
_SEND_NOTHING = ("recv", "barrier")


@contextmanager
def record_sent(sent_in_calls: list[SentInCall]) -> Iterator[None]:
    """Append the data that this rank sends in the block; append nothing where another profiler is running.

    A process can have only one active profiler.
    """
    if profiler_is_busy():
        yield
        return
    # autograd's profiler, since torch.profiler imports the compiler, which takes seconds.
    device = "cuda" if torch.cuda.is_available() else None
    recording: Any = profile(use_device=device, record_shapes=True, use_kineto=True)
    with recording:
        yield
    sent_in_calls.append(_sent_in_events(recording.kineto_results.events()))


def _sent_in_events(events: list[Any]) -> SentInCall:
    """Count the sending operations in a profile, and add up their sizes."""
    operations: Counter[str] = Counter()
    sizes: list[int | None] = []
    for event in events:
        backend, _, operation = event.name().partition(":")
        if backend == "c10d":
            # Such as ``c10d::alltoall_base_``, under every backend.
            name = operation.strip(":_")
            operations[name] += not name.startswith(_SEND_NOTHING)
        elif backend == "gloo" and not operation.startswith(_SEND_NOTHING):
            tensors = [pair for pair in zip(event.shapes(), event.dtypes(), strict=False) if pair[0]]
            sizes.append(sum(int(math.prod(shape)) * _GLOO_BYTES.get(dtype, 1) for shape, dtype in tensors))
        elif backend == "record_param_comms":
            sizes.append(_nccl_bytes(event))
        elif backend.startswith("Memcpy PtoP"):
            # Copy-engine transfers bypass torch.distributed.
            operations["copies between GPUs"] += 1
            sizes.append(event.nbytes())
    known_sizes = [size for size in sizes if size is not None]
    return SentInCall(
        operations=dict(+operations), size_bytes=sum(known_sizes) if known_sizes or not +operations else None
    )


def _nccl_bytes(event: Any) -> int | None:
    """Return the size in bytes of the tensors passed to an NCCL operation; None for one that sends nothing."""
    metadata = event.extra_meta() if hasattr(event, "extra_meta") else {}
    if metadata.get("Collective name", "recv").strip('"').startswith(_SEND_NOTHING):
        return None
    return int(metadata.get("In msg nelems", 0)) * _NCCL_BYTES.get(metadata.get("dtype", "").strip('"'), 1)
