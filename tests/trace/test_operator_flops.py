"""FLOPs of operators: compared with explicit masks, and for arguments that do not determine the work."""

from __future__ import annotations

import numpy as np
import pytest

from ringprof.trace.columns import FLOP_DTYPES, FLOPS_LIMIT, NONE
from ringprof.trace.operator_flops import FORMULAS, Call, OperatorFlops, flops_of

BF16 = "c10::BFloat16"


def call(*sizes, values=(), types=None):
    """Build a call with tensors of these sizes (None for other arguments) and these texts for the others."""
    shapes = [tuple(size or ()) for size in sizes]
    return Call(shapes, [BF16 if shape else "" for shape in shapes] if types is None else types, list(values))


def counted(name, call) -> OperatorFlops:
    """Return the FLOPs of a call, which must have a count."""
    flops = flops_of(name, call)
    assert flops is not None
    return flops


def pairs(queries, keys, *, bottom_right, left=-1, right=0):
    """Count the visible query-key pairs of an explicit mask."""
    query, key = np.arange(queries)[:, None], np.arange(keys)[None, :]
    distance = key - query - (keys - queries if bottom_right else 0)
    seen = np.ones((queries, keys), bool)
    if right >= 0:
        seen &= distance <= right
    if left >= 0:
        seen &= distance >= -left
    return int(seen.sum())


def test_matrix_product_flops_are_two_per_multiplication():
    assert counted("aten::mm", call((3, 5), (5, 7))).flops == 2 * 3 * 5 * 7
    assert counted("aten::addmm", call((7,), (3, 5), (5, 7))).flops == 2 * 3 * 5 * 7
    assert counted("aten::bmm", call((4, 3, 5), (4, 5, 7))).flops == 2 * 4 * 3 * 5 * 7
    assert counted("aten::baddbmm_", call((4, 3, 7), (4, 3, 5), (4, 5, 7))).flops == 2 * 4 * 3 * 5 * 7
    assert counted("aten::mv", call((3, 5), (5,))).flops == 2 * 3 * 5
    assert counted("aten::dot", call((5,), (5,))).flops == 2 * 5


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4), (1, 5)])
@pytest.mark.parametrize("backward", [False, True])
def test_causal_attention_flops_count_visible_pairs(queries, keys, backward):
    """Check alignment bottom right (flash-attn) and top left (other kernels of PyTorch); head sizes 16 and 8 (v)."""
    batch, heads, size, v_size = 2, 6, 16, 8
    per_pair = 2 * (3 * size + 2 * v_size) if backward else 2 * (size + v_size)
    for name, bottom_right, causal in (
        ("aten::_scaled_dot_product_flash_attention", True, 11 if backward else 4),
        ("aten::_scaled_dot_product_cudnn_attention", False, 14 if backward else 6),
    ):
        shapes = [(batch, heads, queries, size), (batch, 2, keys, size), (batch, 2, keys, v_size)]
        values = [""] * causal + ["True"]
        if backward:
            shapes = [(batch, heads, queries, v_size), *shapes]
        result = counted(name + "_backward" * backward, call(*shapes, values=values))
        seen = queries * keys / 2 if queries == keys else pairs(queries, keys, bottom_right=bottom_right)
        assert result.flops == batch * heads * per_pair * seen
        assert result.causal == 1
        dense = counted(name + "_backward" * backward, call(*shapes, values=[*values[:-1], "False"]))
        assert (dense.flops, dense.causal) == (batch * heads * per_pair * queries * keys, 0)


@pytest.mark.parametrize(("left", "right", "causal"), [(2, 0, True), (2, -1, True), (3, 1, False), (-1, 0, False)])
def test_window_attention_flops_count_visible_pairs(left, right, causal):
    values = ["", "", "", "0.", "0.125", str(causal), str(left), str(right), "0.", "", "False"]
    shape = (1, 7, 3, 16)
    result = counted("flash_attn::_flash_attn_forward", call(shape, shape, shape, values=values))
    seen = pairs(7, 7, bottom_right=True, left=left, right=0 if causal else right)
    if left == -1:
        seen = 7 * 7 / 2
    assert (result.flops, result.causal) == (3 * 4 * 16 * seen, 1)


