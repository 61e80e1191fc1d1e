"""Host times that `calibrate` measures, where its parts need no GPU."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch", reason="a calibration computes")

import torch

from ringprof.dryrun.schedule import Program
from ringprof.prediction import measure
from ringprof.prediction.calibration import HostPass, assumed_calibration
from ringprof.prediction.host_model import count_kinds, fit_host_times, host_ns, times_us
from ringprof.prediction.microbenchmark import Bench
from ringprof.prediction.schedules import schedule
from ringprof.workload.workload import Workload

SMALL = Workload(seq=512, heads=2, kv_heads=2, head_dim=64)
TRUE = {
    "call_us": 3.0, "launch_us": 20.0, "forward_us": 90.0, "backward_us": 130.0, "post_us": 210.0, "wait_us": 9.0,
    "collective_us": 130.0, "copy_us": 60.0, "autograd_us": 250.0,
}  # fmt: skip


def program(strategy: str, hops: str = "nccl") -> Program:
    return schedule(strategy, SMALL, 2, hops=hops, ranks=[0]).programs[0]


def took(counts: Counter[str]) -> float:
    return sum(TRUE[kind] * count for kind, count in counts.items())


def host_pass_of(kernel: str, counts: Counter[str], us: float, strategy: str = "zigzag") -> HostPass:
    return HostPass(
        strategy=strategy, kernel=kernel, hops="nccl", ranks=2, backward=True, kinds=dict(counts), us=us, source="test"
    )


def test_host_times_from_some_strategies_predict_another() -> None:
    """Passes of five strategies, built from known times per kind, predict a sixth within 7 %."""
    counts_by_strategy = [count_kinds(program(name)) for name in ("zigzag", "ring", "ulysses", "megatron", "allgather")]
    counts_by_strategy.append(count_kinds(program("zigzag", "copy")))
    machine = fit_host_times(
        assumed_calibration("x", "x", 132, 1 << 30),
        [host_pass_of("cudnn", counts, took(counts)) for counts in counts_by_strategy],
        "test",
    )
    other = program("burst")
    # A pass took what the slower of two ranks took: 1.056 times one, where hosts are 9.5 % apart.
    predicted_us = 1.056 * sum(host_ns(machine, machine.kernel("cudnn"), other)) / 1e3
    assert predicted_us == pytest.approx(took(count_kinds(other)), rel=0.07)
    assert machine.host.post_us.origin == "measured" and machine.kernel("cudnn").forward_us is not None


def test_each_kernel_has_its_own_host_times() -> None:
    counts = count_kinds(program("zigzag"))
    passes = [
        host_pass_of(kernel, counts, took(counts) * slower) for kernel, slower in (("cudnn", 1.0), ("flash-attn", 0.8))
    ]
    machine = fit_host_times(assumed_calibration("x", "x", 132, 1 << 30), passes, "test")
    cudnn, flash = (times_us(machine, machine.kernel(name)) for name in ("cudnn", "flash-attn"))
    assert flash["forward_us"] < cudnn["forward_us"] and flash["post_us"] == cudnn["post_us"]


def test_host_time_of_a_pass_is_the_sum_of_its_operations() -> None:
    """Two blocks per phase, three hops; the backward pass's own overhead counts once."""
    machine = assumed_calibration("x", "x", 132, 1 << 30)
    ring = program("zigzag")
    us = times_us(machine, machine.kernel("cudnn"))
    counts = count_kinds(ring)
    assert (counts["forward_us"], counts["backward_us"], counts["post_us"], counts["autograd_us"]) == (2, 2, 3, 1)
    assert sum(host_ns(machine, machine.kernel("cudnn"), ring)) / 1e3 == pytest.approx(
        sum(us[kind] * count for kind, count in counts.items())
    )


def test_host_times_are_measured_from_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU, on one rank, strategies run, and their passes suffice for all kinds that occur."""
    monkeypatch.setattr(measure, "SPECS", ("zigzag", "ulysses", "megatron", "allgather"))
    for name, value in (
        ("_WARM_UP_PASSES", 1),
        ("_PASSES_PER_TURN", 2),
        ("_SKIPPED_PASSES", 1),
        ("_MIN_TURNS", 2),
        ("_TOKENS", 16),
    ):
        monkeypatch.setattr(measure, name, value)
    passes = measure.measure_passes(Bench(torch.device("cpu")), ["reference"], deadline=0.0)
    assert {host_pass.strategy for host_pass in passes} == {"zigzag", "ulysses", "megatron", "allgather"}
    assert all(host_pass.turns == 2 and host_pass.us > 0 and len(host_pass.ranks_us) == 1 for host_pass in passes)
    assert {host_pass.backward for host_pass in passes} == {True, False}
    machine = fit_host_times(assumed_calibration("x", "x", 132, 1 << 30), passes, "test")
    assert machine.host.forward_us.origin == "measured" and machine.host.forward_us.value > 0
