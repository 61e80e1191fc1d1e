"""Kinds of torch.compile's Triton kernels, by their names: ``triton_<sort>_fused_<operators>_<number>``.

The sort says how the kernel runs: ``poi`` pointwise, ``red`` and ``per`` with a reduction, ``tem`` from a template such
as a matrix product, ``for`` over a list of tensors. The operators include those fused into the kernel, and others whose
results it only reads: ``triton_poi_fused_convolution_relu_0`` adds a bias to a convolution's output, and
``triton_poi_fused_all_gather_into_tensor_cat_0`` rearranges rows that arrived from other ranks.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"triton_(poi|red|per|tem|for|spl|mix|unk)_fused_?(\w*)")


def _any_word(*names: str) -> re.Pattern[str]:
    """Return a pattern for any of these operator names between underscores."""
    return re.compile(rf"(?:^|_)(?:{'|'.join(names)})(?=_|$)")


_MERGE = re.compile(r"sub_sigmoid_\w*mul_sub")  # ring-flash-attention's update of out and LSE
_BACKWARD_ATTENTION = _any_word("flex_attention_backward")
_ATTENTION = _any_word("flex_attention", "flex_decoding")
_CONVOLUTION = _any_word("convolution")
_SOFTMAX = re.compile(r"softmax|cross_entropy")
_NORM = re.compile(r"(?:layer|rms|batch|group|instance)_norm|var_mean")
_ROOT, _MEAN = _any_word("rsqrt"), _any_word("mean", "var")
_EMBEDDING = re.compile(r"embedding")
_ARITHMETIC = _any_word(
    "r?add", "r?sub", "mul", "div", "pow", "exp", "log", "log1p", "sigmoid", "silu", "gelu", "relu", "tanh", "r?sqrt",
    "where", "native_dropout", "dropout", "clamp", "neg", "maximum", "minimum", "lerp", "addc(?:mul|div)", "cos", "sin",
    "erf", "abs", "threshold", "masked_fill", "logical", "bitwise", "round", "floor", "addmm", "b?mm", "convolution",
    "sum", "mean", "zeros", "ones", "full", "fill", "arange", "bernoulli", "rand", "reciprocal", "eq", "ne", "[lg][te]",
)  # fmt: skip
_MOVES = _any_word(
    "cat", "clone", "slice", "split", "split_with_sizes", "index", "gather", "scatter", "permute", "transpose", "stack",
    "select", "pad", "constant_pad_nd", "copy", "repeat", "flip", "roll", "sort", "topk", "index_put", "unbind",
)  # fmt: skip


def kind_of_inductor(name: str) -> str | None:
    """Return the kind of a Triton kernel of torch.compile; None for a name of any other form."""
    match = _NAME.match(name)
    if match is None:
        return None
    sort, operators = match[1], match[2]
    if sort == "tem":
        return _kind_of_template(operators)
    if sort == "for":
        return "optimizer"
    if _MERGE.search(operators):
        return "merge"
    if _SOFTMAX.search(operators):
        return "softmax"
    if _NORM.search(operators) or (_ROOT.search(operators) and _MEAN.search(operators)):
        return "norm"
    if _EMBEDDING.search(operators):
        return "embedding"
    return "reduction" if sort in ("red", "per", "spl") else _kind_of_pointwise(operators)


def _kind_of_template(operators: str) -> str:
    """Return the kind of a template kernel by its operators."""
    if _BACKWARD_ATTENTION.search(operators):
        return "flash_bwd"
    if _ATTENTION.search(operators):
        return "flash_fwd"
    return "convolution" if _CONVOLUTION.search(operators) else "gemm"


def _kind_of_pointwise(operators: str) -> str:
    """Return the kind of a pointwise kernel by its operators."""
    if _ARITHMETIC.search(operators):
        return "elementwise"
    if _MOVES.search(operators.replace("_to_copy", "")):
        return "permute"
    return "cast" if "_to_copy" in operators else "elementwise"
