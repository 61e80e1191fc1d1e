"""Kinds of CPU operators, annotations and recorded communication calls, by their names."""

from __future__ import annotations

import re
from functools import lru_cache

# CPU operators that launch one attention pass and nothing else. Wrappers such as autograd functions of whole ring
# loops are excluded: they launch more than attention.
_ATTENTION = re.compile(
    r"aten::_?(scaled_dot_product_(?=\w*attention)|flash_attention|efficient_attention|cudnn_attention)\w*"
    r"|flash_attn(_3)?::_?(flash_attn|bwd|fwd)\w*"
    r"|(xformers_flash|xformers)::(flash|efficient_attention)_?\w*"
    r"|aiter::(?=\w*mha_)\w+"
)
_BACKWARD = re.compile(r"backward|_bwd|::bwd", re.IGNORECASE)

ENCLOSING = {
    "optimizer": r"(?i:optimizer\.step\b.*|optimizer[ _]step)|aten::_fused_(adamw?|sgd|adagrad)_",
    "embedding": r"\w+::\w*embedding\w*|fbgemm::(bounds_check_indices|linearize_\w+|lxu_cache\w*)"
    r"|torch::autograd::CppNode<Split\w*Lookup\w*>",
    "norm": r"\w+::\w*(rms|layer|batch|group|instance)_?norm\w*",
    "permute": r"fbgemm::\w*permute\w*|aten::(_index_put_impl_|sort|topk)",
}
"""Operators and annotations that give their kind to all kernels inside, even to sums and fills. Where several enclose a
launch, the first of the table decides."""

_OWN_KERNEL = {
    "flash_fwd": r"(vllm|sglang)::unified_\w*attention\w*|_vllm_fa\d_C::\w*fwd\w*|sgl_kernel::(flash_mla_)?\w*fwd\w*",
    "gemm": r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|_scaled_mm|_grouped_mm|_scaled_grouped_mm|_int_mm)"
    r"|aten::_addmm_activation|fbgemm::f8f8bf16\w*",
    "convolution": r"aten::(cudnn|miopen|mkldnn)?_?conv(olution|_depthwise|_transpose)?\w*|aten::(slow|thnn)_conv\w*",
    "softmax": r"aten::_?(log_|masked_|safe_)?softmax\w*",
    "permute": r"fsdp::(all_gather_copy_in|split_with_sizes_copy|chunk_cat)",
    "all_reduce": r"\w+::\w*all_?reduce\w*",
    "all_gather": r"\w+::\w*all_?gather(?!_copy)\w*",
    "reduce_scatter": r"\w+::\w*reduce_?scatter\w*",
    "all_to_all": r"\w+::\w*all_?to_?all\w*|(deep_ep|pplx|mori|uccl)\w*::\w*(dispatch|combine)\w*",
}
"""Operators that give their kind to their own kernel where its name is unspecific; other kernels inside have specific
names."""

_FILES = {
    "norm": r"\w*(rms|layer|group)_?norm\w*",
    "softmax": r"\w*(softmax|cross_entropy)\w*",
    "elementwise": r"\w*(rope|rotary|swiglu|geglu|gelu|silu|activation)\w*",
    "gemm": r"\w*(matmul|gemm)\w*",
    "embedding": r"\w*embedding\w*",
}
KERNEL_FILE = "kernel_file "
"""Prefix that the trace reader puts before the name of the file that a Triton kernel was compiled from."""


_LONGEST_NAME = 1024
"""Length up to which operator names are matched: names in an untrusted trace may be far longer than torch's own."""


@lru_cache(maxsize=4096)
def kind_of_enclosed_kernels(name: str) -> str | None:
    """Return the kind that an operator or annotation gives to kernels launched inside; None where it gives none.

    Kernels with specific names, such as matrix products, keep their own kind.
    """
    name = name[:_LONGEST_NAME]
    return next((kind for kind, pattern in ENCLOSING.items() if re.fullmatch(pattern, name)), None)


@lru_cache(maxsize=4096)
def kind_of_own_kernel(name: str) -> str | None:
    """Return the kind of an operator's own kernel; None where the operator is not in the table."""
    name = name[:_LONGEST_NAME]
    if name.startswith(KERNEL_FILE):
        stem = name.removeprefix(KERNEL_FILE).removesuffix(".py")
        return next((kind for kind, pattern in _FILES.items() if re.fullmatch(pattern, stem)), None)
    return next((kind for kind, pattern in _OWN_KERNEL.items() if re.fullmatch(pattern, name)), None)


def kind_of_attention_operator(name: str) -> str | None:
    """Return ``flash_fwd`` or ``flash_bwd`` for a CPU operator that is one attention pass, else None."""
    if not _ATTENTION.fullmatch(name[:_LONGEST_NAME]):
        return None
    return "flash_bwd" if _BACKWARD.search(name) else "flash_fwd"


@lru_cache(maxsize=1024)
def kind_of_collective(name: str) -> str | None:
    """Return the kind of a communication call by its recorded name; None for calls that move nothing (``wait``)."""
    plain = name.lower().replace("_", "").removeprefix("nccl:").removeprefix("c10d::")
    if plain in {"wait", "init", ""}:
        return None
    for word, kind in _COLLECTIVE_WORDS:
        if word in plain:
            return kind
    return "comm_other"


_COLLECTIVE_WORDS = (
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)
