"""Verdicts on cases whose cause is known say what the metrics show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.parts import _work_clause, _worst_step_clause
from ringprof.analysis.findings.verdict import exposed_shares
from ringprof.analysis.findings.waterfall import ATTENTION_PARTS
from ringprof.analysis.timeline.window import Focus
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import RUNTIME_CALL
from tests.analysis.build import FLASH, Builder, collective
from tests.analysis.rings import MERGE, ring_pass, uniform_blocks
from tests.analysis.test_real_runs import TWO_HOSTS, attribution_of
from tests.loaded import analysis
from tests.paths import TRACES
from tests.report.made_up_programs import PROGRAMS, data_parallel


def verdict(*builders):
    attribution = attribute([builder.trace() for builder in builders])
    return findings_in_memory(attribution).verdict


TO_BALANCE = "zigzag or stripe (the same causal work for all)."
SAID = {
    # Of 4 ranks, the last has 1 + 2 x 3 half squares of work where the first has 1.
    "h200x4-ring-262144": (" time was waiting for ranks with up to 7 times its causal work.", TO_BALANCE),
    "h200x4-zigzag-65536-two-hosts": ("To try: double-ring, burst or usp (less between hosts)",),
    "h200x4-burst-65536-two-hosts": (
        "SendRecv between hosts moves 1.65 GB/s, 231 within a host",
        "To try: faster links, fewer bytes, more tokens per rank",
    ),
    "h200x4-usp-65536-two-hosts": ("To try: faster links, -p grad_wire=input, more tokens per rank",),
    "cpu4-zigzag-4096-two-hosts": ("To try: double-ring, burst or usp (less between hosts)",),
    "h200x4-zigzag-262144-copied": (
        "100 % of all communication is hidden behind computation",
        "No loss outside the attention kernels reaches 2 %: 99.0 % of the time is attention kernels at 551 TFLOP/s, "
        "56 % of the device's peak",
    ),
    "one rank, merging": (
        "one GPU: nothing is communicated 60.0 % of the time is attention, 40.0 % is merges and copies.",
        "Largest loss outside attention: merges and copies, 0.400 ms of 1.00 ms.",
    ),
    "one rank of several": ("How much of it is waiting and how much wire is not known",),
    "CPU, one host": (": time blocked in waiting for a transfer.",),
    # Gather for 10 ms, scatter for 10 ms, 5 ms of them at once: 15 ms of 21 ms are exposed, not 20 ms.
    "two groups at once": (
        "71.4 % of the time is exposed communication, 71.4 % at worst (rank 0): 47.6 % all-gather of group "
        "_allgather_base, 47.6 % reduce-scatter of group _reduce_scatter_base, partly at the same time.",
        "6.00 ms of computation can hide the bytes of AllGather alone from",
    ),
    "data parallel, one computes longest": (
        "To try: the same work for every rank: rank 2 computes 0.950 ms, all others at most 0.360 ms.",
    ),
    "data parallel, two compute longest": (
        "work for every rank: ranks 1 and 3 compute at least 0.930 ms, all others at most 0.360 ms.",
    ),
}
"""Sentences that a committed run or a made-up program must have; `tests.report.sentence_rules` checks their truth."""


@pytest.mark.parametrize("name", SAID)
def test_reports_say_what_matters_most(name):
    if name in PROGRAMS:
        builders, run = PROGRAMS[name]()
        results = findings_in_memory(attribute([builder.trace() for builder in builders], run))
    else:
        results = analysis(TRACES / name).findings
    step = results.next_step
    text = " ".join([*results.verdict, step.text if step else ""])
    assert [said for said in SAID[name] if said not in text] == []


def test_balance_saves_the_longest_computation_less_the_mean():
    report = analysis(TRACES / "h200x4-ring-262144").report()
    computes = [rank["compute_ns"] for rank in report["ranks"]]
    uneven = report["summary"]["slowest_rank"]["wall_ns"] - report["summary"]["bounds_ns"]["balanced"]
    assert uneven == pytest.approx(max(computes) - sum(computes) / 4, rel=0.05)


@pytest.mark.parametrize(
    ("run", "remedy"),
    [
        ("h200x4-zigzag-65536", "--hops copy, -p grad_wire=input, more tokens per rank"),
        ("h200x4-stripe-262144", "look at the GPUs' clocks (same work, other speed): rank 0 computes"),
    ],
)
def test_remedy_stands_in_the_waterfall_where_a_faster_kernel_saves_more(run, remedy):
    results = analysis(TRACES / run).findings
    assert results.next_step is not None
    assert results.next_step.part == "slower_kernel" or remedy in results.next_step.text
    assert any(part.remedy.startswith(remedy) for part in results.waterfall.parts if part.part not in ATTENTION_PARTS)


def test_a_slow_link_is_named_by_its_ends():
    attribution = attribution_of(TWO_HOSTS)
    _, cause, _ = findings_in_memory(attribution).verdict
    assert "ranks 0, 3, 4 and 7 send at 3.4 to 4.15 GB/s" in cause
    assert "(3 to 4, 7 to 0)" in cause
    # Nothing holds a rank up but these links, whether their hosts are known or not.
    for known in (attribution, attribution_of(TWO_HOSTS, ranks_per_host=4)):
        step = findings_in_memory(known).next_step
        assert step is not None and step.part == "peer_wait"
        assert step.text.endswith(": faster links, fewer bytes over the slow ones.")


def training_step():
    """A matrix product, an all-reduce half of which it hides, an all-gather of another group, the optimizer."""
    b = Builder(world_size=1).run("ampere_sgemm_128x64_nn", 0, 600, launched=1)
    b.run("ncclDevKernel_AllReduce", 500, 700, launched=2, own=collective("allreduce", group="7"), stream=20)
    zero = collective("_allgather_base", group="2", group_description="dp_shard")
    b.run("ncclDevKernel_AllGather", 700, 800, launched=3, own=zero, stream=20)
    return b.run("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 800, 1000, launched=4)


def test_training_step_verdict_names_exposed_kinds_and_computation():
    assert verdict(training_step()) == (
        "20.0 % of the time is exposed communication: "
        "10.0 % all-reduce of group 7, 10.0 % all-gather of group dp_shard.",
        "What computes longest is matrix products 60.0 %, then optimizer 20.0 % of the time.",
    )


def test_a_training_step_with_gaps_names_them_first():
    b = training_step().run("ampere_sgemm_128x64_nn", 3000, 3100, launched=2990)
    b.on_host("aten::mm", 900, 2995)
    _, line = verdict(b)
    assert line.startswith(
        "64.5 % of the time the GPU is idle because its next work is not launched yet: 100.0 % of its idle time is "
        "short host work (pieces below 0.1 ms) and gaps below 5 us; "
    )
    assert line.endswith("what computes longest is matrix products 22.6 %, then optimizer 6.5 % of the time.")


def test_gaps_are_named_where_they_cost_most():
    b = Builder(world_size=1).run(FLASH, 0, 600, launched=1).run(FLASH, 900, 1000, launched=890)
    assert any(line.startswith("30.0 % of the time the GPU is idle because its next work") for line in verdict(b))


def test_short_gaps_are_not_attributed_to_launches():
    b = Builder(world_size=1).run(FLASH, 0, 600, launched=1).run(FLASH, 900, 1000, launched=2)
    line = next(line for line in verdict(b) if "idle" in line)
    assert line.startswith("30.0 % of the time the GPU is idle in gaps below 5 us: 100.0 % of its idle time is short")


def test_cpu_verdict_names_blocked_time_and_reductions():
    b = Builder(world_size=2).mark("ProfilerStep#1", 0, 1000).operate("aten::mm", 0, 500)
    b.mark("ringprof::wait/kv", 500, 600).mark("gloo:all_reduce", 800, 870, thread=7)
    assert verdict(b)[0] == (
        "17.0 % of the time is exposed communication: 10.0 % blocked in waiting for a transfer, 7.0 % all-reduce."
    )


def test_verdict_of_a_balanced_ring_has_no_communication_cause():
    text = " ".join(verdict(*ring_pass(block=uniform_blocks(985), hop_ns=100)))
    assert "SendRecv" not in text


# --- what to do about it ------------------------------------------------------------------------------


def step_of(*builders):
    return findings_in_memory(attribute([builder.trace() for builder in builders])).next_step


def test_single_slow_launch_calls_have_their_own_remedy():
    gaps = Builder(world_size=1).run(FLASH, 0, 600_000, launched=1).run(FLASH, 900_000, 10**6, launched=899_990)
    gaps.on_host("cudaLaunchKernel", 500_000, 899_995, RUNTIME_CALL)
    assert step_of(gaps).text == (
        "Largest loss outside attention: host-bound idle, 0.300 ms of 1.00 ms. To try: "
        "find why single cudaLaunchKernel calls take long: kernels loaded at first use (warm up before profiling, or "
        "CUDA_MODULE_LOADING=EAGER), or a busy CPU."
    )


def test_next_step_can_be_communication_of_other_groups():
    b = Builder(world_size=1).run(FLASH, 0, 600_000, launched=1)
    b.batch(100, 600_000, 700_000, to=1, source=3)
    own = collective("_allgather_base", group="2", group_description="dp")
    b.run("ncclDevKernel_AllGather", 700_000, 10**6, launched=200, own=own, stream=20)
    run_findings = findings_in_memory(attribute([b.trace()], focus=Focus(group="cp")))
    assert run_findings.verdict[1] == "30.0 % of the time is exposed communication of other groups."
    assert run_findings.next_step is not None and run_findings.next_step.text == (
        "Largest loss outside attention: other groups' communication, 0.300 ms of 1.00 ms. To try: "
        "other groups' communication beside computation."
    )


def test_next_step_can_be_communication_as_a_whole():
    # Mean over ranks: 100 ms each of imbalance and wire, 150 ms of merging.
    builders = []
    for rank, computes in enumerate((400, 600)):
        b = Builder(rank=rank, world_size=2).run(FLASH, 0, computes * 10**6, launched=1)
        fields: dict[str, Any] = {"group_ranks": (0, 1), "group_size": 2, "tensors": 1}
        b.batch(100, computes * 10**6, 700 * 10**6, to=1 - rank, source=1 - rank, **fields)
        builders.append(b.run(MERGE, 700 * 10**6, 850 * 10**6, launched=200))
    assert step_of(*builders).text.startswith(
        "Largest loss outside attention: imbalance and exposed communication, 200.0 ms of 850.0 ms, "
        "its largest part imbalance between ranks (100.0 ms). To try: "
    )


def test_next_step_without_losses_is_a_faster_kernel():
    step = step_of(
        Builder(world_size=1).run(FLASH, 0, 990_000_000, launched=1).run(MERGE, 990_000_000, 10**9, launched=2)
    )
    assert step.part == "attention"
    assert step.text.endswith("; 10 % faster attention saves 99.0 ms.")


def test_next_step_of_a_step_of_matrix_products_is_its_exposed_communication():
    """A next step is null only where no loss has a recommendation: the products are work, and no loss."""
    builders = [data_parallel_step(rank) for rank in range(2)]
    assert step_of(*builders).text == (
        "Largest loss outside matrix products: exposed wire, 0.300 ms of 1.00 ms. To try: "
        "fewer bytes, more computation beside them."
    )


def data_parallel_step(rank: int) -> Builder:
    """Return one rank of two that multiplies for 0.6 ms, updates for 0.1 ms and reduces gradients for 0.3 ms."""
    b = Builder(rank=rank, world_size=2).run("ampere_sgemm_128x64_nn", 0, 600_000, launched=1)
    reduce = collective("allreduce", group="0", group_ranks=(0, 1), group_size=2)
    b.run("ncclDevKernel_AllReduce", 600_000, 900_000, launched=200, own=reduce, stream=20)
    return b.run("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 900_000, 10**6, launched=300)


@pytest.mark.parametrize("computes", [[300, 500, 700, 900], [300, 900]])
def test_ranks_are_not_named_unless_they_compute_far_longer_than_all_others(computes):
    step = step_of(*data_parallel(computes, 20)[0])
    assert step.part == "imbalance"
    assert step.text.endswith("To try: the same work for every rank.")


def test_matrix_products_alone_have_no_next_step():
    assert step_of(Builder(world_size=1).run("ampere_sgemm_128x64_nn", 0, 600, launched=1)) is None


def test_verdict_of_one_process_states_no_communication():
    b = Builder(world_size=1).mark("ProfilerStep#1", 0, 1000).operate("aten::mm", 0, 500)
    assert verdict(b)[0] == "one process: nothing is communicated"


@pytest.mark.parametrize(("causal", "work"), [(True, "causal work"), (False, "work")])
def test_imbalance_is_called_causal_under_a_causal_mask(causal, work):
    run = SimpleNamespace(block_flops=lambda: {0: 1e9, 1: 3e9}, workload=SimpleNamespace(causal=causal))
    facts: Any = SimpleNamespace(attribution=SimpleNamespace(run=run))
    rank: Any = SimpleNamespace(rank=0)
    assert _work_clause(facts, rank) == f"with up to 3 times its {work}"


def test_no_worst_step_without_exposed_time():
    facts: Any = SimpleNamespace(finder=SimpleNamespace(exposed_by_step={("fwd", 0): (0, 1), ("fwd", 1): (0, 1)}))
    assert _worst_step_clause(facts) == ""


def test_communication_of_unknown_group_is_named_without_group():
    by_group = {("all_reduce", ""): 70, ("send_recv", "cp"): 30}
    rank = SimpleNamespace(
        exposed=SimpleNamespace(by_group=by_group),
        blocked_ns={},
        breakdown=SimpleNamespace(wall_ns=1000, exposed_comm_ns=100),
    )
    attribution: Any = SimpleNamespace(ranks=[rank])
    assert exposed_shares(attribution) == "7.0 % all-reduce, 3.0 % send/recv of group cp"
    by_group[("send_recv", "cp")] = 0
    assert exposed_shares(attribution) == "7.0 % all-reduce"
    rank.breakdown.wall_ns = 100_000
    by_group[("send_recv", "cp")] = 99  # just below 0.1 %, and rounded to it
    by_group[("all_reduce", "")] = 7000
    assert exposed_shares(attribution) == "7.0 % all-reduce"
