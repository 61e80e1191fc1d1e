"""Table of rules that classify kernels by their names.

The strongest evidence decides a kind (`ringprof.analysis.kinds.classify`). These rules are the last resort, and for
compute kernels mostly the only evidence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class Rule(NamedTuple):
    """A kernel whose name, in lower case, contains ``pattern`` (a regular expression) is of this kind.

    ``then`` must follow in the same word, ``later`` anywhere behind. Both are separate because a name may come from an
    untrusted file: ``a.*b`` in one expression takes quadratic time on a name that holds many an ``a``.
    """

    kind: str
    family: str
    """Library of the kernel, for display; reports print the families of attention kernels. Empty for any library's
    helper."""
    pattern: str
    then: str = ""
    later: str = ""
    loose: bool = False
    """Whether the name is a template that many operators run, or a common word: the operator is better evidence."""
    device: str = ""
    """Devices that the rule is restricted to, by the beginning of their names; empty for all devices."""

    @property
    def guessed(self) -> bool:
        """Whether a single word decides: then the operator that owns the kernel is better evidence."""
        return self.family == WORD_ONLY


WORD_ONLY = "a word of its name"


NPU = "Ascend"
"""Beginning of the names of devices whose kernels are CANN's; kernels of other devices never have its bare words."""


def _rules(kind: str, *rows: tuple[str, ...], loose: bool = False, device: str = "") -> list[Rule]:
    """Return rules of one kind; a row is (family, pattern, then, later), the last two where needed."""
    rules = []
    for row in rows:
        family, pattern, then, later = (*row, "", "")[:4]
        rules.append(Rule(kind, family, pattern, then, later, loose, device))
    return rules


