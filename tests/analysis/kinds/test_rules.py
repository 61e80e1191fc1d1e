"""Name rules: every family of kernels in public use is recognised by its name."""

from __future__ import annotations

import re

import pytest

from ringprof.analysis.kinds.kinds import KIND, KINDS
from ringprof.analysis.kinds.operators import (
    kind_of_attention_operator,
    kind_of_collective,
    kind_of_enclosed_kernels,
    kind_of_own_kernel,
)
from ringprof.analysis.kinds.rules import RULES, required_words, rule_for
from tests.analysis.kinds.truth import rows
from tests.paths import ROOT

NAMES = {
    "send_recv": [
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
        "void kuserbuffers_pullsend<8>(int, int)",
        "kuserbuffers_pushrecv(int, int)",
    ],
    "all_gather": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t",
        "ncclSymkDevKernel_AllGather_LLMC",
        "multimem_all_gather_kernel",
    ],
    "reduce_scatter": ["ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "ncclSymkDevKernel_ReduceScatter_LD"],
    "all_reduce": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "ncclSymDevKernel_AllReduce_AGxLL_R",
        "multimem_all_reduce_kernel<bf16>",
        "one_shot_all_reduce_kernel_inplace",
        "two_shot_all_reduce_kernel",
        "void vllm::cross_device_reduce_1stage<nv_bfloat16, 8>",
        "allreduce_fusion_kernel_oneshot_lamport",
    ],
    "broadcast": ["ncclDevKernel_Broadcast_RING_LL", "ncclKernel_Broadcast_RING_LL_Sum_int8_t"],
    "comm_other": [
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        "nvshmemi_transfer_rma_kernel",
        "put_signal_kernel",
        "wait_signal_kernel",
        "mscclKernel_Sum_half_Simple",
        "hccl_send_kernel",
        "dlslime_p2p",
    ],
    "flash_fwd": [
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false>, false, true>(Flash_fwd_params)",
        "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>(Flash_fwd_params)",
        "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128>>(Flash_fwd_params)",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(pytorch_flash::Flash_fwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd"
        "Sm90<2>, flash::CollectiveEpilogueFwd<int>>>>",
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<int>>>",
        "void flash::prepare_varlen_num_blocks_kernel<1>",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor",
        "kernel_cutlass_kernel_FlashAttentionForwardCombine_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "void ck_tile::kentry<1, FmhaFwdKernel<ck_tile::TileFmhaShape>>",
        "aiter::fmha_fwd_hd128_bf16_causal_rtne_group",
        "_ZN5aiter34fmha_fwd_hd128_bf16_causal_rtne_groupE",
        "gqa_d128_kernel",
        "_attn_fwd",
        "triton_tem_fused_flex_attention_0",
        "_fwd_kernel",
        "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<2>",
        "fmhaSm100fKernel_QkvBfloat16",
        "sage_fwd",
        "_sage_fwd",
        "_sage_fwd_no_mask",
        "fmha_v2_flash_attention_bf16_64_128_S_q_k_v_128_sm90_kernel",
    ],
    "flash_bwd": [
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)",
        "void flash_bwd_dq_dk_dv_loop_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)",
        "void flash_bwd_dot_do_o_kernel<true>(Flash_bwd_params)",
        "void flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)",
        "void flash_bwd_convert_dkv_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)",
        "void flash_bwd_clear_dkvaccum_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true>(pytorch_flash::Flash_bwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<2>>>>",
        "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple<int>>>",
        "void cutlass::device_kernel<flash::FlashAttnBwdPostprocessConvertdQ<cute::tuple<int>>>",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object",
        "kernel_cutlass_kernel_FlashAttentionBackwardPreprocess_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)",
        "void cudnn::fusion::compute_dot_do_o_ragged_specialized<true, 128>(void const*)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*)",
        "void cudnn::fusion::fmha_reduce_head_ragged(void const*)",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80",
        "void ck_tile::kentry<1, FmhaBwdDQDKDVKernel<int>>",
        "void ck_fused_attn::dk_dv_reduce_thd<int>",
        "aiter::fmha_bwd_hd128_bf16_causal_a32_rtne_psskddv",
        "triton_tem_fused_flex_attention_backward_1",
        "_attn_bwd",
        "_bwd_preprocess_do_o_dot",
        "_bwd_kernel",
        "ringprof_row_product",
        "ringprof_output_with_delta",
    ],
    "convolution": [
        "void fft2d_r2c_32x32<float, false, 0u, false>(float2*, float const*, int, cudnn::reduced_divisor, bool, int2)",
        "void fft2d_c2r_32x32<float, false, false, 1u, false, false>(float*, float2 const*, int, int, float, float)",
        "void fft2d_r2c_16x16<float>(float2*, float const*, int, int, int)",
        "cask_cudnn::computeWgradBOffsetsKernel(cask_cudnn::ComputeWgradBOffsetsParams)",
        "_ZN5cudnn4gemm26computeWgradBOffsetsKernelENS0_21ComputeBOffsetsParamsE",
        "void cask_cudnn::computeOffsetsKernel<false, false>(cask_cudnn::ComputeOffsetsParams)",
        "cask_cudnn::computeWgradSplitKOffsetsKernel(cask_cudnn::ComputeSplitKOffsetsParams)",
        "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, float const*, kernel_grad_params)",
        "void cudnn::ops::scalePackedTensor_kernel<float, float>(cudnnTensor4dStruct, float*, float)",
    ],
    "merge": [
        "ringprof_merge",
        "ringprof_merge_accumulate",
        "fused_to_sub_sigmoid_sub_mul_sub",
        "triton_poi_fused_sub_sigmoid_neg_mul_sub_1",
        "void thd_out_correction_kernel<float>",
        "thd_lse_kernel",
        "thd_grad_correction_kernel",
    ],
    "all_to_all": ["void deep_ep::intranode::dispatch<8, 768>"],
    "permute": ["thd_read_half_tensor_kernel", "thd_partition_indices_kernel"],
    "gemm": [
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
        "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "Cijk_Alik_Bljk_BBS_BH_MT128x128",
    ],
    "memcpy": ["__amd_rocclr_copyBuffer"],
    "memset": ["__amd_rocclr_fillBufferAligned"],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "triton_poi_fused_add_mul_0",
    ],
    "other": [
        "void cutlass::device_kernel<Unknown",
        "main_kernel",
        "kernel_0",
    ],
    "recurrence": [
        "_chunk_scan_fwd_kernel",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "fused_sigmoid_gating_delta_rule_update_kernel",
        "_bmm_chunk_fwd_kernel_mamba",
        "chunk_gla_fwd_A_kernel_intra_sub_inter",
        "chunk_cp_fwd_kernel_h",
        "prepare_wy_repr_bwd_kernel",
        "merge_16x16_to_64x64_inverse_kernel",
        "fused_recurrent_fwd_kernel",
        "parallel_simple_gla_bwd_kernel_dkv",
    ],
}


