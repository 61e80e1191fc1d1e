"""Controls of a recording: the blocks alone, the strategy without sending, and the strategy without computing.

How fast a GPU runs depends on how hot it is, by several percent. So the controls are timed in turns with ordinary
iterations, all in one recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringprof.json_object import Params
from ringprof.record.clock import clock_for
from ringprof.record.measure import WorkloadShard
from ringprof.record.progress import Reporter
from ringprof.record.resolve import load_strategy
from ringprof.strategies.base import Context
from ringprof.strategies.transport.baselines import (
    KernelCall,
    NoOpKernel,
    NullCommunicator,
    RecordingKernel,
    TensorView,
    use_kernel,
)

CONTROL_KINDS = ("ordinary", "solo", "compute_only", "communication_only")
ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
"""The order of `CONTROL_KINDS` in each round: in four rounds each kind follows each other kind once, and so is timed on
a device that the one before has left hot as often as on one that it has left cool."""


@dataclass(frozen=True)
class BaselineTimes:
    """One rank's times: nanoseconds of every iteration, by those of `CONTROL_KINDS` that there are."""

    rounds: int
    times_ns: dict[str, list[int]]
    solo_flops: int
    """Of one solo iteration, counted by the kernel."""


def measure_baselines(
    problem: WorkloadShard, silent: Any, device: torch.device, warmup: int, iters: int, reporter: Reporter
) -> BaselineTimes:
    """Time ordinary iterations and the three controls in turns, at least ``iters`` of each, in up to four rounds.

    ``compute_only`` is an iteration on a communicator that sends nothing, ``communication_only`` one with a kernel that
    computes nothing; merges and accumulation run in both. One rank alone has neither: it sends nothing anyway.
    ``silent`` is the problem's strategy on a `NullCommunicator`. Collective: every rank calls it.
    """
    rounds = min(iters, len(ORDERS))
    each = -(-iters // rounds)
    bodies, solo_flops = baseline_bodies(problem, silent)
    reporter.start("controls", len(bodies[1:]) * warmup + len(bodies) * rounds * each)
    warming = clock_for(device)
    for body in [body for body in bodies[1:] for _ in range(warmup)]:
        warming.run(body)
        reporter.advance()
    warming.times_ns()
    turns = [kind for order in ORDERS[:rounds] for kind in order if kind < len(bodies) for _ in range(each)]
    # One clock for all: it keeps the host from running ahead, which would cost memory.
    clock = clock_for(device)
    for kind in turns:
        clock.run(bodies[kind])
        reporter.advance()
    times: dict[str, list[int]] = {name: [] for name in CONTROL_KINDS[: len(bodies)]}
    for kind, time_ns in zip(turns, clock.times_ns(), strict=True):
        times[CONTROL_KINDS[kind]].append(time_ns)
    return BaselineTimes(rounds, times, solo_flops)


def baseline_bodies(problem: WorkloadShard, silent: Any) -> tuple[list[Callable[[], object]], int]:
    """An iteration of each of `CONTROL_KINDS`, and the FLOPs of the blocks alone; as `measure_baselines`.
    Collective."""
    replay = Replay.of(problem)
    bodies: list[Callable[[], object]] = [problem.iteration, replay.run]
    if problem.strategy.comm.size > 1:
        bodies += [replace(problem, strategy=silent).iteration, _idle(problem)]
    return bodies, replay.flops


def silent_strategy(
    name: str, kernel: str, ranks_per_host: int | None, params: Params, hosts: Sequence[int] | None = None
) -> Any:
    """A strategy by name or path, as `ringprof.strategies.create` makes it, whose communicator sends nothing."""
    communicator = NullCommunicator(ranks_per_host=ranks_per_host, hosts=hosts)
    return load_strategy(name)(Context(communicator, kernel), **params)


def _idle(problem: WorkloadShard) -> Callable[[], None]:
    kernel = NoOpKernel()

    def body() -> None:
        with use_kernel(problem.strategy, kernel):
            problem.iteration()

    return body


class Replay:
    """The kernel calls of one iteration, in their order, with the values and the strides but without the strategy.

    Each role has one stretch of memory, the problem's own where that is long enough, and every call looks at it through
    the shape and strides that it had. A backward call has the LSE that belongs to what it computes with.
    """

    def __init__(self, kernel: Any, calls: Sequence[KernelCall], problem: WorkloadShard) -> None:
        self._kernel = kernel
        self._memory = _Memory(problem, calls)
        self._rows: dict[KernelCall, dict[str, Tensor]] = {}
        with torch.no_grad():
            self._bound = [self._bind(call) for call in calls]
        before = kernel.flops
        self.run()
        self.flops: int = kernel.flops - before
        """Of one run."""

    @classmethod
    def of(cls, problem: WorkloadShard) -> Replay:
        """The calls of one iteration of ``problem``, which is run to see them. Collective."""
        kernel = problem.kernel()
        listener = RecordingKernel(kernel)
        with use_kernel(problem.strategy, listener):
            problem.iteration()
        return cls(kernel, listener.recorded_calls, problem)

    def run(self) -> None:
        """All calls, back to back."""
        with torch.no_grad():
            for call in self._bound:
                call()

    def _bind(self, call: KernelCall) -> Callable[[], object]:
        q, k, v = (self._memory.at(role, getattr(call, role)) for role in ("q", "k", "v"))
        kernel, how = self._kernel, {"scale": call.scale, "causal": call.causal, "parts": call.parts}
        if call.rows is None:
            return lambda: kernel.forward(q, k, v, **how)
        if call not in self._rows:
            self._rows[call] = self._rows_of(call, q, k, v)
        rows = self._rows[call]
        return lambda: kernel.backward(q=q, k=k, v=v, **how, **rows)

    def _rows_of(self, call: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """dout, lse, and out or delta, of a backward call."""
        views = call.rows
        assert views is not None
        lse = torch.empty_strided(views.lse.size, views.lse.stride, dtype=views.lse.dtype, device=q.device)
        lse.copy_(self._kernel.forward(q, k, v, scale=call.scale, causal=call.causal, parts=call.parts)[1])
        rows = {"dout": self._memory.at("dout", views.dout), "lse": lse}
        for name, view in (("out", views.out), ("delta", views.delta)):
            if view is not None:
                rows[name] = self._memory.at(name, view)
        return rows


class _Memory:
    """One stretch of numbers for each role of a kernel's arguments."""

    def __init__(self, problem: WorkloadShard, calls: Sequence[KernelCall]) -> None:
        self._like = problem.q
        self._stretches: dict[tuple[str, torch.dtype], Tensor] = {}
        for role in ("q", "k", "v", "dout"):
            tensor = getattr(problem, role)
            if tensor is not None and tensor.is_contiguous():
                self._stretches[role, tensor.dtype] = tensor.detach().view(-1)
        for call in calls:
            for role, view in _roles(call):
                self._reserve(role, view)

    def at(self, role: str, view: TensorView) -> Tensor:
        """The role's memory, seen as ``view``."""
        return self._stretches[role, view.dtype].as_strided(view.size, view.stride)

    def _reserve(self, role: str, view: TensorView) -> None:
        known = self._stretches.get((role, view.dtype))
        if known is None or known.numel() < view.span:
            self._stretches[role, view.dtype] = torch.randn(view.span, dtype=view.dtype, device=self._like.device)


def _roles(call: KernelCall) -> list[tuple[str, TensorView]]:
    roles: list[tuple[str, TensorView | None]] = [("q", call.q), ("k", call.k), ("v", call.v)]
    if call.rows is not None:
        roles += [("dout", call.rows.dout), ("out", call.rows.out), ("delta", call.rows.delta)]
    return [(role, view) for role, view in roles if view is not None]
