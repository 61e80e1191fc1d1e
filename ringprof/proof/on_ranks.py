"""The check as it runs on the ranks: each calls the attention with its own tokens and compares with dense attention.

Every call gets different random inputs, so that data left over from an earlier call shows as an error. All calls are
made, whatever the first one gives, and each is compared before the next. In the second, passes of another call are made
between the forward and the backward pass; in the last of them the output's gradient is not contiguous, and the profiler
records what the ranks send. Two further calls have large scores, and inputs in fp32.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from ringprof.common.validation import refuse_below_one
from ringprof.errors import RecordError, RingprofError, UsageError
from ringprof.iteration.request import DTYPES
from ringprof.iteration.resolve import torch_dtype
from ringprof.iteration.shard import profiler_is_busy
from ringprof.proof.completion_barrier import CompletionBarrier
from ringprof.proof.dense import (
    MOST_TOKENS,
    SEED,
    Tensors,
    compare_results,
    draw_inputs,
    gather_numbers,
    reference_shares,
    relative_rms,
    severity,
)
from ringprof.proof.diagnose import WrongCall
from ringprof.proof.result import (
    BATCH,
    HEADS,
    KV_HEADS,
    TENSOR_FORMATS,
    Check,
    CheckRequest,
    Seen,
    SentInCall,
    TensorCheck,
)
from ringprof.proof.user_attention import AttentionResults, UserAttention, order_of_layout, order_of_positions
from ringprof.proof.weights import read_weights
from ringprof.ranks.process_group import GroupRanks
from ringprof.ranks.progress import Reporter, SilentReporter
from ringprof.ranks.rank_errors import error_line
from ringprof.strategies import Unsupported
from ringprof.strategies.kernels.proof import Case, blocks_of, choose_proven
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import choose_kernel
from ringprof.workload.workload import Workload

SCORE_RMS = 32.0
"""Root mean square of large scores: exp() of the largest among thousands overflows in float32."""
TF32_RMS = 4e-4
"""Relative error of products in TF32, in which GPUs may compute for float32 inputs."""


class _PlannedCall(msgspec.Struct, frozen=True):
    """One call to make."""

    number: int
    """Number of the call, counted from 1, which its inputs depend on."""
    workload: Workload
    variant: str = ""
    """How the call differs from the first one; empty where it does not."""
    between: bool = False
    """Whether passes with other inputs are made between the forward and the backward pass."""
    strided_dout: bool = False
    """Whether the output's gradient is not contiguous in memory."""
    extra: bool = False
    """Whether the call has large scores or another type."""
    optional: bool = False
    """Whether the attention may refuse the call."""
    q_factor: float = 1.0
    """Factor by which the queries are larger."""
    explained_rms: float = 0.0
    """Relative error that rounding explains in addition to a kernel's own."""

    def draw(self, device: torch.device) -> Tensors:
        """Draw the full inputs of the call, the same on every rank."""
        full = draw_inputs(self.workload, device, SEED + self.number)
        return replace(full, q=full.q * self.q_factor)

    def draw_between(self, device: torch.device) -> Tensors | None:
        """Draw the inputs of the passes that are made between those of the call; None where there are none."""
        return draw_inputs(self.workload, device, SEED - self.number) if self.between else None


