"""Peers against float64: the adapters with stand-ins for their packages, and torch's own ring."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.tensor.experimental
from torch import Tensor

from ringprof.strategies import UnknownName, create, find, parameters, peer_names
from ringprof.strategies.kernels.flash_attn import FlashAttnKernel
from ringprof.strategies.kernels.newer_flash_attn import FlashAttn3Kernel
from ringprof.strategies.kernels.torch_kernels import CudnnKernel
from ringprof.strategies.peers.transformer_engine import (
    TransformerEngineA2A,
    TransformerEngineA2AP2P,
    TransformerEngineP2P,
    select_backend,
)
from ringprof.workload.mask import Mask
from tests.strategies.cases import Case, WorkloadShard, dense, over_the_ranks, worst
from tests.strategies.fake_packages import install
from tests.strategies.ranks import refusal, run_ranks

PEERS = [
    Case("ring-flash-attn/ring"),
    Case("ring-flash-attn/zigzag"),
    Case("ring-flash-attn/stripe"),
    Case("ring-flash-attn/llama3"),
    Case("ring-flash-attn/llama3", {"heads_k_stride": 2}),
    Case("yunchang/ulysses"),
    Case("yunchang/usp"),
    Case("yunchang/usp", {"ulysses_degree": 2, "placement": "ring-first"}),
    Case("yunchang/usp", {"ring_degree": 4}, (4,)),
    Case("transformer-engine/p2p"),
    Case("transformer-engine/a2a"),
    Case("transformer-engine/all_gather"),
    Case("transformer-engine/a2a+p2p"),
    Case("transformer-engine/a2a+p2p", {"ulysses_degree": 1}),
]
FULL = ["ring-flash-attn/ring", "transformer-engine/p2p"]
"""Peers that support a full mask, too."""


def _pretend() -> None:
    """Install the stand-ins. The kernels of the real packages are looked up, and never called."""
    install()
    for kernel in (FlashAttnKernel, FlashAttn3Kernel, CudnnKernel):
        kernel.why_unsupported = classmethod(lambda *_: None)  # type: ignore[assignment]


def _errors(rank: int, cases: list[Case], problem: WorkloadShard) -> dict[str, float]:
    _pretend()
    return {str(case): worst(over_the_ranks(case, problem), dense(problem)) for case in cases}


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
def test_every_adapter_gives_dense_attention(world: int) -> None:
    cases = [case for case in PEERS if world in case.worlds]
    problem = WorkloadShard(seq=48, heads=8, kv_heads=4, kernel="auto", seed=5)
    (errors, *_) = run_ranks(world, _errors, cases, problem)
    assert {name: error for name, error in errors.items() if not error < 1e-12} == {}
    assert len(errors) == len(cases)


@pytest.mark.processes
def test_a_full_mask_and_a_batch_are_passed_on() -> None:
    problem = WorkloadShard(seq=32, batch=2, kernel="auto", causal=False)
    (errors, _) = run_ranks(2, _errors, [Case(name) for name in FULL], problem)
    assert max(errors.values()) < 1e-12


def _torch_errors(rank: int, problem: WorkloadShard) -> list[float]:
    rings = [Case("torch-cp", {"rotate": rotate}) for rotate in ("allgather", "alltoall")]
    return [worst(over_the_ranks(ring, problem), dense(problem)) for ring in rings]


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_torch_context_parallel_gives_dense_attention(world: int, causal: bool) -> None:
    problem = WorkloadShard(seq=64, batch=2, causal=causal, dtype=torch.float32, kernel="cpu-flash")
    (errors, *_) = run_ranks(world, _torch_errors, problem)
    # It merges in float32, whose unit roundoff is 6e-8.
    assert max(errors) < 1e-6


def _options_left(rank: int) -> Any:
    from torch.distributed.tensor.experimental._attention import _cp_options

    before = _cp_options.enable_load_balance, _cp_options.rotate_method
    over_the_ranks(Case("torch-cp", {"rotate": "alltoall"}), WorkloadShard(seq=16, causal=False))
    return before == (_cp_options.enable_load_balance, _cp_options.rotate_method)


@pytest.mark.processes
def test_torch_context_parallel_options_are_restored() -> None:
    assert run_ranks(2, _options_left) == [True, True]


@pytest.mark.parametrize(("rotate", "method"), [("allgather", "ALL_GATHER"), ("alltoall", "ALL_TO_ALL")])
def test_torch_context_parallel_uses_the_rotate_method(rotate: str, method: str) -> None:
    with create("torch-cp", rotate=rotate)._options(causal=False) as ring:
        assert ring._cp_options.rotate_method is ring._RotateMethod[method]


TRANSFORMER_ENGINE = [Case(f"transformer-engine/{kind}") for kind in ("p2p", "a2a", "all_gather", "a2a+p2p")]
PACKED = [Mask.of(documents=[0, 8, 48, 64]), Mask.of(causal=False, documents=[0, 24, 64])]
WINDOWS = [Mask.of(window=(6, 0)), Mask.of(documents=[0, 40, 64], window=(8, 0))]


def _masked_errors(rank: int, problem: WorkloadShard, truths: dict[Mask, list[Tensor]]) -> dict[str, float]:
    _pretend()
    return {
        f"{case} {mask}": worst(over_the_ranks(case, problem, mask), truth)
        for mask, truth in truths.items()
        for case in (TRANSFORMER_ENGINE[1:3] if mask.windowed else TRANSFORMER_ENGINE)
    }


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
def test_transformer_engine_takes_packed_documents_and_windows(world: int) -> None:
    problem = WorkloadShard(seq=64, batch=2, heads=8, kv_heads=4, kernel="auto")
    truths = {mask: dense(problem, mask) for mask in [*PACKED, *WINDOWS]}
    (errors, *_) = run_ranks(world, _masked_errors, problem, truths)
    assert {name: error for name, error in errors.items() if not error < 1e-12} == {}
    assert len(errors) == 2 * 4 + 2 * 2


@pytest.mark.parametrize(
    ("name", "mask", "reason"),
    [
        ("p2p", Mask.of(window=(6, 0)), "no such window"),
        ("a2a+p2p", Mask.of(window=(6, 0)), "no such window"),
        ("a2a", Mask.of(causal=False, window=(6, 6)), "no such window"),
        ("a2a", Mask.of(window=(6, 0), prefix=2), "prefix"),
        ("p2p", Mask.of(documents=[0, 6, 64]), "multiple of 4 tokens on 2 ranks: one has 6"),
        ("p2p", Mask.of(documents=[0, 8, 60]), "60"),
        ("a2a", Mask.of(documents=[0, 8, 64], window=(6, 0)), None),
        ("p2p", Mask.of(documents=[0, 8, 64]), None),
    ],
)
def test_transformer_engine_masks_that_are_refused(name: str, mask: Mask, reason: str | None) -> None:
    kind: Any = {"p2p": TransformerEngineP2P, "a2a": TransformerEngineA2A, "a2a+p2p": TransformerEngineA2AP2P}[name]
    refused = kind.why_mask_unsupported(mask, 64, 2)
    assert refused is None if reason is None else reason in refused


def test_transformer_engine_balances_causal_work() -> None:
    for kind in (TransformerEngineP2P, TransformerEngineA2A, TransformerEngineA2AP2P):
        assert kind.imbalance(4, causal=True) == 1.0


@pytest.mark.parametrize(
    ("kernel", "enabled"),
    [("cudnn", "FUSED_ATTN"), ("flash-attn", "FLASH_ATTN_V2"), ("flash-attn-3", "FLASH_ATTN_V3")],
)
def test_transformer_engine_backend_is_set_by_environment(
    kernel: str, enabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("FUSED_ATTN", "FLASH_ATTN", "FLASH_ATTN_V2", "FLASH_ATTN_V3", "FLASH_ATTN_V4", "UNFUSED_ATTN")
    for name in (*names, "ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.setenv(f"NVTE_{name}", "unset")
    chosen: dict[str, bool] = {}
    module = SimpleNamespace(_attention_backends=chosen)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.attention.dot_product_attention", module)
    select_backend(kernel, deterministic=True)
    on = {name for name in names if os.environ[f"NVTE_{name}"] == "1"}
    assert on == ({enabled} if kernel == "cudnn" else {enabled, "FLASH_ATTN"})
    assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    # The package is told to choose again where the environment changed, and only there.
    assert chosen.pop("backend_selection_requires_update")
    select_backend(kernel, deterministic=True)
    assert not chosen


def test_peers_are_deterministic_only_on_request() -> None:
    for name in peer_names():
        module, _, peer = find(name).target.partition(":")
        (default,) = (
            parameter.default
            for parameter in parameters(getattr(import_module(module), peer))
            if parameter.name == "deterministic"
        )
        assert default is False, name


def _refusals(rank: int) -> list[str]:
    _pretend()
    calls: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
        ("ring-flash-attn/zigzag", {}, {"causal": False}, 1),
        ("ring-flash-attn/ring", {}, {"return_lse": True}, 1),
        ("ring-flash-attn/llama3", {}, {}, 2),
        ("ring-flash-attn/llama3", {"heads_k_stride": 3}, {}, 1),
        ("transformer-engine/a2a", {}, {}, 1),
    ]
    messages = []
    for name, params, options, batch in calls:
        strategy = create(name, **params)
        q, k, v = (torch.zeros(batch, 8, heads, 8, dtype=torch.bfloat16) for heads in (3, 1, 1))
        messages.append(refusal(strategy.attention, q, k, v, **options))
    return messages


@pytest.mark.processes
def test_unsupported_peer_options_are_a_one_line_error() -> None:
    (said, _) = run_ranks(2, _refusals)
    for line, part in zip(
        said,
        ["a causal mask only", "return_lse", "one sequence at a time", "heads_k_stride 3", "divide 3 heads"],
        strict=True,
    ):
        assert part in line and "\n" not in line


@pytest.mark.parametrize("name", peer_names())
def test_missing_package_error_shows_how_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringprof.strategies.catalog.find_spec", lambda package: None)
    if name == "torch-cp":
        assert find(name).missing() is None
        return
    with pytest.raises(UnknownName, match=r"needs .*: (pip install|build)"):
        create(name)
