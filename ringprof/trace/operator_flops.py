"""FLOPs of one PyTorch operator call, from the shapes and arguments that torch.profiler records (``record_shapes``).

The counts are those of `torch.utils.flop_counter`, with these differences, which bring them closer to the work done:

- an attention call that is known to be causal, or to have a window, counts only unmasked pairs of a query and a key:
  half of all pairs for a square causal mask, the exact area for others;
- matrix-vector and inner products are counted;
- the gradient of the weight of a grouped convolution counts its own groups only.

A call whose lengths are in tensors (packed sequences, paged caches) has no count, because their values are not
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from ringprof.trace.columns import FLOP_DTYPES, FLOPS_LIMIT, NONE
from ringprof.workload.mask import NO_LIMIT, band_area

Sizes = tuple[int, ...]


class Call(NamedTuple):
    """Recorded arguments of one operator call, by their positions in the operator's schema."""

    sizes: Sequence[Sizes]
    """Shape of each argument; empty for a tensor that is None and for an argument that is no tensor."""
    types: Sequence[str]
    """C++ type of each argument; empty where the profiler recorded none."""
    values: Sequence[str]
    """Text of each argument that is no tensor; empty where the profiler recorded none."""

    def shape(self, index: int) -> Sizes:
        """Return the shape of the argument at ``index``; empty where it is no tensor."""
        return self.sizes[index] if index < len(self.sizes) else ()

    def value(self, index: int | None) -> str:
        """Return the text of the argument at ``index``; empty where it is None or not recorded."""
        return self.values[index] if index is not None and index < len(self.values) else ""

    def numbers(self, index: int) -> list[int]:
        """Return the argument at ``index`` as integers, from text such as ``[2, 2]``. Raises ValueError."""
        return [int(part) for part in self.value(index).strip("[]").split(",")]

    def flag(self, index: int | None) -> bool | None:
        """Return the boolean argument at ``index``; None where it is not recorded."""
        return {"True": True, "False": False}.get(self.value(index))


class OperatorFlops(NamedTuple):
    """FLOPs of one call, with its data type and what is known of its mask."""

    flops: int
    dtype: int
    """Index into `FLOP_DTYPES`, or `NONE` where the input types are not recorded."""
    causal: int
    """Value of `FlopRecords.causal`: 1 if masked pairs are excluded, 0 if nothing is masked, `NONE` if not recorded."""
    batch: int = NONE
    m: int = NONE
    n: int = NONE
    k: int = NONE


_Count = tuple[int, int]
"""FLOPs and `FlopRecords.causal`."""


class _Attention(NamedTuple):
    """Positions of an attention operator's arguments in its schema."""

    causal: int | None
    query: int = 0
    """Position of the query; key and value follow. It is 1 in a backward operator, after a gradient."""
    heads_first: bool = True
    """Whether tensors are (batch, heads, tokens, head size), not (batch, tokens, heads, head size)."""
    bottom_right: bool = False
    """Whether a causal mask aligns the last query with the last key, not the first with the first."""
    window: tuple[int, int] | None = None
    """Positions of the window's left and right side."""
    absent: Sizes = ()
    """Positions of arguments that must be absent, because shapes alone would not tell the work: lengths, page tables,
    chunks."""
    mask_type: int | None = None
    """Position of the mask type: 0 for no mask, 1 for causal aligned top left, 2 for causal aligned bottom right."""


def _attention(positions: _Attention, call: Call) -> _Count | None:
    """Count the FLOPs of an attention call: each head multiplies queries by keys, and weights by values."""
    query, key, value = (call.shape(positions.query + offset) for offset in range(3))
    present = any(call.shape(index) or call.value(index) not in ("", "0") for index in positions.absent)
    if present or any(len(shape) != 4 for shape in (query, key, value)):
        return None
    batch, heads, queries, size = query if positions.heads_first else (query[0], query[2], query[1], query[3])
    keys = key[2 if positions.heads_first else 1]
    twice_pairs, causal = _twice_pairs(positions, call, queries, keys)
    # The backward pass computes the scores again, then four gradients: dV, dP, dQ and dK.
    per_pair = 3 * size + 2 * value[3] if positions.query else size + value[3]
    return batch * heads * twice_pairs * per_pair, causal


