"""Tests that need a GPU: its kernels against float64, the fused kernels against plain torch, equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringprof.strategies import create
from ringprof.strategies.kernels import merge
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.strategies.masks.sharded_mask import sharded_mask_of
from ringprof.workload.mask import Mask
from tests.strategies.fused_checks import differences, operations
from tests.strategies.gpu_ranks import why_kernel_is_left_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # flash-attn 4 and the packages that it compiles with warn of each other.
    pytest.mark.filterwarnings("default"),
]
GPU_KERNELS = ["cudnn", "flash-attn-3", "flash-attn-4", "flash-attn", "torch-flash", "torch-efficient"]
# batch, heads, kv heads, queries, keys, causal
BLOCKS = [(1, 8, 8, 512, 512, True), (2, 8, 2, 500, 500, True), (2, 8, 8, 256, 512, False), (1, 8, 2, 512, 256, False)]


def _kernel(
    name: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, *, deterministic: bool = False
) -> Kernel:
    reason = why_kernel_is_left_out(name, dtype, head_dim)
    if reason:
        pytest.skip(f"{name} {reason}")
    return KERNELS[name]()


def _tensors(batch, heads, kv_heads, queries, keys, head_dim=128, dtype=torch.bfloat16, v_head_dim=None):
    """Return q, k, v and dout as views into longer tensors, like half a zigzag shard."""
    torch.manual_seed(0)
    v_size = v_head_dim or head_dim

    def view(seq, count, size):
        return torch.randn(batch, 2 * seq, count, size, device="cuda", dtype=dtype)[:, seq:]

    dout = view(queries, heads, v_size).contiguous()
    return view(queries, heads, head_dim), view(keys, kv_heads, head_dim), view(keys, kv_heads, v_size), dout


def _error(value, truth):
    return ((value.double() - truth).norm() / truth.norm()).item()


HEAD_DIMS = [8, 16, 32, 64, 72, 80, 96, 104, 128, 160, 192, 224, 256]


@pytest.mark.parametrize("name", GPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [*((size, size) for size in HEAD_DIMS), (192, 128)])
def test_a_kernel_agrees_with_float64(name, dtype, head_dim, v_head_dim):
    """Every kernel is right on all head sizes and types that it supports, full and causal, grouped heads or not."""
    kernel, scale = _kernel(name, dtype, head_dim), head_dim**-0.5
    if not kernel.takes_v_head_dim(head_dim, v_head_dim):
        pytest.skip(f"{name} takes heads of one size")
    # One rounding is at most half of eps of a value, a few of them stay below 2.5 eps. In fp32 TF32 is not enough.
    allowed = 2.5 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    wrong = []
    for batch, heads, kv_heads, queries, keys, causal in BLOCKS:
        q, k, v, dout = _tensors(batch, heads, kv_heads, queries, keys, head_dim, dtype, v_head_dim)
        out, lse = kernel.forward(q, k, v, scale=scale, causal=causal)
        wq, wk, wv, wdout = (tensor.double() for tensor in (q, k, v, dout))
        true_out, true_lse = ReferenceKernel().forward(wq, wk, wv, scale=scale, causal=causal)
        truth = ReferenceKernel().backward(wdout, wq, wk, wv, true_lse, out=true_out, scale=scale, causal=causal)
        errors = [_error(out, true_out), (lse.double() - true_lse).abs().max().item() / 100]
        for row in ((out.contiguous(), None), (None, merge.row_product(dout, out.contiguous()))):
            gradients = kernel.backward(dout, q, k, v, lse, out=row[0], delta=row[1], scale=scale, causal=causal)
            errors += [_error(gradient, true) for gradient, true in zip(gradients, truth, strict=True)]
        if not all(error < allowed for error in errors):
            sizes = (batch, heads, kv_heads, queries, keys)
            wrong.append(f"{sizes} causal={causal}: {' '.join(f'{error:.1e}' for error in errors)}")
    assert wrong == []


@pytest.mark.parametrize("mask", [Mask(), Mask.of(documents=[0, 8, 300, 512])])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("name", [name for name in GPU_KERNELS if KERNELS[name].writes_into])
def test_gradients_written_into_views_are_those_of_new_tensors(name, kv_heads, mask):
    """Strategies let such a kernel write the gradients of some heads and rows into those of all."""
    kernel = _kernel(name)
    q, k, v, dout = _tensors(1, 8, kv_heads, 512, 512)
    block = sharded_mask_of(mask, LAYOUTS["contiguous"], 1, 512).block(0, 0)
    assert block is not None
    how: dict[str, Any] = {"scale": 0.1, "causal": block.causal, "parts": block.parts}
    out, lse = kernel.forward(q, k, v, **how)
    how["out"] = out
    wide = [torch.full((1, 700, x.shape[2] + 3, 128), 7.0, device="cuda", dtype=x.dtype) for x in (q, k, v)]
    dq, dk, dv = (whole[:, 100:612, 2:-1] for whole in wide)
    views = dq, dk, dv
    assert all(x is view for x, view in zip(kernel.backward(dout, q, k, v, lse, into=views, **how), views, strict=True))
    for view, fresh in zip(views, kernel.backward(dout, q, k, v, lse, **how), strict=True):
        assert _error(view, fresh.double()) < 1e-3
    for whole, view in zip(wide, views, strict=True):
        view.fill_(7.0)
        assert (whole == 7.0).all(), "a value outside of the view was overwritten"


@pytest.mark.parametrize("name", GPU_KERNELS)
def test_misaligned_inputs_compute_the_bits_of_aligned_ones(name):
    """A view from an odd offset was computed wrongly by cuDNN without an error, or ended the process."""
    kernel = _kernel(name)
    tensors = [x.contiguous() for x in _tensors(1, 8, 2, 256, 256)]
    odd_offset = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in tensors]
    odd_rows = [torch.cat([x, x[..., :1]], -1)[..., :-1] for x in tensors]
    results = []
    for q, k, v, dout in (tensors, odd_offset, odd_rows):
        out, lse = kernel.forward(q, k, v, scale=0.1, causal=True)
        _, dk, dv = kernel.backward(dout, q, k, v, lse, out=out, scale=0.1, causal=True)
        results.append((out, lse, dk, dv))
    for first, *others in zip(*results, strict=True):
        assert all(_error(other, first.double()) < 1e-3 for other in others)
    assert all(torch.equal(result[0], results[0][0]) for result in results)


@pytest.mark.parametrize("name", ["flash-attn-3", "flash-attn-4", "flash-attn", "torch-flash"])
def test_the_deterministic_mode_gives_the_same_bits(name):
    _kernel(name)
    strategy = create("zigzag", kernel=name, deterministic=True)
    q, k, v, dout = (tensor.contiguous() for tensor in _tensors(1, 8, 8, 4096, 4096))
    results = []
    for _ in range(3):
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = strategy.attention(*inputs)
        out.backward(dout)
        results.append([out, *(tensor.grad for tensor in inputs)])
    for again in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], again, strict=True))


def test_kernel_without_a_deterministic_mode_is_refused_or_skipped():
    q = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no deterministic"):
        create("zigzag", kernel="cudnn", deterministic=True).kernel_for(q)
    assert create("zigzag", deterministic=True).kernel_for(q).name != "cudnn"


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_kernels_equal_plain_torch(head_dim, dtype, monkeypatch):
    monkeypatch.setattr(merge, "FUSED_FROM", 0)
    plain, fused = (operations(device, head_dim, dtype, 77) for device in ("cpu", "cuda"))
    assert differences(plain, fused, dtype) == []


@pytest.mark.parametrize("heads", [32, 40])
@pytest.mark.parametrize("head_dim", [8, 128])
def test_the_fused_merge_works_in_place_without_a_race(heads, head_dim, monkeypatch):
    """Many repetitions of a merge and an accumulation give the same bits: no warp reads what another has written."""
    monkeypatch.setattr(merge, "FUSED_FROM", 0)
    torch.manual_seed(0)
    block = torch.randn(1, 256, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(1, 256, heads, head_dim, device="cuda")
    lse, block_lse = 3 * torch.randn(2, 1, heads, 256, device="cuda")
    expected = start + torch.sigmoid(block_lse - lse).transpose(1, 2).unsqueeze(-1) * (block - start)
    for _ in range(500):
        out, own, total = start.clone(), lse.clone(), start.clone()
        merge.merge_into(out, out, own, block, block_lse, slice(None))
        merge.accumulate(total, block)
        assert torch.allclose(out, expected, atol=1e-5)
        assert torch.allclose(own, torch.logaddexp(lse, block_lse), atol=1e-5)
        assert torch.equal(total, start + block)