# The first matching rule wins, so specific rules stand before general ones. Names come demangled or mangled, and the
# writer of the trace may have cut them: (?<![a-z]) matches the beginning of a word in any form. No rule may match
# "collective" alone (flash-attn 3's own kernels contain CollectiveMainloop), nor a word that others contain: "gemm" in
# "fbgemm", "cast" in "broadcast" and "LoadWithCast".
RULES: tuple[Rule, ...] = (
    # --- copies: kernels on ROCm ---
    Rule("memcpy", "ROCm", r"__amd_rocclr_copybuffer"),
    Rule("memset", "ROCm", r"__amd_rocclr_fillbuffer"),
    # --- communication ---
    Rule("all_gather", "NCCL", r"nccl", then=r"allgather"),
    Rule("reduce_scatter", "NCCL", r"nccl", then=r"reducescatter"),
    Rule("all_reduce", "NCCL", r"nccl", then=r"allreduce"),
    Rule("broadcast", "NCCL", r"nccl", then=r"broadcast"),
    Rule("all_to_all", "NCCL", r"nccl", then=r"alltoall"),
    Rule("send_recv", "NCCL", r"nccl", then=r"sendrecv"),
    Rule("comm_other", "NCCL", r"nccl(symk?)?(dev)?kernel|rcclgenerickernel|rccl_main_kernel"),
    Rule("comm_other", "NCCL", r"nccl", then=r"kernel"),
    # Huawei's HCCL, and XLA's calls for traces without the kernels below them.
    Rule("send_recv", "HCCL", r"hcom_(batch)?(send|receive)"),
    Rule("broadcast", "HCCL", r"hcom_broadcast"),
    Rule("send_recv", "XLA", r"collective[-_]permute"),
    Rule("broadcast", "XLA", r"collective[-_]broadcast"),
    Rule("send_recv", "userbuffers", r"kuserbuffers_(pull|push)(send|recv)"),
    Rule("comm_other", "userbuffers", r"kuserbuffers|userbuffers_fp16_sum|ub_comm"),
    Rule("all_reduce", "quickreduce", r"quickreduce"),
    # torch's symmetric memory, vLLM, AITER, FlashInfer, TensorRT-LLM, SGLang, MSCCL++ and others.
    Rule("all_reduce", "vLLM or TensorRT-LLM", r"cross_device_reduce"),
    Rule("all_gather", "symmetric memory", r"multimem_all_gather"),
    Rule("reduce_scatter", "custom", r"(reduce|psum)[-_]?scatter", loose=True),
    Rule("all_reduce", "custom", r"(?<!warp)(?<!block)(?<!warp_)(?<!block_)all[-_]?reduce", loose=True),
    Rule("all_reduce", "AITER", r"(?<![a-z])ar_(ll_)?gfx"),
    Rule("reduce_scatter", "custom", r"gather_rs(?!\w{0,40}gemm)|(?<![a-z])rs_gfx", loose=True),
    Rule("all_gather", "custom", r"all[-_]?gather|(?<![a-z])ag_(a2a|push|pull|ring|gfx)", loose=True),
    Rule("all_gather", "custom", r"_forward_(push|pull)_|ring_?local_?gather"),
    Rule("all_to_all", "custom", r"all[-_]?(to|2)[-_]?all|moe_?a2a|(?<![a-z])a2av?(?![a-z])", loose=True),
    Rule("comm_other", "custom", r"(^|::)barrier(?![a-z_])|consumer_batch_kernel"),
    # Expert parallelism: tokens are sent to the ranks of their experts and back.
    Rule("send_recv", "DeepEP", r"deep_ep", later=r"pp_(send|recv)"),
    Rule("all_to_all", "DeepEP", r"deep_ep|dpsk::ep|dpsk2ep|hybrid_ep|uccl::ep|nccl_ep"),
    Rule("all_to_all", "mori", r"mori::|4mori3|(?<![a-z])ep_?(dispatch|combine)"),
    Rule("all_to_all", "expert parallelism", r"(dispatch|combine)_token|(?<![a-z_])combine_(reduce|publish)|_publish_"),
    Rule("all_to_all", "MagiAttention", r"grpcoll|group_cast_(kernel|meta)"),
    Rule("all_to_all", "pplx", r"pplx", later=r"dispatch|combine"),
    Rule("all_to_all", "symmetric memory", r"exchangesplitandoffset"),
    Rule("broadcast", "custom", r"broadcast_?(sdma|nvls|simple)"),
    Rule("comm_other", "MSCCL", r"mscclpp"),
    Rule("comm_other", "MSCCL", r"msccl", then=r"kernel"),
    Rule("all_reduce", "NVSHMEM", r"rdxn_on_stream_kernel"),
    Rule("all_gather", "NVSHMEM", r"fcollect_on_stream_kernel"),
    Rule("broadcast", "NVSHMEM", r"broadcast_on_stream_kernel"),
    Rule("comm_other", "NVSHMEM", r"nvshmemi?_|nvshmemx|rocshmem|_on_stream_kernel"),
    Rule("all_reduce", "Iris", r"(?<![a-z])iris_", then=r"reduce"),
    Rule("comm_other", "Iris", r"(?<![a-z])iris_"),
    Rule("comm_other", "symmetric memory", r"(put|wait)_signal_kernel|\bbarrier_kernel|multimem_"),
    Rule("comm_other", "symmetric memory", r"barrier_?all|ipc_?barrier"),
    Rule("comm_other", "symmetric memory", r"symm_mem", then=r"barrier"),
    Rule("comm_other", "peer memory", r"(?<![a-z])ipc_\w{0,40}(push|pull|rsag)|_halos?_|halo_exchange"),
    Rule("comm_other", "NVSHMEM", r"(?<![a-z])(put|get)mem"),
    Rule("all_to_all", "CANN", r"moedistribute(dispatch|combine)"),
    Rule("comm_other", "other", r"\bhccl|(?<![a-z])hcom_|dlslime|oneccl|(?<![a-z])i(send|recv)"),
    Rule("send_recv", "peer memory", r"(?<![a-z])p2p_"),
    # --- merging of partial results ---
    Rule("merge", "ringprof", r"ringprof_merge"),
    Rule("merge", "CANN", r"ringattentionupdate"),
    Rule("merge", "Transformer Engine", r"thd_(out_correction|lse|grad_correction)"),
    Rule("merge", "ring-flash-attention", r"fused_to_sub_sigmoid"),
    Rule("merge", "ring-flash-attention", r"sub_sigmoid_", then=r"mul_sub"),
    Rule("merge", "FlashInfer or vLLM", r"merge_?states?|merge_attn_states"),
    Rule("merge", "", r"(correct|merge|update)_(out_)?lse|lse_(reduce|merge|correct)|attn_(reduction|merge)_"),
    # --- helpers around attention whose names contain attention's words ---
    Rule("permute", "", r"_and_cache|kv_?cache_kernel|kv_buffer|store_?kv|append\w{0,20}kv_?cache|copy_blocks_kernel"),
    Rule("permute", "", r"(?<![a-z])gather_\w{0,30}_cache|slot_mapping|destindex_copy|kv_indic|to_token_pool"),
    # CANN's names begin with the call and end with the operator that runs.
    Rule("cast", "CANN", r"^aclnn\w{1,80}_cast(ai(core|cpu)_cast)?$|^trans_cast_\d"),
    Rule("permute", "CANN", r"^aclnn\w{1,80}_transdata_transdata$"),
    Rule("permute", "", r"flatten_kv|thd_(read_half_tensor|partition_indices|reorder)|flash_attention::prepare_kernel"),
    Rule("permute", "layout", r"_to_(thd|bshd|sbhd|bhsd|bnsd|bsnd)|(?<![a-z])(thd|bshd|sbhd|bhsd|bnsd|bsnd)_to_"),
    # The rings of ring-flash-attention and yunchang over packed documents.
    Rule("permute", "ring-flash-attention", r"^(un)?flatten_kernel|flatten_varlen"),
    # Linear attention, delta rules and state-space models; some have a norm or a rotation in their names.
    *_rules(
        "recurrence",
        ("linear attention", r"delta_rule|gated_delta|linear_?attention|linear_?attn|lightning_?attn|recompute_w_u"),
        ("linear attention", r"(?<![a-z])chunk(wise)?_(\w{1,40}_)?(fwd|bwd)_|chunk_scaled_dot|retention_(fwd|bwd)"),
        ("linear attention", r"(?<![a-z])chunk_((simple_)?gla|kda|cp|delta)_|(?<![a-z])(fused_chunk|recurrent)_"),
        ("linear attention", r"(?<![a-z])(gla|kda|gdn2?|dplr|gsa|hgrn|mesa_net|mlstm|rwkv\d?|wkv\d)_(?!gating)"),
        ("linear attention", r"parallel_(simple_gla|(re)?based|delta\w{0,8}|path)_[fb]wd|(?<![a-z])int(ra|er)_chunk"),
        ("linear attention", r"(for|back)ward_(pass_)?chunk|(?<![a-z])wu_(fwd|bwd)|k_update_(fwd|bwd)|gate_output_"),
        ("linear attention", r"wy_repr|solve_tril|merge_16x16_to_\d\dx\d\d_inverse|(?<![a-z])kkt(?![a-z])"),
        ("linear attention", r"pre_process_[fb]wd_kernel|merge_fwd_bwd|^_[fb]wd_((none_)?diag|d?kv_(parallel|reduce))"),
        ("linear attention", r"inner_chunk|causal_dot_product"),
        ("state space", r"selective_s(can|tate)|chunk_(scan|state)|state_passing|(?<![a-z])ssd_(fwd|bwd|chunk)|mamba"),
        ("state space", r"(?<![a-z])(ssm|cmix|tmix)_|segsum|_dadt_|angle_dt_|(?<![a-z])ssu(?![a-z])|_dtrap_"),
    ),
    Rule("cast", "Hadamard transform", r"hadamard|(?<![a-z])rht_", then=r"amax|quant|phase"),
    Rule("norm", "", r"rms_?norm|layer_?norm|qk_?norm|(?<![a-z])[qk]_norm|[qk]norm(_|rope)|(?<![a-z])rms_"),
    Rule("elementwise", "", r"rotary|(?<![a-z])(?<!stage1_)m?rope(?![a-z])|(fused|apply)_?m?rope|kn_entry_\dc_sbhd"),
    # --- attention, backward: its names often contain those of the forward pass ---
    *_rules(
        "flash_bwd",
        ("flash-attn 4", r"flashattentionbackward"),
        ("flash-attn 4", r"flash_?attncute", r"bwd"),
        ("flash-attn 3", r"flashattnbwd"),
        ("torch flash", r"pytorch_flash", "", r"flash_bwd"),
        ("flash-attn 2", r"flash_bwd"),
        ("cuDNN", r"flash_bprop|fmha_reduce_head"),
        ("cuDNN", r"sdpa", r"bprop"),
        ("cuDNN", r"compute_dot_do_o|convert_dq_to_16bits"),
        ("memory-efficient", r"fmha_cutlassb|attentionbackwardkernel"),
        ("CK", r"fmhabwd"),
        ("CK", r"ck_fused_attn", "", r"dk_dv_reduce|bwd"),
        ("AITER", r"aiter", "", r"fmha_bwd|dq_convert|odo"),
        ("AOTriton", r"^bwd_(kernel_(dk_dv|dq|fuse|(non)?causal)|preprocess)"),
        ("Triton", r"(?<!linear)_attn_bwd|_bwd_preprocess|^_bwd_kernel|^_bwd_(dkdv|dq)"),
        ("NATTEN", r"natten", "", r"bwd|backward"),
        ("Triton", r"attn", r"bwd|backward"),
        ("HSTU", r"hstu_(attn_)?bwd"),
        # Part of the backward pass, like dot_do_o; some strategies run it once for all blocks.
        ("", r"ringprof_(row_product|output_with_delta)"),
        ("other", r"(?<![a-z])(sum|dot)_o_do(?![a-z])"),
        ("other", r"fmha|flash_?attn|(?<!linear)(?<!linear_)attention|mha_|sdpa", "", r"bwd|backward|scoregrad"),
    ),
    # --- attention, forward ---
    *_rules(
        "flash_fwd",
        ("flash-attn 4", r"flashattentionforward|flashpreparescheduler"),
        ("flash-attn 4", r"flash_?attncute", r"fwd"),
        ("flash-attn 3", r"flashattnfwd|prepare_varlen_num_blocks|compute_attn_ws"),
        ("flash-attn 3", r"enable_sm90", "", r"flash"),
        ("torch flash", r"pytorch_flash", "", r"flash_fwd"),
        ("FlashMLA", r"flash_fwd(_splitkv)?_mla|sparse_attn_(fwd|decode)|sparse_prefill|get_mla_metadata"),
        ("flash-attn 2", r"flash_fwd"),
        ("cuDNN", r"flash_fprop|qkv_tma_setup|cu_seqlens_to_actual_seqlens"),
        ("cuDNN", r"sdpa", r"fprop"),
        ("memory-efficient", r"fmha_cutlassf|attentionkernel"),
        ("CK", r"fmhafwd|ck_fused_attn"),
        ("AITER", r"fmha_fwd_hd\d|gqa_d128_kernel|(?<![a-z])mla_(dec|pfl|a\d|reduce|fp8)|splitkv_mla|aiter::pa_"),
        ("AITER", r"aiter", "", r"fmha_fwd"),
        ("AOTriton", r"^attn_fwd"),
        ("SageAttention", r"qk_int\d?_sv_|sageattn|(?<![a-z])sage_fwd"),
        ("Triton", r"(?<!linear_)attn_fwd|decode_att_m|flash_decod"),
        ("NATTEN", r"natten|(?<![a-z])(fna|neighborhood)_"),
        ("xFormers", r"^_splitk_reduce"),
        ("HSTU", r"hstu_(attn_)?fwd"),
        ("FlashInfer", r"(prefill|decode)with(paged|ragged)?kvcache|batchmla"),
        ("TensorRT-LLM", r"fmhasm\d+|fmha_v2|gemm_mha_v2|masked_multihead_attention|kernel_mha|xqa_kernel"),
        ("vLLM", r"(paged|unified|cached_kv)_attention|pagedattn|^reduce_segments"),
        # Old flash-attention kernels have exactly this name; Triton layer norms have it too.
        ("Triton", r"^_fwd_kernel(\b|_splitk|_aligned|_int8kv)|^_fwd_(grouped_)?kernel_stage\d"),
    ),
    *_rules(
        "flash_fwd",
        ("other", r"fmha|flash_?att(ention|n)"),
        ("other", r"(?<!linear)(?<!linear_)(?<!transpose)attention(?!_?(mask|bias|input|softmax|meta|pool))"),
        ("other", r"attn(?!_res)", r"fwd|forward|prefill|decod|ragged|varlen|paged|split_?kv"),
        ("other", r"attn_kernel|sparse_mla|sdpa|(?<![a-z])sdp_|flash_mha|splash_m[hq]a"),
        ("other", r"attend_(ker|prep)|(dense|sparse)_fwd_|(?<![a-z])(pa|sta)_(kernel|metadata|prefill|decode|fwd|bwd)"),
        ("other", r"(?<![a-z])(mha|mla|nsa|mqa|gqa)_(\w{1,20}_)?(fwd|forward|bwd|backward|prefill|decod)"),
        loose=True,
    ),
    # --- convolutions and norms before matrix products, which many of them contain by name ---
    *_rules(
        "convolution",
        ("", r"implicit_(gemm|convolve)|xmma_[fdw](prop|grad)|(fprop|[dw]grad)_?(optimized|analytic|2d|alg|engine)"),
        ("cuDNN", r"fft2d_[rc]2[rc]_\d|compute\w{0,20}offsetskernel"),
        ("", r"winograd|im2col|col2im|vol2col|col2vol|igemm_(fwd|bwd|wrw)|convol|conv\dd|conv_(depth|fwd|bwd|cuda)"),
        ("MIOpen", r"sp3asmconv|naive_conv|[shi]\d*cudnn"),
        ("MIOpen", r"miopen", r"conv"),
    ),
    # Pooling and recurrent layers run this kernel too.
    Rule("convolution", "cuDNN", r"scalepackedtensor", loose=True),
    *_rules(
        "norm",
        ("", r"(batch|group|instance|weight)_?norm|(?<!tensor_)l2_?norm_|(?<![a-z])bn_(fw|bw)"),
        ("", r"(?<![a-z])ln_(\w{1,30}_)?(fwd?|bwd?|forward|backward)(_|$)|reduce_bn_|_bias_ln_"),
        ("torch or apex", r"cuapplylayer|cucompute(part)?grad|gammabeta|rowwisemoments|computefusedparams|welford"),
    ),
    Rule("reduction", "", r"(?<![a-z])(block|warp)_all_?reduce"),
    # --- matrix products ---
    Rule("permute", "", r"utils::transpose|batched_transpose|nchwtonhwc|nhwctonchw|repack|preshuffle_weight"),
    Rule("permute", "DeepGEMM", r"deep_gemm::", then=r"transpose|layout"),
    Rule("permute", "Transformer Engine", r"multi_tensor_", then=r"pad_|swizzle"),
    Rule("permute", "mixture of experts", r"moe", then=r"sort|align|permut|topk"),
    Rule("elementwise", "MIOpen", r"(sub|op)_?tensor_?op|optensor"),
    *_rules(
        "gemm",
        ("cuBLAS", r"nvjet|cublas|splitk_?reduce|xmma|reduce_1block_kernel|gemv"),
        ("cuBLAS", r"epilogue::impl::globalkernel|(?<![a-z])scal_kernel<"),
        ("", r"(?<!fb)gemm(?!::|_tiling)|cijk_|matmul|tensorop|(?<![a-z])bmm(?![a-z])|(scaled|grouped)_mm"),
        ("", r"flatmm|(?<!copy_)wgrad|(?<![a-z])(up|gate|down)_proj"),
        ("mixture of experts", r"(fused|batched)_moe_(lora_)?kernel|mfma_moe|(?<![a-z])fmoe|kernel_moe|moe_mx"),
        ("quantized or small", r"marlin|machete|wvsplitk|llmm\d|(?<![a-z])[bs]gmv|lora_(shrink|expand)|gemlite"),
        ("mixture of experts", r"moe[12]_|moe_?gemm"),
        ("mixture of experts", r"moe", r"stage\d|batched|_i?q\d|_sm\d\d|(?<![a-z])d[wx]\d?_"),
        ("sparse", r"(?<![a-z])(sdd|dsd|dds)_kernel|csrmm|spmm|sddmm"),
        ("", r"mul_mat_|mqa_logits|(?<![a-z])dot_kernel|_mm(?![a-z])|addmm"),
        # Data types of both factors, with or without that of the product.
        ("", r"(?<![a-z])(w4a16|w8a16|w4a8|w8a8|w4a4|a16w4|a16w8|a8w4|a8w8|a4w4)(?![a-z])"),
        ("", r"f8f8bf16|f8i4bf16|f4f4bf16|i8i8bf16|bf16i4bf16|bf16bf16bf16"),
    ),
    # --- embedding tables, which some libraries update during the backward pass ---
    *_rules(
        "embedding",
        ("FBGEMM", r"embedding_codegen|codegen_(forward|backward)|rowwise_adagrad|find_long_segments"),
        ("FBGEMM", r"bounds_check_indices|linearize_(index|cache)|(?<![a-z])l[xf]u_cache"),
        ("torch", r"(?<!add)embedding|(?<![a-z])lookup_|krn_partial|compute_grad_weight|sum_and_scatter"),
        ("", r"(?<![a-z])(dec|enc|tok|token|word)_emb(?![a-z])"),
    ),
    # --- the optimizer, and operations on lists of its tensors ---
    Rule("reduction", "norm of gradients", r"lpnorm|l2norm(functor|op)|maxnorm"),
    Rule("permute", "torch", r"multi_tensor_apply", later=r"at::native::copy<"),
    *_rules(
        "optimizer",
        ("", r"fused_?adam|adammath|fused(sgd|adagrad|lamb|optimizer)|(adam|sgd|lamb|adagrad)\w{0,10}functor"),
        ("", r"koptimizer|kprecondition|amp_(foreach|update)|lambstage|novograd|newton_?schulz|param_update"),
        ("", r"(?<![a-z])(adamw?|adagrad|adafactor|lamb|lion|muon|shampoo|ns_line)_"),
    ),
    Rule("optimizer", "torch", r"multi_tensor|addcdiv", loose=True),
    # --- softmax, activations, conversions ---
    Rule("softmax", "", r"soft_?max|sparsemax|cross_?entropy|c?ce_(forward|backward)|celoss|sumexp|kl_?div|_jsd_"),
    Rule("softmax", "Transformer Engine", r"score_for_moe"),
    # XLA names a fusion by how it runs and by its root: loop_add_fusion, input_reduce_fusion_2, wrapped_transpose.
    Rule("cast", "XLA", r"^(loop|wrapped)_convert"),
    Rule("permute", "XLA", r"^(loop|input|wrapped)_(dynamic_|transpose|slice|gather|scatter|concat|copy|pad|reverse)"),
    Rule("reduction", "XLA", r"^(input|wrapped|row|column)_\w{0,60}reduc"),
    Rule("elementwise", "XLA", r"^(loop|input)_\w{0,80}fusion"),
    # TensorRT's Myelin lists the fused operations.
    Rule("norm", "TensorRT", r"__myl_", then=r"mean\w{0,80}sqrt"),
    Rule("elementwise", "TensorRT", r"__myl_", then=r"add|mul|sub|silu|sigmoid|erf|tanh", loose=True),
    Rule("norm", "nvFuser", r"nvfuser_", r"persistent"),
    Rule("elementwise", "nvFuser", r"nvfuser_(pointwise|none)"),
    *_rules(
        "elementwise",
        ("activation", r"act_and_mul|swiglu|geglu|silu|gelu|relu|swish|sigmoid_[fb]wd|activation"),
        ("activation", r"threshold_kernel|_act_(kernel|combine)"),
        ("Unsloth", r"^_(approx|exact)_(forward|backward)_kernel|^_(dwf_dw_d)?fg_kernel"),
        ("dropout", r"dropout|random_(uniform|normal)|distribution_(elementwise|nullary)"),
    ),
    *_rules(
        "cast",
        ("FBGEMM", r"hfp8|fp8_?rowwise|fp8_?quantize|fp8_qparam"),
        ("torch", r"float\w{0,12}_copy_kernel|unrolled_elementwise_kernel<at::native::direct_copy"),
        ("torch", r"direct_copy_kernel", "", r"loadwithcast"),
        ("", r"(?<!broad)castkernel|(?<!no_)cast_(to|back|transpose|and|kernel|dbias|only|(mx|nv)?fp\d)"),
        ("", r"(?<![a-z])k?(de)?quant|fp4quant|fp8quant|fp8_\w{0,40}_scales_|_from_mxfp"),
        ("", r"_quant_|quantize|(?<![a-z])to_fp8|(?<![a-z])(cvt|convert)_(?!\w{0,30}ind)|scale_from_amax"),
        ("", r"stochastic_round|(?<![a-z])(q|k|v|kv)_phase\d|block_scaled"),
    ),
    # --- data movement ---
    *_rules(
        "permute",
        ("torch", r"direct_copy_kernel|catarray|split_with_sizes_copy|chunk_cat|copy_device_to_device"),
        ("", r"transpose|permut|copy_(tensor_)?kernel|pad_kernel|concat|split_reshape|flip_kernel"),
        ("", r"[gs]et_rows|swapdimension|row_id_map|write_indices|compute_cuda_kernel|bitmatrix|writeback_idx"),
        ("", r"swizzle|(?<![a-z])(un)?(pack|pad|padding)(?!_along)(_|$)|transform(4d)?_0213|d2dmemcpy"),
        ("", r"arrange_|reorder|interleave|compact_(in|out)put|shift_partition|masked_update|roll_cuda|src2dst"),
        ("", r"re(build|move)_?padding|split_(2d_)?(jagged|head)|blocked_layout|repeat_?kv|(?<![a-z])slice_|replicate"),
        ("experts", r"routingindices|routing::|finalize(moe|kernel)|moe_align|align_block_size|expand(_to|input)"),
        ("experts", r"count_\w{0,20}(expert|token)|fused_mapping|moe_?(fused_?)?(gate|scan)|sort_chunks"),
        ("experts", r"dispatch_layout|multihot|token_shift|expertprefixsum|(?<![a-z])routing_|_routing(?![a-z])"),
    ),
    *_rules(
        "permute",
        ("torch", r"index_?(select|elementwise|put|copy|fill|add|func)|indexing_backward|scatter|gather|masked_select"),
        ("", r"radixsort|bitonicsort|mergesort|(?<!reduce_)topk|sort_by|sorting|_sort_|unique|(?<!count_)nonzero"),
        loose=True,
    ),
    # --- templates and common words: reductions and pointwise operations ---
    *_rules(
        "reduction",
        ("torch", r"reduce_kernel|reduceop"),
        ("CUB", r"devicereduce|segmented_?reduce|devicescan|scan_(inner|outer)|compactinit"),
        ("", r"nll_loss|moe_sum|cumsum|cumprod|minmax|logcumsum|histogram|bincount|argm(ax|in)|pool_|pooling"),
        ("", r"(average|avg|max|lp)_?pool|count_nonzero|scan_part"),
        loose=True,
    ),
    *_rules(
        "elementwise",
        ("torch", r"elementwise|triu_tril|where_kernel|fill_?functor|(?<![a-z])fill_(?!expert)(\w{1,20}_)?kernel"),
        ("", r"elemwise|upsample|penalt|(bin|operator)_bcast|(?<![a-z])scal_kernel|fused_bias"),
        ("", r"(ones|zeros)_kernel|index_mul_|relativeattentionbias|bias_(add|glu|tanh)"),
        loose=True,
    ),
    *_rules(
        "reduction",
        ("", r"reduce|reduction|amax_kernel"),
        ("", r"(?<![a-z])(sum|mean|amax|norm|any|max|min|prod)_(kernel|partial|dim|[fb]wd)"),
        loose=True,
    ),
    *_rules(
        "elementwise",
        ("TorchScript", r"^fused_(\w{0,40}_)?(add|sub|mul|div|sigmoid|tanh|exp|neg|pow|sqrt)(_|$)"),
        ("", r"eigenmetakernel|deviceforkernel|devicetransform|softcap|(un|bin)ary_(grad_)?kernel"),
        ("", r"(?<![a-z])gat(ing|ed_|e_)"),
        ("", r"(?<![a-z])(add|mul|scale|axpy|residual|bias)\d?_(\w{0,20}_)?kernel|pointwise"),
        loose=True,
    ),
    # CANN: names of the call and of the operator that it runs, each with a version.
    *_rules("optimizer", ("CANN", r"applyadam|fusedemaadam"), device=NPU),
    *_rules("cast", ("CANN", r"^(aclnn)?cast(aicore)?[v_\d]|^cast$|(dynamic|ascend)(anti)?quant"), device=NPU),
    *_rules(
        "permute",
        ("CANN", r"transdata|(init|finalize)routing|stridedslice"),
        ("CANN", r"^(aclnn)?(slice|tile|concat|split|index)[dv]{0,2}(aicore)?(v?\d|_|$)"),
        device=NPU,
    ),
    *_rules(
        "elementwise",
        ("CANN", r"dsarandom|genmask|^(aclnn)?(inplace)?(add|sub|mul|div|axpy)[ns]?(aicore)?(v?\d|_|$)"),
        ("CANN", r"^(aclnn)?(inplace)?(fill|zero|exp(?!ert|and)|neg|pow|r?sqrt|tanh|(real|floor)div)"),
        ("CANN", r"^(aclnn)?(inplace)?(select|sigmoid|maximum|minimum|greater|less|equal|logical)"),
        device=NPU,
    ),
    Rule("norm", WORD_ONLY, r"norm(?!al)|normaliz", loose=True),
    Rule("elementwise", WORD_ONLY, r"broadcast|residual|add_?bias|_scale|grid_?sampl|_loss|sigmoid|memset", loose=True),
    Rule("permute", WORD_ONLY, r"expert|copy|(?<![a-z])cpy_|sort|radix|flip_|repeat_|swap|stack|sampl", loose=True),
    Rule("permute", "", r"sparse(24|nm)_|memcpy"),
    Rule("gemm", WORD_ONLY, r"(?<![a-z])(linear(?!_?(att|i[sz]e|id|interp|scan))|splitk_)", loose=True),
    Rule("flash_fwd", WORD_ONLY, r"(?<![a-z])att(n|en)?\d?(?!_?(mask|bias|res))(?![a-z])|^_?score_kernel", loose=True),
)  # fmt: skip