def test_unrecorded_mask_counts_as_dense_and_is_marked():
    shape = (2, 4, 8, 16)
    result = counted("aten::_scaled_dot_product_flash_attention", call(shape, shape, shape))
    assert (result.flops, result.causal) == (4 * 2 * 4 * 8 * 8 * 16, NONE)


@pytest.mark.parametrize(
    ("name", "lengths", "causal"),
    [("aten::_flash_attention_forward", 3, 8), ("flash_attn_3::fwd", 7, 24), ("flash_attn_3::fwd", 14, 24)],
)
def test_flops_are_unknown_with_lengths_in_tensors(name, lengths, causal):
    shape = (1, 8, 4, 16)
    sizes = [shape, shape, shape, *[None] * (lengths - 3), (3,)]
    values = [""] * causal + ["True"]
    assert flops_of(name, call(*sizes, values=values)) is None
    assert flops_of(name, call(*sizes[:-1], values=values)) is not None


def test_flops_are_unknown_for_chunks_and_packed_sequences():
    shape = (1, 8, 4, 16)
    values = [""] * 24 + ["False", "-1", "-1", "0"]
    assert flops_of("flash_attn_3::fwd", call(shape, shape, shape, values=values)) is not None
    assert flops_of("flash_attn_3::fwd", call(shape, shape, shape, values=[*values[:-1], "4"])) is None
    tokens = (32, 4, 16)
    assert flops_of("aten::_flash_attention_forward", call(tokens, tokens, tokens)) is None


def test_convolution_flops_count_weights_times_outputs():
    """Check a 3 x 3 convolution of a 9 x 8 image with stride 2 and padding 1: 5 x 4 output positions."""
    values = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2"]
    forward = counted("aten::convolution", call((3, 4, 9, 8), (6, 2, 3, 3), None, values=values))
    assert forward.flops == 2 * 3 * (5 * 4) * 6 * 2 * 9
    back = ["", "", "", "[0]", *values[3:9], "[True, True, False]"]
    sizes = ((3, 6, 5, 4), (3, 4, 9, 8), (6, 2, 3, 3))
    assert counted("aten::convolution_backward", call(*sizes, values=back)).flops == 2 * forward.flops
    first = [*back[:-1], "[False, True, False]"]
    assert counted("aten::convolution_backward", call(*sizes, values=first)).flops == forward.flops


def test_the_data_type_is_that_of_the_first_tensor():
    def dtype(*types):
        return flops_of("aten::mm", call((3, 5), (5, 7), types=types))

    assert FLOP_DTYPES[dtype("c10::Float8_e4m3fn", BF16).dtype] == "fp8"
    assert FLOP_DTYPES[dtype("float", "float").dtype] == "fp32"
    assert dtype().dtype == NONE
    # Packed types have two numbers per element; a complex product needs four real ones.
    assert dtype("c10::Float4_e2m1fn_x2", "c10::Float4_e2m1fn_x2") is None
    assert dtype("c10::complex<float>", "c10::complex<float>") is None


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_damaged_arguments_have_no_count(name):
    odd = ((), (0,), (5,), (3, 5), (2, 3, 5), (1, 2, 3, 4), (1 << 62, 1 << 62, 3, 1 << 62), (1,) * 40)
    texts: tuple[list[str], ...] = (
        [],
        ["x"] * 30,
        ["[", "]"] * 20,
        ["-9"] * 30,
        ["True"] * 30,
        ["[0, 0]"] * 30,
        ["[1]"] * 30,
    )
    for first in odd:
        for second in odd:
            for values in texts:
                result = flops_of(name, Call([first, second, second, first] * 3, [], values))
                assert result is None or 0 <= result.flops <= FLOPS_LIMIT
