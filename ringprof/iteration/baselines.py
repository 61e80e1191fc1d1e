"""Baselines of a recording: kernels only, the strategy without communication, and the strategy without computation.

A GPU's speed depends on its temperature by several percent. So baselines and ordinary iterations are interleaved in one
recording. The command line and ``run.json`` call the baselines ``controls``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringprof.common.json_object import Params
from ringprof.iteration.recurrence import RecurrenceShard, recurrence_bodies
from ringprof.iteration.resolve import load_any_strategy
from ringprof.iteration.shard import WorkloadShard
from ringprof.ranks.progress import Reporter
from ringprof.strategies.base import Context
from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy
from ringprof.strategies.transport.baselines import (
    KernelCall,
    NoOpKernel,
    NullTransport,
    RecordingKernel,
    TensorView,
    use_kernel,
)
from ringprof.strategies.transport.communicator import Communicator

BASELINE_KINDS = ("ordinary", "solo", "compute_only", "communication_only")
ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
"""Order of `BASELINE_KINDS` in each round, as indices.

In four rounds each kind follows every other kind once, so that no kind is timed on a hotter device than another."""


@dataclass(frozen=True)
class BaselineTimes:
    """Baseline times of one rank: nanoseconds of every iteration, by kind (`BASELINE_KINDS` or a part of them)."""

    rounds: int
    times_ns: dict[str, list[int]]
    solo_flops: int
    """FLOPs of one ``solo`` iteration, counted by the kernel."""


def measure_baselines(
    shard: WorkloadShard, null_strategy: Any, warmup: int, iters: int, reporter: Reporter
) -> BaselineTimes:
    """Time ordinary iterations and the three baselines, interleaved in up to four rounds, at least ``iters`` of each.

    ``solo`` replays the kernel calls of an iteration back to back. ``compute_only`` is an iteration on a communicator
    that sends nothing. ``communication_only`` is an iteration with a kernel that computes nothing. Merges and
    accumulation run in the last two. A single rank has only ``solo``, because it sends nothing anyway.
    ``null_strategy`` is the shard's strategy over a `NullTransport`. Collective: every rank must call this.
    """
    rounds = min(iters, len(ORDERS))
    per_kind = -(-iters // rounds)
    bodies, solo_flops = baseline_bodies(shard, null_strategy)
    reporter.start("controls", len(bodies[1:]) * warmup + len(bodies) * rounds * per_kind)
    warmup_clock = shard.clock()
    for body in [body for body in bodies[1:] for _ in range(warmup)]:
        warmup_clock.run(body)
        reporter.advance()
    warmup_clock.times_ns()
    sequence = [kind for order in ORDERS[:rounds] for kind in order if kind < len(bodies) for _ in range(per_kind)]
    # One clock for all kinds: it keeps the host from running ahead, which would cost memory.
    clock = shard.clock()
    for kind in sequence:
        clock.run(bodies[kind])
        reporter.advance()
    times: dict[str, list[int]] = {name: [] for name in BASELINE_KINDS[: len(bodies)]}
    for kind, time_ns in zip(sequence, clock.times_ns(), strict=True):
        times[BASELINE_KINDS[kind]].append(time_ns)
    return BaselineTimes(rounds, times, solo_flops)


def baseline_bodies(shard: WorkloadShard, null_strategy: Any) -> tuple[list[Callable[[], object]], int]:
    """Return a function that runs one iteration, for each of `BASELINE_KINDS`, and the FLOPs of a ``solo`` iteration.

    A single rank has only the first two kinds. Collective: every rank must call this.
    """
    if isinstance(shard, RecurrenceShard):
        return recurrence_bodies(shard, null_strategy)
    replay, no_op = Replay.record(shard), NoOpKernel(writes_into=shard.kernel().writes_into)

    def communication_only() -> None:
        with use_kernel(shard.strategy, no_op):
            shard.run_iteration()

    bodies: list[Callable[[], object]] = [shard.run_iteration, replay.run]
    if shard.strategy.comm.size > 1:
        bodies += [replace(shard, strategy=null_strategy).run_iteration, communication_only]
    return bodies, replay.flops


def strategy_without_transport(
    name: str, kernel: str, ranks_per_host: int | None, params: Params, hosts: Sequence[int] | None = None
) -> Any:
    """Create a strategy by name or ``package.module:Class`` on a communicator that sends nothing."""
    communicator = Communicator(ranks_per_host=ranks_per_host, hosts=hosts, connect=NullTransport)
    strategy: Any = load_any_strategy(name)
    if issubclass(strategy, RecurrentStrategy):
        return strategy(communicator, kernel)
    return strategy(Context(communicator, kernel), **params)


class Replay:
    """Kernel calls of one iteration, in their order and with their strides, but without the strategy.

    All calls share one buffer per role (q, k, v, dout, ...): the shard's own tensor where that is long enough. Every
    call views the buffer with the shape and the strides that it had. The LSE of a backward call is computed from the
    values in these buffers.
    """

    def __init__(self, kernel: Any, calls: Sequence[KernelCall], shard: WorkloadShard) -> None:
        self._kernel = kernel
        self._buffers = _Buffers(shard, calls)
        self._backward_arguments: dict[KernelCall, dict[str, Tensor]] = {}
        with torch.no_grad():
            self._bound = [self._bind(call) for call in calls]
        flops_before = kernel.flops
        self.run()
        self.flops: int = kernel.flops - flops_before
        """FLOPs of one run."""

    @classmethod
    def record(cls, shard: WorkloadShard) -> Replay:
        """Run one iteration of ``shard`` and return a replay of it. Collective: every rank must call this."""
        kernel = shard.kernel()
        recorder = RecordingKernel(kernel)
        with use_kernel(shard.strategy, recorder):
            shard.run_iteration()
        return cls(kernel, recorder.recorded_calls, shard)

    def run(self) -> None:
        """Run all calls, back to back."""
        with torch.no_grad():
            for call in self._bound:
                call()

    def _bind(self, call: KernelCall) -> Callable[[], object]:
        q, k, v = (self._buffers.as_view(role, getattr(call, role)) for role in ("q", "k", "v"))
        kernel, arguments = self._kernel, {"scale": call.scale, "causal": call.causal, "parts": call.parts}
        if call.rows is None:
            return lambda: kernel.forward(q, k, v, **arguments)
        if call not in self._backward_arguments:
            self._backward_arguments[call] = self._create_backward_arguments(call, q, k, v)
        backward_arguments = self._backward_arguments[call]
        return lambda: kernel.backward(q=q, k=k, v=v, **arguments, **backward_arguments)

    def _create_backward_arguments(self, call: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Return the arguments dout, lse, and out or delta of a backward call."""
        views = call.rows
        assert views is not None
        lse = torch.empty_strided(views.lse.size, views.lse.stride, dtype=views.lse.dtype, device=q.device)
        lse.copy_(self._kernel.forward(q, k, v, scale=call.scale, causal=call.causal, parts=call.parts)[1])
        arguments = {"dout": self._buffers.as_view("dout", views.dout), "lse": lse}
        for name, view in (("out", views.out), ("delta", views.delta)):
            if view is not None:
                arguments[name] = self._buffers.as_view(name, view)
        return arguments


class _Buffers:
    """Buffers of a replay: one per role and dtype of a kernel's arguments."""

    def __init__(self, shard: WorkloadShard, calls: Sequence[KernelCall]) -> None:
        self._by_role: dict[tuple[str, torch.dtype], Tensor] = {}
        for role in ("q", "k", "v", "dout"):
            tensor = getattr(shard, role)
            if tensor is not None and tensor.is_contiguous():
                self._by_role[role, tensor.dtype] = tensor.detach().view(-1)
        for call in calls:
            views: list[tuple[str, TensorView | None]] = [("q", call.q), ("k", call.k), ("v", call.v)]
            if call.rows is not None:
                views += [("dout", call.rows.dout), ("out", call.rows.out), ("delta", call.rows.delta)]
            for role, view in views:
                buffer = None if view is None else self._by_role.get((role, view.dtype))
                if view is not None and (buffer is None or buffer.numel() < view.span):
                    self._by_role[role, view.dtype] = torch.randn(view.span, dtype=view.dtype, device=shard.q.device)

    def as_view(self, role: str, view: TensorView) -> Tensor:
        """Return the role's buffer with the size and the strides of ``view``."""
        return self._by_role[role, view.dtype].as_strided(view.size, view.stride)