GROUPS = {
    "attention": ["flash_fwd", "flash_bwd"],
    "compute": [
        "recurrence", "merge", "gemm", "convolution", "embedding", "norm", "softmax", "elementwise", "reduction",
        "cast", "permute", "optimizer", "other",
    ],
    "communication": [
        "send_recv", "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "copy_engine",
        "comm_other",
    ],
    "memory": ["memcpy", "memset"],
    "other_groups": ["other_groups"],
}  # fmt: skip


# Kernel names that no rule was written for: XLA, llama.cpp, MIOpen, Transformer Engine, NATTEN, HSTU, serving engines.
OF_OTHER_JOBS = {
    "elementwise": [
        "loop_add_fusion",
        "loop_multiply_fusion.12",
        "SubTensorOpWithScalar1d",
        "void elemWiseRNNcell<__half, float>",
        "_apply_penalties_kernel",
        "void upsample_bilinear2d_out_frame<float>",
        "apply_rotary_emb_contig_kernel",
    ],
    "reduction": ["input_reduce_fusion_2", "input_multiply_reduce_fusion"],
    "permute": [
        "wrapped_transpose",
        "loop_dynamic_update_slice_fusion",
        "fused_qkvzba_split_reshape_cat_contiguous_kernel",
        "transformer_engine::swizzle_row_scaling_kernel<int>",
        "transformer_engine::multi_padding_kernel",
        "void bias_add_transform_0213",
        "void deep_gemm::transpose_fp32<512u>",
        "void vllm::gptq_marlin_repack",
        "_compute_slot_mapping_kernel",
        "void vllm::cp_gather_indexer_k_quant_cache_kernel",
        "_fwd_kernel_ep_scatter_2",
        "create_flashinfer_kv_indices_triton",
        "_fwd_kernel_destindex_copy_kv",
    ],
    "cast": [
        "loop_convert_fusion",
        "cvt_fp16_to_fp4<__nv_bfloat16>",
        "void transformer_engine::(anonymous namespace)::cast_transpose_optimized_kernel",
    ],
    "gemm": [
        "gemm_fusion_dot_12_0",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu",
        "LLMM1_kernel",
        "_fused_moe_lora_kernel",
        "void machete::kernel",
        "void mul_mat_vec_q<(ggml_type)12, 1>",
        "cute::sm100_fp8_blockwise_group_mm",
        "Cijk_D_S_PostGSU4",
    ],
    "convolution": [
        "_causal_conv1d_update_kernel",
        "ck::kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle",
        "void at::native::vol2col_kernel",
    ],
    "norm": ["vt::rocm::RmsNormGatedK<bf16>", "void weight_norm_fwd_first_dim_kernel", "AttnQkNormRopeGateK"],
    "softmax": ["triton_softmax_3", "scaled_upper_triang_masked_softmax_warp_forward"],
    "flash_fwd": [
        "_fwd_kernel_splitK",
        "_splitK_reduce",
        "context_attention_fwd_kernel",
        "PagedAttnOnline",
        "gluon_attention",
        "void natten::cuda::fna::FusedNeighborhoodAttention",
        "sm90::decode::sparse_fp8::splitkv_mla_fp8_sparse_kernel",
        "hstu_fwd_kernel",
        "parallel_nsa_fwd_kernel",
    ],
    "flash_bwd": ["hstu_bwd_kernel", "_bwd_dkdv_kernel", "context_attention_bwd_kernel"],
    "optimizer": [
        "_adamw_fused_kernel",
        "lion_update_kernel",
        "cuda_lamb_update",
        "newton_schulz_kernel",
        "kPreconditionOptimizer32bit1State",
    ],
    "embedding": ["split_embedding_backward_codegen_rowwise_adagrad_unweighted_exact_kernel"],
    "send_recv": ["void deep_ep::pp_send_impl<8>", "void deep_ep::pp_recv_impl<8>"],
    "all_reduce": ["all-reduce-start.1"],
    "all_gather": ["all-gather-start"],
    "all_to_all": ["ragged-all-to-all", "pplx::a2a dispatchKernel", "EpDispatchIntraNodeKernel"],
    "other": ["_get_attention_mask_kernel", "allocate_kernel"],
    "recurrence": ["linear_attention_chunk_fwd"],
}