_LONGEST_NAME = 8192
"""Length up to which names are matched: template names are long, and names in an untrusted file may be longer."""

_BRACKET = re.compile(r"operator\s*(?:\(\)|[<>=-]+)|\(anonymous namespace\)|[<>()]")

_PLAIN = re.compile(r"[\w:|<]*")
_PIECE = re.compile(r"[\w:-]+(?![\w:?*+{-])|(\\.|\[[^]]+]|.)([?*+]|\{[\d,]+\})?")
_WORD = re.compile(r"\w*")
_WORDS = re.compile(r"[\w:-]+|[<> &]")
_PASS = re.compile(
    r"fwd|bwd|(for|back)ward|[fb]prop|cutlass[fb]|do_o|odo|dk_?dv|_dk?[qv]|prefill|decode", re.IGNORECASE
)
_FORWARD = re.compile(r"fwd|forward|fprop|prefill|decod")
_BACKWARD = re.compile(r"bwd|backward|bprop|(?<![a-z])(grad|dq|dk|dv|dkv|dqkv)(?![a-z])")


def required_words(pattern: str) -> tuple[str, ...]:
    """Return the literal words of a pattern, one of which must occur in every matching name; "" occurs in any name."""
    # Split the pattern into its alternatives, each a list of pieces; a bracketed group is one piece.
    branches, group, depth = [list[str]()], "", 0
    for piece in _PIECE.finditer(pattern):
        depth += (piece[1] == "(") - (piece[1] == ")")
        group += piece[0]
        if depth:
            continue
        if group == "|":
            branches.append([])
        else:
            branches[-1].append(group)
        group = ""
    words: tuple[str, ...] = ()
    for branch in branches:
        plain_run, choices = "", list[tuple[str, ...]]([("",)])
        for text in branch:
            plain_run = plain_run + text if _WORDS.fullmatch(text) else ""
            choices.append((plain_run,))
            # Optional pieces and lookarounds require no word.
            if text.endswith(")") and not text.startswith(("(?<", "(?=", "(?!")):
                choices.append(required_words(text[1:-1]))
        # The most selective words are those of the piece whose shortest word is longest.
        words += max(choices, key=lambda choice: min(map(len, choice)))
    return words