class _CallResult(msgspec.Struct, frozen=True):
    """Result of one call, the same on all ranks."""

    call: _PlannedCall
    errors: dict[str, TensorCheck]
    """Errors by tensor; empty where the output has another shape."""
    reasons: list[str]
    """Explanations of a wrong result, one sentence each."""
    lost_digits: list[str] = []
    """Sentences about results that have lost digits, if nothing else explains them."""

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
    calls = _Calls(attention, request, barrier, reporter, _planned_calls(request, workload, ranks.device.type))
    for call in calls.planned:
        if not call.optional:
            calls.make_and_compare(call)
    seen, reasons_from_weights = None, list[str]()
    if all(result.errors for result in calls.results):
        reporter.start("what queries see", 1)
        seen, reasons_from_weights = calls.check_visible_keys(workload)
    # An attention that refuses a type may leave sends unfinished: no call follows.
    skipped = [calls.make_and_compare(call) for call in calls.planned if call.optional]
    wrong = [result for result in calls.results if not result.equal]
    if not wrong and seen and seen.right:
        reasons_from_weights = []
    explained = [] if reasons_from_weights else [result for result in wrong if result.reasons or result.lost_digits]
    reported = [*explained, *wrong, max(calls.results, key=_CallResult.severity)][0]
    reasons = reported.reasons
    if reported.errors and reasons_from_weights:
        # A wrong forward pass explains gradients, and large scores, too.
        if not reasons or reported.call.extra or reported.errors["out"].equal:
            reasons = reasons_from_weights
    if not seen or seen.right:
        reasons = reasons or reported.lost_digits
    # What queries see is unknown and has a reason where the output differs from call to call.
    weights_right = seen.right if seen else not reasons_from_weights
    return Check(
        equal=all(result.equal for result in calls.results) and weights_right, workload=workload, ranks=ranks.size,
        layout=request.layout, device=ranks.device.type, calls=len(calls.results),
        call=reported.call.number, variant=reported.call.variant, errors=reported.errors,
        sent=gather_sent(calls.sent, ranks), seen=seen, reasons=reasons,
        skipped=[reason for reason in skipped if reason],
    )  # fmt: skip


