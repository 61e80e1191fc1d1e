"""Recurrences over ranks against the recurrence token by token, forward and backward, in float64."""

from __future__ import annotations

import random

import pytest
import torch

from ringprof.strategies.recurrent.state_strategies import create_recurrent
from tests.strategies.ranks import run_ranks
from tests.strategies.recurrent import oracle
from tests.strategies.recurrent.cases import TOLERANCE, documents_of, errors_of_cases


def check_cases(size: int, seeds: list[int]) -> None:
    results = run_ranks(size, errors_of_cases, size, seeds)[0]
    wrong = [(case, error) for case, error in results if not error < TOLERANCE]
    assert len(results) == len(seeds) and not wrong, wrong[:3]


def test_recurrences_of_one_process_equal_the_oracle() -> None:
    wrong = [(case, error) for case, error in errors_of_cases(0, 1, list(range(40))) if not error < TOLERANCE]
    assert not wrong, wrong[:3]


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3, 4])
def test_recurrences_over_ranks_equal_the_oracle(size: int) -> None:
    check_cases(size, [1000 * size + case for case in range(25)])


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("size", range(1, 9))
def test_two_thousand_recurrences_over_ranks_equal_the_oracle(size: int) -> None:
    check_cases(size, [100_000 * size + case for case in range(250)])


def convolution_errors(rank: int, size: int, seeds: list[int]) -> list[float]:
    strategy, errors = create_recurrent("state-ring", kernel="reference"), []
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        width = draw.choice([1, 2, 4, 4])
        local = draw.randrange(max(width - 1, 1), 12)
        documents = documents_of(draw, local, size)
        seq = local * size
        x, weight = torch.randn(2, seq, 3, dtype=torch.float64), torch.randn(3, width, dtype=torch.float64)
        bias = torch.randn(3, dtype=torch.float64) if draw.random() < 0.5 else None
        grad = torch.randn(2, seq, 3, dtype=torch.float64)
        own, own_weight = strategy.shard(x).requires_grad_(), weight.clone().requires_grad_()
        out = strategy.causal_conv1d(own, own_weight, bias, cu_seqlens=documents)
        (out * strategy.shard(grad)).sum().backward()
        assert own.grad is not None and own_weight.grad is not None
        actual = strategy.unshard(out), strategy.unshard(own.grad), sum(strategy.comm.all_gather(own_weight.grad))
        x.requires_grad_()
        weight.requires_grad_()
        expected = oracle.convolution(x, weight, bias, documents or [0, seq])
        (expected * grad).sum().backward()
        errors += [
            float((a - b).detach().abs().max()) for a, b in zip(actual, (expected, x.grad, weight.grad), strict=True)
        ]
    return errors


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2, 4])
def test_convolution_over_ranks_equals_the_convolution_of_each_document(size: int) -> None:
    for errors in run_ranks(size, convolution_errors, size, list(range(40))):
        assert max(errors) < 1e-12