_PREFIX_LENGTH = 3
"""Letters of a word by which rules are looked up: an untrusted trace may hold a million names."""


@cache
def _lookup() -> tuple[list[tuple[Rule, tuple[str, ...], bool]], dict[str, list[int]], list[int]]:
    """Arrange the built-in rules so that few are tried for a name.

    Searching words is many times faster than searching expressions, and few expressions are ever compiled: compiling
    all of them takes longer than reading a small trace. Return a table of each rule, its required words and whether
    one such word is sufficient; the rows of the table by the prefix of a required word; and the rows of the rules that
    any name may match.
    """
    table: list[tuple[Rule, tuple[str, ...], bool]] = []
    by_prefix: dict[str, list[int]] = {}
    always: list[int] = []
    for index, rule in enumerate(RULES):
        is_plain = _PLAIN.fullmatch(rule.pattern) is not None
        words = tuple(rule.pattern.split("|")) if is_plain else required_words(rule.pattern)
        table.append((rule, words, is_plain and not (rule.then or rule.later)))
        if min(map(len, words)) < _PREFIX_LENGTH:
            always.append(index)
            continue
        for word in words:
            by_prefix.setdefault(word[:_PREFIX_LENGTH], []).append(index)
    return table, by_prefix, always


# --- torch.compile's Triton kernels --------------------------------------------------------------


