"""Dry run of linear recurrences: a kernel that computes nothing and records its parts, and the run of one rank."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from ringprof.dryrun.dispatch import Recorder
from ringprof.dryrun.fakes import DryRunNetwork, dry_run_communicator
from ringprof.dryrun.run import META, recording
from ringprof.dryrun.schedule import MemoryOp, Program
from ringprof.iteration.recurrence import RecurrenceShard
from ringprof.iteration.shard import counted_work, reset_counts
from ringprof.strategies.kernels.merge import wide_type
from ringprof.strategies.recurrent.kernel import Carry, Inputs, Saved, Shard
from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy
from ringprof.strategies.transport.communicator import Communicator
from ringprof.workload.workload import Workload

_CHUNK = 64
"""Tokens per chunk of flash-linear-attention's kernels, which keep a state per chunk."""

_PARTS = (("forward", "local"), ("forward", "block"), ("backward", "local"), ("backward", "block"))
_SCRATCH = {
    "gated_delta_rule": (3.1, 1.1, 2.6, 2.7), "simple_gla": (0.1, 0.1, 1.1, 3.1), "gla": (2.1, 3.1, 2.1, 11.1),
}  # fmt: skip
"""Tensors as large as v that each of `_PARTS` holds besides what is allocated here: by the allocator's peak of the part
on an H100 at 65,536 tokens, 16 heads of 128."""


_ELEMENTWISE = "aten.mul", "aten._to_copy", "aten.sum"
_ELEMENTWISE_SLOWDOWN = 1.5
"""Time of Mamba-2's products, casts and sums over that of copies of as many bytes: they mix types and broadcast, and
torch runs them so much slower, by 12 timed shapes on H200."""


