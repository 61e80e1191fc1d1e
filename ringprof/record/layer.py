"""Whole layers around a strategy's attention, so that what overlaps with attention's neighbours is measured, too.

A layer is RMSNorm, projections to q, k and v, rotary embedding by the strategy's own positions, the strategy's
attention, an output projection, RMSNorm and a gated MLP, with two residuals. Each rank has its share of the tokens of
every sequence, and all ranks have the same parameters: DDP or FSDP2 over all ranks brings their gradients together.
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

from ringprof.record.measure import Results, WorkloadShard, seeded
from ringprof.record.resolve import layout_options, mask_options, torch_dtype
from ringprof.run import Workload
from ringprof.strategies.base import Strategy

ROPE_BASE = 10_000.0
PARAMETERS_SEED = 0


@dataclass
class _Kept:
    """What one attention call was given and returned, with the gradients that came back."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def see(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Keep a call; of a layer that is recomputed, the first."""
        for name, tensor in {"q": q, "k": k, "v": v, "out": out}.items():
            if name not in self.tensors:
                self.tensors[name] = tensor.detach()
                if tensor.requires_grad:
                    hooked: Any = tensor
                    hooked.register_hook(self._gradient(f"d{name}"))

    def _gradient(self, name: str) -> Any:
        def keep(gradient: Tensor) -> None:
            self.tensors[name] = gradient.detach()

        return keep


class Layer(nn.Module):
    """One layer of a decoder whose attention goes over all ranks."""

    def __init__(self, workload: Workload, strategy: Strategy) -> None:
        super().__init__()
        assert workload.layer is not None
        hidden, mlp = workload.heads * workload.head_dim, workload.layer.mlp_size
        kv = workload.kv_heads * workload.head_dim
        self.workload, self.strategy = workload, strategy
        self.kept: _Kept | None = None
        """Where the next attention call is kept; None: nowhere."""
        self.before_attention, self.before_mlp = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, hidden + 2 * kv, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """x (B, S/N, hidden), and the `rotation` of the rank's positions."""
        x = x + self.out(self._attention(self.before_attention(x), turn).flatten(2))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        after: Tensor = x + self.down(functional.silu(gate) * up)
        return after

    def _attention(self, x: Tensor, turn: Tensor) -> Tensor:
        work = self.workload
        q, k, v = self.qkv(x).unflatten(-1, (-1, work.head_dim)).split((work.heads, work.kv_heads, work.kv_heads), 2)
        q, k, v = rotated(q, turn), rotated(k, turn), v.contiguous()
        out: Tensor = self.strategy.attention(q, k, v, causal=work.causal, **mask_options(work))
        if self.kept is not None:
            self.kept.see(q, k, v, out)
        return out


class Layers(nn.Module):
    """Layers one after the other, recomputed in the backward pass where the workload says so."""

    def __init__(self, workload: Workload, strategy: Strategy) -> None:
        super().__init__()
        assert workload.layer is not None
        self.recomputes = workload.layer.checkpoint
        self.layers = nn.ModuleList(Layer(workload, strategy) for _ in range(workload.layers))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, turn, use_reentrant=False) if self.recomputes else layer(x, turn)
        return x


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Cosine and sine (2, tokens, 1, head_dim / 2) of the angles by which pairs of a head's numbers turn.

    In at least float32, from angles in float64: positions may be large. Source: RoFormer (arXiv 2104.09864).
    """
    rates = ROPE_BASE ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angles = (positions[:, None].double() * rates)[:, None]
    return torch.stack([angles.cos(), angles.sin()]).to(torch.float64 if dtype == torch.float64 else torch.float32)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """x (B, S, H, D) with numbers i and i + D/2 of each head turned as a pair by a `rotation`."""
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def made_parallel(model: Layers, how: str, device: torch.device) -> nn.Module:
    """The layers with their gradients brought together over all ranks, by ``ddp`` or ``fsdp2``; on ``meta`` as is."""
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
class LayersProblem(WorkloadShard):
    """One rank's share of whole layers: q, k, v and dout are those of the first layer's attention that was kept."""

    model: nn.Module
    first: Layer
    x: Tensor
    dx: Tensor | None
    """Gradient of the layers' output; None: forward only."""
    turn: Tensor

    @classmethod
    def of(
        cls, strategy: Strategy, workload: Workload, device: torch.device, *, cuda_graph: bool = False
    ) -> LayersProblem:  # fmt: skip
        """Layers of parameters that are the same on all ranks, and random tokens."""
        assert workload.layer is not None and not cuda_graph
        torch.manual_seed(PARAMETERS_SEED)
        with device if device.type == "meta" else nullcontext():
            model = Layers(workload, strategy).to(device=device, dtype=torch_dtype(workload))
        first: Any = model.layers[0]
        generator = seeded(device, 1 + strategy.comm.rank)
        shape = (workload.batch, workload.seq // strategy.comm.size, workload.heads * workload.head_dim)
        x, dx = (torch.randn(shape, generator=generator, device=device, dtype=torch_dtype(workload)) for _ in range(2))
        positions = strategy.positions(workload.seq, device, **layout_options(workload))
        nothing = x.new_empty(0)
        return cls(
            strategy, workload.causal, nothing, nothing, nothing, None,
            options=mask_options(workload), asks=workload.mask().asks_of_kernels(),
            model=made_parallel(model, workload.layer.parallel, device), first=first, x=x,
            dx=dx if workload.backward else None, turn=rotation(positions, workload.head_dim, x.dtype),
        )  # fmt: skip

    def kernel(self) -> Any:
        like = torch.empty(1, 1, 1, self.first.workload.head_dim, dtype=self.x.dtype, device=self.x.device)
        return self.strategy.kernel_for(like, **self.asks)

    def iteration(self) -> None:  # type: ignore[override]
        """Forward, and backward with gradients of all parameters, brought together; no optimizer step."""
        with torch.set_grad_enabled(self.dx is not None):
            out = self.model(self.x, self.turn)
        if self.dx is not None:
            out.backward(self.dx)
            self.model.zero_grad(set_to_none=True)

    def results(self) -> Results:
        """An iteration whose first attention call is kept."""
        kept = self.first.kept = _Kept()
        self.iteration()
        self.first.kept = None
        found = kept.tensors
        self.q, self.k, self.v, self.dout = found["q"], found["k"], found["v"], found.get("dout")
        return Results(found["out"], *(found.get(name) for name in ("dq", "dk", "dv")))
