"""Packed documents and windows on GPU kernels, against float64: one kernel, and strategies on several GPUs."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import Tensor

from ringprof.strategies import Unsupported, create
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.kernels.reference import MaskedReference, ReferenceKernel
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.strategies.masks.sharded_mask import sharded_mask_of
from ringprof.workload.mask import Mask
from tests.strategies.cases import Case
from tests.strategies.gpu_ranks import needs_two_gpus, run_gpu_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's compiler, which flex needs, warns of what torch itself does.
    pytest.mark.filterwarnings("default"),
]
SEQ, HEAD_DIM = 1024, 128
SHAPES = [(1, 8, 8), (2, 8, 2)]
"""Shapes (batch, heads, kv heads)."""
DOCUMENTS = Mask.of(documents=[0, 1, 8, 300, 300, 556, 1024])
MASKS = [
    DOCUMENTS,
    Mask.of(causal=False, documents=[0, 130, 1024]),
    Mask.of(window=(63, 0)),
    Mask.of(window=(600, 0)),
    Mask.of(causal=False, window=(40, 70)),
    Mask.of(documents=[0, 5, 500, 1024], window=(127, 0)),
    Mask.of(window=(200, 0), prefix=70),
    Mask.of(documents=[0, 5, 500, 1024], window=(127, 0), prefix=3),
]
CASES = [
    Case("ring"), Case("zigzag"), Case("zigzag", {"documents_layout": "per_document"}), Case("stripe"), Case("ulysses"),
    Case("usp"), Case("allgather"), Case("allgather", {"layout": "zigzag", "documents_layout": "per_document"}),
    Case("burst"), Case("double-ring", {"ring_window": 1}), Case("megatron"),
    Case("megatron", {"documents_layout": "per_document"}),
]  # fmt: skip


def full_inputs(batch: int, heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(batch)
    shapes = [(batch, SEQ, count, HEAD_DIM) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]


def truth_of(full: list[Tensor], mask: Mask, softcap: float = 0.0) -> list[Tensor]:
    q, k, v, dout = (x.double() for x in full)
    kernel = MaskedReference(mask, softcap=softcap)
    out, lse = kernel.forward(q, k, v, scale=HEAD_DIM**-0.5, causal=mask.causal)
    return [out, *kernel.backward(dout, q, k, v, lse, out=out, scale=HEAD_DIM**-0.5, causal=mask.causal)]


def worst(values: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((x.double() - y).norm() / y.norm()) for x, y in zip(values, truth, strict=True))


VARLEN = ("flash-attn-3", "flash-attn", "torch-flash")
ALL_KERNELS = [name for name in KERNELS if name not in ("cpu-flash", "reference")]
SOFTCAP = 2.0
"""Softcap that is no larger than some scores."""


@pytest.mark.parametrize(
    ("name", "softcap"),
    [
        (name, softcap)
        for name in ALL_KERNELS
        for softcap in (0.0, SOFTCAP)
        if not softcap or KERNELS[name].takes_softcap
    ],
)
def test_kernel_on_mask_blocks_agrees_with_float64(name: str, softcap: float) -> None:
    reason = KERNELS[name].why_unsupported(torch.device("cuda"), torch.bfloat16, HEAD_DIM)
    if reason:
        pytest.skip(f"{name} {reason}")
    wrong = []
    # What is compiled for every number of heads is held on one.
    for shape in SHAPES[1:] if name == "flex" else SHAPES:
        full = full_inputs(*shape)
        q, k, v, dout = full
        for mask in MASKS:
            block = sharded_mask_of(mask, LAYOUTS["contiguous"], 1, SEQ).block(0, 0)
            assert block is not None and block.parts is not None
            kernel = KERNELS[name](softcap=softcap)
            if block.parts.bands and not kernel.takes_windows:
                continue
            how = {"scale": HEAD_DIM**-0.5, "causal": False, "parts": block.parts}
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
                wrong.append(f"{name}, {shape}, {mask}: {off}")
    assert not wrong


def wrong_on_a_rank(rank: int, kernel: str, masks: list[Mask], cases: list[Case], softcap: float) -> list[str]:
    wrong = []
    for case in cases:
        began = time.perf_counter()
        strategy = create(case.name, kernel=kernel, hops="nccl", **case.params)
        # What is compiled or planned for every number of heads is held on one.
        for shape, mask in itertools.product(SHAPES if kernel in VARLEN else SHAPES[1:], masks):
            full = full_inputs(*shape)
            share = {"documents": mask.documents}
            leaves = [strategy.shard(x, **share).requires_grad_() for x in full[:3]]
            try:
                how = {"causal": mask.causal, "window_size": mask.window, "prefix": mask.prefix, "softcap": softcap}
                out = strategy.attention(*leaves, **how, **share)
            except Unsupported as refusal:
                assert mask.windowed and "takes no sliding windows" in str(refusal)
                continue
            gradients = torch.autograd.grad(out, leaves, strategy.shard(full[3], **share))
            off = worst([strategy.unshard(x, **share) for x in (out, *gradients)], truth_of(full, mask, softcap))
            if not off < 0.02:
                wrong.append(f"{case}, {shape}, {mask}: {off}")
        if rank == 0:
            print(f"{kernel}, {case}: {time.perf_counter() - began:.1f} s", flush=True)
    return wrong


ZIGZAG, RING, USP, BURST = (Case(name) for name in ("zigzag", "ring", "usp", "burst"))
# cuDNN makes a plan and flex compiles for every length: seconds each, so few of them.
ON_TWO = {
    **{kernel: (kernel, MASKS, CASES, 0.0) for kernel in VARLEN},
    "cudnn": ("cudnn", MASKS[:1], [ZIGZAG, BURST], 0.0),
    "flex-documents": ("flex", [DOCUMENTS], [ZIGZAG], 0.0),
    "flex-window": ("flex", MASKS[2:3], [RING, USP], 0.0),
    "flex-softcap": ("flex", [Mask.of()], [ZIGZAG], SOFTCAP),
}
"""(kernel, masks, strategies, softcap) by name. Each part ends within 45 s on two H200, of which 15 are the start."""


@needs_two_gpus
@pytest.mark.parametrize("part", ON_TWO)
def test_masked_strategies_are_exact_on_two_gpus(part: str) -> None:
    reason = KERNELS[ON_TWO[part][0]].why_unsupported(torch.device("cuda"), torch.bfloat16, HEAD_DIM)
    if reason:
        pytest.skip(f"{ON_TWO[part][0]} {reason}")
    assert run_gpu_ranks(2, wrong_on_a_rank, *ON_TWO[part]) == [[], []]


def bits(rank: int) -> list[str]:
    """Return the tensors in which a change of one document changes bits of another, with a deterministic kernel."""
    full, leaking = full_inputs(1, 8, 2), []
    inside = slice(300, 556)
    for case in CASES:
        strategy = create(case.name, kernel="flash-attn", hops="nccl", deterministic=True, **case.params)
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


@pytest.mark.parametrize("head_dim", [16, 64, 96, 192, 256])
def test_flex_takes_heads_of_any_size(head_dim: int) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 300, heads, head_dim, device="cuda").bfloat16() for heads in (4, 2, 2, 4))
    truth = truth_with(ReferenceKernel(), q, k, v, dout, head_dim)
    results = truth_with(KERNELS["flex"](), q, k, v, dout, head_dim)
    assert worst(results, truth) < 0.02


def truth_with(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, head_dim: int) -> list[Tensor]:
    if kernel.name == "reference":
        q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, lse = kernel.forward(q, k, v, scale=head_dim**-0.5, causal=True)
    return [out, *kernel.backward(dout, q, k, v, lse, out=out, scale=head_dim**-0.5, causal=True)]
