"""Kernels for GPUs through stand-ins: the published names, signatures and layouts, dense attention inside.

Signatures of Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py, hopper/flash_api_stable.cpp and
flash_attn/cute/interface.py; and of torch's aten/src/ATen/native/native_functions.yaml. What the real ones compute is
not tested here: `test_gpu` does.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.strategies.kernels import flash_attn, newer_flash_attn, torch_kernels
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.strategies.masks.mask_blocks import AttnRectangle, MaskBlocks
from ringprof.strategies.masks.sharded_mask import sharded_mask_of
from ringprof.workload.mask import Mask
from tests.strategies.cases import relative_error

CPU = torch.device("cpu")


def _parts(q: Tensor, k: Tensor, cu_q: Any, cu_k: Any, left: int, right: int) -> MaskBlocks:
    bounds_q = [0, q.shape[0]] if cu_q is None else cu_q.tolist()
    bounds_k = [0, k.shape[0]] if cu_k is None else cu_k.tolist()
    pairs = zip(pairwise(bounds_q), pairwise(bounds_k), strict=True)
    return MaskBlocks(tuple(AttnRectangle(*a, *b, left, right) for a, b in pairs), q.shape[0], k.shape[0])


def _check_longest(parts: MaskBlocks, max_seqlen_q: int | None, max_seqlen_k: int | None) -> None:
    assert max_seqlen_q == max(part.queries for part in parts) and max_seqlen_k == max(part.keys for part in parts)


_deterministic: list[bool] = []
"""Whether each call of a backward pass was to be deterministic."""


def _fwd3(
    q: Tensor, k: Tensor, v: Tensor, k_new: Any = None, v_new: Any = None, q_v: Any = None, out: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, cu_seqlens_k_new: Any = None, seqused_q: Any = None,
    seqused_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, page_table: Any = None,
    kv_batch_idx: Any = None, leftpad_k: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    seqlens_rotary: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0, is_rotary_interleaved: bool = False,
    scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: Any = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert softmax_scale is not None and num_splits == 1
    kernel, none = ReferenceKernel(softcap=softcap), torch.tensor([])
    if cu_seqlens_q is None:
        return *kernel.forward(q, k, v, scale=softmax_scale, causal=is_causal), none, none
    parts = _parts(q, k, cu_seqlens_q, cu_seqlens_k, window_size_left, 0 if is_causal else window_size_right)
    _check_longest(parts, max_seqlen_q, max_seqlen_k)
    result, lse = kernel.forward(q[None], k[None], v[None], scale=softmax_scale, causal=False, parts=parts)
    return result[0], lse[0], none, none


def _bwd3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    seqused_q: Any = None, seqused_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert dq is not None and dk is not None and dv is not None and softmax_scale is not None
    _deterministic.append(deterministic)
    kernel = ReferenceKernel(softcap=softcap)
    if cu_seqlens_q is None:
        gradients = kernel.backward(dout, q, k, v, softmax_lse, out=out, scale=softmax_scale, causal=is_causal)
    else:
        parts = _parts(q, k, cu_seqlens_q, cu_seqlens_k, window_size_left, 0 if is_causal else window_size_right)
        _check_longest(parts, max_seqlen_q, max_seqlen_k)
        rows = (x[None] for x in (dout, q, k, v, softmax_lse))
        gradients = kernel.backward(*rows, out=out[None], scale=softmax_scale, causal=False, parts=parts)
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        target.copy_(gradient.view_as(target))
    return dq, dk, dv, torch.zeros(1), torch.zeros(1)


def _fwd2(
    q: Tensor, k: Tensor, v: Tensor, out: Any, alibi_slopes: Any, p_dropout: float, softmax_scale: float,
    is_causal: bool, window_left: int, window_right: int, softcap: float, return_softmax: bool, gen: Any,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    assert (p_dropout, window_left, window_right, return_softmax) == (0.0, -1, -1, False)
    return *ReferenceKernel(softcap=softcap).forward(q, k, v, scale=softmax_scale, causal=is_causal), None, None


def _bwd2(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Any, dk: Tensor, dv: Tensor,
    alibi_slopes: Any, p_dropout: float, softmax_scale: float, is_causal: bool, window_left: int, window_right: int,
    softcap: float, deterministic: bool, gen: Any, rng_state: Any,
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    assert (dq, p_dropout, window_left, window_right) == (None, 0.0, -1, -1)
    _deterministic.append(deterministic)
    kernel = ReferenceKernel(softcap=softcap)
    gradients = kernel.backward(dout, q, k, v, softmax_lse, out=out, scale=softmax_scale, causal=is_causal)
    return gradients[0], dk.copy_(gradients[1]), dv.copy_(gradients[2]), None


def _varlen_fwd2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert dropout_p == 0.0 and not return_softmax
    return _fwd3(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, is_causal=causal, window_size_left=window_size_left,
        window_size_right=window_size_right, softcap=softcap, num_splits=1,
    )  # fmt: skip


def _varlen_bwd2(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Any,
    deterministic: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert dropout_p == 0.0
    return _bwd3(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, is_causal=causal, window_size_left=window_size_left,
        window_size_right=window_size_right, softcap=softcap, deterministic=deterministic,
    )  # fmt: skip


def _swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Swap the dimensions of heads and sequence, as torch's kernels need it."""
    return tuple(x.transpose(1, 2) for x in tensors)


