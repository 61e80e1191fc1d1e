"""Runs on CPU processes: operators compute, ringprof::wait is exposed communication, and nothing overlaps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ringprof.scale.pipeline import attribute
from tests.analysis.build import Builder
from tests.analysis.sweep import sweep

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"


def rank_of(builder):
    return attribute([builder.trace()]).ranks[0]


def codes(builder):
    return {warning.code for warning in attribute([builder.trace()]).warnings}


def example():
    b = Builder(world_size=1).mark("ringprof::iteration", 0, 1000)
    b.operate("aten::scaled_dot_product_attention", 100, 300).operate(FORWARD, 110, 290)
    b.mark("ringprof::wait", 300, 400)
    b.mark("ringprof::fwd/step=1/merge", 400, 450).operate("aten::add", 410, 440)
    b.operate("MulBackward0", 450, 600).operate(BACKWARD, 460, 560).operate("aten::copy_", 570, 600)
    b.operate("aten::mm", 700, 800).operate("aten::view", 900, 950)
    return b


def test_cpu_run_breakdown_by_hand():
    rank = rank_of(example())
    b = rank.breakdown
    assert rank.on_cpu
    assert (b.wall_ns, b.compute_ns, b.exposed_comm_ns, b.exposed_memory_ns) == (1000, 200 + 30 + 100 + 100, 100, 30)
    assert b.idle_ns == 1000 - 430 - 100 - 30
    assert (b.overlapped_ns, b.overlap_ratio) == (None, None)


def test_cpu_run_kinds_by_hand():
    kinds = {kind: (t.time_ns, t.calls) for kind, t in rank_of(example()).breakdown.kinds.items()}
    assert kinds == {
        "flash_fwd": (200, 1),
        "flash_bwd": (100, 1),
        "merge": (30, 1),
        "gemm": (100, 1),
        "memcpy": (30, 1),
        "send_recv": (100, 1),
    }


def test_cpu_transfers_are_not_split_and_a_warning_names_the_reason():
    assert codes(example()) == {"cpu_no_transfer_times"}
    assert rank_of(example()).splits == ()


def test_missing_wait_marks_are_a_warning():
    b = Builder(world_size=2).operate(FORWARD, 0, 100)
    assert "cpu_no_wait_marks" in codes(b)


def test_single_cpu_process_has_no_warning():
    assert codes(Builder(world_size=1).operate(FORWARD, 0, 100)) == set()


def test_wall_without_an_iteration_mark_spans_the_operators():
    assert rank_of(Builder(world_size=1).operate(FORWARD, 10, 110)).breakdown.wall_ns == 100


def test_communication_outside_operators_counts_without_marks():
    b = Builder(world_size=2).operate(FORWARD, 100, 200).mark("gloo:all_reduce", 50, 80, thread=7)
    b.mark("gloo:all_reduce", 150, 400, thread=7).mark("somebody's own", 0, 1000)
    breakdown = rank_of(b).breakdown
    assert (breakdown.start_ns, breakdown.end_ns, breakdown.comm_ns) == (50, 400, 280)
    assert (breakdown.exposed_comm_ns, breakdown.compute_ns, breakdown.idle_ns) == (230, 100, 20)


def test_cpu_iterations_are_measured_separately():
    b = Builder(world_size=1)
    for start in (0, 1000):
        b.mark("ringprof::iteration", start, start + 500).operate(FORWARD, start + 100, start + 200)
    rank = rank_of(b)
    assert [part.wall_ns for part in rank.iterations] == [500, 500]
    assert rank.breakdown.wall_ns == 1500


SPANS = st.tuples(st.integers(0, 80), st.integers(1, 20))


@settings(deadline=None)
@given(st.lists(SPANS, min_size=1, max_size=8), st.lists(SPANS, max_size=5))
def test_the_parts_sum_to_the_wall(operators, waits):
    b = Builder(world_size=1).mark("ringprof::iteration", 0, 100)
    for start, length in operators:
        b.operate(FORWARD, start, start + length)
    for start, length in waits:
        b.mark("ringprof::wait", start, start + length)
    result = rank_of(b).breakdown
    events = [(s, s + n, "compute") for s, n in operators] + [(s, s + n, "comm") for s, n in waits]
    expected = sweep([(0, 0, "memory"), (100, 100, "memory"), *events])
    assert result.exposed_comm_ns == expected["comm"]
    assert result.compute_ns == expected["compute"] - expected["overlapped"]
    assert result.idle_ns == expected["idle"]


def data_parallel():
    """Build a data-parallel step: reductions beside the backward pass, waited for at the end; then a barrier."""
    b = Builder(world_size=2).mark("ProfilerStep#5", 0, 1000)
    b.operate("aten::mm", 0, 400).operate("c10d::allreduce_", 100, 110)
    b.mark("gloo:all_reduce", 110, 300, thread=7).mark("gloo:all_reduce", 380, 700, thread=8)
    return b.mark("gloo:barrier", 800, 850, thread=7).operate("aten::add_", 900, 1000)


def test_the_ranges_of_gloo_are_communication():
    rank = rank_of(data_parallel())
    b = rank.breakdown
    # Computation overlaps the first range (110 to 300), and 20 ns of the second.
    assert (b.comm_ns, b.exposed_comm_ns, b.compute_ns, b.idle_ns) == (190 + 320 + 50, 300 + 50, 500, 150)
    assert b.overlapped_ns is None
    assert {kind: (t.time_ns, t.calls) for kind, t in b.kinds.items()} == {
        "gemm": (400, 1),
        "elementwise": (100, 1),
        "all_reduce": (510, 2),
        "comm_other": (50, 1),
    }
    assert rank.exposed.by_group == {("all_reduce", ""): 300, ("comm_other", ""): 50}
    assert "cpu_no_wait_marks" not in codes(data_parallel())


def test_posting_calls_are_communication_without_ranges():
    b = Builder(world_size=2).operate("aten::mm", 0, 100).operate("c10d::allreduce_", 100, 140)
    b.operate("c10d::allreduce_", 140, 200).operate("aten::mm", 200, 300)
    kinds = rank_of(b).breakdown.kinds
    assert (kinds["all_reduce"].time_ns, kinds["all_reduce"].calls) == (100, 2)
    assert rank_of(b).breakdown.exposed_comm_ns == 100


def test_wait_mark_replaces_gloo_ranges_that_end_in_it():
    b = example()
    # A hop of the ring, posted before the block that hides it, and an unrelated reduction.
    b.mark("gloo:send", 120, 400).mark("gloo:all_reduce", 800, 870, thread=7)
    breakdown = rank_of(b).breakdown
    assert breakdown.exposed_comm_ns == 100 + 70
    assert breakdown.kinds["send_recv"].time_ns == 100
    assert breakdown.kinds["all_reduce"].time_ns == 70


def test_waiting_is_of_the_kind_that_the_channel_posts():
    b = Builder(world_size=2).mark("ringprof::iteration", 0, 1000)
    for channel, call, start in (("heads", "alltoall_base_", 0), ("kv", "send", 300), ("kv", "recv_", 400)):
        b.mark(f"ringprof::send/{channel}", start, start + 20).operate(f"c10d::{call}", start + 5, start + 15)
        b.mark(f"ringprof::wait/{channel}", start + 30, start + 80)
    # Before it sends, a rank waits for all ranks: blocked in the channel, but no transfer of its own.
    b.mark("ringprof::wait-for-all/heads", 800, 830)
    # What an unknown channel carries is not known.
    kinds = rank_of(b.mark("ringprof::wait/other", 600, 610)).breakdown.kinds
    assert {kind: (t.time_ns, t.calls) for kind, t in kinds.items()} == {"all_to_all": (80, 1), "send_recv": (110, 3)}


def test_a_transfer_that_ends_before_its_wait_begins_exposes_nothing():
    """Check an all-to-all of a strategy, beside a reduction of DDP: gloo's workers run both, off the rank's thread."""
    b = Builder(world_size=2).mark("ringprof::iteration", 0, 1000)
    b.mark("ringprof::send/heads", 100, 140).operate("c10d::alltoall_base_", 110, 130)
    b.mark("gloo:all_to_all", 150, 400, thread=7).operate("aten::mm", 200, 300).mark("ringprof::wait/heads", 500, 510)
    b.operate("c10d::allreduce_", 600, 610).mark("gloo:all_reduce", 620, 700, thread=7)
    rank = rank_of(b)
    assert rank.exposed.by_group == {("all_reduce", ""): 80}
    assert (rank.breakdown.exposed_comm_ns, rank.breakdown.idle_ns) == (10 + 80, 1000 - 100 - 90)
    # Without the posting call, nothing tells that the mark stands for the range.
    b.operators = [row for row in b.operators if b.names[row[2]] != "c10d::alltoall_base_"]
    assert rank_of(b).exposed.by_group == {("all_reduce", ""): 80, ("all_to_all", ""): 250 - 100}


def test_compiled_graph_time_outside_operators_is_computation():
    """Check a product, a wait and a reduction inside a graph of torch.compile; idle before and after it."""
    b = Builder(world_size=2).mark("ProfilerStep#1", 0, 1000)
    b.operate("Torch-Compiled Region: 0/0", 50, 950).operate("## Call CompiledFxGraph fex62z2pad6 ##", 100, 900)
    b.operate("aten::addmm", 200, 300).mark("ringprof::wait/kv", 400, 450).mark("gloo:all_reduce", 850, 960, thread=7)
    breakdown = rank_of(b).breakdown
    assert {kind: t.time_ns for kind, t in breakdown.kinds.items()} == {
        "gemm": 100, "other": 650, "send_recv": 50, "all_reduce": 110,
    }  # fmt: skip
    assert (breakdown.compute_ns, breakdown.exposed_comm_ns, breakdown.idle_ns) == (750, 50 + 60, 140)


def tensor_parallel():
    """Build a DTensor step: a product that waits inside for its input's reduction, and a backward pass that waits."""
    b = Builder(world_size=2).mark("ProfilerStep#1", 0, 1000)
    b.operate("_c10d_functional::all_reduce", 0, 20).mark("gloo:all_reduce", 10, 300, thread=7)
    b.operate("aten::linear", 50, 400).operate("aten::addmm", 60, 390).operate("PythonSubclass", 70, 380)
    b.operate("_c10d_functional::wait_tensor", 80, 310).operate("aten::addmm", 320, 370)
    b.mark("gloo:all_reduce", 450, 700, thread=7).operate("_FromTorchTensorBackward", 500, 750)
    return b.operate("_c10d_functional::wait_tensor", 510, 710).operate("aten::mm", 800, 1000)


