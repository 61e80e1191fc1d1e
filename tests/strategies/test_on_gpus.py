"""Strategies on several GPUs: cuDNN's plans in any order, CUDA graphs, and passes that never wait for the GPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ringprof.strategies import create
from ringprof.workload.mask import Mask
from tests.pairs import pairs
from tests.strategies.cases import CASES, Case, worst
from tests.strategies.gpu_ranks import SIZES, needs_two_gpus, run_gpu_ranks
from tests.strategies.test_masks_on_gpu import SEQ, full_inputs, truth_of

pytestmark = [pytest.mark.gpu, needs_two_gpus]
HEAD_DIM = 128
SHAPES = [(1, 8, 8), (2, 8, 2), (3, 8, 4)]
"""Shapes (batch, heads, kv heads)."""


def by_strategy(case: Case, hops: str, full: list[Tensor], causal: bool) -> list[Tensor]:
    carries = "nccl" if case.name in ("ulysses", "megatron", "allgather") else hops
    strategy = create(case.name, kernel="cudnn", hops=carries, **case.params)
    leaves = [strategy.shard(x).requires_grad_() for x in full[:3]]
    out = strategy.attention(*leaves, causal=causal)
    gradients = torch.autograd.grad(out, leaves, strategy.shard(full[3]))
    return [strategy.unshard(x.detach()) for x in (out, *gradients)]


def by_torch(layout: str, full: list[Tensor], causal: bool) -> list[Tensor]:
    """Compute torch's attention on transposed (B, S, H, D) memory, or on (B, H, S, D) memory."""
    turned = [x.transpose(1, 2) for x in full]
    q, k, v, dout = (x.contiguous() if layout == "bhsd" else x for x in turned)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        out = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal, enable_gqa=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    return [x.detach().transpose(1, 2) for x in (out, *gradients)]


def in_random_order(rank: int, size: int, seed: int, choose: Callable[..., Iterable[Any]]) -> list[str]:
    """Run all strategies and torch's attention in one process on mixed shapes and masks; return errors above 2 %.

    ``choose``: `pairs`, or `itertools.product` for every combination.
    """
    draw = random.Random(seed)
    kinds: list[tuple[Case | str, str]] = [("bshd", ""), ("bhsd", "")]
    kinds += [(case, hops) for case in CASES if size in case.worlds for hops in ("nccl", "copy")]
    jobs = list(choose(SHAPES, (True, False), kinds))
    draw.shuffle(jobs)
    known: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    wrong = []
    for index, (shape, causal, (who, hops)) in enumerate(jobs):
        if (shape, causal) not in known:
            full = full_inputs((*shape, HEAD_DIM))
            known[shape, causal] = full, truth_of(full, Mask(causal))
        full, truth = known[shape, causal]
        results = by_torch(who, full, causal) if isinstance(who, str) else by_strategy(who, hops, full, causal)
        error = worst(results, truth)
        # Not "error > 0.02": NaN must not pass.
        if not error < 0.02:
            wrong.append(f"{index}: {who} {hops} {shape} causal={causal}: {error:.2g}")
    return wrong


@pytest.mark.parametrize(("seed", "choose"), [(0, pairs), pytest.param(1, itertools.product, marks=pytest.mark.long)])
@pytest.mark.parametrize("size", SIZES[:1])
def test_cudnn_is_exact_in_any_order_of_calls(size, seed, choose):
    for wrong in run_gpu_ranks(size, in_random_order, size, seed, choose):
        assert wrong == []


ON_TWO = [case for case in CASES if 2 in case.worlds]


def graphed(rank: int, kernels: list[tuple[str, Case]]) -> list[str]:
    """Return the cases whose replayed pass differs from an ordinary one, on inputs set after the capture."""
    wrong = []
    for kernel, case in kernels:
        # Copied hops, which `auto` takes beside cuDNN, cannot be captured.
        strategy = create(case.name, kernel=kernel, hops="nccl", **case.params)
        draws = [full_inputs((1, 8, 4, HEAD_DIM)), [x.flip(1) for x in full_inputs((1, 8, 4, HEAD_DIM))]]
        held = [strategy.shard(x).requires_grad_(i < 3) for i, x in enumerate(draws[0])]

        def once(held: list[Tensor] = held, strategy: Any = strategy) -> list[Tensor]:
            out = strategy.attention(*held[:3])
            return [out.detach(), *torch.autograd.grad(out, held[:3], held[3])]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                once()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = once()
        with torch.no_grad():
            for target, x in zip(held, draws[1], strict=True):
                target.copy_(strategy.shard(x))
        for _ in range(2):
            graph.replay()
        replayed = [x.clone() for x in results]
        expected = once()
        error = worst(replayed, [x.double() for x in expected])
        if not error < 5e-3:
            wrong.append(f"{kernel}, {case}: {error:.2g}")
        torch.cuda.synchronize()
    return wrong


GRAPHED = ["torch-flash", "cudnn"]


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(list(zip(itertools.cycle(GRAPHED), ON_TWO, strict=False)), id="in turn"),
        *(pytest.param([(name, case) for case in ON_TWO], id=name, marks=pytest.mark.long) for name in GRAPHED),
    ],
)
def test_a_pass_can_be_captured_in_a_cuda_graph(kernels):
    for wrong in run_gpu_ranks(2, graphed, kernels):
        assert wrong == []


def without_waiting(rank: int) -> list[str]:
    """Return the cases in which a pass with a gradient through the LSE waits for the GPU after the first calls."""
    waiting = []
    for case in ON_TWO:
        for hops in ("nccl", "copy") if case.name not in ("ulysses", "megatron", "allgather") else ("nccl",):
            strategy = create(case.name, kernel="cudnn", hops=hops, **case.params)
            leaves = [strategy.shard(x).requires_grad_() for x in full_inputs((1, 8, 4, HEAD_DIM))[:3]]
            for turn in range(3):
                torch.cuda.set_sync_debug_mode("error" if turn == 2 else "default")
                try:
                    out, lse = strategy.attention(*leaves, return_lse=True)
                    (out.float().sum() + lse.sum()).backward()
                except RuntimeError as problem:
                    waiting.append(f"{case} {hops}: {problem}")
                torch.cuda.set_sync_debug_mode("default")
    return waiting


def test_forward_and_backward_do_not_synchronize_the_device():
    for waiting in run_gpu_ranks(2, without_waiting):
        assert waiting == []


def documents_without_waiting(rank: int) -> list[str]:
    """Return the layouts in which a pass over packed documents waits for the GPU after the first calls."""
    waiting = []
    for layout in ("packed", "per_document", "dealt", "auto"):
        strategy = create("zigzag", documents_layout=layout)
        strategy.overlaps_last_hop = lambda travelling: True
        documents = [0, SEQ // 8, SEQ // 8 + 24, SEQ // 2, SEQ]
        leaves = [strategy.shard(x, documents=documents).requires_grad_() for x in full_inputs((1, 8, 4, HEAD_DIM))[:3]]
        for turn in range(3):
            torch.cuda.set_sync_debug_mode("error" if turn == 2 else "default")
            try:
                strategy.attention(*leaves, documents=documents).float().sum().backward()
            except RuntimeError as problem:
                waiting.append(f"{layout}: {problem}")
            torch.cuda.set_sync_debug_mode("default")
    return waiting


def test_packed_documents_do_not_synchronize_the_device_in_later_calls():
    for waiting in run_gpu_ranks(2, documents_without_waiting):
        assert waiting == []
