"""FLOPs of one PyTorch operator call, from the shapes and arguments that torch.profiler records (``record_shapes``).

The counts are those of `torch.utils.flop_counter`, with these differences, all of them towards what is computed:

- an attention call that is known to be causal, or to have a window, counts the pairs of a query and a key that it
  sees: half of all for a square causal mask, the exact area for others;
- matrix-vector and inner products count, too;
- the gradient of the weight of a grouped convolution counts its own groups only.

A call whose lengths are in tensors (packed sequences, paged caches) has no count, because their values are not
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from ringprof.mask import NO_LIMIT, band_area
from ringprof.trace.columns import FLOP_DTYPES, FLOPS_LIMIT, NONE

Sizes = tuple[int, ...]


class Call(NamedTuple):
    """The recorded arguments of one operator call, by their places in the operator's schema."""

    sizes: Sequence[Sizes]
    """Shape of every tensor argument; empty for other arguments and tensors that are None."""
    types: Sequence[str]
    """C++ type of every tensor argument; empty where the profiler recorded none."""
    values: Sequence[str]
    """Text of every argument that is no tensor; empty where the profiler recorded none."""

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
    """The FLOPs of one call."""

    flops: int
    dtype: int
    """Index into `FLOP_DTYPES`, or `NONE` where the input types are not recorded."""
    causal: int
    """As `FlopRecords.causal`."""


_Count = tuple[int, int]
"""FLOPs and `FlopRecords.causal`."""


class _Attention(NamedTuple):
    """The places of an attention operator's arguments in its schema."""

    causal: int | None
    query: int = 0
    """Place of the query; key and value follow. A gradient stands before it in a backward operator."""
    heads_first: bool = True
    """Whether tensors are (batch, heads, tokens, head size), not (batch, tokens, heads, head size)."""
    bottom_right: bool = False
    """Whether a causal mask aligns the last query with the last key, not the first with the first."""
    window: tuple[int, int] | None = None
    """Places of the window's two sides."""
    absent: Sizes = ()
    """Places of arguments beside which the shapes do not tell the work: lengths, page tables, chunks."""
    mask_type: int | None = None
    """Place of a mask's number: 0 for none, 1 and 2 for causal, aligned top left and bottom right."""


def _attention(places: _Attention, call: Call) -> _Count | None:
    """Count an attention call: every head multiplies queries by keys and weights by values."""
    query, key, value = (call.shape(places.query + offset) for offset in range(3))
    if any(len(shape) != 4 for shape in (query, key, value)) or any(map(partial(_is_given, call), places.absent)):
        return None
    batch, heads, queries, size = query if places.heads_first else (query[0], query[2], query[1], query[3])
    keys = key[2 if places.heads_first else 1]
    twice_pairs, causal = _twice_pairs(places, call, queries, keys)
    # The backward pass computes the scores again, then four gradients: dV, dP, dQ and dK.
    per_pair = 3 * size + 2 * value[3] if places.query else size + value[3]
    return batch * heads * twice_pairs * per_pair, causal


def _is_given(call: Call, index: int) -> bool:
    return bool(call.shape(index)) or call.value(index) not in ("", "0")


def _twice_pairs(places: _Attention, call: Call, queries: int, keys: int) -> _Count:
    """Return twice the number of pairs of a query and a key that are computed, and what is known of the mask."""
    causal, bottom_right = call.flag(places.causal), places.bottom_right
    if places.mask_type is not None and call.value(places.mask_type):
        causal, bottom_right = call.value(places.mask_type) != "0", call.value(places.mask_type) == "2"
    if causal is None:
        return 2 * queries * keys, NONE
    left, right = (int(call.value(place) or NO_LIMIT) for place in places.window or (None, None))
    if (left, right) == (NO_LIMIT, NO_LIMIT) and not causal:
        return 2 * queries * keys, 0
    if (left, right) in ((NO_LIMIT, NO_LIMIT), (NO_LIMIT, 0)) and queries == keys:
        return queries * keys, 1
    right = 0 if causal else right
    if bottom_right:
        return 2 * band_area(queries, keys, left, right), 1
    # Aligned top left, queries beyond the last key see every key.
    square = min(queries, keys)
    return 2 * (band_area(square, square, left, right) + (queries - square) * keys), 1


def _product(first: int, call: Call) -> _Count | None:
    """Count a product of matrices, or of one with a vector: a multiplication and an addition per pair."""
    left, right = call.shape(first), call.shape(first + 1)
    vector = len(right) == 1
    if not left or not right or left[-1] != right[0 if vector else -2]:
        return None
    if not vector and (len(left) != len(right) or left[:-2] != right[:-2]):
        return None
    return 2 * prod(left) * (1 if vector else right[-1]), 0


def _convolution(call: Call) -> _Count | None:
    """Count ``aten::convolution``: every weight once per place of the output, of the input where it is transposed."""
    data, weight, transposed = call.shape(0), call.shape(1), call.flag(6)
    places = data[2:]
    if transposed is False:
        strides, paddings, dilations = (call.numbers(index) for index in (3, 4, 5))
        spans = (1 + dilation * (size - 1) for dilation, size in zip(dilations, weight[2:], strict=True))
        rows = zip(places, paddings, spans, strides, strict=True)
        places = tuple((size + 2 * padding - span) // stride + 1 for size, padding, span, stride in rows)
    return _places(data, weight, places) if transposed is not None else None


def _convolution_backward(call: Call) -> _Count | None:
    """Count ``aten::convolution_backward``: each of the two gradients takes what the forward pass takes."""
    gradient, data, weight, transposed = call.shape(0), call.shape(1), call.shape(2), call.flag(7)
    wanted = [part.strip() == "True" for part in call.value(10).strip("[]").split(",")]
    if transposed is None or len(wanted) != 3:
        return None
    once = _places(data, weight, (data if transposed else gradient)[2:])
    return (once[0] * sum(wanted[:2]), 0) if once else None


def _places(data: Sizes, weight: Sizes, places: Sizes) -> _Count | None:
    if len(data) < 3 or len(data) != len(weight) or len(places) != len(data) - 2 or min(places) < 0:
        return None
    return 2 * data[0] * prod(weight) * prod(places), 0


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
"""Place of the first factor."""

FORMULAS: dict[str, Callable[[Call], _Count | None]] = {
    **{name: partial(_attention, places) for name, places in _ATTENTION.items()},
    **{f"aten::{name}{end}": partial(_product, first) for name, first in _PRODUCTS.items() for end in ("", "_")},
    **dict.fromkeys(("aten::convolution", "aten::_convolution"), _convolution),
    "aten::convolution_backward": _convolution_backward,
}
"""Operators that have a count, by the names in a trace."""

_DTYPES = {
    "c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64", "signed char": "int8",
    **{f"c10::Float8_{kind}": "fp8" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")},
}  # fmt: skip


def flops_of(name: str, call: Call) -> OperatorFlops | None:
    """Count the FLOPs of a call; None where the operator has no formula or its arguments do not tell the work.

    Packed types, of which one element holds several numbers, and complex ones have no count.
    """
    formula = FORMULAS.get(name)
    try:
        count = formula(call) if formula else None
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    kind = next((kind for shape, kind in zip(call.sizes, call.types, strict=False) if shape), "")
    if count is None or not 0 <= count[0] <= FLOPS_LIMIT or (kind and kind not in _DTYPES):
        return None
    return OperatorFlops(count[0], FLOP_DTYPES.index(_DTYPES[kind]) if kind else NONE, count[1])