EVERY_NAME = [(kind, name) for table in (NAMES, OF_OTHER_JOBS) for kind, names in table.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), EVERY_NAME)
def test_attention_families_are_recognised_by_name(kind, name):
    rule = rule_for(name)
    assert (rule.kind if rule else "other") == kind


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("cudnn_generated_fort_native_sdpa_sm80_fprop_wmma_f16_knob_32_64x64x64", "cuDNN"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "NCCL"),
        ("multimem_all_gather_kernel", "symmetric memory"),
        ("put_signal_kernel", "symmetric memory"),
        ("void vllm::cross_device_reduce_1stage<nv_bfloat16, 8>", "vLLM or TensorRT-LLM"),
        ("kuserbuffers_pushrecv(int, int)", "userbuffers"),
        ("nvshmemi_transfer_rma_kernel", "NVSHMEM"),
        ("ringprof_merge", "ringprof"),
        ("thd_lse_kernel", "Transformer Engine"),
        ("fused_to_sub_sigmoid_sub_mul_sub", "ring-flash-attention"),
        ("kernel_cutlass_kernel_FlashAttentionForwardCombine_0", "flash-attn 4"),
        ("kernel_cutlass_kernel_FlashAttentionBackwardPreprocess_0", "flash-attn 4"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<2>>>", "flash-attn 3"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<2>>>", "flash-attn 3"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "torch flash"),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true>", "torch flash"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "flash-attn 2"),
        ("void flash_bwd_dot_do_o_kernel<true>(Flash_bwd_params)", "flash-attn 2"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "cuDNN"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "cuDNN"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "memory-efficient"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "memory-efficient"),
        ("void ck_tile::kentry<1, FmhaFwdKernel<ck_tile::TileFmhaShape>>", "CK"),
        ("void ck_fused_attn::dk_dv_reduce_thd<int>", "CK"),
        ("_ZN5aiter34fmha_fwd_hd128_bf16_causal_rtne_groupE", "AITER"),
        ("_ZN5aiter24fmha_fwd_bf16_causal_rtneE", "AITER"),
        ("aiter::fmha_bwd_hd128_bf16_causal_a32_rtne_psskddv", "AITER"),
        ("_attn_fwd", "Triton"),
        ("_attn_bwd", "Triton"),
        ("void flashinfer::BatchPrefillWithRaggedKVCacheKernel<2>", "FlashInfer"),
        ("fmhaSm100fKernel_QkvBfloat16", "TensorRT-LLM"),
        ("ringprof_row_product", ""),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "cuBLAS"),
        ("__amd_rocclr_copyBuffer", "ROCm"),
        ("hstu_bwd_kernel", "HSTU"),
        ("_sage_fwd", "SageAttention"),
    ],
)
def test_attention_family_of_kernel_names(name, family):
    rule = rule_for(name)
    assert rule is not None and rule.family == family