class DryRunRecurrence:
    """`RecurrenceKernel` that records its parts and returns tensors without values.

    It allocates what flash-linear-attention's kernels allocate: the states of all chunks, for the delta rule also w, u
    and the solved systems of all chunks, and `_SCRATCH`.
    """

    name = "recording"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(self, x: Inputs, shard: Shard) -> tuple[Any, Carry]:
        held = self._delta_rule_rows(x)
        transition = torch.empty(x.transition_shape, dtype=wide_type(x.q), device=x.q.device) if shard.spans else None
        carry = Carry(_state(x) if shard.sends else None, transition)
        self._record("forward", "local", x, shard)
        return held, carry

    def finish(self, x: Inputs, shard: Shard, local: Any, incoming: Tensor | None) -> tuple[Tensor, Saved]:
        states, out = self._chunk_states(x), torch.empty_like(x.v)
        self._record("forward", "block", x, shard)
        del states
        kept = (torch.empty_like(x.g), local[0] if local else None, incoming)
        return out, kept

    def begin_backward(self, x: Inputs, shard: Shard, saved: Saved, dout: Tensor) -> tuple[Any, Tensor | None]:
        held = self._delta_rule_rows(x), self._chunk_states(x), torch.empty_like(x.v)
        gradient = _state(x) if shard.receives else None
        self._record("backward", "local", x, shard)
        return held, gradient

    def finish_backward(
        self, x: Inputs, shard: Shard, saved: Saved, local: Any, doutgoing: Tensor | None
    ) -> tuple[Tensor, ...]:
        states = self._chunk_states(x)
        gradients = tuple(torch.empty_like(tensor) for tensor in x.tensors)
        self._record("backward", "block", x, shard)
        del states
        return gradients

    def _record(
        self, phase: Literal["forward", "backward"], part: Literal["local", "block"], x: Inputs, shard: Shard
    ) -> None:
        operator = operator_of(x)
        scratch = round(_SCRATCH[operator][_PARTS.index((phase, part))] * x.v.nbytes)
        self._recorder.recurrence(
            phase, part, x.state_shape, x.q.shape[1], operator, receives=shard.receives, sends=shard.sends,
            scratch_bytes=scratch,
        )  # fmt: skip

    @staticmethod
    def _delta_rule_rows(x: Inputs) -> tuple[Tensor, ...]:
        """Allocate the solved systems of all chunks, w and u; nothing for linear attention."""
        if x.beta is None:
            return ()
        batch, tokens, heads = x.beta.shape
        return x.k.new_empty(batch, tokens, heads, _CHUNK), torch.empty_like(x.k), torch.empty_like(x.v)

    @staticmethod
    def _chunk_states(x: Inputs) -> Tensor:
        batch, heads, keys, values = x.state_shape
        return x.k.new_empty(batch, -(-x.k.shape[1] // _CHUNK), heads, keys, values)


class _Convolution(torch.autograd.Function):
    """Dry run of the convolution by flash-linear-attention's kernel: records the bytes that it moves.

    The kernel moves each of its tensors once, at half the rate of elementwise kernels (65,536 tokens of 6,144 channels
    on an H100), so its bytes count twice.
    """

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, x: Tensor, halo: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, halo, weight)
        ctx.recorder = recorder
        recorder.memory_op("causal_conv1d", 2 * 2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, halo, weight = ctx.saved_tensors
        ctx.recorder.memory_op("causal_conv1d", 2 * 3 * x.nbytes)
        return None, torch.empty_like(x), torch.empty_like(halo), torch.empty_like(weight)


def operator_of(x: Inputs) -> Literal["gated_delta_rule", "simple_gla", "gla"]:
    """Return the kernel's recurrence for these inputs."""
    if x.beta is not None:
        return "gated_delta_rule"
    return "simple_gla" if x.g.shape[-1] == 1 else "gla"


def _state(x: Inputs) -> Tensor:
    return torch.empty(x.state_shape, dtype=wide_type(x.q), device=x.q.device)


def dry_run_recurrent_strategy(
    strategy_class: type[RecurrentStrategy], recorder: Recorder, comm: Communicator
) -> RecurrentStrategy:
    """Return a strategy for recurrences without devices, whose kernel is a `DryRunRecurrence`."""
    strategy: Any = strategy_class(comm)
    strategy.kernel_for = lambda x: DryRunRecurrence(recorder)
    in_torch = strategy.convolve

    def convolve(x: Tensor, halo: Tensor, weight: Tensor, bias: Tensor | None, bounds: tuple[int, ...]) -> Tensor:
        if x.dtype != torch.bfloat16:
            return in_torch(x, halo, weight, bias, bounds)  # type: ignore[no-any-return]
        return _Convolution.apply(recorder, x, halo, weight)  # type: ignore[no-untyped-call, no-any-return]

    strategy.convolve = convolve
    return strategy  # type: ignore[no-any-return]


def dry_run_recurrence(
    strategy_class: type[RecurrentStrategy], workload: Workload, rank_position: tuple[int, int, int], hops: str
) -> Program:
    """Return the program of one rank of a workload with a recurrence.

    ``rank_position`` is the rank, the number of ranks and the number of ranks per host. Raises whatever the strategy
    raises: see `ringprof.dryrun.run.refuse_on_failure`.
    """
    recorder = Recorder()
    with recording(recorder):
        comm = dry_run_communicator(DryRunNetwork(recorder).connect, *rank_position, hops)
        strategy = dry_run_recurrent_strategy(strategy_class, recorder, comm)
        shard = RecurrenceShard.create(strategy, workload, META)
        recorder.start()
        reset_counts([strategy])
        shard.run_iteration()
    ops = recorder.ops
    if workload.traits.state_space:
        ops = [
            msgspec.structs.replace(op, bytes=round(op.bytes * _ELEMENTWISE_SLOWDOWN))
            if isinstance(op, MemoryOp) and op.name in _ELEMENTWISE else op
            for op in ops
        ]  # fmt: skip
    return Program(
        rank=rank_position[0], ops=ops, work=counted_work([strategy]), peak_bytes=recorder.peak_bytes,
        peak_label=recorder.peak_label,
    )  # fmt: skip
