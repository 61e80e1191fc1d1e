"""Nothing that strategies keep between calls is an inference tensor: autograd refuses such a tensor in training."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import pytest
import torch

from ringprof.strategies import Unsupported, create, names
from ringprof.strategies.kernels.torch_kernels import _no_dropout_state
from ringprof.strategies.masks.mask_blocks import AttnRectangle, Batch
from tests.strategies.ranks import run_ranks

SEQ = 32
MASKS: list[dict[str, Any]] = [
    {}, {"softcap": 5.0}, {"window_size": (3, 0)}, {"documents": [0, 5, SEQ]},
    {"window_size": (3, 0), "softcap": 3.0, "prefix": 2},
]  # fmt: skip


def calls(strategy: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Shard ``x`` and attend with every mask; return the outputs."""
    results = []
    for mask in MASKS:
        documents = mask.get("documents")
        with suppress(Unsupported):
            results.append(strategy.attention(*(strategy.shard(x, documents=documents) for _ in range(3)), **mask))
    return results


def validate(strategy: Any, x: torch.Tensor) -> None:
    with torch.inference_mode():
        calls(strategy, x)


def train_after_inference(rank: int, kernel: str) -> None:
    """Validate under inference_mode, then train, with every strategy; gradients equal those of training alone."""
    x = torch.randn(1, SEQ, 4, 8, generator=torch.Generator().manual_seed(1))
    for name in names():
        options: list[dict[str, Any]] = [{}, {"documents_layout": "per_document"}]
        for params in options:
            with suppress(Unsupported):
                gradients = []
                for validates in (True, False):
                    strategy = create(name, kernel=kernel, **params)
                    if validates:
                        validate(strategy, x)
                    y = x.clone().requires_grad_()
                    torch.stack([out.sum() for out in calls(strategy, y)]).sum().backward()
                    assert y.grad is not None
                    gradients.append(y.grad)
                assert torch.equal(gradients[0], gradients[1]), name


@pytest.mark.parametrize("kernel", ["auto", "flex"])
def test_training_after_a_validation_under_inference_mode(kernel):
    strategy, x = create("zigzag", kernel=kernel), torch.randn(1, SEQ, 2, 8)
    with torch.inference_mode():
        strategy.attention(*(strategy.shard(x) for _ in range(3)), window_size=(3, 0))
    y = x.clone().requires_grad_()
    strategy.attention(*(strategy.shard(y) for _ in range(3)), window_size=(3, 0)).sum().backward()
    assert y.grad is not None


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kernel", ["auto", "flex"])
def test_training_after_a_validation_under_inference_mode_with_every_strategy(world_size, kernel):
    run_ranks(world_size, train_after_inference, kernel)


@pytest.mark.processes
def test_no_inference_tensor_is_kept():
    strategies = [create(name, kernel=kernel) for name in names() for kernel in ("auto", "flex")]
    for strategy in strategies:
        validate(strategy, torch.randn(1, SEQ, 4, 8))
    assert not [x.shape for x in gc.get_objects() if type(x) is torch.Tensor and x.is_inference()]


def test_lengths_and_states_that_gpu_kernels_reuse_are_no_inference_tensors():
    cpu = torch.device("cpu")
    with torch.inference_mode():
        _no_dropout_state.cache_clear()
        assert not _no_dropout_state(cpu).is_inference()
        lengths = Batch((AttnRectangle(0, 2, 0, 2), AttnRectangle(3, 5, 2, 4))).lengths_on(cpu, 2, 5, 4)
    tensors = [lengths.q, lengths.kv, lengths.cumulative_q, lengths.cumulative_kv]
    assert not any(isinstance(x, torch.Tensor) and x.is_inference() for x in tensors)
