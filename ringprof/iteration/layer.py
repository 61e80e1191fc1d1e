"""Whole layers around a strategy's attention, to measure the overlap with other operations of a layer, too.

Layers of a hybrid model follow a pattern of attention and recurrences (`ringprof.recording.recurrent_mixer`).

A layer is RMSNorm, projections to q, k and v, rotary embedding by the strategy's own positions, the strategy's
attention, an output projection, RMSNorm and a gated MLP, with two residuals. Each rank has its share of the tokens of
every sequence. All ranks have the same parameters, whose gradients DDP or FSDP2 reduces over all ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ringprof.iteration.recurrence import RecurrenceResults, RecurrenceShard, call_operator
from ringprof.iteration.resolve import attention_options, layout_options, torch_dtype
from ringprof.iteration.shard import Results, WorkloadShard, row_sums, seeded
from ringprof.strategies.base import Strategy
from ringprof.strategies.kernels.merge import wide_type
from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy
from ringprof.strategies.transport.communicator import Communicator
from ringprof.workload.recurrences import Operator
from ringprof.workload.workload import Workload

ROPE_BASE = 10_000.0
PARAMETERS_SEED = 0


@dataclass
class _KeptCall:
    """Inputs and output of one call of attention or of a recurrence, with their gradients (dq, ..., dout)."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def keep(self, **tensors: Tensor) -> None:
        """Keep the tensors of a call, unless an earlier call was kept, as it is if the layer is recomputed."""
        for name, tensor in tensors.items():
            if name not in self.tensors:
                self.tensors[name] = tensor.detach()
                if tensor.requires_grad:
                    hooked: Any = tensor
                    hooked.register_hook(self._gradient_hook(f"d{name}"))

    def _gradient_hook(self, name: str) -> Any:
        def keep(gradient: Tensor) -> None:
            self.tensors[name] = gradient.detach()

        return keep