def test_waiting_for_a_functional_collective_is_not_computation():
    breakdown = rank_of(tensor_parallel()).breakdown
    assert (breakdown.compute_ns, breakdown.exposed_comm_ns, breakdown.idle_ns) == (50 + 200, 290 + 250, 210)
    assert {kind: (t.time_ns, t.calls) for kind, t in breakdown.kinds.items()} == {
        "gemm": (250, 2), "all_reduce": (540, 2),
    }  # fmt: skip


def test_waiting_inside_a_compiled_graph_is_not_computation():
    b = tensor_parallel().operate("## Call CompiledFxGraph fex62z2pad6 ##", 0, 1000)
    breakdown = rank_of(b).breakdown
    # Everything except the two waits and the two products; each reduction ends 10 ns before its wait.
    assert breakdown.kinds["other"].time_ns == 1000 - 230 - 200 - 250
    assert (breakdown.exposed_comm_ns, breakdown.idle_ns) == (220 + 190, 20)


def test_fsdp_copies_around_a_gather_are_not_gathers():
    b = Builder(world_size=2).mark("ProfilerStep#1", 0, 1000).mark("gloo:all_gather", 300, 500, thread=7)
    b.operate("fsdp::all_gather_copy_in", 0, 200).operate("aten::_foreach_copy_", 50, 150)
    b.operate("c10d::_allgather_base_", 250, 300).operate("fsdp::split_with_sizes_copy", 500, 600)
    b.operate("fsdp::chunk_cat", 600, 700).operate("aten::_foreach_copy_", 800, 850)
    breakdown = rank_of(b).breakdown
    assert {kind: (t.time_ns, t.calls) for kind, t in breakdown.kinds.items()} == {
        "permute": (400, 3), "all_gather": (200, 1), "memcpy": (50, 1),
    }  # fmt: skip
    assert (breakdown.compute_ns, breakdown.exposed_comm_ns, breakdown.exposed_memory_ns) == (400, 200, 50)


def test_gloo_ranges_without_operators_are_enough_for_a_report():
    b = Builder(rank=34, world_size=300).mark("ProfilerStep#551", 0, 1000)
    b.mark("gloo:all_reduce", 100, 800, thread=3553).mark("gloo:all_reduce", 200, 1500, thread=3554)
    assert rank_of(b).breakdown.exposed_comm_ns == 900


def test_operators_in_the_optimizer_step_are_optimizer():
    b = Builder(world_size=1).mark("Optimizer.step#AdamW.step", 0, 100)
    b.operate("aten::add_", 10, 40).operate("aten::mm", 40, 60).operate("aten::_foreach_sqrt", 200, 220)
    b.operate("aten::add_", 300, 340).operate("aten::native_layer_norm", 400, 410).operate("aten::_softmax", 410, 425)
    times = {kind: t.time_ns for kind, t in rank_of(b).breakdown.kinds.items()}
    assert times == {"optimizer": 50, "gemm": 20, "elementwise": 40, "norm": 10, "softmax": 15}
