"""Packed documents and windows on GPUs, against float64: kernels, and strategies over both transports of hops."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.strategies import Unsupported, create
from ringprof.strategies.kernels.reference import MaskedReference
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.strategies.masks.sharded_mask import sharded_mask_of
from ringprof.workload.mask import Mask
from tests.pairs import pairs
from tests.strategies.cases import Case, worst
from tests.strategies.gpu_ranks import needs_two_gpus, run_gpu_ranks, why_kernel_is_left_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Packages of kernels warn of each other.
    pytest.mark.filterwarnings("default"),
]
SEQ = 1024
Problem = tuple[int, int, int, int]
"""(batch, heads, kv heads, head_dim)."""
PROBLEMS: list[Problem] = [(1, 8, 8, 128), (2, 8, 2, 128), (1, 12, 4, 128), (2, 6, 1, 80), (3, 8, 1, 80)]
"""Problems in which one packed buffer and a buffer per tensor differ in size, also for parts of the rows."""
DOCUMENTS = Mask.of(documents=[0, 1, 8, 300, 300, 556, 1024])
MASKS = [
    DOCUMENTS,
    Mask.of(causal=False, documents=[0, 130, 1024]),
    Mask.of(window=(63, 0)),
    Mask.of(window=(600, 0)),
    Mask.of(causal=False, window=(40, 70)),
    Mask.of(documents=[0, 496, 590, 1024]),
    Mask.of(documents=[0, 5, 500, 1024], window=(127, 0)),
    Mask.of(window=(200, 0), prefix=70),
    Mask.of(documents=[0, 5, 500, 1024], window=(127, 0), prefix=3),
]
CASES = [
    Case("ring"), Case("zigzag"), Case("zigzag", {"documents_layout": "per_document"}),
    Case("zigzag", {"documents_layout": "dealt"}), Case("stripe"), Case("ulysses"), Case("usp"),
    Case("usp", {"ulysses_degree": 1}), Case("usp", {"ulysses_degree": 1, "layout": "stripe"}), Case("allgather"),
    Case("allgather", {"layout": "zigzag", "documents_layout": "per_document"}), Case("double-ring"),
    Case("double-ring", {"ring_window": 1}), Case("double-ring", {"documents_layout": "packed"}), Case("megatron"),
    Case("megatron", {"documents_layout": "per_document"}), Case("burst"), Case("burst", {"ring_window": 1}),
    Case("burst", {"optimized_backward": False}), Case("burst", {"grad_wire": "fp32"}),
    *(Case("burst", {"documents_layout": layout}) for layout in ("packed", "per_document", "dealt")),
    Case("burst", {"optimized_backward": False, "documents_layout": "packed"}),
]  # fmt: skip
WITHOUT_COPIES = ("ulysses", "allgather", "megatron")
"""Strategies of which nothing travels by copy engine."""


def full_inputs(problem: Problem) -> list[Tensor]:
    """Return q, k, v and dout of the whole sequence, equal on every rank."""
    batch, heads, kv_heads, head_dim = problem
    generator = torch.Generator("cuda").manual_seed(batch)
    shapes = [(batch, SEQ, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]


def truth_of(full: list[Tensor], mask: Mask, softcap: float = 0.0) -> list[Tensor]:
    q, k, v, dout = (x.double() for x in full)
    kernel, how = MaskedReference(mask, softcap=softcap), {"scale": q.shape[-1] ** -0.5, "causal": mask.causal}
    out, lse = kernel.forward(q, k, v, **how)
    return [out, *kernel.backward(dout, q, k, v, lse, out=out, **how)]


VARLEN = ("flash-attn-3", "flash-attn", "torch-flash")
SOFTCAP = 2.0
"""Softcap that is no larger than some scores."""
KERNELS_AND_SOFTCAPS = [
    (name, softcap)
    for name in KERNELS
    for softcap in (0.0, SOFTCAP)
    if name not in ("cpu-flash", "reference") and (not softcap or KERNELS[name].takes_softcap)
]


@pytest.mark.parametrize(("name", "softcap"), [pair for pair in KERNELS_AND_SOFTCAPS if pair[0] != "flex"])
def test_kernel_on_mask_blocks_agrees_with_float64(name: str, softcap: float) -> None:
    check_mask_blocks(name, softcap, [PROBLEMS[1], PROBLEMS[4]] if name == "cudnn" else PROBLEMS)


def check_mask_blocks(name: str, softcap: float, problems: list[Problem]) -> None:
    """Compare one kernel with float64 on the blocks of all masks; skip the test where it does not run here."""
    reason = why_kernel_is_left_out(name)
    if reason:
        pytest.skip(f"{name} {reason}")
    wrong = []
    for problem in problems:
        if why_kernel_is_left_out(name, head_dim=problem[3]):
            continue
        full = full_inputs(problem)
        q, k, v, dout = full
        for mask in MASKS:
            block = sharded_mask_of(mask, LAYOUTS["contiguous"], 1, SEQ).block(0, 0)
            assert block is not None and block.parts is not None
            kernel = KERNELS[name](softcap=softcap)
            if block.parts.bands and not kernel.takes_windows:
                continue
            how = {"scale": problem[3] ** -0.5, "causal": False, "parts": block.parts}
            try:
                out, lse = kernel.forward(q, k, v, **how)
            except RuntimeError as error:
                if softcap and "softcap" in str(error):
                    pytest.skip(f"this build of {name} has no softcap")
                raise
            gradients = kernel.backward(dout, q, k, v, lse, out=out.to(q.dtype), **how)
            off = worst([out, *gradients], truth_of(full, mask, softcap))
            # Not "off > 0.02": NaN must not pass.
            if not off < 0.02:
                wrong.append(f"{name}, {problem}, {mask}: {off}")
    assert not wrong


Row = tuple[Case, str, tuple[str, Problem], Mask, float]
"""One call of a strategy: (case, hops, (kernel, problem), mask, softcap)."""
Options = tuple[list[Case], list[tuple[str, Problem]], list[Mask], list[float]]
"""Strategies, kernels with problems, masks and softcaps of which calls are combined, with both transports of hops."""


def error_of(strategy: Any, problem: Problem, mask: Mask, softcap: float = 0.0) -> float:
    """Return the largest relative error of the output and the gradients of one call; 0 where it is refused."""
    full, share = full_inputs(problem), {"documents": mask.documents}
    leaves = [strategy.shard(x, **share).requires_grad_() for x in full[:3]]
    how = {"causal": mask.causal, "window_size": mask.window, "prefix": mask.prefix, "softcap": softcap}
    try:
        out = strategy.attention(*leaves, **how, **share)
    except Unsupported as refusal:
        assert mask.windowed and "takes no sliding windows" in str(refusal)
        return 0.0
    gradients = torch.autograd.grad(out, leaves, strategy.shard(full[3], **share))
    return worst([strategy.unshard(x, **share) for x in (out, *gradients)], truth_of(full, mask, softcap))


def wrong_on_a_rank(rank: int, rows: list[Row]) -> list[str]:
    wrong, began, strategies = [], time.perf_counter(), {}
    for index, (case, hops, (kernel, problem), mask, softcap) in enumerate(rows):
        key = f"{case}, {hops}, {kernel}"
        if key not in strategies:
            strategies[key] = create(case.name, kernel=kernel, hops=hops, **case.params)
        off = error_of(strategies[key], problem, mask, softcap)
        if not off < 0.02:
            wrong.append(f"{key}, {problem}, {mask}, softcap {softcap}: {off}")
        if rank == 0 and (index + 1 == len(rows) or case != rows[index + 1][0]):
            print(f"{case}: {time.perf_counter() - began:.1f} s", flush=True)
    return wrong


def rows_of(options: Options, choose: Callable[..., Iterable[Any]] = pairs) -> list[Row]:
    """Return the calls that ``choose`` combines, for kernels that run here; skip the test where there is none."""
    cases, problems, masks, softcaps = options
    reasons = {(kernel, problem): why_kernel_is_left_out(kernel, head_dim=problem[3]) for kernel, problem in problems}
    problems = [(kernel, problem) for (kernel, problem), reason in reasons.items() if reason is None]
    if not problems:
        pytest.skip(" and ".join({f"{kernel} {reason}" for (kernel, _), reason in reasons.items()}))
    rows = choose(cases, ("nccl", "copy"), problems, masks, softcaps)
    return [row for row in rows if row[1] == "nccl" or row[0].name not in WITHOUT_COPIES]


VARLEN_OPTIONS: Options = (CASES, [(kernel, problem) for kernel in VARLEN for problem in PROBLEMS], MASKS, [0.0])
# It makes a plan for every length: seconds each, so few of them.
CUDNN_OPTIONS: Options = (
    [Case("zigzag"), Case("burst")], [("cudnn", PROBLEMS[1]), ("cudnn", PROBLEMS[4])], [DOCUMENTS], [0.0]
)  # fmt: skip


@needs_two_gpus
@pytest.mark.parametrize("options", [VARLEN_OPTIONS, CUDNN_OPTIONS], ids=["varlen", "cudnn"])
def test_masked_strategies_are_exact_on_two_gpus(options: Options) -> None:
    assert run_gpu_ranks(2, wrong_on_a_rank, rows_of(options)) == [[], []]


@needs_two_gpus
@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_masks_and_problems_of_a_strategy_are_exact_on_two_gpus(case: Case) -> None:
    rows = rows_of(([case], *VARLEN_OPTIONS[1:]), itertools.product)
    assert run_gpu_ranks(2, wrong_on_a_rank, rows) == [[], []]


def bits(rank: int) -> list[str]:
    """Return the tensors in which a change of one document changes bits of another, with a deterministic kernel."""
    full, leaking = full_inputs((1, 8, 2, 128)), []
    inside = slice(300, 556)
    for case in CASES:
        strategy = create(case.name, kernel="flash-attn", deterministic=True, **case.params)
        results = []
        for value in (1.0, float("nan"), 3.0):
            changed = [x.clone() for x in full]
            for x in changed:
                x[:, inside].fill_(value)
            share = {"documents": DOCUMENTS.documents}
            leaves = [strategy.shard(x, **share).requires_grad_() for x in changed[:3]]
            out = strategy.attention(*leaves, **share)
            gradients = torch.autograd.grad(out, leaves, strategy.shard(changed[3], **share))
            results.append([strategy.unshard(x, **share) for x in (out, *gradients)])
        for other in results[1:]:
            for name, before, after in zip(("out", "dq", "dk", "dv"), results[0], other, strict=True):
                rows = [slice(0, 300), slice(556, SEQ)]
                if not all(torch.equal(before[:, part], after[:, part]) for part in rows):
                    leaking.append(f"{case}: {name}")
    return leaking


@needs_two_gpus
def test_values_of_one_document_do_not_change_another() -> None:
    if KERNELS["flash-attn"].missing(torch.device("cuda")):
        pytest.skip("flash-attn is not here")
    assert run_gpu_ranks(2, bits) == [[], []]