def _twice_pairs(positions: _Attention, call: Call, queries: int, keys: int) -> _Count:
    """Return twice the number of computed query-key pairs, and the value of `FlopRecords.causal`."""
    causal, bottom_right = call.flag(positions.causal), positions.bottom_right
    if positions.mask_type is not None and call.value(positions.mask_type):
        causal, bottom_right = call.value(positions.mask_type) != "0", call.value(positions.mask_type) == "2"
    if causal is None:
        return 2 * queries * keys, NONE
    left, right = (int(call.value(position) or NO_LIMIT) for position in positions.window or (None, None))
    if (left, right) == (NO_LIMIT, NO_LIMIT) and not causal:
        return 2 * queries * keys, 0
    if (left, right) in ((NO_LIMIT, NO_LIMIT), (NO_LIMIT, 0)) and queries == keys:
        return queries * keys, 1
    right = 0 if causal else right
    if bottom_right:
        return 2 * band_area(queries, keys, left, right), 1
    # With alignment top left, queries beyond the last key see every key.
    square = min(queries, keys)
    return 2 * (band_area(square, square, left, right) + (queries - square) * keys), 1


def _product(first: int, call: Call) -> _Count | None:
    """Count the FLOPs of a matrix-matrix, matrix-vector or inner product; ``first``: position of the left factor."""
    shape = _product_shape(first, call)
    return (2 * prod(shape), 0) if shape else None


def _product_shape(first: int, call: Call) -> tuple[int, int, int, int] | None:
    """Return batch, m, n and k of a product; None where its factors do not fit each other."""
    left, right = call.shape(first), call.shape(first + 1)
    vector = len(right) == 1
    if not left or not right or left[-1] != right[0 if vector else -2]:
        return None
    if not vector and (len(left) != len(right) or left[:-2] != right[:-2]):
        return None
    return prod(left[:-2]), left[-2] if len(left) > 1 else 1, 1 if vector else right[-1], left[-1]


