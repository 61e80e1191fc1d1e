"""Verdicts on cases whose cause is known say what the metrics show."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.parts import _work_clause, _worst_step_clause
from ringprof.analysis.findings.verdict import exposed_shares
from ringprof.analysis.findings.waterfall import ATTENTION_PARTS, LIMITS
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS
from ringprof.analysis.timeline.window import Focus
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import RUNTIME_CALL
from tests.analysis.build import FLASH, Builder, collective
from tests.analysis.rings import MERGE, ring_pass, uniform_blocks
from tests.analysis.test_real_runs import NVLINK, TWO_HOSTS, attribution_of
from tests.analysis.timeline.test_cpu import example as cpu_example
from tests.loaded import analysis
from tests.paths import COMMITTED, TRACES
from tests.report.made_up_programs import data_parallel, two_groups_at_once


def verdict(*builders):
    attribution = attribute([builder.trace() for builder in builders])
    return findings_in_memory(attribution).verdict


def verdict_of(folder):
    return analysis(folder).findings.verdict


def test_verdict_recommends_balancing_a_contiguous_causal_ring():
    run = analysis(TRACES / "h200x4-ring-262144")
    cost, cause, gain = run.verdict
    report = run.report()
    assert cost.startswith(f"{100 * report['summary']['exposed_comm_share']['mean']:.1f} % of the time is exposed")
    rank0 = report["ranks"][0]["hops"]
    waited = rank0["wait_ns"] / (rank0["wait_ns"] + rank0["wire_ns"])
    # Of 4 ranks, the last has 1 + 2 x 3 half squares of work where the first has 1.
    assert cause == (
        f"{100 * waited:.0f} % of rank 0's SendRecv time was waiting for ranks with up to 7 times its causal work."
    )
    # The longest computation less the mean of all is what even work saves.
    computes = [rank["compute_ns"] for rank in report["ranks"]]
    uneven = report["summary"]["slowest_rank"]["wall_ns"] - report["summary"]["bounds_ns"]["balanced"]
    assert uneven == pytest.approx(max(computes) - sum(computes) / 4, rel=0.05)
    assert report["summary"]["next_step"]["text"] == (
        f"Largest loss outside attention: imbalance between ranks, {uneven / 1e6:.1f} ms of 2.034 s. To try: "
        "zigzag or stripe (the same causal work for all)."
    )
    assert f"{report['summary']['bounds_ns']['balanced'] / 1e9:,.3f} s" in gain


def test_verdict_from_traces_alone_suspects_contiguous_shards():
    builders = []
    for rank in range(4):
        b = Builder(rank=rank, world_size=4).run(FLASH, 0, 1000 * (rank + 1), launched=1)
        b.batch(100, 1000 * (rank + 1), 4400, to=(rank + 1) % 4, source=(rank - 1) % 4)
        builders.append(b)
    _, cause, _ = verdict(*builders)
    # Everybody waits for rank 3, which is there at 4000; rank 0 since 1000, of 3400 in all.
    assert cause.startswith("88 % of rank 0's SendRecv time was waiting for ranks")
    assert cause.endswith("as in contiguous pieces under a causal mask: see zigzag and stripe.")


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


def test_verdict_names_a_slow_inter_host_link():
    _, cause, _ = verdict_of(TRACES / "h200x4-burst-65536-two-hosts")
    assert "SendRecv between hosts moves 1.65 GB/s, 231 within a host" in cause


def test_verdict_names_the_step_with_most_exposed_wire():
    attribution = attribution_of(NVLINK)
    run_findings = findings_in_memory(attribution)
    _, cause, _ = run_findings.verdict
    named = re.search(r"in the (\w+) pass, most in step (\d+)", cause)
    assert named
    phase, step = named.groups()
    exposed: dict[tuple[str, int], list[int]] = {}
    for ring_step in run_findings.steps:
        exposed.setdefault((ring_step.phase, ring_step.step), []).append(ring_step.exposed_ns)
    worst = max((key for key in exposed if key[0] == phase[:1] + "wd"), key=lambda key: sum(exposed[key]))
    assert (worst[1], phase) == (int(step), {"fwd": "forward", "bwd": "backward"}[worst[0]])


def test_verdict_without_losses_names_the_kernels():
    cost, cause, _ = verdict_of(TRACES / "h200x4-zigzag-262144-copied")
    assert "100 % of all communication is hidden behind computation" in cost
    assert cause.startswith("No loss outside the attention kernels reaches 2 %: 99.0 %")
    assert "attention kernels at 551 TFLOP/s, 56 % of the device's peak" in cause


def test_merging_is_named_where_it_costs_most():
    b = Builder(world_size=1)
    b.run(FLASH, 0, 600, launched=1).run(MERGE, 600, 1000, launched=2)
    assert "60.0 % of the time is attention, 40.0 % is merges and copies." in verdict(b)


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


def test_matrix_product_beside_attention_is_not_a_merge():
    b = Builder(world_size=1).run(FLASH, 0, 600, launched=1).run("nvjet_tst_64x64", 600, 1000, launched=2)
    assert "60.0 % of the time is attention, 40.0 % is matrix products." in verdict(b)


def test_gaps_are_named_where_they_cost_most():
    b = Builder(world_size=1).run(FLASH, 0, 600, launched=1).run(FLASH, 900, 1000, launched=890)
    assert any(line.startswith("30.0 % of the time the GPU is idle because its next work") for line in verdict(b))


def test_short_gaps_are_not_attributed_to_launches():
    b = Builder(world_size=1).run(FLASH, 0, 600, launched=1).run(FLASH, 900, 1000, launched=2)
    line = next(line for line in verdict(b) if "idle" in line)
    assert line.startswith("30.0 % of the time the GPU is idle in gaps below 5 us: 100.0 % of its idle time is short")


def test_verdict_of_one_gpu_states_no_communication():
    assert verdict(Builder(world_size=1).run(FLASH, 0, 10, launched=1))[0] == "one GPU: nothing is communicated"


def test_verdict_of_one_rank_of_several_has_no_wait_split():
    assert any("not known" in line for line in verdict(ring_pass(hop_ns=1500)[0]))


def test_verdict_of_a_cpu_run_uses_blocked_time():
    assert "time blocked in waiting for a transfer" in verdict(cpu_example())[0]


def test_cpu_verdict_names_blocked_time_and_reductions():
    b = Builder(world_size=2).mark("ProfilerStep#1", 0, 1000).operate("aten::mm", 0, 500)
    b.mark("ringprof::wait/kv", 500, 600).mark("gloo:all_reduce", 800, 870, thread=7)
    assert verdict(b)[0] == (
        "17.0 % of the time is exposed communication: 10.0 % blocked in waiting for a transfer, 7.0 % all-reduce."
    )


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_no_verdict_has_more_than_three_lines(folder):
    lines = verdict_of(folder)
    assert 1 <= len(lines) <= 3
    assert all(line and "nan" not in line and "inf" not in line for line in lines)


def test_verdict_of_a_balanced_ring_has_no_communication_cause():
    text = " ".join(verdict(*ring_pass(block=uniform_blocks(985), hop_ns=100)))
    assert "SendRecv" not in text


@pytest.mark.parametrize("name", ["h200x4-zigzag-262144", "h200x4-zigzag-262144-copied", "h200x4-usp-65536-two-hosts"])
def test_shares_of_the_time_are_those_of_the_tables(name):
    """All shares "of the time" are of the mean wall, as in the tables by part and by kind."""
    report = analysis(TRACES / name).report()
    wall = sum(rank["wall_ns"] for rank in report["ranks"])
    times = {
        kind: sum(rank["kinds_ns"].get(kind, 0) for rank in report["ranks"]) for kind in ("flash_fwd", "flash_bwd")
    }
    cost, cause, *_ = report["summary"]["verdict"]
    exposed = sum(rank["exposed_comm_ns"] for rank in report["ranks"])
    assert f"{100 * exposed / wall:.1f} % of the time is exposed" in cost
    if "attention kernels" in cause:
        assert f"{100 * sum(times.values()) / wall:.1f} % of the time is attention" in cause
    else:
        share = float(cause.split(" % of the time")[0])
        assert share <= 100 * exposed / wall


# --- what to do about it ------------------------------------------------------------------------------


def step_of(*builders):
    return findings_in_memory(attribute([builder.trace() for builder in builders])).next_step


@pytest.mark.parametrize(
    ("run", "remedy"),
    [
        ("h200x4-zigzag-65536-two-hosts", "double-ring, burst or usp (less between hosts)"),
        ("h200x4-burst-65536-two-hosts", "faster links, fewer bytes, more tokens per rank"),
        ("h200x4-usp-65536-two-hosts", "faster links, -p grad_wire=input, more tokens per rank"),
        ("h200x4-zigzag-65536", "--hops copy, -p grad_wire=input, more tokens per rank"),
        ("h200x4-stripe-262144", "look at the GPUs' clocks (same work, other speed): rank 0 computes"),
        ("cpu4-zigzag-4096-two-hosts", "double-ring, burst or usp (less between hosts)"),
    ],
)
def test_remedies_leave_out_the_strategy_of_the_run(run, remedy):
    """A faster kernel may save more; then the remedy stands in the waterfall alone."""
    report = analysis(TRACES / run).report()
    step, waterfall = report["summary"]["next_step"], {row["part"]: row for row in report["waterfall"]}
    outside = [
        row for part, row in waterfall.items() if part not in ATTENTION_PARTS and row["remedy"].startswith(remedy)
    ]
    assert remedy in step["text"] or (step["part"] == "slower_kernel" and outside)


def test_the_rate_that_would_hide_the_wire_is_its_bytes_over_the_computation():
    report = analysis(TRACES / "h200x4-zigzag-65536-two-hosts").report()
    sent = sum(rank["hops"]["bytes"] for rank in report["ranks"])
    computes = sum(rank["compute_ns"] for rank in report["ranks"])
    text = report["summary"]["next_step"]["text"]
    assert (
        f"{computes / 4e6:.1f} ms of computation can hide these bytes from {sent / computes:.1f} GB/s per rank on"
        in text
    )


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_next_step_is_the_largest_loss_of_the_waterfall(folder):
    report = analysis(folder).report()
    step = report["summary"]["next_step"]
    if step is None:
        # Nothing is known to shorten a layer's matrix products, or what is computed beside attention.
        losses = [row for row in report["waterfall"] if row["part"] not in LIMITS and row["remedy"]]
        assert not [row for row in losses if row["share"] >= 0.02]
        return
    work = [row for row in report["waterfall"] if row["part"] in COMPUTE_PARTS and not row["remedy"]]
    part = next(row for row in report["waterfall"] if row["part"] == step["part"])
    wall, bounds = report["summary"]["slowest_rank"]["wall_ns"], report["summary"]["bounds_ns"]
    bound = {"imbalance": "balanced", "exposed_wire": "free_communication", "peer_wait": "free_communication",
             "exposed_unsplit": "free_communication"}.get(step["part"])  # fmt: skip
    gain = min(part["time_ns"], wall - bounds[bound]) if bound else part["time_ns"]
    assert (step["time_ns"], step["share"]) == (gain, gain / wall)
    assert part["remedy"] in step["text"]
    if step["part"] == "slower_kernel":
        others = [
            row for row in report["waterfall"] if row["part"] not in (*LIMITS, "slower_kernel") and row not in work
        ]
        assert part["share"] >= 0.02 and all(row["time_ns"] < part["time_ns"] for row in others)
        return
    communication = {"imbalance", "exposed_wire", "peer_wait", "exposed_unsplit"}
    attention = set(ATTENTION_PARTS)
    outside = [row for row in report["waterfall"] if row["part"] not in attention and row not in work]
    if step["part"] in attention:
        assert all(row["share"] < 0.02 for row in outside)
    else:
        rivals = [row for row in outside if (row["part"] in communication) == (step["part"] in communication)]
        assert part["time_ns"] == max(row["time_ns"] for row in rivals)


def test_idle_gaps_and_merges_have_their_own_remedies():
    gaps = Builder(world_size=1).run(FLASH, 0, 600_000, launched=1).run(FLASH, 900_000, 10**6, launched=899_990)
    gaps.on_host("cudaLaunchKernel", 500_000, 899_995, RUNTIME_CALL)
    assert step_of(gaps).text == (
        "Largest loss outside attention: host-bound idle, 0.300 ms of 1.00 ms. To try: "
        "find why single cudaLaunchKernel calls take long: kernels loaded at first use (warm up before profiling, or "
        "CUDA_MODULE_LOADING=EAGER), or a busy CPU."
    )
    merges = Builder(world_size=1).run(FLASH, 0, 600, launched=1).run(MERGE, 600, 1000, launched=2)
    assert (step_of(merges).part, step_of(merges).time_ns) == ("merge_and_copies", 400)


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


@pytest.mark.parametrize(
    ("computes", "clause"),
    [
        ([300, 310, 900, 305], ": rank 2 computes 0.950 ms, all others at most 0.360 ms"),
        ([300, 900, 310, 880, 305], ": ranks 1 and 3 compute at least 0.930 ms, all others at most 0.360 ms"),
        ([300, 500, 700, 900], ""),
        ([300, 900], ""),
    ],
)
def test_ranks_that_compute_far_longer_than_all_others_are_named(computes, clause):
    step = step_of(*data_parallel(computes, 20)[0])
    assert step.part == "imbalance"
    assert step.text.endswith(f"To try: the same work for every rank{clause}.")


def test_overlapping_groups_are_not_told_as_parts_of_the_exposed_time():
    """Gather for 10 ms, scatter for 10 ms, 5 ms of them at once: 15 ms of 21 ms are exposed, not 20 ms."""
    results = findings_in_memory(attribute([builder.trace() for builder in two_groups_at_once()[0]]))
    assert results.verdict[0] == (
        "71.4 % of the time is exposed communication, 71.4 % at worst (rank 0): 47.6 % all-gather of group "
        "_allgather_base, 47.6 % reduce-scatter of group _reduce_scatter_base, partly at the same time."
    )
    assert results.next_step is not None
    assert "6.00 ms of computation can hide the bytes of AllGather alone from" in results.next_step.text


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
