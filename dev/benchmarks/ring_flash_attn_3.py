"""Zigzag ring of ring-flash-attn that calls flash-attn 3 in place of flash-attn 2: the same loop and merges."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec
from typing import Any

from torch import Tensor

NAME = "ring_flash_attn.zigzag_ring_flash_attn"


def point_at_flash_attn_3(strategy: Any) -> None:
    """Make a ``ring-flash-attn/zigzag`` strategy call a second copy of its module, which calls flash-attn 3."""
    spec = find_spec(NAME)
    assert spec is not None and spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    module._flash_attn_forward, module._flash_attn_backward = _forward, _backward
    strategy._function = module.zigzag_ring_flash_attn_func


def _operators() -> Any:
    import flash_attn_interface

    return flash_attn_interface.flash_attn_3_gpu


# The package fills in every argument of flash-attn 2's functions by name.
def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    assert not dropout_p and alibi_slopes is None
    out, lse, *_ = _operators().fwd.default(
        q, k, v, softmax_scale=softmax_scale, is_causal=causal, window_size_left=window_size_left,
        window_size_right=window_size_right, softcap=softcap, num_splits=1,
    )  # fmt: skip
    return out, lse, None, None


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    assert not dropout_p and alibi_slopes is None
    _operators().bwd.default(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale=softmax_scale, is_causal=causal,
        window_size_left=window_size_left, window_size_right=window_size_right, softcap=softcap,
        deterministic=deterministic,
    )  # fmt: skip
