"""flash-attn 3 and 4 through stand-ins: the published names, signatures and layouts, dense attention inside.

Signatures of Dao-AILab/flash-attention: hopper/flash_attn_interface.py and flash_attn/cute/interface.py. What a real
package computes is not held here: neither could be run.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.mask import Mask
from ringprof.strategies.cut import cut_of
from ringprof.strategies.kernels import KERNELS, ReferenceKernel
from ringprof.strategies.layouts import LAYOUTS
from ringprof.strategies.parts import Part, Parts
from tests.strategies.cases import relative_error

CPU = torch.device("cpu")


def _parts(q: Tensor, k: Tensor, cu_q: Any, cu_k: Any, left: int, right: int) -> Parts:
    bounds_q = [0, q.shape[0]] if cu_q is None else cu_q.tolist()
    bounds_k = [0, k.shape[0]] if cu_k is None else cu_k.tolist()
    pairs = zip(pairwise(bounds_q), pairwise(bounds_k), strict=True)
    return Parts(tuple(Part(*a, *b, left, right) for a, b in pairs), q.shape[0], k.shape[0])


def _fwd3(
    q: Tensor, k: Tensor, v: Tensor, k_new: Any = None, v_new: Any = None, qv: Any = None, out_: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, cu_seqlens_k_new: Any = None, seqused_q: Any = None,
    seqused_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, page_table: Any = None,
    kv_batch_idx: Any = None, leftpad_k: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    seqlens_rotary: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 1, pack_gqa: Any = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert softmax_scale is not None
    kernel, none = ReferenceKernel(softcap=softcap), torch.tensor([])
    if cu_seqlens_q is None:
        return *kernel.forward(q, k, v, scale=softmax_scale, causal=causal), none, none
    parts = _parts(q, k, cu_seqlens_q, cu_seqlens_k, window_size_left, 0 if causal else window_size_right)
    assert max_seqlen_q == max(part.queries for part in parts) and max_seqlen_k == max(part.keys for part in parts)
    out, lse = kernel.forward(q[None], k[None], v[None], scale=softmax_scale, causal=False, parts=parts)
    return out[0], lse[0], none, none


def _bwd3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, sequed_q: Any = None, sequed_k: Any = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    assert dq is not None and dk is not None and dv is not None and softmax_scale is not None
    kernel = ReferenceKernel(softcap=softcap)
    if cu_seqlens_q is None:
        found = kernel.backward(dout, q, k, v, softmax_lse, out=out, scale=softmax_scale, causal=is_causal)
    else:
        parts = _parts(q, k, cu_seqlens_q, cu_seqlens_k, window_size_left, 0 if is_causal else window_size_right)
        rows = (x[None] for x in (dout, q, k, v, softmax_lse))
        found = kernel.backward(*rows, out=out[None], scale=softmax_scale, causal=False, parts=parts)
    for target, gradient in zip((dq, dk, dv), found, strict=True):
        target.copy_(gradient.view_as(target))
    return torch.zeros(1)


def _fwd4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_q: Any = None,
    seqused_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, page_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False, softcap: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, learnable_sink: Any = None,
    m_block_size: int = 128, n_block_size: int = 128, num_threads: int = 384, num_splits: int = 1,
    pack_gqa: Any = None, _arch: int | None = None, score_mod: Any = None, mask_mod: Any = None,
    block_sparse_tensors: Any = None, return_lse: bool = False, out: Any = None, lse: Any = None,
    aux_tensors: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert softmax_scale is not None
    found, found_lse = ReferenceKernel().forward(q, k, v, scale=softmax_scale, causal=causal)
    return found, found_lse if return_lse else None


def _bwd4(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None, deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert softmax_scale is not None and not deterministic
    return ReferenceKernel().backward(dout, q, k, v, lse, out=out, scale=softmax_scale, causal=causal)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    three, four, cute = (ModuleType(name) for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"))
    vars(three).update(_flash_attn_forward=_fwd3, _flash_attn_backward=_bwd3)
    interface = ModuleType("flash_attn.cute.interface")
    vars(interface).update(_flash_attn_fwd=_fwd4, _flash_attn_bwd=_bwd4)
    vars(cute).update(interface=interface)
    for module in (three, four, cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)


WHOLE = [Mask(), Mask(causal=False)]
PARTS = [
    Mask.of(documents=[0, 1, 9, 9, 24]),
    Mask.of(window=(5, 0)),
    Mask.of(causal=False, documents=[0, 11, 24], window=(3, 2)),
]


@pytest.mark.parametrize(
    ("name", "softcap", "masks"),
    [
        ("flash-attn-3", 0.0, WHOLE + PARTS),
        ("flash-attn-3", 2.0, WHOLE + PARTS),
        ("flash-attn-4", 0.0, WHOLE + PARTS[:1]),
    ],
)
def test_what_is_handed_over_is_what_is_meant(name: str, softcap: float, masks: list[Mask]) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout, out = (
        torch.randn(2, 24, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4, 4)
    )
    for mask in masks:
        block = cut_of(mask, LAYOUTS["contiguous"], 1, 24).block(0, 0)
        assert block is not None
        how: Any = {"scale": 0.4, "causal": block.causal, "parts": block.parts}
        given, exact = KERNELS[name](softcap=softcap), ReferenceKernel(softcap=softcap)
        (found, lse), (truth, true_lse) = (kernel.forward(q, k, v, **how) for kernel in (given, exact))
        assert relative_error(found, truth) < 1e-13 and torch.allclose(lse, true_lse, rtol=1e-12)
        gradients = [kernel.backward(dout, q, k, v, true_lse + 0.3, out=out, **how) for kernel in (given, exact)]
        assert all(relative_error(x, y) < 1e-12 for x, y in zip(*gradients, strict=True)), mask


def test_what_they_do_not_take_is_said() -> None:
    assert (KERNELS["flash-attn-4"].takes_windows, KERNELS["flash-attn-4"].takes_softcap) == (False, False)
    assert not KERNELS["flash-attn-4"].has_deterministic_mode
    for name in ("flash-attn-3", "flash-attn-4"):
        assert KERNELS[name].missing(CPU) == "needs a CUDA device"