_NAME = re.compile(r"triton_(?:(poi|red|per|tem|for|spl|mix|unk)_)?fused_?(\w*)")


def _any_word(*names: str) -> re.Pattern[str]:
    """Return a pattern for any of these operator names between underscores."""
    return re.compile(rf"(?:^|_)(?:{'|'.join(names)})(?=_|$)")


_MERGE = re.compile(r"sub_sigmoid_\w*mul_sub")  # ring-flash-attention's update of out and LSE
_BACKWARD_ATTENTION = _any_word("flex_attention_backward")
_ATTENTION = _any_word("flex_attention", "flex_decoding")
_CONVOLUTION = _any_word("convolution")
_PRODUCT = re.compile(r"mm(?=_|$)|matmul|linear|einsum")
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
        if _BACKWARD_ATTENTION.search(operators):
            return "flash_bwd"
        if _ATTENTION.search(operators):
            return "flash_fwd"
        if _CONVOLUTION.search(operators):
            return "convolution"
        # A template of the program's own lists none of torch's products.
        return "gemm" if _PRODUCT.search(operators) or not re.search("[a-z]", operators) else None
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
    if sort in ("red", "per", "spl"):
        return "reduction"
    if _ARITHMETIC.search(operators):
        return "elementwise"
    if _MOVES.search(operators.replace("_to_copy", "")):
        return "permute"
    return "cast" if "_to_copy" in operators else "elementwise"


