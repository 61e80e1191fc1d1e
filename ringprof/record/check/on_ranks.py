"""The check on the ranks: each calls the attention with its own tokens, and all compare with dense attention.

Every call gets other numbers, so that what is left of an earlier one shows. All are made, whatever the first gives, and
judged as they come; the last one runs under the profiler, which tells what is sent.
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

from ringprof.errors import RingprofError, UsageError
from ringprof.record.check.completion_barrier import CompletionBarrier
from ringprof.record.check.diagnose import Case, Truth, judge
from ringprof.record.check.result import TENSOR_FORMATS, Check, CheckRequest, Seen, SentInCall, TensorCheck
from ringprof.record.check.user_attention import Answers, UserAttention, order_of_layout, order_of_positions
from ringprof.record.check.weights import read_weights
from ringprof.record.measure import profiler_is_busy
from ringprof.record.process_group import GroupRanks
from ringprof.record.progress import Reporter, SilentReporter
from ringprof.record.request import DTYPES, from_json
from ringprof.record.resolve import torch_dtype
from ringprof.record.verify import MOST_TOKENS, SEED, Tensors, draw_inputs, severity
from ringprof.run import Workload
from ringprof.validation import refuse_below_one


class _Form(msgspec.Struct, frozen=True):
    wrong: str


class _Call(msgspec.Struct, frozen=True):
    """What all ranks know of one call."""

    number: int
    errors: dict[str, TensorCheck]
    reasons: list[str]

    @property
    def equal(self) -> bool:
        return bool(self.errors) and all(error.equal for error in self.errors.values())

    def severity(self) -> float:
        return max(map(severity, self.errors.values()), default=math.inf)


def check_on_ranks(
    attention: Callable[..., Any], request: CheckRequest, positions: Tensor | None = None, group: Any = None,
    reporter: Reporter | None = None,
) -> Check:  # fmt: skip
    """Check ``attention`` on the ranks of ``group`` (None: the world), which all call this. The answer is all ranks'.

    Raises `UsageError`, and `RecordError` where a call fails or does not come back on some rank.
    """
    ranks, reporter = GroupRanks(group), reporter or SilentReporter()
    _refuse_numbers(request)
    roll = CompletionBarrier(ranks, request.time_limit)
    if len(set(ranks.gather_structs(request))) > 1:
        raise UsageError("the ranks do not ask for the same check: the arguments must be alike on all")
    if positions is None:
        order = order_of_layout(request.layout, request.seq, ranks.size, ranks.device.type).to(ranks.device)
    else:
        order = order_of_positions(positions, ranks)
    workload = _workload(request, order.numel())
    given = UserAttention(
        attention, ranks, order, request.tensor_format, workload.mask().documents, trains=workload.backward
    )
    calls, sent = list[_Call](), list[SentInCall]()
    for number in range(1, request.calls + 1):
        full = draw_inputs(workload, ranks.device, SEED + number)
        reporter.start(f"call {number} of {request.calls}", 1)
        answers, wrong_form = _call(given, full, workload, roll, number, sent if number == request.calls else None)
        reporter.start(f"after call {number} of {request.calls}", 1)
        roll.all_back(f"call {number} of the attention")
        explain, scale = all(call.equal for call in calls), request.softmax_scale
        calls.append(_judged(given, full, workload, scale, answers, wrong_form, number, explain=explain))
    shown = next((call for call in calls if not call.equal), None) or max(calls, key=_Call.severity)
    seen, reasons = None, shown.reasons
    if shown.errors:
        reporter.start("what queries see", 1)
        seen, told = _seen(given, workload, request, roll)
        reasons = reasons or ([] if seen and seen.right and shown.equal else told)
    return Check(
        equal=all(call.equal for call in calls) and (seen is None or seen.right), workload=workload, ranks=ranks.size,
        layout=request.layout, device=ranks.device.type, calls=len(calls), call=shown.number, errors=shown.errors,
        sent=_of_all(ranks, sent), seen=seen, reasons=reasons,
    )  # fmt: skip


def _seen(
    given: UserAttention, workload: Workload, request: CheckRequest, roll: CompletionBarrier
) -> tuple[Seen | None, list[str]]:
    """`read_weights`, by calls of their own after those that are compared. Collective."""
    forward_only = msgspec.structs.replace(workload, backward=False)
    numbers = itertools.count(request.calls + 1)

    def call(full: Tensors) -> Answers:
        number = next(numbers)
        answers, _ = _call(given, full, forward_only, roll, number, None)
        roll.all_back(f"call {number} of the attention")
        return answers

    full = draw_inputs(workload, given.ranks.device, SEED)
    return read_weights(call, given, full, workload, request.softmax_scale)


def _refuse_numbers(request: CheckRequest) -> None:
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


def _call(
    given: UserAttention,
    full: Tensors,
    workload: Workload,
    roll: CompletionBarrier,
    number: int,
    sent: list[SentInCall] | None,
) -> tuple[Answers, str]:
    """One call; ``sent`` is given where it is to be told what this rank sends."""
    where = f"call {number} of the attention"
    try:
        if sent is None:
            found = given.answers(full, backward=workload.backward)
        else:
            with sent_meanwhile(sent):
                found = given.answers(full, backward=workload.backward)
        given.ranks.finish()
    except RingprofError as error:
        roll.failed(where, error)
        raise
    except Exception as error:
        raise roll.failed(where, error) from error
    return found


def _judged(
    given: UserAttention, full: Tensors, workload: Workload, scale: float | None, answers: Answers, wrong_form: str,
    number: int, *, explain: bool,
) -> _Call:  # fmt: skip
    """What all ranks find of a call. Collective."""
    forms = [from_json(said, _Form).wrong for said in given.ranks.gather_structs(_Form(wrong_form))]
    if any(forms):
        rank, wrong = next((rank, wrong) for rank, wrong in enumerate(forms) if wrong)
        return _Call(number, {}, [f"on rank {rank} {wrong}"])
    truth = Truth.of(given, full, workload, scale)
    errors, wrong_here = judge(answers, truth, given, torch_dtype(workload))
    call = _Call(number, errors, [])
    if call.equal or not explain:
        return call
    case = Case(given, full, workload, scale, answers, truth, errors, wrong_here)
    return msgspec.structs.replace(call, reasons=case.reasons())


def _of_all(ranks: GroupRanks, sent: list[SentInCall]) -> list[SentInCall] | None:
    """What each rank sent; None where one of them could not see it."""
    own = sent[0] if sent else SentInCall(operations={}, size_bytes=-1)
    said = [from_json(part, SentInCall) for part in ranks.gather_structs(own)]
    return None if any(rank.size_bytes == -1 for rank in said) else said


_GLOO_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "short": 2}
_NCCL_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2}
_SEND_NOTHING = ("recv", "barrier")


@contextmanager
def sent_meanwhile(found: list[SentInCall]) -> Iterator[None]:
    """Append what this rank sends in the block; nothing where another profiler runs, for there can be but one."""
    if profiler_is_busy():
        yield
        return
    # Not torch.profiler's own, which imports the compiler: seconds.
    device = "cuda" if torch.cuda.is_available() else None
    recording: Any = profile(use_device=device, record_shapes=True, use_kineto=True)
    with recording:
        yield
    found.append(_sent(recording.kineto_results.events()))


def _sent(events: list[Any]) -> SentInCall:
    operations: Counter[str] = Counter()
    sizes: list[int | None] = []
    for event in events:
        backend, _, operation = event.name().partition(":")
        if backend == "c10d":
            # ``c10d::alltoall_base_``, whatever carries it.
            name = operation.strip(":_")
            operations[name] += not name.startswith(_SEND_NOTHING)
        elif backend == "gloo" and not operation.startswith(_SEND_NOTHING):
            sizes.append(_gloo_bytes(event))
        elif backend == "record_param_comms":
            sizes.append(_nccl_bytes(event))
        elif backend.startswith("Memcpy PtoP"):
            # Copy engines, past torch.distributed.
            operations["copies between GPUs"] += 1
            sizes.append(event.nbytes())
    known = [size for size in sizes if size is not None]
    return SentInCall(operations=dict(+operations), size_bytes=sum(known) if known or not +operations else None)


def _gloo_bytes(event: Any) -> int:
    """Of the tensors that a gloo operation was given."""
    pairs = [pair for pair in zip(event.shapes(), event.dtypes(), strict=False) if pair[0]]
    return sum(int(math.prod(shape)) * _GLOO_BYTES.get(dtype, 1) for shape, dtype in pairs)


def _nccl_bytes(event: Any) -> int | None:
    """Of the tensors that an NCCL operation was given; None for one that sends nothing."""
    said = event.extra_meta() if hasattr(event, "extra_meta") else {}
    if said.get("Collective name", "recv").strip('"').startswith(_SEND_NOTHING):
        return None
    return int(said.get("In msg nelems", 0)) * _NCCL_BYTES.get(said.get("dtype", "").strip('"'), 1)