class Layer(nn.Module):
    """Decoder layer whose attention, or recurrence, runs over all ranks."""

    def __init__(self, workload: Workload, strategy: Any, operator: Operator = "attention") -> None:
        """Create the parameters; ``strategy`` is one for the layer's ``operator``."""
        super().__init__()
        assert workload.layer is not None
        hidden, mlp = workload.heads * workload.head_dim, workload.layer.mlp_size
        kv = workload.kv_heads * workload.head_dim
        self.workload, self.strategy = workload, strategy
        self.kept: _KeptCall | None = None
        """Storage of the next call's tensors; None: they are not kept."""
        self.before_attention, self.before_mlp = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mixer: RecurrentMixer | None = None
        if operator == "attention":
            self.qkv = nn.Linear(hidden, hidden + 2 * kv, bias=False)
            self.out = nn.Linear(hidden, hidden, bias=False)
        else:
            part = workload.part(operator)
            assert part is not None
            self.mixer = RecurrentMixer(part, strategy)
        self.gate_up = nn.Linear(hidden, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Compute the layer for x (B, S/N, hidden), with the `rotation` of the rank's positions."""
        normed = self.before_attention(x)
        if self.mixer is None:
            x = x + self.out(self._attention(normed, cos_sin).flatten(2))
        else:
            x = x + self.mixer(normed, self.kept)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        after: Tensor = x + self.down(functional.silu(gate) * up)
        return after

    def _attention(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        workload = self.workload
        q, k, v = (
            self.qkv(x)
            .unflatten(-1, (-1, workload.head_dim))
            .split((workload.heads, workload.kv_heads, workload.kv_heads), 2)
        )
        q, k, v = rotated(q, cos_sin), rotated(k, cos_sin), v.contiguous()
        out: Tensor = self.strategy.attention(q, k, v, causal=workload.causal, **attention_options(workload))
        if self.kept is not None:
            self.kept.keep(q=q, k=k, v=v, out=out)
        return out


class Layers(nn.Module):
    """Sequence of layers, recomputed in the backward pass if the workload says so."""

    def __init__(self, workload: Workload, strategy: Strategy, recurrent: RecurrentStrategy | None = None) -> None:
        """Create the layers; ``recurrent`` is the strategy of those with a recurrence, if the pattern has some."""
        super().__init__()
        assert workload.layer is not None
        self.recomputes = workload.layer.checkpoint
        self.layers = nn.ModuleList(
            Layer(workload, strategy if operator == "attention" else recurrent, operator)
            for operator in workload.pattern * (workload.layers // len(workload.pattern))
        )

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, cos_sin, use_reentrant=False) if self.recomputes else layer(x, cos_sin)
        return x


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines (2, tokens, 1, head_dim / 2) of the rotary embedding's angles.

    The result is at least float32, and the angles are computed in float64, because positions may be large. Source:
    RoFormer (arXiv 2104.09864).
    """
    rates = ROPE_BASE ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angles = (positions[:, None].double() * rates)[:, None]
    return torch.stack([angles.cos(), angles.sin()]).to(torch.float64 if dtype == torch.float64 else torch.float32)


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate elements i and i + D/2 of each head of x (B, S, H, D) as a pair, by a `rotation`."""
    cos, sin = cos_sin
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def parallelize(model: Layers, how: str, device: torch.device) -> nn.Module:
    """Wrap the layers in DDP or FSDP2 (``ddp`` or ``fsdp2``) over all ranks; return them unchanged on ``meta``."""
    if device.type == "meta":
        return model
    if how == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@dataclass(kw_only=True)
class LayersShard(WorkloadShard):
    """One rank's share of whole layers; q, k, v and dout are those of the first attention, once kept."""

    model: nn.Module
    first: dict[Operator, Layer]
    """First layer of each operator."""
    x: Tensor
    dx: Tensor | None
    """Gradient of the layers' output; None: forward only."""
    cos_sin: Tensor
    recurrent: RecurrentStrategy | None = None
    """Strategy of a pattern's recurrences."""
    recurrences: dict[Operator, RecurrenceShard] = field(default_factory=dict)
    """Recurrence of the first layer of each operator, with its inputs, once kept."""
    kept_results: dict[Operator, RecurrenceResults] = field(default_factory=dict)
    """Results of `recurrences`."""
    first_rows: dict[Operator, Tensor] = field(default_factory=dict)
    """`row_sums` of the first kept output of each recurrence."""

    @classmethod
    def create(
        cls, strategy: Strategy, workload: Workload, device: torch.device, *, cuda_graph: bool = False,
        recurrent: RecurrentStrategy | None = None,
    ) -> LayersShard:  # fmt: skip
        """Create layers with the same parameters on all ranks, and random tokens.

        ``recurrent`` is the strategy of a pattern's recurrences.
        """
        assert workload.layer is not None and not cuda_graph
        torch.manual_seed(PARAMETERS_SEED)
        with device if device.type == "meta" else nullcontext():
            model = Layers(workload, strategy, recurrent).to(device=device, dtype=torch_dtype(workload))
        layers: Any = model.layers
        first = {operator: layers[workload.pattern.index(operator)] for operator in dict.fromkeys(workload.pattern)}
        generator = seeded(device, 1 + strategy.comm.rank)
        shape = (workload.batch, workload.seq // strategy.comm.size, workload.heads * workload.head_dim)
        x, dx = (torch.randn(shape, generator=generator, device=device, dtype=torch_dtype(workload)) for _ in range(2))
        positions = strategy.positions(workload.seq, device, **layout_options(workload))
        empty = x.new_empty(0)
        return cls(
            strategy, workload.causal, empty, empty, empty, None,
            attention_options=attention_options(workload), kernel_options=workload.mask().asks_of_kernels(),
            model=parallelize(model, workload.layer.parallel, device), first=first, x=x,
            dx=dx if workload.backward else None, cos_sin=rotation(positions, workload.head_dim, x.dtype),
            recurrent=recurrent,
        )  # fmt: skip

    def kernel(self) -> Any:
        """Return the kernel that computes the attention blocks."""
        like = torch.empty(1, 1, 1, self.first["attention"].workload.head_dim, dtype=self.x.dtype, device=self.x.device)
        return self.strategy.kernel_for(like, **self.kernel_options)

    def run_iteration(self) -> None:  # type: ignore[override]
        """Run the forward pass, and the backward pass with gradients reduced over all ranks; no optimizer step."""
        with torch.set_grad_enabled(self.dx is not None):
            out = self.model(self.x, self.cos_sin)
        if self.dx is not None:
            out.backward(self.dx)
            self.model.zero_grad(set_to_none=True)

    def run_for_verification(self) -> Results:
        """Run one iteration and return the first attention's output and gradients.

        Also sets q, k, v and dout to those of that call, and `recurrences` to the first call of each recurrence.
        """
        calls = {operator: _KeptCall() for operator in self.first}
        for operator, layer in self.first.items():
            layer.kept = calls[operator]
        self.run_iteration()
        for layer in self.first.values():
            layer.kept = None
        tensors = calls.pop("attention").tensors
        for operator, call in calls.items():
            self._keep_recurrence(operator, call.tensors)
        self.q, self.k, self.v, self.dout = tensors["q"], tensors["k"], tensors["v"], tensors.get("dout")
        return Results(tensors["out"], *(tensors.get(name) for name in ("dq", "dk", "dv")))

    def _keep_recurrence(self, operator: Operator, tensors: dict[str, Tensor]) -> None:
        """Set what is kept of an operator's first call: its inputs, and its results."""
        mixer = self.first[operator].mixer
        assert mixer is not None
        gradients = {name: x for name, x in tensors.items() if name.startswith("d") and name[1:] in tensors}
        inputs = {name: x for name, x in tensors.items() if name not in gradients and name != "out"}
        dout, out = gradients.pop("dout", None), tensors["out"]
        self.recurrences[operator] = RecurrenceShard.of(self.recurrent, mixer.part, inputs, dout)
        self.kept_results[operator] = RecurrenceResults(out, gradients=gradients)
        self.first_rows.setdefault(operator, row_sums(out))

    @property
    def strategies(self) -> list[Any]:
        """Strategies whose work is counted: that of attention, and the communication alone of the recurrences'."""
        return [self.strategy, *([] if self.recurrent is None else [_Communication(self.recurrent.comm)])]


@dataclass(frozen=True)
class _Communication:
    """Communication of a strategy without its kernels, for `ringprof.iteration.shard.counted_work`."""

    comm: Communicator

    @staticmethod
    def kernels() -> list[Any]:
        return []


# --- token mixing of a recurrent layer: projections, short convolution, recurrence over the ranks, and gated norm ---

_GATE_DIVISOR = 16
"""Divisor of the logarithm of the decay of gated linear attention, which makes it slow."""


class RecurrentMixer(nn.Module):
    """Mixes tokens (B, S/N, hidden) by a recurrence over all ranks."""

    def __init__(self, part: Workload, strategy: Any) -> None:
        """Create the parameters; ``part`` is the recurrence, ``strategy`` one for recurrences."""
        super().__init__()
        self.part, self.strategy = part, strategy
        heads, size, groups = self.part.heads, self.part.head_dim, self.part.kv_heads
        hidden = heads * size
        self.channels = hidden + 2 * groups * size
        self.gates = part.traits.gates(heads, size)
        self.projection = nn.Linear(hidden, self.channels + hidden + self.gates, bias=False)
        self.norm = nn.RMSNorm(hidden if part.traits.state_space else size)
        self.out = nn.Linear(hidden, hidden, bias=False)
        if self.part.conv_width is not None:
            self.conv = nn.Parameter(torch.randn(self.channels, self.part.conv_width) / self.part.conv_width**0.5)
            self.log_rates = nn.Parameter(torch.linspace(0.0, 2.0, heads))
            self.bias = nn.Parameter(torch.linspace(-5.0, -2.0, heads))
        if part.traits.state_space:
            self.skip = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, kept: Any = None) -> Tensor:
        """Return the mixed tokens (B, S/N, hidden); ``kept.keep`` gets the tensors of the recurrence by name."""
        part = self.part
        hidden = part.heads * part.head_dim
        channels, z, gates = self.projection(x).split([self.channels, hidden, self.gates], -1)
        inputs = self._inputs(channels, gates.to(wide_type(gates)))
        out = call_operator(self.strategy, part, inputs)
        if kept is not None:
            kept.keep(**inputs, out=out)
        if part.traits.state_space:
            mixed = self.norm(out.flatten(2) * functional.silu(z))
        else:
            mixed = (self.norm(out) * functional.silu(z.unflatten(-1, out.shape[2:]))).flatten(2)
        projected: Tensor = self.out(mixed)
        return projected

    def _inputs(self, channels: Tensor, gates: Tensor) -> dict[str, Tensor]:
        """Return the inputs of `call_operator` from the convolution's channels and the gates, in at least float32."""
        part = self.part
        if part.conv_width is None:
            shape = (*channels.shape[:2], part.heads, part.head_dim)
            q, k, v = (x.reshape(shape) for x in channels.chunk(3, -1))
            g = functional.logsigmoid(gates) / _GATE_DIVISOR
            return {"q": q, "k": k, "v": v, "g": g.view(shape) if part.traits.channel_decay else g}
        # Copies outlive what FSDP frees, and have gradients of their own, before data parallelism reduces them.
        inputs = {"channels": channels.contiguous(), "weight": self.conv.clone()}
        rates, bias = -self.log_rates.to(gates.dtype).exp(), self.bias.to(gates.dtype)
        if part.traits.state_space:
            skip = self.skip.to(gates.dtype, copy=True)
            return inputs | {"dt": functional.softplus(gates + bias), "a": rates, "d": skip}
        decay, beta = gates.chunk(2, -1)
        return inputs | {"g": rates * functional.softplus(decay + bias), "beta": beta.sigmoid()}