def _convolution(call: Call) -> _Count | None:
    """Count the FLOPs of ``aten::convolution``.

    Each weight is used once per output position, or once per input position if the convolution is transposed.
    """
    data, weight, transposed = call.shape(0), call.shape(1), call.flag(6)
    positions = data[2:]
    if transposed is False:
        strides, paddings, dilations = (call.numbers(index) for index in (3, 4, 5))
        spans = (1 + dilation * (size - 1) for dilation, size in zip(dilations, weight[2:], strict=True))
        rows = zip(positions, paddings, spans, strides, strict=True)
        positions = tuple((size + 2 * padding - span) // stride + 1 for size, padding, span, stride in rows)
    return _convolution_flops(data, weight, positions) if transposed is not None else None


def _convolution_backward(call: Call) -> _Count | None:
    """Count the FLOPs of ``aten::convolution_backward``: each gradient costs as much as the forward pass."""
    gradient, data, weight, transposed = call.shape(0), call.shape(1), call.shape(2), call.flag(7)
    output_mask = [part.strip() == "True" for part in call.value(10).strip("[]").split(",")]
    if transposed is None or len(output_mask) != 3:
        return None
    per_gradient = _convolution_flops(data, weight, (data if transposed else gradient)[2:])
    return (per_gradient[0] * sum(output_mask[:2]), 0) if per_gradient else None


def _convolution_flops(data: Sizes, weight: Sizes, positions: Sizes) -> _Count | None:
    if len(data) < 3 or len(data) != len(weight) or len(positions) != len(data) - 2 or min(positions) < 0:
        return None
    return 2 * data[0] * prod(weight) * prod(positions), 0


_FLASH = partial(_Attention, bottom_right=True)
_FLASH_ATTN = partial(_FLASH, heads_first=False)

_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": _FLASH(4),
    "aten::_scaled_dot_product_flash_attention_backward": _FLASH(11, query=1, absent=(6, 7)),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Attention(4),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _Attention(7, query=1),
    "aten::_scaled_dot_product_efficient_attention": _Attention(6),
    "aten::_scaled_dot_product_efficient_attention_backward": _Attention(11, query=1),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(6),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(14, query=1, absent=(9, 10)),
    "aten::_scaled_dot_product_fused_attention_overrideable": _Attention(5),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _Attention(13, query=1, absent=(8, 9)),
    "aten::_flash_attention_forward": _FLASH_ATTN(8, window=(11, 12), absent=(3, 4, 13, 15)),
    "aten::_flash_attention_backward": _FLASH_ATTN(11, query=1, window=(15, 16), absent=(6, 7)),
    "aten::_efficient_attention_forward": _Attention(None, heads_first=False, mask_type=9, absent=(4, 5, 12, 13)),
    "aten::_efficient_attention_backward": _Attention(
        None, query=1, heads_first=False, mask_type=14, absent=(6, 7, 18)
    ),
    "aten::_cudnn_attention_forward": _Attention(10, absent=(4, 5)),
    "aten::_cudnn_attention_backward": _Attention(14, query=1, absent=(9, 10)),
    # flash-attn 2.7 and later: its earlier versions register no operators.
    "flash_attn::_flash_attn_forward": _FLASH_ATTN(5, window=(6, 7)),
    "flash_attn::_flash_attn_backward": _FLASH_ATTN(11, query=1, window=(12, 13)),
    "flash_attn_3::fwd": _FLASH_ATTN(24, window=(25, 26), absent=(3, 4, 5, 7, 8, 9, 10, 11, 14, 15, 16, 27)),
    "flash_attn_3::bwd": _FLASH_ATTN(16, query=1, window=(17, 18), absent=(9, 10, 11, 12)),
}  # fmt: skip
_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_scaled_mm", "_int_mm"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), 1),
}
"""Position of the left factor, by operator."""
_FIRST_FACTOR = {f"aten::{name}{end}": first for name, first in _PRODUCTS.items() for end in ("", "_")}
"""Position of the left factor, by operator name in a trace."""

FORMULAS: dict[str, Callable[[Call], _Count | None]] = {
    **{name: partial(_attention, positions) for name, positions in _ATTENTION.items()},
    **{name: partial(_product, first) for name, first in _FIRST_FACTOR.items()},
    **dict.fromkeys(("aten::convolution", "aten::_convolution"), _convolution),
    "aten::convolution_backward": _convolution_backward,
}
"""Formulas for the FLOPs of operators, by operator name in a trace."""

_DTYPES = {
    "c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64", "signed char": "int8",
    **{f"c10::Float8_{kind}": "fp8" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")},
}  # fmt: skip


def flops_of(name: str, call: Call) -> OperatorFlops | None:
    """Count the FLOPs of a call; None if the operator has no formula or its arguments do not determine the work.

    Packed types, whose elements hold several numbers each, and complex types have no count.
    """
    formula = FORMULAS.get(name)
    try:
        count = formula(call) if formula else None
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    type_name = next((type_name for shape, type_name in zip(call.sizes, call.types, strict=False) if shape), "")
    if count is None or not 0 <= count[0] <= FLOPS_LIMIT or (type_name and type_name not in _DTYPES):
        return None
    dtype = FLOP_DTYPES.index(_DTYPES[type_name]) if type_name else NONE
    first = _FIRST_FACTOR.get(name)
    shape = _product_shape(first, call) if first is not None else None
    return OperatorFlops(*(count[0], dtype, count[1]), *(shape if shape and max(shape) <= FLOPS_LIMIT else ()))