def test_the_case_of_a_name_does_not_matter():
    rule = rule_for("NCCLDEVKERNEL_SENDRECV")
    assert rule is not None
    assert rule.kind == "send_recv"


FUNCTOR = "at::native::CUDAFunctor_add<float>"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        # Words in a parameter's type do not count.
        ("void compute(cudnn::reduced_divisor, int)", None),
        ("void work<float>(flash::Flash_fwd_params)", None),
        ("void ns::work<(ns::Mode)1, float>(ncclDevKernelArgs<4096ul>*, int)", None),
        ("void (anonymous namespace)::work<float>(gemm::Params)", None),
        ("void work<float>(gemm::Par", None),
        ("void Work::operator()<float>(gemm::Params) const", None),
        ("void work<(8 < 4), float>(gemm::Params)", None),
        # Everything before the parameters counts.
        (f"void at::native::elementwise_kernel<128, 4, at::native::gpu<{FUNCTOR}>(at::It&)::{{lambda(int)#1}}>(int)",
         "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Metadata<4>, (anonymous namespace)::Adam"
         "Functor<float>>(Metadata<4>, float)", "optimizer"),
        ("std::enable_if<(((8)>(0)))&&exists, void>::type vllm::fused_add_rms_norm_kernel<T, 8>(T*, int)", "norm"),
        ("void run<foo(int)::{lambda(int)#1}::operator()() const::{lambda()#2}, gemm>(int)", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(cutlass_80_tensorop_s1688gemm::Params)", "gemm"),
        ("void run<(less::operator<)1, gemm>(int)", "gemm"),
        ("void run<gemm, foo(in", "gemm"),
        ("(gemm)", "gemm"),
    ],
)  # fmt: skip
def test_parameters_in_kernel_names_are_ignored(name, kind):
    rule = rule_for(name)
    assert (rule.kind if rule else None) == kind


@pytest.mark.parametrize(
    ("name", "on_npu", "elsewhere"),
    [
        ("Tile_3", "permute", None),
        ("Exp", "elementwise", None),
        ("split_scheduler", "permute", None),
        # The name itself says CANN, as in a printed table.
        ("aclnnTanh_Tanh_Tanh", "elementwise", "elementwise"),
    ],
)
def test_cann_rules_are_for_npus_alone(name, on_npu, elsewhere):
    rules = [rule_for(name, device=device) for device in ("Ascend NPU", "NVIDIA H200")]
    assert [rule.kind if rule else None for rule in rules] == [on_npu, elsewhere]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sparse_mla_bwd_kernel", "flash_bwd"),
        ("sparse_mla_fwd_kernel", "flash_fwd"),
        ("my_flash_attention_dkv", "flash_bwd"),
        # The word must stand alone.
        ("sdpa_upgrade_kernel", "flash_fwd"),
    ],
)
def test_backward_attention_is_never_read_as_forward(name, kind):
    rule = rule_for(name)
    assert rule is not None and rule.kind == kind


def test_group_of_each_kind():
    assert {group: [kind.key for kind in KIND.values() if kind.group == group] for group in GROUPS} == GROUPS
    assert sum(map(len, GROUPS.values())) == len(KINDS)


