"""What kernels and communication calls are by their names: the one table of rules.

A kind is decided from the strongest evidence there is (`ringprof.analysis.kinds.classify`); these rules are its last
resort, and for compute kernels mostly the only one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Rule(NamedTuple):
    """A kernel whose name contains ``pattern`` (a regular expression, case ignored) is of this kind.

    ``then`` must follow in the same word, ``later`` anywhere behind. Both stand apart because a name may be a
    stranger's: ``a.*b`` in one expression takes time with the square of what was made to look like many an ``a``.
    """

    kind: str
    family: str
    """Whose kernel it is, for people; those of attention are printed as the run's. Empty for a helper of any."""
    pattern: str
    then: str = ""
    later: str = ""


# The first rule that fits wins. Names come demangled or mangled, and may be cut by whoever wrote the trace.
# No rule may look for "collective" alone: flash-attn 3's own kernels contain CollectiveMainloop.
RULES: tuple[Rule, ...] = (
    # --- communication ---
    Rule("all_gather", "NCCL", r"nccl", then="AllGather"),
    Rule("reduce_scatter", "NCCL", r"nccl", then="ReduceScatter"),
    Rule("all_reduce", "NCCL", r"nccl", then="AllReduce"),
    Rule("broadcast", "NCCL", r"nccl", then="Broadcast"),
    Rule("all_to_all", "NCCL", r"nccl", then="AllToAll"),
    Rule("send_recv", "NCCL", r"nccl", then="SendRecv"),
    Rule("comm_other", "NCCL", r"nccl(Sym|Symk)?(Dev)?Kernel"),
    Rule("all_gather", "symmetric memory", r"multimem_all_gather"),
    Rule("reduce_scatter", "symmetric memory", r"(multimem_)?reduce_scatter_kernel|multimem_reduce_scatter"),
    Rule("all_reduce", "symmetric memory", r"(multimem_|one_shot_|two_shot_)all_reduce"),
    Rule("all_reduce", "vLLM or TensorRT-LLM", r"cross_device_reduce_[12]stage|allreduce_fusion_kernel"),
    Rule("send_recv", "userbuffers", r"kuserbuffers_(pull|push)(send|recv)"),
    Rule("comm_other", "userbuffers", r"kuserbuffers|userbuffers_fp16_sum|ub_comm"),
    Rule("comm_other", "NVSHMEM", r"nvshmemi?_|nvshmemx|deep_ep::"),
    Rule("comm_other", "symmetric memory", r"(put|wait)_signal_kernel|\bbarrier_kernel"),
    Rule("comm_other", "symmetric memory", r"symm_mem", then="barrier"),
    Rule("comm_other", "other", r"\bhccl|dlslime"),
    Rule("comm_other", "other", r"msccl", then="kernel"),
    # --- merging and other glue of a ring ---
    Rule("merge", "ringprof", r"ringprof_merge"),
    Rule("merge", "Transformer Engine", r"thd_(out_correction|lse|grad_correction)"),
    Rule("merge", "Transformer Engine", r"thd_(read_half_tensor|partition_indices|reorder)"),
    Rule("merge", "ring-flash-attention", r"fused_to_sub_sigmoid"),
    Rule("merge", "ring-flash-attention", r"sub_sigmoid_", then="mul_sub"),
    # --- attention, backward: its names often contain those of the forward pass ---
    Rule("flash_bwd", "flash-attn 4", r"FlashAttentionBackward"),
    Rule("flash_bwd", "flash-attn 4", r"flash_?attncute", then="bwd"),
    Rule("flash_bwd", "flash-attn 3", r"FlashAttnBwd"),
    Rule("flash_bwd", "torch flash", r"pytorch_flash", later="flash_bwd"),
    Rule("flash_bwd", "flash-attn 2", r"flash_bwd_(dq_dk_dv|dot_do_o|convert_d|clear_dkvaccum)|flash_bwd"),
    Rule("flash_bwd", "cuDNN", r"flash_bprop|fmha_reduce_head"),
    Rule("flash_bwd", "cuDNN", r"sdpa", then="bprop"),
    Rule("flash_bwd", "cuDNN", r"compute_dot_do_o|convert_dq_to_16bits"),
    Rule("flash_bwd", "memory-efficient", r"fmha_cutlassB|AttentionBackwardKernel"),
    Rule("flash_bwd", "CK", r"FmhaBwd"),
    Rule("flash_bwd", "CK", r"ck_fused_attn", later=r"dk_dv_reduce|bwd"),
    Rule("flash_bwd", "AITER", r"aiter", later=r"fmha_bwd|dq_convert|odo"),
    Rule("flash_bwd", "Triton", r"flex_attention_backward|_attn_bwd|_bwd_preprocess"),
    Rule("flash_bwd", "Triton", r"^_bwd_kernel(_dq|_dkv|_dk_dv)?\b|^_bwd_kernel"),
    # Of the backward pass as dot_do_o is, where a strategy runs it once for all its blocks.
    Rule("flash_bwd", "", r"ringprof_(row_product|output_with_delta)"),
    # --- attention, forward ---
    Rule("flash_fwd", "flash-attn 4", r"FlashAttentionForward|FlashPrepareScheduler"),
    Rule("flash_fwd", "flash-attn 4", r"flash_?attncute", then="fwd"),
    Rule("flash_fwd", "flash-attn 3", r"FlashAttnFwd|prepare_varlen_num_blocks"),
    Rule("flash_fwd", "flash-attn 3", r"enable_sm90", later="flash"),
    Rule("flash_fwd", "torch flash", r"pytorch_flash", later="flash_fwd"),
    Rule("flash_fwd", "flash-attn 2", r"flash_fwd(_splitkv)?(_combine)?_kernel"),
    Rule("flash_fwd", "cuDNN", r"flash_fprop|qkv_tma_setup|cu_seqlens_to_actual_seqlens"),
    Rule("flash_fwd", "cuDNN", r"sdpa", then="fprop"),
    Rule("flash_fwd", "memory-efficient", r"fmha_cutlassF|AttentionKernel"),
    Rule("flash_fwd", "CK", r"FmhaFwd|ck_fused_attn"),
    Rule("flash_fwd", "AITER", r"fmha_fwd_hd\d|gqa_d128_kernel"),
    Rule("flash_fwd", "AITER", r"aiter", later="fmha_fwd"),
    Rule("flash_fwd", "Triton", r"fused_flex_attention|_?attn_fwd"),
    Rule("flash_fwd", "FlashInfer", r"(BatchPrefill|SinglePrefill)With", then="KVCache"),
    Rule("flash_fwd", "TensorRT-LLM", r"fmhaSm\d+|fmha_v2_flash_attention"),
    # Also the name of Triton layer norms; kept for old flash-attention kernels that are called just this.
    Rule("flash_fwd", "Triton", r"^_fwd_kernel\b"),
    # --- other compute ---
    Rule("gemm", "matrix product", r"gemm|nvjet_|cublas|xmma|wgrad|Cijk_|matmul|splitKreduce"),
    # ROCm copies are kernels.
    Rule("memcpy", "ROCm", r"__amd_rocclr_copyBuffer"),
    Rule("memset", "ROCm", r"__amd_rocclr_fillBuffer"),
)


