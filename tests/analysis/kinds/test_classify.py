"""Evidence for kinds, strongest first: metadata, CPU records of the launch, annotations, the name."""

from __future__ import annotations

import pytest

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.kinds.classify import EVIDENCE, classify
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import MEMCPY, MEMSET
from tests.analysis.build import FLASH, MAIN, NCCL, Builder, collective, kind_names

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
ROTATION = {"in_split": (0, 0, 1000, 0), "out_split": (1000, 0, 0, 0)}


def kinds_of(builder):
    return kind_names(classify(builder.trace()))


def evidence_of(builder):
    return [EVIDENCE[code] for code in classify(builder.trace()).evidence]


def test_memory_copies_and_sets_are_classified_by_category():
    b = Builder()
    b.run("Memcpy DtoD (Device -> Device)", 0, 1, category=MEMCPY)
    b.run("Memcpy PtoP (Device -> Device)", 1, 2, category=MEMCPY)
    b.run("Memset (Device)", 2, 3, category=MEMSET)
    assert kinds_of(b) == ["memcpy", "copy_engine", "memset"]


def test_metadata_takes_precedence_over_the_kernel_name():
    b = Builder().run(NCCL, 0, 1, launched=0, own=collective("all_to_all"))
    assert kinds_of(b) == ["all_to_all"]
    assert evidence_of(b) == ["metadata"]


def test_batched_kernel_takes_records_since_the_previous_launch():
    b = Builder()
    b.batch(100, 200, 300, to=1, source=3)
    b.run(ADD, 210, 220, launched=110)
    b.batch(200, 400, 500, to=1, source=3, tensors=3)
    classified = classify(b.trace())
    assert [len(classified.calls.get(activity, ())) for activity in range(3)] == [4, 0, 6]
    assert kind_names(classified) == ["send_recv", "elementwise", "send_recv"]
    assert evidence_of(b) == ["cpu_records", "name", "cpu_records"]


def test_wait_records_are_not_assigned_to_kernels():
    b = Builder().record(10, 12, collective("wait")).batch(100, 200, 300, to=1, source=3)
    assert len(classify(b.trace()).calls[0]) == 4


def test_records_of_another_thread_are_ignored():
    b = Builder().record(10, 12, collective("allreduce"), thread=MAIN + 1).batch(100, 200, 300, to=1, source=3)
    assert kinds_of(b) == ["send_recv"]


def test_record_enclosing_the_launch_belongs_to_the_kernel():
    b = Builder().record(0, 4, collective("send", destination_rank=1))
    b.record(10, 30, collective("all_to_all")).run(NCCL, 40, 50, launched=20)
    assert kinds_of(b) == ["all_to_all"]
    assert len(classify(b.trace()).calls[0]) == 1


def test_graph_nodes_take_no_records():
    b = Builder().record(0, 4, collective("allreduce"))
    b.launches.append((10, 15, MAIN, 77))
    b.run(NCCL, 20, 30, correlation=77, node=1).run(NCCL, 30, 40, correlation=77, node=2)
    assert kinds_of(b) == ["send_recv", "send_recv"]
    assert evidence_of(b) == ["name", "name"]


def test_all_to_all_with_one_peer_is_send_recv():
    b = Builder(rank=1).record(0, 4, collective("all_to_all", **ROTATION)).run(NCCL, 20, 30, launched=10)
    assert kinds_of(b) == ["send_recv"]


def test_all_to_all_that_keeps_a_local_part_is_not_a_hop():
    b = Builder(rank=2).record(0, 4, collective("all_to_all", **ROTATION)).run(NCCL, 20, 30, launched=10)
    assert kinds_of(b) == ["all_to_all"]


def test_a_kernel_without_a_launch_record_takes_the_kind_of_its_stream():
    """Check the first all-to-all of a trace, launched before the trace begins: it is not a hop."""
    b = Builder().run(NCCL, 0, 8, stream=20)
    b.record(9, 11, collective("all_to_all")).run(NCCL, 20, 30, launched=10, stream=20)
    assert kinds_of(b) == ["all_to_all", "all_to_all"]
    assert evidence_of(b) == ["stream", "cpu_records"]


def test_stream_with_several_kinds_is_not_evidence():
    b = Builder().run(NCCL, 0, 8, stream=20)
    b.record(9, 11, collective("all_to_all")).run(NCCL, 20, 30, launched=10, stream=20)
    b.record(31, 33, collective("allreduce")).run(NCCL, 40, 50, launched=32, stream=20)
    b.run(NCCL, 60, 70, stream=24)
    assert kinds_of(b) == ["send_recv", "all_to_all", "all_reduce", "send_recv"]


def test_annotation_decides_the_kind_without_records():
    b = Builder().mark("nccl:all_to_all", 5, 15).run(NCCL, 20, 30, launched=10)
    assert kinds_of(b) == ["all_to_all"]
    assert evidence_of(b) == ["annotation"]


