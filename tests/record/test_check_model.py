"""The check of whole models: clean set-ups pass, and each mistake of context parallelism is found and named."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="checking needs torch")

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports: once, and not in every forked rank
from torch import Tensor, nn

import ringprof
from ringprof.record.check.model_result import ModelCheck
from ringprof.strategies import create
from tests.record.tiny_model import VOCAB, Model, dense, shifted, total_loss
from tests.strategies.ranks import run_ranks

SEQ, ROWS = 32, 2


def ids(rows: int = ROWS) -> Tensor:
    return torch.randint(VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(0))


def pair(attention: Any, truth: Any = None, **options: Any) -> tuple[Model, Model]:
    """Return a model with ``attention``, and one of the same weights with dense attention."""
    torch.manual_seed(0)
    mine = Model(attention, **options)
    reference = Model(truth or (lambda q, k, v, **mask: dense(q, k, v, None)), **options)
    reference.load_state_dict(mine.state_dict())
    return mine, reference


def reduced(model: nn.Module, factor: float = 1.0) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad *= factor


def checked(
    name: str, attention: Any = None, labels: Any = None, positions: Any = None, factor: float = 1.0
) -> ModelCheck:
    """Check a step of a bundled strategy, with parts of it replaced."""
    strategy = create(name)
    mine, reference = pair(attention or (lambda q, k, v: strategy.attention(q, k, v)))

    def step(batch: Tensor) -> Tensor:
        local = strategy.shard(batch)
        logits = mine(local, strategy.positions(SEQ) if positions is None else positions(local))
        loss = total_loss(logits, strategy.shard(shifted(batch)) if labels is None else labels(local))
        loss.backward()
        reduced(mine, factor)
        return loss

    return ringprof.check_model(step, lambda batch: total_loss(reference(batch), shifted(batch)), ids())


def right(rank: int) -> list[ModelCheck]:
    return [checked(name) for name in ("ring", "zigzag", "ulysses")]


@pytest.mark.processes
def test_a_bundled_strategy_is_equal() -> None:
    by_rank = run_ranks(2, right)
    for check in by_rank[0]:
        assert check.equal, str(check)
        assert check.reasons == [] and check.first_difference is None and check.loss_is == "sum"
        assert len(check.parameters) == 23 and check.modules > 20
    assert by_rank[0] == by_rank[1]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"labels": shifted}, "the labels are shifted across shard borders"),
    "positions": ({"positions": lambda local: torch.arange(local.shape[1])}, "local positions, which restart"),
    "scale": ({"factor": 0.5}, "0.5, 1 / ranks"),
    "twice": ({"factor": 2.0}, "2, the number of ranks"),
    "off": ({"attention": lambda q, k, v: dense(q, k, v, None)}, "context parallelism is silently off"),
}  # fmt: skip


def wrong(rank: int) -> dict[str, ModelCheck]:
    return {name: checked("ring", **options) for name, (options, _) in MISTAKES.items()}


@pytest.mark.processes
def test_each_mistake_is_found_and_named() -> None:
    by_rank = run_ranks(2, wrong)
    assert by_rank[0] == by_rank[1]
    for name, check in by_rank[0].items():
        assert not check.equal
        assert check.reasons and MISTAKES[name][1] in check.reasons[0], f"{name}: {check}"
