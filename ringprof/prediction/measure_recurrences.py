"""Measurement of the kernels of linear recurrences by tokens, heads, and whether states enter and leave.

All four parts of a pass are timed in one pass, forward and backward, because later parts need the results of earlier
ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median, pstdev
from typing import Any

import msgspec
import torch
from torch.nn.functional import logsigmoid, normalize

from ringprof.dryrun.schedule import RecurrenceOp
from ringprof.prediction.calibration import RecurrenceCurve, RecurrencePoint
from ringprof.prediction.microbenchmark import Bench
from ringprof.strategies.errors import Unsupported
from ringprof.strategies.kernels.merge import wide_type
from ringprof.strategies.recurrent.kernel import Inputs, RecurrenceKernel, Shard
from ringprof.strategies.recurrent.kernels import choose_kernel

OPERATORS = ("gated_delta_rule", "simple_gla", "gla")
HEAD_DIM = 128
_TOKENS = (16384, 65536, 4096, 131072, 8192, 32768, 2048)
"""Tokens of a rank, ordered so that every prefix of the list is useful."""
_ENDS = ((False, False), (True, True), (False, True), (True, False))
"""Whether a rank receives a state, and whether it sends one: a rank alone, one between others, the first, the last."""
_HEADS = ((16, _ENDS), (8, _ENDS[:1]), (32, _ENDS), (4, _ENDS[:1]))
"""Heads with the ends they are measured with. After an all-to-all a rank has few heads, and no state enters or leaves.
"""
_PARTS = (("forward", "local"), ("forward", "block"), ("backward", "local"), ("backward", "block"))
_PASSES, _WARM_NS = 7, 60_000_000
_AHEAD_CYCLES = 30_000_000
"""Device cycles, more than ten milliseconds, in which the host gets ahead by a pass."""


_SHAPE = ("operator", "phase", "part", "heads", "head_dim", "v_head_dim", "receives", "sends")


def recurrence_case(
    operator: str, tokens: int, heads: int, receives: bool, sends: bool, phase: str = "forward", part: str = "local"  # noqa: FBT001
) -> RecurrenceOp:  # fmt: skip
    """Return a part of a shape to measure."""
    return RecurrenceOp(
        label="", phase=phase, part=part, operator=operator, batch=1,  # type: ignore[arg-type]
        tokens=tokens, heads=heads, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM, receives=receives, sends=sends,
    )  # fmt: skip


def recurrence_cases(operators: Sequence[str] = OPERATORS) -> list[RecurrenceOp]:
    """Return the shapes to measure: all tokens with 16 heads for every operator, then other numbers of heads."""
    return [
        recurrence_case(operator, tokens, heads, *ends)
        for heads, every_end in _HEADS for operator in operators for tokens in _TOKENS for ends in every_end
    ]  # fmt: skip


def measure_recurrences(
    bench: Bench, deadline: float, kernel: str = "fla", cases: Sequence[RecurrenceOp] | None = None
) -> list[RecurrenceCurve]:
    """Measure the cases (None: `recurrence_cases`) until the deadline of `time.monotonic`; the ranks divide them.

    An operator that the kernel refuses is left out. Raises `Unsupported` where it refuses all.
    """
    every = recurrence_cases() if cases is None else list(cases)
    samples: list[RecurrenceCurve] = []
    refusals: dict[str, Unsupported] = {}
    for case in every[bench.rank :: bench.size]:
        if time.monotonic() > deadline or case.operator in refusals:
            continue
        try:
            samples += sample_recurrence(bench, kernel, case)
        except Unsupported as refusal:
            refusals[case.operator] = refusal
        finally:
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
    if len(refusals) == len({case.operator for case in every}):
        raise next(iter(refusals.values()))
    gathered = [sample for own in bench.gather(samples, list[RecurrenceCurve]) for sample in own]
    return curves_from(gathered)


def measured_curve(kernel: str, part: RecurrenceOp, point: RecurrencePoint, source: str) -> RecurrenceCurve:
    """Return the curve of one part of a case with a single point."""
    shape = {name: getattr(part, name) for name in _SHAPE}
    return RecurrenceCurve(kernel=kernel, points=[point], origin="measured", source=source, **shape)


def curves_from(samples: Iterable[RecurrenceCurve]) -> list[RecurrenceCurve]:
    """Join curves that differ in their points alone, which are of other tokens each."""
    curves: dict[tuple[object, ...], RecurrenceCurve] = {}
    for sample in sorted(samples, key=lambda sample: sample.points[0].tokens):
        key = tuple(getattr(sample, name) for name in sample.__struct_fields__ if name != "points")
        points = curves[key].points if key in curves else []
        curves[key] = msgspec.structs.replace(sample, points=[*points, *sample.points])
    return list(curves.values())


def sample_recurrence(bench: Bench, kernel_name: str, case: RecurrenceOp) -> list[RecurrenceCurve]:
    """Measure the four parts of one case: a curve of one point each.

    Raises `Unsupported` where the kernel cannot compute it.
    """
    x = _inputs(bench, case)
    kernel = choose_kernel(kernel_name, x)
    shard = Shard((0, case.tokens), case.receives, case.sends)
    state = torch.randn(x.state_shape, device=bench.device, dtype=wide_type(x.q))
    dout = bench.random_tensor(*x.v.shape)
    steps = _pass_of(kernel, x, shard, dout, state)
    # The first pass also compiles.
    _times_ns(bench, steps)
    start = time.monotonic_ns()
    while time.monotonic_ns() - start < _WARM_NS:
        _times_ns(bench, steps)
    times = [_times_ns(bench, steps) for _ in range(_PASSES)]
    samples = []
    for number, (phase, part) in enumerate(_PARTS):
        device_ns, host_ns = ([each[kind][number] for each in times] for kind in (0, 1))
        typical = median(device_ns)
        point = RecurrencePoint(
            case.tokens, max(round(typical), 1), min(round(pstdev(device_ns) / max(typical, 1.0), 4), 1.0),
            max(round(median(host_ns) / 1e3), 1),
        )  # fmt: skip
        own = msgspec.structs.replace(case, phase=phase, part=part)
        samples.append(measured_curve(kernel.name, own, point, "ringprof calibrate"))
    return samples


def _inputs(bench: Bench, case: RecurrenceOp) -> Inputs:
    """Return random inputs (1, tokens, heads, `HEAD_DIM`) with slow decay, as layers have."""
    shape = 1, case.tokens, case.heads, HEAD_DIM
    q, v = bench.random_tensor(*shape), bench.random_tensor(*shape)
    k = normalize(bench.random_tensor(*shape).float(), dim=-1).to(q.dtype)
    decay_shape = shape if case.operator == "gla" else (*shape[:3], 1)
    g = logsigmoid(torch.randn(decay_shape, device=bench.device) + 4)
    beta = torch.rand(shape[:3], device=bench.device) if case.operator == "gated_delta_rule" else None
    return Inputs(q, k, v, g, beta, HEAD_DIM**-0.5)


def _pass_of(
    kernel: RecurrenceKernel, x: Inputs, shard: Shard, dout: torch.Tensor, state: torch.Tensor
) -> list[Callable[[dict[str, Any]], None]]:
    """Return the four parts of a pass; they hand results on in a dict."""
    entering = state if shard.receives else None
    returning = state if shard.sends else None

    def begin(known: dict[str, Any]) -> None:
        known["local"] = kernel.begin(x, shard)[0]

    def finish(known: dict[str, Any]) -> None:
        known["saved"] = kernel.finish(x, shard, known.pop("local"), entering)[1]

    def begin_backward(known: dict[str, Any]) -> None:
        known["local"] = kernel.begin_backward(x, shard, known["saved"], dout)[0]

    def finish_backward(known: dict[str, Any]) -> None:
        kernel.finish_backward(x, shard, known.pop("saved"), known.pop("local"), returning)

    return [begin, finish, begin_backward, finish_backward]


def _times_ns(bench: Bench, steps: Sequence[Callable[[dict[str, Any]], None]]) -> tuple[list[float], list[float]]:
    """Run one pass; return the nanoseconds of its parts on the device, and on the host until the calls return."""
    known: dict[str, Any] = {}
    on_gpu = bench.device.type == "cuda"
    events: list[Any] = []
    if on_gpu:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]  # type: ignore[no-untyped-call]
        # The host gets ahead, so that the events measure the device.
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        events[0].record()
    marks = [time.perf_counter_ns()]
    for number, step in enumerate(steps):
        step(known)
        marks.append(time.perf_counter_ns())
        if on_gpu:
            events[number + 1].record()
    host_ns = [float(b - a) for a, b in pairwise(marks)]
    if not on_gpu:
        return host_ns, host_ns
    events[-1].synchronize()
    return [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)], host_ns