def rule_for(name: str, user_rules: Sequence[Rule] = (), device: str = "") -> Rule | None:
    """Return the first rule that matches a kernel's name, or None; ``user_rules`` come before the built-in ones.

    ``device`` is the name of the device that ran it; rules for other devices do not count.
    """
    for rule in user_rules:
        if re.search(rule.pattern, name, re.IGNORECASE | re.DOTALL):
            return rule
    name = name[:_LONGEST_NAME]
    if kind := kind_of_inductor(name):
        # An Inductor name lists the fused operators, which decides the kind.
        return Rule(kind, "Triton", "")
    plain = _without_parameters(name).lower()
    built_in = _built_in_rule_for(plain, NPU if plain.startswith("aclnn") else device)
    if built_in and built_in.kind == "flash_fwd" and _BACKWARD.search(plain) and not _FORWARD.search(plain):
        # The words of attention are those of both passes.
        return built_in._replace(kind="flash_bwd")
    return built_in


def _without_parameters(name: str) -> str:
    """Return a demangled name without its parameter list: parameter types do not say what a kernel does."""
    opened: list[str] = []
    for token in _BRACKET.finditer(name):
        bracket = token[0]
        if bracket == "(" and not opened and token.start():
            return name[: token.start()]
        if bracket in "<(":
            opened.append(bracket)
        elif bracket == ")":
            # An angle bracket still open inside parentheses was a "less than".
            while opened and opened.pop() != "(":
                pass
        elif bracket == ">" and opened[-1:] == ["<"]:
            opened.pop()
    return name


