"""Recurrences as a recorded workload: their inputs, and one rank's share of an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from ringprof.iteration.resolve import torch_dtype
from ringprof.iteration.shard import Results, WorkloadShard, seeded
from ringprof.strategies.kernels.merge import wide_type
from ringprof.strategies.recurrent.baselines import NoOpRecurrence, RecordingRecurrence, use_kernel
from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy, StateRing
from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.hosts import Hosts
from ringprof.workload.workload import Workload

SHARED = ("a", "d", "weight")
"""Inputs that are parameters of the layer, the same on every rank; all others are split over the ranks."""
_HORIZONS = (10.0, 10_000.0)
"""Tokens after which the first and the last head have forgotten about two thirds of a state; heads between them lie on
a logarithmic scale. So a state that is passed on wrongly shows, however many tokens a rank has."""
_PARAMETERS_SEED = 3


@dataclass(frozen=True)
class RecurrenceResults(Results):
    """Output of one iteration, and the gradients of its inputs by name (``dq``, ``dg``, ...)."""

    gradients: Mapping[str, Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, Tensor]:
        return {"out": self.out, **self.gradients}


def draw_inputs(workload: Workload, tokens: int, device: torch.device, generator: Any) -> dict[str, Tensor]:
    """Draw the inputs of a recurrence over ``tokens`` tokens (S), by their names in `call_operator`.

    Gates, decays and the parameters ``a`` and ``d`` are float32, as layers compute them; other tensors have the
    workload's type. The parameters are the same for every generator. On ``meta`` the tensors have shapes only.
    """
    batch, heads, groups = workload.batch, workload.heads, workload.kv_heads
    keys, values, dtype = workload.head_dim, workload.value_dim, torch_dtype(workload)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(batch, tokens, *shape, generator=generator, device=device)

    low, high = (torch.log10(torch.tensor(horizon)).item() for horizon in _HORIZONS)
    rates = torch.logspace(-low, -high, heads, device=device)
    parameters = torch.Generator().manual_seed(_PARAMETERS_SEED)

    def parameter(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=parameters)
        return torch.empty(shape, device=device) if device.type == "meta" else drawn.to(device)

    inputs: dict[str, Tensor] = {}
    traits = workload.traits
    if traits.state_space:
        sequence = {"x": normal(heads, values), "b": normal(groups, keys) / keys**0.5, "c": normal(groups, keys)}
        inputs |= {"dt": 2 * uniform(heads), "a": -rates, "d": parameter(heads)}
    else:
        k = functional.normalize(normal(groups, keys), dim=-1)
        sequence = {"q": normal(groups, keys), "k": k, "v": normal(heads, values)}
        gates = (heads, keys) if traits.channel_decay else (heads,)
        inputs |= {"g": -2 * uniform(*gates) * (rates[:, None] if traits.channel_decay else rates)}
        if traits.delta_rule:
            inputs |= {"beta": uniform(heads)}
    sequence = {name: tensor.to(dtype) for name, tensor in sequence.items()}
    if workload.conv_width is None:
        return {**sequence, **inputs}
    channels = torch.cat([tensor.flatten(2) for tensor in sequence.values()], -1)
    weight = parameter(channels.shape[2], workload.conv_width) / workload.conv_width**0.5
    return {"channels": channels, "weight": weight.to(dtype), **inputs}


def call_operator(target: Any, workload: Workload, inputs: Mapping[str, Tensor], **options: Any) -> Any:
    """Compute the workload's recurrence by ``target``: a `RecurrentStrategy`, or what has its methods.

    With a convolution, ``inputs`` hold its ``channels`` (B, S, C), the heads of all its tensors side by side, and its
    ``weight`` (C, W); SiLU follows it, and keys of the gated delta rule are normalised after it, as in gated delta net.
    ``options`` are ``initial_state`` and ``return_final_state``. Returns what the target returns.
    """
    tensors, documents = dict(inputs), workload.mask().documents
    if documents is not None:
        options["cu_seqlens"] = documents
    if workload.conv_width is not None:
        channels = target.causal_conv1d(tensors.pop("channels"), tensors.pop("weight"), cu_seqlens=documents)
        tensors |= _split_channels(workload, functional.silu(channels))
    return getattr(target, workload.traits.method)(**tensors, **options)


def _split_channels(workload: Workload, channels: Tensor) -> dict[str, Tensor]:
    """Return the operator's tensors, whose heads lie side by side in ``channels`` (B, S, C)."""
    keys, values = (workload.kv_heads, workload.head_dim), (workload.heads, workload.value_dim)
    shapes = {"x": values, "b": keys, "c": keys} if workload.traits.state_space else {"q": keys, "k": keys, "v": values}
    parts = torch.split(channels, [heads * size for heads, size in shapes.values()], -1)
    tensors = {name: x.view(*x.shape[:2], *shape) for (name, shape), x in zip(shapes.items(), parts, strict=True)}
    if workload.traits.delta_rule:
        tensors["k"] = functional.normalize(tensors["k"].to(wide_type(channels)), dim=-1).to(channels.dtype)
    return tensors


