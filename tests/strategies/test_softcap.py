"""Softcap and sinks in every strategy, against torch's own autograd over the plain formula in float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringprof.strategies import Unsupported, create, find, names
from ringprof.strategies.kernels import flash_attn, proof
from ringprof.strategies.kernels.flash_attn import FlashAttnKernel
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import KERNELS, choose_kernel
from ringprof.workload.mask import Mask
from tests.strategies.cases import WorkloadShard, call, dense, examples, inputs, relative_error, shares, worst
from tests.strategies.ranks import run_ranks

DOCUMENTS = Mask.of(documents=[0, 7, 40, 64], window=(9, 0))


def errors(
    rank: int, kernel: str, problem: WorkloadShard, softcap: float, sinks: Tensor, truths: dict[Mask, list[Tensor]]
) -> list[tuple[str, float]]:
    errors_ = []
    for mask, truth in truths.items():
        for name in names():
            if not mask.plain and not find(name).load().takes_masks:
                continue
            strategy, held = create(name, kernel=kernel), {"documents": mask.documents}
            qkv, dout = shares(strategy, inputs(problem), mask)
            leaves = [*qkv, sinks.clone().requires_grad_()]
            how = held | {"window_size": mask.window, "softcap": softcap, "sinks": leaves[3]}
            out, lse = strategy.attention(*qkv, causal=mask.causal, return_lse=True, **how)
            out.backward(dout)
            torch.distributed.all_reduce(leaves[3].grad)
            whole = [strategy.unshard(x.detach(), **held) for x in (out, *(leaf.grad for leaf in qkv))]
            whole += [leaves[3].grad, strategy.unshard(lse.detach(), 2, **held)]
            errors_.append((f"{name}, {mask}", worst(whole, truth)))
    return errors_


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "kernel", "softcap"),
    [(4, "reference", 1.5), (2, "flex", 1.5), (4, "reference", 0.0), (4, "cpu-flash", 0.0)],
)
def test_softcap_and_sinks_are_exact_in_every_strategy(world: int, kernel: str, softcap: float) -> None:
    """The softcap is as large as some scores: a linear stretch would not show it."""
    problem, sinks = WorkloadShard(seq=64, batch=2), torch.tensor([-1.5, 0.0, 0.7, 3.0], dtype=torch.float64)
    truths = {mask: dense(problem, mask, softcap=softcap, sinks=sinks, with_lse=True) for mask in (Mask(), DOCUMENTS)}
    for label, error in run_ranks(world, errors, kernel, problem, softcap, sinks, truths)[0]:
        assert error < 1e-12, label


def test_limits_of_large_and_small_softcap() -> None:
    problem = WorkloadShard(seq=16)
    q, k, v, _ = inputs(problem)
    strategy = create("zigzag", kernel="reference")
    plain = strategy.attention(q, k, v)
    assert relative_error(strategy.attention(q, k, v, softcap=1e7), plain) < 1e-12
    means = v.repeat_interleave(2, 2).cumsum(1) / torch.arange(1, 17).view(1, -1, 1, 1)
    assert relative_error(strategy.attention(q, k, v, softcap=1e-9), means) < 1e-8


@examples(8)
@given(st.floats(0.05, 60), st.integers(0, 99), st.integers(1, 12), st.booleans())
def test_random_softcaps_are_exact(softcap: float, seed: int, quarter: int, causal: bool) -> None:
    problem = WorkloadShard(seq=4 * quarter, seed=seed, head_dim=3, causal=causal)
    truth = dense(problem, softcap=softcap)
    size = max(float(x.norm()) for x in truth)
    for name in names():
        results = call(create(name, kernel="reference"), problem, softcap=softcap)
        off = max(float((value - exact).norm()) for value, exact in zip(results, truth, strict=True))
        assert off < 1e-12 * size, name


def test_nan_stays_in_its_document_with_softcap() -> None:
    problem = WorkloadShard(seq=64)
    strategy = create("ring", kernel="reference")
    results = []
    for value in (0.0, float("nan")):
        full = inputs(problem)
        for x in full:
            x[:, 7:40] = value
        results.append(call(strategy, problem, Mask.of(documents=[0, 7, 40, 64]), full, softcap=2.0))
    for before, after in zip(*results, strict=True):
        for rows in (slice(0, 7), slice(40, 64)):
            assert torch.equal(before[:, rows], after[:, rows])


@pytest.mark.parametrize("softcap", [-1.0, float("inf"), float("nan")])
def test_invalid_softcaps_are_refused(softcap: float) -> None:
    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(Unsupported, match="a positive number, or 0 for none"):
        create("ring", kernel="reference").attention(x, x, x, softcap=softcap)


def test_kernels_without_softcap_are_refused_and_skipped_by_auto() -> None:
    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(Unsupported, match=r"'cpu-flash' is not available: it takes no softcap .*: flex, reference\)"):
        create("ring", kernel="cpu-flash").attention(x, x, x, softcap=5.0)
    with pytest.raises(Unsupported, match="kernel 'cudnn' takes no softcap"):
        KERNELS["cudnn"](softcap=5.0)
    cpu = torch.device("cpu")
    assert choose_kernel("auto", cpu, torch.float32, 64).name == "cpu-flash"
    assert choose_kernel("auto", cpu, torch.float32, 64, softcap=5.0).name == "flex"


def test_strategy_computes_with_and_without_softcap() -> None:
    strategy = create("zigzag", kernel="reference")
    x = torch.randn(1, 8, 2, 4)
    capped = strategy.attention(x, x, x, softcap=0.5)
    assert not torch.allclose(capped, strategy.attention(x, x, x))
    assert torch.equal(capped, strategy.attention(x, x, x, softcap=0.5))
    assert len(strategy.kernels()) == 2


@pytest.mark.parametrize("build", ["whole", "without", "old"])
def test_a_build_of_flash_attn_2_may_lack_the_softcap(
    build: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fwd(
        q: Tensor, k: Tensor, v: Tensor, out: None, alibi: None, p: float, scale: float, causal: bool, *rest: Any
    ) -> object:
        if build == "old" and len(rest) > 4:
            raise TypeError("fwd(): incompatible function arguments")
        if build == "without" and rest[2]:
            raise RuntimeError("This flash attention build does not support softcap.")
        return ReferenceKernel(softcap=rest[2]).forward(q, k, v, scale=scale, causal=causal)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "_verdicts", {})
    monkeypatch.setattr(flash_attn, "_flash_attn", lambda: SimpleNamespace(fwd=fwd))
    monkeypatch.setattr(FlashAttnKernel, "missing", classmethod(lambda cls, device: None))
    case = proof.Case("full", torch.bfloat16, 64, 64, 1, softcap=5.0, backward=False)
    error = proof.prove(FlashAttnKernel, case, torch.device("cpu"))
    reasons = {"whole": None, "without": "RuntimeError: This flash", "old": "TypeError: fwd"}
    assert error is None if build == "whole" else f"softcap 5, forward only: {reasons[build]}" in str(error)
