"""Calibrations of simulated machines recover the machines' constants within the stated spreads.

Every constant is drawn anew for each of 20 machines, and its calibrated value is compared with the drawn one.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import pytest

pytest.importorskip("torch", reason="a calibration computes")

import torch
from msgspec.structs import replace

from ringprof import cli
from ringprof.errors import UsageError
from ringprof.prediction.calibration import (
    Calibration,
    Value,
    assumed_calibration,
    calibration_json,
    parse_calibration,
    read_calibration,
)
from ringprof.prediction.host_model import times_us
from ringprof.prediction.kernel_model import block_of
from ringprof.prediction.machine import Curves
from ringprof.prediction.measure import kernel_cases
from ringprof.prediction.text import calibration_text
from ringprof.report.text import TextStyle
from tests.prediction.simulated_gpu import Truth, calibrate
from tests.tiers import tiered

ALL_SEEDS = range(20)
SEEDS = tiered("seeds", [range(8, 12), ALL_SEEDS], [range(8, 12)], ids=len)
"""Marks a test of how often estimates lie within their spread."""
HEADS = ((40, 40), (32, 8), (48, 8), (16, 2))
LENGTHS = (
    (700, 700, True), (1500, 1500, False), (3000, 3000, True), (5000, 10000, False), (20000, 20000, True),
    (40000, 20000, False), (100000, 100000, True),
)  # fmt: skip
"""Queries, keys and causal; none of them is measured, and most end in a partial tile."""
Phase = Literal["forward", "backward"]
TYPICAL_US = {
    "call_us": 2.0, "launch_us": 12.0, "forward_us": 60.0, "backward_us": 100.0, "post_us": 150.0, "wait_us": 15.0,
    "collective_us": 150.0, "copy_us": 150.0, "autograd_us": 300.0,
}  # fmt: skip
"""Typical host microseconds per kind of operation, within 30 % of those of `assumed_calibration`."""


def machine(seed: int) -> Truth:
    """Draw the constants of a machine."""
    generator = random.Random(seed)
    uniform = generator.uniform

    def lognormal(value: float) -> float:
        return value * math.exp(generator.gauss(0, 0.3))

    return Truth(
        flops_per_ns=lognormal(600e3), backward_rate=uniform(0.6, 0.95), call_ns=uniform(5e3, 35e3),
        tile_columns=uniform(100, 700), grouped_saving=uniform(-0.02, 0.03), throttling=uniform(0.02, 0.15),
        memory_gb_s=lognormal(3000), reorder_gb_s=lognormal(1000), latency_ns=uniform(20e3, 60e3),
        copy_latency_ns=uniform(5e3, 30e3), channel_gb_s=uniform(14, 21), hop_gb_s=uniform(340, 370),
        total_gb_s=uniform(375, 420), copy_gb_s=uniform(340, 410), collective_gb_s=uniform(250, 340),
        contention=uniform(0.3, 1.0), host_us={name: lognormal(us) for name, us in TYPICAL_US.items()},
        host_variation=0.095,
    )  # fmt: skip


def share_within(errors: list[float], limit: float) -> float:
    """Return the share of errors, in units of stated spreads, that lie within a limit."""
    return fmean(abs(error) < limit for error in errors)


def curve_errors(patch: pytest.MonkeyPatch, seeds: range, seconds: float) -> tuple[dict[int, list[float]], list[float]]:
    """Return the errors of estimates in units of stated spreads, by number of queries, and the stated spreads."""
    errors: dict[int, list[float]] = defaultdict(list)
    spreads = []
    for seed in seeds:
        truth = machine(seed)
        curves = Curves(calibrate(patch, truth, ["kernels"], seed=seed, seconds=seconds), "cudnn")
        phases: tuple[Phase, ...] = ("forward", "backward")
        for phase in phases:
            for heads, kv_heads in HEADS:
                for q, kv, causal in LENGTHS:
                    estimate = curves.estimate(block_of(phase, q, kv, heads, kv_heads, causal=causal))
                    cool_ns = truth.attention_ns(phase, q, kv, heads, kv_heads, causal=causal)
                    hot_ns = cool_ns * (1 + truth.throttling)
                    errors[q].append(math.log(estimate.ns / hot_ns) / estimate.spread)
                    spreads.append(estimate.spread)
    return errors, spreads


@SEEDS
def test_curves_of_kernels_lie_within_their_spread(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, GQA, lengths between the samples and shorter ones; nominal shares are 0.68 and 0.95."""
    errors, spreads = curve_errors(monkeypatch, seeds, seconds=100)
    all_errors = [error for length_errors in errors.values() for error in length_errors]
    assert len(all_errors) == len(seeds) * 2 * 4 * 7
    assert 0.60 < share_within(all_errors, 1) < 0.97
    assert share_within(all_errors, 2) > 0.95 and share_within(all_errors, 3) > 0.985
    shares = {q: share_within(length_errors, 2) for q, length_errors in errors.items()}
    assert all(share > 0.9 for share in shares.values()), shares
    assert median(spreads) < 0.01 and max(spreads) < 0.15