def select_group(workload: Workload, tensors: Mapping[str, Tensor], group: int) -> tuple[dict[str, Tensor], Workload]:
    """Return the part of inputs, gradients and output that belongs to one head of keys.

    ``tensors`` are named as in `draw_inputs`, gradients with a ``d`` before the name. Also returns the workload of that
    part: one head of keys, and the heads of values that read it, in the first batch entry. With gradients of
    parameters, which are sums over the batch, the part has all batch entries.
    """
    entries = workload.batch if any(f"d{name}" in tensors for name in SHARED) else 1
    repeats = workload.heads // workload.kv_heads
    values, keys = slice(group * repeats, (group + 1) * repeats), slice(group, group + 1)
    own = {"q": keys, "k": keys, "b": keys, "c": keys}
    key_columns, value_columns = (
        torch.arange(heads.start * size, heads.stop * size)
        for heads, size in ((keys, workload.head_dim), (values, workload.value_dim))
    )
    # The heads of all tensors lie side by side in the channels: x, b, c or q, k, v.
    offsets = (workload.heads * workload.value_dim, workload.kv_heads * workload.head_dim)
    columns = [value_columns, *(key_columns + offsets[0] + index * offsets[1] for index in (0, 1))]
    if not workload.traits.state_space:
        columns = [*(key_columns + index * offsets[1] for index in (0, 1)), value_columns + 2 * offsets[1]]
    channels = torch.cat(columns)

    def select(name: str, x: Tensor) -> Tensor:
        if name == "weight":
            return x[channels.to(x.device)]
        if name in ("a", "d"):
            return x[values]
        return x[:entries, :, channels.to(x.device) if name == "channels" else own.get(name, values)]

    inputs = (*own, *SHARED, "v", "x", "g", "beta", "dt", "channels", "out")
    selected = {name: select(name if name in inputs else name[1:], x) for name, x in tensors.items()}
    return selected, msgspec.structs.replace(workload, batch=entries, heads=repeats, kv_heads=1)


@dataclass(kw_only=True)
class RecurrenceShard(WorkloadShard):
    """One rank's share of a recurrence; the inherited q, k and v are empty."""

    workload: Workload
    inputs: dict[str, Tensor]
    """Inputs by name, of which those in `SHARED` are the same on every rank."""

    @classmethod
    def create(
        cls, strategy: Any, workload: Workload, device: torch.device, *, cuda_graph: bool = False
    ) -> RecurrenceShard:
        """Create one rank's share with random inputs, drawn on ``device``; on ``meta`` it has shapes only."""
        generator, tokens = seeded(device, 1 + strategy.comm.rank), workload.seq // strategy.comm.size
        inputs = draw_inputs(workload, tokens, device, generator)
        shape = (workload.batch, tokens, workload.heads, workload.value_dim)
        dout = torch.randn(shape, generator=generator, device=device).to(torch_dtype(workload))
        return cls.of(strategy, workload, inputs, dout if workload.backward else None, cuda_graph=cuda_graph)

    @classmethod
    def of(
        cls, strategy: Any, workload: Workload, inputs: Mapping[str, Tensor], dout: Tensor | None, *,
        cuda_graph: bool = False,
    ) -> RecurrenceShard:  # fmt: skip
        """Create a share with these inputs, which then require gradients if there is ``dout`` (B, S/N, H, V)."""
        leaves = {name: x.contiguous().requires_grad_(dout is not None) for name, x in inputs.items()}
        empty = next(iter(leaves.values())).new_empty(0)
        return cls(
            strategy=strategy, causal=True, q=empty, k=empty, v=empty, dout=dout, cuda_graph=cuda_graph,
            workload=workload, inputs=leaves,
        )  # fmt: skip

    def kernel(self) -> Any:
        """Return the meter of the recurrence's kernel, whose ``name`` is that of the kernel in the latest call."""
        return self.strategy.computed

    def run_iteration(self) -> Results:
        """Run one iteration, forward and backward if there is ``dout``, and return its results."""
        if self.graph is not None:
            self.graph.replay()
            return self.graph_results[0]
        out = call_operator(self.strategy, self.workload, self.inputs)
        if self.dout is None:
            return RecurrenceResults(out)
        gradients = torch.autograd.grad(out, list(self.inputs.values()), self.dout)
        return RecurrenceResults(out, gradients={f"d{name}": x for name, x in zip(self.inputs, gradients, strict=True)})


def single_rank_strategy(kernel: str) -> RecurrentStrategy:
    """Return a strategy over this rank alone: it computes whole sequences with ``kernel`` and sends nothing."""
    return StateRing(Communicator(dry_run=(0, Hosts({0: 0}))), kernel)


def recurrence_bodies(shard: RecurrenceShard, null_strategy: RecurrentStrategy) -> tuple[list[Any], int]:
    """Return a function that runs one iteration of each kind of `baselines.BASELINE_KINDS`, and a solo one's FLOPs.

    ``solo`` computes the rank's tokens by the kernel alone, as if they were a whole sequence: no state is passed, and
    none is combined. A single rank has only the first two kinds. Collective: every rank must call this.
    """
    strategy = shard.strategy
    before = strategy.computed.flops
    recordings: list[RecordingRecurrence] = []
    choose = strategy.kernel_for

    def record(x: Any) -> RecordingRecurrence:
        recordings.append(RecordingRecurrence(choose(x)))
        return recordings[-1]

    strategy.kernel_for = record
    try:
        shard.run_iteration()
    finally:
        strategy.kernel_for = choose
    flops, (recording,) = strategy.computed.flops - before, recordings
    bodies: list[Any] = [shard.run_iteration, recording.replay]
    if strategy.comm.size > 1:
        compute_only = replace(shard, strategy=null_strategy).run_iteration

        def communication_only() -> None:
            with use_kernel(strategy, NoOpRecurrence()):
                shard.run_iteration()

        bodies += [compute_only, communication_only]
    return bodies, flops