def _validate_request(request: CheckRequest) -> None:
    """Raise `UsageError` for values that no check can have."""
    sizes = ("batch", "seq", "heads", "kv_heads", "head_dim", "calls", "window", "prefix")
    refuse_below_one({name: getattr(request, name) for name in sizes})
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
    heads, kv_heads = request.heads or HEADS, request.kv_heads or request.heads or KV_HEADS
    if heads % kv_heads:
        raise UsageError(f"{heads} heads are not a multiple of {kv_heads} kv heads")
    try:
        return Workload(
            batch=request.batch or BATCH, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=request.head_dim,
            causal=request.causal, dtype=request.dtype, backward=request.backward, documents=request.documents,
            window=request.window, prefix=request.prefix,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None


def _planned_calls(request: CheckRequest, workload: Workload, device_type: str) -> list[_PlannedCall]:
    """Return the calls to make, in order; the last may be one in fp32, which the attention may refuse."""
    planned = [_PlannedCall(number, workload) for number in range(1, request.calls + 1)]
    if workload.backward and request.calls > 1:
        planned[1] = _PlannedCall(2, workload, "another call between its passes", between=True)
    if workload.backward and request.calls > 2:
        planned[-1] = _PlannedCall(request.calls, workload, "strided dout", strided_dout=True)
    if not request.extra_calls:
        return planned
    scale = workload.head_dim**-0.5 if request.softmax_scale is None else request.softmax_scale
    # A power of two, so that the queries keep their digits.
    q_factor = 2.0 ** math.ceil(math.log2(SCORE_RMS / (abs(scale) * workload.head_dim**0.5)))
    # Some attentions round scores to the input's type before the softmax; in fp32, the roundings of sums add up.
    unit = torch.finfo(torch_dtype(workload)).eps / 2
    score_error = SCORE_RMS * unit * (16 if workload.dtype == "fp32" else 3**-0.5)
    variant = f"queries times {q_factor:g}"
    planned.append(
        _PlannedCall(len(planned) + 1, workload, variant, q_factor=q_factor, explained_rms=score_error, extra=True)
    )
    if workload.dtype != "fp32":
        in_fp32 = msgspec.structs.replace(workload, dtype="fp32")
        explained_rms = TF32_RMS if device_type == "cuda" else 0.0
        planned.append(
            _PlannedCall(len(planned) + 1, in_fp32, "fp32", explained_rms=explained_rms, extra=True, optional=True)
        )
    return planned


@dataclass(frozen=True)
class _Calls:
    """The calls of one check, and their results so far."""

    attention: UserAttention
    request: CheckRequest
    barrier: CompletionBarrier
    reporter: Reporter
    planned: list[_PlannedCall]
    results: list[_CallResult] = field(default_factory=list)
    sent: list[SentInCall] = field(default_factory=list)
    """Data that this rank sent in the last of the equal calls; empty where another profiler was running."""

    def make_and_compare(self, call: _PlannedCall) -> str:
        """Make a call and compare its results with dense attention on all ranks. Collective.

        Returns why an optional call was left out, or nothing. Raises `RecordError` where only some ranks refuse it.
        """
        full, where = call.draw(self.attention.ranks.device), f"call {call.number} of the attention"
        self.reporter.start(f"call {call.number} of {len(self.planned)}", 1)
        results, shape_problem, refusal = self._make(full, call, record=call.number == self.request.calls)
        self.reporter.start(f"after call {call.number} of {len(self.planned)}", 1)
        refusals = self.barrier.wait_for_all(where, refusal)
        if all(refusals):
            return f"{where}, in {call.variant}: {refusals[0]}"
        for rank, text in enumerate(refusals):
            if text:
                raise RecordError(f"rank {rank} failed in {where}, in {call.variant}: {text}")
        result = self._compare(call, full, results, shape_problem)
        if call.optional and not result.equal and (rounding := self._input_rounding(full, results)):
            return f"{where}, in {call.variant}: it rounds q, k and v to {rounding}"
        self.results.append(result)
        return ""

    def _input_rounding(self, full: Tensors, results: AttentionResults) -> str:
        """Return the type to which the attention rounds its float32 inputs; empty where it does not. Collective.

        Inputs that are already rounded give the same output then.
        """
        if "out" not in results:
            return ""
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            rounded = Tensors(*(x.to(dtype).to(x.dtype) for x in (full.q, full.k, full.v, full.dout)))
            again, _ = self.attention.run(rounded, backward=False)
            difference = relative_rms(again["out"] - results["out"], results["out"])
            if all(row[0] <= 1e-5 for row in gather_numbers([difference], self.attention.ranks)):
                return name
        return ""

    def check_visible_keys(self, workload: Workload) -> tuple[Seen | None, list[str]]:
        """Compare the keys that queries see with the mask, by extra forward calls. Collective.

        Returns None where the output differs from call to call, and the mistakes that the weights reveal.
        """
        forward_only = msgspec.structs.replace(workload, backward=False)
        numbers = itertools.count(len(self.planned) + 1)

        def call(full: Tensors) -> AttentionResults:
            number = next(numbers)
            results, *_ = self._make(full, _PlannedCall(number, forward_only))
            self.barrier.wait_for_all(f"call {number} of the attention")
            return results

        full = draw_inputs(workload, self.attention.ranks.device, SEED)
        return read_weights(call, self.attention, full, workload, self.request.softmax_scale)

    def _make(self, full: Tensors, call: _PlannedCall, *, record: bool = False) -> tuple[AttentionResults, str, str]:
        """Call the attention once; return its results, a description of a wrong shape, and why it refuses the call."""
        where = f"call {call.number} of the attention" + f", with {call.variant}" * bool(call.variant)
        between = call.draw_between(self.attention.ranks.device)
        try:
            with record_sent(self.sent) if record else nullcontext():
                results, shape_problem = self.attention.run(
                    full, backward=call.workload.backward, between=between, strided_dout=call.strided_dout
                )
            self.attention.ranks.finish()
        except Exception as error:
            if call.optional:
                return {}, "", error_line(error)
            if isinstance(error, RingprofError):
                self.barrier.report_failure(where, error)
                raise
            if call.number == 1 and (hint := self._other_defaults()):
                where += f" ({hint})"
            raise self.barrier.report_failure(where, error) from error
        has_other_type = call.optional and any(x.dtype != torch_dtype(call.workload) for x in results.values())
        return results, shape_problem, "it returns another type" * has_other_type

    def _other_defaults(self) -> str:
        """Say what defaults an attention may not support, and how to ask for others; empty where there are none."""
        request, workload = self.request, self.planned[0].workload
        others: dict[str, Any] = {"batch": 1} if request.batch is None else {}
        if request.heads is None and request.kv_heads is None:
            others["kv_heads"] = workload.heads
        if workload.dtype != "fp32":
            others["dtype"] = "fp32"
        if not others:
            return ""
        if request.target:
            options = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in others.items())
        else:
            options = ", ".join(f"{name}={value!r}" for name, value in others.items())
        return f"batch {workload.batch}, {workload.heads_in_words()}, {workload.dtype}; try {options}"

    def _compare(self, call: _PlannedCall, full: Tensors, results: AttentionResults, shape_problem: str) -> _CallResult:
        """Compare one call's results with the references on all ranks; explain the first wrong ones. Collective."""
        ranks, workload, scale = self.attention.ranks, call.workload, self.request.softmax_scale
        for rank, problem in enumerate(ranks.gather_bytes(shape_problem.encode())):
            if problem:
                return _CallResult(call, {}, [f"on rank {rank} {problem.decode()}"])
        try:
            device, dtype, size = full.q.device, full.q.dtype, workload.head_dim
            needs: Any = workload.mask().asks_of_kernels()
            wanted = Case("", dtype, size, full.v.shape[-1], workload.heads // workload.kv_heads)
            kernel = choose_proven(
                lambda refused: choose_kernel("auto", device, dtype, size, refused=refused, **needs), (), wanted,
                blocks_of(causal=workload.causal, several_ranks=False, **needs), device,
            )()  # fmt: skip
        except Unsupported:
            # With an exact kernel, only the rounding of the result is allowed for.
            kernel = ReferenceKernel()
        exact, of_kernel = reference_shares(full, workload, kernel, self.attention.shard, scale)
        # It is unknown in which type a user's code sends its partial results: each hop may round, in the output, too.
        hops = ranks.size if ranks.size > 1 else 0
        errors, wrong_on_this_rank = compare_results(
            results, exact, of_kernel, self.attention.positions, torch_dtype(workload), lambda name: hops, ranks,
            call.explained_rms,
        )  # fmt: skip
        result = _CallResult(call, errors, [])
        # Calls that nothing explains may be explained by those with large scores or in fp32.
        wrong = [earlier for earlier in self.results if not earlier.equal]
        if result.equal or any(earlier.reasons for earlier in wrong) or (wrong and not call.extra):
            return result
        # Buffers may hold data of the call before, or of the first.
        numbers = {call.number - 1, 1} - {0, call.number} if not call.extra else set[int]()
        earlier = {number: self.planned[number - 1].draw(ranks.device) for number in sorted(numbers)}
        wrong_call = WrongCall(
            self.attention, full, workload, scale, results, exact, errors, wrong_on_this_rank, earlier,
            call.draw_between(ranks.device), self.attention.misread_dout(full) if call.strided_dout else None,
        )  # fmt: skip
        reasons = wrong_call.reasons()
        return msgspec.structs.replace(result, reasons=reasons, lost_digits=[] if reasons else wrong_call.lost_digits())


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
    with hidden_profiler_lines():
        recording.__enter__()
    try:
        yield
    finally:
        with hidden_profiler_lines():
            recording.__exit__(*sys.exc_info())
    sent_in_calls.append(_sent_in_events(recording.kineto_results.events()))


def gather_sent(sent_in_calls: list[SentInCall], ranks: GroupRanks) -> list[SentInCall] | None:
    """Gather what each rank sent in the first recorded call; None where another profiler ran on a rank. Collective."""
    unknown = SentInCall(operations={}, size_bytes=-1)
    by_rank = ranks.gather_structs(sent_in_calls[0] if sent_in_calls else unknown)
    return None if unknown in by_rank else by_rank


@contextmanager
def hidden_profiler_lines() -> Iterator[None]:
    """Drop lines that begin with "USDT:" from what the process writes to stderr in the block.

    torch's profiler writes two of them from C++ whenever it runs, and has no option that hides only them.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)


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