@SEEDS
def test_curves_of_few_samples_have_wider_spreads(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a third of the shapes is measured, and the spreads cover the remaining uncertainty of short blocks."""
    errors, spreads = curve_errors(monkeypatch, seeds, seconds=50)
    all_errors = [error for length_errors in errors.values() for error in length_errors]
    assert share_within(all_errors, 2) > 0.95 and max(map(abs, all_errors)) < 4
    assert median(spreads) < 0.015 and max(spreads) < 0.4


MAX_SPREADS = {
    "memory": 0.02, "reorder": 0.1, "throttling": 0.2, "latency": 0.3, "channel": 0.05, "hop": 0.03, "total": 0.03,
    "copy": 0.02, "all_to_all": 0.05, "all_gather": 0.05, "reduce_scatter": 0.05, "contention": 0.5,
}  # fmt: skip
"""Largest allowed spread of each constant."""


@SEEDS
@tiered("ranks", [2, 4], [4])
def test_memory_links_and_throttling_lie_within_their_spread(
    seeds: range, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean errors stay below half the spread, or 0.8 of it for the latency; nine of ten lie within two spreads."""
    errors: dict[str, list[float]] = defaultdict(list)
    for seed in seeds:
        truth = machine(seed)
        calibration = calibrate(monkeypatch, truth, ["memory", "links", "heat"], seed=seed, ranks=ranks, seconds=60)
        assert calibration.unmeasured == [] and calibration.same_host.copy_gb_s is not None
        link = calibration.same_host
        channel = min(truth.channel_gb_s, truth.hop_gb_s / (32 // ranks))
        constants: dict[str, tuple[Value, float]] = {
            "memory": (calibration.memory_gb_s, truth.memory_gb_s),
            "reorder": (calibration.reorder_gb_s, truth.reorder_gb_s),
            "throttling": (calibration.throttling, truth.throttling),
            "latency": (link.latency_us, truth.latency_ns / 1e3),
            "channel": (link.channel_gb_s, channel), "hop": (link.hop_gb_s, truth.hop_gb_s),
            "total": (link.total_gb_s, truth.total_gb_s), "copy": (calibration.same_host.copy_gb_s, truth.copy_gb_s),
            "contention": (calibration.contention, truth.contention),
            **{name: (value, truth.collective_gb_s) for name, value in link.collective_gb_s.items()},
        }  # fmt: skip
        assert constants.keys() == MAX_SPREADS.keys()
        for name, (value, true_value) in constants.items():
            assert value.origin == "measured" and value.spread <= MAX_SPREADS[name], (name, value)
            errors[name].append(math.log(value.value / true_value) / value.spread)
    for name, constant_errors in errors.items():
        mean_error = fmean(constant_errors)
        assert abs(mean_error) < (0.8 if name == "latency" else 0.5), (name, mean_error)
        assert share_within(constant_errors, 2) >= 0.9, (name, constant_errors)


@tiered("ranks", [1, 2, 4], [2])
def test_host_times_lie_within_their_spread(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of kinds and of whole passes, in which the kinds' errors cancel; hosts differ by 9.5 %."""
    kind_errors: list[float] = []
    pass_errors: list[float] = []
    for seed in ALL_SEEDS:
        truth = machine(seed)
        calibration = calibrate(monkeypatch, truth, ["host"], seed=seed, ranks=ranks, seconds=5)
        host, us = calibration.host, times_us(calibration, calibration.kernel("cudnn"))
        assert host.pass_spread is not None and 0.05 <= host.pass_spread < 0.15
        kind_errors += [
            math.log(us[name] / true_us) / getattr(host, name).spread for name, true_us in truth.host_us.items()
        ]
        for host_pass in calibration.passes:
            pass_us, true_pass_us = (
                sum(kind_us[kind] * count for kind, count in host_pass.kinds.items()) for kind_us in (us, truth.host_us)
            )
            pass_errors.append(math.log(pass_us / true_pass_us) / host.pass_spread)
        measured = {kind for host_pass in calibration.passes for kind, count in host_pass.kinds.items() if count}
        for name in TYPICAL_US:
            assert getattr(host, name).origin == ("measured" if name in measured else "assumed"), name
    assert 0.55 < share_within(kind_errors, 1) < 0.85 and share_within(kind_errors, 2) > 0.9
    assert 0.6 < share_within(pass_errors, 1) < 0.97 and share_within(pass_errors, 2) > 0.95


# --- failures -----------------------------------------------------------------------------------------


def too_large(phase: str, q: int, kv: int) -> BaseException | None:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB") if q * kv > 2**30 else None


def no_backward(phase: str, q: int, kv: int) -> BaseException | None:
    return RuntimeError("no kernel image is available") if phase == "backward" else None


def test_a_size_without_memory_is_named_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = calibrate(monkeypatch, Truth(), ["kernels", "memory"], kernel_error=too_large)
    ops = [block for _, block, _ in kernel_cases(["cudnn"])]
    large = [op for op in ops if op.q * op.kv > 2**30]
    assert len(calibration.kernel("cudnn").samples) == len(ops) - len(large) > 0
    failures = calibration.unmeasured
    assert len(failures) == len(large) and all("out of memory" in line for line in failures)
    assert "cudnn forward 65536 x 65536, 40 heads, 40 kv, causal=True: " in "\n".join(failures)
    estimate = Curves(calibration, "cudnn").estimate(block_of("forward", 16384, 16384, 40, 40, causal=True))
    true_ns = Truth().attention_ns("forward", 16384, 16384, 40, 40, causal=True) * 1.1
    assert estimate.ns == pytest.approx(true_ns, rel=0.02)


def test_phase_that_fails_has_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = calibrate(monkeypatch, Truth(), ["kernels"], kernel_error=no_backward)
    assert {sample.phase for sample in calibration.kernel("cudnn").samples} == {"forward"}
    with pytest.raises(UsageError, match="cudnn backward': nothing measured of this phase"):
        Curves(calibration, "cudnn").estimate(block_of("backward", 4096, 4096, 40, 40, causal=True))


def test_calibrate_measures_the_rest_when_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other parts are measured, and every failure is listed."""
    calibration = calibrate(
        monkeypatch, Truth(), ["kernels", "memory", "heat"], kernel_error=lambda *_: RuntimeError("no kernel image")
    )
    assert calibration.memory_gb_s.origin == "measured" and calibration.throttling.origin == "assumed"
    assert calibration.unmeasured[0] == "cudnn, to warm the GPU: RuntimeError: no kernel image"
    assert calibration.unmeasured[-1] == "heat: RuntimeError: no kernel image"
    assert all(not kernel.samples for kernel in calibration.kernels)
    text = calibration_text(calibration, TextStyle())
    assert "not measured: heat: RuntimeError: no kernel image" in text


def test_calibrate_warms_up_with_the_next_kernel_if_the_first_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel warms up the GPU, so the samples are a tenth slower than on a cool GPU."""
    calls = iter(range(10**9))

    def first_fails(phase: str, q: int, kv: int) -> BaseException | None:
        return RuntimeError("no kernel image") if next(calls) == 0 else None

    calibration = calibrate(
        monkeypatch, Truth(), ["kernels"], kernels=["cudnn", "flash-attn"], seconds=120, kernel_error=first_fails
    )
    assert calibration.unmeasured[0] == "cudnn, to warm the GPU: RuntimeError: no kernel image"
    samples = [sample for sample in calibration.kernel("flash-attn").samples if sample.pairs is None]
    ratios = [
        sample.ns
        / Truth().attention_ns(sample.phase, sample.q, sample.kv, sample.heads, sample.kv_heads, causal=sample.causal)
        for sample in samples
    ]
    assert len(ratios) > 5 and all(1.05 < ratio < 1.15 for ratio in ratios)


def test_calibrate_refuses_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no attention kernel runs on this GPU"):
        calibrate(monkeypatch, Truth(), ["kernels"], kernels=[])


def test_interrupted_calibration_keeps_saved_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are saved every 30 s; those of the first three saves can be read and used for estimates."""
    saved: list[bytes] = []
    calls = iter(range(10**9))

    def interrupted(phase: str, q: int, kv: int) -> BaseException | None:
        return KeyboardInterrupt() if len(saved) == 3 and next(calls) > 200 else None

    with pytest.raises(KeyboardInterrupt):
        calibrate(
            monkeypatch, Truth(), ["kernels", "memory"], kernel_error=interrupted,
            save=lambda calibration: saved.append(calibration_json(calibration)),
        )  # fmt: skip
    counts = [len(parse_calibration(data, "saved").kernel("cudnn").samples) for data in saved]
    assert len(counts) == 3 and 0 < counts[0] < counts[1] < counts[2] < len(kernel_cases(["cudnn"]))
    estimate = Curves(parse_calibration(saved[-1], "saved"), "cudnn").estimate(
        block_of("forward", 8192, 8192, 40, 40, causal=True)
    )
    true_ns = Truth().attention_ns("forward", 8192, 8192, 40, 40, causal=True) * 1.1
    assert estimate.ns == pytest.approx(true_ns, rel=0.05)


@pytest.mark.parametrize("seconds", [5.0, 20.0])
def test_shapes_skipped_for_lack_of_time_are_counted(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming up takes at most a fifth of the kernels' time, so some shapes are measured."""
    calibration = calibrate(monkeypatch, Truth(), ["kernels"], seconds=seconds)
    measured, total = len(calibration.kernel("cudnn").samples), len(kernel_cases(["cudnn"]))
    assert 3 <= measured < total
    left = total - measured
    assert calibration.unmeasured == [f"kernels: {left} of {total} shapes, for lack of time: give more --seconds"]


def test_links_without_time_or_without_a_second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    base = assumed_calibration("simulated", "simulated", 132, 80 << 30)
    alone = calibrate(monkeypatch, Truth(), ["links"], base=base)
    assert alone.same_host == base.same_host and alone.contention == base.contention
    assert alone.unmeasured == [f"{part}: needs two GPUs" for part in ("links", "contention", "copied hops")]
    late = calibrate(monkeypatch, Truth(), ["links"], ranks=2, seconds=0)
    assert "links: UsageError: no time was left" in late.unmeasured
    # A later calibration that measures the links drops their failures and keeps the others.
    again = calibrate(
        monkeypatch, Truth(), ["links"], ranks=2, base=replace(late, unmeasured=[*late.unmeasured, "x: y"])
    )
    assert again.unmeasured == ["x: y"] and again.same_host.hop_gb_s.origin == "measured"


def test_calibration_records_the_current_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is this machine's, also on another machine's base; unmeasured kernels of the base stay."""
    base: Calibration = read_calibration("h200")
    calibration = calibrate(monkeypatch, Truth(), ["memory"], base=base)
    assert calibration.environment["torch"] == torch.__version__ != base.environment["torch"]
    assert calibration.environment["nccl"] == calibration.nccl.version == "2.28.9"
    assert calibration.kernels == base.kernels and calibration.transfer_margin == {}


def test_unwritable_calibration_output_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before any measurement, so no GPU is looked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the file comes first"))
    missing = tmp_path / "missing" / "machine.json"
    assert cli.run(["calibrate", "-o", str(missing)]) == 2
    assert capsys.readouterr().err == f"ringprof: {missing}: cannot be written: No such file or directory\n"


@pytest.mark.parametrize(("ranks", "clock_mhz"), [(1, 1500), (2, None)])
def test_a_matrix_product_is_measured_on_a_hot_device(
    monkeypatch: pytest.MonkeyPatch, ranks: int, clock_mhz: int | None
) -> None:
    """The rate is that of the true one, slowed by all of the throttling, with the clock where the driver tells it."""
    truth = Truth(matmul_flops_per_ns=700e3, throttling=0.12, clock_mhz=clock_mhz)
    calibration = calibrate(monkeypatch, truth, ["matmul"], ranks=ranks, seconds=5)
    assert calibration.matmul_tflops is not None and calibration.matmul_tflops.origin == "measured"
    assert calibration.matmul_tflops.value == pytest.approx(700 / 1.12, rel=0.01)
    assert calibration.matmul_clock_mhz == clock_mhz
    assert parse_calibration(calibration_json(calibration), "saved") == calibration
    assert "matmul_tflops" in calibration_text(calibration, TextStyle())