class _Compiled(NamedTuple):
    rule: Rule
    pattern: re.Pattern[str]
    then: re.Pattern[str]
    later: re.Pattern[str]


# Case is ignored by looking for lower case in lower case: for that the expressions have a search of their own, three
# times as quick, and a table or trace may have a million names.
_COMPILED = [
    _Compiled(rule, *(re.compile(text.lower()) for text in (rule.pattern, rule.then, rule.later))) for rule in RULES
]
_WORD = re.compile(r"\w*")
_EITHER_PASS = re.compile(r"qkv_tma_setup|cu_seqlens_to_actual_seqlens", re.IGNORECASE)

# CPU operators that launch one attention pass and nothing else. Wrappers such as autograd functions of whole ring
# loops are not among them: what they launch is more than attention.
_ATTENTION_OPERATOR = re.compile(
    r"aten::_?(scaled_dot_product_(?=\w*attention)|flash_attention|efficient_attention|cudnn_attention)\w*"
    r"|flash_attn(_3)?::_?(flash_attn|bwd|fwd)\w*"
    r"|(xformers_flash|xformers)::(flash|efficient_attention)_?\w*"
    r"|aiter::(?=\w*mha_)\w+"
)
_BACKWARD = re.compile(r"backward|_bwd|::bwd", re.IGNORECASE)


def rule_for(name: str, own: Sequence[Rule] = ()) -> Rule | None:
    """The first rule that fits a kernel's name, ``own`` rules before the built-in; None where none knows it."""
    for rule in own:
        if re.search(rule.pattern, name, re.IGNORECASE | re.DOTALL):
            return rule
    lower = name.lower()
    for rule, pattern, then, later in _COMPILED:
        found = pattern.search(lower)
        if found is None or (rule.later and not later.search(lower, found.end())):
            continue
        if not rule.then or _follows(lower, pattern, then, found):
            return rule
    return None


def _follows(name: str, pattern: re.Pattern[str], then: re.Pattern[str], found: re.Match[str] | None) -> bool:
    """Whether ``then`` stands in a word behind what ``pattern`` finds; each word is looked at once."""
    while found is not None:
        word = _WORD.match(name, found.end())
        assert word is not None
        if then.search(name, *word.span()):
            return True
        found = pattern.search(name, max(word.end(), found.start() + 1))
    return False


def runs_in_either_pass(name: str) -> bool:
    """Whether this attention helper serves forward and backward, so that its name does not tell the pass."""
    return _EITHER_PASS.search(name) is not None


def kind_of_attention_operator(name: str) -> str | None:
    """``flash_fwd`` or ``flash_bwd`` for a CPU operator that is one attention pass, else None."""
    if not _ATTENTION_OPERATOR.fullmatch(name):
        return None
    return "flash_bwd" if _BACKWARD.search(name) else "flash_fwd"


@lru_cache(maxsize=1024)
def kind_of_collective(name: str) -> str | None:
    """The kind of a communication call by its recorded name; None for what moves nothing (``wait``)."""
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