def _built_in_rule_for(name: str, device: str) -> Rule | None:
    """Return the first built-in rule for this device that matches a lower-case name without parameters."""
    table, by_prefix, always = _lookup()
    prefixes = {name[start : start + _PREFIX_LENGTH] for start in range(len(name) - _PREFIX_LENGTH + 1)}
    for index in sorted({index for prefix in by_prefix.keys() & prefixes for index in by_prefix[prefix]}.union(always)):
        rule, words, sufficient = table[index]
        if not device.startswith(rule.device) or not any(word in name for word in words):
            continue
        if sufficient:
            return rule
        pattern = re.compile(rule.pattern)
        match = pattern.search(name)
        if match is None or (rule.later and not re.compile(rule.later).search(name, match.end())):
            continue
        if not rule.then or _word_contains(name, pattern, re.compile(rule.then), match):
            return rule
    return None


def _word_contains(name: str, pattern: re.Pattern[str], then: re.Pattern[str], match: re.Match[str] | None) -> bool:
    """Return whether ``then`` occurs in a word behind a match of ``pattern``; each word is searched once."""
    while match is not None:
        word = _WORD.match(name, match.end())
        assert word is not None
        if then.search(name, *word.span()):
            return True
        match = pattern.search(name, max(word.end(), match.start() + 1))
    return False


def lacks_pass_word(name: str) -> bool:
    """Return whether an attention kernel's name lacks the pass: a helper of both passes, or a name cut short."""
    return _PASS.search(name[:_LONGEST_NAME]) is None
