"""Training of layers of 32 tokens and 32 channels in float64: on all ranks, and in one process on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringprof.iteration.layer import rotation

_STEPS, _HEAD_DIM = 4, 8


def data() -> tuple[Tensor, Tensor]:
    """Return input and target of the whole sequence, (2, 32, 32)."""
    generator = torch.Generator().manual_seed(5)
    x, target = (torch.randn(2, 32, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


def losses_of_one_process(
    model: nn.Module, plain: Callable[[Tensor, dict[str, Tensor]], Tensor], rate: float
) -> list[float]:
    """Train copies of the model's parameters with ``plain``, a function of input and parameters; return the losses."""
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.named_parameters()}
    x, target = data()
    losses = []
    for _ in range(_STEPS):
        loss = functional.mse_loss(plain(x, weights), target)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for tensor in weights.values():
                assert tensor.grad is not None
                tensor -= rate * tensor.grad
                tensor.grad = None
    return losses


def losses_over_ranks(model: nn.Module, strategy: Any, rate: float) -> list[float]:
    """Train on all ranks, sharded by ``strategy``; return the losses of the whole sequence: the mean of the ranks'."""
    x, target = (strategy.shard(whole) for whole in data())
    cos_sin = rotation(strategy.positions(32), _HEAD_DIM, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    losses = []
    for _ in range(_STEPS):
        loss = functional.mse_loss(model(x, cos_sin), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / torch.distributed.get_world_size())
    return losses