class _Aten:
    """Stand-ins for torch's attention operators, without dropout."""

    @staticmethod
    def _scaled_dot_product_flash_attention(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float
    ) -> tuple[Tensor, Tensor, None]:
        assert dropout_p == 0.0 and not return_debug_mask
        out, lse = ReferenceKernel().forward(*_swapped(q, k, v), scale=scale, causal=is_causal)
        return out.transpose(1, 2), lse, None

    @staticmethod
    def _scaled_dot_product_flash_attention_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Any, cum_seq_k: Any,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (max_q, max_k, dropout_p, seed.shape, offset.dim()) == (q.shape[2], k.shape[2], 0.0, (2,), 0)
        assert cum_seq_q is None and cum_seq_k is None
        _deterministic.append(torch.are_deterministic_algorithms_enabled())
        dout, q, k, v, out = _swapped(dout, q, k, v, out)
        return _swapped(*ReferenceKernel().backward(dout, q, k, v, lse, out=out, scale=scale, causal=is_causal))

    @staticmethod
    def _scaled_dot_product_cudnn_attention(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, compute_lse: bool, dropout_p: float, is_causal: bool,
        return_debug_mask: bool, *, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert q.shape[2] * k.shape[2] > 1, "cuDNN refuses one query with one key"
        assert compute_lse and bias is None
        out, lse, _ = _Aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, return_debug_mask, scale=scale
        )
        return out, lse.unsqueeze(-1)

    @staticmethod
    def _scaled_dot_product_cudnn_attention_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        bias: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert q.shape[2] * k.shape[2] > 1 and bias is None, "cuDNN refuses one query with one key"
        return _Aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.squeeze(-1), cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
            torch.empty(2), seed, scale=scale,
        )  # fmt: skip

    @staticmethod
    def _flash_attention_forward(
        q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
        is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert not return_debug_mask and dropout_p == 0.0
        return _varlen_fwd2(
            q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal, window_size_left,
            window_size_right,
        )  # fmt: skip

    @staticmethod
    def _flash_attention_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Any, cum_seq_k: Any,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float,
        window_size_left: int, window_size_right: int,
    ) -> list[Tensor]:  # fmt: skip
        assert rng_state.shape == (2,)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        _varlen_bwd2(
            dout, q, k, v, out, lse, dq, dk, dv, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal,
            window_size_left, window_size_right, 0.0, None, torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return [dq, dk, dv]

    @staticmethod
    def _scaled_dot_product_efficient_attention(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, compute_lse: bool, dropout_p: float, is_causal: bool, *,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert compute_lse and bias is None and dropout_p == 0.0
        out, lse = ReferenceKernel().forward(*_swapped(q, k, v), scale=scale, causal=is_causal)
        # The real one pads the rows of its LSE to a multiple of 32, and leaves them as the memory was.
        return out.transpose(1, 2), torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=7.0)

    @staticmethod
    def _scaled_dot_product_efficient_attention_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, seed: Tensor,
        offset: Tensor, dropout_p: float, grad_input_mask: list[bool], is_causal: bool, *, scale: float,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        assert (bias, dropout_p, grad_input_mask) == (None, 0.0, [True, True, True, False])
        dout, q, k, v, out = _swapped(dout, q, k, v, out)
        seq, padding = q.shape[1], -q.shape[1] % 32
        assert lse.shape[-1] == seq + padding
        gradients = ReferenceKernel().backward(dout, q, k, v, lse[..., :seq], out=out, scale=scale, causal=is_causal)
        # Rows behind the end hold anything: only their LSE keeps them from adding to dK and dV.
        rows = (torch.ones_like(x[:, :1]).repeat(1, padding, 1, 1) for x in (dout, q, out))
        dout, q, out = rows
        behind = ReferenceKernel().backward(dout, q, k, v, lse[..., seq:], out=out, scale=scale, causal=False)
        return *_swapped(gradients[0], gradients[1] + behind[1], gradients[2] + behind[2]), None


def _fwd4(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    seqused_q: Any = None, seqused_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None, page_table: Any = None, softmax_scale: float | None = None, causal: bool = False,
    softcap: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    learnable_sink: Any = None, return_lse: bool = False,
) -> tuple[Tensor, Tensor | None, None, None, None]:  # fmt: skip
    out, lse, *_ = _fwd3(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, is_causal=causal, num_splits=1, softcap=softcap or 0.0,
        **_limits(window_size_left, window_size_right),
    )  # fmt: skip
    return out, lse if return_lse else None, None, None, None


def _bwd4(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None, *, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, deterministic: bool = False,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert q.shape[-2] == k.shape[-2] or q.shape[-1] == v.shape[-1], "GQA backward requires head_dim == head_dim_v"
    dq, dk, dv = (torch.empty_like(x) if target is None else target for x, target in ((q, dq), (k, dk), (v, dv)))
    return _bwd3(
        dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, is_causal=causal, softcap=softcap,
        deterministic=deterministic, **_limits(window_size_left, window_size_right),
    )[:3]  # fmt: skip


def _limits(left: int | None, right: int | None) -> dict[str, Any]:
    """Return a window in flash-attn 3's form; in flash-attn 4's, None stands for no limit."""
    assert all(side is None or side >= 0 for side in (left, right))
    return {
        name: -1 if side is None else side for name, side in (("window_size_left", left), ("window_size_right", right))
    }


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    four, cute = (ModuleType(name) for name in ("flash_attn", "flash_attn.cute"))
    operators = SimpleNamespace(fwd=SimpleNamespace(default=_fwd3), bwd=SimpleNamespace(default=_bwd3))
    interface = ModuleType("flash_attn.cute.interface")
    vars(interface).update(_flash_attn_fwd=_fwd4, _flash_attn_bwd=_bwd4)
    vars(cute).update(interface=interface)
    two = ModuleType("flash_attn.flash_attn_interface")
    vars(two).update(
        flash_attn_gpu=SimpleNamespace(fwd=_fwd2, bwd=_bwd2), _flash_attn_varlen_forward=_varlen_fwd2,
        _flash_attn_varlen_backward=_varlen_bwd2,
    )  # fmt: skip
    vars(four).update(flash_attn_interface=two)
    for module in (two, four, cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(flash_attn, "_flash_attn", lambda: two.flash_attn_gpu)
    monkeypatch.setattr(newer_flash_attn, "_operators", lambda: operators)
    monkeypatch.setattr(torch_kernels, "aten", _Aten)
    # Where torch is built without CUDA there is no such function.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


WHOLE = [Mask(), Mask(causal=False)]
PARTS = [
    Mask.of(documents=[0, 1, 9, 9, 24]),
    Mask.of(window=(5, 0)),
    Mask.of(causal=False, documents=[0, 11, 24], window=(3, 2)),
]
ACROSS = sharded_mask_of(Mask.of(causal=False, documents=[0, 11, 40, 48], window=(13, 7)), LAYOUTS["zigzag"], 2, 48)
"""Mask of two ranks: their blocks have rectangles of more queries than keys, and of more keys than queries."""


@pytest.mark.parametrize(
    ("name", "softcap", "masks", "sizes"),
    [
        ("torch-flash", 0.0, WHOLE + PARTS, (8, 8)),
        ("torch-efficient", 0.0, WHOLE + PARTS[:1], (8, 8)),
        ("cudnn", 0.0, WHOLE + PARTS[:1], (8, 8)),
        ("flash-attn", 0.0, WHOLE + PARTS, (8, 8)),
        ("flash-attn", 2.0, WHOLE + PARTS, (8, 8)),
        ("flash-attn-3", 0.0, WHOLE + PARTS, (8, 8)),
        ("flash-attn-3", 2.0, WHOLE + PARTS, (8, 8)),
        ("flash-attn-3", 0.0, WHOLE + PARTS, (192, 128)),
        ("flash-attn-4", 0.0, WHOLE + PARTS, (8, 8)),
        ("flash-attn-4", 2.0, WHOLE + PARTS, (8, 8)),
        ("flash-attn-4", 0.0, WHOLE + PARTS, (192, 128)),
    ],
)
def test_arguments_passed_to_kernels_match_the_mask(
    name: str, softcap: float, masks: list[Mask], sizes: tuple[int, int]
) -> None:
    assert KERNELS[name].takes_v_head_dim(*sizes)
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout, out = (
        torch.randn(2, 24, heads, size, generator=generator, dtype=torch.float64)
        for heads, size in zip((4, 2, 2, 4, 4), (sizes[0], *sizes, sizes[1], sizes[1]), strict=True)
    )
    blocks = [sharded_mask_of(mask, LAYOUTS["contiguous"], 1, 24).block(0, 0) for mask in masks]
    if KERNELS[name].takes_windows:
        blocks += [ACROSS.block(0, 1), ACROSS.block(1, 0)]
    for index, block in enumerate(blocks):
        assert block is not None
        how: Any = {"scale": 0.4, "causal": block.causal, "parts": block.parts}
        deterministic = KERNELS[name].has_deterministic_mode and index % 2 == 0
        newer, exact = KERNELS[name](softcap=softcap, deterministic=deterministic), ReferenceKernel(softcap=softcap)
        (result, lse), (truth, true_lse) = (kernel.forward(q, k, v, **how) for kernel in (newer, exact))
        assert relative_error(result, truth) < 1e-13 and torch.allclose(lse, true_lse, rtol=1e-12)
        _deterministic.clear()
        gradients = [kernel.backward(dout, q, k, v, true_lse + 0.3, out=out, **how) for kernel in (newer, exact)]
        assert all(relative_error(x, y) < 1e-12 for x, y in zip(*gradients, strict=True)), block
        # The memory-efficient operator has no such mode.
        assert set(_deterministic) == {deterministic} or name == "torch-efficient"


def test_newer_flash_attn_needs_a_gpu() -> None:
    for name in ("flash-attn-3", "flash-attn-4"):
        assert KERNELS[name].missing(CPU) == "needs a CUDA device"


SIZES = ("HDIM64", "HDIM96", "HDIM128", "HDIM192", "HDIM256")


@pytest.mark.parametrize(
    ("disabled", "windows", "softcap", "most_head_dim", "dtypes"),
    [
        ((), True, True, 256, (torch.bfloat16, torch.float16)),
        (("SOFTCAP", "FP16", "HDIM64", "HDIM192", "HDIM256"), True, False, 128, (torch.bfloat16,)),
        (("LOCAL", "HDIM256"), False, True, 192, (torch.bfloat16, torch.float16)),
        ((*SIZES, "HDIMDIFF192"), True, True, 0, (torch.bfloat16, torch.float16)),
    ],
)
def test_flash_attn_3_offers_only_the_features_it_was_compiled_with(
    monkeypatch: pytest.MonkeyPatch, disabled: tuple[str, ...], windows: bool, softcap: bool, most_head_dim: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:  # fmt: skip
    kernel = _flash_attn_3_built_without(monkeypatch, disabled)
    assert (kernel.takes_windows, kernel.takes_softcap) == (windows, softcap)
    assert (kernel.most_head_dim, kernel.dtypes) == (most_head_dim, dtypes)
    taken = [sizes for sizes in ((192, 128), (192, 96), (192, 64), (128, 64)) if kernel.takes_v_head_dim(*sizes)]
    assert taken == ([] if "HDIMDIFF192" in disabled else [(192, 128)])
    # A device of no GPU: whether it is found here must not matter.
    assert kernel.missing(CPU) == "needs a CUDA device"


@pytest.mark.parametrize("feature", ["BACKWARD", "VARLEN"])
def test_a_flash_attn_3_without_backward_or_varlen_is_not_used(monkeypatch: pytest.MonkeyPatch, feature: str) -> None:
    kernel = _flash_attn_3_built_without(monkeypatch, (feature,))
    monkeypatch.setitem(kernel.missing.__func__.__globals__, "find_spec", lambda name: object())
    reason = kernel.missing(torch.device("cuda"))
    assert reason == f"needs a flash-attn 3 that was built without FLASHATTENTION_DISABLE_{feature}"


def _flash_attn_3_built_without(monkeypatch: pytest.MonkeyPatch, disabled: tuple[str, ...]) -> Any:
    """Load the kernels' module beside a ``flash_attn_config`` as setup.py writes it; return its flash-attn 3 kernel."""
    names = ("BACKWARD", "LOCAL", "SOFTCAP", "FP16", "VARLEN", "SPLIT", "HDIMDIFF192", *SIZES)
    flags = {f"FLASHATTENTION_DISABLE_{name}": name in disabled for name in names}
    config = ModuleType("flash_attn_config")
    config.CONFIG = {"build_flags": {**flags, "FLASHATTENTION_ENABLE_VCOLMAJOR": True}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    spec = spec_from_file_location("ringprof.strategies.kernels.of_another_build", newer_flash_attn.__file__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FlashAttn3Kernel


@pytest.mark.parametrize(
    ("capability", "sizes"),
    [(9, [24, 32, 56, 64, 88, 96, 120, 128, *range(136, 257, 8)]), (10, [*range(8, 129, 8), 256])],
)
def test_head_sizes_of_flash_attn_4_depend_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: int, sizes: list[int]
) -> None:
    kernel = newer_flash_attn.FlashAttn4Kernel
    monkeypatch.setattr(kernel, "missing", classmethod(lambda cls, device: None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    reasons = {size: kernel.why_unsupported(torch.device("cuda"), torch.bfloat16, size) for size in range(8, 273, 8)}
    assert [size for size, reason in reasons.items() if reason is None] == sizes
    assert all(f"not {size}" in reason for size, reason in reasons.items() if reason)


def test_flash_attn_4_needs_hopper_or_data_center_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = SimpleNamespace(submodule_search_locations=["flash_attn"])
    monkeypatch.setattr(newer_flash_attn, "find_spec", lambda name: installed)
    monkeypatch.setattr("os.path.isdir", lambda path: True)
    taken = []
    for capability in range(7, 14):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=capability: (major, 0))
        if newer_flash_attn.FlashAttn4Kernel.missing(torch.device("cuda")) is None:
            taken.append(capability)
    assert taken == [9, 10, 11]