def test_annotation_of_a_batch_is_not_evidence():
    b = Builder().mark("nccl:coalesced", 5, 15).run(NCCL, 20, 30, launched=10)
    assert evidence_of(b) == ["name"]


def test_kernels_launched_in_a_merge_range_are_merge():
    b = Builder().mark("ringprof::fwd/step=1/merge", 0, 20)
    b.run(ADD, 100, 110, launched=10).run(ADD, 110, 120, launched=30).run(FLASH, 120, 130, launched=12)
    assert kinds_of(b) == ["merge", "elementwise", "flash_fwd"]


def test_merge_range_of_another_thread_is_ignored():
    b = Builder().mark("ringprof::fwd/step=1/merge", 0, 20, thread=MAIN + 1).run(ADD, 100, 110, launched=10)
    assert kinds_of(b) == ["elementwise"]


def test_small_kernels_of_an_attention_operator_are_attention():
    b = Builder().operate("aten::_cudnn_attention_backward", 0, 20)
    b.run(ADD, 100, 110, launched=10).run("cudnn::qkv_tma_setup", 110, 120, launched=12).run(ADD, 120, 130, launched=25)
    assert kinds_of(b) == ["flash_bwd", "flash_bwd", "elementwise"]


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("symm_mem::one_shot_all_reduce_out", "all_reduce"),
        ("_C_custom_ar::all_reduce", "all_reduce"),
        ("deep_ep::low_latency_dispatch", "all_to_all"),
        ("c10d::reduce_scatter_tensor_coalesced_", "reduce_scatter"),
        ("vllm::moe_forward", "other"),
    ],
)
def test_unknown_kernel_takes_the_communication_kind_of_its_operator(operator, kind):
    b = Builder().operate(operator, 0, 30)
    b.run("k_17", 100, 200, launched=10).run("void cutlass::gemm_kernel<4>()", 300, 400, launched=20)
    assert kinds_of(b) == [kind, "gemm"]


CUT = "void cutlass::device_kernel<flash::enable_sm90_or_la"


@pytest.mark.parametrize(
    ("name", "operator", "kind"),
    [
        (CUT, "flash_attn_3::bwd", "flash_bwd"),
        (CUT, "flash_attn_3::fwd", "flash_fwd"),
        (CUT, "aten::add", "other"),
        ("void flash::prepare_varlen_num_blocks_kernel<1>", "flash_attn_3::bwd", "flash_bwd"),
        # A specific name decides, for any operator that launched the kernel.
        ("void flash_fwd_kernel<2>", "flash_attn_3::bwd", "flash_fwd"),
    ],
)
def test_operator_decides_the_pass_for_truncated_kernel_names(name, operator, kind):
    assert kinds_of(Builder().operate(operator, 0, 30).run(name, 100, 200, launched=10)) == [kind]


@pytest.mark.parametrize(("operator", "kind"), [("_C_custom_ar::all_reduce", "all_reduce"), ("aten::add", "permute")])
def test_operator_takes_precedence_over_a_word_of_the_name(operator, kind):
    assert kinds_of(Builder().operate(operator, 0, 30).run("push_expert_rows", 100, 200, launched=10)) == [kind]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("on_device_a2av_kernel", "all_to_all"),
        ("p2p_put_kernel", "send_recv"),
        ("kernel_all2all_push_intra_node_nvl", "all_to_all"),
        ("ipc_topo_rsag8_ring_push_param_kernel", "comm_other"),
    ],
)
def test_kernels_of_other_libraries_communicate(name, kind):
    """Check 100 us of attention before each of four transfers of 200 us: two thirds are exposed communication."""
    builders = [Builder(rank=rank, world_size=2) for rank in (0, 1)]
    for b in builders:
        for start in range(0, 1_200_000, 300_000):
            b.run(FLASH, start, start + 100_000).run(name, start + 100_000, start + 300_000)
    attribution = attribute([b.trace() for b in builders])
    breakdowns = [rank.breakdown for rank in attribution.ranks]
    assert [(times.exposed_comm_ns, times.compute_ns, times.wall_ns) for times in breakdowns] == [
        (800_000, 400_000, 1_200_000)
    ] * 2
    assert kinds_of(builders[0])[1] == kind
    verdict = findings_in_memory(attribution).verdict
    assert verdict[0].startswith("66.7 % of the time is exposed communication")


def test_the_most_frequent_attention_family_comes_first():
    b = Builder().run("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_x", 0, 1)
    b.run(FLASH, 1, 2).run(FLASH, 2, 3)
    assert classify(b.trace()).attention == ("flash-attn 2", "cuDNN")


def test_an_empty_trace_has_no_kinds():
    assert kinds_of(Builder()) == []