def test_metrics_page_lists_every_kind():
    """Check every kind except communication of other groups, which is not listed there."""
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    lines = page.partition("| class | kinds |\n")[2].partition("\n\n")[0].splitlines()[1:]
    groups = ("attention", "compute", "communication", "memory")
    assert [re.findall(r"`(\w+)`", line) for line in lines] == [GROUPS[group] for group in groups]


def test_every_rule_has_a_known_kind():
    assert {rule.kind for rule in RULES} <= set(KINDS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::_scaled_dot_product_cudnn_attention", "flash_fwd"),
        ("aten::scaled_dot_product_attention", "flash_fwd"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "flash_bwd"),
        ("aten::_flash_attention_backward", "flash_bwd"),
        ("aten::_efficient_attention_forward", "flash_fwd"),
        ("flash_attn::_flash_attn_varlen_forward", "flash_fwd"),
        ("flash_attn_3::bwd", "flash_bwd"),
        ("RingAttentionBackward", None),
        ("aten::mm", None),
    ],
)
def test_kind_of_attention_operators(name, kind):
    assert kind_of_attention_operator(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("send", "send_recv"),
        ("recv", "send_recv"),
        ("nccl:_all_gather_base", "all_gather"),
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allreduce", "all_reduce"),
        ("all_to_allv", "all_to_all"),
        ("broadcast", "broadcast"),
        ("barrier", "comm_other"),
        ("wait", None),
        ("init", None),
        ("nccl:", None),
        ("nccl:c10d::wait", None),
    ],
)
def test_kind_of_recorded_collective_names(name, kind):
    assert kind_of_collective(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("optimizer_step", "optimizer"),
        ("Optimizer.zero_grad#AdamW.zero_grad", None),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::native_layer_norm_backward", "norm"),
        ("_C::fused_add_rms_norm", "norm"),
        ("aten::linalg_vector_norm", None),
        ("aten::embedding_dense_backward", "embedding"),
        ("torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>", "embedding"),
        ("fbgemm::permute_2D_sparse_data", "permute"),
        ("aten::add_", None),
    ],
)
def test_the_kind_of_kernels_inside_an_operator_or_annotation(name, kind):
    assert kind_of_enclosed_kernels(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "gemm"),
        ("aten::_scaled_mm", "gemm"),
        ("aten::cudnn_convolution", "convolution"),
        ("aten::convolution_backward", "convolution"),
        ("aten::_log_softmax_backward_data", "softmax"),
        ("vllm::unified_attention_with_output", "flash_fwd"),
        ("kernel_file layer_norm.py", "norm"),
        ("kernel_file ch4lah5qtiqtyrlhee4kxisgq2na7hyppsiit5mhcmnefm6d7vir.py", None),
        ("aten::add_", None),
        ("my_norm_of_nothing", None),
    ],
)
def test_the_kind_of_an_operators_own_kernel(name, kind):
    assert kind_of_own_kernel(name) == kind


def test_long_names_are_classified_in_linear_time():
    for name in ("a" * 10**6, "aten::" + "norm" * 250_000 + "!", "fused_" + "x_" * 500_000, "flash" * 200_000):
        assert kind_of_enclosed_kernels(name) in (None, "norm")
        assert kind_of_own_kernel(name) is None
        rule_for(name)


def test_names_matching_a_rule_contain_a_required_word():
    """Check that the words only save time: without them, the same rules match."""
    names = {name.lower() for _, name in EVERY_NAME} | {row.name.lower() for row in rows()}
    for rule in RULES:
        words = required_words(rule.pattern)
        assert not [name for name in names if re.search(rule.pattern, name) and not any(word in name for word in words)]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("nccl", ("nccl",)),
        ("a_?gather|moe_?a2a", ("gather", "moe")),
        (r"(?<![a-z])(add|mul)_kernel", ("_kernel",)),
        ("sdpa(_x)?bprop", ("bprop",)),
        (r"x{2}conv\dd", ("conv",)),
        (r"[ab]|(c|d)", ("", "c", "d")),
        (r"(?<![a-z])(un)?(mha|mla|nsa)_(fwd|(pre|x)fill)", ("mha", "mla", "nsa")),
        (r"^a_\w{0,9}(long|longer)?", ("a_",)),
    ],
)
def test_required_words_of_a_pattern(pattern, words):
    assert required_words(pattern) == words
