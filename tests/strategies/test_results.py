"""Output and gradients of every strategy and option against dense float64 attention, on real ranks."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from ringprof.strategies import algorithms, create, find, names, parameters, peer_names, peers
from ringprof.strategies.algorithms.cached import Cached
from ringprof.strategies.base import Strategy
from ringprof.strategies.registry import for_inference
from ringprof.strategies.transport.torch_transport import TorchTransport
from tests.strategies.cases import (
    CASES,
    Case,
    WorkloadShard,
    attend,
    dense,
    inputs,
    over_the_ranks,
    relative_error,
    shares,
    worst,
)
from tests.strategies.ranks import run_ranks

PROBLEMS = [
    WorkloadShard(seq=32),
    WorkloadShard(seq=32, causal=False),
    WorkloadShard(seq=48, batch=2, heads=4, kv_heads=4, causal=True),
    WorkloadShard(seq=16, heads=4, kv_heads=4, causal=False),
    # One kv head for all, and kv heads that no Ulysses degree divides.
    WorkloadShard(seq=16, heads=4, kv_heads=1),
    WorkloadShard(seq=16, batch=2, heads=12, kv_heads=3),
]


def errors_of(rank: int, cases: list[Case], problems: list[WorkloadShard]) -> list[tuple[str, float]]:
    """Return the largest error of out, dq, dk and dv for every case and problem."""
    return [
        (f"{case} {problem}", worst(over_the_ranks(case, problem), dense(problem)))
        for case in cases
        for problem in problems
    ]


def check(world: int, problems: list[WorkloadShard], bound: float) -> None:
    cases = [case for case in CASES if world in case.worlds]
    for results in run_ranks(world, errors_of, cases, problems):
        for label, error in results:
            assert error <= bound, label


ON_8_RANKS = [
    WorkloadShard(seq=64), WorkloadShard(seq=64, causal=False), WorkloadShard(seq=32, batch=2, heads=8, kv_heads=2),
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "problems"),
    [(1, PROBLEMS), (2, PROBLEMS), (4, PROBLEMS), pytest.param(8, ON_8_RANKS, marks=pytest.mark.long)],
    ids=str,
)
def test_every_strategy_is_exact_in_float64(world, problems):
    # What differs from the dense formula is the order of sums: some tens of roundings of 1e-16.
    check(world, problems, 1e-13)


@pytest.mark.processes
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_rounding_error_is_near_that_of_one_device(dtype, unit):
    """The error is at most 3 times that of one call of the same kernel, plus a rounding at each hop."""
    problem = WorkloadShard(seq=128, heads=4, kv_heads=2, head_dim=16, dtype=dtype, kernel="cpu-flash")
    alone = rounding_of(0, [Case("ring")], problem)[0]
    cases = [case for case in CASES if 4 in case.worlds]
    for case, errors in zip(cases, run_ranks(4, rounding_of, cases, problem)[0], strict=True):
        # On 4 ranks a gradient is rounded to the input's type at most 4 times, each by at most a unit.
        on_the_wire = 4 * unit**2 / 3
        for error, error_alone in zip(errors, alone, strict=True):
            assert error <= 3 * (error_alone**2 + on_the_wire) ** 0.5, str(case)


def rounding_of(rank: int, cases: list[Case], problem: WorkloadShard) -> list[list[float]]:
    truth = dense(problem)
    return [
        [relative_error(value, exact) for value, exact in zip(over_the_ranks(case, problem), truth, strict=True)]
        for case in cases
    ]


def same_bits(rank: int, problem: WorkloadShard) -> list[str]:
    differing = []
    for case in [case for case in CASES if 4 in case.worlds]:
        first, second = (over_the_ranks(case, problem) for _ in range(2))
        if not all(torch.equal(x, y) for x, y in zip(first, second, strict=True)):
            differing.append(str(case))
    return differing


@pytest.mark.processes
def test_a_second_call_gives_the_same_bits():
    problem = WorkloadShard(seq=64, dtype=torch.bfloat16, head_dim=16, kernel="cpu-flash")
    assert run_ranks(4, same_bits, problem) == [[]] * 4


# --- the LSE ----------------------------------------------------------------------------------------


CPU_FLASH = "cpu-flash", torch.float32, 1e-5


def lse_gradients(rank: int, cases: list[Case], problem: WorkloadShard, loss_of: str) -> list[tuple[str, float]]:
    """Return the errors of dq, dk and dv where the loss is sum(out · dout) + sum(weights · lse), or a part of it."""
    full = inputs(problem)
    weights = torch.randn(full[0].shape[:3], generator=torch.Generator().manual_seed(9)).transpose(1, 2).double()
    leaves = [tensor.double().requires_grad_() for tensor in full[:3]]
    out, lse = attend(leaves[0], leaves[1], leaves[2])
    has_output, errors = loss_of != "LSE of rank 1", []
    for case in cases:
        strategy = create(case.name, kernel=problem.kernel, **case.params)
        of_rank_1 = strategy.layout.positions(problem.seq, dist.get_world_size(), 1)
        tokens = slice(None) if loss_of == "all" else of_rank_1
        loss = has_output * (out * full[3].double()).sum() + (lse * weights)[..., tokens].sum()
        truth = torch.autograd.grad(loss, leaves, retain_graph=True)
        qkv, dout = shares(strategy, full)
        local_out, local_lse = strategy.attention(*qkv, return_lse=True)
        of_lse = (local_lse * strategy.shard(weights, dim=2)).sum()
        # The LSE is in no graph of a rank whose loss lacks it.
        terms = [(local_out * dout).sum()] if has_output else []
        terms += [of_lse] if loss_of == "all" or rank == 1 else []
        (torch.stack(terms).sum() if terms else 0 * of_lse).backward()
        pairs = zip([strategy.unshard(x.grad) for x in qkv], truth, strict=True)
        # dv is 0 where dO is.
        errors += [(str(case), relative_error(x, y) if y.any() else float(x.abs().max())) for x, y in pairs]
    return errors


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "kernel", "dtype", "bound"),
    [(n, kernel, *limits) for n in (2, 4) for kernel, *limits in (("reference", torch.float64, 1e-13), CPU_FLASH)],
)
@pytest.mark.parametrize("loss_of", ["all", "output, and LSE of rank 1", "LSE of rank 1"])
def test_gradient_through_the_lse_is_exact(world, kernel, dtype, bound, loss_of):
    problem = WorkloadShard(seq=32, kernel=kernel, dtype=dtype)
    cases = [case for case in CASES if world in case.worlds]
    for errors in run_ranks(world, lse_gradients, cases, problem, loss_of):
        assert [(case, error) for case, error in errors if not error <= bound] == []


@pytest.mark.processes
def test_sending_delta_is_as_exact_as_sending_the_output():
    """Burst is as exact with delta on the wire as with O, through a kernel that takes no delta."""
    for dtype in (torch.float32, torch.bfloat16):
        problem = WorkloadShard(seq=128, head_dim=32, dtype=dtype, kernel="cpu-flash")
        pair = [Case("burst"), Case("burst", {"optimized_backward": False})]
        with_delta, with_out = run_ranks(2, rounding_of, pair, problem)[0]
        for error, other_error in zip(with_delta[1:], with_out[1:], strict=True):
            assert error <= 1.5 * other_error


NOT_TRIED_HERE = {"deterministic", "double_ring", "documents_layout"}
"""Options tested elsewhere: the first in test_gpu.py, the last, the layout of packed documents, in test_masks.py."""


def test_every_bundled_strategy_is_among_the_cases_with_each_of_its_options():
    assert {case.name for case in CASES} == set(names())
    for name in names():
        options = {parameter.name for parameter in parameters(find(name).load())} - NOT_TRIED_HERE
        tried = {key for case in CASES if case.name == name for key in case.params}
        if name in ("zigzag", "stripe"):
            continue  # the ring with another layout
        assert tried >= options, name


def test_every_strategy_on_disk_is_registered():
    registered = {find(name).load() for name in (*names(), *for_inference())}
    on_disk = set()
    for module in pkgutil.iter_modules(algorithms.__path__):
        on_disk |= _strategies_in(f"{algorithms.__name__}.{module.name}")
    assert on_disk - {Strategy, Cached} == registered


def test_every_adapter_on_disk_is_registered():
    registered = {find(name).target for name in peer_names()}
    on_disk = set()
    for module in pkgutil.iter_modules(peers.__path__):
        own = f"{peers.__name__}.{module.name}"
        classes = (item for item in _strategies_in(own) if item.__module__ == own)
        on_disk |= {f"{own}:{item.__name__}" for item in classes if not item.__name__.startswith("_")}
    assert on_disk - {f"{peers.__name__}.call:PeerStrategy"} == registered


def _strategies_in(module: str) -> set[type[Strategy]]:
    loaded = (item for item in vars(import_module(module)).values() if isinstance(item, type))
    return {item for item in loaded if issubclass(item, Strategy)}


def test_one_rank_needs_no_process_group():
    problem = replace(PROBLEMS[0], seq=20)
    for name in ("ring", "zigzag", "burst", "megatron"):
        assert worst(over_the_ranks(Case(name), problem), dense(problem)) < 1e-13


def group_timeout(rank: int) -> float:
    transport = create("ring").kv_ring.transport
    assert isinstance(transport, TorchTransport)
    return float(transport.group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


@pytest.mark.processes
def test_the_groups_of_a_ring_take_the_default_groups_timeout():
    # run_ranks gives its group 600 s; gloo's own default is 30 minutes.
    assert run_ranks(2, group_timeout) == [600.0, 600.0]
